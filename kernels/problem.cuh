// One attention problem as every kernel takes it, which keys a query sees, and what a product becomes before softmax.
//
// `Problem` is passed by value; kernels/src/device/cuda/problem.rs has the same fields in the same order. Tensors are dense:
// q, o [B, Hq, Lq, D]; k, v [B, Hkv, Lk, D], none where they lie in pages (pages.cuh); lse [B, Hq, Lq], natural
// logarithm.
#pragma once
#include "ptx.cuh"

struct Problem {
    const void *q, *k, *v;
    void *o;
    float *lse;
    float *scores;   // naive: [B, Hq, Lq, Lk]
    float *partials; // decode: outputs and (maximum, sum) of each split
    int batch, q_heads, kv_heads, q_len, kv_len;
    int causal;      // query i sees keys j <= i + len - q_len
    int window;      // a query sees its own key and the window - 1 before it; 0: no window
    int splits, split_keys;
    float scale;
    float softcap;   // cap * tanh(logit / cap); 0: none
    int unused;      // so that no byte of the struct is padding
};

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

DEVICE float minus_infinity() { return bits_to_float(0xff800000u); }
DEVICE constexpr int least(int a, int b) { return a < b ? a : b; }
DEVICE constexpr int most(int a, int b) { return a > b ? a : b; }

// Keys first..end.
struct Span {
    int first, end;
};

// The keys that query `i` sees of a list of `len`: aligned at the bottom right, as Params::visible in the crate.
DEVICE Span visible(const Problem &p, int i, int len) {
    if (!p.causal && !p.window) return {0, len};
    int own_end = i + 1 + len - p.q_len;
    int end = most(0, least(own_end, len));
    int first = p.window ? least(most(0, own_end - p.window), end) : 0;
    return {first, end};
}

// cap * tanh(x / cap), by exp2: absolute error below 1e-6 cap, which is what a logit needs.
DEVICE float soft_cap(float x, float cap) {
    float e = exp2_fast(x * (2.0f * LOG2_E / cap));
    return cap - 2.0f * cap * reciprocal(1.0f + e);
}

// Element `index` of a tensor, as f32.
template <int Element> DEVICE float element(const void *tensor, long long index) {
    if constexpr (Element == F32) return static_cast<const float *>(tensor)[index];
    u16 bits = static_cast<const u16 *>(tensor)[index];
    if constexpr (Element == BF16) return bits_to_float(u32(bits) << 16);
    return f16_to_float(bits);
}

template <int Element> DEVICE void store(void *tensor, long long index, float value) {
    if constexpr (Element == F32)
        static_cast<float *>(tensor)[index] = value;
    else
        static_cast<u16 *>(tensor)[index] = u16(pack<Element>(value, 0.0f));
}
