// The cached tokens of each (sequence, KV head), in pages: what the kernels of eviction policies read and change.
//
// kernels/src/device/cuda/lists.rs has the same structs with the same fields. A list's page `i` holds its slots from
// `i * page_tokens` on (pages.cuh).
#pragma once
#include "formats.cuh"
#include "pages.cuh"

struct Lists {
    Pages pages;
    int *positions;    // [lists, stride]: where the key of each token stands
    int *origins;      // [lists, stride]: where each token stood in its sequence; null: there its key stands
    float *carried;    // [lists, stride]: attention that each token received so far, or its gate; null: not kept
    int heads;         // Hkv
    int stride;        // tokens that one list can hold
};

// Queries that have seen the lists, and how the probabilities that they give a key become one number.
struct Observers {
    const void *q;    // [B, Hq, length, D], of which q_len from q_first on are the queries
    const float *lse; // [B, Hq, q_len], natural logarithm
    float *columns;   // [lists, width]
    int q_heads, q_len;
    int length, q_first;
    int first, end;   // the queries that are asked, of 0..q_len
    int causal, window;
    int width;        // at least the longest list; entries past the end of a list become 0
    int group;        // over the query heads of a KV head: 0 mean, 1 sum, 2 largest
    float scale, softcap;
};

// The key of a slot, and its value.
DEVICE unsigned char *key_of_slot(const Lists &l, int list, int slot) {
    const Pages &g = l.pages;
    const unsigned char *page = page_keys(g, list, slot / g.page_tokens, g.page_tokens * KeyFormat::BYTES);
    return const_cast<unsigned char *>(page + slot % g.page_tokens * KeyFormat::BYTES); // slabs may be written
}
DEVICE unsigned char *value_of_slot(const Lists &l, int list, int slot) {
    const Pages &g = l.pages;
    const int key_bytes = g.page_tokens * KeyFormat::BYTES, value_bytes = g.page_tokens * ValueFormat::BYTES;
    const unsigned char *page = page_values(g, list, slot / g.page_tokens, key_bytes, value_bytes);
    return const_cast<unsigned char *>(page + slot % g.page_tokens * ValueFormat::BYTES);
}

// Where a token stood in its sequence.
DEVICE int origin_of(const Lists &l, int list, int slot) { return l.pages.origins[(long long)list * l.stride + slot]; }

// What `visible` and `Logits` ask of a problem.
DEVICE Problem problem_of(const Observers &o) {
    Problem p{};
    p.q_len = o.q_len, p.causal = o.causal, p.window = o.window, p.scale = o.scale, p.softcap = o.softcap;
    return p;
}

// The asked queries that can see one of the `count` keys from `key0` on.
DEVICE Span observers_of(const Observers &o, const Sight &sight, int key0, int count) {
    Span rows = {o.first, o.end};
    if (!sight.is_dense) return rows;
    if (o.causal || o.window) rows.first = most(rows.first, key0 + o.q_len - sight.len);
    if (o.window) rows.end = least(rows.end, key0 + count + o.window - 1 + o.q_len - sight.len);
    return rows;
}

// Reductions over queries, as the macro QUERIES names them.
#define SUM 0
#define MAX 1
#define COUNT_BELOW_EVEN 2

// Less than an even share of a query's attention, by more than rounding.
// `shift` is the query's log-sum-exp to base 2, which was rounded.
DEVICE float even_share(const Span &seen, float shift) {
    const float rounding = 1e-5f + (LN_2 / (1 << 22)) * larger(shift, -shift);
    return (1.0f - rounding) / float(most(1, seen.end - seen.first));
}

// Takes the probability `p` that a query which sees the key gives it into `part`.
template <int Queries> DEVICE void take_in(float &part, float p, float even) {
    if constexpr (Queries == SUM) part += p;
    if constexpr (Queries == MAX) part = larger(part, p);
    if constexpr (Queries == COUNT_BELOW_EVEN) part += p < even ? 1.0f : 0.0f;
}

template <int Queries> DEVICE float join_parts(float a, float b) { return Queries == MAX ? larger(a, b) : a + b; }

DEVICE float join_heads(const Observers &o, float all, float of_head) { return o.group == 2 ? larger(all, of_head) : all + of_head; }
