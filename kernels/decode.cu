// Few queries against a long cache: the keys are split over blocks, and over the warps of a block; partial results are
// merged by their log-sum-exp in a fixed order (Flash-Decoding, 2023). The time is meant to be that of reading the cache.
//
// Versions
//   1  The query heads of a group are in one matrix product, so that a key or value is read once for all of them. Each warp
//      walks over 16 keys at a time with a cp.async ring of its own: no barrier in the loop. Contiguous tensors, or pages with
//      a list for each KV head and its own length.
//   2  D up to 256, D that is no multiple of 8 (copied element by element), f32 on CUDA cores. Warps and stages as the
//      launch plans them, so that rings fit GPUs with less shared memory. The size of pages is known to the compiler.
//      An H100 reads 2.9 TB/s in it, 97% of what a copy there reads and writes.
//   3  Under a window the first split begins where the window does, so that all splits have keys. The merge has a block
//      for each row. Keys of a step that do not lie in one page are looked up once each, a step ahead.
//   4  Rows of codes (formats.cuh): a ring has their bytes, which a warp widens into a tile of its own before it needs them.
//      Pages are whole steps then. On an H100 1.42 times as fast as bf16 in pages for int8, 1.63 for fp8-e4m3, 1.45 for int4.
//   5  Query rows are the columns of the products (columns.cuh), so that 8 of them fill one, and output is scaled down only
//      where a maximum was raised: 210 instructions for 16 keys at D 128 where there were 302. Codes become operands in
//      registers, without a tile (operands.cuh): 495 for int8 where there were 1012. One block of up to 16 warps has a
//      multiprocessor for itself, the merge fewer partial results, and keys are under way before queries are waited for. Over
//      one piece, on an H100, 1.71 times as fast as bf16 was for int8, 1.83 for fp8-e4m3, 2.94 for int4; bf16 1.02.
//   6  Pages that are whole steps are looked up by a warp's lanes for 32 steps at a time: one step ahead was too late for
//      codes, which in pages were 1.16 to 1.64 times as fast as bf16 on an H200. Not timed.
//
// Compile with -DELEMENT=F32|BF16|F16 -DHEAD_DIM=1..256 -DPAGE_TOKENS=tokens of a page, or 0 for contiguous tensors
// -DWARPS -DSTAGES=of each warp's ring, 2 or more -DROWS=16 (f32: 4, 8 or 16), and the formats of formats.cuh. KEYS is 16
// (f32: 8).
//   decode_partial  grid (splits, ceil(G Lq / ROWS), B Hkv), 32 WARPS threads, shared memory: ROWS of Q, and for each warp
//                   KEYS rows of K and V where these are codes, and STAGES times as many as they lie in memory; behind them
//                   8 bytes for each key of a step of all warps, where pages are no whole number of steps
//   decode_merge    grid (B Hq Lq), 256 threads
// `split_keys` is a multiple of WARPS KEYS. Both it and `splits` are run-time numbers: what is compiled fits every length.
// `partials` holds [B Hkv, splits, G Lq] rows of D outputs, then as many pairs (maximum in units of log2, sum).
#include "pages.cuh"
#include "rows.cuh"
#if ELEMENT == F32
#include "strip_f32.cuh"
#else
#include "columns.cuh"
#endif

