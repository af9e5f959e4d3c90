// Scores of eviction policies that look at keys, values, positions or attention: higher is retained (engine/src/policy/scorers/).
//
// A warp takes a row, so that its sum has one order; a block takes 32 rows of one list.
//
// Versions
//   1  One read of the rows, element by element: not vectorised. Right on an H100; not timed there.
//   2  Anchors are joined once for each list, and not by every block that compares keys with them.
//
// Compile with -DELEMENT=F32|BF16|F16 -DHEAD_DIM=1..256 and the formats of formats.cuh. Each has the grid
// (ceil(width / 32), lists) and 128 threads, but anchor_join: (lists), 1024.
//   score_positions    the position
//   score_copy         attention received so far, or gates
//   score_age          score / queries that saw the token
//   score_key_norm     -|k|
//   score_value_norm   score * |v|
//   score_pool         pooled along the sequence, from `raw`; zeros behind `scored_tokens` slots
//   score_over_heads   the mean over the heads of a sequence, from `raw`
//   anchor_sum         sum of k / |k| over 32 rows, to `raw` [lists, ceil(width / 32), D]
//   anchor_join        the sum of these over a list, in place of its first
//   score_unlike       -cos(k, that sum)
#include "lists.cuh"

struct Scoring {
    float *scores;     // [lists, width]
    float *raw;        // what a kernel reads besides, or writes for the next
    int width;
    int seen;          // tokens that each sequence has seen
    int behind;        // score_pool: slots at the end that are not pooled
    int kernel, is_max; // score_pool: width of the pool, and whether it takes the largest or the mean
    float divisor;     // score_pool: of what it reads
};

namespace {

constexpr int THREADS = 128, WARPS = THREADS / 32, ROWS = 32, PARTS = (HEAD_DIM + 31) / 32;
constexpr float LEAST_NORM = 1e-12f; // so that a zero key has cosine 0 with everything

struct Row {
    float x[PARTS]; // elements lane, lane + 32, ...
};

template <class Format> DEVICE Row load(const unsigned char *row) {
    Row r;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const int d = threadIdx.x % 32 + 32 * i;
        r.x[i] = d < HEAD_DIM ? Format::at(row, d) : 0.0f;
    }
    return r;
}

DEVICE Row load_key(const Lists &l, int slot) { return load<KeyFormat>(key_of_slot(l, blockIdx.y, slot)); }

DEVICE float across_warp(float x) {
    for (int mask = 16; mask; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}

DEVICE float inner(const Row &a, const Row &b) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PARTS; i++) sum = fused(a.x[i], b.x[i], sum);
    return across_warp(sum);
}

DEVICE float norm(const Row &r) { return square_root(inner(r, r)); }

// Calls `visit(slot)` for the block's slots of its list, one for each thread.
template <class Visit> DEVICE void each_slot(const Lists &l, Visit visit) {
    const int slot = blockIdx.x * ROWS + threadIdx.x;
    if (threadIdx.x < ROWS && slot < l.pages.lens[blockIdx.y]) visit(slot);
}

// Calls `visit(slot)` for them with a whole warp for each.
template <class Visit> DEVICE void each_row(const Lists &l, Visit visit) {
    const int end = least((blockIdx.x + 1) * ROWS, l.pages.lens[blockIdx.y]);
    for (int slot = blockIdx.x * ROWS + threadIdx.x / 32; slot < end; slot += WARPS) visit(slot);
}

DEVICE float &score_of(const Scoring &s, int slot) { return s.scores[(long long)blockIdx.y * s.width + slot]; }

DEVICE void set_by_first(const Scoring &s, int slot, float score) {
    if (threadIdx.x % 32 == 0) score_of(s, slot) = score;
}

} // namespace

KERNEL(128) score_positions(ARGUMENT Lists l, ARGUMENT Scoring s) {
    each_slot(l, [&](int slot) { score_of(s, slot) = float(origin_of(l, blockIdx.y, slot)); });
}

KERNEL(128) score_copy(ARGUMENT Lists l, ARGUMENT Scoring s) {
    each_slot(l, [&](int slot) { score_of(s, slot) = l.carried[(long long)blockIdx.y * l.stride + slot]; });
}

KERNEL(128) score_age(ARGUMENT Lists l, ARGUMENT Scoring s) {
    each_slot(l, [&](int slot) { score_of(s, slot) /= float(s.seen - origin_of(l, blockIdx.y, slot)); });
}

