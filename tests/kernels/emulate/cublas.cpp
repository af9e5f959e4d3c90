// libcublas.so.13 for the emulated device: the functions that the crate calls, as cublas_api.h declares them.
//
// It is a client of the emulated driver, as cuBLAS is of the real one: matrices are copied to the host, multiplied in
// plain loops with sums in f32, and copied back, after everything that was begun before. Types that cuBLAS does not take
// together are refused.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

extern "C" int cuMemcpyDtoH_v2(void *target, uint64_t source, size_t bytes);
extern "C" int cuMemcpyHtoD_v2(uint64_t target, const void *source, size_t bytes);

namespace {

enum Status { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum Type { R_32F = 0, R_16F = 2, R_16BF = 14 };
constexpr int COMPUTE_32F = 68, OP_N = 0, OP_T = 1;

int handle_mark;

size_t size_of(int type) { return type == R_32F ? 4 : 2; }

float widen(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

float element(const std::vector<unsigned char> &bytes, int type, size_t index) {
    if (type == R_32F) {
        float x;
        memcpy(&x, &bytes[4 * index], 4);
        return x;
    }
    uint16_t half;
    memcpy(&half, &bytes[2 * index], 2);
    if (type == R_16BF) return widen(uint32_t(half) << 16);
    _Float16 x;
    memcpy(&x, &half, 2);
    return float(x);
}

void store(std::vector<unsigned char> &bytes, int type, size_t index, float x) {
    if (type == R_32F) {
        memcpy(&bytes[4 * index], &x, 4);
    } else if (type == R_16F) {
        const _Float16 half = _Float16(x);
        memcpy(&bytes[2 * index], &half, 2);
    } else {
        uint32_t bits;
        memcpy(&bits, &x, 4);
        const uint16_t half = x != x ? 0x7fff : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        memcpy(&bytes[2 * index], &half, 2);
    }
}

// A batch of matrices in columns, on the host.
struct Matrices {
    int type;
    int64_t ld;
    long long stride;
    std::vector<unsigned char> bytes;
    bool good;

    Matrices(uint64_t address, int type, int64_t ld, long long stride, int64_t rows, int64_t columns, int64_t batch)
        : type(type), ld(ld), stride(stride), bytes(size_of(type) * (size_t(batch - 1) * stride + size_t(columns - 1) * ld + rows)),
          good(ld >= rows && cuMemcpyDtoH_v2(bytes.data(), address, bytes.size()) == 0) {}
    size_t at(int64_t batch, int64_t row, int64_t column) const { return size_t(batch) * stride + size_t(column) * ld + row; }
    float get(int64_t batch, int64_t row, int64_t column) const { return element(bytes, type, at(batch, row, column)); }
};

} // namespace

API int cublasCreate_v2(void **handle) {
    *handle = &handle_mark;
    return SUCCESS;
}

API int cublasDestroy_v2(void *handle) { return handle == &handle_mark ? SUCCESS : NOT_INITIALIZED; }

API int cublasGetVersion_v2(void *handle, int *version) {
    *version = 130000;
    return handle == &handle_mark ? SUCCESS : NOT_INITIALIZED;
}

API int cublasGemmStridedBatchedEx_64(void *handle, int op_a, int op_b, int64_t m, int64_t n, int64_t k, const float *alpha, uint64_t a,
                                      int type_a, int64_t lda, long long stride_a, uint64_t b, int type_b, int64_t ldb,
                                      long long stride_b, const float *beta, uint64_t c, int type_c, int64_t ldc,
                                      long long stride_c, int64_t batch, int compute, int) {
    if (handle != &handle_mark) return NOT_INITIALIZED;
    if (m <= 0 || n <= 0 || k <= 0 || batch <= 0 || op_b != OP_N || *beta != 0) return INVALID_VALUE;
    if (compute != COMPUTE_32F || type_a != type_b || (type_c != type_a && type_c != R_32F)) return NOT_SUPPORTED;
    const bool turned = op_a == OP_T;
    const Matrices left(a, type_a, lda, stride_a, turned ? k : m, turned ? m : k, batch), right(b, type_b, ldb, stride_b, k, n, batch);
    Matrices result(c, type_c, ldc, stride_c, m, n, batch); // what lies between its columns stays
    if (!left.good || !right.good || !result.good) return INVALID_VALUE;
    for (int64_t index = 0; index < batch; index++)
        for (int64_t column = 0; column < n; column++)
            for (int64_t row = 0; row < m; row++) {
                float sum = 0;
                for (int64_t i = 0; i < k; i++) sum += (turned ? left.get(index, i, row) : left.get(index, row, i)) * right.get(index, i, column);
                store(result.bytes, type_c, result.at(index, row, column), *alpha * sum);
            }
    return cuMemcpyHtoD_v2(c, result.bytes.data(), result.bytes.size()) ? EXECUTION_FAILED : SUCCESS;
}

// Matrices whose elements an int does not count are refused here: NVIDIA promises nothing for them.
API int cublasGemmStridedBatchedEx(void *handle, int op_a, int op_b, int m, int n, int k, const float *alpha, uint64_t a, int type_a,
                                   int lda, long long stride_a, uint64_t b, int type_b, int ldb, long long stride_b,
                                   const float *beta, uint64_t c, int type_c, int ldc, long long stride_c, int batch, int compute,
                                   int algorithm) {
    const int64_t longest = std::max({int64_t(lda) * (op_a == OP_T ? m : k), int64_t(ldb) * n, int64_t(ldc) * n});
    if (longest > INT32_MAX) return NOT_SUPPORTED;
    return cublasGemmStridedBatchedEx_64(handle, op_a, op_b, m, n, k, alpha, a, type_a, lda, stride_a, b, type_b, ldb, stride_b, beta,
                                         c, type_c, ldc, stride_c, batch, compute, algorithm);
}
