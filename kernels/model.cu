// What a decoder does between its attention kernels: embedding, norms, linear layers where there is no cuBLAS, rotation of
// queries and keys on their way into heads, the activation of the MLP. Activations are rows of f32.
//
// Versions
//   1  One job each, elements one by one. Products on CUDA cores: tiles of 64x64, or for a few rows a warp for each row of
//      the weights, which is then read once.
//      Right on an H100, where a token of 32 layers was 868 kernels of 4.5 us each: too many.
//
// Compile with -DELEMENT=F32|BF16|F16 (of weights, or of what attention reads and writes) -DHEAD_DIM=1, which is not
// looked at.
//   embed_rows      grid (rows), 256 threads
//   norm_rows       grid (rows), 256 threads
//   multiply_rows   grid (ceil(width / 64), ceil(rows / 64)), 256 threads
//   multiply_few    grid (ceil(width / 8)), 256 threads; at most 8 rows
//   split_heads       grid (tokens, heads), 128 threads
//   merge_heads      grid (tokens, heads), 128 threads
//   narrow_each, add_each, add_bias, gate_silu, gate_gelu, gelu_each, cap_each   grid (ceil(count / 256)), 256 threads
#include "product.cuh"

struct Embedding {
    const u32 *tokens; // [rows]
    const void *table; // [vocabulary, width]
    float *to;         // [rows, width]
    int width;
    float factor;
};

// Root-mean-square norms; `to` may be `from`.
struct Norm {
    const float *from;   // [rows, width]
    const float *weight; // [width]
    float *to;           // [rows, width]
    int width;
    float eps;
    float shift;         // added to every weight
    int unused;          // so that no byte of the struct is padding
};

// to = x wT
struct Linear {
    const float *x; // [rows, depth]
    const void *w;  // [width, depth]
    float *to;      // [rows, width]
    int rows, depth, width;
    int unused;
};

// Rows with heads side by side, and the same head by head, as attention has them.
struct Heads {
    float *rows;         // [tokens, heads, head_dim]
    const float *angles; // [tokens, head_dim], cosines and then sines of each row's position; null: nothing is rotated
    void *split;         // [heads, tokens, head_dim]
    int tokens, heads, head_dim;
    int pairs;           // channels p and pairs + p of a head are rotated together, for each p below; others stay
};

struct Each {
    float *x;       // [count], changed
    const float *y; // [count], or [width] for add_bias
    u64 count;
    int width;
    float cap;
};

struct Narrowing {
    const float *from; // [count]
    void *to;          // [count]
    u64 count;
};

namespace {

constexpr int FEW = 8;

DEVICE u64 own_element() { return (u64)blockIdx.x * THREADS + threadIdx.x; }

// 1 / (1 + e^-x)
DEVICE float logistic(float x) { return reciprocal(1.0f + exp2_fast(-LOG2_E * x)); }

} // namespace

KERNEL(256) embed_rows(ARGUMENT Embedding e) {
    const long long from = (long long)e.tokens[blockIdx.x] * e.width, to = (long long)blockIdx.x * e.width;
    for (int i = threadIdx.x; i < e.width; i += THREADS) e.to[to + i] = element<ELEMENT>(e.table, from + i) * e.factor;
}

KERNEL(256) norm_rows(ARGUMENT Norm n) {
    const long long start = (long long)blockIdx.x * n.width;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < n.width; i += THREADS) squares = fused(n.from[start + i], n.from[start + i], squares);
    squares = across_block(squares, [](float a, float b) { return a + b; });
    const float factor = 1.0f / square_root(squares / float(n.width) + n.eps);
    for (int i = threadIdx.x; i < n.width; i += THREADS) n.to[start + i] = n.from[start + i] * (factor * (n.weight[i] + n.shift));
}

KERNEL(256) multiply_rows(ARGUMENT Linear l) {
    const int row0 = blockIdx.y * TILE, column0 = blockIdx.x * TILE;
    float sum[EACH][EACH] = {};
    product<true, true>(
        sum, l.depth,
        [&](int row, int k) {
            return row0 + row < l.rows && k < l.depth ? l.x[(long long)(row0 + row) * l.depth + k] : 0.0f;
        },
        [&](int column, int k) {
            return column0 + column < l.width && k < l.depth ? element<ELEMENT>(l.w, (long long)(column0 + column) * l.depth + k)
                                                             : 0.0f;
        });
    for (int i = 0; i < EACH; i++)
        for (int j = 0; j < EACH; j++) {
            const int row = row0 + threadIdx.x / 16 + 16 * i, column = column0 + threadIdx.x % 16 + 16 * j;
            if (row < l.rows && column < l.width) l.to[(long long)row * l.width + column] = sum[i][j];
        }
}

