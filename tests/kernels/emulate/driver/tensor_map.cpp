// Tensor maps: the rules of cuTensorMapEncodeTiled (CUDA Driver API, "Tensor Map Object Management"), and the fields
// where an emulated TMA finds them (../abi.hpp). Packed and interleaved layouts are not there: nothing uses them.
#include "driver.hpp"

#include <cstring>

namespace {

// By CUtensorMapDataType: u8, u16, u32, i32, u64, i64, f16, f32, f64, bf16, f32 ftz, tf32, tf32 ftz.
constexpr uint8_t ELEMENT_BYTES[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};

} // namespace

API cuTensorMapEncodeTiled(void *target, int type, uint32_t rank, void *address, const uint64_t *lengths,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *element_strides, int interleave,
                           int swizzle, int promotion, int fill) {
    BEGIN(initialised);
    if (Model::get().major < 9) return NOT_SUPPORTED;
    const char *wrong = nullptr;
    auto expect = [&](bool good, const char *rule) {
        if (!good && !wrong) wrong = rule;
    };
    expect(type >= 0 && type < int(sizeof ELEMENT_BYTES), "the element type is a plain one");
    expect(rank >= 1 && rank <= 5, "the rank is 1 to 5");
    expect(interleave == 0, "nothing is interleaved");
    expect(swizzle >= 0 && swizzle <= 3, "the swizzle is none, 32, 64 or 128 bytes");
    expect(promotion >= 0 && promotion <= 3 && fill >= 0 && fill <= 1, "promotion and fill are known values");
    expect(reinterpret_cast<uint64_t>(address) % 16 == 0, "the address is a multiple of 16");
    expect(reinterpret_cast<uint64_t>(target) % 64 == 0, "the map lies at a multiple of 64");
    machine::TensorMap map = {};
    if (!wrong) {
        map.address = reinterpret_cast<uint64_t>(address);
        map.type = uint8_t(type), map.rank = uint8_t(rank), map.swizzle = uint8_t(swizzle);
        map.promotion = uint8_t(promotion), map.fill = uint8_t(fill), map.element_bytes = ELEMENT_BYTES[type];
        memcpy(map.mark, "tile", 4);
        for (uint32_t i = 0; i < rank; i++) {
            expect(lengths[i] >= 1 && lengths[i] <= uint64_t(1) << 32, "lengths are 1 to 2^32");
            expect(box[i] >= 1 && box[i] <= 256, "a side of the box is 1 to 256 elements");
            expect(element_strides[i] >= 1 && element_strides[i] <= 8, "element strides are 1 to 8");
            map.lengths[i] = lengths[i], map.box[i] = uint16_t(box[i]), map.element_strides[i] = uint8_t(element_strides[i]);
            if (i == 0) continue;
            expect(strides[i - 1] % 16 == 0 && strides[i - 1] < uint64_t(1) << 40, "strides are multiples of 16 below 2^40");
            map.strides[i - 1] = strides[i - 1];
        }
        const uint32_t row_bytes = box[0] * map.element_bytes;
        expect(row_bytes % 16 == 0, "the box's innermost side is a multiple of 16 bytes");
        expect(swizzle == 0 || row_bytes <= 16u << swizzle, "the box's innermost side is no longer than the swizzle");
    }
    if (wrong) {
        COMPLAIN("cuTensorMapEncodeTiled: a rule is broken: %s", wrong);
        return INVALID_VALUE;
    }
    memcpy(target, &map, sizeof map);
    return SUCCESS;
}
