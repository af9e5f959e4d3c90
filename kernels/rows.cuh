// Tiles of rows in shared memory, and logits: what the strips for tensor cores (strip.cuh) and for f32 (strip_f32.cuh)
// share.
//
// A row lies in chunks of 16 bytes, padded with zeros to a multiple of 128 bytes. A chunk's place is its number xor
// row % 8: chunks of the same number in eight rows lie in different banks.
#pragma once
#include "formats.cuh"

static_assert(HEAD_DIM >= 1 && HEAD_DIM <= 256, "an output row of more elements does not fit in registers");
constexpr int ELEMENT_BYTES = ELEMENT == F32 ? 4 : 2, CHUNK = 16 / ELEMENT_BYTES; // elements of a chunk
constexpr int ROW_BYTES = (HEAD_BYTES + 127) / 128 * 128;                         // a row in shared memory
constexpr int WIDTH = ROW_BYTES / ELEMENT_BYTES, CHUNKS = ROW_BYTES / 16;

// Where chunk `chunk` of row `row` of a tile lies, in bytes from the tile's start.
DEVICE u32 place(int row, int chunk) { return row * ROW_BYTES + ((chunk ^ (row & 7)) << 4); }

// A row in global memory, row `index` behind `rows`.
DEVICE const unsigned char *row_at(const void *rows, long long index) {
    return static_cast<const unsigned char *>(rows) + index * HEAD_BYTES;
}

// What `place` says of a chunk, `chunks` chunks further in the same row; they have no bit in common with its number. Known
// when compiling, that is one xor, and an addition that instructions do by themselves.
DEVICE u32 further(u32 place, int chunks) { return (place ^ (chunks % 8 << 4)) + chunks / 8 * 128; }

// The share of one thread of `Threads` in a copy of `Rows` rows into a tile. Eight threads share a row: each copies its
// chunk of each 128 bytes. So the places of a thread's chunks lie at distances that are known when compiling.
template <int Rows, int Threads> struct Share {
    static constexpr int STEP = Threads / 8, STEPS = (Rows + STEP - 1) / STEP; // from row to row of a thread
    static_assert(STEP % 8 == 0 || 8 % STEP == 0, "the places of a row's chunks follow from those of the thread's first row");
    int row, chunk; // the first
    u32 target;     // its place

    DEVICE Share(u32 tile, int thread) : row(thread / 8), chunk(thread % 8), target(tile + place(row, chunk)) {}

    // Starts the copies; `source(i)` is where the first chunk of the thread's row `i` lies in global memory. Rows from
    // `count` on, and columns past the head dim, become zeros: nothing is read there, so the source may be any address
    // (copies of 0 bytes, as CUTLASS and FlashInfer make them). Rows of a head dim that is no whole number of chunks are
    // not aligned: they pass through registers, element by element.
    template <class Source> DEVICE void copy(int count, Source source) const {
#pragma unroll(HEAD_DIM % CHUNK == 0 ? STEPS : 1)
        for (int i = 0; i < STEPS; i++) {
            if (Rows % STEP != 0 && row + i * STEP >= Rows) break;
            const bool real = row < count - i * STEP;
            const u32 to = (target ^ (i * STEP % 8 << 4)) + i * STEP * ROW_BYTES;
            const unsigned char *from = source(i);
#pragma unroll
            for (int j = 0; j < CHUNKS / 8; j++) {
                const int column = (chunk + 8 * j) * CHUNK;
                if constexpr (HEAD_DIM % CHUNK == 0)
                    copy_async_16(to + 128 * j, from + 128 * j, real && column < HEAD_DIM ? 16 : 0);
                else
                    copy_elements(to + 128 * j, from + 128 * j, real ? HEAD_DIM - column : 0);
            }
        }
    }

    // A chunk of which the first `count` elements are there.
    DEVICE static void copy_elements(u32 to, const unsigned char *from, int count) {
        u32 words[4] = {};
#pragma unroll
        for (int e = 0; e < CHUNK; e++) {
            if (e >= count) continue;
            if constexpr (ELEMENT == F32)
                words[e] = reinterpret_cast<const u32 *>(from)[e];
            else
                words[e / 2] |= u32(reinterpret_cast<const u16 *>(from)[e]) << (e % 2 * 16);
        }
        store_chunk(to, words);
    }

    // The same of rows of codes, which become elements; `source(i)` is where the thread's row `i` begins. Nothing is read
    // of rows from `count` on, or all `Rows` are there.
    template <class Format, bool All, class Source> DEVICE void widen(int count, Source source) const {
#pragma unroll(Threads == 32 && ELEMENT != F32 ? STEPS : 1) // for a block, and in f32, all at once spill at D 128
        for (int i = 0; i < STEPS; i++) {
            if (Rows % STEP != 0 && row + i * STEP >= Rows) break;
            const bool real = All || row < count - i * STEP;
            const u32 to = (target ^ (i * STEP % 8 << 4)) + i * STEP * ROW_BYTES;
#pragma unroll(ELEMENT == F32 ? 1 : CHUNKS / 8)
            for (int j = 0; j < CHUNKS / 8; j++) {
                const int column = (chunk + 8 * j) * CHUNK;
                float x[CHUNK] = {};
                if (real && (ROW_BYTES == HEAD_BYTES || column < HEAD_DIM)) Format::read(source(i), column, x);
                u32 words[4];
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if constexpr (ELEMENT == F32)
                        words[e] = float_to_bits(x[e]);
                    else
                        words[e] = pack<ELEMENT>(x[2 * e], x[2 * e + 1]);
                store_chunk(to + 128 * j, words);
            }
        }
    }
};

