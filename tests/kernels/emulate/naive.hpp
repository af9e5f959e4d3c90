// kernels/naive.cu, with its fallback GEMM or with those of a library, which are plain loops here.
#include "naive.cu"

namespace {

const int WAYS = 2;

bool takes(const Case &c) { return c.kv_len <= 300; }

void prepare(Tensors &t, Problem &p, std::mt19937 &) {
    t.scores.assign(size_t(p.batch) * p.q_heads * p.q_len * p.kv_len, NAN);
}

#if LIBRARY_PRODUCTS
void run(const Problem &p) {
    const unsigned heads = p.batch * p.q_heads;
    const auto row_of_list = [&](size_t row) { // the first row of k and v that a query row's head has
        const size_t head = row / p.q_len;
        return (head / p.q_heads * p.kv_heads + head % p.q_heads / (p.q_heads / p.kv_heads)) * p.kv_len;
    };
    for (size_t row = 0; row < size_t(heads) * p.q_len; row++)
        for (int key = 0; key < p.kv_len; key++) {
            float sum = 0;
            for (int d = 0; d < HEAD_DIM; d++)
                sum += element<ELEMENT>(p.q, row * HEAD_DIM + d) * element<ELEMENT>(p.k, (row_of_list(row) + key) * HEAD_DIM + d);
            p.scores[row * p.kv_len + key] = p.scale * sum;
        }
    machine::launch({heads * p.q_len, 1, 1}, 256, 0, [&] { naive_softmax(p); });
    for (size_t row = 0; row < size_t(heads) * p.q_len; row++)
        for (int d = 0; d < HEAD_DIM; d++) {
            float sum = 0;
            for (int key = 0; key < p.kv_len; key++)
                sum += element<ELEMENT>(p.scores + row * p.kv_len, key) * element<ELEMENT>(p.v, (row_of_list(row) + key) * HEAD_DIM + d);
            store<ELEMENT>(p.o, row * HEAD_DIM + d, sum);
        }
}
#else
void run(const Problem &p) {
    const unsigned heads = p.batch * p.q_heads;
    machine::launch({blocks(p.kv_len, 64), blocks(p.q_len, 64), heads}, 256, 0, [&] { naive_scores(p); });
    machine::launch({heads * p.q_len, 1, 1}, 256, 0, [&] { naive_softmax(p); });
    machine::launch({blocks(HEAD_DIM, 64), blocks(p.q_len, 64), heads}, 256, 0, [&] { naive_output(p); });
}
#endif

} // namespace
