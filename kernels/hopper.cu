// Attention forward for Hopper (sm_90a only) in the manner of FlashAttention-3 (Shah et al. 2024): one warpgroup copies,
// the others compute, and tensor cores work while softmax runs.
//
// A block takes one multiprocessor and goes through many items; an item is ROWS queries of one head, 64 for each
// consumer. The producer's one thread claims items by an atomic counter, hands them to the consumers, and sends Q, K and
// V by TMA into two rings of STAGES tiles; barriers tell what is full and what is free. A consumer has scores, output and
// probabilities in registers. Two things hide the softmax:
//   inside a consumer  the product Q K of the next tile and P V of this one are sent off together; half of the softmax
//                      of the next tile runs while P V does
//   between consumers  they send their products off in turn (up to D 128), so that one computes exponentials while the
//                      other's products run
// Q stays in shared memory, which is given back with the last scores: the next item's Q arrives meanwhile. The output
// goes from registers to global memory by plain stores of 16 bytes: a staged copy would need memory that D 256 does not
// have or hold on to that of Q, and would need a fence; rows past the end are not stored. Each consumer has its own Q, and
// goes on to the next item by itself.
//
// Versions
//   1  items went to blocks in a fixed order, there and back: in a causal problem one multiprocessor in four idled, as
//      kernels/src/attention/cuda/hopper/schedule.rs shows. Each warp worked out its items by division.
//   2  as above; tiles at the edge of a mask have code of their own; a block that is done claims the next item, of a
//      causal problem the heaviest first, among heads whose keys and values fit into 32 MiB of the L2; items are worked out
//      by the producer alone. What NVRTC 13.0.88 made of it:
//        - With the consumer's number from threadIdx alone, descriptors were worked out in each thread: 278 R2UR and 96
//          bytes of spills at D 256. From one lane for all: 83 and none.
//        - A claim whose answer was added to at once was waited for, in front of the last tile of values.
//        - Soft-cap takes registers: it has shorter tiles at D 64 and 256, and is compiled in, as is the scale's sign.
//   3  what the first GPU showed, an H100 (README.md): 10 to 17% faster, at 742 TFLOP/s causal at 16K and 754 full at 8K.
//        - An item cost 4.5 us besides its tiles, where FlashAttention-3's cost 2: both consumers waited for one barrier of
//          Q, and began and ended together. Now each has its own queries and item.
//        - P V was waited for after all of a softmax, and P packed and O scaled after that. Now half of the exponentials
//          hide that work.
//        - Descriptors are additions to a base, and places in the rings walk without a division. Items are plain loads from
//          shared memory, so that ptxas knows trips and places to be the same for a warp; by `asm` it does not, and works
//          descriptors out in each lane.
//        - The keys of a tile are copied before the values of the tile before it: they are needed half a step earlier.
//
// Compile with -DELEMENT=BF16|F16 -DHEAD_DIM=64|128|256 -DKEYS=64|80|112|128|176 (kernels/src/attention/cuda/hopper.rs says which)
// -DCAPPED=0|1 (whether there is a soft-cap) -DNEGATIVE=0|1 (the sign of the scale).
//   hopper_forward  grid: multiprocessors, or fewer items; THREADS threads; shared memory: Q, rings of K and V, an item for
//                   each consumer, barriers. One launch of a module at a time: launches share the counter.
#include "hopper.cuh"
#include "problem.cuh"

