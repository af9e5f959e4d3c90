// A paged cache in a GPU's memory changes: tokens arrive, those that stay move together, pages move out of slabs that are
// given back, keys are rotated to other positions (kernels/src/cache/cuda/).
//
// Compaction is in place. Slots that stay ascend, so a token never moves back: the slot it goes to is at most the one it
// comes from. One block moves all rows of a list, a batch at a time: it reads a batch into registers, waits for all its
// threads, and writes it. What a batch overwrites lies before everything that later batches read, so that these need not
// wait for it.
//
// Versions
//   1  16 bytes per thread and access where rows allow it. A block for each list and part: few long lists do not fill a
//      GPU. Right on an H100; not timed there.
//   2  Rows of codes (formats.cuh): written by a warp each as tokens arrive, and moved as they lie. A key that turns is
//      widened and written again.
//
// Compile with -DELEMENT=F32|BF16|F16 -DHEAD_DIM=1..256 and the formats of formats.cuh; tokens come as elements.
//   append_tokens   grid (ceil(count / 32), lists), 128 threads; the lists' lengths already count the new tokens
//   keep_slots      grid (lists, 5), 256 threads: keys, values, positions, carried, origins
//   move_pages      grid (pages, 2), 128 threads: keys, values
//   change_table    grid (ceil(count / 256)), 256 threads
//   rotate_keys       grid (ceil(newest / 32), lists), 128 threads
//   rotate_queries    grid (ceil(count / 32), query heads), 128 threads
//   add_columns     grid (ceil(width / 256), lists), 256 threads
//   place_gates     grid (ceil(count / 256), lists), 256 threads; the lists' lengths already count the new tokens
//   take_tokens     grid (ceil(count / 32), heads), 128 threads
//   gather_tokens   grid (ceil(length / 32), lists, 2), 128 threads: keys, values, as they lie
#include "lists.cuh"

// Tokens that come, `count` for each list.
struct Arrival {
    const void *k, *v; // [lists, length, D]
    int length, first; // tokens first..first + count of these
    int count;
    int position;      // of the first of them
};

// Slots that stay.
struct Keeping {
    const u32 *slots;  // [lists, width], ascending
    const int *counts; // [lists]
    int width;
    int unused;        // so that no byte of the struct is padding
};

struct Moves {
    const u32 *from, *to; // numbers of pages
};

// Places of the page table, and the pages that they get.
struct Changes {
    const u32 *places, *pages; // [count]
    int count;
    int unused;
};

// Keys that turn: so many at the end of each list.
struct Rerotation {
    const double *turns_per_token; // [D / 2], of each pair of channels
    int newest;
    int unused;
};

// Queries that turn as far as the lists of re-rotated keys are short of what their sequences have seen.
struct Asking {
    void *q;                       // [B, heads, count, D]
    const double *turns_per_token; // [D / 2]
    int heads, count;
    int seen;                      // tokens; the last query is that of the last one
    int unused;
};

struct Received {
    const float *columns; // [lists, width]
    int width;
    int unused;
};

// Gates that tokens which came decide on: each of the token so many before it.
struct Gating {
    const float *gates; // [count, lists]
    int count;
    int later;
};

// Tokens of a dense tensor that become some of another's.
struct Slice {
    const void *from; // [.., length, D]
    void *to;         // [.., to_length, D]
    int first_head;   // of `from`
    int length, first, count;
    int to_head, to_length, to_first;
    int unused;
};

// The first tokens of all lists as tensors.
struct Gathering {
    void *k, *v; // [lists, length] rows; lists are as far apart as the format says
    int length;  // at most the shortest list
    int unused;
};

namespace {

template <int Bytes> struct Bits;
template <> struct Bits<2> { u16 x; };
template <> struct Bits<4> { u32 x; };
template <> struct alignas(8) Bits<8> { u32 x[2]; };
template <> struct alignas(16) Bits<16> { u32 x[4]; };

// A row in the widest pieces that it is whole numbers of.
template <int RowBytes> struct Units {
    static constexpr int SIZE = RowBytes % 16 == 0 ? 16 : RowBytes % 8 == 0 ? 8 : RowBytes % 4 == 0 ? 4 : 2;
    static constexpr int COUNT = RowBytes / SIZE; // of a row
    using Unit = Bits<SIZE>;
};
using Elements = Units<HEAD_BYTES>;

// Keys, or values: how they lie, and where those of a slot and of a page do.
template <class Format, bool Value> struct Part : Units<Format::BYTES> {
    using Kept = Format;
    using typename Units<Format::BYTES>::Unit;
    DEVICE static unsigned char *row(const Lists &l, int list, int slot) {
        return Value ? value_of_slot(l, list, slot) : key_of_slot(l, list, slot);
    }
    DEVICE static Unit *of_slot(const Lists &l, int list, int slot) { return reinterpret_cast<Unit *>(row(l, list, slot)); }
    DEVICE static Unit *of_page(const Pages &g, u32 page) {
        const u64 first = g.slabs[page >> g.shift] + (Value ? to_values(g, g.page_tokens * KeyFormat::BYTES) : 0);
        const long long index = page & ((1u << g.shift) - 1);
        return reinterpret_cast<Unit *>(first + index * g.page_tokens * Format::BYTES);
    }
};
using Keys = Part<KeyFormat, false>;
using Values = Part<ValueFormat, true>;

// Moves `units` of each row that stays to its place: `place(slot)` is where a slot's row begins.
template <class Bits, int Units, class Place> DEVICE void keep_rows(const u32 *slots, int count, Place place) {
    constexpr int THREADS = 256, EACH = 4;
    const int all = count * Units;
    for (int start = 0; start < all; start += THREADS * EACH) {
        Bits held[EACH] = {}; // without values they spill on sm_100 (NVRTC 13.0)
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int at = start + i * THREADS + threadIdx.x;
            if (at < all) held[i] = place(slots[at / Units])[at % Units];
        }
        block_sync(); // the batch is read
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int at = start + i * THREADS + threadIdx.x;
            if (at < all) place(at / Units)[at % Units] = held[i];
        }
    }
}

