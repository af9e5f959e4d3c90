// Tiles of rows in shared memory, and logits: what the strips for tensor cores (strip.cuh) and for f32 (strip_f32.cuh)
// share.
//
// A row lies in chunks of 16 bytes, padded with zeros to a multiple of 128 bytes. A chunk's place is its number xor
// row % 8: chunks of the same number in eight rows lie in different banks.
#pragma once
#include "problem.cuh"

static_assert(HEAD_DIM >= 1 && HEAD_DIM <= 256, "an output row of more elements does not fit in registers");
constexpr int ELEMENT_BYTES = ELEMENT == F32 ? 4 : 2, CHUNK = 16 / ELEMENT_BYTES; // elements of a chunk
constexpr int HEAD_BYTES = HEAD_DIM * ELEMENT_BYTES;                              // a row in global memory
constexpr int ROW_BYTES = (HEAD_BYTES + 127) / 128 * 128;                         // and in shared memory
constexpr int WIDTH = ROW_BYTES / ELEMENT_BYTES, CHUNKS = ROW_BYTES / 16;

// Where chunk `chunk` of row `row` of a tile lies, in bytes from the tile's start.
DEVICE u32 place(int row, int chunk) { return row * ROW_BYTES + ((chunk ^ (row & 7)) << 4); }

// A row in global memory, row `index` behind `rows`.
DEVICE const unsigned char *row_at(const void *rows, long long index) {
    return static_cast<const unsigned char *>(rows) + index * HEAD_BYTES;
}

// Starts to copy `Rows` rows into a tile, each of `Threads` threads (this is number `thread`) its share; `source(row)`
// is a row in global memory. Rows from `count` on, and columns past the head dim, become zeros. Rows of a head dim that
// is no whole number of chunks are not aligned: they pass through registers, element by element.
template <int Rows, int Threads, class Source>
DEVICE void copy_rows(u32 tile, int thread, int count, const void *any, Source source) {
    constexpr int EACH = (Rows * CHUNKS + Threads - 1) / Threads;
#pragma unroll 4
    for (int i = 0; i < EACH; i++) {
        int at = thread + i * Threads, row = at / CHUNKS, chunk = at % CHUNKS;
        if (Rows * CHUNKS % Threads != 0 && row >= Rows) break;
        if constexpr (HEAD_DIM % CHUNK == 0) {
            bool real = row < count && chunk * CHUNK < HEAD_DIM;
            copy_async_16(tile + place(row, chunk), real ? source(row) + chunk * 16 : any, real);
        } else {
            u32 words[4] = {};
            if (row < count) {
                const unsigned char *from = source(row);
#pragma unroll
                for (int e = 0; e < CHUNK; e++) {
                    int d = chunk * CHUNK + e;
                    if (d >= HEAD_DIM) continue;
                    if constexpr (ELEMENT == F32)
                        words[e] = reinterpret_cast<const u32 *>(from)[d];
                    else
                        words[e / 2] |= u32(reinterpret_cast<const u16 *>(from)[d]) << (e % 2 * 16);
                }
            }
            store_chunk(tile + place(row, chunk), words);
        }
    }
}

// Logits in units of log2: factor and cap are folded so that exp2 takes one fused multiply-add.
struct Logits {
    float factor;   // of the product, never negative: the sign is moved to q
    float cap;      // 0: none
    bool negative;  // q changes its sign
    DEVICE Logits(const Problem &p) {
        float size = p.scale < 0.0f ? -p.scale : p.scale;
        cap = p.softcap;
        // With a cap the products become logits before the softmax. A scale of 0 must leave masked scores at -inf.
        factor = cap > 0.0f ? size : larger(size * LOG2_E, 1e-37f);
        negative = p.scale < 0.0f;
    }
    // The factor that is left for the softmax.
    DEVICE float rest() const { return cap > 0.0f ? LOG2_E : factor; }
};
