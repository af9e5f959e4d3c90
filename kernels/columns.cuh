// Few query rows in one warp's registers, as the columns of its products: what decode.cu is written over with tensor cores.
//
// The left operand of a product has 16 rows, the right one 8 columns. With keys and values on the left, s^T = k q^T and
// o^T = v^T p^T, the heads of a group of up to 8 fill the columns, where as rows they would leave half or more of each
// product empty. Keys and values are tiles in shared memory (rows.cuh), or codes that become operands as they are read
// (operands.cuh).
//
// In the thread of lane 4 g + t the accumulators of a tile of 16 by 8 are rows g and g + 8 (keys, or columns of the output),
// columns 2t and 2t + 1 (query rows). A thread's part of a query row is a slot; eight threads share the row.
#pragma once
#include "operands.cuh"

// Columns that products go through: the padding of rows beyond them is never read.
constexpr int DEPTH = (HEAD_DIM + 15) / 16 * 16;
// Of keys and of values in a product; queries and probabilities become the same.
constexpr int KEY_KIND = KeyFormat::IN_PLACE ? F16 : ELEMENT;

// The query rows as right operands: `Kept` in registers, or made again for each product.
template <int Rows, bool Kept> struct Queries {
    static constexpr int TILES = Rows / 8, STEPS = DEPTH / 16;
    static constexpr bool SCALED = KEY_KIND != ELEMENT; // to where f16 has its bits, by powers of two, whatever bf16 had
    static constexpr float UNIT = KeyFormat::IN_PLACE ? KeyFormat::FACTOR : 1.0f;
    u32 kept[Kept ? STEPS : 1][TILES][2];
    float scale[TILES];
    float back[2 * TILES]; // what scores of a slot are multiplied with
    u32 tile;
    bool negative; // products change their sign

    // Elements of row 8 n + g as they lie: the two of either half of step `k`.
    DEVICE void stored(int n, int k, u32 (&pairs)[2]) const {
        const int row = 8 * n + threadIdx.x % 32 / 4;
        if constexpr (KeyFormat::IN_PLACE) {
            const int column = KeyCodes<KeyFormat>::column(k);
            u32 x[2];
            load_words(x, tile + place(row, column / CHUNK) + column % CHUNK * ELEMENT_BYTES);
            constexpr bool APART = KeyFormat::CODE == INT4;
            pairs[0] = APART ? choose_bytes(x[0], x[1], 0x5410u) : x[0], pairs[1] = APART ? choose_bytes(x[0], x[1], 0x7632u) : x[1];
        } else {
#pragma unroll
            for (int i = 0; i < 2; i++) pairs[i] = load_word(tile + place(row, 2 * k + i) + threadIdx.x % 4 * 4);
        }
    }

    DEVICE void scale_to(float by, u32 (&pairs)[2]) const {
        if constexpr (SCALED)
#pragma unroll
            for (u32 &x : pairs) x = pack<F16>(bits_to_float(x << 16) * by, bits_to_float(x & 0xffff0000u) * by);
    }

    // The rows from `row0`, a multiple of 8, on.
    DEVICE Queries(u32 tile, int row0, const Logits &logits) : tile(tile + row0 * ROW_BYTES), negative(logits.negative) {
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            int largest = 0; // the exponent of the largest
#pragma unroll(Kept ? STEPS : 1)
            for (int k = 0; k < STEPS; k++) {
                u32(&pairs)[2] = kept[Kept ? k : 0][n];
                stored(n, k, pairs);
                if constexpr (SCALED)
#pragma unroll
                    for (u32 x : pairs) largest = most(largest, most(int(x >> 7 & 255), int(x >> 23 & 255)));
            }
            if constexpr (SCALED) {
                for (int mask = 1; mask < 4; mask *= 2) largest = most(largest, int(shuffle_xor(float(largest), mask)));
                // The largest is 2^8 to 2^9 then.
                scale[n] = bits_to_float(u32(262 - least(most(largest, 9), 254)) << 23);
            }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                back[2 * n + j] = UNIT;
                if constexpr (SCALED) // 2^x back to 1
                    back[2 * n + j] *= bits_to_float((254u << 23) - float_to_bits(shuffle(scale[n], (threadIdx.x % 4 * 2 + j) * 4)));
            }
            if constexpr (Kept)
#pragma unroll
                for (int k = 0; k < STEPS; k++) scale_to(scale[n], kept[k][n]);
        }
    }

    DEVICE void operand(int n, int k, u32 (&pairs)[2]) const {
        if constexpr (Kept)
            pairs[0] = kept[k][n][0], pairs[1] = kept[k][n][1];
        else
            stored(n, k, pairs), scale_to(scale[n], pairs);
    }
};