KERNEL(128) score_key_norm(ARGUMENT Lists l, ARGUMENT Scoring s) {
    each_row(l, [&](int slot) { set_by_first(s, slot, -norm(load_key(l, slot))); });
}

KERNEL(128) score_value_norm(ARGUMENT Lists l, ARGUMENT Scoring s) {
    each_row(l, [&](int slot) {
        set_by_first(s, slot, score_of(s, slot) * norm(load<ValueFormat>(value_of_slot(l, blockIdx.y, slot))));
    });
}

KERNEL(128) score_pool(ARGUMENT Lists l, ARGUMENT Scoring s) {
    const int scored_tokens = most(0, l.pages.lens[blockIdx.y] - s.behind);
    const float *const raw = s.raw + (long long)blockIdx.y * s.width;
    each_slot(l, [&](int slot) {
        float all = s.is_max ? minus_infinity() : 0.0f;
        const int first = most(0, slot - s.kernel / 2), end = least(scored_tokens, slot + s.kernel / 2 + 1);
        for (int other = first; other < end; other++) {
            const float x = raw[other] / s.divisor;
            all = s.is_max ? larger(all, x) : all + x;
        }
        score_of(s, slot) = slot >= scored_tokens ? 0.0f : s.is_max ? all : all / float(s.kernel);
    });
}

KERNEL(128) score_over_heads(ARGUMENT Lists l, ARGUMENT Scoring s) {
    const long long first = (long long)(blockIdx.y / l.heads) * l.heads * s.width;
    each_slot(l, [&](int slot) {
        float sum = 0.0f;
        for (int head = 0; head < l.heads; head++) sum += s.raw[first + (long long)head * s.width + slot];
        score_of(s, slot) = sum / float(l.heads);
    });
}

KERNEL(128) anchor_sum(ARGUMENT Lists l, ARGUMENT Scoring s) {
    __shared__ float sums[WARPS][HEAD_DIM];
    Row sum = {};
    each_row(l, [&](int slot) {
        const Row key = load_key(l, slot);
        const float length = larger(norm(key), LEAST_NORM);
#pragma unroll
        for (int i = 0; i < PARTS; i++) sum.x[i] += key.x[i] / length;
    });
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const int d = threadIdx.x % 32 + 32 * i;
        if (d < HEAD_DIM) sums[threadIdx.x / 32][d] = sum.x[i];
    }
    block_sync();
    float *const out = s.raw + ((long long)blockIdx.y * gridDim.x + blockIdx.x) * HEAD_DIM;
    for (int d = threadIdx.x; d < HEAD_DIM; d += THREADS) {
        float all = 0.0f;
        for (int warp = 0; warp < WARPS; warp++) all += sums[warp][d];
        out[d] = all;
    }
}

KERNEL(1024) anchor_join(ARGUMENT Lists l, ARGUMENT Scoring s) {
    constexpr int LANES = 32 * PARTS, TEAMS = 1024 / LANES; // a team of threads has a part's elements, and every TEAMS-th part
    __shared__ float sums[TEAMS][LANES];
    const int list = blockIdx.x, team = threadIdx.x / LANES, d = threadIdx.x % LANES;
    float *const parts = s.raw + (long long)list * ((s.width + ROWS - 1) / ROWS) * HEAD_DIM;
    const int count = (l.pages.lens[list] + ROWS - 1) / ROWS;
    float sum = 0.0f;
    if (d < HEAD_DIM)
#pragma unroll 8
        for (int part = team; part < count; part += TEAMS) sum += parts[(long long)part * HEAD_DIM + d];
    if (team < TEAMS) sums[team][d] = sum;
    block_sync();
    if (team > 0 || d >= HEAD_DIM) return;
    for (int other = 1; other < TEAMS; other++) sum += sums[other][d];
    parts[d] = sum;
}

KERNEL(128) score_unlike(ARGUMENT Lists l, ARGUMENT Scoring s) {
    const float *const anchor = s.raw + (long long)blockIdx.y * gridDim.x * HEAD_DIM;
    Row mean;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const int d = threadIdx.x % 32 + 32 * i;
        mean.x[i] = d < HEAD_DIM ? anchor[d] : 0.0f;
    }
    const float length = larger(norm(mean), LEAST_NORM);
    each_row(l, [&](int slot) {
        const Row key = load_key(l, slot);
        set_by_first(s, slot, -inner(key, mean) / (larger(norm(key), LEAST_NORM) * length));
    });
}
