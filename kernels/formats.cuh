// How the rows of keys and of values lie in memory: elements, or codes of a byte or of four bits (kernels/src/format/).
//
// A row of codes becomes elements on its way to a product, so that no copy of the cache is ever widened: its bytes are
// copied to shared memory as they are, and from there widened into a tile. What a row of codes stands for, and how one is
// made, is the same to the bit as on the CPU (int8.rs, fp8.rs, ints.rs).
//
// Compile with -DK_FORMAT=PLAIN|INT8|E4M3|E5M2|INT4 and for INT4 -DK_GROUP=elements that share a scale -DK_ZERO=whether
// they have a minimum too; V_FORMAT, V_GROUP and V_ZERO likewise. What is not given is PLAIN.
#pragma once
#include "problem.cuh"

#define PLAIN 0
#define INT8 1
#define E4M3 2
#define E5M2 3
#define INT4 4

#ifndef K_FORMAT
#define K_FORMAT PLAIN
#endif
#ifndef K_GROUP
#define K_GROUP 32
#define K_ZERO 0
#endif
#ifndef V_FORMAT
#define V_FORMAT PLAIN
#endif
#ifndef V_GROUP
#define V_GROUP 32
#define V_ZERO 0
#endif

constexpr int HEAD_BYTES = HEAD_DIM * (ELEMENT == F32 ? 4 : 2); // a row of elements

// Byte `i` of a word as a float, less 128: it becomes the last bits of 2^23's mantissa.
DEVICE float whole(u32 word, int i) { return bits_to_float(choose_bytes(word, 0x4b000000u, 0x7440u | i)) - 8388736.0f; }
// The nearest whole number, halves to even, of numbers below 2^22.
DEVICE float nearest_even(float x) { return (x + 12582912.0f) - 12582912.0f; }
// A whole number from -128 to 127 as a byte; 0 of what is no number.
DEVICE u32 byte_of(float whole) { return whole == whole ? float_to_bits(whole + 12582912.0f) & 255 : 0; }
DEVICE float between(float x, float least, float most) { return x < least ? least : x > most ? most : x; }

// The larger of a magnitude and that of a number; NaN if one is there, since the bits of magnitudes are ordered as these are.
DEVICE float larger_magnitude(float size, float x) {
    const float other = bits_to_float(float_to_bits(x) & 0x7fffffffu);
    return float_to_bits(other) > float_to_bits(size) ? other : size;
}
// The largest of a warp's.
DEVICE float largest_magnitude(float size) {
    for (int mask = 16; mask; mask /= 2) size = larger_magnitude(size, shuffle_xor(size, mask));
    return size;
}

