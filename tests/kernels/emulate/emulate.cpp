// Runs a family of kernels on the CPU over small problems, and compares o and lse with attention in f64.
//
// Compiled once for each variant by run.py, with the macros that NVRTC gets and FAMILY, a header beside this file: it
// includes the kernel's source, and says how the kernel is launched and what else it needs. Prints the largest error of each case; exit status 1 when one is too large.
#define KVSIEVE_EMULATE
#include "formats.hpp"

#include <algorithm>
#include <random>

namespace {

struct Case {
    const char *name;
    int batch, q_heads, kv_heads, q_len, kv_len;
    bool causal;
    int window;
    float softcap, scale; // scale 0 in the table: 1 / sqrt(D)
    float spread;         // of q: large values make one key take all
};

// Lengths around the sizes of tiles (16, 64, 128), groups, masks alone and together, rows that see nothing.
const Case CASES[] = {
    {"one key", 1, 1, 1, 1, 1, false, 0, 0, 0, 1},
    {"one tile", 1, 1, 1, 64, 64, false, 0, 0, 0, 1},
    {"tail of keys and queries", 1, 2, 1, 37, 83, false, 0, 0, 0, 1},
    {"two tiles and one key, batch", 2, 2, 2, 5, 129, false, 0, 0, 0, 1},
    {"causal", 1, 2, 1, 130, 130, true, 0, 0, 0, 1},
    {"causal, more keys", 1, 3, 1, 33, 150, true, 0, 0, 0, 1},
    {"causal, rows that see nothing", 1, 1, 1, 140, 70, true, 0, 0, 0, 1},
    {"causal, tiles of rows that see nothing", 1, 2, 1, 330, 70, true, 0, 0, 0, 1},
    {"window", 2, 4, 2, 100, 200, true, 17, 0, 0, 1},
    {"window wider than a tile, not causal", 1, 1, 1, 70, 260, false, 70, 0, 0, 1},
    {"soft-cap, causal", 1, 2, 1, 65, 90, true, 0, 5, 0, 4},
    {"negative scale", 1, 1, 1, 20, 70, true, 0, 0, -0.2f, 1},
    {"negative scale, soft-cap", 1, 1, 1, 20, 70, true, 0, 9, -0.2f, 1},
    {"sharp", 1, 1, 1, 66, 190, true, 0, 0, 0, 60},
    {"decode, group of 8", 2, 16, 2, 1, 333, true, 0, 0, 0, 1},
    {"decode, 24 rows, window", 1, 12, 1, 2, 600, true, 100, 0, 0, 1},
    {"decode, long", 1, 2, 1, 1, 1100, true, 0, 30, 0, 1},
    {"decode, window in the middle", 2, 2, 1, 1, 1100, true, 290, 0, 0, 1},
    {"decode, 70 steps of a warp", 1, 4, 2, 1, 4480, true, 0, 0, 0, 1},
    {"decode, 129 splits", 1, 2, 1, 1, 8200, true, 0, 0, 0, 1},
    {"decode, 265 splits", 1, 1, 1, 1, 16910, true, 0, 0, 0, 4},
};

struct Tensors {
    std::vector<u16> q, o; // 16-bit elements, or
    std::vector<float> q32, o32;
    std::vector<unsigned char> k, v; // rows of the lists
    std::vector<float> lse, scores, partials;
    std::vector<int> lens; // of each list
    std::vector<int> origins; // where the tokens of each list stood, [lists, kv_len]; empty: none is missing
};

float value_of(const std::vector<u16> &half, const std::vector<float> &full, size_t i) {
    return ELEMENT == F32 ? full[i] : machine::widen<ELEMENT>(half[i]);
}

void fill(std::vector<u16> &half, std::vector<float> &full, size_t count, float spread, std::mt19937 &random) {
    std::normal_distribution<float> normal(0.0f, spread);
    for (size_t i = 0; i < count; i++)
        if (ELEMENT == F32)
            full.push_back(normal(random));
        else
            half.push_back(machine::round_to<ELEMENT>(normal(random)));
}

// Rows of lists of random numbers in a format, and what is multiplied with them.
template <class Format> void fill_rows(std::vector<unsigned char> &to, std::vector<double> &kept, size_t lists, int rows, std::mt19937 &random) {
    std::normal_distribution<float> normal(0.0f, 1.0f);
    to.assign(lists * Format::list_bytes(rows), 0xff);
    for (size_t list = 0; list < lists; list++)
        for (int i = 0; i < rows; i++) {
            float row[HEAD_DIM];
            for (float &x : row) x = normal(random);
            const auto bytes = plainly::encode(Format{}, row);
            std::copy(bytes.begin(), bytes.end(), &to[list * Format::list_bytes(rows) + size_t(i) * Format::BYTES]);
            for (int d = 0; d < HEAD_DIM; d++) kept.push_back(plainly::multiplied<Format>(plainly::decode(Format{}, bytes.data(), d)));
        }
}

const void *data(std::vector<u16> &half, std::vector<float> &full) {
    return ELEMENT == F32 ? static_cast<void *>(full.data()) : half.data();
}

// How many blocks of `size` cover `of`.
unsigned blocks(size_t of, int size) { return unsigned((of + size - 1) / size); }

} // namespace

// Defines, of one family of kernels: WAYS, the schedules that make a difference (2 where nothing is copied in the
// background, else 4; 5 with a lagging warp); whether it takes a case; what it needs besides q, k and v; and its launches.
#include FAMILY

