// A GPU's block on one CPU thread: what kernels/ptx.cuh declares, with other bodies.
//
// Every CUDA thread is a fiber with a stack of its own; blocks run one after another. What a warp or a block does
// together (shuffles, ldmatrix, mma.sync, barriers) is a meeting point: a fiber that comes early lets others run until
// the last one is there. Blocks end with an error instead of hanging when nobody can go on. Two things that a GPU
// leaves open are run both ways by the tests: which warp runs first, and then as far as it can, and whether cp.async writes at once or
// only when it is waited for (`Schedule`). Shared memory is full of NaN when a block starts.
//
// Found: wrong indices (under AddressSanitizer: every access outside a tensor or shared memory), wrong fragment
// layouts, missing waits for cp.async, barriers that not all threads reach, and some missing barriers. Not found: data
// races in general, anything about memory order, and how fast it is. Needs x86-64: the switch of stacks is assembly.
#pragma once

#include "abi.hpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

extern "C" void switch_stack(void **save, void *to);
asm(R"(
    .globl switch_stack
switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq  %rsp, (%rdi)
    movq  %rsi, %rsp
    popq  %r15
    popq  %r14
    popq  %r13
    popq  %r12
    popq  %rbx
    popq  %rbp
    ret
)");

inline Dim3 threadIdx, blockIdx, gridDim;

#define __shared__ static
#define DEVICE inline
#define KERNEL(threads) static void
#define ARGUMENT const
#define DYNAMIC_SHARED(name) unsigned char *const name = machine::shared.get()

