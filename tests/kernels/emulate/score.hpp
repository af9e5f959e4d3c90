// kernels/score.cu
#include "score.cu"

namespace {

int failures(Cache &cache) {
    int failed = 0;
    const int count = cache.count(), width = cache.longest();
    std::vector<float> scores(size_t(count) * width, NAN), raw(size_t(count) * blocks(width, ROWS) * HEAD_DIM, NAN);
    const Dim3 grid{blocks(width, ROWS), unsigned(count), 1};
    Scoring s{scores.data(), raw.data(), width, 1000, 0, 1, 0, 1.0f};
    auto run = [&](void (*kernel)(Lists, Scoring)) { machine::launch(grid, THREADS, 0, [&] { kernel(cache.lists, s); }); };
    auto compare = [&](const char *what, auto wanted) {
        for (int list = 0; list < count; list++)
            for (int slot = 0; slot < cache.lens[list]; slot++)
                failed += differs(what, list, slot, scores[list * width + slot], wanted(list, slot), 2e-5);
    };
    auto position = [&](int list, int slot) { return cache.origins[list * cache.stride + slot]; };
    auto norm = [&](int list, int slot, bool value) {
        double sum = 0;
        for (int d = 0; d < HEAD_DIM; d++) sum += std::pow(value ? cache.value(list, slot, d) : cache.key(list, slot, d), 2);
        return std::sqrt(sum);
    };
    run(score_positions);
    compare("position", position);
    run(score_value_norm);
    compare("position times norm", [&](int list, int slot) { return position(list, slot) * norm(list, slot, true); });
    run(score_copy);
    auto received = [&](int list, int slot) { return double(cache.attention[list * cache.stride + slot]); };
    compare("attention", received);
    run(score_age);
    compare("attention by age", [&](int list, int slot) { return received(list, slot) / (1000 - position(list, slot)); });
    run(score_key_norm);
    compare("key norm", [&](int list, int slot) { return -norm(list, slot, false); });
    run(anchor_sum);
    machine::launch(Dim3{unsigned(count), 1, 1}, 1024, 0, [&] { anchor_join(cache.lists, s); });
    run(score_unlike);
    std::vector<std::vector<double>> anchors(count, std::vector<double>(HEAD_DIM, 0.0));
    for (int list = 0; list < count; list++)
        for (int slot = 0; slot < cache.lens[list]; slot++)
            for (int d = 0; d < HEAD_DIM; d++) anchors[list][d] += cache.key(list, slot, d) / norm(list, slot, false);
    compare("unlike", [&](int list, int slot) {
        double inner = 0, squares = 0;
        for (int d = 0; d < HEAD_DIM; d++)
            inner += cache.key(list, slot, d) * anchors[list][d], squares += anchors[list][d] * anchors[list][d];
        return -inner / norm(list, slot, false) / std::sqrt(squares);
    });
    raw.assign(size_t(count) * width, NAN), s.raw = raw.data();
    for (int list = 0; list < count; list++)
        for (int slot = 0; slot < cache.lens[list]; slot++) raw[list * width + slot] = cache.normal();
    for (int is_max = 0; is_max < 2; is_max++) {
        s.behind = 6, s.kernel = 5, s.is_max = is_max, s.divisor = 3;
        run(score_pool);
        compare("pool", [&](int list, int slot) {
            const int judged = std::max(0, cache.lens[list] - 6);
            double all = is_max ? -INFINITY : 0;
            for (int i = std::max(0, slot - 2); i < std::min(judged, slot + 3); i++) {
                const double x = raw[list * width + i] / 3;
                all = is_max ? std::max(all, x) : all + x;
            }
            return slot >= judged ? 0.0 : is_max ? all : all / 5;
        });
    }
    // Lists of one sequence are equally long where heads share their scores.
    std::vector<int> &lens = cache.lens;
    for (int list = 0; list < count; list++)
        lens[list] = *std::min_element(&lens[list / cache.heads * cache.heads], &lens[list / cache.heads * cache.heads] + cache.heads);
    run(score_over_heads);
    compare("mean over heads", [&](int list, int slot) {
        double sum = 0;
        for (int head = 0; head < cache.heads; head++) sum += raw[(list / cache.heads * cache.heads + head) * width + slot];
        return sum / cache.heads;
    });
    return failed;
}

} // namespace