namespace {

constexpr int THREADS = 32 * WARPS, KEYS = ELEMENT == F32 ? 8 : 16, MERGE_WARPS = 8;
static_assert(HEAD_DIM <= 32 * MERGE_WARPS, "a thread for each column");
constexpr int TILE_BYTES = KEYS * ROW_BYTES;
// Rows of codes are read in their stage, or pass through it on their way to a tile; others have a tile in each stage.
using KeyArrivals = Arrivals<KeyFormat, KEYS, 32, KeyFormat::SWIZZLED>;
using ValueArrivals = Arrivals<ValueFormat, KEYS, 32, ValueFormat::SWIZZLED>;
constexpr bool WIDEN_KEYS = KeyFormat::CODED && !KeyFormat::IN_PLACE, WIDEN_VALUES = ValueFormat::CODED && !ValueFormat::IN_PLACE;
constexpr int KEY_TILE_BYTES = WIDEN_KEYS ? TILE_BYTES : 0, VALUE_TILE_BYTES = WIDEN_VALUES ? TILE_BYTES : 0;
constexpr int STAGE_KEY_BYTES = KeyFormat::CODED ? KeyArrivals::ROOM_BYTES : TILE_BYTES;
constexpr int STAGE_BYTES = STAGE_KEY_BYTES + (ValueFormat::CODED ? ValueArrivals::ROOM_BYTES : TILE_BYTES);
constexpr int STAGES_FROM = KEY_TILE_BYTES + VALUE_TILE_BYTES;     // in a ring
// Of one warp, whose partial result takes the place of its ring.
constexpr int RING_BYTES = (most(STAGES_FROM + STAGES * STAGE_BYTES, ROWS * (WIDTH + 2) * 4) + 127) / 128 * 128;
constexpr bool Q_KEPT = ELEMENT != F32 && ROWS * WIDTH <= 2048;

// What a lane of the merge has of a row: as many floats as it can read at once.
constexpr int PART_FLOATS = HEAD_DIM % 4 == 0 && HEAD_DIM > 64 ? 4 : HEAD_DIM % 2 == 0 && HEAD_DIM > 32 ? 2 : 1;
constexpr int PARTS = (HEAD_DIM + 32 * PART_FLOATS - 1) / (32 * PART_FLOATS);

struct alignas(4 * PART_FLOATS) Part {
    float x[PART_FLOATS];

    DEVICE static Part at(const float *row) { return *reinterpret_cast<const Part *>(row); }
    DEVICE void add(float factor, const Part &other) {
#pragma unroll
        for (int i = 0; i < PART_FLOATS; i++) x[i] += factor * other.x[i];
    }
};

DEVICE float largest_of_warp(float x) {
    for (int mask = 16; mask; mask /= 2) x = larger(x, shuffle_xor(x, mask));
    return x;
}
template <bool Codes> DEVICE auto either(const unsigned char *codes, u32 tile) {
    if constexpr (Codes) return codes;
    else return tile;
}

// Where the keys and values of one list lie.
#if PAGE_TOKENS
#define OPERANDS ARGUMENT Problem p, [[maybe_unused]] ARGUMENT Pages pages

constexpr int KEY_PAGE_BYTES = PAGE_TOKENS * KeyFormat::BYTES, VALUE_PAGE_BYTES = PAGE_TOKENS * ValueFormat::BYTES;
constexpr bool WHOLE_STEPS = PAGE_TOKENS % KEYS == 0; // the keys of a step lie in one page
constexpr bool ALIKE = KEY_PAGE_BYTES == VALUE_PAGE_BYTES;
static_assert(WHOLE_STEPS || !(KeyFormat::CODED || ValueFormat::CODED), "pages of codes are whole steps");
// Where they do not: each one's place, behind the rings. The host says so (kernels/src/attention/cuda/decode.rs), and the emulation.
[[maybe_unused]] constexpr int PLACES_BYTES = WHOLE_STEPS ? 0 : WARPS * KEYS * 8;

struct List {
    const Pages &pages;
    long long list;
    int len, end;     // nothing is looked up from `end` on; there may be fewer keys, how many is not waited for
    long long behind; // values lie so far behind their keys, where pages of both have the same size
    const unsigned char **places; // of a step's keys, where they do not lie in one page
    const unsigned char *now, *values_now;
    // Each lane looks up the page of one of the warp's next 32 steps, all long before they are needed; or of a key of the next.
    u32 page;
    const unsigned char *keys_ahead, *values_ahead;
    int turn; // the step's number of 32

