// Runs a family of backward kernels on the CPU over small problems, and compares dq, dk and dv with f64.
//
// Compiled once for each variant by run.py, as emulate.cpp. The gradients in f64 are the analytic ones of the problem
// with the inputs as they are rounded; those are compared with finite differences first. Prints the largest error of
// each tensor; exit status 1 when one is too large.
#define KVSIEVE_EMULATE
#include "gradient.cuh"

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

// Lengths around the sizes of tiles (16, 32, 64, 128), groups, masks alone and together, rows and keys that see nothing.
const Case CASES[] = {
    {"one key", 1, 1, 1, 1, 1, false, 0, 0, 0, 1},
    {"one tile", 1, 1, 1, 64, 64, false, 0, 0, 0, 1},
    {"tail of keys and queries", 1, 2, 1, 37, 83, false, 0, 0, 0, 1},
    {"tiles and one key, batch", 2, 2, 2, 5, 129, false, 0, 0, 0, 1},
    {"causal, group of 3", 1, 3, 1, 130, 130, true, 0, 0, 0, 1},
    {"causal, more keys", 1, 4, 2, 33, 150, true, 0, 0, 0, 1},
    {"causal, rows that see nothing", 1, 1, 1, 140, 70, true, 0, 0, 0, 1},
    {"window, group of 2, batch", 2, 4, 2, 70, 140, true, 17, 0, 0, 1},
    {"window, keys that nobody sees", 1, 1, 1, 5, 200, true, 40, 0, 0, 1},
    {"window wider than a tile, not causal", 1, 1, 1, 70, 200, false, 70, 0, 0, 1},
    {"soft-cap, causal", 1, 2, 1, 65, 90, true, 0, 5, 0, 4},
    {"negative scale", 1, 1, 1, 20, 70, true, 0, 0, -0.2f, 1},
    {"negative scale, soft-cap", 1, 1, 1, 20, 70, false, 0, 9, -0.2f, 1},
    {"sharp", 1, 1, 1, 66, 90, true, 0, 0, 0, 60},
    {"sharp, two keys", 1, 2, 1, 30, 2, false, 0, 0, 0, 60}, // log-sum-exps far below zero
    {"one query, group of 8", 1, 8, 1, 1, 150, true, 0, 0, 0, 1},
};

// A tensor of the element type, and the same numbers in f64.
struct Tensor {
    std::vector<u16> half;
    std::vector<float> full;
    std::vector<double> exact;

    // Keeps `values`, rounded.
    void keep(const std::vector<double> &values) {
        for (double value : values) {
            if (ELEMENT == F32)
                full.push_back(float(value)), exact.push_back(full.back());
            else
                half.push_back(machine::round_to<ELEMENT>(float(value))), exact.push_back(machine::widen<ELEMENT>(half.back()));
        }
    }
    void poison(size_t count) {
        if (ELEMENT == F32)
            full.assign(count, NAN);
        else
            half.assign(count, 0x7fff);
    }
    double at(size_t i) const { return ELEMENT == F32 ? full[i] : machine::widen<ELEMENT>(half[i]); }
    void *data() { return ELEMENT == F32 ? static_cast<void *>(full.data()) : half.data(); }
};

// How many blocks of `size` cover `of`.
unsigned blocks(size_t of, int size) { return unsigned((of + size - 1) / size); }

} // namespace

// Defines, of one family of kernels: WAYS, as for emulate.cpp; whether it takes a case; `sizes`, the elements of f32 in
// scores and sums; its launches.
#include FAMILY

namespace {

using Values = std::vector<double>;

// The inputs of a problem in f64, and what follows from them.
struct Exact {
    Problem p;
    Values q, k, v, grad_o;

    size_t kv_head(size_t head) const { return head / p.q_heads * p.kv_heads + head % p.q_heads / (p.q_heads / p.kv_heads); }
    size_t rows() const { return size_t(p.batch) * p.q_heads * p.q_len; }

    // The keys that query `i` sees: first..end.
    void seen(int i, int &first, int &end) const {
        int own_end = i + 1 + p.kv_len - p.q_len;
        first = 0, end = p.kv_len;
        if (p.causal || p.window) end = std::max(0, std::min(own_end, p.kv_len));
        if (p.window) first = std::min(std::max(0, own_end - p.window), end);
    }

    double logit(size_t row, size_t key) const {
        double x = 0;
        for (int d = 0; d < HEAD_DIM; d++) x += q[row * HEAD_DIM + d] * k[key * HEAD_DIM + d];
        x *= p.scale;
        return p.softcap > 0 ? p.softcap * std::tanh(x / p.softcap) : x;
    }

