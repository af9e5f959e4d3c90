// What the device is, contexts, and the names of errors.
#include "driver.hpp"

#include <cstdlib>
#include <cstring>

Driver driver;

namespace {

const char NAME[] = "kvsieve emulated device (CPU)";
thread_local void *current; // context of this thread

void *const PRIMARY = &driver;

Model make_model() {
    Model model{9, 0, 0, 0, size_t(2) << 30, 13000};
    if (const char *text = getenv("KVSIEVE_EMULATED_CAPABILITY"))
        if (sscanf(text, "%d.%d", &model.major, &model.minor) != 2) {
            COMPLAIN("KVSIEVE_EMULATED_CAPABILITY is '%s'; it should look like 9.0", text);
            exit(2);
        }
    if (const char *text = getenv("KVSIEVE_EMULATED_BYTES")) {
        char *end;
        model.total_bytes = strtoull(text, &end, 10);
        if (*end || model.total_bytes <= CONTEXT_BYTES) {
            COMPLAIN("KVSIEVE_EMULATED_BYTES is '%s'; it should be a number above %zu", text, CONTEXT_BYTES);
            exit(2);
        }
    }
    if (const char *text = getenv("KVSIEVE_EMULATED_CUDA")) {
        int major, minor;
        if (sscanf(text, "%d.%d", &major, &minor) != 2) {
            COMPLAIN("KVSIEVE_EMULATED_CUDA is '%s'; it should look like 13.0", text);
            exit(2);
        }
        model.cuda = 1000 * major + 10 * minor;
    }
    const int capability = 10 * model.major + model.minor;
    const int kib = capability == 80 || capability == 87 ? 164 : capability == 90 || capability / 10 == 10 || capability / 10 == 11 ? 228 : 100;
    model.shared_each_bytes = kib << 10;
    model.shared_block_bytes = (kib - 1) << 10;
    return model;
}

struct Error {
    int code;
    const char *name, *text;
};
const Error ERRORS[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {LAUNCH_TIMEOUT, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {MISALIGNED_ADDRESS, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {UNKNOWN_ERROR, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const Error *error_of(int code) {
    for (const Error &error : ERRORS)
        if (error.code == code) return &error;
    return nullptr;
}

// Nothing of the primary context is left; handles and addresses of it mean nothing any more.
void end_context() {
    forget_streams();
    forget_modules();
    forget_memory();
    driver.broken = SUCCESS;
}

} // namespace

const Model &Model::get() {
    static const Model model = make_model();
    return model;
}

Result refusal(Needs needs) {
    if (needs == Needs::nothing) return SUCCESS;
    if (!driver.initialised) return NOT_INITIALIZED;
    if (needs == Needs::initialised) return SUCCESS;
    if (!current) return INVALID_CONTEXT;
    return driver.retained ? driver.broken : CONTEXT_IS_DESTROYED;
}

API cuInit(unsigned flags) {
    BEGIN(nothing);
    if (flags) return INVALID_VALUE;
    Model::get();
    driver.initialised = true;
    return SUCCESS;
}

API cuDriverGetVersion(int *version) {
    *version = Model::get().cuda;
    return SUCCESS;
}

API cuDeviceGetCount(int *count) {
    BEGIN(initialised);
    *count = 1;
    return SUCCESS;
}

API cuDeviceGet(int *device, int ordinal) {
    BEGIN(initialised);
    if (ordinal != 0) return INVALID_DEVICE;
    *device = 0;
    return SUCCESS;
}

API cuDeviceGetName(char *name, int bytes, int device) {
    BEGIN(initialised);
    if (device != 0) return INVALID_DEVICE;
    if (bytes < 1) return INVALID_VALUE;
    snprintf(name, size_t(bytes), "%s", NAME);
    return SUCCESS;
}

API cuDeviceGetUuid_v2(char *uuid, int device) {
    BEGIN(initialised);
    if (device != 0) return INVALID_DEVICE;
    memcpy(uuid, UUID, 16);
    return SUCCESS;
}
// The first version of it, which every driver still has: without partitions of a GPU the two are the same.
API cuDeviceGetUuid(char *uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }

API cuDeviceTotalMem_v2(size_t *bytes, int device) {
    BEGIN(initialised);
    if (device != 0) return INVALID_DEVICE;
    *bytes = Model::get().total_bytes;
    return SUCCESS;
}

API cuDeviceGetAttribute(int *value, int attribute, int device) {
    BEGIN(initialised);
    if (device != 0) return INVALID_DEVICE;
    const Model &model = Model::get();
    switch (attribute) {
    case 1: *value = MOST_THREADS; break;                   // MAX_THREADS_PER_BLOCK
    case 2: case 3: *value = MOST_THREADS; break;           // MAX_BLOCK_DIM_X, _Y
    case 4: *value = 64; break;                             // MAX_BLOCK_DIM_Z
    case 5: *value = INT32_MAX; break;                      // MAX_GRID_DIM_X
    case 6: case 7: *value = 65535; break;                  // MAX_GRID_DIM_Y, _Z
    case 8: *value = SHARED_DEFAULT_BYTES; break;           // MAX_SHARED_MEMORY_PER_BLOCK
    case 10: *value = 32; break;                            // WARP_SIZE
    case 12: case 82: *value = 65536; break;                // MAX_REGISTERS_PER_BLOCK, _PER_MULTIPROCESSOR
    case 16: *value = MULTIPROCESSORS; break;               // MULTIPROCESSOR_COUNT
    case 38: *value = 1 << 20; break;                       // L2_CACHE_SIZE
    case 39: *value = 2048; break;                          // MAX_THREADS_PER_MULTIPROCESSOR
    case 41: *value = 1; break;                             // UNIFIED_ADDRESSING
    case 75: *value = model.major; break;                   // COMPUTE_CAPABILITY_MAJOR
    case 76: *value = model.minor; break;                   // COMPUTE_CAPABILITY_MINOR
    case 81: *value = model.shared_each_bytes; break;       // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
    case 97: *value = model.shared_block_bytes; break;      // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    case 106: *value = 32; break;                           // MAX_BLOCKS_PER_MULTIPROCESSOR
    case 111: *value = 1024; break;                         // RESERVED_SHARED_MEMORY_PER_BLOCK
    case 127: *value = model.major >= 9; break;             // TENSOR_MAP_ACCESS_SUPPORTED
    // What it has not, or what would be a made-up speed: clocks, bus width, memory pools, clusters, cooperation.
    case 13: case 18: case 32: case 33: case 34: case 36: case 37: case 50: case 83: case 89: case 95: case 115: case 120:
        *value = 0; break;
    default: COMPLAIN("attribute %d of a device is not known", attribute); return INVALID_VALUE;
    }
    return SUCCESS;
}

API cuDevicePrimaryCtxRetain(void **context, int device) {
    BEGIN(initialised);
    if (device != 0) return INVALID_DEVICE;
    if (driver.lost) return DEVICE_UNAVAILABLE;
    driver.retained++;
    *context = PRIMARY;
    return SUCCESS;
}

API cuDevicePrimaryCtxRelease_v2(int device) {
    BEGIN(initialised);
    if (device != 0) return INVALID_DEVICE;
    if (!driver.retained) return INVALID_CONTEXT;
    const Result broken = driver.broken;
    if (!--driver.retained) end_context();
    return broken;
}

API cuDevicePrimaryCtxReset_v2(int device) {
    BEGIN(initialised);
    if (device != 0) return INVALID_DEVICE;
    if (driver.lost) return DEVICE_UNAVAILABLE;
    end_context();
    return SUCCESS;
}

API cuCtxGetCurrent(void **context) {
    BEGIN(initialised);
    *context = current;
    return SUCCESS;
}

API cuCtxSetCurrent(void *context) {
    BEGIN(initialised);
    if (context && context != PRIMARY) return INVALID_CONTEXT;
    current = context;
    return SUCCESS;
}

API cuCtxSynchronize() {
    BEGIN(context);
    drain_all();
    return driver.broken;
}

API cuGetErrorName(int code, const char **name) {
    const Error *error = error_of(code);
    *name = error ? error->name : nullptr;
    return error ? SUCCESS : INVALID_VALUE;
}

API cuGetErrorString(int code, const char **text) {
    const Error *error = error_of(code);
    *text = error ? error->text : nullptr;
    return error ? SUCCESS : INVALID_VALUE;
}
