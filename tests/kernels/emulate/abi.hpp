// What the emulated driver knows of a compiled kernel, and an emulated TMA of a tensor map: the only layouts that
// libraries built at different times share.
#pragma once

#include <cstddef>
#include <cstdint>

struct Dim3 {
    unsigned x = 1, y = 1, z = 1;
};

namespace machine {

// What a kernel does wrong, as the driver's error codes.
enum class Fault : int { illegal_address = 700, timeout = 702, misaligned_address = 716, failed = 719 };

// Ends a kernel that went wrong; it does not return.
using Stop = void (*)(Fault);

// One kernel function. A compiled program exports an array of them, `kvsieve_kernels`, that ends with an empty one.
struct Entry {
    const char *name;
    unsigned most_threads; // what KERNEL() promises
    const size_t *sizes;   // of the arguments, in bytes
    size_t arguments;
    void (*run)(void **arguments, Dim3 grid, unsigned threads, size_t dynamic_shared, Stop stop);
    const Dim3 *block, *thread; // who runs
};

// What a program was compiled for, exported as `kvsieve_architecture`: sm_90a is {90, 'a'}.
struct Architecture {
    int number;
    char feature;
};

// The 128 opaque bytes of a CUtensorMap, as the emulated cuTensorMapEncodeTiled fills them. Lengths are in elements,
// strides in bytes, the innermost dimension first; enumerations have the driver's values.
struct TensorMap {
    uint64_t address;
    uint64_t strides[4];   // of dimensions 1 and up
    uint64_t lengths[5];
    uint16_t box[5];
    uint8_t element_strides[5];
    uint8_t type, rank, interleave, swizzle, promotion, fill;
    uint8_t element_bytes;
    uint8_t unused[22];
    char mark[4];          // "tile": the map was made by the emulated driver
};
static_assert(sizeof(TensorMap) == 128, "the size of a CUtensorMap");

} // namespace machine
