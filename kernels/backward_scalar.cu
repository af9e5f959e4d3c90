// FlashAttention-2 backward (Dao 2023) without tensor cores: what backward.cu cannot do, f32 and head dims that are no
// multiple of 8 above all. Nothing quadratic in memory.
//
// Versions
//   1  Blocks that own keys walk over the queries that see them and sum dk and dv over the heads of the group; blocks
//      that own queries walk over keys, compute scores again, and sum dq. Each sum has one owner and one order. Tiles of
//      f32 in shared memory. backward_keys takes 72, 128, 254 registers at D 64, 128, 256 (sm_80). Right on an
//      H100; not timed there.
//
// Compile with -DELEMENT=F32|BF16|F16 -DHEAD_DIM=1..256 -DTILE=32|16 (queries, and keys, of a tile). 128 threads:
//   backward_delta    grid (ceil(B Hq Lq / 4))
//   backward_keys     grid (ceil(Lk / TILE), Hkv, B); shared memory: K, V, Q and dO of TILE rows of (D | 1), two tiles of
//                     scores of TILE rows of TILE + 1, all f32
//   backward_queries  grid (ceil(Lq / TILE), Hq, B), shared memory as backward_keys
#include "gradient.cuh"

namespace {

constexpr int THREADS = 128, PITCH = HEAD_DIM | 1, SCORE_PITCH = TILE + 1;
// Thread (x, y) of 16 x 8 has rows y + 8 i and columns x + 16 j of every result.
constexpr int ROWS = TILE / 8, SCORE_COLUMNS = TILE / 16, COLUMNS = (HEAD_DIM + 15) / 16;

struct Shared {
    float *k, *v, *q, *grad_o, *s, *ds;
    DEVICE explicit Shared(unsigned char *memory) {
        k = reinterpret_cast<float *>(memory);
        v = k + TILE * PITCH, q = v + TILE * PITCH, grad_o = q + TILE * PITCH;
        s = grad_o + TILE * PITCH, ds = s + TILE * SCORE_PITCH;
    }
};

// `count` rows of a tensor, zeros after them.
DEVICE void load_rows(float *tile, const void *tensor, long long first_row, int count) {
    for (int i = threadIdx.x; i < TILE * HEAD_DIM; i += THREADS) {
        const int row = i / HEAD_DIM;
        tile[row * PITCH + i % HEAD_DIM] = row < count ? element<ELEMENT>(tensor, first_row * HEAD_DIM + i) : 0.0f;
    }
}

// P and dS of a tile of queries and one of keys, both in shared memory; `q_row` is the head's first row.
DEVICE void scores(const Problem &p, const Gradients &g, const Shared &shared, long long q_row, int query0, int key0) {
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    float s[ROWS][SCORE_COLUMNS] = {}, ds[ROWS][SCORE_COLUMNS] = {};
#pragma unroll 4
    for (int d = 0; d < HEAD_DIM; d++)
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < SCORE_COLUMNS; j++) {
                const int row = (y + 8 * i) * PITCH + d, key = (x + 16 * j) * PITCH + d;
                s[i][j] = fused(shared.q[row], shared.k[key], s[i][j]);
                ds[i][j] = fused(shared.grad_o[row], shared.v[key], ds[i][j]);
            }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = y + 8 * i, query = least(query0 + row, p.q_len - 1);
        const Span seen = visible(p, query, p.kv_len);
        const float shift = shift_of(p.lse[q_row + query]), delta = g.delta[q_row + query];
#pragma unroll
        for (int j = 0; j < SCORE_COLUMNS; j++) {
            const int column = x + 16 * j, key = key0 + column;
            const bool sees = query0 + row < p.q_len && key >= seen.first && key < seen.end;
            if (p.softcap > 0.0f)
                score_gradient<true, true>(p, shift, delta, sees, s[i][j], ds[i][j]);
            else
                score_gradient<true, false>(p, shift, delta, sees, s[i][j], ds[i][j]);
            shared.s[row * SCORE_PITCH + column] = s[i][j];
            shared.ds[row * SCORE_PITCH + column] = ds[i][j];
        }
    }
}

// sum[row] += the sum over k of left(row, k) rows[k]
template <class Left> DEVICE void add_product(float (&sum)[ROWS][COLUMNS], const float *rows, Left left) {
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
#pragma unroll 4
    for (int k = 0; k < TILE; k++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            if (HEAD_DIM % 16 != 0 && x + 16 * j >= HEAD_DIM) continue;
#pragma unroll
            for (int i = 0; i < ROWS; i++) sum[i][j] = fused(left(y + 8 * i, k), rows[k * PITCH + x + 16 * j], sum[i][j]);
        }
}