// Tokens first..end of those that come, behind the `len` that a list has.
template <class Part> DEVICE void append_part(const Lists &l, const Arrival &a, const void *from, int list, int len, int first, int end) {
    const long long start = (long long)list * a.length + a.first;
    if constexpr (Part::Kept::CODED) {
        for (int token = first + threadIdx.x / 32; token < end; token += 4)
            Part::Kept::write(Part::row(l, list, len + token), [&](int d) { return element<ELEMENT>(from, (start + token) * HEAD_DIM + d); });
    } else {
        for (int at = first * Part::COUNT + threadIdx.x; at < end * Part::COUNT; at += 128) {
            const int token = at / Part::COUNT, unit = at % Part::COUNT;
            Part::of_slot(l, list, len + token)[unit] = static_cast<const typename Part::Unit *>(from)[(start + token) * Part::COUNT + unit];
        }
    }
}

template <class Part> DEVICE void keep_part(const Lists &l, int list, const u32 *slots, int count) {
    keep_rows<typename Part::Unit, Part::COUNT>(slots, count, [&](int slot) { return Part::of_slot(l, list, slot); });
}

template <class Part> DEVICE void move_part(const Pages &g, u32 from, u32 to) {
    const auto *const old = Part::of_page(g, from);
    auto *const now = Part::of_page(g, to);
    for (int i = threadIdx.x; i < g.page_tokens * Part::COUNT; i += 128) now[i] = old[i];
}

template <class Part> DEVICE void gather_part(const Lists &l, int list, void *to, int length, int first, int end) {
    auto *const rows = reinterpret_cast<typename Part::Unit *>(static_cast<unsigned char *>(to) + list * Part::Kept::list_bytes(length));
    for (int at = first * Part::COUNT + threadIdx.x; at < end * Part::COUNT; at += 128)
        rows[at] = Part::of_slot(l, list, at / Part::COUNT)[at % Part::COUNT];
}

// Turns a row of elements by so many positions; a lane has both channels of its pairs.
template <int Element> DEVICE void turn_row(void *row, const double *turns_per_token, int by) {
    for (int pair = threadIdx.x % 32; pair < HEAD_DIM / 2; pair += 32) {
        // In f64, and without whole turns: in f32 the angle of a far token would be off by hundredths.
        const double exact = by * turns_per_token[pair];
        const float turns = float(exact - nearest_whole(exact));
        const float sine = sine_of_turns(turns), cosine = cosine_of_turns(turns);
        const float x = element<Element>(row, pair), y = element<Element>(row, HEAD_DIM / 2 + pair);
        store<Element>(row, pair, x * cosine - y * sine);
        store<Element>(row, HEAD_DIM / 2 + pair, y * cosine + x * sine);
    }
}

// Likewise a key, by way of `wide`, which has room for a row of f32, where it is coded.
DEVICE void turn_key(unsigned char *key, const double *turns_per_token, int by, [[maybe_unused]] float *wide) {
    if constexpr (KeyFormat::CODED) {
        for (int d = threadIdx.x % 32; d < HEAD_DIM; d += 32) wide[d] = KeyFormat::at(key, d);
        warp_sync();
        turn_row<F32>(wide, turns_per_token, by);
        warp_sync();
        KeyFormat::write(key, [&](int d) { return wide[d]; });
    } else {
        turn_row<ELEMENT>(key, turns_per_token, by);
    }
}

} // namespace

KERNEL(128) append_tokens(ARGUMENT Lists l, ARGUMENT Arrival a) {
    const int list = blockIdx.y, len = l.pages.lens[list] - a.count; // before they came
    const int first = blockIdx.x * 32, end = least(first + 32, a.count);
    append_part<Keys>(l, a, a.k, list, len, first, end);
    append_part<Values>(l, a, a.v, list, len, first, end);
    const int token = first + threadIdx.x;
    if (threadIdx.x < 32 && token < end) {
        const long long at = (long long)list * l.stride + len + token;
        l.positions[at] = a.position + token;
        if (l.origins) l.origins[at] = a.position + token;
        if (l.carried) l.carried[at] = 0.0f;
    }
}

