// Products of matrices on CUDA cores, in tiles of 64x64, and numbers of a whole block: what the kernels with materialised
// scores and those of models are made of.
#pragma once
#include "problem.cuh"

constexpr int TILE = 64, DEPTH = 16, EACH = 4, THREADS = 256;

// DEPTH of the depth of 64 rows, through `source(row, depth)`. `ByDepth` when neighbours in depth are neighbours in
// memory, else neighbours in row are.
template <bool ByDepth, class Source> DEVICE void fill_tile(float (&tile)[DEPTH][TILE + 1], int start, Source source) {
    for (int i = threadIdx.x; i < TILE * DEPTH; i += THREADS) {
        const int row = ByDepth ? i / DEPTH : i % TILE, k = ByDepth ? i % DEPTH : i / TILE;
        tile[k][row] = source(row, start + k);
    }
}

// Adds a 64x64 tile of a product to `sum`: the sum over k of left(row, k) right(column, k), which give zero outside of
// their matrices. Each thread has the results (y + 16 i, x + 16 j).
template <bool LeftByDepth, bool RightByDepth, class Left, class Right>
DEVICE void product(float (&sum)[EACH][EACH], int depth, Left left, Right right) {
    __shared__ float a[DEPTH][TILE + 1], b[DEPTH][TILE + 1];
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    for (int start = 0; start < depth; start += DEPTH) {
        fill_tile<LeftByDepth>(a, start, left);
        fill_tile<RightByDepth>(b, start, right);
        block_sync();
#pragma unroll
        for (int k = 0; k < DEPTH; k++)
#pragma unroll
            for (int i = 0; i < EACH; i++)
#pragma unroll
                for (int j = 0; j < EACH; j++) sum[i][j] = fused(a[k][y + 16 * i], b[k][x + 16 * j], sum[i][j]);
        block_sync();
    }
}

// One number of all threads of the block, the same for all.
template <class Join> DEVICE float across_block(float value, Join join) {
    __shared__ float shared[THREADS / 32];
    for (int mask = 16; mask; mask /= 2) value = join(value, shuffle_xor(value, mask));
    block_sync();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    block_sync();
    value = shared[0];
    for (int warp = 1; warp < THREADS / 32; warp++) value = join(value, shared[warp]);
    return value;
}
