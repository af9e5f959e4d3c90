// kernels/hopper_backward.cu
#include "hopper_backward.cu"

namespace {

const int WAYS = 5;

bool takes(const Case &c) { return (c.softcap > 0) == CAPPED; }

// Whole tiles of queries of a head.
size_t height(const Problem &p) { return size_t(blocks(p.q_len, QUERIES)) * QUERIES; }

void sizes(const Problem &p, size_t &, size_t &sums) { sums = size_t(p.batch) * p.q_heads * height(p) * HEAD_DIM; }

// As src/device/cuda/tensor_map.rs makes it.
TensorMap rows_of(const void *data, int lists, int rows, int box_rows) {
    machine::TensorMap map = {};
    map.address = reinterpret_cast<uint64_t>(data);
    map.rank = 3, map.swizzle = 3, map.element_bytes = 2;
    map.lengths[0] = HEAD_DIM, map.lengths[1] = uint64_t(rows), map.lengths[2] = uint64_t(lists);
    map.strides[0] = 2 * HEAD_DIM, map.strides[1] = uint64_t(rows) * 2 * HEAD_DIM;
    map.box[0] = 64, map.box[1] = uint16_t(box_rows), map.box[2] = 1;
    memcpy(map.mark, "tile", 4);
    TensorMap opaque;
    memcpy(&opaque, &map, sizeof opaque);
    return opaque;
}

void run(const Problem &p, const Gradients &g) {
    const unsigned q_heads = p.q_heads, kv_heads = p.kv_heads, batch = p.batch;
    const size_t rows = q_heads * batch * height(p);
    const TensorMap q = rows_of(p.q, p.batch * p.q_heads, p.q_len, QUERIES), grad_o = rows_of(g.grad_o, p.batch * p.q_heads, p.q_len, QUERIES);
    const TensorMap k = rows_of(p.k, p.batch * p.kv_heads, p.kv_len, KEYS), v = rows_of(p.v, p.batch * p.kv_heads, p.kv_len, KEYS);
    machine::launch({blocks(rows, 4), 1, 1}, 128, 0, [&] { backward_delta(p, g); });
    machine::launch({blocks(p.kv_len, KEYS), kv_heads, batch}, THREADS, SHARED_BYTES, [&] { hopper_backward(p, g, q, k, v, grad_o); });
    machine::launch({blocks(rows, 64), 1, 1}, 128, 0, [&] { backward_round(p, g); });
}

} // namespace
