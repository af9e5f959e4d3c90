// kernels/backward_scalar.cu
#include "backward_scalar.cu"

namespace {

const int WAYS = 2;

bool takes(const Case &) { return true; }

void sizes(const Problem &, size_t &, size_t &) {}

void run(const Problem &p, const Gradients &g) {
    const unsigned q_heads = p.q_heads, kv_heads = p.kv_heads, batch = p.batch;
    const size_t shared = 4 * (4 * TILE * PITCH + 2 * TILE * SCORE_PITCH);
    machine::launch({blocks(size_t(batch) * q_heads * p.q_len, 4), 1, 1}, 128, 0, [&] { backward_delta(p, g); });
    machine::launch({blocks(p.kv_len, TILE), kv_heads, batch}, 128, shared, [&] { backward_keys(p, g); });
    machine::launch({blocks(p.q_len, TILE), q_heads, batch}, 128, shared, [&] { backward_queries(p, g); });
}

} // namespace
