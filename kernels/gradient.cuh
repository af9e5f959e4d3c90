// What backward passes share: their argument, delta, and the step from scores to the gradients of scores.
//
// With P = exp(logit - lse) recomputed from the saved lse, dP = do v^T and delta = rowsum(do * o), the gradient of the
// inner product is dS = P * (dP - delta) * scale, times 1 - (logit / cap)^2 under a soft-cap; then dv = P^T do,
// dq = dS k, dk = dS^T q (FlashAttention-2, arXiv 2307.08691, section 3.1). `Gradients` is passed by value after
// `Problem`, whose o and lse are read; kernels/src/device/cuda/gradients.rs has the same fields in the same order.
#pragma once
#include "problem.cuh"

struct Gradients {
    const void *grad_o;            // [B, Hq, Lq, D]
    void *grad_q, *grad_k, *grad_v; // as q, k, v
    float *delta;                  // [B, Hq, Lq]
    float *sums;                   // tiled with atomics: dq before it is rounded, in whole tiles
};

// The queries that see any of the keys first..end: what `visible` says, the other way round.
DEVICE Span viewers(const Problem &p, int first, int end) {
    if (!p.causal && !p.window) return {0, p.q_len};
    const int shift = p.q_len - p.kv_len; // from a key to the query whose own it is
    const int from = least(most(0, first + shift), p.q_len);
    const int to = p.window ? most(from, least(end - 1 + p.window + shift, p.q_len)) : p.q_len;
    return {from, to};
}

// How a row's log-sum-exp is used: in units of log2, and so that a row which sees nothing has probabilities of zero.
DEVICE float shift_of(float lse) { return lse == minus_infinity() ? -minus_infinity() : lse * LOG2_E; }

// The probability that an inner product becomes, and the slope of its logit under the soft-cap.
template <bool Masked, bool Capped> DEVICE float probability(const Problem &p, float shift, bool seen, float product, float &slope) {
    float exponent;
    if constexpr (Capped) {
        const float logit = soft_cap(product * p.scale, p.softcap), bounded = logit * (1.0f / p.softcap);
        slope = 1.0f - bounded * bounded;
        exponent = fused(logit, LOG2_E, -shift);
    } else {
        slope = 1.0f;
        exponent = fused(product, p.scale * LOG2_E, -shift);
    }
    const float x = exp2_fast(exponent);
    return Masked && !seen ? 0.0f : x;
}

// In place: `s` from an inner product to a probability, `ds` from dP to dS, which still lacks the factor `scale`.
template <bool Masked, bool Capped> DEVICE void score_gradient(const Problem &p, float shift, float delta, bool seen, float &s, float &ds) {
    float slope;
    s = probability<Masked, Capped>(p, shift, seen, s, slope);
    ds = s * (ds - delta) * slope;
}

// The inner product of row `row` of do and of o, in every lane of the warp.
DEVICE float delta_of(const Problem &p, const Gradients &g, long long row) {
    const int lane = threadIdx.x % 32;
    float sum = 0.0f;
    for (int d = lane; d < HEAD_DIM; d += 32)
        sum = fused(element<ELEMENT>(p.o, row * HEAD_DIM + d), element<ELEMENT>(g.grad_o, row * HEAD_DIM + d), sum);
    for (int mask = 16; mask; mask /= 2) sum += shuffle_xor(sum, mask);
    return sum;
}