    // Output and log-sum-exp of a row; its probabilities.
    Values forward(size_t row, double *o, double &lse) const {
        const size_t key0 = kv_head(row / p.q_len) * p.kv_len;
        int first, end;
        seen(int(row % p.q_len), first, end);
        Values weights;
        double top = -INFINITY, sum = 0;
        for (int j = first; j < end; j++) weights.push_back(logit(row, key0 + j)), top = std::max(top, weights.back());
        for (double &x : weights) sum += x = std::exp(x - top);
        for (double &x : weights) x /= sum;
        lse = sum > 0 ? top + std::log(sum) : -INFINITY;
        std::fill(o, o + HEAD_DIM, 0.0);
        for (int j = first; j < end; j++)
            for (int d = 0; d < HEAD_DIM; d++) o[d] += weights[j - first] * v[(key0 + j) * HEAD_DIM + d];
        return weights;
    }

    // The loss whose gradients are asked for: the inner product of do and o.
    double loss() const {
        double sum = 0, o[HEAD_DIM], lse;
        for (size_t row = 0; row < rows(); row++) {
            forward(row, o, lse);
            for (int d = 0; d < HEAD_DIM; d++) sum += o[d] * grad_o[row * HEAD_DIM + d];
        }
        return sum;
    }
};

// Gradients, and of each element the sum of what was added without the signs: the measure of its rounding.
struct Reference {
    Values dq, dk, dv, dq_size, dk_size, dv_size, o, lse;

    explicit Reference(const Exact &x) : dq(x.q.size()), dk(x.k.size()), dv(x.v.size()), dq_size(dq), dk_size(dk), dv_size(dv), o(dq), lse(x.rows()) {
        const Problem &p = x.p;
        auto add = [](Values &to, Values &size, size_t row, const Values &from, size_t from_row, double factor, double bound) {
            for (int d = 0; d < HEAD_DIM; d++) {
                to[row * HEAD_DIM + d] += factor * from[from_row * HEAD_DIM + d];
                size[row * HEAD_DIM + d] += bound * std::fabs(from[from_row * HEAD_DIM + d]);
            }
        };
        for (size_t row = 0; row < x.rows(); row++) {
            const Values weights = x.forward(row, &o[row * HEAD_DIM], lse[row]);
            int first, end;
            x.seen(int(row % p.q_len), first, end);
            double delta = 0, delta_size = 0;
            for (int d = 0; d < HEAD_DIM; d++) {
                double part = o[row * HEAD_DIM + d] * x.grad_o[row * HEAD_DIM + d];
                delta += part, delta_size += std::fabs(part);
            }
            for (int j = first; j < end; j++) {
                const size_t key = x.kv_head(row / p.q_len) * p.kv_len + j;
                const double weight = weights[j - first];
                double dp = 0;
                for (int d = 0; d < HEAD_DIM; d++) dp += x.grad_o[row * HEAD_DIM + d] * x.v[key * HEAD_DIM + d];
                double slope = p.scale;
                if (p.softcap > 0) slope *= 1 - std::pow(x.logit(row, key) / p.softcap, 2);
                const double ds = weight * (dp - delta) * slope;
                const double bound = weight * (std::fabs(dp - delta) + 0.2 * (std::fabs(dp) + delta_size)) * std::fabs(slope);
                add(dq, dq_size, row, x.k, key, ds, bound);
                add(dk, dk_size, key, x.q, row, ds, bound);
                add(dv, dv_size, key, x.grad_o, row, weight, weight);
            }
        }
    }
};

// Whether the analytic gradients are those of the loss: central differences at a few elements of each input.
bool agrees_with_differences(Exact x, std::mt19937 &random) {
    const Reference reference(x);
    struct Pair {
        const char *name;
        Values *input;
        const Values *gradient;
    };
    bool good = true;
    for (const Pair &pair : {Pair{"dq", &x.q, &reference.dq}, Pair{"dk", &x.k, &reference.dk}, Pair{"dv", &x.v, &reference.dv}}) {
        for (int turn = 0; turn < 8; turn++) {
            const size_t i = random() % pair.input->size();
            const double before = (*pair.input)[i], step = 1e-4;
            (*pair.input)[i] = before + step;
            double difference = x.loss();
            (*pair.input)[i] = before - step;
            difference = (difference - x.loss()) / (2 * step);
            (*pair.input)[i] = before;
            const double gradient = (*pair.gradient)[i];
            if (std::fabs(gradient - difference) > 1e-5 * (1 + std::fabs(gradient))) {
                printf("  WRONG %s[%zu]: %.9f by the formula, %.9f by differences\n", pair.name, i, gradient, difference);
                good = false;
            }
        }
    }
    return good;
}

// The largest error of a row, relative to its length or to the measure of its rounding; a row that is nothing beside the
// largest element of the tensor may be nothing. No number is infinitely wrong.
double error_of(const Tensor &tensor, const Values &exact, const Values &size) {
    double worst = 0, largest = 0;
    for (double x : exact) largest = std::max(largest, std::fabs(x));
    for (size_t row = 0; row < exact.size() / HEAD_DIM; row++) {
        double differences = 0, sizes = 0;
        for (size_t i = row * HEAD_DIM; i < (row + 1) * HEAD_DIM; i++) {
            differences += std::pow(tensor.at(i) - exact[i], 2);
            sizes += std::max({exact[i] * exact[i], 0.01 * size[i] * size[i], 1e-10 * largest * largest});
        }
        const double error = std::sqrt(sizes > 0 ? differences / sizes : differences);
        worst = std::isnan(error) ? INFINITY : std::max(worst, error);
    }
    return worst;
}

} // namespace

