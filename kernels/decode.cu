// Few queries against a long cache: the keys are split over blocks, and over the warps of a block; partial results are
// merged by their log-sum-exp in a fixed order (Flash-Decoding, 2023). The time is meant to be that of reading the cache.
//
// Versions
//   1  The query heads of a group are rows of one matrix product, 16 at a time, so that a key or value is read once for
//      all of them. Each warp walks over 16 keys at a time with a cp.async ring of its own: no barrier in the loop.
//      Contiguous tensors, or pages with a list for each KV head and its own length. Compiled and emulated; not timed
//      on a GPU yet.
//
// Compile with -DELEMENT=BF16|F16 -DHEAD_DIM=8..128 (a multiple of 8) -DPAGED=0|1.
//   decode_partial  grid (splits, ceil(G Lq / 16), B Hkv), 128 threads, shared memory: 16 rows of Q, and for each of
//                   4 warps STAGES times 32 rows of K and V
//   decode_merge    grid (ceil(B Hq Lq / 4)), 128 threads
// `partials` holds [B Hkv, splits, G Lq] rows of D outputs, then as many pairs (maximum in units of log2, sum).
// With pages, k and v are pools [pages, page_tokens, D], and `pages` lists each head's pages in order.
#include "strip.cuh"

namespace {

constexpr int WARPS = 4, THREADS = 32 * WARPS, KEYS = 16, ROWS = 16;
constexpr int STAGES = WIDTH == 64 ? 4 : 3;
constexpr int TILE_BYTES = KEYS * ROW_BYTES;
constexpr int RING_BYTES = STAGES * 2 * TILE_BYTES; // of one warp
static_assert(ROWS * (WIDTH + 2) * 4 <= RING_BYTES, "a warp's partial result takes the place of its ring");

DEVICE int tokens_of(const Problem &p, int list) { return PAGED ? p.lens[list] : p.kv_len; }

// The row of token `token` of a list, in a pool or in a dense tensor.
DEVICE const u16 *row_of(const Problem &p, const void *rows, int list, int token) {
    long long row = (long long)list * p.kv_len + token;
    if (PAGED) {
        long long page = p.pages[(long long)list * p.table_width + token / p.page_tokens];
        row = page * p.page_tokens + token % p.page_tokens;
    }
    return static_cast<const u16 *>(rows) + row * HEAD_DIM;
}

} // namespace

KERNEL(128) decode_partial(ARGUMENT Problem p) {
    DYNAMIC_SHARED(memory);
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int split = blockIdx.x, row0 = blockIdx.y * ROWS, list = blockIdx.z;
    const int rows = p.q_heads / p.kv_heads * p.q_len, len = tokens_of(p, list);
    const u32 q_tile = shared_address(memory), ring = q_tile + ROWS * ROW_BYTES + warp * RING_BYTES;

    // Heads of a group follow one another, so the group's query rows are `rows` rows in one piece.
    const u16 *queries = static_cast<const u16 *>(p.q) + ((long long)list * rows + row0) * HEAD_DIM;
    copy_rows<ROWS, THREADS>(q_tile, thread, rows - row0, queries,
                             [&](int row) { return queries + (long long)row * HEAD_DIM; });
    copy_async_commit();
    copy_async_wait<0>();
    block_sync();
    const Logits logits(p);
    u32 q[WIDTH / 16][1][4];
#pragma unroll
    for (int k = 0; k < WIDTH / 16; k++) load_queries<1>(q[k], q_tile, 0, k, logits.flip);

    const Span of_first = visible(p, 0, len), of_last = visible(p, p.q_len - 1, len);
    const int begin = most(of_first.first, split * p.split_keys) + warp * KEYS;
    const int end = least(of_last.end, least(p.kv_len, (split + 1) * p.split_keys));
    const int steps = begin < end ? (end - begin + WARPS * KEYS - 1) / (WARPS * KEYS) : 0;
    Span seen[1][2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        seen[0][half] = visible(p, (row0 + 8 * half + lane / 4) % p.q_len, len);
        seen[0][half].end = least(seen[0][half].end, end);
    }

    auto copy = [&](int step) {
        const int key0 = begin + step * (WARPS * KEYS);
        const u32 target = ring + step % STAGES * (2 * TILE_BYTES);
        const u16 *k = static_cast<const u16 *>(p.k), *v = static_cast<const u16 *>(p.v);
        copy_rows<KEYS, 32>(target, lane, end - key0, k, [&](int row) { return row_of(p, p.k, list, key0 + row); });
        copy_rows<KEYS, 32>(target + TILE_BYTES, lane, end - key0, v,
                            [&](int row) { return row_of(p, p.v, list, key0 + row); });
    };
    Strip<1, KEYS> strip;
    strip.clear();
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) copy(step);
        copy_async_commit();
    }
    for (int step = 0; step < steps; step++) {
        copy_async_wait<STAGES - 2>();
        warp_sync(); // this step's rows are there for all lanes, and all are done with the stage before
        if (step + STAGES - 1 < steps) copy(step + STAGES - 1);
        copy_async_commit();
        const u32 stage = ring + step % STAGES * (2 * TILE_BYTES);
        const int key0 = begin + step * (WARPS * KEYS);
        strip.scores(stage, [&](u32 (&fragment)[1][4], int k) {
#pragma unroll
            for (int r = 0; r < 4; r++) fragment[0][r] = q[k][0][r];
        });
        strip.cap(logits);
        if (key0 < of_last.first || key0 + KEYS > least(of_first.end, end)) strip.mask(seen, key0);
        strip.absorb(logits.rest());
        strip.add_values(stage + TILE_BYTES);
    }
    strip.join_sums();
    copy_async_wait<0>();
    warp_sync();

    // Each warp's partial result takes the place of its own ring; then all threads merge them, in the warps' order.
    float *const all = reinterpret_cast<float *>(memory + ROWS * ROW_BYTES);
    constexpr int RING_FLOATS = RING_BYTES / 4, STATES = ROWS * WIDTH;
    float *const mine = all + warp * RING_FLOATS;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = 8 * half + lane / 4;
