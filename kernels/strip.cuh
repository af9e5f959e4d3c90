// A strip of query rows in one warp's registers: products with tensor cores, and the online softmax between them.
//
// A strip is `Rows` rows, a multiple of 16; keys come `Keys` at a time from shared memory. strip_f32.cuh has the same
// functions for f32; `tiled` is written over either.
//
// In the thread of lane 4 g + t the accumulators of a 16-row tile are rows g and g + 8, columns 2t and 2t + 1 of each 8
// columns. They are, packed to 16 bits, the left operand of the second product as they stand. A thread's part of a row
// is a slot; four threads share the row.
#pragma once
#include "rows.cuh"

// Columns that products go through: the padding of rows beyond them is never read.
constexpr int DEPTH = (HEAD_DIM + 15) / 16 * 16;

// Of the first 16 rows and 16 columns of a tile, where this thread's row of the four 8x8 matrices lies. In the order of
// left operands, and of right ones that are read transposed: rows 0-7 and 8-15 for columns 0-7, then for 8-15; and of right
// operands whose columns are rows of the tile: columns 0-7 and 8-15 for rows 0-7, then for 8-15.
DEVICE u32 left_place() { return place(threadIdx.x % 16, threadIdx.x % 32 / 16); }
DEVICE u32 right_place() { return place(threadIdx.x % 32 / 16 * 8 + threadIdx.x % 8, threadIdx.x / 8 % 2); }

// The query rows of a strip as left operands: `Kept` in registers, or read again for each product.
template <int Rows, bool Kept> struct Queries {
    static constexpr int TILES = Rows / 16, DEPTHS = DEPTH / 16;
    u32 kept[Kept ? DEPTHS : 1][TILES][4];
    u32 first;     // where this thread's row of the first operand lies
    bool negative; // products change their sign

    DEVICE void read(u32 (&q)[TILES][4], int k) const {
#pragma unroll
        for (int m = 0; m < TILES; m++) load_matrices(q[m], further(first, 2 * k) + 16 * m * ROW_BYTES);
    }

    // The rows from `row0`, a multiple of 8, on.
    DEVICE Queries(u32 tile, int row0, const Logits &logits)
        : first(tile + row0 * ROW_BYTES + left_place()), negative(logits.negative) {
        if constexpr (Kept)
#pragma unroll
            for (int k = 0; k < DEPTHS; k++) read(kept[k], k);
    }

    // The left operand of 16 of the depth from 16 k on.
    DEVICE void operand(u32 (&q)[TILES][4], int k) const {
        if constexpr (Kept) {
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int r = 0; r < 4; r++) q[m][r] = kept[k][m][r];
        } else {
            read(q, k);
        }
    }
};