// Starts to copy `Rows` rows into a tile, each of `Threads` threads (this is number `thread`) its share; `source(row)` is
// a row in global memory, and `any` any address. Rows from `count` on, and columns past the head dim, become zeros.
template <int Rows, int Threads, class Source>
DEVICE void copy_rows(u32 tile, int thread, int count, const void *any, Source source) {
    const Share<Rows, Threads> share(tile, thread);
    share.copy(count, [&](int i) {
        const int row = share.row + i * share.STEP;
        return row < count ? source(row) + share.chunk * 16 : static_cast<const unsigned char *>(any);
    });
}

// The same of rows that lie one behind the other: what a thread reads lies at distances that are known when compiling,
// too. `mine` is `own_chunk` of the first.
template <int Rows, int Threads> DEVICE void copy_adjacent_rows(u32 tile, int thread, int count, const unsigned char *mine) {
    Share<Rows, Threads>(tile, thread).copy(count, [&](int i) { return mine + i * (Threads / 8 * HEAD_BYTES); });
}

// Where a byte of swizzled codes lies: rows of 128 bytes apart have a chunk of the same number in different banks.
DEVICE constexpr u32 swizzled(u32 at) { return at ^ (at >> 7 & 7) << 4; }

// `Rows` rows of keys or of values on their way into a tile. Elements are copied there. Codes are copied beside it, one row
// behind the other, and become elements of the tile when they are there.
template <class Format, int Rows, int Threads, bool Swizzled = false> struct Arrivals {
    static constexpr int CODE_BYTES = Format::CODED ? Rows * Format::BYTES : 0;
    static constexpr int ROOM_BYTES = (CODE_BYTES + 127) / 128 * 128; // beside the tile
    static_assert(CODE_BYTES % 16 == 0, "codes are copied 16 bytes at a time");

    // Starts to copy codes that lie one row behind the other from `from` on, a multiple of 16 bytes; zeros, which stand for
    // zeros in every format, in place of rows from `count` on.
    DEVICE static void copy(u32 room, int thread, int count, const unsigned char *from) {
        if constexpr (Threads == 32) {
            const int there = most(0, count) * Format::BYTES;
            if (count >= Rows)
                copy(room, thread, from, [](int) { return 16; });
            else
                copy(room, thread, from, [&](int at) { return most(0, least(16, there - at)); });
        } else { // a block has no registers for two ways
            const int there = most(0, least(count, Rows)) * Format::BYTES;
            for (int at = 16 * thread; at < CODE_BYTES; at += 16 * Threads)
                copy_async_16(room + at, from + at, most(0, least(16, there - at)));
        }
    }
    template <class Bytes> DEVICE static void copy(u32 room, int thread, const unsigned char *from, Bytes bytes) {
#pragma unroll
        for (int i = 0; i < CODE_BYTES; i += 16 * Threads)
            if (const int at = i + 16 * thread; at < CODE_BYTES)
                copy_async_16(room + (Swizzled ? swizzled(at) : at), from + at, bytes(at));
    }

    // Widens what is there; `codes` is `room`, as a pointer.
    DEVICE static void widen(u32 tile, const unsigned char *codes, int thread) {
        // In f32 a block has no registers to keep its places in.
        const Share<Rows, Threads> share(tile, ELEMENT == F32 && Threads > 32 ? forgotten(thread) : thread);
        share.template widen<Format, true>(Rows, [&](int i) { return codes + (share.row + i * share.STEP) * Format::BYTES; });
    }
};

// The first chunk that a thread copies of rows that lie one behind the other, from `rows` on.
DEVICE const unsigned char *own_chunk(const unsigned char *rows, int thread) {
    return rows + (thread / 8 * HEAD_BYTES + thread % 8 * 16);
}

// Logits in units of log2: factor and cap are folded so that exp2 takes one fused multiply-add.
struct Logits {
    float factor;   // of the product, never negative: its sign is moved to the products
    float cap;      // 0: none
    bool negative;  // products change their sign
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