DEVICE void write_rows(void *tensor, long long first_row, int count, const float (&sum)[ROWS][COLUMNS], float factor) {
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const int row = threadIdx.x / 16 + 8 * i, d = threadIdx.x % 16 + 16 * j;
            if (row < count && d < HEAD_DIM) store<ELEMENT>(tensor, (first_row + row) * HEAD_DIM + d, sum[i][j] * factor);
        }
}

} // namespace

KERNEL(128) backward_delta(ARGUMENT Problem p, ARGUMENT Gradients g) {
    const long long row = (long long)blockIdx.x * 4 + threadIdx.x / 32;
    if (row >= (long long)p.batch * p.q_heads * p.q_len) return;
    const float delta = delta_of(p, g, row);
    if (threadIdx.x % 32 == 0) g.delta[row] = delta;
}

KERNEL(128) backward_keys(ARGUMENT Problem p, ARGUMENT Gradients g) {
    DYNAMIC_SHARED(memory);
    const Shared shared(memory);
    const int key0 = blockIdx.x * TILE, group = p.q_heads / p.kv_heads;
    const long long kv_head = (long long)blockIdx.z * p.kv_heads + blockIdx.y, k_row = kv_head * p.kv_len + key0;
    const Span any = viewers(p, key0, least(key0 + TILE, p.kv_len));
    load_rows(shared.k, p.k, k_row, p.kv_len - key0);
    load_rows(shared.v, p.v, k_row, p.kv_len - key0);
    float dk[ROWS][COLUMNS] = {}, dv[ROWS][COLUMNS] = {};
    for (int member = 0; member < group; member++) {
        const long long q_row = (kv_head * group + member) * p.q_len;
        for (int query0 = any.first / TILE * TILE; query0 < any.end; query0 += TILE) {
            block_sync(); // all are done with the queries before
            load_rows(shared.q, p.q, q_row + query0, p.q_len - query0);
            load_rows(shared.grad_o, g.grad_o, q_row + query0, p.q_len - query0);
            block_sync();
            scores(p, g, shared, q_row, query0, key0);
            block_sync();
            add_product(dv, shared.grad_o, [&](int key, int i) { return shared.s[i * SCORE_PITCH + key]; });
            add_product(dk, shared.q, [&](int key, int i) { return shared.ds[i * SCORE_PITCH + key]; });
        }
    }
    write_rows(g.grad_k, k_row, p.kv_len - key0, dk, p.scale);
    write_rows(g.grad_v, k_row, p.kv_len - key0, dv, 1.0f);
}

KERNEL(128) backward_queries(ARGUMENT Problem p, ARGUMENT Gradients g) {
    DYNAMIC_SHARED(memory);
    const Shared shared(memory);
    const int query0 = int(gridDim.x - 1 - blockIdx.x) * TILE; // later queries see more keys
    const int q_head = blockIdx.y, kv_head = q_head / (p.q_heads / p.kv_heads);
    const long long q_row = ((long long)blockIdx.z * p.q_heads + q_head) * p.q_len;
    const long long k_row = ((long long)blockIdx.z * p.kv_heads + kv_head) * p.kv_len;
    const int first = visible(p, query0, p.kv_len).first, end = visible(p, least(query0 + TILE, p.q_len) - 1, p.kv_len).end;
    load_rows(shared.q, p.q, q_row + query0, p.q_len - query0);
    load_rows(shared.grad_o, g.grad_o, q_row + query0, p.q_len - query0);
    float dq[ROWS][COLUMNS] = {};
    for (int key0 = first / TILE * TILE; key0 < end; key0 += TILE) {
        block_sync(); // all are done with the keys before
        load_rows(shared.k, p.k, k_row + key0, p.kv_len - key0);
        load_rows(shared.v, p.v, k_row + key0, p.kv_len - key0);
        block_sync();
        scores(p, g, shared, q_row, query0, key0);
        block_sync();
        add_product(dq, shared.k, [&](int row, int key) { return shared.ds[row * SCORE_PITCH + key]; });
    }
    write_rows(g.grad_q, q_row + query0, p.q_len - query0, dq, p.scale);
}
