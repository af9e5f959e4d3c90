// The instructions that only Hopper has (sm_90a), each behind a small function: barriers that count bytes (mbarrier),
// tiles of a tensor copied in the background (TMA), and products of a warpgroup, which is four warps from a multiple of
// four on (wgmma). The emulation's bodies are in tests/kernels/emulate/hopper_machine.hpp. Numbers in brackets are
// sections of the PTX ISA, 9.x.
//
// What is copied in the background and what wgmma reads goes through the async proxy. The forward pass neither reads nor
// writes such memory by plain loads and stores, so that the fence after the barriers are made is its only one; what the
// backward pass writes itself for wgmma is fenced by shared_written().
#pragma once
#include "ptx.cuh"

// A CUtensorMap: where a tensor lies and which tile of it a copy takes. kernels/src/device/cuda/tensor_map.rs makes it.
struct alignas(128) TensorMap {
    u64 opaque[16];
};

// A matrix in shared memory as wgmma takes it [9.7.15.5.1.2.2]: the start in bits 0-13, two distances in bits 16-29 and
// 32-45, all in units of 16 bytes; 1 in bits 62-63 is the 128-byte swizzle; bits 49-51 are zero because the pattern starts
// at a multiple of 1024. With this swizzle, in bytes from the start, before the exclusive or of address bits 4-6 with 7-9,
//   K-major (rows of 64 elements of the depth): element (row, k) at row / 8 * `stride` + row % 8 * 128 + 2 k;
//       the first distance is not used; 16 elements further in the depth is 32 bytes further
//   MN-major (rows of 64 columns): element (k, column) at
//       column / 64 * `leading` + k / 8 * `stride` + k % 8 * 128 + 2 (column % 64)
// [9.7.15.5.1.2.1, "Strides"].
DEVICE u64 matrix_at(u32 shared, u32 leading_bytes, u32 stride_bytes) {
    return u64((shared & 0x3ffff) >> 4) | u64(leading_bytes >> 4) << 16 | u64(stride_bytes >> 4) << 32 | u64(1) << 62;
}

// The matrix that starts `bytes` further.
DEVICE u64 further(u64 matrix, u32 bytes) { return (matrix & 0xffffffff00000000) | u32(u32(matrix) + (bytes >> 4)); }

#ifdef KVSIEVE_EMULATE
#include "hopper_machine.hpp"
#else

// One block has a multiprocessor to itself. Registers can be moved between warpgroups only when this is promised.
#define KERNEL_ALONE(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
// Dynamic shared memory that starts where the pattern of the swizzle does.
#define SWIZZLED_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

// Gives registers back until `Count` are left to each thread of the warpgroup, or waits until it has so many
// [9.7.19.5, setmaxnreg].
template <int Count> DEVICE void keep_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count)); }
template <int Count> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count)); }

// A barrier of 8 bytes in shared memory [9.7.13.15]. A phase ends when `arrivals` threads have arrived and as many bytes
// were copied as were expected.
DEVICE void barrier_make(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After this and a block_sync the barriers are there for all threads and for copies in the background.
DEVICE void barriers_made() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes this phase wait for `bytes` more.
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the end of the phase of this parity: 0 is the first. The one before the first counts as ended.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{\n"
                 ".reg .pred ended;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
                 "@!ended bra again;\n"
                 "}" ::"r"(barrier), "r"(parity)
                 : "memory");
}

// Copies the box that starts at (column, row) of matrix `list` to shared memory in the background and tells the barrier
// [9.7.9.27.1.2]. What is outside the tensor becomes zero, and counts as copied.
DEVICE void copy_box(u32 shared, const TensorMap &map, u32 barrier, int column, int row, int list) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared),
                 "l"(&map), "r"(column), "r"(row), "r"(list), "r"(barrier)
                 : "memory");
}

