// kernels/model.cu, each kernel against plain loops in f64. Of the cache only the random numbers and a length are used.
#include "model.cu"

#include <array>

namespace {

std::vector<float> normals(Cache &cache, size_t count, float spread = 1) {
    std::vector<float> values(count);
    for (float &value : values) value = cache.normal(spread);
    return values;
}

std::vector<Element> elements(Cache &cache, size_t count) {
    std::vector<Element> values(count);
    for (Element &value : values) value = narrow(cache.normal());
    return values;
}

// Runs a kernel that changes elements one by one, and compares.
template <class Kernel, class Plain>
int each(const char *what, Cache &cache, const std::vector<float> &y, size_t count, int width, float cap, Kernel kernel, Plain plain) {
    std::vector<float> x = normals(cache, count, 8);
    x[0] = -300, x[count / 2] = 300;
    const std::vector<float> before = x;
    machine::launch({blocks(count, 256), 1, 1}, 256, 0, [&] { kernel({x.data(), y.data(), count, width, cap}); });
    int failed = 0;
    for (size_t i = 0; i < count; i++) failed += differs(what, 0, int(i), x[i], plain(before[i], double(y[i % y.size()])), 3e-6);
    return failed;
}

int products(Cache &cache, int rows, int depth, int width) {
    int failed = 0;
    const std::vector<float> x = normals(cache, size_t(rows) * depth);
    const std::vector<Element> w = elements(cache, size_t(width) * depth);
    for (bool few : {true, false}) {
        if (few && rows > 8) continue;
        std::vector<float> y(size_t(rows) * width, NAN);
        const Linear linear{x.data(), w.data(), y.data(), rows, depth, width, 0};
        if (few)
            machine::launch({blocks(width, 8), 1, 1}, 256, 0, [&] { multiply_few(linear); });
        else
            machine::launch({blocks(width, 64), blocks(rows, 64), 1}, 256, 0, [&] { multiply_rows(linear); });
        for (int row = 0; row < rows; row++)
            for (int column = 0; column < width; column++) {
                double sum = 0;
                for (int k = 0; k < depth; k++) sum += double(x[size_t(row) * depth + k]) * widen(w[size_t(column) * depth + k]);
                failed += differs(few ? "few" : "product", row, column, y[size_t(row) * width + column], sum, 1e-5);
            }
    }
    return failed;
}

int heads(Cache &cache, int tokens, int count, int head_dim, int half, bool turned) {
    int failed = 0;
    const size_t all = size_t(tokens) * count * head_dim;
    std::vector<float> rows = normals(cache, all), angles = normals(cache, size_t(tokens) * head_dim);
    std::vector<Element> split(all);
    const Heads h{rows.data(), turned ? angles.data() : nullptr, split.data(), tokens, count, head_dim, half};
    machine::launch({unsigned(tokens), unsigned(count), 1}, 128, 0, [&] { split_heads(h); });
    const double allowed = ELEMENT == F32 ? 1e-6 : ELEMENT == BF16 ? 8e-3 : 1e-3;
    for (int token = 0; token < tokens; token++)
        for (int head = 0; head < count; head++)
            for (int d = 0; d < head_dim; d++) {
                const float *row = &rows[(size_t(token) * count + head) * head_dim], *angle = &angles[size_t(token) * head_dim];
                double wanted = row[d];
                if (turned && d < half) wanted = double(row[d]) * angle[d] - double(row[half + d]) * angle[half + d];
                if (turned && d >= half && d < 2 * half) wanted = double(row[d]) * angle[d - half] + double(row[d - half]) * angle[d];
                failed += differs("cut", head, token, widen(split[(size_t(head) * tokens + token) * head_dim + d]), wanted, allowed);
            }
    machine::launch({unsigned(tokens), unsigned(count), 1}, 128, 0, [&] { merge_heads(h); });
    for (int token = 0; token < tokens; token++)
        for (int head = 0; head < count; head++)
            for (int d = 0; d < head_dim; d++)
                failed += differs("joined", head, token, rows[(size_t(token) * count + head) * head_dim + d],
                                  widen(split[(size_t(head) * tokens + token) * head_dim + d]), 0);
    return failed;
}

int failures(Cache &cache) {
    int failed = 0;
    const int rows = std::min(cache.longest(), 70), width = 1 + 7 * rows;
    for (const auto &extents : {std::array<int, 3>{rows, 83, 67}, {std::min(rows, 8), 16, 130}, {3, 1, 1}})
        failed += products(cache, extents[0], extents[1], extents[2]);
    failed += heads(cache, rows, 3, 18, 9, true) + heads(cache, rows, 3, 18, 7, true);
    failed += heads(cache, rows, 2, 17, 0, false) + heads(cache, 1, 1, 300, 150, true);

    const std::vector<Element> table = elements(cache, size_t(11) * width);
    std::vector<u32> tokens(rows);
    for (u32 &token : tokens) token = cache.random() % 11;
    std::vector<float> to(size_t(rows) * width, NAN);
    machine::launch({unsigned(rows), 1, 1}, 256, 0, [&] { embed_rows({tokens.data(), table.data(), to.data(), width, 5.5f}); });
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < width; i++)
            failed += differs("embedded", row, i, to[size_t(row) * width + i], 5.5 * widen(table[size_t(tokens[row]) * width + i]), 1e-6);

