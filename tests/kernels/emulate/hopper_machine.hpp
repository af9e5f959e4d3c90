// What kernels/hopper.cuh declares, on one CPU thread: barriers that count bytes, TMA, and wgmma.
//
// Two things that a GPU leaves open are run both ways (`Schedule::copy_early`): either a box is written when somebody
// waits for it in vain, the latest that a waiting thread can tell, and products are computed when they are sent off; or a
// box is written at once and products are computed when they are waited for, with accumulators that are NaN meanwhile.
// The first finds a missing wait for a copy, the second memory or registers that were given away while a product still
// read them. The four warps of a warpgroup compute their 16 rows of a product each for itself, at their own time: who
// releases memory for all must have waited for all.
//
// Addresses are those of the descriptor: start, strides and swizzle are decoded from its bits as the head of
// matrix_at() says, and checked. That layout, the order of elements in registers, and that the swizzle of TMA and of wgmma
// is an exclusive or of address bits 4-6 with 7-9, are what kernel and emulation share: a mistake there is not found here.
// What store_matrices() writes must be fenced by the threads that wrote it before a product reads it.
#pragma once

#include <map>

#define KERNEL_ALONE(threads) KERNEL(threads)
#define SWIZZLED_SHARED(name) DYNAMIC_SHARED(name)

