// A strip of query rows in one warp's registers, in f32 on CUDA cores: the functions of strip.cuh.
//
// Lane 8 g + t has the rows g, g + 4, ... of a strip. Of the scores it has the keys t, t + 8, ...: each element of q and
// k that it reads is used for several products. Of the output it has the columns 4t to 4t + 3 of each 32; for the second
// product the exponentials go round among the eight lanes of a row.
#pragma once
#include "rows.cuh"

// The query rows of a strip, read where they lie in shared memory.
template <int Rows, bool Kept> struct Queries {
    static_assert(!Kept, "f32 has no registers for q");
    u32 tile;
    int row0;
    float sign;

    DEVICE Queries(u32 tile, int row0, const Logits &logits) : tile(tile), row0(row0), sign(logits.negative ? -1.0f : 1.0f) {}
};

template <int Rows, int Keys> struct Strip {
    static constexpr int SLOTS = Rows / 4, EACH = Keys / 8, FOURS = WIDTH / 32;
    float o[SLOTS][FOURS][4];
    float top[SLOTS]; // running maximum of the scores, before the factor
    float sum[SLOTS]; // this thread's part of the sum of exponentials
    float s[SLOTS][EACH];

    DEVICE static int row(int slot) { return 4 * slot + threadIdx.x % 32 / 8; }
    DEVICE static bool leads() { return threadIdx.x % 8 == 0; }

    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < SLOTS; i++) {
            top[i] = minus_infinity(), sum[i] = 0.0f;
#pragma unroll
            for (int n = 0; n < FOURS; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) o[i][n][e] = 0.0f;
        }
    }

    // s = q k^T
    DEVICE void scores(u32 keys, const Queries<Rows, false> &queries) {
#pragma unroll
        for (int i = 0; i < SLOTS; i++)
#pragma unroll
            for (int j = 0; j < EACH; j++) s[i][j] = 0.0f;
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            float q[SLOTS][4];
#pragma unroll
            for (int i = 0; i < SLOTS; i++) load_floats(q[i], queries.tile + place(queries.row0 + row(i), chunk));
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                float k[4];
                load_floats(k, keys + place(8 * j + threadIdx.x % 8, chunk));
#pragma unroll
                for (int i = 0; i < SLOTS; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) s[i][j] = fused(q[i][e], k[e], s[i][j]);
            }
        }
#pragma unroll
        for (int i = 0; i < SLOTS; i++)
#pragma unroll
            for (int j = 0; j < EACH; j++) s[i][j] *= queries.sign;
    }

    // Caps the scores. Without a cap nothing is done: the factor waits for the softmax.
    DEVICE void cap(const Logits &logits) {
        if (logits.cap > 0.0f)
#pragma unroll
            for (int i = 0; i < SLOTS; i++)
#pragma unroll
                for (int j = 0; j < EACH; j++) s[i][j] = soft_cap(s[i][j] * logits.factor, logits.cap);
    }

    // Hides the keys that a row does not see; `key0` is the first key's number.
    DEVICE void mask(const Span (&seen)[SLOTS], int key0) {
#pragma unroll
        for (int i = 0; i < SLOTS; i++)
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                int key = key0 + 8 * j + threadIdx.x % 8;
                if (key < seen[i].first || key >= seen[i].end) s[i][j] = minus_infinity();
            }
    }

    // Online softmax: raises the maxima, scales what was summed down to them, makes s the exponentials.
    DEVICE void absorb(float factor) {
#pragma unroll
        for (int i = 0; i < SLOTS; i++) {
            float now = top[i];
#pragma unroll
            for (int j = 0; j < EACH; j++) now = larger(now, s[i][j]);
#pragma unroll
            for (int mask = 1; mask < 8; mask *= 2) now = larger(now, shuffle_xor(now, mask));
            // A row that has seen nothing keeps -inf; any finite base then gives exponentials of zero.
            float base = now == minus_infinity() ? 0.0f : now * factor;
            float shrink = exp2_fast(fused(top[i], factor, -base));
            top[i] = now;
            sum[i] *= shrink;
#pragma unroll
            for (int n = 0; n < FOURS; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) o[i][n][e] *= shrink;
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                s[i][j] = exp2_fast(fused(s[i][j], factor, -base));
                sum[i] += s[i][j];
            }
        }
    }

    // o += s v
    DEVICE void add_values(u32 values) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < EACH; j++)
#pragma unroll(Rows == 4 ? 1 : 2) // with few rows, two at once spill on sm_90a at D 128
            for (int t = 0; t < 8; t++) {
                float p[SLOTS];
#pragma unroll
                for (int i = 0; i < SLOTS; i++) p[i] = shuffle(s[i][j], lane / 8 * 8 + t);
                // place(8 j + t, 8 n + lane % 8), said so that n only adds.
                const u32 row_part = values + place(8 * j + t, lane % 8);
#pragma unroll
                for (int n = 0; n < FOURS; n++) {
                    float v[4];
                    load_floats(v, row_part + 128 * n);
#pragma unroll
                    for (int i = 0; i < SLOTS; i++)
#pragma unroll
                        for (int e = 0; e < 4; e++) o[i][n][e] = fused(p[i], v[e], o[i][n][e]);
                }
            }
    }

    // Joins the threads' parts of each row's sum.
    DEVICE void join_sums() {
#pragma unroll
        for (int i = 0; i < SLOTS; i++)
#pragma unroll
            for (int mask = 1; mask < 8; mask *= 2) sum[i] += shuffle_xor(sum[i], mask);
    }

    // This thread's part of an output row.
    DEVICE void put(int slot, float *row) const {
#pragma unroll
        for (int n = 0; n < FOURS; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) row[32 * n + threadIdx.x % 8 * 4 + e] = o[slot][n][e];
    }

    // This thread's part of row `row` of the output tensor, times `factor`.
    DEVICE void write(int slot, void *tensor, long long row, float factor) const {
        float *target = static_cast<float *>(tensor) + row * HEAD_DIM;
#pragma unroll
        for (int n = 0; n < FOURS; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int column = 32 * n + threadIdx.x % 8 * 4 + e;
                if (column < HEAD_DIM) target[column] = o[slot][n][e] * factor;
            }
    }
};
