// Rows of codes as left operands of tensor cores: from their bytes in shared memory to registers, without a tile of
// elements between.
//
// A product adds up over columns in any order, as long as both sides have the same. So a lane reads whole words of a row:
// lane 4 g + t has a quarter of a key's row, and of a value's row, whose columns are rows of the product, an eighth. Codes
// become numbers that they are exactly. A scale for a row is taken out of the product, into a key's scores and a value's
// probability; those of groups are multiplied in f16. Which columns a lane has, `column` says.
#pragma once
#include "rows.cuh"

// Pairs of 16-bit numbers.
constexpr u32 ONES = 0x3c003c00u, SIXTEENTHS = 0x2c002c00u, ZEROS = 0x80008000u; // f16; -0 leaves every sum as it is
constexpr u32 MINUS_ONES_BF16 = 0xbf80bf80u;

template <int Words> struct alignas(4 * Words) Chunk {
    u32 x[Words];
};

template <class Format> struct Words {
    static constexpr bool NIBBLES = Format::CODE == INT4;
    static constexpr int COUNT = HEAD_DIM / (NIBBLES ? 8 : 4); // in a row

    // Words of row `row` from word `first` on.
    template <int Count> DEVICE static void read(const unsigned char *rows, int row, int first, u32 (&words)[Count]) {
        if constexpr (Format::SWIZZLED) {
            constexpr int AT_ONCE = Count % 4 == 0 ? 4 : 2;
#pragma unroll
            for (int i = 0; i < Count; i += AT_ONCE) {
                const auto *const chunk = rows + swizzled(row * Format::BYTES + 4 * (first + i));
                const auto some = *reinterpret_cast<const Chunk<AT_ONCE> *>(chunk);
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++) words[i + j] = some.x[j];
            }
        } else {
#pragma unroll
            for (int i = 0; i < Count; i++) {
                const unsigned char *const at = rows + row * Format::BYTES + place(first + i);
                if constexpr (!NIBBLES || (Format::BYTES | Format::GROUP_BYTES) % 4 == 0)
                    words[i] = *reinterpret_cast<const u32 *>(at);
                else // a group and its scale are no whole number of words
                    words[i] = reinterpret_cast<const u16 *>(at)[0] | u32(reinterpret_cast<const u16 *>(at)[1]) << 16;
            }
        }
    }

    // Where a word lies in its row; of four bits, it has eight columns: four from `column` on, and those 16 further.
    DEVICE static int place(int word) {
        if constexpr (!NIBBLES) return Format::SCALE_BYTES + 4 * word;
        return group(word) + word / 4 % (Format::GROUP / 32) * 16 + word % 4 * 4;
    }
    DEVICE static int column(int word) { return NIBBLES ? word / 4 * 32 + word % 4 * 4 : 4 * word; }

    // The scale of a word's group, and its minimum, as f16.
    DEVICE static int group(int word) { return word / 4 * 32 / Format::GROUP * Format::GROUP_BYTES; }
    DEVICE static u32 scale(const unsigned char *rows, int row, int word, int which = 0) {
        return reinterpret_cast<const u16 *>(rows + row * Format::BYTES + group(word) + Format::GROUP / 2)[which];
    }

    // Codes of four bits in the lower half of each 16, or above them, as what they stand for.
    DEVICE static u32 nibbles(u32 both, bool upper, u32 scale, u32 minimum) {
        constexpr u32 LOW = Format::ZERO ? 0xe400e400u : 0xe408e408u, HIGH = Format::ZERO ? 0xd400d400u : 0xd480d480u;
        // Behind the bits of 1024 they are 1024 and the code, or 16 times the code; 8 more where codes are signed.
        const u32 x = (both & (upper ? 0x00f000f0u : 0x000f000fu)) | 0x64006400u;
        const u32 code = upper ? fused_pair<F16>(x, SIXTEENTHS, HIGH) : fused_pair<F16>(x, ONES, LOW);
        return fused_pair<F16>(code, scale, Format::ZERO ? minimum : ZEROS);
    }
};

