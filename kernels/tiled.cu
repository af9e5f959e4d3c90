// FlashAttention-2 forward for sm_80 and later (Dao 2023): tiles of keys and values pass once for each block of
// queries; scores live in registers only.
//
// Versions
//   1  mma.sync m16n8k16 with f32 accumulation; two stages of K and V by cp.async with one barrier per tile; xor swizzle
//      and ldmatrix; Q in registers; exp2 with the scale folded into one fused multiply-add; tiles at the edge of a mask
//      go through code of their own; heaviest blocks of a causal problem first. A warp of 32 rows reads half as much
//      shared memory per product as one of 16, but above D 64 it does not fit: at D 128 it spills 900 bytes with 64 keys
//      to a tile and 150 with 32 (NVRTC 13.0, sm_80).
//   2  D up to 256, D that is no multiple of 8 (copied element by element), and f32 on CUDA cores. Above D 192 Q stays in
//      shared memory: in registers it spills 24 bytes at D 256 with 32 keys. At most four of a thread's copies are
//      unrolled: all of them hold so many addresses that D 192 and D 256 spill.
//      Compiled and emulated; not timed on a GPU yet. Registers (sm_80, no spills anywhere), bf16 with 64 keys: 255 at
//      D 64, 174 at 96, 182 at 128, 255 at 192; 249 at D 256 with 32.
//
// Compile with -DELEMENT=F32|BF16|F16 -DHEAD_DIM=1..256 -DROWS=64, or 128 in 16 bits up to D 64 -DKEYS=keys of a tile: 64
// or 32, above D 192 only 32; f32: 32, 16 or 8 -DQ_KEPT=1 where Q is kept in registers: in 16 bits up to D 192; else 0.
//   tiled_forward  grid (ceil(Lq / ROWS), Hq, B), 128 threads, shared memory: K and V of KEYS keys, twice, and Q where it
//                  stays there
#include "rows.cuh"
#if ELEMENT == F32
#include "strip_f32.cuh"
#else
#include "strip.cuh"
#endif

namespace {

constexpr int WARPS = 4, THREADS = 32 * WARPS, WARP_ROWS = ROWS / WARPS;
constexpr int TILE_BYTES = KEYS * ROW_BYTES;
// Q in registers passes through the stages on its way there.
constexpr int Q_BYTES = Q_KEPT ? 0 : ROWS * ROW_BYTES;
static_assert(!Q_KEPT || ROWS <= 4 * KEYS, "the two stages have room for Q");

using Rows = Strip<WARP_ROWS, KEYS>;

struct Block {
    const Problem &p;
    u32 stages; // K, V, K, V
    const unsigned char *k, *v;
    Logits logits;
    Queries<WARP_ROWS, Q_KEPT> queries;
    Rows strip;
    Span seen[Rows::SLOTS];

    DEVICE u32 stage(int tile) const { return stages + tile % 2 * (2 * TILE_BYTES); }

    DEVICE void copy(int tile) {
        const int key0 = tile * KEYS, count = p.kv_len - key0;
        copy_rows<KEYS, THREADS>(stage(tile), threadIdx.x, count, k, [&](int row) { return row_at(k, key0 + row); });
        copy_rows<KEYS, THREADS>(stage(tile) + TILE_BYTES, threadIdx.x, count, v, [&](int row) { return row_at(v, key0 + row); });
    }

    template <bool Masked> DEVICE void step(int tile) {
        strip.scores(stage(tile), queries);
        strip.cap(logits);
        if constexpr (Masked) strip.mask(seen, tile * KEYS);
        strip.absorb(logits.rest());
        strip.add_values(stage(tile) + TILE_BYTES);
    }
};

} // namespace

KERNEL(128) tiled_forward(ARGUMENT Problem p) {
    DYNAMIC_SHARED(memory);
    const u32 shared = shared_address(memory);
    const int thread = threadIdx.x, warp_row = thread / 32 * WARP_ROWS;
    const int row0 = int(gridDim.x - 1 - blockIdx.x) * ROWS; // later queries see more keys
    const int q_head = blockIdx.y, kv_head = q_head / (p.q_heads / p.kv_heads);
    const long long q_row = ((long long)blockIdx.z * p.q_heads + q_head) * p.q_len;
    const long long kv_row = ((long long)blockIdx.z * p.kv_heads + kv_head) * p.kv_len;

    copy_rows<ROWS, THREADS>(shared, thread, p.q_len - row0, p.q, [&](int row) { return row_at(p.q, q_row + row0 + row); });
    copy_async_commit();
    copy_async_wait<0>();
    block_sync();
    const Logits logits(p);
    Block block{p, shared + Q_BYTES, row_at(p.k, kv_row), row_at(p.v, kv_row), logits, {shared, warp_row, logits}, {}, {}};
    if constexpr (Q_KEPT) block_sync();

    // Ends and starts of what rows see grow with the row: the first and the last row bound all.
    const int last_row = least(row0 + ROWS, p.q_len) - 1;
    const Span of_first = visible(p, row0, p.kv_len), of_last = visible(p, last_row, p.kv_len);
    const int first_tile = of_first.first / KEYS, end_tile = (of_last.end + KEYS - 1) / KEYS;
#pragma unroll
    for (int slot = 0; slot < Rows::SLOTS; slot++)
        block.seen[slot] = visible(p, least(row0 + warp_row + Rows::row(slot), last_row), p.kv_len);

    if (first_tile < end_tile) block.copy(first_tile);
    copy_async_commit();
    block.strip.clear();
    for (int tile = first_tile; tile < end_tile; tile++) {
        copy_async_wait<0>();
        block_sync(); // this tile is there for all, and all are done with the stage of the next
        if (tile + 1 < end_tile) block.copy(tile + 1);
        copy_async_commit();
        bool whole = tile * KEYS >= of_last.first && (tile + 1) * KEYS <= of_first.end;
        whole ? block.template step<false>(tile) : block.template step<true>(tile);
    }
    block.strip.join_sums();

#pragma unroll
    for (int slot = 0; slot < Rows::SLOTS; slot++) {
        const int row = row0 + warp_row + Rows::row(slot);
        const float sum = block.strip.sum[slot], top = block.strip.top[slot];
        const bool empty = top == minus_infinity();
        if (row >= p.q_len) continue;
        block.strip.write(slot, p.o, q_row + row, empty ? 0.0f : 1.0f / sum);
        if (Rows::leads()) p.lse[q_row + row] = empty ? top : (top * logits.rest() + log2_fast(sum)) * LN_2;
    }
}