namespace {

static_assert(HEAD_DIM == 64 || HEAD_DIM == 128 || HEAD_DIM == 256, "head dims of hopper");
static_assert(KEYS % 16 == 0, "a tile of keys is a whole number of steps of the second product");
constexpr int CONSUMERS = HEAD_DIM == 64 ? 3 : 2;
constexpr int ROWS = 64 * CONSUMERS, THREADS = 128 * (CONSUMERS + 1);
constexpr bool IN_TURN = HEAD_DIM <= 128;
// Of a producer's and a consumer's threads: together no more than the 65536 registers that the block starts with.
constexpr int FEW_REGISTERS = CONSUMERS == 3 ? 32 : 40, MANY_REGISTERS = CONSUMERS == 3 ? 160 : 232;

// Tiles lie in shared memory in slabs of 64 columns: rows of 128 bytes, as a box is copied.
constexpr int SLABS = HEAD_DIM / 64, ROW_BYTES = 128;
constexpr int Q_SLAB_BYTES = 64 * ROW_BYTES, Q_PART_BYTES = SLABS * Q_SLAB_BYTES, Q_BYTES = CONSUMERS * Q_PART_BYTES;
constexpr int KV_SLAB_BYTES = KEYS * ROW_BYTES, KV_BYTES = SLABS * KV_SLAB_BYTES;
constexpr int EIGHT_ROWS_BYTES = 8 * ROW_BYTES;
// As many tiles of keys and of values as there is room for, at most four each.
constexpr int MOST_BYTES = 227 * 1024, ROOM = (MOST_BYTES - Q_BYTES - 1024) / (2 * KV_BYTES), STAGES = ROOM < 4 ? ROOM : 4;
constexpr int ITEMS_AT = Q_BYTES + 2 * STAGES * KV_BYTES, BARRIERS_AT = ITEMS_AT + 16 * CONSUMERS;
constexpr int BARRIERS = 2 * CONSUMERS + 4 * STAGES;
constexpr int SHARED_BYTES = BARRIERS_AT + 8 * BARRIERS;
static_assert(STAGES >= 2 && SHARED_BYTES <= MOST_BYTES, "what a block of Hopper may have");
static_assert(KV_SLAB_BYTES % 1024 == 0 && Q_SLAB_BYTES % 1024 == 0, "slabs start where the swizzle's pattern does");

// A place in a ring of tiles, and the parity of the round there: in one register, and without a division.
struct Place {
    u32 number = 0; // twice the stage, and the parity

    DEVICE u32 stage() const { return number / 2; }
    DEVICE u32 parity() const { return number & 1; }
    DEVICE void next() {
        number += 2;
        if (number >= 2 * STAGES) number = (number & 1) ^ 1;
    }
};

// Tiles of keys or of values, and the barriers of each: full for consumers, empty for the producer.
struct Ring {
    u32 tiles, full, empty;

    DEVICE u32 tile(const Place &at) const { return tiles + at.stage() * KV_BYTES; }
    DEVICE u32 full_at(const Place &at) const { return full + 8 * at.stage(); }
    DEVICE u32 empty_at(const Place &at) const { return empty + 8 * at.stage(); }

    DEVICE void wait_full(const Place &at) const { barrier_wait(full_at(at), at.parity()); }
    DEVICE void wait_empty(const Place &at) const { barrier_wait(empty_at(at), at.parity() ^ 1); }
};

// Each consumer has its own 64 queries and its own copy of an item, full and empty together: one may begin the next item
// while the other ends this one.
struct Block {
    u32 q, items, q_full, q_empty;
    const int *items_at; // the items, for plain loads
    Ring keys, values;

    DEVICE explicit Block(unsigned char *memory) {
        const u32 shared = shared_address(memory);
        items_at = reinterpret_cast<const int *>(memory + ITEMS_AT);
        const u32 barriers = shared + BARRIERS_AT, rings = barriers + 16 * CONSUMERS;
        q = shared, items = shared + ITEMS_AT, q_full = barriers, q_empty = barriers + 8 * CONSUMERS;
        keys = {shared + Q_BYTES, rings, rings + 8 * STAGES};
        values = {keys.tiles + STAGES * KV_BYTES, rings + 16 * STAGES, rings + 24 * STAGES};
    }

