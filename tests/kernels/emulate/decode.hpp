// kernels/decode.cu, over contiguous tensors (PAGED=0) or pages (PAGED=1).
#include "decode.cu"

namespace {

const int WAYS = 4;

bool takes(const Case &) { return true; }

// Puts every list into pages in a shuffled order; the rest of a list's last page and unused pages hold NaN.
void into_pages(Tensors &t, const Problem &p, std::mt19937 &random) {
    const int lists = p.batch * p.kv_heads, count = lists * p.table_width + 3;
    std::vector<int> free(count);
    for (int i = 0; i < count; i++) free[i] = i;
    std::shuffle(free.begin(), free.end(), random);
    std::vector<u16> k(size_t(count) * p.page_tokens * HEAD_DIM, 0x7fff), v = k;
    for (int list = 0; list < lists; list++)
        for (int token = 0; token < t.lens[list]; token++) {
            if (token % p.page_tokens == 0) {
                t.pages[list * p.table_width + token / p.page_tokens] = free.back();
                free.pop_back();
            }
            size_t page = t.pages[list * p.table_width + token / p.page_tokens];
            size_t to = (page * p.page_tokens + token % p.page_tokens) * HEAD_DIM;
            size_t from = (size_t(list) * p.kv_len + token) * HEAD_DIM;
            std::copy_n(&t.k[from], HEAD_DIM, &k[to]);
            std::copy_n(&t.v[from], HEAD_DIM, &v[to]);
        }
    t.k.swap(k), t.v.swap(v);
}

void prepare(Tensors &t, Problem &p, std::mt19937 &random) {
    const size_t lists = size_t(p.batch) * p.kv_heads, rows = size_t(p.batch) * p.q_heads * p.q_len;
    p.split_keys = 128, p.splits = (p.kv_len + 127) / 128;
    t.partials.assign(p.splits * rows * (HEAD_DIM + 2), NAN);
    if (!PAGED) return;
    for (size_t list = 0; list < lists; list++) t.lens[list] = std::max(0, p.kv_len - 61 * int(list));
    p.page_tokens = p.kv_len % 2 ? 16 : 10;
    p.table_width = (p.kv_len + p.page_tokens - 1) / p.page_tokens;
    t.pages.assign(lists * p.table_width, 1 << 30);
    into_pages(t, p, random);
}

void run(const Problem &p) {
    const int rows = p.q_heads / p.kv_heads * p.q_len;
    machine::launch({unsigned(p.splits), blocks(rows, ROWS), unsigned(p.batch * p.kv_heads)}, THREADS,
                    ROWS * ROW_BYTES + WARPS * RING_BYTES, [&] { decode_partial(p); });
    machine::launch({blocks(size_t(p.batch) * p.q_heads * p.q_len, WARPS), 1, 1}, THREADS, 0, [&] { decode_merge(p); });
}

} // namespace
