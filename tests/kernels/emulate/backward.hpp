// kernels/backward.cu
#include "backward.cu"

namespace {

const int WAYS = 5;

bool takes(const Case &) { return true; }

// Whole tiles of queries of a head.
size_t height(const Problem &p) { return size_t(blocks(p.q_len, QUERIES)) * QUERIES; }

void sizes(const Problem &p, size_t &, size_t &sums) {
    if (!DETERMINISTIC) sums = size_t(p.batch) * p.q_heads * height(p) * DEPTH;
}

void run(const Problem &p, const Gradients &g) {
    const unsigned q_heads = p.q_heads, kv_heads = p.kv_heads, batch = p.batch;
    machine::launch({blocks(q_heads * batch * height(p), 4), 1, 1}, 128, 0, [&] { backward_delta(p, g); });
    const size_t scores = DETERMINISTIC ? 0 : 2 * KEYS * QUERIES;
    machine::launch({blocks(p.kv_len, KEYS) * (APART ? 2 : 1), kv_heads, batch}, THREADS, ROW_VALUES + 16 * QUERIES + scores,
                    [&] { backward_keys(p, g); });
#if DETERMINISTIC
    machine::launch({blocks(p.q_len, ROWS), q_heads, batch}, 128, 2 * OWN_BYTES + 4 * PASSING_BYTES, [&] { backward_queries(p, g); });
#else
    machine::launch({blocks(q_heads * batch * height(p), 64), 1, 1}, 128, 0, [&] { backward_round(p, g); });
#endif
}

} // namespace
