// Attention backward for Hopper (sm_90a only) in the manner of FlashAttention-3 (Shah et al. 2024): blocks own keys, as in
// backward.cu; one warp copies by TMA, two warpgroups compute all five products by wgmma.
//
// A block owns KEYS keys of one KV head, 64 for each consumer, and goes through the queries that see them, QUERIES at a
// time, of all query heads of the group. Scores are computed transposed, keys as rows, so that P^T and dS^T come out of
// the tensor cores as the left operands of dv = P^T do and dk = dS^T q, in registers. Only for dq = dS k does dS^T pass
// through shared memory, where each consumer writes the rows of its keys and wgmma reads them transposed; of dq a consumer
// has 64 queries and 64 columns, and adds them up in global memory by atomics of 16 bytes, in the order of the
// accumulators (query_sums.cuh). The order of blocks, and with it the last bits of dq, varies.
//
// What hides what, within a consumer's step (products are sent off in this order):
//   dP = v do^T   runs while probabilities are computed from the scores
//   dv            runs while dS is computed
//   dk, then dq   of the step before: so that the other consumer's dS is there without a wait
//   scores        of the next step run while dq is added up in memory
// and a step's work on CUDA cores runs beside the other consumer's products: nothing holds the two together but that one
// may not be more than a step ahead.
//
// Versions
//   1  As above. On an H100, bf16, D 128: 322 TFLOP/s causal at 2K, 482 at 8K, 547 full at 8K: 0.82 to 0.95 of cuDNN's. What NVRTC 12.8 and 13.0.88 made of it:
//        - Every variant: 168 registers before they are moved, no spills, no local memory, no warning.
//        - Without a wait for all products somewhere in a step, ptxas finds no end of the pipeline and runs them one after
//          another (C7514): the next scores are sent off behind that wait, not before it.
//        - Descriptors of keys and what follows from the thread's number are worked out in each step (`forgotten`): kept
//          over the loop, they spill. With 128 queries a step D 64 spills too.
//
// Compile with -DELEMENT=BF16|F16 -DHEAD_DIM=64|128 -DCAPPED=0|1 (whether there is a soft-cap).
//   backward_delta   grid (ceil(B Hq rows / 4)), 128 threads; rows: Lq in whole tiles of queries
//   hopper_backward  grid (ceil(Lk / KEYS), Hkv, B), THREADS threads; shared memory: K, V, rings of Q, dO and dS, row values,
//                    barriers
//   backward_round   grid (ceil(B Hq rows / 64)), 128 threads
#define NEGATIVE 0 // the scale is multiplied after the products, with its sign
#include "hopper.cuh"
#include "query_sums.cuh"

namespace {

static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "dk, dv and two tiles of scores are in registers together");
constexpr int CONSUMERS = 2, KEYS = 64 * CONSUMERS, THREADS = 128 * (CONSUMERS + 1);
constexpr int QUERIES = 64;
constexpr int FEW_REGISTERS = 24, MANY_REGISTERS = 240;

// Tiles lie in shared memory in slabs of 64 columns: rows of 128 bytes, as a box is copied. dS has a row for each key.
constexpr int SLABS = HEAD_DIM / 64, ROW_BYTES = 128, EIGHT_ROWS_BYTES = 8 * ROW_BYTES;
constexpr int KEY_SLAB_BYTES = KEYS * ROW_BYTES, KEY_BYTES = SLABS * KEY_SLAB_BYTES;
constexpr int QUERY_SLAB_BYTES = QUERIES * ROW_BYTES, QUERY_BYTES = SLABS * QUERY_SLAB_BYTES;
constexpr int SCORE_BYTES = KEY_SLAB_BYTES, VALUES_BYTES = 2 * QUERIES * 4;
constexpr int STAGES = 2;
constexpr int Q_AT = 2 * KEY_BYTES, GRAD_O_AT = Q_AT + STAGES * QUERY_BYTES, SCORES_AT = GRAD_O_AT + STAGES * QUERY_BYTES;
constexpr int VALUES_AT = SCORES_AT + STAGES * SCORE_BYTES, BARRIERS_AT = VALUES_AT + STAGES * VALUES_BYTES;
constexpr int SHARED_BYTES = BARRIERS_AT + 8 * (2 + 3 * 2 * STAGES);
static_assert(SHARED_BYTES <= 227 * 1024, "what a block of Hopper may have");

