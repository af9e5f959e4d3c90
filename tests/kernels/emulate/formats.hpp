// Rows of elements or of codes as kernels/formats.cuh describes them, made and read plainly on the host.
#pragma once
#include "formats.cuh"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace plainly {

inline float half(float x) { return machine::from_f16(machine::round_to<F16>(x)); }

// What an 8-bit float is.
inline double of_byte(int code, int mantissa) {
    const int exponent_bits = 7 - mantissa, bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = code >> mantissa & ((1 << exponent_bits) - 1), fraction = code & ((1 << mantissa) - 1);
    double x = exponent ? std::ldexp(1.0 + fraction / double(1 << mantissa), exponent - bias)
                        : std::ldexp(fraction / double(1 << mantissa), 1 - bias);
    if (mantissa == 3 ? (code & 0x7f) == 0x7f : (code & 0x7f) > 0x7c) x = NAN;
    if (mantissa == 2 && (code & 0x7f) == 0x7c) x = INFINITY;
    return code & 0x80 ? -x : x;
}

// The nearest of them, of two as near the even one.
inline int to_byte(float x, int mantissa) {
    int best = 0;
    for (int code = 0; code < 128; code++) {
        const double at = of_byte(code, mantissa), now = of_byte(best, mantissa);
        if (!std::isfinite(at)) continue;
        const double gap = std::fabs(at - std::fabs(double(x))), least = std::fabs(now - std::fabs(double(x)));
        if (gap < least || (gap == least && code % 2 == 0)) best = code;
    }
    return best | (std::signbit(x) ? 0x80 : 0);
}

// As products have what codes stand for: elements, as they lie in tiles. `decode` may take codes in place: then it is exact,
// or an f16 where there are groups.
template <class Format> double multiplied(double x) {
#ifdef DECODES
    if constexpr (Format::IN_PLACE) return Format::CODE == INT4 ? double(half(float(x))) : x;
#endif
    if constexpr (ELEMENT == F32) return float(x);
    else return machine::widen<ELEMENT>(machine::round_to<ELEMENT>(float(x)));
}

// A row of `HEAD_DIM` numbers, each of which an element can be, as bytes.
template <int Code, int Group, bool Zero> std::vector<unsigned char> encode(Format<Code, Group, Zero>, const float *row) {
    std::vector<unsigned char> to(Format<Code, Group, Zero>::BYTES, 0);
    if constexpr (Code == PLAIN) {
        for (int d = 0; d < HEAD_DIM; d++)
            if constexpr (ELEMENT == F32) {
                memcpy(&to[4 * d], row + d, 4);
            } else {
                const u16 bits = machine::round_to<ELEMENT>(row[d]);
                memcpy(&to[2 * d], &bits, 2);
            }
    } else if constexpr (Code == INT8) {
        float most = 0;
        for (int d = 0; d < HEAD_DIM; d++) most = std::max(most, std::fabs(row[d]));
        const float scale = most / 127;
        memcpy(to.data(), &scale, 4);
        for (int d = 0; d < HEAD_DIM; d++) to[4 + d] = (unsigned char)(scale > 0 ? int(std::nearbyint(row[d] / scale)) : 0);
    } else if constexpr (Code == INT4) {
        for (int first = 0; first < HEAD_DIM; first += Group) {
            unsigned char *const block = &to[first / Group * (Group / 2 + (Zero ? 4 : 2))];
            const float *const x = row + first, least = *std::min_element(x, x + Group), most = *std::max_element(x, x + Group);
            const float minimum = Zero ? half(least) : 0, scale = half(Zero ? (most - minimum) / 15 : std::max(most, -least) / 7);
            const u16 kept[] = {machine::round_to<F16>(scale), machine::round_to<F16>(minimum)};
            memcpy(block + Group / 2, kept, Zero ? 4 : 2);
            for (int i = 0; i < Group; i++) {
                const float step = scale > 0 ? std::nearbyint((x[i] - minimum) / scale) : 0;
                const int code = int(std::min(std::max(step, Zero ? 0.0f : -7.0f), Zero ? 15.0f : 7.0f)) + (Zero ? 0 : 8);
                block[i / 32 * 16 + i % 16] |= (unsigned char)(code << (i / 16 % 2 * 4));
            }
        }
    } else {
        for (int d = 0; d < HEAD_DIM; d++) to[d] = (unsigned char)to_byte(row[d], Code == E4M3 ? 3 : 2);
    }
    return to;
}

// Element `d` of a row.
template <int Code, int Group, bool Zero> double decode(Format<Code, Group, Zero>, const unsigned char *row, int d) {
    if constexpr (Code == PLAIN) {
        if constexpr (ELEMENT == F32) {
            float x;
            memcpy(&x, row + 4 * d, 4);
            return x;
        } else {
            u16 bits;
            memcpy(&bits, row + 2 * d, 2);
            return machine::widen<ELEMENT>(bits);
        }
    } else if constexpr (Code == INT8) {
        float scale;
        memcpy(&scale, row, 4);
        return double(scale) * (signed char)row[4 + d];
    } else if constexpr (Code == INT4) {
        const unsigned char *const block = row + d / Group * (Group / 2 + (Zero ? 4 : 2));
        u16 kept[2] = {0, 0};
        memcpy(kept, block + Group / 2, Zero ? 4 : 2);
        const int i = d % Group, code = block[i / 32 * 16 + i % 16] >> (i / 16 % 2 * 4) & 15;
        return double(machine::from_f16(kept[0])) * (Zero ? code : code - 8) + (Zero ? machine::from_f16(kept[1]) : 0.0);
    } else {
        return of_byte(row[d], Code == E4M3 ? 3 : 2);
    }
}

} // namespace plainly
