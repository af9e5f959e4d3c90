// libcuda.so.1 for the emulated device: the part of the CUDA driver that the crate uses, over the memory of this CPU.
//
// Work of streams waits until something waits for it, which is the latest that a GPU may be: a host program that reads
// too early reads too early here every time. One call runs at a time. Numbers are those of cuda.h.
#pragma once

#include "../abi.hpp"

#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#define API extern "C" __attribute__((visibility("default"))) int

enum Result : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    DEVICE_UNAVAILABLE = 46,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_OUT_OF_RESOURCES = 701,
    LAUNCH_TIMEOUT = 702,
    CONTEXT_IS_DESTROYED = 709,
    MISALIGNED_ADDRESS = 716,
    LAUNCH_FAILED = 719,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
    UNKNOWN_ERROR = 999,
};

// What the device is. Sizes of shared memory follow the compute capability (CUDA C++ Programming Guide, "Compute
// Capabilities"); everything else is a constant or comes from the environment.
struct Model {
    int major, minor;
    int shared_each_bytes;     // of a multiprocessor
    int shared_block_bytes;    // the most that a block may ask for
    size_t total_bytes;
    int cuda;                  // of the driver, as 13000
    // KVSIEVE_EMULATED_CAPABILITY (9.0), KVSIEVE_EMULATED_BYTES (2 GiB), KVSIEVE_EMULATED_CUDA (13.0)
    static const Model &get();
};

constexpr char UUID[] = "kvsieve emulated"; // 16 bytes and their end
constexpr int MULTIPROCESSORS = 4;
constexpr int SHARED_DEFAULT_BYTES = 48 << 10;
constexpr int MOST_THREADS = 1024;
constexpr size_t CONTEXT_BYTES = size_t(32) << 20; // not free from the start, so that code that forgets it is seen

// Where a call stands: nothing goes on after a kernel has failed, as on a GPU, until the context is made anew.
struct Driver {
    std::recursive_mutex lock;
    bool initialised = false;
    int retained = 0;         // of the primary context
    Result broken = SUCCESS;  // what a kernel did
    bool lost = false;        // the device answers no more
};
extern Driver driver;

// Whether this thread is between two timed events: what others load meanwhile is none of its business.
inline thread_local bool is_timing = false;

enum class Needs { nothing, initialised, context };
Result refusal(Needs needs);

// Counts a call of the API, but not those that the driver makes for it (counts.cpp).
struct Call {
    explicit Call(const char *name);
    ~Call();
};

// Begins every call of the API.
#define BEGIN(needs)                                                                                                   \
    std::lock_guard<std::recursive_mutex> guard(driver.lock);                                                          \
    const Call call(__func__);                                                                                         \
    if (Result stop = refusal(Needs::needs)) return stop

// Reports what the caller did wrong where a bare error code would not tell.
#define COMPLAIN(...) (fprintf(stderr, "emulated device: " __VA_ARGS__), fputc('\n', stderr))

// Streams. Null is the legacy stream, which waits for all blocking ones and they for it.
struct Work {
    uint64_t number; // grows over all streams
    std::function<void()> run;
};
struct Stream {
    bool blocking;
    std::deque<Work> work;
};
Stream *stream_of(void *handle); // null when there is no such stream
uint64_t enqueue(Stream &stream, std::function<void()> run);
void drain(Stream &stream, uint64_t before = UINT64_MAX); // runs what was queued with a smaller number
void drain_all();

// Counts a launch by its kernel.
void count_launch(const char *kernel);
// The context ends, and with it all that was made in it.
void forget_streams();
void forget_modules();
void forget_memory();

// Whether a fault was asked for now (faults.cpp).
bool strikes(const char *kind, const char *name = "");

// Names of errors, for what is told on stderr.
API cuGetErrorName(int code, const char **name);

// Memory.
bool on_device(uint64_t address, size_t bytes); // inside one allocation
size_t taken_bytes();                           // of the device, the context's among them
// Says on stderr where an address lies next to allocations.
void describe(uint64_t address);

// The address of a CUdeviceptr.
inline void *host(uint64_t address) { return reinterpret_cast<void *>(address); }
