// kernels/export.cu, or export_plain.cu with -DPLAINLY
#ifdef PLAINLY
#include "export_plain.cu"
#else
#include "export.cu"
#endif

namespace {

struct Mask {
    int causal, window;
    float softcap, scale;
};

int failures(Cache &cache) {
    int failed = 0;
    const Mask masks[] = {{1, 0, 0, 0.125f}, {1, 19, 0, 0.3f}, {0, 0, 7, -0.3f}, {1, 0, 0, 0}};
    const int q_heads = 2 * cache.heads, q_len = 67, length = 71, q_first = 3, width = cache.longest() + 5;
    std::vector<Element> q(size_t(cache.batch) * q_heads * length * HEAD_DIM);
    for (Element &x : q) x = narrow(cache.normal());
    int turn = 0;
    for (const Mask &mask : masks) {
        const int group = turn % 3, first = turn++ % 2 ? q_len - 9 : 0;
        // Every probability in f64, and from these the lse.
        std::vector<float> lse(size_t(cache.batch) * q_heads * q_len), columns(size_t(cache.count()) * width, NAN);
        std::vector<double> wanted(columns.size(), 0.0), unsure(columns.size(), 0.0);
        for (int head = 0; head < cache.batch * q_heads; head++) {
            const int list = head / q_heads * cache.heads + head % q_heads / 2, len = cache.lens[list];
            std::vector<double> of_head(width, 0.0);
            for (int i = 0; i < q_len; i++) {
                // By where tokens stood: some between have left.
                Span seen{0, len};
                if (len && (mask.causal || mask.window)) {
                    const int *stood = &cache.origins[size_t(list) * cache.stride], own = stood[len - 1] - (q_len - 1 - i);
                    seen = {0, 0};
                    for (int j = 0; j < len; j++) seen.end += stood[j] <= own, seen.first += mask.window && stood[j] <= own - mask.window;
                }
                std::vector<double> logits;
                double top = -INFINITY, sum = 0;
                for (int j = seen.first; j < seen.end; j++) {
                    double x = 0;
                    for (int d = 0; d < HEAD_DIM; d++)
                        x += widen(q[(size_t(head) * length + q_first + i) * HEAD_DIM + d]) * plainly::multiplied<KeyFormat>(cache.key(list, j, d));
                    x *= mask.scale;
                    if (mask.softcap > 0) x = mask.softcap * std::tanh(x / mask.softcap);
                    logits.push_back(x), top = std::max(top, x);
                }
                for (double x : logits) sum += std::exp(x - top);
                lse[size_t(head) * q_len + i] = sum > 0 ? float(top + std::log(sum)) : -INFINITY;
                for (int j = seen.first; j < seen.end && i >= first; j++) {
                    const double probability = std::exp(logits[j - seen.first] - top) / sum;
                    const double even = 1.0 / (seen.end - seen.first);
                    if (QUERIES == SUM) of_head[j] += probability;
                    if (QUERIES == MAX) of_head[j] = std::max(of_head[j], probability);
                    if (QUERIES == COUNT_BELOW_EVEN) of_head[j] += probability < even * (1 - 1e-5);
                    // A probability at the bar may be counted or not.
                    if (QUERIES == COUNT_BELOW_EVEN && std::fabs(probability - even) < 2e-5 * even) unsure[list * width + j]++;
                }
            }
            for (int j = 0; j < len; j++) {
                double &all = wanted[list * width + j];
                all = group == 2 ? std::max(all, of_head[j]) : all + of_head[j] / (group == 0 ? 2 : 1);
            }
        }
        Observers o{q.data(), lse.data(), columns.data(), q_heads, q_len, length, q_first, first, q_len, mask.causal, mask.window, width,
                    group, mask.scale, mask.softcap};
#ifdef PLAINLY
        machine::launch({blocks(width, TILE), unsigned(cache.count()), 1}, THREADS, 0, [&] { export_columns(cache.lists, o); });
#else
        const size_t shared = TILE_BYTES + WARPS * STAGES * STAGE_BYTES + WARPS * KEYS * 4;
        machine::launch({blocks(width, KEYS), unsigned(cache.count()), 1}, THREADS, shared, [&] { export_columns(cache.lists, o); });
#endif
        for (int list = 0; list < cache.count(); list++)
            for (int j = 0; j < width; j++) {
                const size_t at = size_t(list) * width + j;
                failed += differs("column", list, j, columns[at], wanted[at], 1e-4 + unsure[at]);
            }
    }
    return failed;
}

} // namespace
