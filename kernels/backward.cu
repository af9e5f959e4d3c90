// FlashAttention-2 backward for sm_80 and later (Dao 2023): blocks own keys, whose dk and dv stay in registers while the
// queries that see them pass by; nothing quadratic in memory.
//
// Versions
//   1  Scores are computed transposed, keys as rows: P^T and dS^T are, as they come out of the tensor cores, the left
//      operands of dv = P^T do and dk = dS^T q, so that neither passes through shared memory. Query heads of a group
//      follow one another in the block that owns their KV head: no dk and dv of each query head. cp.async brings the
//      next queries meanwhile. dq comes in two ways:
//      DETERMINISTIC=0  the same blocks multiply dS, which passes through shared memory, by k: five products. Sums in
//                       f32 by atomics, in the order of the accumulators, so that each instruction adds to 128 bytes
//                       in one piece (512 from sm_90 on); the order of blocks, and with it the last bits, varies.
//      DETERMINISTIC=1  blocks that own queries compute scores again: seven products, no atomics, no sums in memory.
//      Above D 128 dk and dv do not fit into registers together: separate blocks own them, and one product more.
//      Registers at D 64, 128, 256 (bf16, sm_90a, NVRTC 13.0): backward_keys 243, 255, 234 with atomics, 235, 233, 224
//      without; backward_queries 168, 201, 252. Nothing is spilled. With the scores of 64 queries in registers at a time
//      most ways to unroll the products spill at D 128, 16 to 124 bytes (sm_80).
//      On an H100, bf16, D 128: 170 TFLOP/s causal at 2K, 234 at 16K, three quarters of PyTorch's flash.
//
// Compile with -DELEMENT=BF16|F16 -DHEAD_DIM=8..256 (a multiple of 8) -DDETERMINISTIC=0|1 -DSMALL=0|1. SMALL is for D 72
// to 128 where a block may have less than 145 KiB of shared memory (sm_86, sm_89, sm_120).
//   D            keys  queries  threads
//   to 128        128       64      256
//   to 128 SMALL   64       32      128
//   to 256         64       32      128
//   backward_delta    grid (ceil(B Hq rows / 4)), 128 threads; rows: Lq in whole tiles of queries
//   backward_keys     grid (ceil(Lk / keys), Hkv, B), twice as many in x above D 128; shared memory: K, V, twice Q and dO,
//                     twice shift and delta of the queries, without DETERMINISTIC also dS
//   backward_queries  DETERMINISTIC=1: grid (ceil(Lq / 64), Hq, B), 128 threads; shared memory: 64
//                     rows of Q and dO, twice 64 keys (above D 128: 32) of K and V
//   backward_round    DETERMINISTIC=0: grid (ceil(B Hq rows / 64)), 128 threads
#include "query_sums.cuh"
#include "rows.cuh"

static_assert(ELEMENT != F32 && HEAD_DIM % 8 == 0, "rows of 16-bit elements are copied in chunks of 8");

