// A strip of query rows in one warp's registers: products with tensor cores, and the online softmax between them.
//
// A strip is `Tiles` times 16 rows; keys come `Keys` at a time from shared memory. What `tiled` and `decode` share.
// Tiles of rows lie in shared memory in chunks of 16 bytes (8 elements), rows padded to a multiple of 64 elements. The
// chunk's place is its number xor row % 8: the eight rows that one ldmatrix phase reads lie in different banks.
//
// In the thread of lane 4 g + t the accumulators of a 16-row tile are rows g and g + 8 ("halves" 0 and 1), columns 2t
// and 2t + 1 of each 8 columns. They are, packed to 16 bits, the left operand of the second product as they stand.
#pragma once
#include "problem.cuh"

static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "rows are copied in chunks of 8 elements; D up to 256");
constexpr int WIDTH = (HEAD_DIM + 63) / 64 * 64; // elements of a padded row
constexpr int CHUNKS = WIDTH / 8;
constexpr int ROW_BYTES = 2 * WIDTH;

// Where chunk `chunk` of row `row` of a tile lies, in bytes from the tile's start.
DEVICE u32 place(int row, int chunk) { return row * ROW_BYTES + ((chunk ^ (row & 7)) << 4); }

// Starts to copy `Rows` rows into a tile, each of `Threads` threads (this is number `thread`) its share; `source(row)`
// is a row in global memory. Rows from `count` on, and columns past the head dim, become zeros.
template <int Rows, int Threads, class Source> DEVICE void copy_rows(u32 tile, int thread, int count, const u16 *any, Source source) {
    static_assert(Rows * CHUNKS % Threads == 0, "every thread copies as many chunks");
#pragma unroll
    for (int i = 0; i < Rows * CHUNKS / Threads; i++) {
        int at = thread + i * Threads, row = at / CHUNKS, chunk = at % CHUNKS;
        bool real = row < count && chunk * 8 < HEAD_DIM;
        copy_async_16(tile + place(row, chunk), real ? source(row) + chunk * 8 : any, real);
    }
}

// Logits in units of log2: factor and cap are folded so that exp2 takes one fused multiply-add.
struct Logits {
    float factor;   // of the product, never negative: the sign is moved to q
    float cap;      // 0: none
    u32 flip;       // xor of two packed elements of q
    DEVICE Logits(const Problem &p) {
        float size = p.scale < 0.0f ? -p.scale : p.scale;
        cap = p.softcap;
        // With a cap the products become logits before the softmax. A scale of 0 must leave masked scores at -inf.
        factor = cap > 0.0f ? size : larger(size * LOG2_E, 1e-37f);
        flip = p.scale < 0.0f ? 0x80008000u : 0u;
    }
    // The factor that is left for the softmax.
    DEVICE float rest() const { return cap > 0.0f ? LOG2_E : factor; }
};

// The query rows of a strip as left operands: 16 of the depth from chunk 2 k on.
template <int Tiles> DEVICE void load_queries(u32 (&q)[Tiles][4], u32 tile, int row0, int k, u32 flip) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < Tiles; m++) {
        load_matrices(q[m], tile + place(row0 + 16 * m + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int r = 0; r < 4; r++) q[m][r] ^= flip;
    }
}

template <int Tiles, int Keys> struct Strip {
    float o[Tiles][WIDTH / 8][4];
    float top[Tiles][2]; // running maximum of the scores, before the factor
    float sum[Tiles][2]; // this thread's part of the sum of exponentials
    float s[Tiles][Keys / 8][4];

    DEVICE void clear() {
#pragma unroll
        for (int m = 0; m < Tiles; m++) {
#pragma unroll
            for (int n = 0; n < WIDTH / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) o[m][n][i] = 0.0f;
#pragma unroll
            for (int half = 0; half < 2; half++) top[m][half] = minus_infinity(), sum[m][half] = 0.0f;
        }
    }

    // s = q k^T; `queries(fragment, k)` gives the left operand.
    template <class Queries> DEVICE void scores(u32 keys, Queries queries) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int m = 0; m < Tiles; m++)