template <int Code, int Group, bool Zero> struct Format {
    static constexpr int CODE = Code, GROUP = Group;
    static constexpr bool CODED = Code != PLAIN, ZERO = Zero;
    static constexpr int WORDS = (HEAD_DIM + 3) / 4, SCALE_BYTES = Code == INT8 ? 4 : 0;
    static constexpr int GROUP_BYTES = Group / 2 + (Zero ? 4 : 2);
    static constexpr int BYTES = Code == PLAIN  ? HEAD_BYTES
                                 : Code == INT4 ? HEAD_DIM / Group * GROUP_BYTES
                                                : SCALE_BYTES + 4 * WORDS;
    static_assert(Code != INT4 || HEAD_DIM % Group == 0, "a row is whole groups");
    // Whether `decode` takes the codes for operands of tensor cores as they lie (operands.cuh): each lane has whole words.
    // Probabilities times the scale of a row of int8 need the range of bf16, which is too coarse for a pass of f16.
    static constexpr bool IN_PLACE = CODED && ELEMENT != F32 && HEAD_DIM % 64 == 0 && !(Code == INT8 && ELEMENT == F16);
    // Whether it then reads chunks of 16 bytes, which lie where several lanes find them in other banks.
    static constexpr bool SWIZZLED = IN_PLACE && (Code == E4M3 || Code == E5M2);

    // Bytes from one list to the next of tensors of rows. Rows of codes, every eight of which begin at a multiple of 16
    // bytes, are copied 16 bytes at a time.
    DEVICE static long long list_bytes(int rows) {
        const long long bytes = (long long)rows * BYTES;
        return CODED ? (bytes + 15) / 16 * 16 : bytes;
    }

#ifdef HAS_E4M3
    static constexpr float FACTOR = 1.0f;
#else
    static constexpr float FACTOR = Code == E4M3 ? 256.0f : 1.0f;
#endif

    // Two 8-bit floats, the first in the lowest byte, as two f16, but for `FACTOR`.
    DEVICE static u32 to_f16(u32 both) {
#ifdef HAS_E4M3
        if constexpr (Code == E4M3) return e4m3_to_f16(u16(both));
#endif
        const u32 upper = choose_bytes(both, 0, 0x1404u); // each in the upper byte of a half: E5M2 is that
        if constexpr (Code == E5M2) return upper;
        // Shifted by the bit that an f16's exponent has more, E4M3's is 2^8 times smaller. What was NaN gets the upper bit
        // of the exponent.
        const u32 magnitude = upper & 0x7f007f00u, carry = magnitude + 0x01000100u;
        return (upper & 0x80008000u) | (magnitude | (carry & 0x80008000u)) >> 1;
    }

    // The code of the nearest 8-bit float.
    DEVICE static u32 to_byte(float x) {
        constexpr int MANTISSA = Code == E4M3 ? 3 : 2, LEAST = Code == E4M3 ? -6 : -14, MOST = Code == E4M3 ? 0x7e : 0x7b;
        const u32 bits = float_to_bits(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffffu;
        if (magnitude >= 0x7f800000u) return sign | (magnitude > 0x7f800000u || Code == E4M3 ? 0x7f : MOST + 1);
        const int exponent = most(int(magnitude >> 23) - 127, LEAST);
        // Steps of a power of two are counted from its own first code; rounded up to the next, they carry.
        const float steps = bits_to_float(magnitude) * bits_to_float(u32(127 + MANTISSA - exponent) << 23);
        return sign | u32(least(((exponent - LEAST) << MANTISSA) + int(nearest_even(steps)), MOST));
    }

    // Four codes of a word, the first in the lowest byte.
    DEVICE static void of_word(u32 word, float scale, float *x) {
        if constexpr (Code == INT8) {
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] = scale * whole(word ^ 0x80808080u, i);
        } else {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 both = to_f16(word >> 16 * i);
                x[2 * i] = f16_to_float(u16(both)) * FACTOR, x[2 * i + 1] = f16_to_float(u16(both >> 16)) * FACTOR;
            }
        }
    }

    // The elements from `column` on, a multiple of `Count`, which is 4 or 8: zeros behind the last.
    template <int Count> DEVICE static void read(const unsigned char *row, int column, float (&x)[Count]) {
        static_assert(CODED, "elements are copied");
        if constexpr (Code == INT4) {
            // Of 32 elements byte i has those at i and i + 16.
            const unsigned char *const block = row + column / Group * GROUP_BYTES;
            const u16 *const behind = reinterpret_cast<const u16 *>(block + Group / 2);
            const float scale = f16_to_float(behind[0]), minimum = Zero ? f16_to_float(behind[Zero]) : 0.0f;
            const u16 *const codes = reinterpret_cast<const u16 *>(block + column % Group / 32 * 16 + column % 16);
            const int shift = column / 16 % 2 * 4;
#pragma unroll
            for (int i = 0; i < Count; i++) {
                const u32 four = (u32(codes[i / 4 * 2]) | u32(codes[i / 4 * 2 + 1]) << 16) >> shift & 0x0f0f0f0fu;
                // 128 and the code, which become the upper bits of a mantissa. Their product with an f16 is exact.
                const float code = bits_to_float(choose_bytes(four, 0x43000000u, 0x7044u | i % 4 << 8));
                x[i] = Zero ? fused(scale, code - 128.0f, minimum) : fused(scale, code, -136.0f * scale);
            }
        } else {
            const u32 *const words = reinterpret_cast<const u32 *>(row);
            const float scale = Code == INT8 ? bits_to_float(words[0]) : 1.0f;
#pragma unroll
            for (int i = 0; i < Count / 4; i++) {
                const int at = column / 4 + i;
                of_word(HEAD_DIM % Count == 0 || at < WORDS ? words[SCALE_BYTES / 4 + at] : 0, scale, x + 4 * i);
            }
        }
    }

    // One element.
    DEVICE static float at(const unsigned char *row, int d) {
        if constexpr (Code == INT8) {
            return *reinterpret_cast<const float *>(row) * float(static_cast<signed char>(row[SCALE_BYTES + d]));
        } else if constexpr (Code == INT4) {
            const unsigned char *const block = row + d / Group * GROUP_BYTES;
            const u16 *const behind = reinterpret_cast<const u16 *>(block + Group / 2);
            const int code = block[d % Group / 32 * 16 + d % 16] >> d / 16 % 2 * 4 & 15;
            const float scale = f16_to_float(behind[0]);
            return Zero ? fused(scale, float(code), f16_to_float(behind[Zero])) : scale * float(code - 8);
        } else if constexpr (CODED) {
            return f16_to_float(u16(to_f16(row[d]))) * FACTOR;
        } else {
            return element<ELEMENT>(row, d);
        }
    }

    // A warp writes a row; `of(d)` is element d of it.
    template <class Of> DEVICE static void write(unsigned char *row, Of of) {
        static_assert(CODED, "elements are copied");
        const int lane = threadIdx.x % 32;
        if constexpr (Code == INT4) {
            for (int first = 0; first < HEAD_DIM; first += Group)
                write_group(row + first / Group * GROUP_BYTES, [&](int i) { return of(first + i); });
        } else {
            float scale = 1.0f;
            if constexpr (Code == INT8) {
                float most = 0.0f;
#pragma unroll 4 // eight at once spill at D 256 on sm_100
                for (int d = lane; d < HEAD_DIM; d += 32) most = larger_magnitude(most, of(d));
                scale = largest_magnitude(most) / 127.0f;
                if (lane == 0) *reinterpret_cast<float *>(row) = scale;
                if (scale == 0.0f) scale = 1.0f;
            }
#pragma unroll 4
            for (int d = lane; d < 4 * WORDS; d += 32) {
                u32 code = 0;
                if (d < HEAD_DIM) code = Code == INT8 ? byte_of(nearest_even(of(d) / scale)) : to_byte(of(d));
                row[SCALE_BYTES + d] = (unsigned char)code;
            }
        }
    }

    // A warp writes a group of codes of four bits; of what is no number a code is 0.
    template <class Of> DEVICE static void write_group(unsigned char *block, Of of) {
        constexpr int EACH = Group / 32;
        const int lane = threadIdx.x % 32;
        u16 *const behind = reinterpret_cast<u16 *>(block + Group / 2);
        float x[EACH], largest = 0.0f, low = bits_to_float(0x7f800000u), high = minus_infinity();
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            x[i] = of(lane + 32 * i);
            largest = larger_magnitude(largest, x[i]);
            low = -larger(-low, -x[i]), high = larger(high, x[i]);
        }
        largest = largest_magnitude(largest);
        float minimum = 0.0f, range = largest, steps = 7.0f;
        if constexpr (Zero) {
            for (int mask = 16; mask; mask /= 2)
                low = -larger(-low, -shuffle_xor(low, mask)), high = larger(high, shuffle_xor(high, mask));
            // The minimum passes a NaN on.
            minimum = rounded(float_to_bits(largest) < 0x7f800000u ? low : bits_to_float(0x7fc00000u));
            range = high - minimum, steps = 15.0f;
        }
        const float scale = rounded(range / steps);
        if (lane == 0) {
            behind[0] = u16(pack<F16>(scale, 0.0f));
            if constexpr (Zero) behind[Zero] = u16(pack<F16>(minimum, 0.0f));
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            // 0 / 0 is no number, and becomes 0.
            const float step = nearest_even(between((x[i] - minimum) / scale, Zero ? 0.0f : -7.0f, steps));
            const float code = (step == step ? step : 0.0f) + (Zero ? 0.0f : 8.0f);
            const float of_upper = shuffle_xor(code, 16);
            if (lane < 16) block[16 * i + lane] = (unsigned char)(u32(int(code)) | u32(int(of_upper)) << 4);
        }
    }

    // As an f16 has it.
    DEVICE static float rounded(float x) { return f16_to_float(u16(pack<F16>(x, 0.0f))); }
};

using KeyFormat = Format<K_FORMAT, K_GROUP, K_ZERO>;
using ValueFormat = Format<V_FORMAT, V_GROUP, V_ZERO>;
