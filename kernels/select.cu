// From scores to the slots that stay: of each list the best, of equal scores the later, in ascending order. The same
// slots as engine/src/policy/select.rs gives for the same scores, whatever they are: floats are compared as ordered bits, which
// is Rust's `total_cmp`.
//
// A block for each list. Four passes over the scores count digits of eight bits from the top: they find the best score
// that is lost, the bar. A fifth pass writes the slots: what lies above the bar, and the last of what equals it.
//
// Versions
//   1  1024 threads, histogram in shared memory by integer atomics, places by ballots. A few long lists do not fill a
//      GPU. Right on an H100; not timed there.
//
// Compile with any -DELEMENT and -DHEAD_DIM.
//   score_bounds   grid (lists), 1024 threads: the largest score of a list and its first slot whose score is no number
//   score_protect  grid (ceil(longest / 256), lists), 256 threads: protected tokens above all others, by the largest scores
//   select_best    grid (lists), 1024 threads
//   let_leave      grid (ceil(longest / 256), lists), 256 threads: the slot that has left the latest ones goes
#include "lists.cuh"

struct Choice {
    float *scores;      // [lists, width]
    const int *counts;  // [lists]: slots that stay of each list
    u32 *slots;         // [lists, width]: those that stay, ascending
    float *best_lost;   // [lists]: the best score that is lost; minus infinity where none is
    float *tops;        // [lists]: the largest score
    int *wrong;         // [lists]: the first slot whose score is no number; -1 where there is none
    int *gone;          // [lists]: the slot that goes; -1 where none does
    int width;
    int sink, recent;   // protected: positions before `sink`, and the latest `recent` slots
    int lists;
};

