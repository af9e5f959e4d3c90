// Runs a family of the kernels of eviction policies on the CPU, over paged lists of different lengths, and compares what
// they write with the same thing done plainly in f64 or, where it is exact, in whole numbers.
//
// Compiled once for each variant by run.py, as emulate.cpp is; FAMILY says `int failures(Cache &)`, called for each
// cache below and each schedule. Pages lie in a shuffled order in slabs; the rest of every page and pages that no list
// has hold NaN. Exit status 1 when something is wrong.
#define KVSIEVE_EMULATE
#include "formats.hpp"
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
    static constexpr int SLAB_PAGES = 5, SHIFT = 3, BYTES[] = {KeyFormat::BYTES, ValueFormat::BYTES};
    int batch, heads, page_tokens, stride;
    std::vector<int> lens, positions, origins; // tokens came 1000 positions before where their keys stand
    std::vector<u32> pages, free;             // of each list, and those that no list has
    std::vector<std::vector<unsigned char>> slabs;
    std::vector<u64> addresses;
    std::vector<float> attention;
    std::vector<std::vector<unsigned char>> rows[2]; // keys and values of each list, as they lie
    std::mt19937 random{11};
    Lists lists{};

    int count() const { return batch * heads; }
    int longest() const { return *std::max_element(lens.begin(), lens.end()); }
    int width() const { return (stride + page_tokens - 1) / page_tokens; }
    float normal(float spread = 1) { return std::normal_distribution<float>(0, spread)(random); }

    Cache(int batch, int heads, int page_tokens, int stride, std::vector<int> lens)
        : batch(batch), heads(heads), page_tokens(page_tokens), stride(stride), lens(lens) {
        for (int slab = 0; slab * SLAB_PAGES < count() * width() + 2; slab++) {
            slabs.emplace_back(size_t(SLAB_PAGES) * page_tokens * (BYTES[0] + BYTES[1]), 0xff);
            for (int page = 0; page < SLAB_PAGES; page++) free.push_back(u32(slab << SHIFT | page));
        }
        for (auto &slab : slabs) addresses.push_back(reinterpret_cast<u64>(slab.data()));
        std::shuffle(free.begin(), free.end(), random);
        pages.assign(size_t(count()) * width(), 1u << 28);
        positions.assign(size_t(count()) * stride, -7), origins = positions, attention.assign(size_t(count()) * stride, NAN);
        for (int list = 0; list < count(); list++) {
            rows[0].emplace_back(), rows[1].emplace_back();
            for (int page = 0; page < width(); page++) pages[list * width() + page] = free.back(), free.pop_back();
            int position = 0;
            for (int slot = 0; slot < lens[list]; slot++) {
                std::vector<float> key(HEAD_DIM), value(HEAD_DIM);
                for (int d = 0; d < HEAD_DIM; d++) key[d] = widen(narrow(normal())), value[d] = widen(narrow(normal()));
                push(list, key.data(), value.data());
                for (int part : {0, 1}) memcpy(row(list, slot, part), wanted(list, slot, part), BYTES[part]);
                positions[list * stride + slot] = position + 1000, origins[list * stride + slot] = position, position += 1 + random() % 3;
                attention[list * stride + slot] = std::fabs(normal());
            }
        }
        tie();
    }
    Cache(const Cache &other) = delete;

    // A key and a value that a list is meant to have behind its last.
    void push(int list, const float *key, const float *value) {
        const std::vector<unsigned char> both[] = {plainly::encode(KeyFormat{}, key), plainly::encode(ValueFormat{}, value)};
        for (int part : {0, 1}) rows[part][list].insert(rows[part][list].end(), both[part].begin(), both[part].end());
    }
    // The row of a slot as it is meant to be.
    const unsigned char *wanted(int list, int slot, int part) const { return &rows[part][list][size_t(slot) * BYTES[part]]; }
    // The row of a slot as it lies in its slab.
    unsigned char *row(int list, int slot, int part) {
        const u32 page = pages[list * width() + slot / page_tokens];
        const size_t index = (page & ((1 << SHIFT) - 1)) * page_tokens + slot % page_tokens;
        return &slabs[page >> SHIFT][part * (size_t(SLAB_PAGES) * page_tokens * BYTES[0]) + index * BYTES[part]];
    }
    void tie() {
        lists.pages = {addresses.data(), pages.data(), lens.data(), origins.data(), int(slabs.size()), SLAB_PAGES, SHIFT, page_tokens, width(), stride};
        lists.positions = positions.data(), lists.origins = origins.data(), lists.carried = attention.data(), lists.heads = heads, lists.stride = stride;
    }
    double key(int list, int slot, int d) const { return plainly::decode(KeyFormat{}, wanted(list, slot, 0), d); }
    double value(int list, int slot, int d) const { return plainly::decode(ValueFormat{}, wanted(list, slot, 1), d); }
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
        {1, 1, 16, 700, {690}},
    };
    int failed = 0, runs = 0;
    for (const auto &c : caches)
        for (int way = 0; way < 4; way++) {
            machine::schedule = {(way & 1) != 0, way >= 2, false};
            const bool coded = KeyFormat::CODED || ValueFormat::CODED; // their pages are eights of tokens
            Cache cache(c.batch, c.heads, coded ? (c.page_tokens + 7) / 8 * 8 : c.page_tokens, c.stride, c.lens);
            failed += failures(cache), runs++;
        }
    printf("%d runs, %d numbers wrong\n", runs, failed);
    return failed != 0;
}