// A ring of tiles: number n is in place n % STAGES, in round n / STAGES.
template <int Bytes> struct Ring {
    u32 tiles, full, empty;

    DEVICE u32 tile(u32 n) const { return tiles + n % STAGES * Bytes; }
    DEVICE u32 full_at(u32 n) const { return full + 8 * (n % STAGES); }
    DEVICE u32 empty_at(u32 n) const { return empty + 8 * (n % STAGES); }
    DEVICE static u32 parity(u32 n) { return n / STAGES & 1; }

    DEVICE void make(u32 arrivals_full, u32 arrivals_empty) const {
        for (u32 i = 0; i < STAGES; i++) barrier_make(full_at(i), arrivals_full), barrier_make(empty_at(i), arrivals_empty);
    }
    DEVICE void wait_full(u32 n) const { barrier_wait(full_at(n), parity(n)); }
    DEVICE void wait_empty(u32 n) const { barrier_wait(empty_at(n), parity(n) ^ 1); }
};

struct Block {
    unsigned char *memory;
    u32 keys, values, keys_full, values_full;
    Ring<QUERY_BYTES> q, grad_o; // q's barriers are for the row values too
    Ring<SCORE_BYTES> scores;    // dS

    DEVICE explicit Block(unsigned char *at) : memory(at) {
        const u32 shared = shared_address(at), barriers = shared + BARRIERS_AT;
        keys = shared, values = shared + KEY_BYTES;
        keys_full = barriers, values_full = barriers + 8;
        q = {shared + Q_AT, barriers + 16, barriers + 16 + 8 * STAGES};
        grad_o = {shared + GRAD_O_AT, q.empty + 8 * STAGES, q.empty + 16 * STAGES};
        scores = {shared + SCORES_AT, grad_o.empty + 8 * STAGES, grad_o.empty + 16 * STAGES};
    }

    DEVICE void make_barriers() const {
        constexpr int WARPS = 4 * CONSUMERS; // one thread of each arrives
        barrier_make(keys_full, 1), barrier_make(values_full, 1);
        q.make(2, WARPS); // once for the copy, once for the row values
        grad_o.make(1, WARPS);
        scores.make(WARPS, WARPS);
        barriers_made();
    }

    // Of a step's queries what log-sum-exp is to be taken away, then what delta.
    DEVICE float *row_values(u32 n) const { return reinterpret_cast<float *>(memory + VALUES_AT + n % STAGES * VALUES_BYTES); }
};

// A block's keys, and the queries that see any of them, in steps of a tile of one head.
struct Work {
    int key0, list, first_tile, end_tile;
    u32 steps;

    DEVICE explicit Work(const Problem &p) {
        key0 = blockIdx.x * KEYS, list = blockIdx.z * p.kv_heads + blockIdx.y;
        const Span any = viewers(p, key0, least(key0 + KEYS, p.kv_len));
        first_tile = any.first / QUERIES;
        end_tile = any.first < any.end ? (any.end + QUERIES - 1) / QUERIES : first_tile;
        steps = u32(end_tile - first_tile) * (p.q_heads / p.kv_heads);
    }
};

struct Step {
    u32 n;
    int tile, number; // of the tile in its head and among all heads' tiles

    DEVICE Step(const Problem &p, const Work &work) : n(0), tile(work.first_tile) {
        number = work.list * (p.q_heads / p.kv_heads) * query_tiles<QUERIES>(p) + tile;
    }
    DEVICE void next(const Problem &p, const Work &work) {
        n++, number++;
        if (++tile == work.end_tile) tile = work.first_tile, number += query_tiles<QUERIES>(p) - (work.end_tile - tile);
    }
};