namespace {

constexpr int THREADS = 1024, WARPS = THREADS / 32, DIGITS = 256;

// Larger floats have larger numbers; every bit pattern has its place.
DEVICE u32 order_of(float x) {
    const u32 bits = float_to_bits(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DEVICE float of_order(u32 order) { return bits_to_float(order & 0x80000000u ? order & 0x7fffffffu : ~order); }

// What lies a step above a score: one more, or the next number where numbers are so large. As `above` of
// engine/src/policy/scored.rs.
DEVICE float above(float x) { return larger(x + 1.0f, of_order(order_of(x) + 1)); }

DEVICE bool is_number(float x) { return (float_to_bits(x) & 0x7f800000u) != 0x7f800000u; }

} // namespace

KERNEL(1024) score_bounds(ARGUMENT Lists l, ARGUMENT Choice c) {
    __shared__ float tops[THREADS];
    __shared__ int wrong[THREADS];
    const int thread = threadIdx.x, list = blockIdx.x, len = l.pages.lens[list];
    const float *const scores = c.scores + (long long)list * c.width;
    float top = minus_infinity();
    int first = len;
    for (int slot = thread; slot < len; slot += THREADS) {
        const float score = scores[slot];
        top = larger(top, score);
        if (!is_number(score)) first = least(first, slot);
    }
    tops[thread] = top, wrong[thread] = first;
    for (int half = THREADS / 2; half; half /= 2) {
        block_sync();
        if (thread < half) {
            tops[thread] = larger(tops[thread], tops[thread + half]);
            wrong[thread] = least(wrong[thread], wrong[thread + half]);
        }
    }
    if (thread == 0) c.tops[list] = tops[0], c.wrong[list] = wrong[0] < len ? wrong[0] : -1;
}

KERNEL(256) score_protect(ARGUMENT Lists l, ARGUMENT Choice c) {
    __shared__ float tops[8];
    const int slot = blockIdx.x * 256 + threadIdx.x, list = blockIdx.y, len = l.pages.lens[list];
    float highest = minus_infinity(); // of all lists
    for (int other = threadIdx.x; other < c.lists; other += 256) highest = larger(highest, c.tops[other]);
    for (int mask = 16; mask; mask /= 2) highest = larger(highest, shuffle_xor(highest, mask));
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = highest;
    block_sync();
    for (int warp = 0; warp < 8; warp++) highest = larger(highest, tops[warp]);
    if (slot >= len) return;
    float *const score = c.scores + (long long)list * c.width + slot;
    if (!is_number(*score)) return; // the host will tell of it
    if (*score == 0.0f) *score = 0.0f; // -0 equals it, and would be below it by its bits
    if (slot >= len - c.recent) *score = above(highest);
    if (origin_of(l, list, slot) < c.sink) *score = above(above(highest));
}

KERNEL(1024) select_best(ARGUMENT Lists l, ARGUMENT Choice c) {
    __shared__ int histogram[DIGITS], above_of_warp[WARPS], equal_of_warp[WARPS], found[2];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, list = blockIdx.x;
    const int len = l.pages.lens[list], count = c.counts[list];
    const float *const scores = c.scores + (long long)list * c.width;
    u32 *const slots = c.slots + (long long)list * c.width;
    if (count >= len) {
        for (int slot = thread; slot < len; slot += THREADS) slots[slot] = slot;
        if (thread == 0) c.best_lost[list] = minus_infinity();
        return;
    }

    // Digit by digit: the bar has rank `rank` (from 0, the best first) among scores that begin as it does.
    u32 bar = 0;
    int rank = count, equal = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (thread < DIGITS) histogram[thread] = 0;
        block_sync();
        for (int slot = thread; slot < len; slot += THREADS) {
            const u32 order = order_of(scores[slot]);
            // Shifted in two steps: a shift by 32 is none.
            if (order >> shift >> 8 == bar >> shift >> 8) count_up(&histogram[order >> shift & 255]);
        }
        block_sync();
        if (thread == 0) {
            int digit = DIGITS - 1, left = rank;
            while (left >= histogram[digit]) left -= histogram[digit--];
            found[0] = digit, found[1] = left;
        }
        block_sync();
        bar |= u32(found[0]) << shift;
        rank = found[1], equal = histogram[found[0]];
        block_sync(); // the histogram may be cleared
    }
    // `rank` of the scores that equal the bar stay, the last ones.
    const int lost = equal - rank;
    int above_before = 0, equal_before = 0;
    for (int start = 0; start < len; start += THREADS) {
        const int slot = start + thread;
        const u32 order = slot < len ? order_of(scores[slot]) : 0;
        const bool is_above = slot < len && order > bar, is_equal = slot < len && order == bar;
        const u32 above_lanes = ballot(is_above), equal_lanes = ballot(is_equal), below = (1u << lane) - 1;
        if (lane == 0) above_of_warp[warp] = ones(above_lanes), equal_of_warp[warp] = ones(equal_lanes);
        block_sync();
        int above = above_before + ones(above_lanes & below), equals = equal_before + ones(equal_lanes & below);
        for (int other = 0; other < WARPS; other++) {
            if (other < warp) above += above_of_warp[other], equals += equal_of_warp[other];
            above_before += above_of_warp[other], equal_before += equal_of_warp[other];
        }
        if (is_above || (is_equal && equals >= lost)) slots[above + most(0, equals - lost)] = slot;
        block_sync(); // the warps' numbers may be written again
    }
    if (thread == 0) c.best_lost[list] = of_order(bar);
}

// Under a delayed schedule a token is decided on once, when it has left the `recent` latest ones: it stays if it beats the best
// that its list lost after prefill, and is the slot that is found if it goes.
KERNEL(256) let_leave(ARGUMENT Lists l, ARGUMENT Choice c) {
    const int slot = blockIdx.x * 256 + threadIdx.x, list = blockIdx.y, len = l.pages.lens[list];
    const int leaving = len - c.recent - 1;
    const float *const scores = c.scores + (long long)list * c.width;
    const bool goes = leaving >= 0 && !(scores[leaving] > c.best_lost[list]);
    if (slot == 0) c.gone[list] = goes ? leaving : -1;
    if (slot >= len || (goes && slot == leaving)) return;
    c.slots[(long long)list * c.width + slot - (goes && slot > leaving)] = slot;
}
