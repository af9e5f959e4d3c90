// Tensor maps for kernels that run.py runs alone, as kernels/src/device/cuda/tensor_map.rs makes them.
#pragma once

namespace {

// Of `lists` matrices of `rows` rows of HEAD_DIM elements, in boxes of `box_rows` rows and 64 columns.
TensorMap rows_of(const void *data, int lists, int rows, int box_rows) {
    machine::TensorMap map = {};
    map.address = reinterpret_cast<uint64_t>(data);
    map.rank = 3, map.swizzle = 3, map.element_bytes = 2;
    map.lengths[0] = HEAD_DIM, map.lengths[1] = uint64_t(rows), map.lengths[2] = uint64_t(lists);
    map.strides[0] = 2 * HEAD_DIM, map.strides[1] = uint64_t(rows) * 2 * HEAD_DIM;
    map.box[0] = 64, map.box[1] = uint16_t(box_rows), map.box[2] = 1;
    memcpy(map.mark, "tile", 4);
    TensorMap opaque;
    memcpy(&opaque, &map, sizeof opaque);
    return opaque;
}

} // namespace