// One warp sends everything that consumers need, in the order in which they need it.
DEVICE void produce(const Problem &p, const Gradients &g, const Block &block, const TensorMap &q, const TensorMap &k, const TensorMap &v,
                    const TensorMap &grad_o) {
    const Work work(p);
    const int lane = threadIdx.x;
    auto copy_keys = [&](u32 to, const TensorMap &map, u32 barrier) {
        if (lane != 0) return;
        barrier_expect(barrier, KEY_BYTES);
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) copy_box(to + slab * KEY_SLAB_BYTES, map, barrier, 64 * slab, work.key0, work.list);
    };
    auto copy_queries = [&](const Ring<QUERY_BYTES> &ring, const TensorMap &map, const Step &step, int head) {
        ring.wait_empty(step.n);
        if (lane != 0) return;
        const u32 to = ring.tile(step.n), barrier = ring.full_at(step.n);
        barrier_expect(barrier, QUERY_BYTES);
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) copy_box(to + slab * QUERY_SLAB_BYTES, map, barrier, 64 * slab, step.tile * QUERIES, head);
    };
    for (Step step(p, work); step.n < work.steps; step.next(p, work)) {
        const int head = step.number / query_tiles<QUERIES>(p);
        if (step.n == 0) copy_keys(block.keys, k, block.keys_full);
        // On their way before anything is waited for. Queries past the end have probabilities of zero.
        float shift[QUERIES / 32], delta[QUERIES / 32];
#pragma unroll
        for (int i = 0; i < QUERIES / 32; i++) {
            const int row = step.tile * QUERIES + 32 * i + lane;
            const long long at = (long long)head * p.q_len + row;
            const bool real = row < p.q_len;
            shift[i] = real ? p.lse[at] : minus_infinity();
            delta[i] = real ? g.delta[at] : 0.0f;
        }
        copy_queries(block.q, q, step, head);
        float *values = block.row_values(step.n);
#pragma unroll
        for (int i = 0; i < QUERIES / 32; i++) values[32 * i + lane] = shift_of(shift[i]), values[QUERIES + 32 * i + lane] = delta[i];
        warp_sync();
        if (lane == 0) barrier_arrive(block.q.full_at(step.n));
        if (step.n == 0) copy_keys(block.values, v, block.values_full);
        copy_queries(block.grad_o, grad_o, step, head);
    }
}

struct Consumer {
    const Problem &p;
    const Gradients &g;
    const Block &block;
    const int number;                // of this consumer
    const Work work;
    float s[QUERIES / 2];            // scores, then probabilities (under a soft-cap times its slope)
    float ds[QUERIES / 2];           // dP
    float dk[HEAD_DIM / 2], dv[HEAD_DIM / 2], dq[32];
    u32 weights[QUERIES / 16][4], gradients[QUERIES / 16][4]; // P^T and dS^T as left operands

    DEVICE Consumer(const Problem &problem, const Gradients &given, const Block &shared, int which)
        : p(problem), g(given), block(shared), number(which), work(problem) {}

    // Where this thread is in its warpgroup. Worked out anew wherever it is asked for, and what follows from it too: kept,
    // it would take registers from the tiles.
    DEVICE static int thread() { return forgotten(threadIdx.x) % 128; }

    DEVICE int key_of(int thread, int half) const { return work.key0 + 64 * number + thread / 32 * 16 + 8 * half + thread % 32 / 4; }

    // Lets others fill memory that this warp no longer reads, or read what it has written.
    DEVICE void tell(u32 barrier) const {
        if (thread() % 32 == 0) barrier_arrive(barrier);
    }