namespace {

constexpr int DEPTH = (HEAD_DIM + 15) / 16 * 16; // columns that products go through
constexpr bool APART = DEPTH > 128;              // dk and dv in blocks of their own
constexpr int WARPS = APART || SMALL ? 4 : 8, THREADS = 32 * WARPS;
constexpr int KEYS = WARPS * 16, QUERIES = WARPS == 8 ? 64 : 32; // a warp owns 16 keys
constexpr int PASS = DEPTH <= 64 ? QUERIES : 32;                 // queries whose scores are in registers together
constexpr int KEY_BYTES = KEYS * ROW_BYTES, QUERY_BYTES = QUERIES * ROW_BYTES;
constexpr int STAGE = 2 * KEY_BYTES, ROW_VALUES = STAGE + 4 * QUERY_BYTES;

// 16 rows as the tensor cores leave them in a warp, 8 columns in each of `Parts`; in the thread of lane 4 g + t they are
// rows g and g + 8, columns 2t and 2t + 1 of each part.
template <int Parts> using Sums = float[Parts][4];
// The same, rounded to the element type and packed: the left operand of a product.
template <int Parts> using Packed = u32[Parts][2];

template <int Parts> DEVICE void clear(Sums<Parts> &s) {
#pragma unroll
    for (int n = 0; n < Parts; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] = 0.0f;
}

// s = a b^T: 16 rows of the tile `left` from `row0` on, 8 Parts rows of the tile `right`.
template <int Parts> DEVICE void inner(Sums<Parts> &s, int lane, u32 left, int row0, u32 right) {
    clear<Parts>(s);
    // Unrolled in full, so many fragments are loaded ahead that registers run out.
#pragma unroll 4
    for (int k = 0; k < DEPTH / 16; k++) {
        u32 a[4];
        load_matrices(a, left + place(row0 + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int n = 0; n < Parts / 2; n++) {
            u32 b[4]; // rows 0-7 and 8-15, each for depths 0-7 and 8-15
            load_matrices(b, right + place(16 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
            multiply_add<ELEMENT>(s[2 * n], a, b[0], b[1]);
            multiply_add<ELEMENT>(s[2 * n + 1], a, b[2], b[3]);
        }
    }
}

template <int Parts> DEVICE void round_all(Packed<Parts> &to, const Sums<Parts> &s) {
#pragma unroll
    for (int n = 0; n < Parts; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) to[n][half] = pack<ELEMENT>(s[n][2 * half], s[n][2 * half + 1]);
}

// sum += s b: the columns of s are the rows of the tile `right`.
template <int Parts> DEVICE void add_product(Sums<DEPTH / 8> &sum, int lane, const Packed<Parts> &s, u32 right) {
#pragma unroll
    for (int k = 0; k < Parts / 2; k++) {
        const u32 a[4] = {s[2 * k][0], s[2 * k][1], s[2 * k + 1][0], s[2 * k + 1][1]};
#pragma unroll
        for (int n = 0; n < DEPTH / 16; n++) {
            u32 b[4]; // columns 0-7 and 8-15, each for rows 0-7 and 8-15
            load_matrices_transposed(b, right + place(16 * k + lane / 8 % 2 * 8 + lane % 8, 2 * n + lane / 16));
            multiply_add<ELEMENT>(sum[2 * n], a, b[0], b[1]);
            multiply_add<ELEMENT>(sum[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// Rounds a warp's sums to rows row0.. of a tensor, as far as they are less than `rows`.
DEVICE void write(void *tensor, long long first_row, int row0, int rows, const Sums<DEPTH / 8> &sum, float factor) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = row0 + 8 * half + lane / 4;
        if (row >= rows) continue;
        u32 *to = reinterpret_cast<u32 *>(static_cast<u16 *>(tensor) + (first_row + row) * HEAD_DIM) + lane % 4;
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++)
            to[4 * n] = pack<ELEMENT>(sum[n][2 * half] * factor, sum[n][2 * half + 1] * factor);
    }
}

// Rows of a tensor from `first` on.
DEVICE const u16 *rows_of(const void *tensor, long long first) { return static_cast<const u16 *>(tensor) + first * HEAD_DIM; }

// Starts to copy `Rows` rows into a tile; those from `count` on, and columns past the head dim, become zeros.
template <int Rows, int Threads> DEVICE void copy_tile(u32 tile, const u16 *rows, int count) {
    const int thread = forgotten(threadIdx.x);
    copy_adjacent_rows<Rows, Threads>(tile, thread, count, own_chunk(reinterpret_cast<const unsigned char *>(rows), thread));
}

constexpr int SCORES = ROW_VALUES + 4 * QUERIES * 4;

// dS^T lies in shared memory as it is computed, a row for each key: where 8 queries' chunk of a row is.
DEVICE u32 score_place(int key, int chunk) {
    return key * (2 * QUERIES) + ((chunk ^ (key / (64 / QUERIES) % (QUERIES / 8))) << 4);
}

// Adds dS k of one tile to the sums of dq. A warp has 32 queries, and every COLUMN_PARTS-th 16 columns, two at a time.
DEVICE void add_query_sums(float *sums, int thread, u32 scores, u32 keys) {
    constexpr int COLUMN_PARTS = WARPS * 32 / QUERIES;
    const int lane = thread % 32, warp = thread / 32;
    const int part = warp / COLUMN_PARTS, column = warp % COLUMN_PARTS;
#pragma unroll 1
    for (int first = column; first < DEPTH / 16; first += 2 * COLUMN_PARTS) {
        float sum[2][2][2][4] = {}; // [16 queries][16 columns][8 columns]
#pragma unroll 2
        for (int k = 0; k < KEYS / 16; k++) {
            u32 a[2][4];
#pragma unroll
            for (int m = 0; m < 2; m++)
                load_matrices_transposed(a[m], scores + score_place(16 * k + lane / 16 * 8 + lane % 8, 4 * part + 2 * m + lane / 8 % 2));
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int n = first + j * COLUMN_PARTS;
                if (n >= DEPTH / 16) continue;
                u32 b[4];
                load_matrices_transposed(b, keys + place(16 * k + lane / 8 % 2 * 8 + lane % 8, 2 * n + lane / 16));
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    multiply_add<ELEMENT>(sum[m][j][0], a[m], b[0], b[1]);
                    multiply_add<ELEMENT>(sum[m][j][1], a[m], b[2], b[3]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int n = first + j * COLUMN_PARTS;
                if (n >= DEPTH / 16) continue;
#pragma unroll
                for (int h = 0; h < 2; h++)
                    add_fragment(sums + ((2 * part + m) * (DEPTH / 8) + 2 * n + h) * 128, lane, sum[m][j][h]);
            }
    }
}

// The block of one tile of keys: its dk, its dv, or both; with dk also its share of dq.
template <bool Dk, bool Dv> struct KeyBlock {
    const Problem &p;
    const Gradients &g;
    unsigned char *memory;
    u32 shared;
    int key0, kv_head, batch, first_tile, tiles; // of queries that see the keys
    Span seen[2];                                // by which queries each of this thread's rows is seen
    Sums<DEPTH / 8> dk, dv;

    DEVICE u32 stage(int step) const { return shared + STAGE + step % 2 * (2 * QUERY_BYTES); }
    DEVICE float *row_values(int step) const { return reinterpret_cast<float *>(memory + ROW_VALUES) + step % 2 * (2 * QUERIES); }

    DEVICE long long head(int step) const {
        const int group = p.q_heads / p.kv_heads;
        return (long long)batch * p.q_heads + kv_head * group + step / tiles;
    }
    DEVICE int query0(int step) const { return (first_tile + step % tiles) * QUERIES; }

    // Starts to copy a step's queries; this thread's row values of them.
    DEVICE void copy(int step, float (&values)[2]) const {
        const long long first = head(step) * p.q_len + query0(step);
        const int count = p.q_len - query0(step);
        copy_tile<QUERIES, THREADS>(stage(step), rows_of(p.q, first), count);
        copy_tile<QUERIES, THREADS>(stage(step) + QUERY_BYTES, rows_of(g.grad_o, first), count);
        if (threadIdx.x >= QUERIES) return;
        const bool real = int(threadIdx.x) < count;
        values[0] = real ? shift_of(p.lse[first + threadIdx.x]) : -minus_infinity();
        values[1] = real ? g.delta[first + threadIdx.x] : 0.0f;
    }

    DEVICE void keep(int step, const float (&values)[2]) const {
        if (threadIdx.x >= QUERIES) return;
        row_values(step)[threadIdx.x] = values[0];
        row_values(step)[QUERIES + threadIdx.x] = values[1];
    }

    // From inner products and dP to P and dS; the first column is query `first` of the step.
    template <bool Masked, bool Capped> DEVICE void gradients(int step, int first, Sums<PASS / 8> &s, Sums<PASS / 8> &ds) const {
        const int column = first + threadIdx.x % 4 * 2;
        const float *shifts = row_values(step), *deltas = shifts + QUERIES;
#pragma unroll
        for (int n = 0; n < PASS / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int at = column + 8 * n + e, query = query0(step) + at;
                const float shift = shifts[at], delta = deltas[at];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const bool sees = query >= seen[half].first && query < seen[half].end;
                    score_gradient<Masked, Capped>(p, shift, delta, sees, s[n][2 * half + e], ds[n][2 * half + e]);
                }
            }
    }

    // Whether all queries of a step see all keys of the block.
    DEVICE bool whole(int step) const {
        const int last = query0(step) + QUERIES - 1;
        if (key0 + KEYS > p.kv_len || last >= p.q_len) return false;
        return visible(p, query0(step), p.kv_len).end >= key0 + KEYS && visible(p, last, p.kv_len).first <= key0;
    }

    // Takes the queries first.. of a step in.
    DEVICE void take(int step, int first, bool whole) {
        const int thread = forgotten(threadIdx.x), lane = thread % 32, row0 = thread / 32 * 16;
        const u32 q = stage(step) + first * ROW_BYTES, grad_o = q + QUERY_BYTES;
        Sums<PASS / 8> s, ds;
        inner<PASS / 8>(s, lane, shared, row0, q);
        if constexpr (Dk)
            inner<PASS / 8>(ds, lane, shared + KEY_BYTES, row0, grad_o);
        else
            clear<PASS / 8>(ds);
        if (p.softcap > 0.0f)
            gradients<true, true>(step, first, s, ds);
        else if (whole)
            gradients<false, false>(step, first, s, ds);
        else
            gradients<true, false>(step, first, s, ds);
        if constexpr (Dv) {
            Packed<PASS / 8> packed;
            round_all<PASS / 8>(packed, s);
            add_product<PASS / 8>(dv, lane, packed, grad_o);
        }
        if constexpr (Dk) {
            Packed<PASS / 8> packed;
            round_all<PASS / 8>(packed, ds);
            if constexpr (!DETERMINISTIC)
#pragma unroll
                for (int n = 0; n < PASS / 8; n++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        unsigned char *row = memory + SCORES + score_place(row0 + 8 * half + lane / 4, first / 8 + n);
                        reinterpret_cast<u32 *>(row)[lane % 4] = packed[n][half];
                    }
            add_product<PASS / 8>(dk, lane, packed, q);
        }
    }

    DEVICE void compute(int step) {
        const bool all = whole(step);
#pragma unroll 1
        for (int first = 0; first < QUERIES; first += PASS) take(step, first, all);
        if constexpr (Dk && !DETERMINISTIC) {
            block_sync(); // every warp's dS is there
            const long long tile = head(step) * query_tiles<QUERIES>(p) + first_tile + step % tiles;
            add_query_sums(g.sums + tile * (QUERIES * DEPTH), forgotten(threadIdx.x), shared + SCORES, shared);
        }
    }

    DEVICE void run() {
        const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
        const long long kv_row = ((long long)batch * p.kv_heads + kv_head) * p.kv_len;
        const Span any = viewers(p, key0, least(key0 + KEYS, p.kv_len));
        first_tile = any.first / QUERIES;
        tiles = any.first < any.end ? (any.end + QUERIES - 1) / QUERIES - first_tile : 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int key = key0 + warp_row + 8 * half + lane / 4;
            seen[half] = key < p.kv_len ? viewers(p, key, key + 1) : Span{0, 0};
        }
        copy_tile<KEYS, THREADS>(shared, rows_of(p.k, kv_row + key0), p.kv_len - key0);
        if constexpr (Dk) copy_tile<KEYS, THREADS>(shared + KEY_BYTES, rows_of(p.v, kv_row + key0), p.kv_len - key0);
        const int steps = tiles * (p.q_heads / p.kv_heads);
        float values[2];
        if (steps) copy(0, values), keep(0, values);
        copy_async_commit();
        clear<DEPTH / 8>(dk), clear<DEPTH / 8>(dv);
        for (int step = 0; step < steps; step++) {
            copy_async_wait<0>();
            block_sync(); // this step's rows are there for all, and all are done with the step before
            const bool more = step + 1 < steps;
            if (more) copy(step + 1, values);
            copy_async_commit();
            compute(step);
            if (more) keep(step + 1, values);
        }
        copy_async_wait<0>();
        if constexpr (Dk) write(g.grad_k, kv_row, key0 + warp_row, p.kv_len, dk, p.scale);
        if constexpr (Dv) write(g.grad_v, kv_row, key0 + warp_row, p.kv_len, dv, 1.0f);
    }
};

template <bool Dk, bool Dv> DEVICE void key_block(const Problem &p, const Gradients &g, unsigned char *memory, int tile) {
    KeyBlock<Dk, Dv> block{p, g, memory, shared_address(memory), tile * KEYS, int(blockIdx.y), int(blockIdx.z), 0, 0, {}, {}, {}};
    block.run();
}

} // namespace

// One warp for each row.
KERNEL(128) backward_delta(ARGUMENT Problem p, ARGUMENT Gradients g) {
    prepare_row<QUERIES, DEPTH, !DETERMINISTIC>(p, g, (long long)blockIdx.x * 4 + threadIdx.x / 32);
}

KERNEL(THREADS) backward_keys(ARGUMENT Problem p, ARGUMENT Gradients g) {
    DYNAMIC_SHARED(memory);
    // Earlier keys are seen by more queries: the heaviest blocks of a causal problem come first.
    if constexpr (!APART)
        key_block<true, true>(p, g, memory, blockIdx.x);
    else if (blockIdx.x % 2 == 0)
        key_block<true, false>(p, g, memory, blockIdx.x / 2);
    else
        key_block<false, true>(p, g, memory, blockIdx.x / 2);
}

namespace {

constexpr int ROWS = 64, PASSING = APART ? 32 : 64; // queries of a block, keys of a tile
constexpr int OWN_BYTES = ROWS * ROW_BYTES, PASSING_BYTES = PASSING * ROW_BYTES;

// The block of some queries of a head: their dq.
struct QueryBlock {
    const Problem &p;
    const Gradients &g;
    u32 shared;
    int row0;
    long long q_row, kv_row; // first rows of the head and of its KV head
    Span of_first, of_last;  // what the first and the last query see
    Span seen[2];            // of this thread's two rows, and so on
    float shift[2], delta[2];
    Sums<DEPTH / 8> dq;

    DEVICE u32 stage(int tile) const { return shared + 2 * OWN_BYTES + tile % 2 * (2 * PASSING_BYTES); }

    DEVICE void copy(int tile) const {
        const int key0 = tile * PASSING;
        copy_tile<PASSING, 128>(stage(tile), rows_of(p.k, kv_row + key0), p.kv_len - key0);
        copy_tile<PASSING, 128>(stage(tile) + PASSING_BYTES, rows_of(p.v, kv_row + key0), p.kv_len - key0);
    }

    template <bool Masked, bool Capped> DEVICE void gradients(int key0, Sums<PASSING / 8> &s, Sums<PASSING / 8> &ds) const {
        const int column = key0 + threadIdx.x % 4 * 2;
#pragma unroll
        for (int n = 0; n < PASSING / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = column + 8 * n + i % 2, half = i / 2;
                const bool sees = key >= seen[half].first && key < seen[half].end;
                score_gradient<Masked, Capped>(p, shift[half], delta[half], sees, s[n][i], ds[n][i]);
            }
    }

    DEVICE void compute(int tile) {
        const int thread = forgotten(threadIdx.x), lane = thread % 32, warp_row = thread / 32 * 16, key0 = tile * PASSING;
        Sums<PASSING / 8> s, ds;
        inner<PASSING / 8>(s, lane, shared, warp_row, stage(tile));
        inner<PASSING / 8>(ds, lane, shared + OWN_BYTES, warp_row, stage(tile) + PASSING_BYTES);
        if (p.softcap > 0.0f)
            gradients<true, true>(key0, s, ds);
        else if (key0 >= of_last.first && key0 + PASSING <= of_first.end)
            gradients<false, false>(key0, s, ds);
        else
            gradients<true, false>(key0, s, ds);
        Packed<PASSING / 8> packed;
        round_all<PASSING / 8>(packed, ds);
        add_product<PASSING / 8>(dq, lane, packed, stage(tile));
    }

    DEVICE void run() {
        const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
        const int last_row = least(row0 + ROWS, p.q_len) - 1;
        of_first = visible(p, row0, p.kv_len), of_last = visible(p, last_row, p.kv_len);
        const int first_tile = of_first.first / PASSING, end_tile = (of_last.end + PASSING - 1) / PASSING;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = least(row0 + warp_row + 8 * half + lane / 4, last_row);
            seen[half] = visible(p, row, p.kv_len);
            shift[half] = shift_of(p.lse[q_row + row]);
            delta[half] = g.delta[q_row + row];
        }
        copy_tile<ROWS, 128>(shared, rows_of(p.q, q_row + row0), p.q_len - row0);
        copy_tile<ROWS, 128>(shared + OWN_BYTES, rows_of(g.grad_o, q_row + row0), p.q_len - row0);
        if (first_tile < end_tile) copy(first_tile);
        copy_async_commit();
        clear<DEPTH / 8>(dq);
        for (int tile = first_tile; tile < end_tile; tile++) {
            copy_async_wait<0>();
            block_sync(); // this tile is there for all, and all are done with the stage of the next
            if (tile + 1 < end_tile) copy(tile + 1);
            copy_async_commit();
            compute(tile);
        }
        copy_async_wait<0>();
        write(g.grad_q, q_row, row0 + warp_row, p.q_len, dq, p.scale);
    }
};

} // namespace

// Nothing without DETERMINISTIC, where nobody launches it.
KERNEL(128) backward_queries(ARGUMENT Problem p, ARGUMENT Gradients g) {
    if constexpr (!DETERMINISTIC) return;
    DYNAMIC_SHARED(memory);
    const int row0 = int(gridDim.x - 1 - blockIdx.x) * ROWS; // later queries see more keys
    const int q_head = blockIdx.y, kv_head = q_head / (p.q_heads / p.kv_heads);
    const long long q_row = ((long long)blockIdx.z * p.q_heads + q_head) * p.q_len;
    const long long kv_row = ((long long)blockIdx.z * p.kv_heads + kv_head) * p.kv_len;
    QueryBlock block{p, g, shared_address(memory), row0, q_row, kv_row, {}, {}, {}, {}, {}, {}};
    block.run();
}

// One warp for 16 queries. Nothing with DETERMINISTIC, where nobody launches it.
KERNEL(128) backward_round(ARGUMENT Problem p, ARGUMENT Gradients g) {
    if constexpr (!DETERMINISTIC) round_strip<QUERIES, DEPTH>(p, g, (long long)blockIdx.x * 4 + threadIdx.x / 32);
}