    DEVICE List(const Problem &p, const Pages &pages, int list, unsigned char *behind_rings)
        : pages(pages), list(list), len(most(0, least(pages.lens[list], p.kv_len))),
          end(least(p.kv_len, pages.table_width * PAGE_TOKENS)),
          behind(to_values(pages, KEY_PAGE_BYTES)),
          places(reinterpret_cast<const unsigned char **>(behind_rings) + threadIdx.x / 32 * KEYS), now(nullptr), values_now(nullptr),
          page(0), keys_ahead(nullptr), values_ahead(nullptr), turn(0) {}

    DEVICE Sight sight(const Problem &p) const { return sight_of(pages, p, list, len); }

    // Begins to look where the keys from `key` on lie, if there are any before `last`.
    DEVICE void look_up(int key, int last) {
        end = least(end, last);
        look_up(key);
    }
    DEVICE void look_up(int key) {
        key += WHOLE_STEPS ? threadIdx.x % 32 * (WARPS * KEYS) : threadIdx.x % KEYS;
        if (key < end) page = page_of(pages, list, key / PAGE_TOKENS);
    }

    // Goes to the keys from `key` on, those of the warp's next step.
    DEVICE void go_to(int key) {
        if constexpr (WHOLE_STEPS) {
            const int within = key % PAGE_TOKENS, step = WARPS * KEYS; // all steps of a warp begin there in whole pages
            if (turn == 0) {
                keys_ahead = keys_of(pages, page, KEY_PAGE_BYTES);
                if (!ALIKE) values_ahead = values_of(pages, page, KEY_PAGE_BYTES, VALUE_PAGE_BYTES);
                look_up(key + 32 * step);
            }
            now = shuffle(keys_ahead, turn) + within * KeyFormat::BYTES;
            values_now = ALIKE ? now + behind : shuffle(values_ahead, turn) + within * ValueFormat::BYTES;
            turn = (turn + 1) % 32;
        } else {
            warp_sync(); // all lanes have read the places of the step before
            const int at = (key + threadIdx.x % KEYS) % PAGE_TOKENS;
            if (threadIdx.x % 32 < KEYS)
                places[threadIdx.x % 32] = keys_of(pages, page, KEY_PAGE_BYTES) + at * KeyFormat::BYTES;
            warp_sync();
            look_up(key + WARPS * KEYS);
        }
    }

    DEVICE const unsigned char *key(int row) const {
        if constexpr (WHOLE_STEPS) return now + row * KeyFormat::BYTES;
        return places[row];
    }
    DEVICE const unsigned char *value(int row) const {
        if constexpr (WHOLE_STEPS) return values_now + row * ValueFormat::BYTES;
        return key(row) + behind;
    }
};
#else
#define OPERANDS ARGUMENT Problem p

[[maybe_unused]] constexpr int PLACES_BYTES = 0;

struct List {
    const unsigned char *k, *v;
    int len, key0;

    DEVICE List(const Problem &p, int list)
        : k(static_cast<const unsigned char *>(p.k) + list * KeyFormat::list_bytes(p.kv_len)),
          v(static_cast<const unsigned char *>(p.v) + list * ValueFormat::list_bytes(p.kv_len)), len(p.kv_len) {}

    struct Dense {
        int len;
        DEVICE Span of(const Problem &p, int query) const { return visible(p, query, len); }
    };
    DEVICE Dense sight(const Problem &) const { return {len}; }

    DEVICE void look_up(int, int) {}
    DEVICE void go_to(int key) { key0 = key; }
    DEVICE const unsigned char *key(int row) const { return k + (long long)(key0 + row) * KeyFormat::BYTES; }
    DEVICE const unsigned char *value(int row) const { return v + (long long)(key0 + row) * ValueFormat::BYTES; }
};
#endif

} // namespace