KERNEL(256) keep_slots(ARGUMENT Lists l, ARGUMENT Keeping k) {
    const int list = blockIdx.x, part = blockIdx.y, count = k.counts[list];
    if (count == l.pages.lens[list]) return;
    const u32 *const slots = k.slots + (long long)list * k.width;
    if (part == 0) {
        keep_part<Keys>(l, list, slots, count);
    } else if (part == 1) {
        keep_part<Values>(l, list, slots, count);
    } else if (part == 2) {
        keep_rows<int, 1>(slots, count, [&](int slot) { return l.positions + (long long)list * l.stride + slot; });
    } else if (part == 3) {
        if (l.carried) keep_rows<float, 1>(slots, count, [&](int slot) { return l.carried + (long long)list * l.stride + slot; });
    } else {
        if (l.origins) keep_rows<int, 1>(slots, count, [&](int slot) { return l.origins + (long long)list * l.stride + slot; });
    }
}

KERNEL(128) move_pages(ARGUMENT Lists l, ARGUMENT Moves m) {
    const u32 from = m.from[blockIdx.x], to = m.to[blockIdx.x];
    blockIdx.y ? move_part<Values>(l.pages, from, to) : move_part<Keys>(l.pages, from, to);
}

KERNEL(256) change_table(ARGUMENT Lists l, ARGUMENT Changes c) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i < c.count) const_cast<u32 *>(l.pages.table)[c.places[i]] = c.pages[i]; // it is memory that may be written
}

// A warp for each key.
KERNEL(128) rotate_keys(ARGUMENT Lists l, ARGUMENT Rerotation t) {
    __shared__ float wide[4][KeyFormat::CODED ? HEAD_DIM : 1];
    const int list = blockIdx.y, len = l.pages.lens[list], first = most(0, len - t.newest) + blockIdx.x * 32;
    for (int slot = first + threadIdx.x / 32; slot < least(first + 32, len); slot += 4) {
        int *const position = l.positions + (long long)list * l.stride + slot;
        const int by = slot - *position;
        if (by != 0) turn_key(key_of_slot(l, list, slot), t.turns_per_token, by, wide[threadIdx.x / 32]);
        warp_sync(); // all lanes have read the position
        if (threadIdx.x % 32 == 0) *position = slot;
    }
}

// A warp for each query.
KERNEL(128) rotate_queries(ARGUMENT Lists l, ARGUMENT Asking a) {
    const int head = blockIdx.y % a.heads, list = blockIdx.y / a.heads * l.heads + head / (a.heads / l.heads);
    const int by = l.pages.lens[list] - a.seen, end = least((blockIdx.x + 1) * 32, a.count);
    if (by == 0) return;
    for (int query = blockIdx.x * 32 + threadIdx.x / 32; query < end; query += 4) {
        const long long row = (long long)blockIdx.y * a.count + query;
        turn_row<ELEMENT>(static_cast<unsigned char *>(a.q) + row * HEAD_BYTES, a.turns_per_token, by);
    }
}

KERNEL(256) add_columns(ARGUMENT Lists l, ARGUMENT Received r) {
    const int slot = blockIdx.x * 256 + threadIdx.x, list = blockIdx.y;
    if (slot < l.pages.lens[list]) l.carried[(long long)list * l.stride + slot] += r.columns[(long long)list * r.width + slot];
}

KERNEL(256) place_gates(ARGUMENT Lists l, ARGUMENT Gating g) {
    const int list = blockIdx.y, token = blockIdx.x * 256 + threadIdx.x;
    const int slot = l.pages.lens[list] - g.count + token - g.later;
    if (token < g.count && slot >= 0) l.carried[(long long)list * l.stride + slot] = g.gates[(long long)token * gridDim.y + list];
}

KERNEL(128) take_tokens(ARGUMENT Slice s) {
    using Unit = Elements::Unit;
    constexpr int UNITS = Elements::COUNT;
    const int first = blockIdx.x * 32 * UNITS, end = least((blockIdx.x + 1) * 32, s.count) * UNITS;
    const Unit *const from =
        static_cast<const Unit *>(s.from) + ((long long)(s.first_head + blockIdx.y) * s.length + s.first) * UNITS;
    Unit *const to = static_cast<Unit *>(s.to) + ((long long)(s.to_head + blockIdx.y) * s.to_length + s.to_first) * UNITS;
    for (int at = first + threadIdx.x; at < end; at += 128) to[at] = from[at];
}

KERNEL(128) gather_tokens(ARGUMENT Lists l, ARGUMENT Gathering g) {
    const int list = blockIdx.y, first = blockIdx.x * 32, end = least(first + 32, g.length);
    blockIdx.z ? gather_part<Values>(l, list, g.v, g.length, first, end) : gather_part<Keys>(l, list, g.k, g.length, first, end);
}
