// Memory of the device: mapped pages of this CPU with forbidden ones on both sides, and a ledger that ends.
//
// An allocation ends where its last page ends, but for what keeps it a multiple of 16 bytes (a GPU gives 256): a kernel
// that goes past it faults at once. What is left of the first and the last page is filled and looked at when the
// allocation is freed. New memory is full of 0xff, which is NaN: a GPU's is full of whatever was there.
#include "driver.hpp"

#include <cstring>
#include <map>
#include <sys/mman.h>
#include <vector>

namespace {

constexpr size_t PAGE = 4096, ALIGNMENT = 16, GRAIN = size_t(2) << 20;
constexpr unsigned char GUARD = 0xa5;

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

struct Allocation {
    size_t bytes, pages_bytes; // asked for, and mapped between the forbidden pages
};
std::map<uint64_t, Allocation> allocations; // by address
std::map<const char *, size_t> pinned; // bytes of each, by address

// Whether memory of the host is page-locked, so that a copy need not be done when its call returns.
bool is_pinned(const void *start, size_t bytes) {
    const char *const first = static_cast<const char *>(start);
    const auto after = pinned.upper_bound(first);
    return after != pinned.begin() && first + bytes <= std::prev(after)->first + std::prev(after)->second;
}

size_t place(const Allocation &a) { return a.pages_bytes - rounded(a.bytes, ALIGNMENT); }

// What the driver takes for allocations: large ones in pages of 2 MiB, small ones together in such pages.
size_t taken(size_t more = 0) {
    size_t large = 0, small = 0;
    auto add = [&](size_t bytes) { bytes >= GRAIN / 2 ? large += rounded(bytes, GRAIN) : small += rounded(bytes, 512); };
    for (const auto &[address, allocation] : allocations) add(allocation.bytes);
    if (more) add(more);
    return CONTEXT_BYTES + large + rounded(small, GRAIN);
}

// Bytes around an allocation that were written.
size_t overrun(uint64_t address, const Allocation &a) {
    const unsigned char *start = static_cast<unsigned char *>(host(address)) - place(a);
    size_t wrong = 0;
    for (size_t i = 0; i < place(a); i++) wrong += start[i] != GUARD;
    for (size_t i = place(a) + a.bytes; i < a.pages_bytes; i++) wrong += start[i] != GUARD;
    return wrong;
}

Result copy_now(void *target, const void *source, size_t bytes, uint64_t device) {
    if (!bytes) return SUCCESS;
    if (!on_device(device, bytes)) {
        COMPLAIN("a copy of %zu bytes leaves its allocation", bytes);
        describe(device);
        return INVALID_VALUE;
    }
    drain(*stream_of(nullptr));
    if (!driver.broken) memcpy(target, source, bytes);
    return driver.broken;
}

} // namespace

size_t taken_bytes() { return taken(); }

void forget_memory() {
    for (const auto &[address, allocation] : allocations)
        munmap(static_cast<unsigned char *>(host(address)) - place(allocation) - PAGE, allocation.pages_bytes + 2 * PAGE);
    allocations.clear();
    for (const auto &[memory, bytes] : pinned) free(const_cast<char *>(memory));
    pinned.clear();
}

bool on_device(uint64_t address, size_t bytes) {
    auto after = allocations.upper_bound(address);
    if (after == allocations.begin()) return false;
    const auto &[start, allocation] = *--after;
    return address - start <= allocation.bytes && bytes <= allocation.bytes - (address - start);
}

void describe(uint64_t address) {
    auto after = allocations.upper_bound(address);
    if (after != allocations.begin()) {
        auto before = std::prev(after);
        const uint64_t at = address - before->first;
        if (at < before->second.bytes)
            COMPLAIN("  %#llx is byte %llu of an allocation of %zu", (unsigned long long)address, (unsigned long long)at,
                     before->second.bytes);
        else
            COMPLAIN("  %#llx is %llu bytes past the end of an allocation of %zu", (unsigned long long)address,
                     (unsigned long long)(at - before->second.bytes), before->second.bytes);
    }
    if (after != allocations.end())
        COMPLAIN("  %#llx is %llu bytes before an allocation of %zu", (unsigned long long)address,
                 (unsigned long long)(after->first - address), after->second.bytes);
}

API cuMemGetInfo_v2(size_t *free, size_t *total) {
    BEGIN(context);
    *total = Model::get().total_bytes;
    *free = *total - taken();
    return SUCCESS;
}

API cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    BEGIN(context);
    if (!bytes) return INVALID_VALUE;
    if (strikes("alloc")) return OUT_OF_MEMORY;
    if (bytes > Model::get().total_bytes || taken(bytes) > Model::get().total_bytes) return OUT_OF_MEMORY;
    const Allocation allocation{bytes, rounded(bytes, PAGE)};
    void *map = mmap(nullptr, allocation.pages_bytes + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return OUT_OF_MEMORY;
    unsigned char *start = static_cast<unsigned char *>(map) + PAGE;
    if (mprotect(start, allocation.pages_bytes, PROT_READ | PROT_WRITE)) {
        munmap(map, allocation.pages_bytes + 2 * PAGE);
        return OUT_OF_MEMORY;
    }
    memset(start, GUARD, place(allocation));
    memset(start + place(allocation), 0xff, bytes);
    memset(start + place(allocation) + bytes, GUARD, allocation.pages_bytes - place(allocation) - bytes);
    *address = reinterpret_cast<uint64_t>(start) + place(allocation);
    allocations[*address] = allocation;
    return SUCCESS;
}

API cuMemFree_v2(uint64_t address) {
    BEGIN(context);
    if (!address) return SUCCESS;
    auto found = allocations.find(address);
    if (found == allocations.end()) return INVALID_VALUE;
    drain_all();
    const Allocation allocation = found->second;
    const size_t wrong = overrun(address, allocation);
    allocations.erase(found);
    munmap(static_cast<unsigned char *>(host(address)) - place(allocation) - PAGE, allocation.pages_bytes + 2 * PAGE);
    if (wrong && !driver.broken) {
        COMPLAIN("%zu bytes outside an allocation of %zu were written", wrong, allocation.bytes);
        driver.broken = ILLEGAL_ADDRESS;
    }
    return driver.broken;
}

API cuMemHostAlloc(void **memory, size_t bytes, unsigned) {
    BEGIN(context);
    *memory = aligned_alloc(PAGE, rounded(bytes, PAGE));
    if (!*memory) return OUT_OF_MEMORY;
    pinned[static_cast<char *>(*memory)] = bytes;
    return SUCCESS;
}

API cuMemFreeHost(void *memory) {
    BEGIN(context);
    if (!pinned.erase(static_cast<char *>(memory))) return INVALID_VALUE;
    drain_all();
    free(memory);
    return SUCCESS;
}

API cuMemcpyHtoD_v2(uint64_t target, const void *source, size_t bytes) {
    BEGIN(context);
    return copy_now(host(target), source, bytes, target);
}

API cuMemcpyDtoH_v2(void *target, uint64_t source, size_t bytes) {
    BEGIN(context);
    return copy_now(target, host(source), bytes, source);
}

API cuMemcpyHtoDAsync_v2(uint64_t target, const void *source, size_t bytes, void *stream) {
    BEGIN(context);
    Stream *queue = stream_of(stream);
    if (!queue) return INVALID_HANDLE;
    if (!on_device(target, bytes)) return INVALID_VALUE;
    if (is_pinned(source, bytes)) {
        enqueue(*queue, [=] { memcpy(host(target), source, bytes); });
    } else { // a driver has copied it when the call returns
        std::vector<char> staged(static_cast<const char *>(source), static_cast<const char *>(source) + bytes);
        enqueue(*queue, [=] { memcpy(host(target), staged.data(), bytes); });
    }
    return SUCCESS;
}

API cuMemcpyDtoHAsync_v2(void *target, uint64_t source, size_t bytes, void *stream) {
    BEGIN(context);
    Stream *queue = stream_of(stream);
    if (!queue) return INVALID_HANDLE;
    if (!on_device(source, bytes)) return INVALID_VALUE;
    enqueue(*queue, [=] { memcpy(target, host(source), bytes); });
    if (!is_pinned(target, bytes)) drain(*queue); // a driver waits
    return driver.broken;
}

API cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t bytes, void *stream) {
    BEGIN(context);
    Stream *queue = stream_of(stream);
    if (!queue) return INVALID_HANDLE;
    if (!on_device(target, bytes) || !on_device(source, bytes)) return INVALID_VALUE;
    enqueue(*queue, [=] { memmove(host(target), host(source), bytes); });
    return SUCCESS;
}

API cuMemcpyDtoD_v2(uint64_t target, uint64_t source, size_t bytes) {
    BEGIN(context);
    return cuMemcpyDtoDAsync_v2(target, source, bytes, nullptr);
}

API cuMemsetD8Async(uint64_t target, unsigned char value, size_t bytes, void *stream) {
    BEGIN(context);
    Stream *queue = stream_of(stream);
    if (!queue) return INVALID_HANDLE;
    if (!on_device(target, bytes)) return INVALID_VALUE;
    enqueue(*queue, [=] { memset(host(target), value, bytes); });
    return SUCCESS;
}

API cuMemsetD8_v2(uint64_t target, unsigned char value, size_t bytes) {
    BEGIN(context);
    return cuMemsetD8Async(target, value, bytes, nullptr);
}