KERNEL(32 * WARPS) decode_partial(OPERANDS) {
    DYNAMIC_SHARED(memory);
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int split = blockIdx.x, row0 = blockIdx.y * ROWS, list = blockIdx.z;
    const int rows = p.q_heads / p.kv_heads * p.q_len;
    const u32 q_tile = shared_address(memory), ring = q_tile + ROWS * ROW_BYTES + warp * RING_BYTES;
#if PAGE_TOKENS
    List kv(p, pages, list, memory + ROWS * ROW_BYTES + WARPS * RING_BYTES);
#else
    List kv(p, list);
#endif

    // Heads of a group follow one another, so the group's query rows are `rows` rows in one piece.
    const unsigned char *first_query = row_at(p.q, (long long)list * rows + row0);
    copy_rows<ROWS, THREADS>(q_tile, thread, rows - row0, p.q, [&](int row) { return row_at(first_query, row); });
    copy_async_commit();

    const auto sight = kv.sight(p);
    const Span of_first = sight.of(p, 0), of_last = sight.of(p, p.q_len - 1);
    // Splits begin at the first key that any row sees, or a step's alignment before it.
    const int start = of_first.first / KEYS * KEYS + split * p.split_keys;
    const int begin = start + warp * KEYS, end = least(of_last.end, start + p.split_keys);
    const int steps = begin < end ? (end - begin + WARPS * KEYS - 1) / (WARPS * KEYS) : 0;
    Strip<ROWS, KEYS> strip;
    Span seen[strip.SLOTS];
#pragma unroll
    for (int slot = 0; slot < strip.SLOTS; slot++) {
        seen[slot] = sight.of(p, (row0 + strip.row(slot)) % p.q_len);
        seen[slot].end = least(seen[slot].end, end);
    }
    kv.look_up(begin, start + p.split_keys);

    auto copy = [&](int step) {
        const int key0 = begin + step * (WARPS * KEYS);
        const u32 keys = ring + STAGES_FROM + step % STAGES * STAGE_BYTES, values = keys + STAGE_KEY_BYTES;
        kv.go_to(key0);
        if constexpr (KeyFormat::CODED)
            KeyArrivals::copy(keys, lane, end - key0, kv.key(0));
        else
            copy_rows<KEYS, 32>(keys, lane, end - key0, p.q, [&](int row) { return kv.key(row); });
        if constexpr (ValueFormat::CODED)
            ValueArrivals::copy(values, lane, end - key0, kv.value(0));
        else
            copy_rows<KEYS, 32>(values, lane, end - key0, p.q, [&](int row) { return kv.value(row); });
    };
    strip.clear();
#pragma unroll 1
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) copy(step);
        copy_async_commit();
    }
    copy_async_wait<STAGES - 1>(); // the queries, while keys are under way
    block_sync();
    const Logits logits(p);
    const Queries<ROWS, Q_KEPT> queries(q_tile, 0, logits);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        copy_async_wait<STAGES - 2>();
        warp_sync(); // this step's rows are there for all lanes, and all are done with the stage before
        if (step + STAGES - 1 < steps) copy(step + STAGES - 1);
        copy_async_commit();
        const u32 stage = ring + STAGES_FROM + step % STAGES * STAGE_BYTES;
        const int key0 = begin + step * (WARPS * KEYS);
        const u32 keys = WIDEN_KEYS ? ring : stage, values = WIDEN_VALUES ? ring + KEY_TILE_BYTES : stage + STAGE_KEY_BYTES;
        const unsigned char *const key_codes = memory + (stage - q_tile), *const value_codes = key_codes + STAGE_KEY_BYTES;
        if constexpr (WIDEN_KEYS) KeyArrivals::widen(keys, key_codes, lane);
        if constexpr (WIDEN_VALUES) ValueArrivals::widen(values, value_codes, lane);
        // The tiles are there for all lanes; all were done with them before this step's first.
        if constexpr (WIDEN_KEYS || WIDEN_VALUES) warp_sync();
        strip.scores(either<KeyFormat::IN_PLACE>(key_codes, keys), queries);
        strip.cap(logits);
        if (key0 < of_last.first || key0 + KEYS > least(of_first.end, end)) strip.mask(seen, key0);
        strip.absorb(logits.rest());
        strip.add_values(either<ValueFormat::IN_PLACE>(value_codes, values));
    }
    strip.join_sums();
    copy_async_wait<0>();
    warp_sync();

    // Each warp's partial result takes the place of its own ring; then all threads merge them, in the warps' order.
    float *const all = reinterpret_cast<float *>(memory + ROWS * ROW_BYTES);
    constexpr int RING_FLOATS = RING_BYTES / 4, STATES = ROWS * WIDTH;
    float *const mine = all + warp * RING_FLOATS;
