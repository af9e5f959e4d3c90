// Runs a family of the kernels of eviction policies on the CPU, over paged lists of different lengths, and compares what
// they write with the same thing done plainly in f64 or, where it is exact, in whole numbers.
//
// Compiled once for each variant by run.py, as emulate.cpp is; FAMILY says `int failures(Cache &)`, called for each
// cache below and each schedule. Pages lie in a shuffled order, some in front of page 0; the rest of every page and
// pages that no list has hold NaN. Exit status 1 when something is wrong.
#define KVSIEVE_EMULATE
#include "lists.cuh"

#include <algorithm>
#include <random>

namespace {

using Element = std::conditional_t<ELEMENT == F32, float, u16>;

float widen(Element x) {
    if constexpr (ELEMENT == F32)
        return x;
    else
        return machine::widen<ELEMENT>(x);
}

Element narrow(float x) {
    if constexpr (ELEMENT == F32)
        return x;
    else
        return machine::round_to<ELEMENT>(x);
}

// A cache with its lists as they are meant to be.
struct Cache {
    int batch, heads, page_tokens, stride;
    std::vector<int> lens, pages, positions;
    std::vector<Element> k, v; // pools; page 0 is the fourth
    std::vector<float> attention;
    std::vector<std::vector<Element>> keys, values; // of each list
    std::mt19937 random{11};
    Lists lists{};

    int count() const { return batch * heads; }
    int longest() const { return *std::max_element(lens.begin(), lens.end()); }
    int width() const { return (stride + page_tokens - 1) / page_tokens; }
    float normal(float spread = 1) { return std::normal_distribution<float>(0, spread)(random); }

    Cache(int batch, int heads, int page_tokens, int stride, std::vector<int> lens)
        : batch(batch), heads(heads), page_tokens(page_tokens), stride(stride), lens(lens) {
        const int all = count() * width() + 7;
        std::vector<int> free(all);
        for (int i = 0; i < all; i++) free[i] = i - 3;
        std::shuffle(free.begin(), free.end(), random);
        const Element nan = ELEMENT == F32 ? Element(NAN) : Element(0x7fff);
        k.assign(size_t(all) * page_tokens * HEAD_DIM, nan), v = k;
        pages.assign(size_t(count()) * width(), 1 << 28);
        positions.assign(size_t(count()) * stride, -7), attention.assign(size_t(count()) * stride, NAN);
        for (int list = 0; list < count(); list++) {
            keys.emplace_back(), values.emplace_back();
            for (int page = 0; page < width(); page++) pages[list * width() + page] = free.back(), free.pop_back();
            int position = 0;
            for (int slot = 0; slot < lens[list]; slot++) {
                for (int d = 0; d < HEAD_DIM; d++) {
                    keys[list].push_back(narrow(normal())), values[list].push_back(narrow(normal()));
                    k[at(list, slot) + d] = keys[list].back(), v[at(list, slot) + d] = values[list].back();
                }
                positions[list * stride + slot] = position, position += 1 + random() % 3;
                attention[list * stride + slot] = std::fabs(normal());
            }
        }
        tie();
    }
    Cache(const Cache &other) = delete;

    // Where the row of a slot begins in the pools.
    size_t at(int list, int slot) const {
        return (size_t(pages[list * width() + slot / page_tokens] + 3) * page_tokens + slot % page_tokens) * HEAD_DIM;
    }
    void tie() {
        const size_t zero = size_t(3) * page_tokens * HEAD_DIM;
        lists = {k.data() + zero, v.data() + zero, pages.data(), lens.data(), positions.data(), attention.data(),
                 heads, stride, page_tokens, width()};
    }
    double key(int list, int slot, int d) const { return widen(keys[list][size_t(slot) * HEAD_DIM + d]); }
    double value(int list, int slot, int d) const { return widen(values[list][size_t(slot) * HEAD_DIM + d]); }
};

unsigned blocks(size_t of, int size) { return unsigned((of + size - 1) / size); }

// Says what is wrong, the first times.
int wrong(const char *what, int list, int slot, double found, double wanted) {
    static int said;
    if (said++ < 8) printf("  WRONG %s: list %d, slot %d: %.7g, wanted %.7g\n", what, list, slot, found, wanted);
    return 1;
}

int differs(const char *what, int list, int slot, double found, double wanted, double allowed) {
    bool good = found == wanted || std::fabs(found - wanted) <= allowed * (1 + std::fabs(wanted));
    return good ? 0 : wrong(what, list, slot, found, wanted);
}

} // namespace

#include FAMILY

int main() {
    const struct {
        int batch, heads, page_tokens, stride;
        std::vector<int> lens;
    } caches[] = {
        {1, 1, 16, 1, {1}},
        {1, 2, 16, 70, {70, 3}},
        {2, 2, 10, 200, {200, 129, 64, 65}},
        {1, 3, 1, 40, {17, 40, 0}},
    };
    int failed = 0, runs = 0;
    for (const auto &c : caches)
        for (int way = 0; way < 4; way++) {
            machine::schedule = {(way & 1) != 0, (way & 2) != 0};
            Cache cache(c.batch, c.heads, c.page_tokens, c.stride, c.lens);
            failed += failures(cache), runs++;
        }
    printf("%d runs, %d numbers wrong\n", runs, failed);
    return failed != 0;
}
