// kernels/hopper_backward.cu
#include "hopper_backward.cu"
#include "tensor_map.hpp"

namespace {

const int WAYS = 5;

bool takes(const Case &c) { return (c.softcap > 0) == CAPPED; }

// Whole tiles of queries of a head.
size_t height(const Problem &p) { return size_t(blocks(p.q_len, QUERIES)) * QUERIES; }

void sizes(const Problem &p, size_t &, size_t &sums) { sums = size_t(p.batch) * p.q_heads * height(p) * HEAD_DIM; }

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
