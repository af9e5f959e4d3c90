// kernels/decode.cu, over contiguous tensors (PAGE_TOKENS=0) or pages of so many tokens.
#include "decode.cu"

namespace {

const int WAYS = 4;

// How many splits are merged does not depend on how rows lie, and pages alone are looked up 32 steps at a time.
bool takes(const Case &c) {
    return c.kv_len < 2000 || (c.kv_len < 8000 ? PAGE_TOKENS != 0 : !(KeyFormat::CODED || ValueFormat::CODED));
}

#if PAGE_TOKENS
const int SLAB_PAGES = 3, SHIFT = 2;

std::vector<std::vector<unsigned char>> slabs; // each as large as it must be
std::vector<u64> addresses;
std::vector<u32> table;
Pages in_pages;

// Puts every list into pages in a shuffled order; the rest of a list's last page and unused pages hold NaN.
void into_pages(Tensors &t, const Problem &p, std::mt19937 &random) {
    const int lists = p.batch * p.kv_heads, width = (p.kv_len + PAGE_TOKENS - 1) / PAGE_TOKENS;
    const size_t slab_count = (size_t(lists) * width + 3 + SLAB_PAGES - 1) / SLAB_PAGES, values = SLAB_PAGES * KEY_PAGE_BYTES;
    slabs.assign(slab_count, std::vector<unsigned char>(values + SLAB_PAGES * VALUE_PAGE_BYTES, 0xff));
    addresses.clear(), table.assign(size_t(lists) * width, ~0u);
    for (auto &slab : slabs) addresses.push_back(reinterpret_cast<u64>(slab.data()));
    std::vector<u32> free;
    for (u32 i = 0; i < slab_count * SLAB_PAGES; i++) free.push_back(i / SLAB_PAGES << SHIFT | i % SLAB_PAGES);
    std::shuffle(free.begin(), free.end(), random);
    for (int list = 0; list < lists; list++)
        for (int token = 0; token < t.lens[list]; token++) {
            u32 &page = table[size_t(list) * width + token / PAGE_TOKENS];
            if (token % PAGE_TOKENS == 0) page = free.back(), free.pop_back();
            const size_t at = (page & ((1 << SHIFT) - 1)) * PAGE_TOKENS + token % PAGE_TOKENS;
            const size_t key = list * KeyFormat::list_bytes(p.kv_len) + size_t(token) * KeyFormat::BYTES;
            const size_t value = list * ValueFormat::list_bytes(p.kv_len) + size_t(token) * ValueFormat::BYTES;
            memcpy(&slabs[page >> SHIFT][at * KeyFormat::BYTES], &t.k[key], KeyFormat::BYTES);
            memcpy(&slabs[page >> SHIFT][values + at * ValueFormat::BYTES], &t.v[value], ValueFormat::BYTES);
        }
    // Of every second list tokens have left, and queries see by where the rest stood.
    t.origins.assign(size_t(lists) * p.kv_len, 0);
    for (int list = 0; list < lists; list++)
        for (int token = 0, stood = 0; token < t.lens[list]; token++, stood++) {
            if ((lists - list) % 2) stood += random() % 4 ? 0 : random() % 5;
            t.origins[size_t(list) * p.kv_len + token] = stood;
        }
    in_pages = {addresses.data(), table.data(), t.lens.data(), t.origins.data(), int(slab_count), SLAB_PAGES, SHIFT, PAGE_TOKENS, width, p.kv_len};
}
#endif

void prepare(Tensors &t, Problem &p, std::mt19937 &random) {
    const size_t rows = size_t(p.batch) * p.q_heads * p.q_len;
    // Over the keys that any row of the longest list sees, as kernels/src/attention/cuda/decode.rs plans it.
    const int seen = p.window ? std::min(p.kv_len, p.window + p.q_len - 1 + KEYS - 1) : p.kv_len;
    const int wanted = p.kv_len > 8000 ? 64 : p.kv_len > 2000 ? 4608 : 128;
    p.split_keys = std::max(wanted, WARPS * KEYS), p.splits = int(blocks(seen, p.split_keys));
    t.partials.assign(p.splits * rows * (HEAD_DIM + 2), NAN);
#if PAGE_TOKENS
    for (size_t list = 0; list < t.lens.size(); list++) t.lens[list] = std::max(0, p.kv_len - 61 * int(list));
    into_pages(t, p, random);
#else
    (void)random;
#endif
}

void run(Problem p) {
    const int rows = p.q_heads / p.kv_heads * p.q_len;
    const Dim3 grid{unsigned(p.splits), blocks(rows, ROWS), unsigned(p.batch * p.kv_heads)};
    const Dim3 merge{unsigned(p.batch * p.q_heads * p.q_len), 1, 1};
    const size_t shared_bytes = ROWS * ROW_BYTES + WARPS * RING_BYTES + PLACES_BYTES;
#if PAGE_TOKENS
    p.k = p.v = nullptr;
    machine::launch(grid, THREADS, shared_bytes, [&] { decode_partial(p, in_pages); });
    machine::launch(merge, 32 * MERGE_WARPS, 0, [&] { decode_merge(p, in_pages); });
#else
    machine::launch(grid, THREADS, shared_bytes, [&] { decode_partial(p); });
    machine::launch(merge, 32 * MERGE_WARPS, 0, [&] { decode_merge(p); });
#endif
}

} // namespace
