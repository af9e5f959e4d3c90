// FlashAttention-2 forward for sm_80 and later (Dao 2023): tiles of keys and values pass once for each block of
// queries; scores live in registers only.
//
// Versions
//   1  mma.sync m16n8k16 with f32 accumulation; two stages of K and V by cp.async with one barrier per tile; xor swizzle
//      and ldmatrix; Q in registers; exp2 with the scale folded into one fused multiply-add; tiles at the edge of a mask
//      go through code of their own; heaviest blocks of a causal problem first. A warp of 32 rows reads half as much
//      shared memory per product as one of 16, but above D 64 it did not fit: at D 128 it spilled 900 bytes with 64 keys
//      to a tile and 150 with 32 (NVRTC 13.0, sm_80).
//   2  D up to 256, D that is no multiple of 8 (copied element by element), and f32 on CUDA cores.
//   3  32 rows to a warp up to D 144: two strips of 16 share each fragment of keys and values, so that an mma takes 0.31
//      ldmatrix where it took 0.5. Q is read again for each tile; in registers only where they have room. One tile of
//      keys and one of values, each copied while the other is at work, so that every place in shared memory is known when
//      compiling, and two blocks fit a multiprocessor with 64 keys to a tile (A100) or 32 (99 KiB for a block). Copies add
//      constants to one address; the spans of a mask are computed where they are needed; exponentials are packed before
//      the second product begins. The first product, too, goes through no more columns than the next multiple of 16.
//      On an H100, bf16, D 128: 305 TFLOP/s causal at 2K, 374 at 16K, 396 full: 1.06 to 1.14 of PyTorch's flash. README.md
//      has the counts of instructions.
//   4  Rows of codes (formats.cuh): their bytes are copied beside the tiles, and widened when the tiles are free.
//
//   What spills, hence the shapes (bytes on sm_80, sm_90a, sm_100): 32 rows at D 192 with 32 keys 200, 220, 200, at D 176
//   0, 32, 32, at D 160 nothing with NVRTC 13.0 but 0, 0, 32 with 12.8; at D 64 with 128 keys 124, 124, 0; Q in registers
//   at D 96 0, 92, 0.
//
// Compile with -DELEMENT=F32|BF16|F16 -DHEAD_DIM=1..256, the formats of formats.cuh and, of four warps' rows, the keys of a
// tile, and whether Q is kept in registers:
//   16 bits, D   -DROWS  -DKEYS     -DQ_KEPT
//   to 64           128  64               1
//   to 128          128  64, 32           0
//   to 144          128  32               0
//   to 192           64  64               1
//   to 256           64  64, 32           0
//   f32              64  32, 16, 8        0
//   tiled_forward  grid (ceil(Lq / ROWS), Hq, B), 128 threads, shared memory: K and V of KEYS keys, Q where it stays
//                  there, and what is coded of K and V as it lies in memory
#include "rows.cuh"
#if ELEMENT == F32
#include "strip_f32.cuh"
#else
#include "strip.cuh"
#endif

namespace {

constexpr int WARPS = 4, THREADS = 32 * WARPS, WARP_ROWS = ROWS / WARPS;
constexpr int TILE_BYTES = KEYS * ROW_BYTES;
// Q in registers passes through the places of keys and values on its way there.
constexpr int Q_BYTES = Q_KEPT ? 0 : ROWS * ROW_BYTES;
using KeyArrivals = Arrivals<KeyFormat, KEYS, THREADS>;
using ValueArrivals = Arrivals<ValueFormat, KEYS, THREADS>;
constexpr int TILES_BYTES = Q_BYTES + 2 * TILE_BYTES; // codes lie behind them
static_assert(!Q_KEPT || ROWS <= 2 * KEYS, "a tile of keys and one of values have room for Q");

using Rows = Strip<WARP_ROWS, KEYS>;

} // namespace