// Named barriers for `threads` threads [9.7.13.1]: those that wait, and those that say they were there and go on.
DEVICE void turn_wait(int name, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory"); }
DEVICE void turn_pass(int name, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory"); }

// A counter in global memory of the module, zero when it is loaded. Counts up and gives the number before; behind `last`
// comes 0.
#define GLOBAL_COUNTER(name) __device__ u32 name
DEVICE u32 count_round(u32 *counter, u32 last) { return atomicInc(counter, last); }

DEVICE u32 shuffle_xor(u32 x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE int shuffle_from(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

// Products run in the background [9.7.15.7]. The fence stands between plain uses of registers and products that take
// them; after a wait, all but the latest `Pending` groups are done.
DEVICE void product_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending> DEVICE void product_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Keeps the compiler from moving uses of registers over a wait, which it does not know to be about them.
template <int Count> DEVICE void settle(float (&d)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int Count> DEVICE void settle(u32 (&a)[Count][4]) {
#pragma unroll
    for (int i = 0; i < Count; i++)
        asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}

#if ELEMENT == BF16
#define PRODUCT_TYPES ".f32.bf16.bf16 "
#else
#define PRODUCT_TYPES ".f32.f16.f16 "
#endif

// The sign of products with both operands in shared memory: those of scores, and so of the scale.
#if NEGATIVE
#define PRODUCT_SIGN "-1"
#else
#define PRODUCT_SIGN "1"
#endif

// The accumulators of 2 x COUNT columns: their numbers as operands, and the operands.
#define NUMBERS_32                                                                                                     \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NUMBERS_40 NUMBERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NUMBERS_56 NUMBERS_40 ", %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55"
#define NUMBERS_64 NUMBERS_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NUMBERS_88                                                                                                     \
    NUMBERS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, "                                        \
               "%76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87"
#define NUMBERS_128                                                                                                    \
    NUMBERS_88 ", %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, "    \
               "%106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, "      \
               "%122, %123, %124, %125, %126, %127"
#define OPERANDS_8(d, i)                                                                                               \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define OPERANDS_32(d) OPERANDS_8(d, 0), OPERANDS_8(d, 8), OPERANDS_8(d, 16), OPERANDS_8(d, 24)
#define OPERANDS_40(d) OPERANDS_32(d), OPERANDS_8(d, 32)
#define OPERANDS_56(d) OPERANDS_40(d), OPERANDS_8(d, 40), OPERANDS_8(d, 48)
#define OPERANDS_64(d) OPERANDS_56(d), OPERANDS_8(d, 56)
#define OPERANDS_88(d) OPERANDS_64(d), OPERANDS_8(d, 64), OPERANDS_8(d, 72), OPERANDS_8(d, 80)
#define OPERANDS_128(d)                                                                                                \
    OPERANDS_88(d), OPERANDS_8(d, 88), OPERANDS_8(d, 96), OPERANDS_8(d, 104), OPERANDS_8(d, 112), OPERANDS_8(d, 120)

// d = a b^T, or d += a b^T where `add`, or minus a b^T: a is 64x16 and b is COLUMNS x 16, both K-major in shared memory.
// d += a b: a is 64x16 in registers, b is 16 x COLUMNS, MN-major in shared memory.
// Warp w of the warpgroup has rows 16 w to 16 w + 15. With g = lane / 4 and t = lane % 4 a lane holds [9.7.15.5.1.1]
//   d: element i has row g + 8 (i / 2 % 2), column 8 (i / 4) + 2 t + i % 2
//   a: register r has rows g + 8 (r & 1), depths 2 t + 8 (r >> 1) and the next: pairs of d, rounded, of 16 columns
#define DEFINE_PRODUCTS(COLUMNS, COUNT, N0, N1, N2, N3, N4, N5)                                                        \
    DEVICE void add_product(float (&d)[COUNT], u64 a, u64 b, bool add) {                                               \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" N2 ", 0;\n"                                              \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16" PRODUCT_TYPES "{" NUMBERS_##COUNT "}, "        \
                     "%" N0 ", %" N1 ", add, " PRODUCT_SIGN ", 1, 0, 0;\n}"                                            \
                     : OPERANDS_##COUNT(d)                                                                             \
                     : "l"(a), "l"(b), "r"(int(add)));                                                                 \
    }                                                                                                                  \
    DEVICE void add_product(float (&d)[COUNT], const u32 (&a)[4], u64 b) {                                             \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" N5 ", 0;\n"                                              \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16" PRODUCT_TYPES "{" NUMBERS_##COUNT "}, "        \
                     "{%" N0 ", %" N1 ", %" N2 ", %" N3 "}, %" N4 ", add, 1, 1, 1;\n}"                                 \
                     : OPERANDS_##COUNT(d)                                                                             \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(1));                                    \
    }
DEFINE_PRODUCTS(64, 32, "32", "33", "34", "35", "36", "37")
DEFINE_PRODUCTS(80, 40, "40", "41", "42", "43", "44", "45")
DEFINE_PRODUCTS(112, 56, "56", "57", "58", "59", "60", "61")
DEFINE_PRODUCTS(128, 64, "64", "65", "66", "67", "68", "69")
DEFINE_PRODUCTS(176, 88, "88", "89", "90", "91", "92", "93")
DEFINE_PRODUCTS(256, 128, "128", "129", "130", "131", "132", "133")

// d = a b, or d += a b where `add`: a is 64x16 and b is 16x64, both MN-major in shared memory.
DEVICE void add_product_transposed(float (&d)[32], u64 a, u64 b, bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16" PRODUCT_TYPES "{" NUMBERS_32 "}, %32, %33, add, 1, 1, 1, 1;\n}"
                 : OPERANDS_32(d)
                 : "l"(a), "l"(b), "r"(int(add)));
}

// Four 8x8 matrices of 16-bit elements, each lane's as load_matrices() of ptx.cuh gives them; lane l gives the address of
// row l % 8 of matrix l / 8 [9.7.15.5.17, stmatrix].
DEVICE void store_matrices(u32 shared, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]), "r"(r[1]), "r"(r[2]),
                 "r"(r[3])
                 : "memory");
}

// What this thread wrote to shared memory is there for products too, for whoever learns of it afterwards.
DEVICE void shared_written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#endif