    // Norms, the second time in place.
    std::vector<float> from = normals(cache, to.size(), 3);
    const std::vector<float> weight = normals(cache, width), before = from;
    for (bool in_place : {false, true}) {
        std::vector<float> &out = in_place ? from : to;
        machine::launch({unsigned(rows), 1, 1}, 256, 0, [&] { norm_rows({from.data(), weight.data(), out.data(), width, 0.25f, 1, 0}); });
        for (int row = 0; row < rows; row++) {
            double squares = 0;
            for (int i = 0; i < width; i++) squares += double(before[size_t(row) * width + i]) * before[size_t(row) * width + i];
            const double factor = 1 / std::sqrt(squares / width + 0.25);
            for (int i = 0; i < width; i++)
                failed += differs("norm", row, i, out[size_t(row) * width + i], before[size_t(row) * width + i] * factor * (1.0 + weight[i]), 3e-6);
        }
    }

    const size_t count = size_t(rows) * width;
    const std::vector<float> y = normals(cache, count), row = normals(cache, width);
    failed += each("add", cache, y, count, 1, 0, add_each, [](double x, double y) { return x + y; });
    failed += each("bias", cache, row, count, width, 0, add_bias, [](double x, double y) { return x + y; });
    failed += each("silu", cache, y, count, 1, 0, gate_silu, [](double x, double y) { return x / (1 + std::exp(-x)) * y; });
    failed += each("gelu", cache, y, count, 1, 0, gate_gelu, [](double x, double y) {
        return 0.5 * x * (1 + std::tanh(std::sqrt(2 / 3.141592653589793) * (x + 0.044715 * x * x * x))) * y;
    });
    failed += each("gelu of gates", cache, y, count, 1, 0, gelu_each, [](double x, double) { return 0.5 * x * (1 + std::erf(x / std::sqrt(2))); });
    failed += each("cap", cache, y, count, 1, 7, cap_each, [](double x, double) { return 7 * std::tanh(x / 7); });

    std::vector<Element> narrowed(count);
    machine::launch({blocks(count, 256), 1, 1}, 256, 0, [&] { narrow_each({y.data(), narrowed.data(), count}); });
    for (size_t i = 0; i < count; i++)
        failed += widen(narrowed[i]) == widen(narrow(y[i])) ? 0 : wrong("narrowed", 0, int(i), widen(narrowed[i]), y[i]);
    return failed;
}

} // namespace