namespace machine {

[[noreturn]] inline void refuse(Fault fault, const char *what) {
    fprintf(stderr, "%s (block %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
    stop(fault);
    abort();
}

// A box on its way.
struct Box {
    u32 shared;
    TensorMap map;
    int start[3];
};

struct Barrier {
    int arrivals = 0, missing = 0; // of a phase; what is still to come of this one
    long bytes = 0;                // that are still to be copied in this phase
    u32 phase = 0;
    std::vector<Box> boxes;        // not copied yet
};

// A product that was sent off and not computed yet.
struct Product {
    u64 a, b;          // `a` is not used where the left operand is in registers
    bool in_registers, add;
    bool transposed;   // both operands MN-major in shared memory
    bool first;        // of those under way that go to `d`; the others add to what it leaves there
    int count;         // accumulators of a lane
    float *d[32];
    std::vector<float> before[32]; // of d, which is NaN meanwhile
    const u32 *left[32];
};

struct WarpProducts {
    std::vector<std::vector<Product>> groups; // the last one is open
    Product next;
    u64 sent = 0, sum = 0; // how many, and a sum over what: the same for the four warps
};

struct Turn {
    int arrived = 0;
    unsigned generation = 0;
};

inline std::map<u32, Barrier> barriers;
inline std::vector<WarpProducts> products;
inline Turn turns[16];
// Words of shared memory that store_matrices() wrote and that are not fenced yet: of each thread, and of all.
inline std::vector<std::vector<u32>> unfenced;
inline std::vector<bool> is_unfenced;

inline void start_hopper_block() {
    unfenced.assign(fibers.size(), {});
    is_unfenced.assign(shared_bytes / 4 + 1, false);
    barriers.clear();
    products.assign(warps.size(), {});
    for (WarpProducts &warp : products) warp.groups.resize(1);
    for (Turn &turn : turns) turn = {};
}

inline void end_hopper_block() {
    for (const auto &[address, barrier] : barriers)
        if (barrier.bytes || !barrier.boxes.empty()) refuse(Fault::failed, "a block ended with copies under way");
    for (size_t i = 0; i < products.size(); i++) {
        const WarpProducts &warp = products[i], &first = products[i / 4 * 4];
        if (warp.sent != first.sent || warp.sum != first.sum) refuse(Fault::failed, "the warps of a warpgroup sent off different products");
        for (const auto &group : warp.groups)
            if (!group.empty()) refuse(Fault::failed, "a block ended with products that nobody waited for");
    }
}
inline const bool hopper_hooks = (on_block_start.push_back(start_hopper_block), on_block_end.push_back(end_hopper_block), true);

inline Barrier &barrier_at(u32 address) {
    auto found = barriers.find(address);
    if (found == barriers.end()) refuse(Fault::illegal_address, "no mbarrier was made there");
    return found->second;
}

inline void end_phase_if_done(Barrier &barrier) {
    if (barrier.missing > 0 || barrier.bytes != 0) return;
    barrier.missing = barrier.arrivals;
    barrier.phase++;
    meetings++;
}

inline void arrive(Barrier &barrier, long bytes) {
    if (barrier.missing <= 0) refuse(Fault::failed, "more threads arrive at an mbarrier than it was made for");
    barrier.bytes += bytes;
    barrier.missing--;
    meetings++;
    end_phase_if_done(barrier);
}

// Rows of the box one after another; the 16-byte chunk of an address is swizzled by its bits 7-9.
inline void write(const Box &box, Barrier &barrier) {
    const TensorMap &map = box.map;
    const u32 row_bytes = map.box[0] * map.element_bytes;
    if (memcmp(map.mark, "tile", 4) != 0 || map.rank != 3 || map.swizzle != 3 || row_bytes != 128) refuse(Fault::failed, "TMA: not a map of 3 dimensions with rows of 128 bytes and that swizzle");
    if (box.shared % 1024) refuse(Fault::misaligned_address, "TMA: the target is no multiple of 1024");
    u32 at = box.shared;
    for (int z = 0; z < map.box[2]; z++)
        for (int y = 0; y < map.box[1]; y++)
            for (u32 byte = 0; byte < row_bytes; byte++, at++) {
                const uint64_t x = box.start[0] + byte / map.element_bytes, row = box.start[1] + y, list = box.start[2] + z;
                const bool inside = x < map.lengths[0] && row < map.lengths[1] && list < map.lengths[2];
                const uint64_t from = map.address + list * map.strides[1] + row * map.strides[0] + box.start[0] * map.element_bytes + byte;
                shared[at ^ (at >> 7 & 7) << 4] = inside ? *reinterpret_cast<const unsigned char *>(from) : 0;
            }
    barrier.bytes -= long(row_bytes) * map.box[1] * map.box[2];
    meetings++;
}

inline u16 shared_u16(u32 address) {
    u16 bits;
    const u32 at = address ^ (address >> 7 & 7) << 4;
    if (at + 2 > shared_bytes) refuse(Fault::illegal_address, "wgmma reads past the end of shared memory");
    if (is_unfenced[at / 4]) refuse(Fault::failed, "wgmma reads what was written without a fence");
    memcpy(&bits, shared.get() + at, 2);
    return bits;
}

struct Operand {
    u32 start, leading, stride;
    explicit Operand(u64 bits) : start(u32(bits & 0x3fff) << 4), leading(u32(bits >> 16 & 0x3fff) << 4), stride(u32(bits >> 32 & 0x3fff) << 4) {
        if (bits >> 62 != 1 || (bits >> 46 & 0xffff)) refuse(Fault::failed, "wgmma: a descriptor without the 128-byte swizzle, or with an offset");
        if (start % 1024 >= 128) refuse(Fault::failed, "wgmma: an operand does not start in the first row of the swizzle's pattern");
    }
    u32 k_major(int row, int k) const { return start + row / 8 * stride + row % 8 * 128 + 2 * k; }
    u32 mn_major(int k, int column) const { return start + column / 64 * leading + k / 8 * stride + k % 8 * 128 + column % 64 * 2; }
};

// One warp's rows of a product.
inline void compute(const Product &product, int warp) {
    const int columns = 2 * product.count;
    float left[16][16];
    static float right[16][256];
    const Operand b(product.b);
    const bool mn_major = product.in_registers || product.transposed;
    if ((mn_major && b.start % 1024) || (product.transposed && Operand(product.a).start % 1024))
        refuse(Fault::failed, "wgmma: an MN-major operand does not start where the pattern does");
    if (product.in_registers) {
        for (int lane = 0; lane < 32; lane++)
            for (int r = 0; r < 4; r++)
                for (int e = 0; e < 2; e++)
                    left[lane / 4 + 8 * (r & 1)][lane % 4 * 2 + 8 * (r >> 1) + e] = widen<ELEMENT>(u16(product.left[lane][r] >> 16 * e));
    } else {
        const Operand a(product.a);
        for (int row = 0; row < 16; row++)
            for (int k = 0; k < 16; k++) {
                const int m = 16 * (warp % 4) + row;
                left[row][k] = (NEGATIVE ? -1.0f : 1.0f) * widen<ELEMENT>(shared_u16(product.transposed ? a.mn_major(k, m) : a.k_major(m, k)));
            }
    }
    for (int k = 0; k < 16; k++)
        for (int column = 0; column < columns; column++)
            right[k][column] = widen<ELEMENT>(shared_u16(mn_major ? b.mn_major(k, column) : b.k_major(column, k)));
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < product.count; i++) {
            const int row = lane / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + lane % 4 * 2 + i % 2;
            float x = !product.add ? 0.0f : product.first ? product.before[lane][i] : product.d[lane][i];
            for (int k = 0; k < 16; k++) x += left[row][k] * right[k][column];
            product.d[lane][i] = x;
        }
}

inline WarpProducts &warp_products() { return products[current / 32]; }

// All lanes of a warp send off a product.
inline void send(float *d, int count, const u32 *left, u64 a, u64 b, bool add, bool transposed = false) {
    const int warp_number = current / 32;
    WarpProducts &mine = warp_products();
    Product &next = mine.next;
    if (warp().meeting.arrived == 0)
        next.a = a, next.b = b, next.in_registers = left, next.add = add, next.count = count, next.transposed = transposed;
    else if (next.a != a || next.b != b || next.add != add || next.count != count || next.transposed != transposed)
        refuse(Fault::failed, "wgmma: lanes of a warp name different operands");
    next.d[lane()] = d, next.left[lane()] = left;
    meet(warp().meeting, 32, [&] {
        mine.sent++;
        mine.sum = mine.sum * 31 + b + (add ? 7 : 3); // `a` in shared memory is the warpgroup's too
        next.first = true;
        for (const auto &group : mine.groups)
            for (const Product &other : group) next.first &= other.d[0] != next.d[0];
        mine.groups.back().push_back(next);
        Product &sent = mine.groups.back().back();
        for (int i = 0; i < 32; i++) {
            sent.before[i].assign(sent.d[i], sent.d[i] + count);
            if (schedule.copy_early) std::fill(sent.d[i], sent.d[i] + count, NAN);
        }
        if (!schedule.copy_early) {
            compute(sent, warp_number);
            mine.groups.back().pop_back();
        }
    });
}

} // namespace machine