    DEVICE void make_barriers() const {
        for (u32 i = 0; i < CONSUMERS; i++) {
            barrier_make(q_full + 8 * i, 1);
            barrier_make(q_empty + 8 * i, 4); // one thread of each warp
        }
        for (u32 i = 0; i < STAGES; i++) {
            barrier_make(keys.full + 8 * i, 1);
            barrier_make(values.full + 8 * i, 1);
            barrier_make(keys.empty + 8 * i, 4 * CONSUMERS);
            barrier_make(values.empty + 8 * i, 4 * CONSUMERS);
        }
        barriers_made();
    }
};

// ROWS queries of a head, and the tiles of keys that any of them sees: what consumers are told.
struct Item {
    int row0, q_head; // of all sequences' heads; -1: there is no such item
    int first_tile, end_tile;
};

DEVICE int row_tiles(const Problem &p) { return (p.q_len + ROWS - 1) / ROWS; }
DEVICE int item_count(const Problem &p) { return p.batch * p.q_heads * row_tiles(p); }

// Item `number` of all, the heaviest first. kernels/src/attention/cuda/hopper/schedule.rs has the same list.
DEVICE Item item_at(const Problem &p, int number) {
    if (number >= item_count(p)) return {0, -1, 0, 0};
    const int group = p.q_heads / p.kv_heads, lists = p.batch * p.kv_heads;
    // Heads that run at the same time share the L2: as many as find room for their keys and values in 32 MiB of it. Where
    // items are alike, which no order evens out, one list after the other: fewer keys and values come at a time.
    const int room = p.causal || p.window ? (32 << 20) / (4 * HEAD_DIM) / p.kv_len : 1;
    const int section_lists = least(most(room, 1), lists);
    const int section_items = section_lists * group * row_tiles(p);
    const int section = number / section_items, rest = number % section_items;
    const int heads = least(section_lists, lists - section * section_lists) * group;
    Item item;
    item.q_head = section * section_lists * group + rest % heads;
    item.row0 = (row_tiles(p) - 1 - rest / heads) * ROWS; // later queries see more keys
    // Ends and starts of what rows see grow with the row: the first and the last row bound all.
    item.first_tile = visible(p, item.row0, p.kv_len).first / KEYS;
    item.end_tile = (visible(p, least(item.row0 + ROWS, p.q_len) - 1, p.kv_len).end + KEYS - 1) / KEYS;
    return item;
}

// How many items were claimed beyond the first of each block. Every item but these is claimed once, and every block claims
// once in vain: as many claims as items, so the last one of a launch finds the counter at its end and sets it back.
GLOBAL_COUNTER(claims);

DEVICE u32 claim(const Problem &p) { return count_round(&claims, u32(item_count(p) - 1)); }

// Sends everything that consumers need, in the order in which they need it: the keys of a tile before the values of the one
// before. Tiles come from the last to the first: what the mask or the end of the keys cuts comes first. The next item is
// claimed with the last tile of this one: late, so that no block holds back work that another could begin, and early enough
// for the answer to come while tiles are computed.
DEVICE void produce(const Problem &p, const Block &block, const TensorMap &q, const TensorMap &k, const TensorMap &v) {
    auto load = [&](const Ring &ring, const TensorMap &map, const Place &at, int tile, int list) {
        ring.wait_empty(at);
        barrier_expect(ring.full_at(at), KV_BYTES);
#pragma unroll 1 // else addresses take more registers than there are
        for (int slab = 0; slab < SLABS; slab++)
            copy_box(ring.tile(at) + slab * KV_SLAB_BYTES, map, ring.full_at(at), 64 * slab, tile * KEYS, list);
    };
    // To each consumer, once it has let go of the item before: `item`, and its queries where there are keys for them.
    auto hand_out = [&](const Item &item, u32 turn, bool seen) {
#pragma unroll 1
        for (u32 i = 0; i < CONSUMERS; i++) {
            const u32 full = block.q_full + 8 * i;
            barrier_wait(block.q_empty + 8 * i, (turn & 1) ^ 1);
            store_chunk(block.items + 16 * i, {u32(item.row0), u32(item.q_head), u32(item.first_tile), u32(item.end_tile)});
            if (!seen) {
                barrier_arrive(full);
                continue;
            }
            barrier_expect(full, Q_PART_BYTES);
#pragma unroll 1
            for (int slab = 0; slab < SLABS; slab++)
                copy_box(block.q + i * Q_PART_BYTES + slab * Q_SLAB_BYTES, q, full, 64 * slab, item.row0 + 64 * i, item.q_head);
        }
    };
    Place keys_at, values_at;
    u32 claimed = blockIdx.x - gridDim.x;
    for (u32 turn = 0;; turn++) {
        const Item item = item_at(p, int(gridDim.x + claimed)); // added here: where it is claimed, the sum would be waited for
        if (item.first_tile >= item.end_tile) { // rows that see nothing, or no item
            hand_out(item, turn, false);
            if (item.q_head < 0) return;
            claimed = claim(p);
        }
        const int list = item.q_head / (p.q_heads / p.kv_heads);
        auto load_keys = [&](int tile) { load(block.keys, k, keys_at, tile, list), keys_at.next(); };
#pragma unroll 1
        for (int tile = item.end_tile - 1; tile >= item.first_tile; tile--) {
            if (tile == item.end_tile - 1) load_keys(tile), hand_out(item, turn, true);
            tile > item.first_tile ? load_keys(tile - 1) : void(claimed = claim(p));
            load(block.values, v, values_at, tile, list), values_at.next();
        }
    }
}

struct Consumer {
    const Problem &p;
    const Block &block;
    const int number;          // of this consumer
    u32 turn = 0;              // items so far
    Place keys_at, values_at;  // of the next product of each kind
    float factor;              // makes scores logits in units of log2; the sign of the scale is in the products
    float s[KEYS / 2];
    float o[HEAD_DIM / 2];
    u32 weights[KEYS / 16][4]; // probabilities before division, as left operand
    float top[2], sum[2];      // of rows g and g + 8: the running maximum of scores, and this thread's part of the sum