namespace {

// The larger of two errors; no number is infinitely wrong, and stays so.
double worse(double a, double b) { return std::isnan(b) ? INFINITY : std::max(a, b); }

// Attention in f64 of one row; gives its lse.
double reference(const Tensors &t, const Problem &p, const std::vector<double> (&kv)[2], size_t head, int i, int len,
                 std::vector<double> &o) {
    const size_t list = head / p.q_heads * p.kv_heads + head % p.q_heads / (p.q_heads / p.kv_heads);
    int own_end = i + 1 + len - p.q_len, first = 0, end = len;
    if (p.causal || p.window) end = std::max(0, std::min(own_end, len));
    if (p.window) first = std::min(std::max(0, own_end - p.window), end);
    if ((p.causal || p.window) && !t.origins.empty() && len > 0) {
        const int *stood = &t.origins[list * p.kv_len], own = stood[len - 1] - (p.q_len - 1 - i);
        first = 0, end = 0;
        for (int j = 0; j < len; j++) end += stood[j] <= own, first += p.window && stood[j] <= own - p.window;
    }
    std::fill(o.begin(), o.end(), 0.0);
    std::vector<double> logits;
    double top = -INFINITY, sum = 0;
    for (int j = first; j < end; j++) {
        double x = 0;
        for (int d = 0; d < HEAD_DIM; d++)
            x += double(value_of(t.q, t.q32, (head * p.q_len + i) * HEAD_DIM + d)) * kv[0][(list * p.kv_len + j) * HEAD_DIM + d];
        x *= p.scale;
        if (p.softcap > 0) x = p.softcap * std::tanh(x / p.softcap);
        logits.push_back(x);
        top = std::max(top, x);
    }
    for (double &x : logits) sum += x = std::exp(x - top);
    for (int j = first; j < end; j++)
        for (int d = 0; d < HEAD_DIM; d++) o[d] += logits[j - first] / sum * kv[1][(list * p.kv_len + j) * HEAD_DIM + d];
    return sum > 0 ? top + std::log(sum) : -INFINITY;
}

} // namespace

int main() {
    // o is rounded to its type once, and so are the probabilities before the second product.
    const double usual = ELEMENT == F32 ? 1e-5 : ELEMENT == BF16 ? 1e-2 : 1.5e-3;
    const double lse_allowed = 2e-5; // relative to 1 + |lse|
    bool failed = false;
    double worst = 0, worst_lse = 0;
    int runs = 0;
    for (const Case &c : CASES) {
        if (!takes(c)) continue;
        std::mt19937 random(7);
        Tensors t;
        Problem p{};
        p.batch = c.batch, p.q_heads = c.q_heads, p.kv_heads = c.kv_heads, p.q_len = c.q_len, p.kv_len = c.kv_len;
        p.causal = c.causal, p.window = c.window, p.softcap = c.softcap;
        p.scale = c.scale != 0 ? c.scale : 1.0f / std::sqrt(float(HEAD_DIM));
        const size_t rows = size_t(c.batch) * c.q_heads * c.q_len, lists = size_t(c.batch) * c.kv_heads;
        fill(t.q, t.q32, rows * HEAD_DIM, c.spread, random);
        std::vector<double> kv[2];
        fill_rows<KeyFormat>(t.k, kv[0], lists, c.kv_len, random);
        fill_rows<ValueFormat>(t.v, kv[1], lists, c.kv_len, random);
        t.lens.assign(lists, c.kv_len);
        prepare(t, p, random);
        p.q = data(t.q, t.q32), p.k = t.k.data(), p.v = t.v.data();
        p.scores = t.scores.data(), p.partials = t.partials.data();
        double error = 0, lse_error = 0;
        for (int way = 0; way < WAYS; way++) {
            machine::schedule = {(way & 1) != 0, way >= 2, way == 4};
            t.o.assign(rows * HEAD_DIM, 0x7fff), t.o32.assign(rows * HEAD_DIM, NAN), t.lse.assign(rows, NAN);
            p.o = const_cast<void *>(data(t.o, t.o32)), p.lse = t.lse.data();
            run(p);
            runs++;
            std::vector<double> o(HEAD_DIM);
            for (size_t row = 0; row < rows; row++) {
                size_t head = row / c.q_len;
                int len = t.lens[head / c.q_heads * c.kv_heads + head % c.q_heads / (c.q_heads / c.kv_heads)];
                double lse = reference(t, p, kv, head, int(row % c.q_len), len, o);
                bool same = std::isinf(lse) && t.lse[row] == lse;
                lse_error = worse(lse_error, same ? 0 : std::fabs(lse - t.lse[row]) / (1 + std::fabs(lse)));
                double squares = 0, differences = 0;
                for (int d = 0; d < HEAD_DIM; d++) {
                    double x = value_of(t.o, t.o32, row * HEAD_DIM + d);
                    squares += o[d] * o[d], differences += (x - o[d]) * (x - o[d]);
                }
                // Of each row: one that is wrong does not hide among many that are right.
                error = worse(error, std::sqrt(squares > 0 ? differences / squares : differences));
            }
        }
        // Logits of f32 are rounded in proportion to their size.
        // The elements of a short row may all be small beside what was added up for them.
        const double allowed = (ELEMENT == F32 && c.spread > 10 ? 8 : HEAD_DIM < 8 ? 3 : 1) * usual;
        bool good = error <= allowed && lse_error <= lse_allowed;
        failed |= !good;
        worst = std::max(worst, error), worst_lse = std::max(worst_lse, lse_error);
        if (!good) printf("  WRONG %s: o %.2e (allowed %.0e), lse %.2e (allowed %.0e)\n", c.name, error, allowed, lse_error, lse_allowed);
    }
    printf("%d runs, worst row of o %.2e, worst lse %.2e\n", runs, worst, worst_lse);
    return failed;
}