    // Sends off to = this consumer's rows of the keys' tile `left` times all rows of the queries' tile `right`.
    DEVICE void send_inner(float (&to)[QUERIES / 2], u32 left, u32 right) const {
        // Worked out anew: else all descriptors are kept in registers all the while.
        const u64 a = matrix_at(forgotten(left + number * 64 * ROW_BYTES), 16, EIGHT_ROWS_BYTES);
        const u64 b = matrix_at(right, 16, EIGHT_ROWS_BYTES);
        product_fence();
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++)
            add_product(to, further(a, k / 4 * KEY_SLAB_BYTES + k % 4 * 32), further(b, k / 4 * QUERY_SLAB_BYTES + k % 4 * 32), k > 0);
        product_commit();
    }

    // Sends off sum += left times the queries' tile `right`.
    DEVICE void send_outer(float (&sum)[HEAD_DIM / 2], const u32 (&left)[QUERIES / 16][4], u32 right) const {
        const u64 b = matrix_at(right, QUERY_SLAB_BYTES, EIGHT_ROWS_BYTES);
        product_fence();
#pragma unroll
        for (int k = 0; k < QUERIES / 16; k++) add_product(sum, left[k], further(b, k * 16 * ROW_BYTES));
        product_commit();
    }

    // Whether this consumer has a part of a step's dq, and the slab of columns that is its part: one of two, or the only
    // one, which consumers have in turn.
    DEVICE bool has_dq(u32 n) const { return SLABS == CONSUMERS || n % CONSUMERS == u32(number); }
    DEVICE int dq_slab() const { return SLABS == CONSUMERS ? number : 0; }

    // Sends off dq = dS k of step `n`.
    DEVICE void send_dq(u32 n) {
        const u64 a = matrix_at(block.scores.tile(n), KEY_SLAB_BYTES, EIGHT_ROWS_BYTES);
        const u64 b = matrix_at(forgotten(block.keys + dq_slab() * KEY_SLAB_BYTES), KEY_SLAB_BYTES, EIGHT_ROWS_BYTES);
        product_fence();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
            add_product_transposed(dq, further(a, k * 16 * ROW_BYTES), further(b, k * 16 * ROW_BYTES), k > 0);
        product_commit();
    }

    // Adds dq of a tile to its sums.
    DEVICE void add_dq(int tile) const {
        const int thread = this->thread();
        float *sums = g.sums + ((long long)tile * QUERIES + thread / 32 * 16) * HEAD_DIM + dq_slab() * (16 * 64);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float x[4] = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
            add_fragment(sums + 128 * i, thread % 32, x);
        }
    }

    struct alignas(8) Pair {
        float x[2];
    };

    // Row values of the columns 8 n + 2 t and the next, from those of a tile on.
    DEVICE static Pair pair_of(const float *values, int n) { return *reinterpret_cast<const Pair *>(values + 8 * n); }

    // Whether all queries of a tile see all keys of this consumer. Those past the end have no probabilities anyway.
    DEVICE bool whole(int query0) const {
        const int key = work.key0 + 64 * number;
        if (key + 64 > p.kv_len) return false;
        const int end = viewers(p, key, key + 1).end;
        return query0 >= viewers(p, key + 63, key + 64).first && (query0 + QUERIES <= end || end == p.q_len);
    }

    // From scores to probabilities.
    template <bool Masked> DEVICE void probabilities(const Step &step) {
        const int thread = this->thread(), query0 = step.tile * QUERIES + thread % 4 * 2;
        const float *shifts = block.row_values(step.n) + thread % 4 * 2;
        Span seen[2];
        if constexpr (Masked) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int key = key_of(thread, half);
                seen[half] = key < p.kv_len ? viewers(p, key, key + 1) : Span{0, 0};
            }
        }
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++) {
            const Pair shift = pair_of(shifts, n);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float x[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int query = query0 + 8 * n + e;
                    const bool sees = !Masked || (query >= seen[half].first && query < seen[half].end);
                    float &score = s[4 * n + 2 * half + e], slope;
                    x[e] = probability<Masked, CAPPED>(p, shift.x[e], sees, score, slope);
                    score = x[e] * slope;
                }
                weights[n / 2][n % 2 * 2 + half] = pack<ELEMENT>(x[0], x[1]);
            }
        }
    }

    // From dP to dS.
    DEVICE void score_gradients(const Step &step) {
        const float *deltas = block.row_values(step.n) + QUERIES + thread() % 4 * 2;
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++) {
            const Pair delta = pair_of(deltas, n);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int i = 4 * n + 2 * half;
                gradients[n / 2][n % 2 * 2 + half] = pack<ELEMENT>(s[i] * (ds[i] - delta.x[0]), s[i + 1] * (ds[i + 1] - delta.x[1]));
            }
        }
    }

    // Writes dS^T of step `n`, a row for each key, in the order that the swizzle asks for.
    DEVICE void store_gradients(u32 n) const {
        const int thread = this->thread(), lane = thread % 32, row = 64 * number + thread / 32 * 16 + lane % 16;
        const u32 to = block.scores.tile(n) + row * ROW_BYTES + ((lane / 16 ^ lane % 8) << 4);
        block.scores.wait_empty(n);
#pragma unroll
        for (int k = 0; k < QUERIES / 16; k++) store_matrices(to ^ (k << 5), gradients[k]);
        shared_written();
        warp_sync();
        tell(block.scores.full_at(n));
    }

    // From scores that are on their way to all that this step's queries bring, but for their dq; that of the step before.
    template <bool First> DEVICE void take(const Step &step) {
        block.grad_o.wait_full(step.n);
        send_inner(ds, block.values, block.grad_o.tile(step.n));
        product_wait<1>();
        settle(s);
        whole(step.tile * QUERIES) ? probabilities<false>(step) : probabilities<true>(step);
        send_outer(dv, weights, block.grad_o.tile(step.n));
        product_wait<1>();
        settle(ds);
        score_gradients(step);
        store_gradients(step.n);
        send_outer(dk, gradients, block.q.tile(step.n));
        if constexpr (!First) {
            block.scores.wait_full(step.n - 1);
            if (has_dq(step.n - 1)) send_dq(step.n - 1);
        }
        product_wait<0>();
        settle(dk), settle(dv), settle(dq);
        settle(weights), settle(gradients);
        tell(block.grad_o.empty_at(step.n));
        tell(block.q.empty_at(step.n));
        if constexpr (!First) tell(block.scores.empty_at(step.n - 1));
    }

    DEVICE void go_through() {
        Step step(p, work);
        barrier_wait(block.keys_full, 0);
        block.q.wait_full(0);
        send_inner(s, block.keys, block.q.tile(0));
        barrier_wait(block.values_full, 0);
        take<true>(step);
        int before = 0; // the tile of which `dq` is, from the second step on
        while (step.n + 1 < work.steps) {
            block.q.wait_full(step.n + 1);
            send_inner(s, block.keys, block.q.tile(step.n + 1));
            if (step.n > 0 && has_dq(step.n - 1)) add_dq(before);
            before = step.number;
            step.next(p, work);
            take<false>(step);
        }
        if (step.n > 0 && has_dq(step.n - 1)) add_dq(before);
        if (!has_dq(step.n)) return;
        block.scores.wait_full(step.n);
        send_dq(step.n);
        product_wait<0>();
        settle(dq);
        add_dq(step.number);
    }

    DEVICE void write(void *tensor, const float (&sum)[HEAD_DIM / 2], float factor) const {
        const int thread = this->thread();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int key = key_of(thread, half);
            if (key >= p.kv_len) continue;
            u32 *to = reinterpret_cast<u32 *>(static_cast<u16 *>(tensor) + ((long long)work.list * p.kv_len + key) * HEAD_DIM);
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++)
                to[4 * n + thread % 4] = pack<ELEMENT>(sum[4 * n + 2 * half] * factor, sum[4 * n + 2 * half + 1] * factor);
        }
    }

    DEVICE void run() {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) dk[i] = dv[i] = 0.0f;
        if (work.steps) go_through();
        write(g.grad_k, dk, p.scale);
        write(g.grad_v, dv, 1.0f);
    }
};

} // namespace