int main() {
    const double allowed = ELEMENT == F32 ? 1e-4 : ELEMENT == BF16 ? 4e-2 : 6e-3;
    bool failed = false;
    double worst[3] = {};
    int runs = 0;
    for (const Case &c : CASES) {
        if (!takes(c)) continue;
        std::mt19937 random(11);
        Problem p{};
        p.batch = c.batch, p.q_heads = c.q_heads, p.kv_heads = c.kv_heads, p.q_len = c.q_len, p.kv_len = c.kv_len;
        p.causal = c.causal, p.window = c.window, p.softcap = c.softcap;
        p.scale = c.scale != 0 ? c.scale : 1.0f / std::sqrt(float(HEAD_DIM));
        const size_t rows = size_t(c.batch) * c.q_heads * c.q_len, keys = size_t(c.batch) * c.kv_heads * c.kv_len;
        auto normal = [&](size_t count, double spread) {
            std::normal_distribution<double> distribution(0, spread);
            Values values(count);
            for (double &value : values) value = distribution(random);
            Tensor tensor;
            tensor.keep(values);
            return tensor;
        };
        Tensor q = normal(rows * HEAD_DIM, c.spread), k = normal(keys * HEAD_DIM, 1), v = normal(keys * HEAD_DIM, 1);
        Tensor grad_o = normal(rows * HEAD_DIM, 1), o;
        const Exact exact{p, q.exact, k.exact, v.exact, grad_o.exact};
        if (c.q_len <= 37 && HEAD_DIM <= 64) failed |= !agrees_with_differences(exact, random);
        const Reference reference(exact);
        o.keep(reference.o);
        std::vector<float> lse(reference.lse.begin(), reference.lse.end()), delta, scores, sums;
        size_t score_count = 0, sum_count = 0;
        sizes(p, score_count, sum_count);
        p.q = q.data(), p.k = k.data(), p.v = v.data(), p.o = o.data(), p.lse = lse.data();
        double errors[3] = {};
        for (int way = 0; way < WAYS; way++) {
            machine::schedule = {(way & 1) != 0, way >= 2, way == 4};
            Tensor dq, dk, dv;
            dq.poison(rows * HEAD_DIM), dk.poison(keys * HEAD_DIM), dv.poison(keys * HEAD_DIM);
            delta.assign(rows, NAN), scores.assign(score_count, NAN), sums.assign(sum_count, NAN);
            p.scores = scores.data();
            const Gradients g{grad_o.data(), dq.data(), dk.data(), dv.data(), delta.data(), sums.data()};
            run(p, g);
            runs++;
            errors[0] = std::max(errors[0], error_of(dq, reference.dq, reference.dq_size));
            errors[1] = std::max(errors[1], error_of(dk, reference.dk, reference.dk_size));
            errors[2] = std::max(errors[2], error_of(dv, reference.dv, reference.dv_size));
        }
        bool good = true;
        for (int i = 0; i < 3; i++) worst[i] = std::max(worst[i], errors[i]), good &= errors[i] <= allowed;
        failed |= !good;
        if (!good) printf("  WRONG %s: dq %.2e, dk %.2e, dv %.2e (allowed %.0e)\n", c.name, errors[0], errors[1], errors[2], allowed);
    }
    printf("%d runs, worst row of dq %.2e, dk %.2e, dv %.2e\n", runs, worst[0], worst[1], worst[2]);
    return failed;
}