#pragma unroll
        for (int n = 0; n < WIDTH / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) mine[row * WIDTH + 8 * n + lane % 4 * 2 + i] = strip.o[0][n][2 * half + i];
        if (lane % 4 == 0) {
            const float top = strip.top[0][half];
            mine[STATES + 2 * row] = top == minus_infinity() ? top : top * logits.rest();
            mine[STATES + 2 * row + 1] = strip.sum[0][half];
        }
    }
    block_sync();
    const long long first = ((long long)list * p.splits + split) * rows + row0;
    float *const states = p.partials + (long long)gridDim.z * p.splits * rows * HEAD_DIM;
    for (int i = thread; i < least(ROWS, rows - row0) * HEAD_DIM; i += THREADS) {
        const int row = i / HEAD_DIM, d = i % HEAD_DIM;
        float top = minus_infinity(), sum = 0.0f, o = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) top = larger(top, all[w * RING_FLOATS + STATES + 2 * row]);
        const float base = top == minus_infinity() ? 0.0f : top;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float *part = all + w * RING_FLOATS;
            const float weight = exp2_fast(part[STATES + 2 * row] - base);
            sum += weight * part[STATES + 2 * row + 1];
            o += weight * part[row * WIDTH + d];
        }
        p.partials[(first + row) * HEAD_DIM + d] = o;
        if (d == 0) states[2 * (first + row)] = top, states[2 * (first + row) + 1] = sum;
    }
}

// One warp for each row of the output.
KERNEL(128) decode_merge(ARGUMENT Problem p) {
    const long long row = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, rows = p.q_heads / p.kv_heads * p.q_len;
    const long long lists = (long long)p.batch * p.kv_heads;
    if (row >= lists * rows) return;
    const long long first = row / rows * p.splits * rows + row % rows; // its row of the first split
    const float *const states = p.partials + lists * p.splits * rows * HEAD_DIM;
    float top = minus_infinity(), sum = 0.0f, o[WIDTH / 32] = {};
    for (int split = 0; split < p.splits; split++) top = larger(top, states[2 * (first + (long long)split * rows)]);
    const float base = top == minus_infinity() ? 0.0f : top;
    for (int split = 0; split < p.splits; split++) {
        const long long at = first + (long long)split * rows;
        const float weight = exp2_fast(states[2 * at] - base);
        sum += weight * states[2 * at + 1];
#pragma unroll
        for (int i = 0; i < WIDTH / 32; i++)
            if (lane + 32 * i < HEAD_DIM) o[i] += weight * p.partials[at * HEAD_DIM + lane + 32 * i];
    }
    const float factor = sum > 0.0f ? 1.0f / sum : 0.0f;
#pragma unroll
    for (int i = 0; i < WIDTH / 32; i++)
        if (lane + 32 * i < HEAD_DIM) store<ELEMENT>(p.o, row * HEAD_DIM + lane + 32 * i, o[i] * factor);
    if (lane == 0) p.lse[row] = sum > 0.0f ? (top + log2_fast(sum)) * LN_2 : minus_infinity();
}
