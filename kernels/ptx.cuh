// Every instruction that CUDA C++ has no plain word for, each behind a small function.
//
// Kernels use nothing of the GPU but what is declared here, thread and block indices, and __shared__ memory. That has
// two uses: the reader finds each PTX instruction once, with its layout; and a host build (KVSIEVE_EMULATE, see
// tests/kernels/emulate/) puts other bodies behind the same names and runs the same kernels on a CPU.
//
// Needs no header of the CUDA toolkit. Conversions of bf16 and f16 are instructions of sm_80 and later.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Element types, as the macro ELEMENT names them.
#define F32 0
#define BF16 1
#define F16 2

#ifdef KVSIEVE_EMULATE
#include "machine.hpp"
#else

#define DEVICE __device__ __forceinline__
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
// A parameter that is read where it lies: its address may be taken without a copy in local memory.
#define ARGUMENT const __grid_constant__
// The block's dynamic shared memory, whose size the launch tells.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

DEVICE void block_sync() { __syncthreads(); }
DEVICE void warp_sync() { __syncwarp(); }
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

// `x` of lane `lane`.
DEVICE float shuffle(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

DEVICE const unsigned char *shuffle(const unsigned char *x, int lane) {
    return reinterpret_cast<const unsigned char *>(__shfl_sync(0xffffffffu, reinterpret_cast<u64>(x), lane));
}

// Where shared memory lies in its own address space: what ldmatrix and cp.async take.
DEVICE u32 shared_address(const void *generic) {
    u64 wide;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(wide) : "l"(generic));
    return u32(wide);
}

// 16 bytes from global to shared memory, past the registers and in the background; zeros behind the first `bytes`.
DEVICE void copy_async_16(u32 shared, const void *global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// Closes a group of this thread's copies.
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `Pending` of this thread's latest groups are under way.
template <int Pending> DEVICE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory"); }

// Shared memory, from registers and to them: 16 bytes, or as many as the type has.
DEVICE void store_chunk(u32 shared, const u32 (&x)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
DEVICE u32 load_word(u32 shared) {
    u32 x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(shared) : "memory");
    return x;
}
DEVICE void load_words(u32 (&x)[2], u32 shared) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(shared) : "memory");
}
DEVICE void load_floats(float (&x)[4], u32 shared) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(shared)
                 : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8. Of each matrix lane l
// gets elements (l / 4, 2 (l % 4)) and the next of its row.
DEVICE void load_matrices(u32 (&r)[4], u32 shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
}

// The same of the transposed matrices.
DEVICE void load_matrices_transposed(u32 (&r)[4], u32 shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
}

// d += a b with a 16x16, b 16x8, d 16x8 in f32. With g = lane / 4 and t = lane % 4 a lane holds
//   a: register r has rows g + 8 (r & 1), columns 2t + 8 (r >> 1) and the next
//   b: register r has rows 2t + 8 r and the next, column g
//   d: element i has row g + 8 (i >> 1), column 2t + (i & 1)
template <int Element> DEVICE void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (Element == BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// An 8x8 matrix of 16-bit elements, transposed: a lane gives and gets elements (l / 4, 2 (l % 4)) and the next of its row.
DEVICE u32 transposed(u32 matrix) {
    u32 other;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(matrix));
    return other;
}

// a b + c of each half, rounded once.
template <int Element> DEVICE u32 fused_pair(u32 a, u32 b, u32 c) {
    u32 both;
    if constexpr (Element == BF16)
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(both) : "r"(a), "r"(b), "r"(c));
    else
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(both) : "r"(a), "r"(b), "r"(c));
    return both;
}

// Two floats rounded to nearest even, `low` in the lower half.
template <int Element> DEVICE u32 pack(float low, float high) {
    u32 both;
    if constexpr (Element == BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

DEVICE float f16_to_float(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

DEVICE float bits_to_float(u32 bits) { return __uint_as_float(bits); }

// 2^x and log2(x), with an error of about 2^-22; 1/x within one unit of the last place.
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float log2_fast(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float larger(float a, float b) { return fmaxf(a, b); }
DEVICE float square_root(float x) { return __fsqrt_rn(x); }
DEVICE float error_function(float x) { return erff(x); }

DEVICE u32 float_to_bits(float x) { return __float_as_uint(x); }

#if __CUDA_ARCH__ >= 890
#define HAS_E4M3
// Two 8-bit floats of 3 bits of mantissa, the first in the lower byte, as two f16, the first in the lower half.
DEVICE u32 e4m3_to_f16(u16 both) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(both));
    return halves;
}
#endif

// Four of the eight bytes of two words, `low`'s first: nibble i of `which` says which one is byte i.
DEVICE u32 choose_bytes(u32 low, u32 high, u32 which) { return __byte_perm(low, high, which); }

// The sine and the cosine of an angle in whole turns.
DEVICE float sine_of_turns(float turns) { return sinpif(2.0f * turns); }
DEVICE float cosine_of_turns(float turns) { return cospif(2.0f * turns); }
DEVICE double nearest_whole(double x) { return rint(x); }

// The lanes of a warp for which something holds, a bit each, and the bits that are set.
DEVICE u32 ballot(bool holds) { return __ballot_sync(0xffffffffu, holds); }
DEVICE int ones(u32 bits) { return __popc(bits); }

// Counts in shared memory; whole numbers, so that the order does not matter.
DEVICE void count_up(int *counter) { atomicAdd(counter, 1); }

// The same number, but the compiler cannot know: what follows from it is computed anew in every turn of a loop, and does
// not take a register all the while.
DEVICE int forgotten(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// A fragment of 16x8 sums, four in each lane, in 128 floats of global memory: added to what is there, whoever else adds
// at the same time, or read. Its order there is the one that the widest addition of the architecture takes.
DEVICE void add_fragment(float *fragment, int lane, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(fragment + 4 * lane), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                 "f"(x[3])
                 : "memory");
#else
    for (int i = 0; i < 4; i++) asm volatile("red.global.add.f32 [%0], %1;" ::"l"(fragment + 32 * i + lane), "f"(x[i]) : "memory");
#endif
}
DEVICE void read_fragment(const float *fragment, int lane, float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
    for (int i = 0; i < 4; i++) x[i] = fragment[4 * lane + i];
#else
    for (int i = 0; i < 4; i++) x[i] = fragment[32 * i + lane];
#endif
}

#endif