KERNEL(128) tiled_forward(ARGUMENT Problem p) {
    DYNAMIC_SHARED(memory);
    const u32 q_tile = shared_address(memory), keys = q_tile + Q_BYTES, values = keys + TILE_BYTES;
    const int thread = threadIdx.x, warp_row = thread / 32 * WARP_ROWS;
    const int row0 = int(gridDim.x - 1 - blockIdx.x) * ROWS; // later queries see more keys
    const int q_head = blockIdx.y, kv_head = q_head / (p.q_heads / p.kv_heads);
    const long long q_row = ((long long)blockIdx.z * p.q_heads + q_head) * p.q_len;
    const int list = blockIdx.z * p.kv_heads + kv_head;
    const unsigned char *const k = static_cast<const unsigned char *>(p.k) + list * KeyFormat::list_bytes(p.kv_len);
    [[maybe_unused]] const unsigned char *const v = static_cast<const unsigned char *>(p.v) + list * ValueFormat::list_bytes(p.kv_len);

    copy_adjacent_rows<ROWS, THREADS>(q_tile, thread, p.q_len - row0, own_chunk(row_at(p.q, q_row + row0), thread));
    copy_async_commit();
    if constexpr (Q_KEPT) {
        copy_async_wait<0>();
        block_sync();
    }
    const Logits logits(p);
    const Queries<WARP_ROWS, Q_KEPT> queries(q_tile, warp_row, logits);
    if constexpr (Q_KEPT) block_sync();

    // Ends and starts of what rows see grow with the row: the first and the last row bound all.
    const Span of_first = visible(p, row0, p.kv_len), of_last = visible(p, least(row0 + ROWS, p.q_len) - 1, p.kv_len);
    const int first_key = of_first.first / KEYS * KEYS;

    // What this thread copies of the next tile: its keys, and how far behind them its values lie.
    const unsigned char *next = own_chunk(row_at(k, first_key), thread);
    const long long behind = KeyFormat::CODED || ValueFormat::CODED
                                 ? v - k
                                 : static_cast<const unsigned char *>(p.v) - static_cast<const unsigned char *>(p.k);
    const u32 key_codes = q_tile + TILES_BYTES, value_codes = key_codes + KeyArrivals::ROOM_BYTES;
    auto copy_keys = [&](int key0) {
        if constexpr (KeyFormat::CODED)
            KeyArrivals::copy(key_codes, thread, p.kv_len - key0, k + (long long)key0 * KeyFormat::BYTES);
        else
            copy_adjacent_rows<KEYS, THREADS>(keys, thread, p.kv_len - key0, next);
        copy_async_commit();
    };
    auto copy_values = [&](int key0) {
        if constexpr (ValueFormat::CODED)
            ValueArrivals::copy(value_codes, thread, p.kv_len - key0, v + (long long)key0 * ValueFormat::BYTES);
        else
            copy_adjacent_rows<KEYS, THREADS>(values, thread, p.kv_len - key0, next + behind);
        copy_async_commit();
    };
    Rows strip;
    strip.clear();
    if (first_key < of_last.end) copy_keys(first_key);
    for (int key0 = first_key; key0 < of_last.end; key0 += KEYS) {
        copy_async_wait<0>();
        block_sync(); // the keys are there for all, and all are done with the values before
        copy_values(key0);
        next += KEYS * HEAD_BYTES;
        if constexpr (KeyFormat::CODED) {
            KeyArrivals::widen(keys, memory + TILES_BYTES, thread);
            block_sync(); // they are elements
        }
        strip.scores(keys, queries);
        strip.cap(logits);
        if (key0 < of_last.first || key0 + KEYS > of_first.end) {
            const int row = row0 + forgotten(threadIdx.x) / 32 * WARP_ROWS; // at few tiles: no registers for this
            Span seen[Rows::SLOTS];
#pragma unroll
            for (int slot = 0; slot < Rows::SLOTS; slot++) seen[slot] = visible(p, least(row + Rows::row(slot), p.q_len - 1), p.kv_len);
            strip.mask(seen, key0);
        }
        strip.absorb(logits.rest());
        copy_async_wait<0>();
        block_sync(); // the values are there for all, and all are done with the keys
        if (key0 + KEYS < of_last.end) copy_keys(key0 + KEYS);
        if constexpr (ValueFormat::CODED) {
            ValueArrivals::widen(values, memory + TILES_BYTES + KeyArrivals::ROOM_BYTES, thread);
            block_sync(); // they are elements
        }
        strip.add_values(values);
    }
    copy_async_wait<0>(); // for Q, where there was no tile
    strip.join_sums();

#pragma unroll
    for (int slot = 0; slot < Rows::SLOTS; slot++) {
        const int row = row0 + warp_row + Rows::row(slot);
        const float sum = strip.sum[slot], top = strip.top[slot];
        const bool empty = top == minus_infinity();
        if (row >= p.q_len) continue;
        strip.write(slot, p.o, q_row + row, empty ? 0.0f : 1.0f / sum);
        if (Rows::leads()) p.lse[q_row + row] = empty ? top : (top * logits.rest() + log2_fast(sum)) * LN_2;
    }
}
