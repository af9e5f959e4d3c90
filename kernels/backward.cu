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
//      Compiled and emulated; not timed on a GPU yet.
//
// Compile with -DELEMENT=BF16|F16 -DHEAD_DIM=8..256 (a multiple of 8) -DDETERMINISTIC=0|1 -DSMALL=0|1. SMALL is for D 72
// to 128 where a block may have less than 145 KiB of shared memory (sm_86, sm_89, sm_120).
//   D            keys  queries  threads
//   to 64         128       32      128   a warp owns 32 keys
//   to 128        128       64      256   a warp owns 16 keys
//   to 128 SMALL   64       32      128
//   to 256         64       32      128
//   backward_delta    grid (ceil(B Hq rows / 4)), 128 threads; rows: Lq in whole tiles of queries
//   backward_keys     grid (ceil(Lk / keys), Hkv, B), twice as many in x above D 128; shared memory: K, V, twice Q and dO,
//                     twice shift and delta of the queries, without DETERMINISTIC also dS
//   backward_queries  DETERMINISTIC=1: grid (ceil(Lq / R), Hq, B), 128 threads, R = 128 to D 64, else 64; shared memory:
//                     R rows of Q and dO, twice 64 keys (to D 64 and above D 128: 32) of K and V
//   backward_round    DETERMINISTIC=0: grid (ceil(B Hq rows / 64)), 128 threads
#include "gradient.cuh"
#include "strip.cuh"