template <int Count> void keep_registers() {}
template <int Count> void take_registers() {}

inline void barrier_make(u32 barrier, u32 arrivals) {
    using namespace machine;
    if (barrier % 8 || barrier + 8 > shared_bytes) refuse(Fault::misaligned_address, "an mbarrier outside shared memory or not at a multiple of 8");
    barriers[barrier] = {int(arrivals), int(arrivals), 0, 0, {}};
}
inline void barriers_made() {}
inline void barrier_arrive(u32 barrier) { machine::arrive(machine::barrier_at(barrier), 0); }
inline void barrier_expect(u32 barrier, u32 bytes) { machine::arrive(machine::barrier_at(barrier), bytes); }

inline void barrier_wait(u32 address, u32 parity) {
    using namespace machine;
    Barrier &barrier = barrier_at(address);
    while ((barrier.phase & 1) == parity) {
        const int me = current;
        switch_stack(&fibers[me].sp, scheduler);
        if ((barrier.phase & 1) != parity) break;
        for (const Box &box : barrier.boxes) write(box, barrier);
        barrier.boxes.clear();
        end_phase_if_done(barrier);
    }
}

inline void copy_box(u32 shared, const TensorMap &map, u32 address, int column, int row, int list) {
    using namespace machine;
    Barrier &barrier = barrier_at(address);
    Box box{shared, {}, {column, row, list}};
    memcpy(&box.map, &map, sizeof map);
    if (!schedule.copy_early) return barrier.boxes.push_back(box);
    write(box, barrier);
    end_phase_if_done(barrier);
}

