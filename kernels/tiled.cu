// FlashAttention-2 forward for sm_80 and later (Dao 2023): tiles of keys and values pass once for each block of
// queries; scores live in registers only.
//
// Versions
//   1  mma.sync m16n8k16 with f32 accumulation; two stages of K and V by cp.async with one barrier per tile; xor swizzle
//      and ldmatrix; Q in registers; exp2 with the scale folded into one fused multiply-add; tiles at the edge of a mask
//      go through code of their own; heaviest blocks of a causal problem first. Compiled and emulated; not timed on a
//      GPU yet. A warp of 32 rows reads half as much shared memory per product as one of 16, but above D 64 it does
//      not fit: at D 128 it spills 900 bytes with 64 keys to a tile and 150 with 32 (NVRTC 13.0, sm_80).
//
// Compile with -DELEMENT=BF16|F16 -DHEAD_DIM=8..128 (a multiple of 8). ROWS is 128 up to D 64, else 64.
//   tiled_forward  grid (ceil(Lq / ROWS), Hq, B), 128 threads, shared memory: K and V of 64 keys, twice
#include "strip.cuh"

namespace {

constexpr int WARPS = 4, THREADS = 32 * WARPS, KEYS = 64;
constexpr int TILES = WIDTH == 64 ? 2 : 1; // of 16 rows for each warp
constexpr int ROWS = WARPS * 16 * TILES;
constexpr int TILE_BYTES = KEYS * ROW_BYTES;
static_assert(ROWS <= 4 * KEYS, "Q passes through the two stages");

struct Block {
    const Problem &p;
    u32 shared; // K, V, K, V
    const u16 *k, *v;
    Strip<TILES, KEYS> strip;
    u32 q[WIDTH / 16][TILES][4];
    Span seen[TILES][2];
    Logits logits;

    DEVICE u32 stage(int tile) const { return shared + tile % 2 * (2 * TILE_BYTES); }

    DEVICE void copy(int tile) {
        const int key0 = tile * KEYS, count = p.kv_len - key0;
        auto row_of = [&](const u16 *rows) {
            return [=](int row) { return rows + (long long)(key0 + row) * HEAD_DIM; };
        };
        copy_rows<KEYS, THREADS>(stage(tile), threadIdx.x, count, k, row_of(k));
        copy_rows<KEYS, THREADS>(stage(tile) + TILE_BYTES, threadIdx.x, count, v, row_of(v));
    }

    template <bool Masked> DEVICE void step(int tile) {
        strip.scores(stage(tile), [&](u32 (&fragment)[TILES][4], int k) {
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int r = 0; r < 4; r++) fragment[m][r] = q[k][m][r];
        });
        strip.cap(logits);
        if constexpr (Masked) strip.mask(seen, tile * KEYS);
        strip.absorb(logits.rest());
        strip.add_values(stage(tile) + TILE_BYTES);
    }
};

} // namespace

KERNEL(128) tiled_forward(ARGUMENT Problem p) {
    DYNAMIC_SHARED(memory);
    const int thread = threadIdx.x, lane = thread % 32, warp_row = thread / 32 * 16 * TILES;
    const int row0 = int(gridDim.x - 1 - blockIdx.x) * ROWS; // later queries see more keys
    const int q_head = blockIdx.y, kv_head = q_head / (p.q_heads / p.kv_heads);
    const long long q_row = ((long long)blockIdx.z * p.q_heads + q_head) * p.q_len;
    const long long kv_row = ((long long)blockIdx.z * p.kv_heads + kv_head) * p.kv_len;
    const u16 *queries = static_cast<const u16 *>(p.q) + (q_row + row0) * HEAD_DIM;
    Block block{p, shared_address(memory), static_cast<const u16 *>(p.k) + kv_row * HEAD_DIM,
                static_cast<const u16 *>(p.v) + kv_row * HEAD_DIM, {}, {}, {}, Logits(p)};

    // Ends and starts of what rows see grow with the row: the first and the last row bound all.
    const int last_row = least(row0 + ROWS, p.q_len) - 1;
    const Span of_first = visible(p, row0, p.kv_len), of_last = visible(p, last_row, p.kv_len);
    const int first_tile = of_first.first / KEYS, end_tile = (of_last.end + KEYS - 1) / KEYS;
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            block.seen[m][half] = visible(p, least(row0 + warp_row + 16 * m + 8 * half + lane / 4, last_row), p.kv_len);

    // Q passes through the memory of the stages on its way to registers.
    copy_rows<ROWS, THREADS>(block.shared, thread, p.q_len - row0, queries,
                             [&](int row) { return queries + (long long)row * HEAD_DIM; });
    copy_async_commit();
    copy_async_wait<0>();
    block_sync();
#pragma unroll
    for (int k = 0; k < WIDTH / 16; k++) load_queries<TILES>(block.q[k], block.shared, warp_row, k, block.logits.flip);
    block_sync();
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
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = row0 + warp_row + 16 * m + 8 * half + lane / 4;
            const float sum = block.strip.sum[m][half], top = block.strip.top[m][half];
            const bool empty = top == minus_infinity();
            const float factor = empty ? 0.0f : 1.0f / sum;
            if (row >= p.q_len) continue;
            u32 *o = reinterpret_cast<u32 *>(static_cast<u16 *>(p.o) + (q_row + row) * HEAD_DIM) + lane % 4;
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++) {
                const float *x = block.strip.o[m][n] + 2 * half;
                o[4 * n] = pack<ELEMENT>(x[0] * factor, x[1] * factor);
            }
            if (lane % 4 == 0)
                p.lse[q_row + row] = empty ? top : (top * block.logits.rest() + log2_fast(sum)) * LN_2;
        }
}
