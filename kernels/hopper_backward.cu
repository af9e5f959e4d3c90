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
// and a step's work on CUDA cores runs beside the other consumer's products: nothing holds them together but that one may
// not be more than a step ahead.
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
// Of dq each consumer has 64 queries and 64 columns.
constexpr int QUERIES = 64 * CONSUMERS * 64 / HEAD_DIM;
constexpr int FEW_REGISTERS = 24, MANY_REGISTERS = 240;

// Tiles lie in shared memory in slabs of 64 columns: rows of 128 bytes, as a box is copied. dS has a row for each key.
constexpr int SLABS = HEAD_DIM / 64, ROW_BYTES = 128, EIGHT_ROWS_BYTES = 8 * ROW_BYTES;
constexpr int KEY_SLAB_BYTES = KEYS * ROW_BYTES, KEY_BYTES = SLABS * KEY_SLAB_BYTES;
constexpr int QUERY_SLAB_BYTES = QUERIES * ROW_BYTES, QUERY_BYTES = SLABS * QUERY_SLAB_BYTES;
constexpr int SCORE_BYTES = QUERIES / 64 * KEY_SLAB_BYTES, VALUES_BYTES = 2 * QUERIES * 4;
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
    int head, tile; // of all sequences' query heads

    DEVICE Step(const Problem &p, const Work &work) : n(0), head(work.list * (p.q_heads / p.kv_heads)), tile(work.first_tile) {}
    DEVICE void next(const Work &work) {
        n++;
        if (++tile == work.end_tile) head++, tile = work.first_tile;
    }
};

// One warp sends everything that consumers need, in the order in which they need it.
DEVICE void produce(const Problem &p, const Gradients &g, const Block &block, const Work &work, const TensorMap &q, const TensorMap &grad_o,
                    const TensorMap &k, const TensorMap &v) {
    const int lane = threadIdx.x;
    auto copy_keys = [&](u32 to, const TensorMap &map, u32 barrier) {
        if (lane != 0) return;
        barrier_expect(barrier, KEY_BYTES);
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) copy_box(to + slab * KEY_SLAB_BYTES, map, barrier, 64 * slab, work.key0, work.list);
    };
    auto copy_queries = [&](const Ring<QUERY_BYTES> &ring, const TensorMap &map, const Step &step) {
        ring.wait_empty(step.n);
        if (lane != 0) return;
        const u32 to = ring.tile(step.n), barrier = ring.full_at(step.n);
        barrier_expect(barrier, QUERY_BYTES);
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) copy_box(to + slab * QUERY_SLAB_BYTES, map, barrier, 64 * slab, step.tile * QUERIES, step.head);
    };
    for (Step step(p, work); step.n < work.steps; step.next(work)) {
        if (step.n == 0) copy_keys(block.keys, k, block.keys_full);
        // On their way before anything is waited for. Queries past the end have probabilities of zero.
        float shift[QUERIES / 32], delta[QUERIES / 32];
#pragma unroll
        for (int i = 0; i < QUERIES / 32; i++) {
            const int row = step.tile * QUERIES + 32 * i + lane;
            const long long at = (long long)step.head * p.q_len + row;
            const bool real = row < p.q_len;
            shift[i] = real ? p.lse[at] : minus_infinity();
            delta[i] = real ? g.delta[at] : 0.0f;
        }
        copy_queries(block.q, q, step);
        float *values = block.row_values(step.n);
#pragma unroll
        for (int i = 0; i < QUERIES / 32; i++) values[32 * i + lane] = shift_of(shift[i]), values[QUERIES + 32 * i + lane] = delta[i];
        warp_sync();
        if (lane == 0) barrier_arrive(block.q.full_at(step.n));
        if (step.n == 0) copy_keys(block.values, v, block.values_full);
        copy_queries(block.grad_o, grad_o, step);
    }
}

struct Consumer {
    const Problem &p;
    const Gradients &g;
    const Block &block;
    const Work &work;
    const int number;                // of this consumer
    Span seen[2];                    // by which queries each of this thread's keys is seen
    int whole_first, whole_end;      // queries that see all keys of this consumer
    float s[QUERIES / 2];            // scores, then probabilities (under a soft-cap times its slope)
    float ds[QUERIES / 2];           // dP, then dS
    float dk[HEAD_DIM / 2], dv[HEAD_DIM / 2], dq[32];
    u32 weights[QUERIES / 16][4], gradients[QUERIES / 16][4]; // P^T and dS^T as left operands
    float *sums;                     // where `dq` is to be added