inline void turn_pass(int name, int threads) {
    using namespace machine;
    Turn &turn = turns[name];
    meetings++;
    if (++turn.arrived < threads) return;
    turn.arrived = 0;
    turn.generation++;
}

inline void turn_wait(int name, int threads) {
    using namespace machine;
    const unsigned generation = turns[name].generation;
    turn_pass(name, threads);
    while (turns[name].generation == generation) {
        const int me = current;
        switch_stack(&fibers[me].sp, scheduler);
    }
}

#define GLOBAL_COUNTER(name) u32 name
inline u32 count_round(u32 *counter, u32 last) {
    const u32 before = *counter;
    *counter = before >= last ? 0 : before + 1;
    return before;
}


inline u32 shuffle_xor(u32 x, int mask) {
    u32 y;
    machine::together([&](machine::Warp &w, int lane) { w.address[lane] = x; }, [](machine::Warp &) {},
                      [&](machine::Warp &w, int lane) { y = w.address[lane ^ mask]; });
    return y;
}
inline int shuffle_from(int x, int from) {
    int y;
    machine::together([&](machine::Warp &w, int lane) { w.address[lane] = u32(x); }, [](machine::Warp &) {},
                      [&](machine::Warp &w, int) { y = int(w.address[from]); });
    return y;
}

inline void product_fence() {}
inline void product_commit() {
    machine::together([](machine::Warp &, int) {}, [](machine::Warp &) { machine::warp_products().groups.emplace_back(); },
                      [](machine::Warp &, int) {});
}
template <int Pending> void product_wait() {
    machine::together([](machine::Warp &, int) {},
                      [](machine::Warp &) {
                          auto &groups = machine::warp_products().groups;
                          while (groups.size() > Pending + 1) { // the open group does not count
                              for (const machine::Product &product : groups.front()) machine::compute(product, machine::current / 32);
                              groups.erase(groups.begin());
                          }
                      },
                      [](machine::Warp &, int) {});
}
template <int Count> void settle(float (&)[Count]) {}
template <int Count> void settle(u32 (&)[Count][4]) {}

template <int Count> void add_product(float (&d)[Count], u64 a, u64 b, bool add) { machine::send(d, Count, nullptr, a, b, add); }
template <int Count> void add_product(float (&d)[Count], const u32 (&a)[4], u64 b) { machine::send(d, Count, a, 0, b, true); }
inline void add_product_transposed(float (&d)[32], u64 a, u64 b, bool add) { machine::send(d, 32, nullptr, a, b, add, true); }

inline void store_matrices(u32 shared, const u32 (&r)[4]) {
    machine::aligned_16("stmatrix", shared);
    machine::together(
        [&](machine::Warp &w, int lane) {
            w.address[lane] = shared;
            memcpy(w.matrix[lane], r, sizeof r);
        },
        [](machine::Warp &w) {
            for (int m = 0; m < 4; m++)
                for (int lane = 0; lane < 32; lane++) {
                    const u32 at = w.address[8 * m + lane / 4] + lane % 4 * 4;
                    memcpy(machine::shared.get() + at, &w.matrix[lane][m], 4);
                    machine::unfenced[machine::current / 32 * 32 + lane].push_back(at);
                    machine::is_unfenced[at / 4] = true;
                }
        },
        [](machine::Warp &, int) {});
}
inline void shared_written() {
    for (u32 at : machine::unfenced[machine::current]) machine::is_unfenced[at / 4] = false;
    machine::unfenced[machine::current].clear();
}