KERNEL(256) multiply_few(ARGUMENT Linear l) {
    const int column = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (column >= l.width) return;
    const long long start = (long long)column * l.depth;
    float sum[FEW] = {};
    for (int k = lane; k < l.depth; k += 32) {
        const float w = element<ELEMENT>(l.w, start + k);
#pragma unroll
        for (int row = 0; row < FEW; row++)
            if (row < l.rows) sum[row] = fused(w, l.x[(long long)row * l.depth + k], sum[row]);
    }
#pragma unroll
    for (int row = 0; row < FEW; row++) {
        for (int mask = 16; mask; mask /= 2) sum[row] += shuffle_xor(sum[row], mask);
        if (lane == 0 && row < l.rows) l.to[(long long)row * l.width + column] = sum[row];
    }
}

KERNEL(128) split_heads(ARGUMENT Heads h) {
    const long long token = blockIdx.x, head = blockIdx.y, to = (head * h.tokens + token) * h.head_dim;
    const float *const from = h.rows + (token * h.heads + head) * h.head_dim;
    if (!h.angles) {
        for (int d = threadIdx.x; d < h.head_dim; d += 128) store<ELEMENT>(h.split, to + d, from[d]);
        return;
    }
    const int half = h.pairs;
    const float *const angles = h.angles + token * h.head_dim;
    for (int pair = threadIdx.x; pair < half; pair += 128) {
        const float x = from[pair], y = from[half + pair], cosine = angles[pair], sine = angles[half + pair];
        store<ELEMENT>(h.split, to + pair, x * cosine - y * sine);
        store<ELEMENT>(h.split, to + half + pair, y * cosine + x * sine);
    }
    for (int d = 2 * half + threadIdx.x; d < h.head_dim; d += 128) store<ELEMENT>(h.split, to + d, from[d]);
}

KERNEL(128) merge_heads(ARGUMENT Heads h) {
    const long long token = blockIdx.x, head = blockIdx.y, from = (head * h.tokens + token) * h.head_dim;
    float *const to = h.rows + (token * h.heads + head) * h.head_dim;
    for (int d = threadIdx.x; d < h.head_dim; d += 128) to[d] = element<ELEMENT>(h.split, from + d);
}

KERNEL(256) narrow_each(ARGUMENT Narrowing n) {
    const u64 i = own_element();
    if (i < n.count) store<ELEMENT>(n.to, i, n.from[i]);
}

KERNEL(256) add_each(ARGUMENT Each e) {
    const u64 i = own_element();
    if (i < e.count) e.x[i] += e.y[i];
}

KERNEL(256) add_bias(ARGUMENT Each e) {
    const u64 i = own_element();
    if (i < e.count) e.x[i] += e.y[i % e.width];
}

// x / (1 + e^-x) times y.
KERNEL(256) gate_silu(ARGUMENT Each e) {
    const u64 i = own_element();
    if (i < e.count) e.x[i] = e.x[i] * logistic(e.x[i]) * e.y[i];
}

// The tanh form of GELU times y: (1 + tanh z) / 2 is the logistic of 2 z.
KERNEL(256) gate_gelu(ARGUMENT Each e) {
    const u64 i = own_element();
    if (i >= e.count) return;
    const float x = e.x[i], z = 0.7978845608f * (x + 0.044715f * x * x * x);
    e.x[i] = x * logistic(2.0f * z) * e.y[i];
}

// GELU as it is defined, by the normal distribution's share below x.
KERNEL(256) gelu_each(ARGUMENT Each e) {
    const u64 i = own_element();
    if (i < e.count) e.x[i] *= 0.5f + 0.5f * error_function(0.7071067812f * e.x[i]);
}

KERNEL(256) cap_each(ARGUMENT Each e) {
    const u64 i = own_element();
    if (i < e.count) e.x[i] = soft_cap(e.x[i], e.cap);
}
