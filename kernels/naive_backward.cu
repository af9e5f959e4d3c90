// The backward pass as the textbook writes it: all probabilities and all gradients of scores in memory, five products.
// The baseline.
//
// Versions
//   1  64x64 tiles of f32 in shared memory, 4x4 results per thread, CUDA cores; any element type and head dim. Sums over
//      the query heads of a group are made in one block, in order. 80 registers at most. Right on an H100; not timed there.
//
// Compile with -DELEMENT=F32|BF16|F16 -DHEAD_DIM=1..256. `scores` holds P, then dS, each [B, Hq, Lq, Lk]. Launches:
//   naive_delta      grid (ceil(B Hq Lq / 4)), 128 threads
//   naive_gradients  grid (ceil(Lk/64), ceil(Lq/64), B Hq), 256 threads
//   naive_keys       grid (ceil(D/64), ceil(Lk/64), B Hkv), 256 threads
//   naive_queries    grid (ceil(D/64), ceil(Lq/64), B Hq), 256 threads
#include "gradient.cuh"
#include "product.cuh"

namespace {

// The element of a row of a tensor [rows, D], zero past its ends.
DEVICE float element_of(const void *tensor, long long first_row, int row, int rows, int d) {
    return row < rows && d < HEAD_DIM ? element<ELEMENT>(tensor, (first_row + row) * HEAD_DIM + d) : 0.0f;
}

DEVICE float *score_gradients(const Problem &p) {
    return p.scores + (long long)p.batch * p.q_heads * p.q_len * p.kv_len;
}

// A thread's results of a tile of a gradient.
DEVICE void write_tile(void *tensor, long long first_row, int row0, int rows, int d0, const float (&sum)[EACH][EACH]) {
    for (int i = 0; i < EACH; i++)
        for (int j = 0; j < EACH; j++) {
            const int row = row0 + threadIdx.x / 16 + 16 * i, d = d0 + threadIdx.x % 16 + 16 * j;
            if (row < rows && d < HEAD_DIM) store<ELEMENT>(tensor, (first_row + row) * HEAD_DIM + d, sum[i][j]);
        }
}

} // namespace

KERNEL(128) naive_delta(ARGUMENT Problem p, ARGUMENT Gradients g) {
    const long long row = (long long)blockIdx.x * 4 + threadIdx.x / 32;
    if (row >= (long long)p.batch * p.q_heads * p.q_len) return;
    const float delta = delta_of(p, g, row);
    if (threadIdx.x % 32 == 0) g.delta[row] = delta;
}

KERNEL(256) naive_gradients(ARGUMENT Problem p, ARGUMENT Gradients g) {
    const int row0 = blockIdx.y * TILE, key0 = blockIdx.x * TILE, head = blockIdx.z;
    const long long kv_head = head / p.q_heads * p.kv_heads + head % p.q_heads / (p.q_heads / p.kv_heads);
    const long long q_row = (long long)head * p.q_len, k_row = kv_head * p.kv_len;
    float s[EACH][EACH] = {}, ds[EACH][EACH] = {};
    product<true, true>(
        s, HEAD_DIM, [&](int row, int d) { return element_of(p.q, q_row, row0 + row, p.q_len, d); },
        [&](int key, int d) { return element_of(p.k, k_row, key0 + key, p.kv_len, d); });
    product<true, true>(
        ds, HEAD_DIM, [&](int row, int d) { return element_of(g.grad_o, q_row, row0 + row, p.q_len, d); },
        [&](int key, int d) { return element_of(p.v, k_row, key0 + key, p.kv_len, d); });
    for (int i = 0; i < EACH; i++) {
        const int row = row0 + threadIdx.x / 16 + 16 * i;
        if (row >= p.q_len) continue;
        const Span seen = visible(p, row, p.kv_len);
        const float shift = shift_of(p.lse[q_row + row]), delta = g.delta[q_row + row];
        for (int j = 0; j < EACH; j++) {
            const int key = key0 + threadIdx.x % 16 + 16 * j;
            if (key >= p.kv_len) continue;
            const bool sees = key >= seen.first && key < seen.end;
            if (p.softcap > 0.0f)
                score_gradient<true, true>(p, shift, delta, sees, s[i][j], ds[i][j]);
            else
                score_gradient<true, false>(p, shift, delta, sees, s[i][j], ds[i][j]);
            p.scores[(q_row + row) * p.kv_len + key] = s[i][j];
            score_gradients(p)[(q_row + row) * p.kv_len + key] = ds[i][j] * p.scale;
        }
    }
}

// dv = P^T do and dk = dS^T q, summed over the query heads of the group.
KERNEL(256) naive_keys(ARGUMENT Problem p, ARGUMENT Gradients g) {
    const int key0 = blockIdx.y * TILE, d0 = blockIdx.x * TILE, kv_head = blockIdx.z, group = p.q_heads / p.kv_heads;
    // One after the other: sums of both do not fit in the registers everywhere.
    auto sums_to = [&](void *to, const float *scores, const void *rows) {
        float sum[EACH][EACH] = {};
        for (int member = 0; member < group; member++) {
            const long long q_row = ((long long)kv_head * group + member) * p.q_len;
            product<false, false>(
                sum, p.q_len,
                [&](int key, int i) {
                    return i < p.q_len && key0 + key < p.kv_len ? scores[(q_row + i) * p.kv_len + key0 + key] : 0.0f;
                },
                [&](int d, int i) { return element_of(rows, q_row, i, p.q_len, d0 + d); });
        }
        write_tile(to, (long long)kv_head * p.kv_len, key0, p.kv_len, d0, sum);
    };
    sums_to(g.grad_v, p.scores, g.grad_o);
    sums_to(g.grad_k, score_gradients(p), p.q);
}

// dq = dS k
KERNEL(256) naive_queries(ARGUMENT Problem p, ARGUMENT Gradients g) {
    const int row0 = blockIdx.y * TILE, d0 = blockIdx.x * TILE, head = blockIdx.z;
    const long long kv_head = head / p.q_heads * p.kv_heads + head % p.q_heads / (p.q_heads / p.kv_heads);
    const long long q_row = (long long)head * p.q_len, k_row = kv_head * p.kv_len;
    float dq[EACH][EACH] = {};
    product<true, false>(
        dq, p.kv_len,
        [&](int row, int key) {
            const bool real = row0 + row < p.q_len && key < p.kv_len;
            return real ? score_gradients(p)[(q_row + row0 + row) * p.kv_len + key] : 0.0f;
        },
        [&](int d, int key) { return element_of(p.k, k_row, key, p.kv_len, d0 + d); });
    write_tile(g.grad_q, q_row, row0, p.q_len, d0, dq);
}
