// Keys and values in pages, one list of pages for each KV head: the layout of kernels/src/cache on a GPU.
//
// kernels/src/device/cuda/pages.rs has the same fields in the same order. A slab is [slab_pages, page_tokens] rows of keys, and
// behind them as many of values; rows have the bytes of their formats (formats.cuh). The number
// of a page is that of its slab above `shift` bits and its index in the slab in these, as in the cache of the CPU.
#pragma once
#include "problem.cuh"

struct Pages {
    const u64 *slabs;  // [slab_count], where each slab begins; 0: it is not there
    const u32 *table;  // [lists, table_width], the pages of each list in order
    const int *lens;   // [lists], tokens of each list
    const int *origins; // [lists, stride], where each token stood in its sequence
    int slab_count, slab_pages, shift, page_tokens, table_width;
    int stride;        // tokens that one list can hold
};

// The number of page `index` of a list.
DEVICE u32 page_of(const Pages &g, long long list, int index) { return g.table[list * g.table_width + index]; }

// Where the keys of a page begin. Whatever the number, it is a page of some slab.
DEVICE const unsigned char *keys_of(const Pages &g, u32 page, int page_bytes) {
    const u32 slab = least(page >> g.shift, g.slab_count - 1), at = least(page & ((1u << g.shift) - 1), g.slab_pages - 1);
    return reinterpret_cast<const unsigned char *>(g.slabs[slab]) + (long long)at * page_bytes;
}

// How far behind the keys of a page its values lie, in bytes, where these take as many.
DEVICE long long to_values(const Pages &g, int page_bytes) { return (long long)g.slab_pages * page_bytes; }

// Where the values of a page begin.
DEVICE const unsigned char *values_of(const Pages &g, u32 page, int key_bytes, int value_bytes) {
    const unsigned char *const keys = keys_of(g, page, key_bytes);
    if (key_bytes == value_bytes) return keys + to_values(g, key_bytes);
    const u32 at = least(page & ((1u << g.shift) - 1), g.slab_pages - 1);
    return keys + to_values(g, key_bytes) + (long long)at * (value_bytes - key_bytes);
}

// Where the keys, and the values, of page `index` of a list begin.
DEVICE const unsigned char *page_keys(const Pages &g, long long list, int index, int page_bytes) {
    return keys_of(g, page_of(g, list, index), page_bytes);
}
DEVICE const unsigned char *page_values(const Pages &g, long long list, int index, int key_bytes, int value_bytes) {
    return values_of(g, page_of(g, list, index), key_bytes, value_bytes);
}

// Which keys of a list queries see: as `visible` says where none of the latest tokens is missing, and by where tokens stood in
// their sequence where some have left (`Sight` in the crate).
struct Sight {
    const int *origins;
    int len, last; // tokens, and where the last of them stood
    bool is_dense;

    // `farthest`: the farthest place behind the last token that is asked for. At 0 nothing is read.
    DEVICE Sight(const Pages &g, long long list, int len, int farthest)
        : origins(g.origins + list * g.stride), len(len), last(0), is_dense(!len || !farthest) {
        if (is_dense) return;
        last = origins[len - 1];
        is_dense = farthest < len ? origins[len - 1 - farthest] == last - farthest : last == len - 1;
    }

    // Tokens that stood `behind` or more places before the last one.
    DEVICE int before(int behind) const {
        int low = 0, high = len;
        while (low < high) {
            const int middle = (low + high) / 2;
            if (origins[middle] <= last - behind) low = middle + 1;
            else high = middle;
        }
        return low;
    }
    DEVICE Span of(const Problem &p, int query) const {
        if (is_dense) return visible(p, query, len);
        if (!p.causal && !p.window) return {0, len};
        const int behind = p.q_len - 1 - query;
        return {p.window ? before(behind + p.window) : 0, before(behind)};
    }
};

// What queries see of a list of `len` tokens.
DEVICE Sight sight_of(const Pages &g, const Problem &p, long long list, int len) {
    return {g, list, len, p.q_len - 1 + p.window};
}