    DEVICE Consumer(const Problem &problem, const Gradients &given, const Block &shared, const Work &todo, int which)
        : p(problem), g(given), block(shared), work(todo), number(which) {
        const int first_key = work.key0 + 64 * number;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int key = key_of(half);
            seen[half] = key < p.kv_len ? viewers(p, key, key + 1) : Span{0, 0};
        }
        whole_first = whole_end = 0;
        if (first_key + 64 > p.kv_len) return;
        whole_first = viewers(p, first_key + 63, first_key + 64).first, whole_end = viewers(p, first_key, first_key + 1).end;
        if (whole_end == p.q_len) whole_end += QUERIES; // those past the end have no probabilities anyway
    }

    DEVICE int key_of(int half) const { return work.key0 + 64 * number + threadIdx.x % 128 / 32 * 16 + 8 * half + threadIdx.x % 32 / 4; }

    // Lets others fill memory that this warp no longer reads, or read what it has written.
    DEVICE void tell(u32 barrier) const {
        if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
    }

    // Sends off to = this consumer's rows of the keys' tile `left` times all rows of the queries' tile `right`.
    DEVICE void send_inner(float (&to)[QUERIES / 2], u32 left, u32 right) const {
        left += number * 64 * ROW_BYTES;
        product_fence();
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++)
            add_product(to, matrix_at(left + k / 4 * KEY_SLAB_BYTES + k % 4 * 32, 16, EIGHT_ROWS_BYTES),
                        matrix_at(right + k / 4 * QUERY_SLAB_BYTES + k % 4 * 32, 16, EIGHT_ROWS_BYTES), k > 0);
        product_commit();
    }

    // Sends off sum += left times the queries' tile `right`.
    DEVICE void send_outer(float (&sum)[HEAD_DIM / 2], const u32 (&left)[QUERIES / 16][4], u32 right) const {
        product_fence();
#pragma unroll
        for (int k = 0; k < QUERIES / 16; k++)
            add_product(sum, left[k], matrix_at(right + k * 16 * ROW_BYTES, QUERY_SLAB_BYTES, EIGHT_ROWS_BYTES));
        product_commit();
    }

    // This consumer's part of dq: at D 128 half of the columns, at D 64 half of the queries.
    static constexpr bool BY_COLUMNS = HEAD_DIM == 128;

    // Sends off dq = dS k of step `n`.
    DEVICE void send_dq(u32 n) {
        const u32 left = block.scores.tile(n) + (BY_COLUMNS ? 0 : number) * KEY_SLAB_BYTES;
        const u32 right = block.keys + (BY_COLUMNS ? number : 0) * KEY_SLAB_BYTES;
        product_fence();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
            add_product_transposed(dq, matrix_at(left + k * 16 * ROW_BYTES, KEY_SLAB_BYTES, EIGHT_ROWS_BYTES),
                                   matrix_at(right + k * 16 * ROW_BYTES, KEY_SLAB_BYTES, EIGHT_ROWS_BYTES), k > 0);
        product_commit();
    }

    DEVICE float *sums_of(const Step &step) const {
        const long long tile = (long long)step.head * query_tiles<QUERIES>(p) + step.tile;
        const int strip = (BY_COLUMNS ? 0 : 4 * number) + threadIdx.x % 128 / 32, column = BY_COLUMNS ? 64 * number : 0;
        return g.sums + (tile * QUERIES + strip * 16) * HEAD_DIM + column * 16;
    }

    DEVICE void add_dq() const {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float x[4] = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
            add_fragment(sums + 128 * i, threadIdx.x % 32, x);
        }
    }

    struct alignas(8) Pair {
        float x[2];
    };

    // The row values of this thread's columns 8 n + 2 t and the next.
    DEVICE static Pair pair_of(const float *values, int n) {
        return *reinterpret_cast<const Pair *>(values + 8 * n + threadIdx.x % 4 * 2);
    }

    template <bool Masked> DEVICE void probabilities(const Step &step) {
        const float *shifts = block.row_values(step.n);
        const int query0 = step.tile * QUERIES + threadIdx.x % 4 * 2;
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++) {
            const Pair shift = pair_of(shifts, n);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float x[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int query = query0 + 8 * n + e;
                    const bool sees = query >= seen[half].first && query < seen[half].end;
                    float &score = s[4 * n + 2 * half + e], slope;
                    x[e] = probability<Masked, CAPPED>(p, shift.x[e], sees, score, slope);
                    score = x[e] * slope;
                }
                weights[n / 2][n % 2 * 2 + half] = pack<ELEMENT>(x[0], x[1]);
            }
        }
    }

    DEVICE void score_gradients(u32 n) {
        const float *deltas = block.row_values(n) + QUERIES;
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
        const int lane = threadIdx.x % 32, row = 64 * number + threadIdx.x % 128 / 32 * 16 + lane % 16;
        const u32 to = block.scores.tile(n) + row * ROW_BYTES + ((lane / 16 ^ lane % 8) << 4);
        block.scores.wait_empty(n);
#pragma unroll
        for (int k = 0; k < QUERIES / 16; k++) store_matrices((to ^ (k % 4 << 5)) + k / 4 * KEY_SLAB_BYTES, gradients[k]);
        shared_written();
        warp_sync();
        tell(block.scores.full_at(n));
    }

    // From scores that are on their way to products of all that this step's queries bring, but for their dq.
    template <bool First> DEVICE void take(const Step &step) {
        block.grad_o.wait_full(step.n);
        send_inner(ds, block.values, block.grad_o.tile(step.n));
        product_wait<1>();
        settle(s);
        const int query0 = step.tile * QUERIES;
        query0 >= whole_first && query0 + QUERIES <= whole_end ? probabilities<false>(step) : probabilities<true>(step);
        send_outer(dv, weights, block.grad_o.tile(step.n));
        product_wait<1>();
        settle(ds);
        score_gradients(step.n);
        store_gradients(step.n);
        send_outer(dk, gradients, block.q.tile(step.n));
        if constexpr (!First) {
            block.scores.wait_full(step.n - 1);
            send_dq(step.n - 1);
        }
        product_wait<First ? 1 : 2>();
        settle(dv);
        settle(weights);
        tell(block.grad_o.empty_at(step.n));
    }

    // Behind the last product of dk, and of dq of the step before.
    template <int Pending> DEVICE void end(u32 n) {
        product_wait<Pending>();
        settle(dk);
        settle(gradients);
        settle(dq);
        tell(block.q.empty_at(n));
        if (n == 0) return;
        tell(block.scores.empty_at(n - 1));
        add_dq();
    }

    DEVICE void go_through() {
        Step step(p, work);
        barrier_wait(block.keys_full, 0);
        block.q.wait_full(0);
        send_inner(s, block.keys, block.q.tile(0));
        barrier_wait(block.values_full, 0);
        take<true>(step);
        while (step.n + 1 < work.steps) {
            block.q.wait_full(step.n + 1);
            send_inner(s, block.keys, block.q.tile(step.n + 1));
            end<1>(step.n);
            sums = sums_of(step);
            step.next(work);
            take<false>(step);
        }
        end<0>(step.n);
        sums = sums_of(step);
        block.scores.wait_full(step.n);
        send_dq(step.n);
        product_wait<0>();
        settle(dq);
        add_dq();
    }

    DEVICE void write(void *tensor, const float (&sum)[HEAD_DIM / 2], float factor) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int key = key_of(half);
            if (key >= p.kv_len) continue;
            u32 *to = reinterpret_cast<u32 *>(static_cast<u16 *>(tensor) + ((long long)work.list * p.kv_len + key) * HEAD_DIM);
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++)
                to[4 * n + threadIdx.x % 4] = pack<ELEMENT>(sum[4 * n + 2 * half] * factor, sum[4 * n + 2 * half + 1] * factor);
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
hopper_backward(ARGUMENT Problem p, ARGUMENT Gradients g, ARGUMENT TensorMap q, ARGUMENT TensorMap grad_o, ARGUMENT TensorMap k,
                ARGUMENT TensorMap v) {
    SWIZZLED_SHARED(memory);
    const Block block(memory);
    const Work work(p);
    if (threadIdx.x == 0) block.make_barriers();
    block_sync();
    // From one lane for all: what follows from it is known to be the same for a warp.
    const int warpgroup = shuffle_from(threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        keep_registers<FEW_REGISTERS>();
        if (threadIdx.x < 32) produce(p, g, block, work, q, grad_o, k, v);
    } else {
        take_registers<MANY_REGISTERS>();
        Consumer(p, g, block, work, warpgroup - 1).run();
    }
}

// One warp for 16 queries.
KERNEL(128) backward_round(ARGUMENT Problem p, ARGUMENT Gradients g) {
    round_strip<QUERIES, HEAD_DIM>(p, g, (long long)blockIdx.x * 4 + threadIdx.x / 32);
}