#pragma unroll
            for (int n = 0; n < Keys / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[m][n][i] = 0.0f;
#pragma unroll
        for (int k = 0; k < WIDTH / 16; k++) {
            u32 q[Tiles][4];
            queries(q, k);
#pragma unroll
            for (int n = 0; n < Keys / 16; n++) {
                u32 b[4]; // keys 0-7 and 8-15, each for depths 0-7 and 8-15
                load_matrices(b, keys + place(16 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
                for (int m = 0; m < Tiles; m++) {
                    multiply_add<ELEMENT>(s[m][2 * n], q[m], b[0], b[1]);
                    multiply_add<ELEMENT>(s[m][2 * n + 1], q[m], b[2], b[3]);
                }
            }
        }
    }

    // Caps the scores. Without a cap nothing is done: the factor waits for the softmax.
    DEVICE void cap(const Logits &logits) {
        if (logits.cap > 0.0f)
#pragma unroll
            for (int m = 0; m < Tiles; m++)
#pragma unroll
                for (int n = 0; n < Keys / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) s[m][n][i] = soft_cap(s[m][n][i] * logits.factor, logits.cap);
    }

    // Hides the keys that a row does not see; `key0` is the first key's number.
    DEVICE void mask(const Span (&seen)[Tiles][2], int key0) {
        const int column = key0 + threadIdx.x % 4 * 2;
#pragma unroll
        for (int m = 0; m < Tiles; m++)
#pragma unroll
            for (int n = 0; n < Keys / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int key = column + 8 * n + i % 2;
                    const Span &span = seen[m][i / 2];
                    if (key < span.first || key >= span.end) s[m][n][i] = minus_infinity();
                }
    }

    // Online softmax: raises the maxima, scales what was summed down to them, makes s the exponentials.
    DEVICE void absorb(float factor) {
#pragma unroll
        for (int m = 0; m < Tiles; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float now = top[m][half];
#pragma unroll
                for (int n = 0; n < Keys / 8; n++) now = larger(now, larger(s[m][n][2 * half], s[m][n][2 * half + 1]));
                now = larger(now, shuffle_xor(now, 1));
                now = larger(now, shuffle_xor(now, 2));
                // A row that has seen nothing keeps -inf; any finite base then gives exponentials of zero.
                float base = now == minus_infinity() ? 0.0f : now * factor;
                float shrink = exp2_fast(fused(top[m][half], factor, -base));
                top[m][half] = now;
                sum[m][half] *= shrink;
#pragma unroll
                for (int n = 0; n < WIDTH / 8; n++) o[m][n][2 * half] *= shrink, o[m][n][2 * half + 1] *= shrink;
#pragma unroll
                for (int n = 0; n < Keys / 8; n++)
#pragma unroll
                    for (int i = 2 * half; i < 2 * half + 2; i++) {
                        s[m][n][i] = exp2_fast(fused(s[m][n][i], factor, -base));
                        sum[m][half] += s[m][n][i];
                    }
            }
    }

    // o += s v
    DEVICE void add_values(u32 values) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int k = 0; k < Keys / 16; k++) {
            u32 p[Tiles][4];
#pragma unroll
            for (int m = 0; m < Tiles; m++)
#pragma unroll
                for (int r = 0; r < 4; r++)
                    p[m][r] = pack<ELEMENT>(s[m][2 * k + r / 2][r % 2 * 2], s[m][2 * k + r / 2][r % 2 * 2 + 1]);
#pragma unroll
            for (int n = 0; n < WIDTH / 16; n++) {
                u32 b[4]; // columns 0-7 and 8-15, each for keys 0-7 and 8-15
                load_matrices_transposed(b, values + place(16 * k + lane / 8 % 2 * 8 + lane % 8, 2 * n + lane / 16));
#pragma unroll
                for (int m = 0; m < Tiles; m++) {
                    multiply_add<ELEMENT>(o[m][2 * n], p[m], b[0], b[1]);
                    multiply_add<ELEMENT>(o[m][2 * n + 1], p[m], b[2], b[3]);
                }
            }
        }
    }

    // Joins the four threads' parts of each row's sum.
    DEVICE void join_sums() {
#pragma unroll
        for (int m = 0; m < Tiles; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                sum[m][half] += shuffle_xor(sum[m][half], 1);
                sum[m][half] += shuffle_xor(sum[m][half], 2);
            }
    }
};