// This lane's quarter of a row of keys: four columns for each step of 16, two of them in either half of its operand.
template <class Format> struct KeyCodes {
    using Row = Words<Format>;
    static constexpr int COUNT = Row::COUNT / 4, EACH = Row::NIBBLES ? 2 : 1; // words of a lane; steps of a word
    u32 words[COUNT];
    u32 scales[Row::NIBBLES ? COUNT : 1], minima[Row::NIBBLES ? COUNT : 1];
    float scale;

    DEVICE static int word(int i) { return threadIdx.x % 4 * COUNT + i; }
    // The first of the four columns of step `k`. Of four bits, those in the order 0, 2, 1, 3.
    DEVICE static int column(int k) { return Row::column(word(k / EACH)) + k % EACH * 16; }

    DEVICE KeyCodes(const unsigned char *rows, int row) : scale(1.0f) {
        Row::read(rows, row, word(0), words);
        if constexpr (Format::CODE == INT8) scale = *reinterpret_cast<const float *>(rows + row * Format::BYTES);
        if constexpr (Row::NIBBLES)
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                scales[i] = choose_bytes(Row::scale(rows, row, word(i)), 0, 0x1010u);
                minima[i] = Format::ZERO ? choose_bytes(Row::scale(rows, row, word(i), 1), 0, 0x1010u) : 0;
            }
    }

    DEVICE void operand(int k, u32 &low, u32 &high) const {
        const u32 word = words[k / EACH];
        if constexpr (Format::CODE == INT8) {
            const u32 from_zero = word ^ 0x80808080u; // behind the bits of 1024: 1152 and the code
            low = fused_pair<F16>(choose_bytes(from_zero, 0x64646464u, 0x4140u), ONES, 0xe480e480u);
            high = fused_pair<F16>(choose_bytes(from_zero, 0x64646464u, 0x4342u), ONES, 0xe480e480u);
        } else if constexpr (Row::NIBBLES) {
            low = Row::nibbles(word, k % 2, scales[k / 2], minima[k / 2]);
            high = Row::nibbles(word >> 8, k % 2, scales[k / 2], minima[k / 2]);
        } else {
            low = Format::to_f16(word), high = Format::to_f16(word >> 16);
        }
    }
};

// This lane's eighth of four rows of values: 2t, 2t + 1, and those 8 further. Each column of two rows is half of an operand.
template <class Format> struct ValueCodes {
    using Row = Words<Format>;
    static constexpr int KIND = Format::CODE == INT8 ? BF16 : F16;
    static constexpr int COUNT = Row::COUNT / 8, COLUMNS = Row::NIBBLES ? 8 : 4; // words of a lane; columns of a word
    const unsigned char *rows;
    u32 words[4][COUNT];

    DEVICE static int word(int i) { return threadIdx.x % 32 / 4 * COUNT + i; }
    // The column of this lane's number `i`.
    DEVICE static int column(int i) { return Row::column(word(i / COLUMNS)) + i % COLUMNS / 4 * 16 + i % 4; }
    DEVICE static int row(int i) { return threadIdx.x % 4 * 2 + i % 2 + i / 2 * 8; }

    DEVICE explicit ValueCodes(const unsigned char *rows) : rows(rows) {
#pragma unroll
        for (int i = 0; i < 4; i++) Row::read(rows, row(i), word(0), words[i]);
    }

    // The columns of word `i`: of the first two rows, and of those 8 further.
    DEVICE void operands(int i, u32 (&x)[2][COLUMNS]) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 first = words[2 * half][i], second = words[2 * half + 1][i];
            if constexpr (Format::CODE == E4M3 || Format::CODE == E5M2) {
                const u32 lower = choose_bytes(first, second, 0x5140u), upper = choose_bytes(first, second, 0x7362u);
                x[half][0] = Format::to_f16(lower), x[half][1] = Format::to_f16(lower >> 16);
                x[half][2] = Format::to_f16(upper), x[half][3] = Format::to_f16(upper >> 16);
                continue;
            }
            const u32 lower = choose_bytes(first, second, 0x5410u), upper = choose_bytes(first, second, 0x7632u);
            const u32 bytes[4] = {lower, lower >> 8, upper, upper >> 8}; // in the lower byte of each 16
            if constexpr (Row::NIBBLES) {
                const int one = row(2 * half), other = row(2 * half + 1);
                const u32 scales = Row::scale(rows, one, word(i)) | Row::scale(rows, other, word(i)) << 16;
                u32 minima = 0;
                if (Format::ZERO) minima = Row::scale(rows, one, word(i), 1) | Row::scale(rows, other, word(i), 1) << 16;
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    x[half][e] = Row::nibbles(bytes[e], false, scales, minima);
                    x[half][4 + e] = Row::nibbles(bytes[e], true, scales, minima);
                }
            } else {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    // 128 and seven bits, less 128 or, with the eighth set, which is the last of the exponent, less 256.
                    const u32 bits = (bytes[e] & 0x007f007fu) | 0x43004300u, offset = (bytes[e] & 0x00800080u) | 0x43004300u;
                    x[half][e] = fused_pair<BF16>(offset, MINUS_ONES_BF16, bits);
                }
            }
        }
    }

    // What the probability of row `i` is multiplied with.
    DEVICE float scale(int i) const {
        return Format::CODE == INT8 ? *reinterpret_cast<const float *>(rows + i * Format::BYTES) : 1.0f;
    }
};
