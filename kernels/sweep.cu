// Reads a stretch of memory from end to end, so that the L2 holds that and nothing else before a pass is timed.
//
// The memory is all zeros and nothing is ever written: lines that are read stay clean, and a line that has to make room
// for the timed kernel's data costs it no write. Each thread keeps eight loads in flight.
#include "ptx.cuh"

struct Stretch {
    const u32 *start;
    u64 words;   // a multiple of 8 THREADS
    u32 *result; // where a sum would go that is not 0
    u64 blocks;
};

constexpr int THREADS = 256;
constexpr int EACH = 8;

KERNEL(256) sweep(ARGUMENT Stretch s) {
    u32 sum = 0;
    for (u64 first = u64(blockIdx.x) * THREADS * EACH; first < s.words; first += s.blocks * THREADS * EACH) {
        u32 words[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) words[i] = s.start[first + i * THREADS + threadIdx.x];
#pragma unroll
        for (int i = 0; i < EACH; i++) sum |= words[i];
    }
    if (sum) *s.result = sum;
}