namespace machine {

// What ends a kernel that a GPU would not survive, after it was told on stderr.
inline Stop stop = [](Fault) { exit(3); };

struct Schedule {
    bool backwards;  // the last thread runs first
    bool copy_early; // cp.async writes at once; otherwise when it is waited for
    bool lagging;    // a warp in the middle takes a step only when the others can do nothing without it
};
inline Schedule schedule;

struct Copy {
    u32 shared;
    const void *global;
    int bytes; // zeros behind them
};

struct Fiber {
    void *sp = nullptr;
    std::unique_ptr<char[]> stack;
    bool done = false;
    std::vector<std::vector<Copy>> groups; // of cp.async; the last one is open
};

struct Meeting {
    int arrived = 0;
    unsigned generation = 0;
};

struct Warp {
    Meeting meeting;
    float x[32];
    const unsigned char *pointer[32];
    u32 address[32], matrix[32][4], a[32][4], b[32][2];
    float d[32][4];
};

constexpr int STACK_BYTES = 128 * 1024;
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline std::function<void()> body;
inline void *scheduler;
inline int current;
inline Meeting block_meeting;
inline long meetings; // that ended, and threads that did: a round without one is a deadlock
inline std::vector<void (*)()> on_block_start, on_block_end; // for what a family of instructions keeps
inline std::unique_ptr<unsigned char[]> shared;
inline size_t shared_bytes;

inline void fiber_main() {
    body();
    fibers[current].done = true;
    switch_stack(&fibers[current].sp, scheduler);
    abort(); // a finished fiber is never resumed
}

template <class Last> void meet(Meeting &meeting, int all, Last last) {
    unsigned generation = meeting.generation;
    if (++meeting.arrived == all) {
        meeting.arrived = 0;
        last();
        meeting.generation++;
        meetings++;
        return;
    }
    while (meeting.generation == generation) {
        int me = current;
        switch_stack(&fibers[me].sp, scheduler);
    }
}

inline void meet(Meeting &meeting, int all) {
    meet(meeting, all, [] {});
}

inline Warp &warp() { return warps[current / 32]; }
inline int lane() { return current % 32; }

// Every lane puts something down, the last one makes the result, everyone takes it, and nobody goes on before.
template <class Put, class Make, class Take> void together(Put put, Make make, Take take) {
    put(warp(), lane());
    meet(warp().meeting, 32, [&] { make(warp()); });
    take(warp(), lane());
    meet(warp().meeting, 32);
}

// Runs a warp as far as it gets without the others: a warp that needs a barrier and has none runs ahead; or `once`, each
// thread until it must wait. Gives how many of its threads ended.
inline int run_warp(int warp, bool once = false) {
    int ended = 0;
    long before;
    do {
        before = meetings;
        for (int i = 0; i < 32; i++) {
            current = 32 * warp + (schedule.backwards ? 31 - i : i);
            if (fibers[current].done) continue;
            threadIdx.x = current;
            switch_stack(&scheduler, fibers[current].sp);
            if (fibers[current].done) ended++, meetings++;
        }
    } while (!once && before != meetings);
    return ended;
}

// Runs a grid. The kernel is called once in each fiber.
inline void launch(Dim3 grid, int threads, size_t dynamic_shared, const std::function<void()> &kernel) {
    gridDim = grid;
    body = kernel;
    shared_bytes = dynamic_shared;
    fibers.resize(threads);
    warps.resize(threads / 32);
    for (blockIdx.z = 0; blockIdx.z < grid.z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) {
                shared.reset(new unsigned char[dynamic_shared]);
                memset(shared.get(), 0xff, dynamic_shared);
                for (Fiber &fiber : fibers) {
                    if (!fiber.stack) fiber.stack.reset(new char[STACK_BYTES]);
                    auto top = (reinterpret_cast<uintptr_t>(fiber.stack.get()) + STACK_BYTES) & ~uintptr_t(15);
                    void **stack = reinterpret_cast<void **>(top);
                    *--stack = nullptr;                                // keeps the alignment that calls have
                    *--stack = reinterpret_cast<void *>(fiber_main);   // where `ret` goes
                    for (int i = 0; i < 6; i++) *--stack = nullptr;    // six registers
                    fiber.sp = stack;
                    fiber.done = false;
                    fiber.groups.assign(1, {});
                }
                for (auto hook : on_block_start) hook();
                for (int left = threads; left;) {
                    const long before = meetings;
                    const int all = threads / 32, laggard = schedule.lagging ? all / 2 - 1 : -1;
                    for (int i = 0; i < all; i++) {
                        const int warp = schedule.backwards ? all - 1 - i : i;
                        if (warp != laggard) left -= run_warp(warp);
                    }
                    if (laggard >= 0 && meetings == before) left -= run_warp(laggard, true);
                    if (left && meetings == before) {
                        fprintf(stderr, "deadlock: %d threads of block %u %u %u wait\n", left, blockIdx.x, blockIdx.y,
                                blockIdx.z);
                        stop(Fault::timeout);
                    }
                }
                for (auto hook : on_block_end) hook();
            }
}

inline void aligned_16(const char *what, u32 shared) {
    if (shared % 16 == 0) return;
    fprintf(stderr, "%s: address %u is no multiple of 16\n", what, shared);
    stop(Fault::misaligned_address);
}

// A kernel function as the emulated driver sees it, made from nothing but its type.
template <auto Kernel> struct Export;
template <class... Arguments, void (*Kernel)(Arguments...)> struct Export<Kernel> {
    static constexpr size_t sizes[] = {sizeof(Arguments)..., 0};

    template <size_t... I>
    static void call(void **arguments, std::index_sequence<I...>) { Kernel(*static_cast<Arguments *>(arguments[I])...); }

    static void run(void **arguments, Dim3 grid, unsigned threads, size_t dynamic_shared, Stop on_fault) {
        stop = on_fault;
        launch(grid, int(threads), dynamic_shared, [=] { call(arguments, std::index_sequence_for<Arguments...>{}); });
    }

    static constexpr Entry entry(const char *name, unsigned most_threads) {
        return {name, most_threads, sizes, sizeof...(Arguments), run, &blockIdx, &threadIdx};
    }
};

inline void perform(const Copy &copy) {
    unsigned char *target = shared.get() + copy.shared;
    if (copy.shared % 16 || (copy.bytes && reinterpret_cast<uintptr_t>(copy.global) % 16)) {
        fprintf(stderr, "cp.async: an address is no multiple of 16\n");
        stop(Fault::misaligned_address);
    }
    memset(target, 0, 16);
    if (copy.bytes) memcpy(target, copy.global, copy.bytes);
}

inline float from_bf16(u16 h) {
    u32 bits = u32(h) << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

inline float from_f16(u16 h) {
    _Float16 x;
    memcpy(&x, &h, 2);
    return float(x);
}

template <int Element> u16 round_to(float x) {
    if constexpr (Element == BF16) {
        u32 bits;
        memcpy(&bits, &x, 4);
        if (x != x) return 0x7fff;
        return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    _Float16 half = _Float16(x);
    u16 bits;
    memcpy(&bits, &half, 2);
    return bits;
}

template <int Element> float widen(u16 h) { return Element == BF16 ? from_bf16(h) : from_f16(h); }

// Lane l's four registers of ldmatrix, from the 32 rows' addresses.
inline void load(u32 (&r)[4], u32 address, bool transposed) {
    if (address % 16) {
        fprintf(stderr, "ldmatrix: address %u is no multiple of 16\n", address);
        stop(Fault::misaligned_address);
    }
    together([&](Warp &w, int lane) { w.address[lane] = address; },
             [&](Warp &w) {
                 for (int m = 0; m < 4; m++) {
                     u16 x[8][8];
                     for (int row = 0; row < 8; row++) memcpy(x[row], shared.get() + w.address[8 * m + row], 16);
                     for (int lane = 0; lane < 32; lane++) {
                         int row = lane / 4, column = lane % 4 * 2;
                         u16 low = transposed ? x[column][row] : x[row][column];
                         u16 high = transposed ? x[column + 1][row] : x[row][column + 1];
                         w.matrix[lane][m] = low | u32(high) << 16;
                     }
                 }
             },
             [&](Warp &w, int lane) { memcpy(r, w.matrix[lane], sizeof r); });
}

} // namespace machine

inline void block_sync() { machine::meet(machine::block_meeting, int(machine::fibers.size())); }
inline void warp_sync() { machine::meet(machine::warp().meeting, 32); }

inline float shuffle_xor(float x, int mask) {
    float y;
    machine::together([&](machine::Warp &w, int lane) { w.x[lane] = x; }, [](machine::Warp &) {},
                      [&](machine::Warp &w, int lane) { y = w.x[lane ^ mask]; });
    return y;
}

inline float shuffle(float x, int lane) {
    float y;
    machine::together([&](machine::Warp &w, int me) { w.x[me] = x; }, [](machine::Warp &) {},
                      [&](machine::Warp &w, int) { y = w.x[lane]; });
    return y;
}

inline const unsigned char *shuffle(const unsigned char *x, int lane) {
    const unsigned char *y;
    machine::together([&](machine::Warp &w, int me) { w.pointer[me] = x; }, [](machine::Warp &) {},
                      [&](machine::Warp &w, int) { y = w.pointer[lane]; });
    return y;
}

inline u32 shared_address(const void *p) { return u32(static_cast<const unsigned char *>(p) - machine::shared.get()); }

inline void copy_async_16(u32 shared, const void *global, int bytes) {
    machine::Copy copy{shared, global, bytes};
    if (machine::schedule.copy_early)
        machine::perform(copy);
    else
        machine::fibers[machine::current].groups.back().push_back(copy);
}

inline void copy_async_commit() { machine::fibers[machine::current].groups.emplace_back(); }

template <int Pending> void copy_async_wait() {
    auto &groups = machine::fibers[machine::current].groups;
    while (groups.size() > Pending + 1) { // the open group does not count
        for (const machine::Copy &copy : groups.front()) machine::perform(copy);
        groups.erase(groups.begin());
    }
}

inline void store_chunk(u32 shared, const u32 (&x)[4]) {
    machine::aligned_16("st.shared.v4", shared);
    memcpy(machine::shared.get() + shared, x, 16);
}
inline u32 load_word(u32 shared) {
    u32 x;
    memcpy(&x, machine::shared.get() + shared, 4);
    return x;
}
inline void load_words(u32 (&x)[2], u32 shared) {
    if (shared % 8) machine::stop(machine::Fault::misaligned_address);
    memcpy(x, machine::shared.get() + shared, 8);
}
inline void load_floats(float (&x)[4], u32 shared) {
    machine::aligned_16("ld.shared.v4", shared);
    memcpy(x, machine::shared.get() + shared, 16);
}

inline void load_matrices(u32 (&r)[4], u32 shared) { machine::load(r, shared, false); }
inline void load_matrices_transposed(u32 (&r)[4], u32 shared) { machine::load(r, shared, true); }

template <int Element> void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    using machine::Warp;
    machine::together(
        [&](Warp &w, int lane) {
            memcpy(w.a[lane], a, sizeof a);
            w.b[lane][0] = b0, w.b[lane][1] = b1;
            memcpy(w.d[lane], d, sizeof d);
        },
        [](Warp &w) {
            float left[16][16], right[16][8];
            for (int lane = 0; lane < 32; lane++) {
                int g = lane / 4, t = lane % 4;
                for (int e = 0; e < 2; e++) {
                    for (int r = 0; r < 4; r++)
                        left[g + 8 * (r & 1)][2 * t + 8 * (r >> 1) + e] = machine::widen<Element>(u16(w.a[lane][r] >> 16 * e));
                    for (int r = 0; r < 2; r++) right[2 * t + 8 * r + e][g] = machine::widen<Element>(u16(w.b[lane][r] >> 16 * e));
                }
            }
            for (int lane = 0; lane < 32; lane++)
                for (int i = 0; i < 4; i++) {
                    int row = lane / 4 + 8 * (i >> 1), column = lane % 4 * 2 + (i & 1);
                    for (int k = 0; k < 16; k++) w.d[lane][i] += left[row][k] * right[k][column];
                }
        },
        [&](Warp &w, int lane) { memcpy(d, w.d[lane], sizeof d); });
}

inline u32 transposed(u32 matrix) {
    u32 other;
    machine::together([&](machine::Warp &w, int lane) { w.address[lane] = matrix; }, [](machine::Warp &) {},
                      [&](machine::Warp &w, int lane) {
                          const auto of = [&](int row, int column) { return w.address[4 * row + column / 2] >> column % 2 * 16 & 0xffff; };
                          other = of(lane % 4 * 2, lane / 4) | of(lane % 4 * 2 + 1, lane / 4) << 16;
                      });
    return other;
}

template <int Element> u32 fused_pair(u32 a, u32 b, u32 c) {
    u32 both = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const auto of = [&](u32 x) { return machine::widen<Element>(u16(x >> shift)); };
        both |= u32(machine::round_to<Element>(float(double(of(a)) * of(b) + of(c)))) << shift;
    }
    return both;
}