    DEVICE Consumer(const Problem &problem, const Block &shared, int which) : p(problem), block(shared), number(which) {
        // A scale of 0 must leave masked scores at -inf.
        factor = larger((CAPPED ? p.softcap : size(p.scale)) * LOG2_E, 1e-37f);
    }

    // Lets the producer fill memory that this warp no longer reads.
    DEVICE void release(u32 barrier) const {
        if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
    }

    DEVICE void release_queries() const { release(block.q_empty + 8 * number); }

    // The next item, as long as there is one; its Q is there too.
    DEVICE bool take(Item &item) {
        barrier_wait(block.q_full + 8 * number, turn++ & 1);
        const int *x = block.items_at + 4 * number;
        item = {x[0], x[1], x[2], x[3]};
        warp_sync(); // all have read: one may give it back for them
        return item.q_head >= 0;
    }

    // Sends off s = q k^T.
    DEVICE void send_scores() {
        const u64 rows = matrix_at(block.q + number * Q_PART_BYTES, 16, EIGHT_ROWS_BYTES);
        const u64 keys = matrix_at(block.keys.tile(keys_at), 16, EIGHT_ROWS_BYTES);
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++)
            add_product(s, further(rows, k / 4 * Q_SLAB_BYTES + k % 4 * 32), further(keys, k / 4 * KV_SLAB_BYTES + k % 4 * 32),
                        k > 0);
        product_commit();
    }