template <int Rows, int Keys> struct Strip {
    static_assert(Keys == 16, "the rows of an operand");
    static constexpr int TILES = Rows / 8, SLOTS = 2 * TILES, DEPTHS = DEPTH / 16;
    float o[DEPTHS][TILES][4];
    float top[SLOTS]; // running maximum of the scores, before the factor
    float sum[SLOTS]; // this thread's part of the sum of exponentials
    float s[TILES][4]; // scores, then their exponentials

    // The row of a slot, and whether this thread is the first of those which share it.
    DEVICE static int row(int slot) { return 8 * (slot / 2) + threadIdx.x % 4 * 2 + slot % 2; }
    DEVICE static bool leads() { return threadIdx.x % 32 < 4; }

    DEVICE void clear() {
#pragma unroll
        for (int d = 0; d < DEPTHS; d++)
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) o[d][n][i] = 0.0f;
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot++) top[slot] = minus_infinity(), sum[slot] = 0.0f;
    }

    // s = q k^T over a tile of keys, or over codes.
    template <bool Kept> DEVICE void scores(u32 keys, const Queries<Rows, Kept> &queries) {
        // Of the four 8x8 matrices of an operand: keys 0-7 and 8-15 for columns 0-7, then for 8-15.
        const u32 first = keys + place(threadIdx.x % 16, threadIdx.x % 32 / 16);
        multiply(queries, [&](int k, u32 (&a)[4]) { load_matrices(a, further(first, 2 * k)); });
        if (queries.negative)
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[n][i] = -s[n][i];
    }
    template <bool Kept> DEVICE void scores(const unsigned char *codes, const Queries<Rows, Kept> &queries) {
        const int lane = threadIdx.x % 32;
        const KeyCodes<KeyFormat> upper(codes, lane / 4), lower(codes, lane / 4 + 8);
        multiply(queries, [&](int k, u32 (&a)[4]) { upper.operand(k, a[0], a[2]), lower.operand(k, a[1], a[3]); });
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float back = queries.back[2 * n + i % 2] * (i < 2 ? upper.scale : lower.scale);
                s[n][i] *= queries.negative ? -back : back;
            }
    }

    // Caps the scores. Without a cap nothing is done: the factor waits for the softmax.
    DEVICE void cap(const Logits &logits) {
        if (logits.cap > 0.0f)
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[n][i] = soft_cap(s[n][i] * logits.factor, logits.cap);
    }

    // Hides the keys that a row does not see; `key0` is the first key's number.
    DEVICE void mask(const Span (&seen)[SLOTS], int key0) {
        const int first = key0 + threadIdx.x % 32 / 4;
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = first + i / 2 * 8;
                const Span &span = seen[2 * n + i % 2];
                if (key < span.first || key >= span.end) s[n][i] = minus_infinity();
            }
    }

    // Online softmax: raises the maxima, scales what was summed down to them, makes s the exponentials.
    DEVICE void absorb(float factor) {
        float now[SLOTS], base[SLOTS];
        bool raised = false;
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot++) {
            float &x = now[slot];
            x = larger(top[slot], larger(s[slot / 2][slot % 2], s[slot / 2][slot % 2 + 2]));
            for (int mask = 4; mask < 32; mask *= 2) x = larger(x, shuffle_xor(x, mask));
            // A row that has seen nothing keeps -inf; any finite base then gives exponentials of zero.
            base[slot] = x == minus_infinity() ? 0.0f : x * factor;
            raised |= x > top[slot];
        }
        // Along a list maxima are raised ever less often.
        if (ballot(raised))