namespace {

constexpr int DEPTH = (HEAD_DIM + 15) / 16 * 16; // columns that products go through
constexpr bool APART = DEPTH > 128;              // dk and dv in blocks of their own
constexpr int TILES = DEPTH <= 64 ? 2 : 1;       // of 16 rows for each warp
constexpr int WARPS = DEPTH <= 64 || APART || SMALL ? 4 : 8, THREADS = 32 * WARPS;
constexpr int KEYS = WARPS * 16 * TILES, QUERIES = WARPS == 8 ? 64 : 32;
constexpr int KEY_BYTES = KEYS * ROW_BYTES, QUERY_BYTES = QUERIES * ROW_BYTES;
constexpr int STAGE = 2 * KEY_BYTES, ROW_VALUES = STAGE + 4 * QUERY_BYTES;

// A strip of rows as the tensor cores leave it: 16 TILES rows, `Columns` columns.
template <int Columns> using Sums = float[TILES][Columns / 8][4];
// The same, rounded to the element type and packed.
template <int Columns> using Packed = u32[TILES][Columns / 8][2];

template <int Columns> DEVICE void clear(float (&s)[TILES][Columns][4]) {
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int n = 0; n < Columns; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[m][n][i] = 0.0f;
}

// s = a b^T: rows of the tile `left` from `row0` on, all rows of the tile `right`.
template <int Columns> DEVICE void inner(float (&s)[TILES][Columns][4], int lane, u32 left, int row0, u32 right) {
    clear(s);
    // Unrolled in full, so many fragments are loaded ahead that registers run out.
#pragma unroll 4
    for (int k = 0; k < DEPTH / 16; k++) {
        u32 a[TILES][4];
#pragma unroll
        for (int m = 0; m < TILES; m++) load_matrices(a[m], left + place(row0 + 16 * m + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int n = 0; n < Columns / 2; n++) {
            u32 b[4]; // rows 0-7 and 8-15, each for depths 0-7 and 8-15
            load_matrices(b, right + place(16 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                multiply_add<ELEMENT>(s[m][2 * n], a[m], b[0], b[1]);
                multiply_add<ELEMENT>(s[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

template <int Columns> DEVICE void round_all(u32 (&to)[TILES][Columns][2], const float (&s)[TILES][Columns][4]) {
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int n = 0; n < Columns; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) to[m][n][half] = pack<ELEMENT>(s[m][n][2 * half], s[m][n][2 * half + 1]);
}

// sum += s b: the columns of s are the rows of the tile `right`.
template <int Rows> DEVICE void add_product(Sums<DEPTH> &sum, int lane, const u32 (&s)[TILES][Rows][2], u32 right) {
#pragma unroll
    for (int k = 0; k < Rows / 2; k++) {
        u32 a[TILES][4];
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int r = 0; r < 4; r++) a[m][r] = s[m][2 * k + r / 2][r % 2];
#pragma unroll
        for (int n = 0; n < DEPTH / 16; n++) {
            u32 b[4]; // columns 0-7 and 8-15, each for rows 0-7 and 8-15
            load_matrices_transposed(b, right + place(16 * k + lane / 8 % 2 * 8 + lane % 8, 2 * n + lane / 16));
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                multiply_add<ELEMENT>(sum[m][2 * n], a[m], b[0], b[1]);
                multiply_add<ELEMENT>(sum[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// Rounds a warp's strip to rows row0.. of a tensor, as far as they are less than `rows`.
DEVICE void write(void *tensor, long long first_row, int row0, int rows, const Sums<DEPTH> &sum, float factor) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = row0 + 16 * m + 8 * half + lane / 4;
            if (row >= rows) continue;
            u32 *to = reinterpret_cast<u32 *>(static_cast<u16 *>(tensor) + (first_row + row) * HEAD_DIM) + lane % 4;
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++)
                to[4 * n] = pack<ELEMENT>(sum[m][n][2 * half] * factor, sum[m][n][2 * half + 1] * factor);
        }
}

// Rows of a tensor from `first` on.
DEVICE const u16 *rows_of(const void *tensor, long long first) { return static_cast<const u16 *>(tensor) + first * HEAD_DIM; }

template <int Rows, int Threads> DEVICE void copy_tile(u32 tile, const u16 *rows, int count) {
    copy_rows<Rows, Threads>(tile, forgotten(threadIdx.x), count, rows, [=](int row) { return rows + (long long)row * HEAD_DIM; });
}

#if !DETERMINISTIC
constexpr int SCORES = ROW_VALUES + 4 * QUERIES * 4;

// Whole tiles of queries of a head.
DEVICE int query_tiles(const Problem &p) { return (p.q_len + QUERIES - 1) / QUERIES; }

// dS^T lies in shared memory as it is computed, a row for each key: where 8 queries' chunk of a row is.
DEVICE u32 score_place(int key, int chunk) {
    return key * (2 * QUERIES) + ((chunk ^ (key / (64 / QUERIES) % (QUERIES / 8))) << 4);
}

// Adds dS k of one tile to the sums of dq. A warp has 32 queries, and every COLUMN_PARTS-th 16 columns.
DEVICE void add_query_sums(float *sums, int thread, u32 scores, u32 keys) {
    constexpr int COLUMN_PARTS = WARPS * 32 / QUERIES, EACH = (DEPTH / 16 + COLUMN_PARTS - 1) / COLUMN_PARTS;
    const int lane = thread % 32, warp = thread / 32;
    const int part = warp / COLUMN_PARTS, column = warp % COLUMN_PARTS;
    float sum[2][EACH][2][4] = {};
#pragma unroll 2
    for (int k = 0; k < KEYS / 16; k++) {
        u32 a[2][4];
#pragma unroll
        for (int m = 0; m < 2; m++)
            load_matrices_transposed(a[m], scores + score_place(16 * k + lane / 16 * 8 + lane % 8, 4 * part + 2 * m + lane / 8 % 2));
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int n = column + j * COLUMN_PARTS;
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
        for (int j = 0; j < EACH; j++) {
            const int n = column + j * COLUMN_PARTS;
            if (n >= DEPTH / 16) continue;
#pragma unroll
            for (int h = 0; h < 2; h++)
                add_fragment(sums + ((2 * part + m) * (DEPTH / 8) + 2 * n + h) * 128, lane, sum[m][j][h]);
        }
}
#endif

// The block of one tile of keys: its dk, its dv, or both; with dk also its share of dq.
template <bool Dk, bool Dv> struct KeyBlock {
    const Problem &p;
    const Gradients &g;
    unsigned char *memory;
    u32 shared;
    int key0, kv_head, batch, first_tile, tiles; // of queries that see the keys
    Span seen[TILES][2];                         // by which queries each of this thread's rows is seen
    Sums<DEPTH> dk, dv;

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

    template <bool Masked, bool Capped> DEVICE void gradients(int step, Sums<QUERIES> &s, Sums<QUERIES> &ds) const {
        const int column = threadIdx.x % 4 * 2;
        const float *shifts = row_values(step), *deltas = shifts + QUERIES;
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int at = 8 * n + column + e, query = query0(step) + at;
                const float shift = shifts[at], delta = deltas[at];
#pragma unroll
                for (int m = 0; m < TILES; m++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const Span &span = seen[m][half];
                        const int i = 2 * half + e;
                        score_gradient<Masked, Capped>(p, shift, delta, query >= span.first && query < span.end, s[m][n][i], ds[m][n][i]);
                    }
            }
    }

    // Whether all queries of a step see all keys of the block.
    DEVICE bool whole(int step) const {
        const int last = query0(step) + QUERIES - 1;
        if (key0 + KEYS > p.kv_len || last >= p.q_len) return false;
        return visible(p, query0(step), p.kv_len).end >= key0 + KEYS && visible(p, last, p.kv_len).first <= key0;
    }

    DEVICE void compute(int step) {
        const int thread = forgotten(threadIdx.x), warp = thread / 32, lane = thread % 32;
        const u32 q = stage(step), grad_o = q + QUERY_BYTES;
        Sums<QUERIES> s, ds;
        inner(s, lane, shared, warp * 16 * TILES, q);
        if constexpr (Dk)
            inner(ds, lane, shared + KEY_BYTES, warp * 16 * TILES, grad_o);
        else
            clear(ds);
        if (p.softcap > 0.0f)
            gradients<true, true>(step, s, ds);
        else if (whole(step))
            gradients<false, false>(step, s, ds);
        else
            gradients<true, false>(step, s, ds);
        Packed<QUERIES> packed_ds;
        if constexpr (Dk) round_all(packed_ds, ds);
#if !DETERMINISTIC
        if constexpr (Dk) {
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const int key = (warp * TILES + m) * 16 + 8 * half + lane / 4;
                        unsigned char *row = memory + SCORES + score_place(key, n);
                        reinterpret_cast<u32 *>(row)[lane % 4] = packed_ds[m][n][half];
                    }
        }
#endif
        if constexpr (Dv) {
            Packed<QUERIES> packed;
            round_all(packed, s);
            add_product(dv, lane, packed, grad_o);
        }
        if constexpr (Dk) add_product(dk, lane, packed_ds, q);
#if !DETERMINISTIC
        if constexpr (Dk) {
            block_sync(); // every warp's dS is there
            const long long tile = head(step) * query_tiles(p) + first_tile + step % tiles;
            add_query_sums(g.sums + tile * (QUERIES * DEPTH), thread, shared + SCORES, shared);
        }
#endif
    }

    DEVICE void run() {
        const int thread = threadIdx.x, lane = thread % 32, warp_row = thread / 32 * 16 * TILES;
        const long long kv_row = ((long long)batch * p.kv_heads + kv_head) * p.kv_len;
        const Span any = viewers(p, key0, least(key0 + KEYS, p.kv_len));
        first_tile = any.first / QUERIES;
        tiles = any.first < any.end ? (any.end + QUERIES - 1) / QUERIES - first_tile : 0;
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int key = key0 + warp_row + 16 * m + 8 * half + lane / 4;
                seen[m][half] = key < p.kv_len ? viewers(p, key, key + 1) : Span{0, 0};
            }
        copy_tile<KEYS, THREADS>(shared, rows_of(p.k, kv_row + key0), p.kv_len - key0);
        if constexpr (Dk) copy_tile<KEYS, THREADS>(shared + KEY_BYTES, rows_of(p.v, kv_row + key0), p.kv_len - key0);
        const int steps = tiles * (p.q_heads / p.kv_heads);
        float values[2];
        if (steps) copy(0, values), keep(0, values);
        copy_async_commit();
        clear(dk), clear(dv);
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

// One warp for each row; rows that fill up a tile have nothing but sums to clear.
KERNEL(128) backward_delta(ARGUMENT Problem p, ARGUMENT Gradients g) {
    const int lane = threadIdx.x % 32, height = (p.q_len + QUERIES - 1) / QUERIES * QUERIES;
    const long long index = (long long)blockIdx.x * 4 + threadIdx.x / 32, head = index / height, i = index % height;
    if (head >= (long long)p.batch * p.q_heads) return;
#if !DETERMINISTIC
    for (int d = lane; d < DEPTH; d += 32) g.sums[index * DEPTH + d] = 0.0f;
#endif
    if (i >= p.q_len) return;
    const float delta = delta_of(p, g, head * p.q_len + i);
    if (lane == 0) g.delta[head * p.q_len + i] = delta;
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

#if DETERMINISTIC

namespace {

constexpr int ROWS = 64 * TILES, PASSING = TILES == 1 && !APART ? 64 : 32; // queries of a block, keys of a tile
constexpr int OWN_BYTES = ROWS * ROW_BYTES, PASSING_BYTES = PASSING * ROW_BYTES;

// The block of some queries of a head: their dq.
struct QueryBlock {
    const Problem &p;
    const Gradients &g;
    u32 shared;
    int row0;
    long long q_row, kv_row; // first rows of the head and of its KV head
    Span of_first, of_last;  // what the first and the last query see
    Span seen[TILES][2];
    float shift[TILES][2], delta[TILES][2];
    Sums<DEPTH> dq;

    DEVICE u32 stage(int tile) const { return shared + 2 * OWN_BYTES + tile % 2 * (2 * PASSING_BYTES); }

    DEVICE void copy(int tile) const {
        const int key0 = tile * PASSING;
        copy_tile<PASSING, 128>(stage(tile), rows_of(p.k, kv_row + key0), p.kv_len - key0);
        copy_tile<PASSING, 128>(stage(tile) + PASSING_BYTES, rows_of(p.v, kv_row + key0), p.kv_len - key0);
    }

    template <bool Masked, bool Capped> DEVICE void gradients(int key0, Sums<PASSING> &s, Sums<PASSING> &ds) const {
        const int column = key0 + threadIdx.x % 4 * 2;
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int n = 0; n < PASSING / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int key = column + 8 * n + i % 2, half = i / 2;
                    const bool sees = key >= seen[m][half].first && key < seen[m][half].end;
                    score_gradient<Masked, Capped>(p, shift[m][half], delta[m][half], sees, s[m][n][i], ds[m][n][i]);
                }
    }

    DEVICE void compute(int tile) {
        const int thread = forgotten(threadIdx.x), lane = thread % 32, warp_row = thread / 32 * 16 * TILES, key0 = tile * PASSING;
        Sums<PASSING> s, ds;
        inner(s, lane, shared, warp_row, stage(tile));
        inner(ds, lane, shared + OWN_BYTES, warp_row, stage(tile) + PASSING_BYTES);
        if (p.softcap > 0.0f)
            gradients<true, true>(key0, s, ds);
        else if (key0 >= of_last.first && key0 + PASSING <= of_first.end)
            gradients<false, false>(key0, s, ds);
        else
            gradients<true, false>(key0, s, ds);
        Packed<PASSING> packed;
        round_all(packed, ds);
        add_product(dq, lane, packed, stage(tile));
    }

    DEVICE void run() {
        const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * TILES;
        const int last_row = least(row0 + ROWS, p.q_len) - 1;
        of_first = visible(p, row0, p.kv_len), of_last = visible(p, last_row, p.kv_len);
        const int first_tile = of_first.first / PASSING, end_tile = (of_last.end + PASSING - 1) / PASSING;
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = least(row0 + warp_row + 16 * m + 8 * half + lane / 4, last_row);
                seen[m][half] = visible(p, row, p.kv_len);
                shift[m][half] = shift_of(p.lse[q_row + row]);
                delta[m][half] = g.delta[q_row + row];
            }
        copy_tile<ROWS, 128>(shared, rows_of(p.q, q_row + row0), p.q_len - row0);
        copy_tile<ROWS, 128>(shared + OWN_BYTES, rows_of(g.grad_o, q_row + row0), p.q_len - row0);
        if (first_tile < end_tile) copy(first_tile);
        copy_async_commit();
        clear(dq);
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

KERNEL(128) backward_queries(ARGUMENT Problem p, ARGUMENT Gradients g) {
    DYNAMIC_SHARED(memory);
    const int row0 = int(gridDim.x - 1 - blockIdx.x) * ROWS; // later queries see more keys
    const int q_head = blockIdx.y, kv_head = q_head / (p.q_heads / p.kv_heads);
    const long long q_row = ((long long)blockIdx.z * p.q_heads + q_head) * p.q_len;
    const long long kv_row = ((long long)blockIdx.z * p.kv_heads + kv_head) * p.kv_len;
    QueryBlock block{p, g, shared_address(memory), row0, q_row, kv_row, {}, {}, {}, {}, {}, {}};
    block.run();
}

#else

// One warp for 16 queries.
KERNEL(128) backward_round(ARGUMENT Problem p, ARGUMENT Gradients g) {
    const int lane = threadIdx.x % 32, strips = query_tiles(p) * (QUERIES / 16);
    const long long index = (long long)blockIdx.x * 4 + threadIdx.x / 32, head = index / strips;
    if (head >= (long long)p.batch * p.q_heads) return;
    const float *sums = g.sums + index * (16 * DEPTH);
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

#endif
