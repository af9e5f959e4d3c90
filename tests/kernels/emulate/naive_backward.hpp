// kernels/naive_backward.cu
#include "naive_backward.cu"

namespace {

const int WAYS = 2;

bool takes(const Case &) { return true; }

void sizes(const Problem &p, size_t &scores, size_t &) { scores = size_t(2) * p.batch * p.q_heads * p.q_len * p.kv_len; }

void run(const Problem &p, const Gradients &g) {
    const unsigned heads = p.batch * p.q_heads, kv_heads = p.batch * p.kv_heads, width = blocks(HEAD_DIM, 64);
    machine::launch({blocks(size_t(heads) * p.q_len, 4), 1, 1}, 128, 0, [&] { naive_delta(p, g); });
    machine::launch({blocks(p.kv_len, 64), blocks(p.q_len, 64), heads}, 256, 0, [&] { naive_gradients(p, g); });
    machine::launch({width, blocks(p.kv_len, 64), kv_heads}, 256, 0, [&] { naive_keys(p, g); });
    machine::launch({width, blocks(p.q_len, 64), heads}, 256, 0, [&] { naive_queries(p, g); });
}

} // namespace