#pragma unroll
            for (int slot = 0; slot < SLOTS; slot++) {
                const float shrink = exp2_fast(fused(top[slot], factor, -base[slot]));
                top[slot] = now[slot];
                sum[slot] *= shrink;
#pragma unroll
                for (int d = 0; d < DEPTHS; d++) {
                    float(&x)[4] = o[d][slot / 2];
                    x[slot % 2] *= shrink, x[slot % 2 + 2] *= shrink;
                }
            }
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[n][i] = exp2_fast(fused(s[n][i], factor, -base[2 * n + i % 2]));
                sum[2 * n + i % 2] += s[n][i];
            }
    }

    // o += p v, over a tile of values or over codes.
    DEVICE void add_values(u32 values) {
        u32 p[TILES][2];
        probabilities<ELEMENT>(p, 1.0f, 1.0f);
        // Columns 0-7 and 8-15 for values 0-7, then for 8-15.
        const u32 first = values + place(threadIdx.x % 32 / 16 * 8 + threadIdx.x % 8, threadIdx.x / 8 % 2);
#pragma unroll
        for (int d = 0; d < DEPTHS; d++) {
            u32 a[4];
            load_matrices_transposed(a, further(first, 2 * d));
#pragma unroll
            for (int n = 0; n < TILES; n++) multiply_add<ELEMENT>(o[d][n], a, p[n][0], p[n][1]);
        }
    }
    DEVICE void add_values(const unsigned char *codes) {
        using Codes = ValueCodes<ValueFormat>;
        const Codes values(codes);
        const int row = threadIdx.x % 32 / 4;
        u32 p[TILES][2];
        probabilities<Codes::KIND>(p, values.scale(row), values.scale(row + 8));
#pragma unroll
        for (int i = 0; i < Codes::COUNT; i++) {
            u32 x[2][Codes::COLUMNS];
            values.operands(i, x);
#pragma unroll
            for (int j = 0; j < Codes::COLUMNS; j += 2) {
                const u32 a[4] = {x[0][j], x[0][j + 1], x[1][j], x[1][j + 1]};
#pragma unroll
                for (int n = 0; n < TILES; n++)
                    multiply_add<Codes::KIND>(o[(i * Codes::COLUMNS + j) / 2][n], a, p[n][0], p[n][1]);
            }
        }
    }

    // Joins the threads' parts of each row's sum.
    DEVICE void join_sums() {
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot++)
            for (int mask = 4; mask < 32; mask *= 2) sum[slot] += shuffle_xor(sum[slot], mask);
    }

    // This thread's part of an output row, as f32.
    DEVICE void put(int slot, float *row) const {
        constexpr float UNIT = ValueFormat::IN_PLACE ? ValueFormat::FACTOR : 1.0f;
#pragma unroll
        for (int d = 0; d < DEPTHS; d++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int column = 16 * d + 8 * half + threadIdx.x % 32 / 4;
                if constexpr (ValueFormat::IN_PLACE) column = ValueCodes<ValueFormat>::column(2 * d + half);
                row[column] = UNIT * o[d][slot / 2][2 * half + slot % 2];
            }
    }

  private:
    template <bool Kept, class Operand> DEVICE void multiply(const Queries<Rows, Kept> &queries, Operand operand) {
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[n][i] = 0.0f;
#pragma unroll
        for (int k = 0; k < DEPTHS; k++) {
            u32 a[4];
            operand(k, a);
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                u32 b[2];
                queries.operand(n, k, b);
                multiply_add<KEY_KIND>(s[n], a, b[0], b[1]);
            }
        }
    }

    // The exponentials as right operands, keys g and g + 8 times their own factors.
    template <int Kind> DEVICE void probabilities(u32 (&p)[TILES][2], float upper, float lower) const {
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            p[n][0] = transposed(pack<Kind>(s[n][0] * upper, s[n][1] * upper));
            p[n][1] = transposed(pack<Kind>(s[n][2] * lower, s[n][3] * lower));
        }
    }
};
