// Attention as the textbook writes it: all scores in memory, softmax of each row, a second product. The baseline.
//
// Versions
//   1  64x64 tiles of f32 in shared memory, 4x4 results per thread, CUDA cores; any element type and head dim. It
//      computes in f32, so it is also the path for f32 inputs.
//   2  Both products by cuBLAS where it is found; the softmax then also caps, and leaves probabilities in the inputs'
//      type, as cuBLAS wants both factors of the second product in one type.
//      On an H100, bf16, D 128: 44 to 85 TFLOP/s.
//
// Compile with -DELEMENT=F32|BF16|F16 -DHEAD_DIM=1.. -DLIBRARY_PRODUCTS=0|1. Three launches of 256 threads, the first and
// the last only without a library's products:
//   naive_scores   grid (ceil(Lk/64), ceil(Lq/64), B Hq)
//   naive_softmax  grid (B Hq Lq); with a library's products `scores` has capless logits, and gets rows of Lk elements
//                  of the inputs' type, as far apart as the rows of f32
//   naive_output   grid (ceil(D/64), ceil(Lq/64), B Hq)
#include "product.cuh"

KERNEL(256) naive_softmax(ARGUMENT Problem p) {
    const long long index = blockIdx.x;
    const Span seen = visible(p, int(index % p.q_len), p.kv_len);
    float *row = p.scores + index * p.kv_len;
    float top = minus_infinity();
    for (int j = seen.first + threadIdx.x; j < seen.end; j += THREADS) {
        if (LIBRARY_PRODUCTS && p.softcap > 0.0f) row[j] = soft_cap(row[j], p.softcap);
        top = larger(top, row[j]);
    }
    top = across_block(top, [](float a, float b) { return larger(a, b); });
    float sum = 0.0f;
    for (int j = seen.first + threadIdx.x; j < seen.end; j += THREADS) sum += row[j] = exp2_fast((row[j] - top) * LOG2_E);
    sum = across_block(sum, [](float a, float b) { return a + b; });
    const float factor = 1.0f / sum;
    for (int start = 0; start < p.kv_len; start += THREADS) {
        const int j = start + threadIdx.x;
        const float probability = j >= seen.first && j < seen.end ? row[j] * factor : 0.0f;
        // Smaller elements of these keys take the place of earlier ones, and of these where they are the first.
        if (LIBRARY_PRODUCTS && ELEMENT != F32) block_sync();
        if (j < p.kv_len) store<LIBRARY_PRODUCTS ? ELEMENT : F32>(row, j, probability);
    }
    if (threadIdx.x == 0) p.lse[index] = seen.first < seen.end ? top + log2_fast(sum) * LN_2 : minus_infinity();
}

KERNEL(256) naive_scores(ARGUMENT Problem p) {
    const int row0 = blockIdx.y * TILE, key0 = blockIdx.x * TILE, head = blockIdx.z;
    const long long kv_head = head / p.q_heads * p.kv_heads + head % p.q_heads / (p.q_heads / p.kv_heads);
    const long long q_row = (long long)head * p.q_len, k_row = kv_head * p.kv_len;
    float sum[EACH][EACH] = {};
    product<true, true>(
        sum, HEAD_DIM,
        [&](int row, int d) {
            return row0 + row < p.q_len && d < HEAD_DIM ? element<ELEMENT>(p.q, (q_row + row0 + row) * HEAD_DIM + d) : 0.0f;
        },
        [&](int key, int d) {
            return key0 + key < p.kv_len && d < HEAD_DIM ? element<ELEMENT>(p.k, (k_row + key0 + key) * HEAD_DIM + d) : 0.0f;
        });
    for (int i = 0; i < EACH; i++)
        for (int j = 0; j < EACH; j++) {
            int row = row0 + threadIdx.x / 16 + 16 * i, key = key0 + threadIdx.x % 16 + 16 * j;
            if (row >= p.q_len || key >= p.kv_len) continue;
            float logit = sum[i][j] * p.scale;
            p.scores[(q_row + row) * p.kv_len + key] = p.softcap > 0.0f ? soft_cap(logit, p.softcap) : logit;
        }
}

KERNEL(256) naive_output(ARGUMENT Problem p) {
    const int row0 = blockIdx.y * TILE, d0 = blockIdx.x * TILE, head = blockIdx.z;
    const long long kv_head = head / p.q_heads * p.kv_heads + head % p.q_heads / (p.q_heads / p.kv_heads);
    const long long q_row = (long long)head * p.q_len, v_row = kv_head * p.kv_len;
    float sum[EACH][EACH] = {};
    product<true, false>(
        sum, p.kv_len,
        [&](int row, int key) {
            return row0 + row < p.q_len && key < p.kv_len ? p.scores[(q_row + row0 + row) * p.kv_len + key] : 0.0f;
        },
        [&](int d, int key) {
            return key < p.kv_len && d0 + d < HEAD_DIM ? element<ELEMENT>(p.v, (v_row + key) * HEAD_DIM + d0 + d) : 0.0f;
        });
    for (int i = 0; i < EACH; i++)
        for (int j = 0; j < EACH; j++) {
            int row = row0 + threadIdx.x / 16 + 16 * i, d = d0 + threadIdx.x % 16 + 16 * j;
            if (row < p.q_len && d < HEAD_DIM) store<ELEMENT>(p.o, (q_row + row) * HEAD_DIM + d, sum[i][j]);
        }
}
