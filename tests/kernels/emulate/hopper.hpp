// kernels/hopper.cu, on two multiprocessors: each block goes through several items, so that what one leaves behind in
// barriers and rings meets the next.
#include "hopper.cu"
#include "tensor_map.hpp"

namespace {

const int WAYS = 5;

bool takes(const Case &c) { return c.q_heads <= 4 && c.kv_len <= 300 && (c.softcap > 0) == CAPPED && (c.scale < 0) == NEGATIVE; }

void prepare(Tensors &, Problem &, std::mt19937 &) {}

// The list of items is that of the model which shows how evenly it loads multiprocessors.
void check_items(int head_dim, int keys, int batch, int q_heads, int kv_heads, int q_len, int kv_len, int causal, int window, u32 expected) {
    if (head_dim != HEAD_DIM || keys != KEYS) return;
    Problem p{};
    p.batch = batch, p.q_heads = q_heads, p.kv_heads = kv_heads, p.q_len = q_len, p.kv_len = kv_len;
    p.causal = causal, p.window = window;
    u32 sum = 0;
    for (int number = 0; number < item_count(p); number++) {
        const Item item = item_at(p, number);
        for (int x : {item.row0, item.q_head, item.first_tile, item.end_tile}) {
            sum = (sum ^ u32(x)) * 16777619;
            sum = sum << 7 | sum >> 25;
        }
    }
    if (sum == expected && item_at(p, item_count(p)).q_head < 0) return;
    fprintf(stderr, "%d items of %d heads, D %d: their sum is %u, and %u in hopper_items.inc\n", item_count(p), q_heads, head_dim, sum, expected);
    exit(1);
}
const bool items_are_right = [] {
#define ITEMS(...) check_items(__VA_ARGS__);
#include "hopper_items.inc"
    return true;
}();

void run(const Problem &p) {
    const unsigned items = blocks(p.q_len, ROWS) * unsigned(p.q_heads) * unsigned(p.batch);
    const TensorMap q = rows_of(p.q, p.batch * p.q_heads, p.q_len, 64);
    const TensorMap k = rows_of(p.k, p.batch * p.kv_heads, p.kv_len, KEYS);
    const TensorMap v = rows_of(p.v, p.batch * p.kv_heads, p.kv_len, KEYS);
    machine::launch({std::min(2u, items), 1, 1}, THREADS, SHARED_BYTES, [&] { hopper_forward(p, q, k, v); });
    if (claims == 0) return;
    fprintf(stderr, "the counter of claims stands at %u after the launch\n", claims);
    exit(1);
}

} // namespace