// One warp for each row.
KERNEL(128) backward_delta(ARGUMENT Problem p, ARGUMENT Gradients g) {
    prepare_row<QUERIES, HEAD_DIM, true>(p, g, (long long)blockIdx.x * 4 + threadIdx.x / 32);
}

KERNEL_ALONE(THREADS)
hopper_backward(ARGUMENT Problem p, ARGUMENT Gradients g, ARGUMENT TensorMap q, ARGUMENT TensorMap k, ARGUMENT TensorMap v,
                ARGUMENT TensorMap grad_o) {
    SWIZZLED_SHARED(memory);
    const Block block(memory);
    if (threadIdx.x == 0) block.make_barriers();
    block_sync();
    // From one lane for all: what follows from it is known to be the same for a warp.
    const int warpgroup = shuffle_from(threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        keep_registers<FEW_REGISTERS>();
        if (threadIdx.x < 32) produce(p, g, block, q, k, v, grad_o);
    } else {
        take_registers<MANY_REGISTERS>();
        Consumer(p, g, block, warpgroup - 1).run();
    }
}

// One warp for 16 queries.
KERNEL(128) backward_round(ARGUMENT Problem p, ARGUMENT Gradients g) {
    round_strip<QUERIES, HEAD_DIM>(p, g, (long long)blockIdx.x * 4 + threadIdx.x / 32);
}