#pragma unroll
    for (int slot = 0; slot < strip.SLOTS; slot++) {
        const int row = strip.row(slot);
        strip.put(slot, mine + row * WIDTH);
        if (strip.leads()) {
            const float top = strip.top[slot];
            mine[STATES + 2 * row] = top == minus_infinity() ? top : top * logits.rest();
            mine[STATES + 2 * row + 1] = strip.sum[slot];
        }
    }
    block_sync();
    const long long first = ((long long)list * p.splits + split) * rows + row0;
    float *const states = p.partials + (long long)gridDim.z * p.splits * rows * HEAD_DIM;
#pragma unroll 1
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

// A block for each row of the output, whose warps take splits in turn.
KERNEL(32 * MERGE_WARPS) decode_merge(OPERANDS) {
    __shared__ float tops[MERGE_WARPS], sums[MERGE_WARPS];
    alignas(16) __shared__ float outputs[MERGE_WARPS][HEAD_DIM];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, row = blockIdx.x;
    const int rows = p.q_heads / p.kv_heads * p.q_len;
    const long long all_rows = (long long)p.batch * p.kv_heads * rows;
    const long long first = (long long)(row / rows) * p.splits * rows + row % rows; // its row of the first split
    const float *const partials = p.partials + first * HEAD_DIM, *const states = p.partials + all_rows * p.splits * HEAD_DIM + 2 * first;
    float top = minus_infinity();
    for (int split = thread; split < p.splits; split += 32 * MERGE_WARPS) top = larger(top, states[2 * (long long)split * rows]);
    top = largest_of_warp(top);
    if (lane == 0) tops[warp] = top;
    block_sync();
#pragma unroll
    for (int w = 0; w < MERGE_WARPS; w++) top = larger(top, tops[w]);

    const float base = top == minus_infinity() ? 0.0f : top;
    float sum = 0.0f;
    Part o[PARTS] = {};
#pragma unroll 4
    for (int split = warp; split < p.splits; split += MERGE_WARPS) {
        const long long at = (long long)split * rows;
        const float weight = exp2_fast(states[2 * at] - base);
        sum += weight * states[2 * at + 1];
#pragma unroll
        for (int i = 0; i < PARTS; i++)
            if (const int d = (lane + 32 * i) * PART_FLOATS; d < HEAD_DIM) o[i].add(weight, Part::at(partials + at * HEAD_DIM + d));
    }
    if (lane == 0) sums[warp] = sum;
#pragma unroll
    for (int i = 0; i < PARTS; i++)
        if (const int d = (lane + 32 * i) * PART_FLOATS; d < HEAD_DIM) *reinterpret_cast<Part *>(&outputs[warp][d]) = o[i];
    block_sync();

    sum = 0.0f;
#pragma unroll
    for (int w = 0; w < MERGE_WARPS; w++) sum += sums[w];
    const float factor = sum > 0.0f ? 1.0f / sum : 0.0f;
    if (const int d = thread; d < HEAD_DIM) {
        float all = 0.0f;
#pragma unroll
        for (int w = 0; w < MERGE_WARPS; w++) all += outputs[w][d];
        store<ELEMENT>(p.o, (long long)row * HEAD_DIM + d, all * factor);
    }
    if (thread == 0) p.lse[row] = sum > 0.0f ? (top + log2_fast(sum)) * LN_2 : minus_infinity();
}
