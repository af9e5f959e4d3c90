// dq where blocks that own keys add it up by atomics: sums in f32 in memory, cleared before and rounded afterwards.
//
// A head has whole tiles of `Queries` rows; a tile is strips of 16 rows, a strip fragments of 16x8 sums, one after another
// in the order of the columns, each as add_fragment of ptx.cuh has it. `Depth` is the head dim in whole products.
#pragma once
#include "gradient.cuh"

// Whole tiles of queries of a head.
template <int Queries> DEVICE int query_tiles(const Problem &p) { return (p.q_len + Queries - 1) / Queries; }

// A warp's row of all heads' whole tiles: its delta, and with `Sums` zeros where its dq is added up. Rows that fill up a
// tile have nothing but sums to clear.
template <int Queries, int Depth, bool Sums> DEVICE void prepare_row(const Problem &p, const Gradients &g, long long index) {
    const int lane = threadIdx.x % 32, height = query_tiles<Queries>(p) * Queries;
    const long long head = index / height, i = index % height;
    if (head >= (long long)p.batch * p.q_heads) return;
    if constexpr (Sums)
        for (int d = lane; d < Depth; d += 32) g.sums[index * Depth + d] = 0.0f;
    if (i >= p.q_len) return;
    const float delta = delta_of(p, g, head * p.q_len + i);
    if (lane == 0) g.delta[head * p.q_len + i] = delta;
}

// A warp's strip of all heads' whole tiles: dq from its sums.
template <int Queries, int Depth> DEVICE void round_strip(const Problem &p, const Gradients &g, long long index) {
    const int lane = threadIdx.x % 32, strips = query_tiles<Queries>(p) * (Queries / 16);
    const long long head = index / strips;
    if (head >= (long long)p.batch * p.q_heads) return;
    const float *sums = g.sums + index * (16 * Depth);
    for (int n = 0; n < HEAD_DIM / 8; n++) {
        float x[4];
        read_fragment(sums + n * 128, lane, x);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = int(index % strips) * 16 + 8 * half + lane / 4;
            if (row >= p.q_len) continue;
            u32 *to = reinterpret_cast<u32 *>(static_cast<u16 *>(g.grad_q) + (head * p.q_len + row) * HEAD_DIM);
            to[4 * n + lane % 4] = pack<ELEMENT>(x[2 * half] * p.scale, x[2 * half + 1] * p.scale);
        }
    }
}
