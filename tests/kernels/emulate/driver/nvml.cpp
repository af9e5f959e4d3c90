// libnvidia-ml.so.1 for the emulated device: as much of NVML as the crate uses. It is the same library as the driver's,
// under another name, so that both see the same memory. It has no clocks, no temperature and no power to tell of.
#include "driver.hpp"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <unistd.h>

namespace {

enum Nvml : int { UNSUPPORTED = 3, ARGUMENT = 2, UNKNOWN = 6 };

struct Memory {
    unsigned long long total, free, used;
};

char device;

} // namespace

API nvmlInit_v2() { return SUCCESS; }

API nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    char own[64];
    size_t at = size_t(snprintf(own, sizeof own, "GPU-"));
    for (int i = 0; i < 16; i++) {
        const bool dash = i == 4 || i == 6 || i == 8 || i == 10;
        at += size_t(snprintf(own + at, sizeof own - at, "%s%02x", dash ? "-" : "", (unsigned char)UUID[i]));
    }
    if (!uuid || strcmp(uuid, own) != 0) return UNKNOWN;
    *handle = &device;
    return SUCCESS;
}

API nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    std::lock_guard<std::recursive_mutex> guard(driver.lock);
    if (handle != &device) return ARGUMENT;
    memory->total = Model::get().total_bytes;
    memory->used = driver.retained ? taken_bytes() : 0;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

struct ProcessInfo {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};

// The device is the process's own, so that it is the only one there.
API nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, ProcessInfo *infos) {
    std::lock_guard<std::recursive_mutex> guard(driver.lock);
    if (handle != &device || *count < 1) return ARGUMENT;
    *count = driver.retained ? 1 : 0;
    if (*count) infos[0] = {unsigned(getpid()), taken_bytes(), 0, 0};
    return SUCCESS;
}

API nvmlSystemGetDriverVersion(char *version, unsigned bytes) {
    snprintf(version, bytes, "emulated");
    return SUCCESS;
}

API nvmlDeviceGetClockInfo(void *, int, unsigned *) { return UNSUPPORTED; }
API nvmlDeviceGetTemperature(void *, int, unsigned *) { return UNSUPPORTED; }
API nvmlDeviceGetPowerUsage(void *, unsigned *) { return UNSUPPORTED; }
API nvmlDeviceGetCurrentClocksThrottleReasons(void *, unsigned long long *) { return UNSUPPORTED; }