template <int Element> u32 pack(float low, float high) {
    return machine::round_to<Element>(low) | u32(machine::round_to<Element>(high)) << 16;
}
inline float f16_to_float(u16 bits) { return machine::from_f16(bits); }
inline float bits_to_float(u32 bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline float exp2_fast(float x) { return exp2f(x); }
inline float log2_fast(float x) { return log2f(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline float fused(float a, float b, float c) { return fmaf(a, b, c); }
inline float larger(float a, float b) { return fmaxf(a, b); }
inline int forgotten(int x) { return x; }

inline void add_fragment(float *fragment, int lane, const float (&x)[4]) {
    for (int i = 0; i < 4; i++) fragment[32 * i + lane] += x[i];
}
inline void read_fragment(const float *fragment, int lane, float (&x)[4]) {
    for (int i = 0; i < 4; i++) x[i] = fragment[32 * i + lane];
}
inline float square_root(float x) { return sqrtf(x); }
inline float error_function(float x) { return erff(x); }
inline u32 float_to_bits(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline u32 choose_bytes(u32 low, u32 high, u32 which) {
    const u64 all = u64(high) << 32 | low;
    u32 bytes = 0;
    for (int i = 0; i < 4; i++) bytes |= u32(all >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
    return bytes;
}
inline float sine_of_turns(float turns) { return float(sin(6.283185307179586 * turns)); }
inline float cosine_of_turns(float turns) { return float(cos(6.283185307179586 * turns)); }
inline double nearest_whole(double x) { return nearbyint(x); }

inline u32 ballot(bool holds) {
    u32 bits;
    machine::together([&](machine::Warp &w, int lane) { w.address[lane] = holds; },
                      [](machine::Warp &w) {
                          u32 all = 0;
                          for (int lane = 0; lane < 32; lane++) all |= w.address[lane] << lane;
                          for (u32 &bits : w.address) bits = all;
                      },
                      [&](machine::Warp &w, int lane) { bits = w.address[lane]; });
    return bits;
}
inline int ones(u32 bits) { return __builtin_popcount(bits); }
inline void count_up(int *counter) { ++*counter; }