template <int Rows, int Keys> struct Strip {
    static constexpr int TILES = Rows / 16, SLOTS = 2 * TILES;
    float o[TILES][DEPTH / 8][4];
    float top[SLOTS]; // running maximum of the scores, before the factor
    float sum[SLOTS]; // this thread's part of the sum of exponentials
    float s[TILES][Keys / 8][4];
    u32 p[TILES][Keys / 16][4]; // their exponentials, as left operands

    // The row of a slot, and whether this thread is the first of those which share it.
    DEVICE static int row(int slot) { return 8 * slot + threadIdx.x % 32 / 4; }
    DEVICE static bool leads() { return threadIdx.x % 4 == 0; }

    DEVICE void clear() {
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int n = 0; n < DEPTH / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) o[m][n][i] = 0.0f;
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot++) top[slot] = minus_infinity(), sum[slot] = 0.0f;
    }

    // s = q k^T; fewer steps at once where a kernel has no registers for all.
    template <int STEPS = DEPTH / 16, bool Kept> DEVICE void scores(u32 keys, const Queries<Rows, Kept> &queries) {
        const u32 first = keys + right_place();
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int n = 0; n < Keys / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[m][n][i] = 0.0f;
#pragma unroll STEPS
        for (int k = 0; k < DEPTH / 16; k++) {
            u32 q[TILES][4];
            queries.operand(q, k);
#pragma unroll
            for (int n = 0; n < Keys / 16; n++) {
                u32 b[4]; // keys 0-7 and 8-15, each for depths 0-7 and 8-15
                load_matrices(b, further(first, 2 * k) + 16 * n * ROW_BYTES);
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    multiply_add<ELEMENT>(s[m][2 * n], q[m], b[0], b[1]);
                    multiply_add<ELEMENT>(s[m][2 * n + 1], q[m], b[2], b[3]);
                }
            }
        }
        if (queries.negative)
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int n = 0; n < Keys / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) s[m][n][i] = -s[m][n][i];
    }

    // Caps the scores. Without a cap nothing is done: the factor waits for the softmax.
    DEVICE void cap(const Logits &logits) {
        if (logits.cap > 0.0f)
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int n = 0; n < Keys / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) s[m][n][i] = soft_cap(s[m][n][i] * logits.factor, logits.cap);
    }

    // Hides the keys that a row does not see; `key0` is the first key's number.
    DEVICE void mask(const Span (&seen)[SLOTS], int key0) {
        const int column = key0 + threadIdx.x % 4 * 2;
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int n = 0; n < Keys / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int key = column + 8 * n + i % 2;
                    const Span &span = seen[2 * m + i / 2];
                    if (key < span.first || key >= span.end) s[m][n][i] = minus_infinity();
                }
    }

    // Online softmax: raises the maxima, scales what was summed down to them, makes p the exponentials.
    DEVICE void absorb(float factor) {
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int slot = 2 * m + half;
                float now = top[slot];
#pragma unroll
                for (int n = 0; n < Keys / 8; n++) now = larger(now, larger(s[m][n][2 * half], s[m][n][2 * half + 1]));
                now = larger(now, shuffle_xor(now, 1));
                now = larger(now, shuffle_xor(now, 2));
                // A row that has seen nothing keeps -inf; any finite base then gives exponentials of zero.
                float base = now == minus_infinity() ? 0.0f : now * factor;
                float shrink = exp2_fast(fused(top[slot], factor, -base));
                top[slot] = now;
                sum[slot] *= shrink;
#pragma unroll
                for (int n = 0; n < DEPTH / 8; n++) o[m][n][2 * half] *= shrink, o[m][n][2 * half + 1] *= shrink;
#pragma unroll
                for (int n = 0; n < Keys / 8; n++) {
                    const float x = exp2_fast(fused(s[m][n][2 * half], factor, -base));
                    const float y = exp2_fast(fused(s[m][n][2 * half + 1], factor, -base));
                    sum[slot] += x;
                    sum[slot] += y;
                    p[m][n / 2][n % 2 * 2 + half] = pack<ELEMENT>(x, y);
                }
            }
    }

    // o += p v
    DEVICE void add_values(u32 values) {
        const u32 first = values + left_place();
#pragma unroll
        for (int k = 0; k < Keys / 16; k++)
#pragma unroll
            for (int n = 0; n < DEPTH / 16; n++) {
                u32 b[4]; // columns 0-7 and 8-15, each for keys 0-7 and 8-15
                load_matrices_transposed(b, further(first, 2 * n) + 16 * k * ROW_BYTES);
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    multiply_add<ELEMENT>(o[m][2 * n], p[m][k], b[0], b[1]);
                    multiply_add<ELEMENT>(o[m][2 * n + 1], p[m][k], b[2], b[3]);
                }
            }
    }

    // Joins the threads' parts of each row's sum.
    DEVICE void join_sums() {
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot++) {
            sum[slot] += shuffle_xor(sum[slot], 1);
            sum[slot] += shuffle_xor(sum[slot], 2);
        }
    }

    // This thread's part of an output row, as f32.
    DEVICE void put(int slot, float *row) const {
        const int column = threadIdx.x % 4 * 2;
#pragma unroll
        for (int n = 0; n < DEPTH / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) row[8 * n + column + i] = o[slot / 2][n][slot % 2 * 2 + i];
    }

    // This thread's part of row `row` of the output tensor, times `factor`.
    DEVICE void write(int slot, void *tensor, long long row, float factor) const {
        const int column = threadIdx.x % 4 * 2;
        u16 *target = static_cast<u16 *>(tensor) + row * HEAD_DIM + column;
#pragma unroll
        for (int n = 0; n < (HEAD_DIM + 7) / 8; n++) {
            const float *x = o[slot / 2][n] + slot % 2 * 2;
            const u32 both = pack<ELEMENT>(x[0] * factor, x[1] * factor);
            if constexpr (HEAD_DIM % 8 == 0) {
                *reinterpret_cast<u32 *>(target + 8 * n) = both;
            } else {
                if (8 * n + column < HEAD_DIM) target[8 * n] = u16(both);
                if (8 * n + column + 1 < HEAD_DIM) target[8 * n + 1] = u16(both >> 16);
            }
        }
    }
};