    // Sends off o += weights v.
    DEVICE void send_output() {
        const u64 values = matrix_at(block.values.tile(values_at), KV_SLAB_BYTES, EIGHT_ROWS_BYTES);
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) add_product(o, weights[k], further(values, k * 16 * ROW_BYTES));
        product_commit();
    }

    // Makes products tanh(logit / cap), as soft_cap of problem.cuh does; the cap itself is part of the factor.
    DEVICE void cap() {
        if constexpr (CAPPED) {
            const float scale = size(p.scale) * (2.0f * LOG2_E) / p.softcap;
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++) s[i] = fused(-2.0f, reciprocal(1.0f + exp2_fast(s[i] * scale)), 1.0f);
        }
    }

    DEVICE static float size(float x) { return x < 0.0f ? -x : x; }

    // Hides the keys that a row does not see. What it sees is worked out anew: few tiles need it.
    DEVICE void mask(const Item &item, int tile) {
        const int column0 = tile * KEYS + threadIdx.x % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const Span seen = visible(p, least(row_of(item, half), p.q_len - 1), p.kv_len);
            const int first = seen.first - column0, end = seen.end - column0;
#pragma unroll
            for (int i = 2 * half; i < KEYS / 2; i += i % 2 ? 3 : 1) {
                const int column = 8 * (i / 4) + i % 2; // known to the compiler
                if (column < first || column >= end) s[i] = minus_infinity();
            }
        }
    }

    // Of every second row: raises the maximum, makes s the exponentials; by how much what was summed before shrinks.
    DEVICE float absorb(int half) {
        float now = top[half];
#pragma unroll
        for (int i = 2 * half; i < KEYS / 2; i += 4) now = larger(now, larger(s[i], s[i + 1]));
        now = larger(now, shuffle_xor(now, 1));
        now = larger(now, shuffle_xor(now, 2));
        // A row that has seen nothing keeps -inf; any finite base then gives exponentials of zero.
        const float base = now == minus_infinity() ? 0.0f : now * factor;
        const float shrink = exp2_fast(fused(top[half], factor, -base));
        top[half] = now;
        sum[half] *= shrink;
#pragma unroll
        for (int i = 2 * half; i < KEYS / 2; i += 4) {
            s[i] = exp2_fast(fused(s[i], factor, -base));
            s[i + 1] = exp2_fast(fused(s[i + 1], factor, -base));
            sum[half] += s[i] + s[i + 1];
        }
        return shrink;
    }

    DEVICE void pack_weights(int half) {
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
            for (int r = half; r < 4; r += 2) weights[k][r] = pack<ELEMENT>(s[8 * k + 2 * r], s[8 * k + 2 * r + 1]);
    }

    DEVICE void shrink_output(int half, float shrink) {
#pragma unroll
        for (int i = 2 * half; i < HEAD_DIM / 2; i += 4) o[i] *= shrink, o[i + 1] *= shrink;
    }

    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) o[i] = 0.0f;
        top[0] = top[1] = minus_infinity(), sum[0] = sum[1] = 0.0f;
    }

    // Scores are there: their keys, and with the last of an item the queries, are given back.
    template <bool Masked> DEVICE void receive_scores(const Item &item, int tile) {
        settle(s);
        release(block.keys.empty_at(keys_at));
        keys_at.next();
        if (tile == item.first_tile) release_queries();
        cap();
        if constexpr (Masked) mask(item, tile);
    }

    DEVICE void receive_output() {
        product_wait<0>();
        settle(o);
        settle(weights);
        release(block.values.empty_at(values_at));
        values_at.next();
    }

    // The first tile of an item: nothing runs beside it.
    DEVICE void begin(const Item &item, int tile) {
        block.keys.wait_full(keys_at);
        product_fence();
        send_scores();
        product_wait<0>();
        receive_scores<true>(item, tile);
#pragma unroll
        for (int half = 0; half < 2; half++) absorb(half), pack_weights(half);
    }

    // A further tile: half of its softmax runs beside the second product of the tile before, which is as long as that
    // takes; the other half, with what has to be scaled and packed, beside the other consumer's products.
    template <bool Masked> DEVICE void step(const Item &item, int tile) {
        block.keys.wait_full(keys_at);
        block.values.wait_full(values_at);
        if constexpr (IN_TURN) turn_wait(1 + number, 256);
        product_fence();
        send_scores();
        product_fence(); // else ptxas puts one here, and says so
        send_output();
        if constexpr (IN_TURN) turn_pass(1 + (number + 1) % CONSUMERS, 256);
        product_wait<1>();
        receive_scores<Masked>(item, tile);
        float shrink = absorb(0);
        receive_output();
        shrink_output(0, shrink);
        pack_weights(0);
        shrink = absorb(1);
        shrink_output(1, shrink);
        pack_weights(1);
    }

    // The last second product.
    DEVICE void end() {
        block.values.wait_full(values_at);
        product_fence();
        send_output();
        receive_output();
    }

    // Four lanes have pieces of 4 bytes of four chunks of a row; afterwards each has one chunk whole.
    DEVICE static void exchange(u32 (&x)[4]) {
        const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const u32 got = shuffle_xor(odd ? x[i] : x[i + 1], 1);
            (odd ? x[i] : x[i + 1]) = got;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 got = shuffle_xor(high ? x[i] : x[i + 2], 2);
            (high ? x[i] : x[i + 2]) = got;
        }
    }

    DEVICE void store(const Item &item) {
        struct alignas(16) Chunk {
            u32 x[4];
        };
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            sum[half] += shuffle_xor(sum[half], 1);
            sum[half] += shuffle_xor(sum[half], 2);
            const int row = row_of(item, half);
            const bool empty = top[half] == minus_infinity();
            const float divide = empty ? 0.0f : 1.0f / sum[half];
            const long long at = (long long)item.q_head * p.q_len + row;
            u16 *target = static_cast<u16 *>(p.o) + at * HEAD_DIM + lane % 4 * 8;
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 32; n++) {
                Chunk chunk;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float *pair = o + 16 * n + 4 * i + 2 * half;
                    chunk.x[i] = pack<ELEMENT>(pair[0] * divide, pair[1] * divide);
                }
                exchange(chunk.x);
                if (row < p.q_len) *reinterpret_cast<Chunk *>(target + 32 * n) = chunk;
            }
            if (row < p.q_len && lane % 4 == 0)
                p.lse[at] = empty ? top[half] : (top[half] * factor + log2_fast(sum[half])) * LN_2;
        }
    }

    DEVICE int row_of(const Item &item, int half) const {
        return item.row0 + 64 * number + threadIdx.x % 128 / 32 * 16 + 8 * half + threadIdx.x % 32 / 4;
    }

    DEVICE void consume(const Item &item) {
        const int first_row = least(item.row0 + 64 * number, p.q_len - 1), last_row = least(first_row + 63, p.q_len - 1);
        const Span of_first = visible(p, first_row, p.kv_len), of_last = visible(p, last_row, p.kv_len);
        // From `whole_end` on, and before `whole_first`, tiles have keys that some row of this consumer does not see.
        const int whole_end = of_first.end / KEYS, whole_first = (of_last.first + KEYS - 1) / KEYS;
        int tile = item.end_tile - 1;
        begin(item, tile--);
        for (; tile >= item.first_tile; tile--)
            tile < whole_end && tile >= whole_first ? step<false>(item, tile) : step<true>(item, tile);
        end();
    }
};

} // namespace

KERNEL_ALONE(THREADS)
hopper_forward(ARGUMENT Problem p, ARGUMENT TensorMap q, ARGUMENT TensorMap k, ARGUMENT TensorMap v) {
    SWIZZLED_SHARED(memory);
    const Block block(memory);
    if (threadIdx.x == 0) block.make_barriers();
    block_sync();
    // From one lane for all: what follows from it is known to be the same for a warp.
    const int warpgroup = shuffle_from(threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        keep_registers<FEW_REGISTERS>();
        if (threadIdx.x == 0) produce(p, block, q, k, v);
    } else {
        take_registers<MANY_REGISTERS>();
        Consumer consumer(p, block, warpgroup - 1);
        // The last in the row lets the first begin; a turn that is left over at an item's end serves the next.
        if (IN_TURN && consumer.number == CONSUMERS - 1) turn_pass(1, 256);
        Item item;
        while (consumer.take(item)) {
            consumer.clear();
            item.first_tile < item.end_tile ? consumer.consume(item) : consumer.release_queries();
            consumer.store(item);
        }
    }
}
