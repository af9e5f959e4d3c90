// Modules, functions and launches. A kernel that goes wrong is left where it stands: the fault is told on stderr, and the
// context answers every later call with it.
#include "driver.hpp"

#include <csetjmp>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <elf.h>
#include <map>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

namespace {

struct Function {
    const machine::Entry *entry;
    void *module;
    int dynamic_limit_bytes = SHARED_DEFAULT_BYTES;
};
struct Module {
    void *library;
    int file; // open as long as it is loaded: the loader knows libraries by their names
    std::map<std::string, std::unique_ptr<Function>> functions;
};
std::map<void *, std::unique_ptr<Module>> modules;

thread_local sigjmp_buf *running; // set while a kernel runs in this thread
thread_local Result fault;
thread_local uint64_t fault_address; // 0: not about an address
struct sigaction previous[NSIG];

void stop(machine::Fault what) {
    fault = Result(int(what)), fault_address = 0;
    siglongjmp(*running, 1);
}

void on_signal(int signal, siginfo_t *info, void *context) {
    if (running) {
        fault = signal == SIGSEGV || signal == SIGBUS ? ILLEGAL_ADDRESS : LAUNCH_FAILED;
        fault_address = reinterpret_cast<uint64_t>(info->si_addr);
        siglongjmp(*running, 1);
    }
    const struct sigaction &other = previous[signal];
    if (other.sa_flags & SA_SIGINFO)
        other.sa_sigaction(signal, info, context);
    else
        sigaction(signal, &other, nullptr); // what was there gets it when the instruction is tried again
}

void catch_signals() {
    static const bool once = [] {
        struct sigaction action = {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        for (int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) sigaction(signal, &action, &previous[signal]);
        return true;
    }();
    (void)once;
}

// Copies of a launch's arguments, each aligned as a tensor map must be.
struct Arguments {
    std::vector<void *> values;
    Arguments(const machine::Entry &entry, void **from) {
        for (size_t i = 0; i < entry.arguments; i++) {
            values.push_back(aligned_alloc(64, (entry.sizes[i] + 63) / 64 * 64));
            memcpy(values[i], from[i], entry.sizes[i]);
        }
    }
    Arguments(const Arguments &) = delete;
    ~Arguments() {
        for (void *value : values) free(value);
    }
};

void run(const machine::Entry &entry, Arguments &arguments, Dim3 grid, unsigned threads, size_t shared_bytes) {
    sigjmp_buf here;
    if (sigsetjmp(here, 1) == 0) {
        running = &here;
        entry.run(arguments.values.data(), grid, threads, shared_bytes, stop);
        running = nullptr;
        return;
    }
    running = nullptr;
    driver.broken = fault;
    const char *name;
    cuGetErrorName(fault, &name);
    const Dim3 block = *entry.block;
    COMPLAIN("%s in %s, block %u %u %u, thread %u", name, entry.name, block.x, block.y, block.z, entry.thread->x);
    if (fault_address) describe(fault_address);
}

// Instead of a kernel that somebody wants to fail.
void fail(const machine::Entry &entry, Result how) {
    driver.broken = how;
    driver.lost |= how == UNKNOWN_ERROR;
    const char *name;
    cuGetErrorName(how, &name);
    COMPLAIN("%s in %s, as KVSIEVE_EMULATED_FAULTS says", name, entry.name);
}

// The length of an ELF file: its section headers are its end.
size_t elf_bytes(const Elf64_Ehdr &header) { return header.e_shoff + size_t(header.e_shnum) * header.e_shentsize; }

// Whether code for an architecture runs here: the same major version, no later minor one; sm_90a runs on 9.0 only.
bool runs_here(machine::Architecture architecture) {
    const Model &model = Model::get();
    const int major = architecture.number / 10, minor = architecture.number % 10;
    return model.major == major && (architecture.feature == 'a' ? model.minor == minor : model.minor >= minor);
}

Function *function_of(void *handle) {
    for (const auto &[key, module] : modules)
        for (const auto &[name, function] : module->functions)
            if (function.get() == handle) return function.get();
    return nullptr;
}

} // namespace

void forget_modules() {
    for (auto &[handle, module] : modules) {
        if (driver.broken) continue; // fibers of the failed kernel are still there, and their file keeps its name
        dlclose(module->library);
        close(module->file);
    }
    modules.clear();
}

API cuModuleLoadData(void **handle, const void *image) {
    BEGIN(context);
    const Elf64_Ehdr &header = *static_cast<const Elf64_Ehdr *>(image);
    if (memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) {
        COMPLAIN("a module that is no ELF file: the device takes what its own NVRTC gives as machine code");
        return INVALID_IMAGE;
    }
    if (header.e_machine != EM_X86_64) return NO_BINARY_FOR_GPU;
    if (is_timing) {
        COMPLAIN("a module is loaded between two timed events, and its loading would be timed");
        return NOT_PERMITTED;
    }
    if (strikes("load")) return OUT_OF_MEMORY;
    const int file = memfd_create("kvsieve-kernels", MFD_CLOEXEC);
    const size_t bytes = elf_bytes(header);
    if (file < 0 || write(file, image, bytes) != ssize_t(bytes)) return OUT_OF_MEMORY;
    void *library = dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
    const auto *architecture = library ? static_cast<const machine::Architecture *>(dlsym(library, "kvsieve_architecture")) : nullptr;
    const auto *entry = library ? static_cast<const machine::Entry *>(dlsym(library, "kvsieve_kernels")) : nullptr;
    if (!architecture || !entry || !runs_here(*architecture)) {
        if (!library) COMPLAIN("%s", dlerror());
        const Result result = architecture && entry ? NO_BINARY_FOR_GPU : INVALID_IMAGE;
        if (library) dlclose(library);
        close(file);
        return result;
    }
    catch_signals();
    auto module = std::make_unique<Module>(Module{library, file, {}});
    *handle = module.get();
    for (; entry->name; entry++) module->functions[entry->name].reset(new Function{entry, *handle});
    modules[*handle] = std::move(module);
    return SUCCESS;
}

API cuModuleUnload(void *handle) {
    BEGIN(context);
    auto found = modules.find(handle);
    if (found == modules.end()) return INVALID_HANDLE;
    drain_all();
    if (driver.broken) return driver.broken; // fibers of the failed kernel are still there
    dlclose(found->second->library);
    close(found->second->file);
    modules.erase(found);
    return SUCCESS;
}

API cuModuleGetFunction(void **function, void *handle, const char *name) {
    BEGIN(context);
    auto module = modules.find(handle);
    if (module == modules.end()) return INVALID_HANDLE;
    auto found = module->second->functions.find(name);
    if (found == module->second->functions.end()) return NOT_FOUND;
    *function = found->second.get();
    return SUCCESS;
}

API cuFuncSetAttribute(void *handle, int attribute, int value) {
    BEGIN(context);
    Function *function = function_of(handle);
    if (!function) return INVALID_HANDLE;
    if (attribute == 8) { // MAX_DYNAMIC_SHARED_SIZE_BYTES
        if (value < 0 || value > Model::get().shared_block_bytes) return INVALID_VALUE;
        function->dynamic_limit_bytes = value;
        return SUCCESS;
    }
    // PREFERRED_SHARED_MEMORY_CARVEOUT is a wish; the rest cannot be set, or is about clusters.
    return attribute == 9 ? SUCCESS : NOT_SUPPORTED;
}

API cuFuncGetAttribute(int *value, int attribute, void *handle) {
    BEGIN(context);
    Function *function = function_of(handle);
    if (!function) return INVALID_HANDLE;
    switch (attribute) {
    case 0: *value = int(function->entry->most_threads); return SUCCESS; // MAX_THREADS_PER_BLOCK
    case 8: *value = function->dynamic_limit_bytes; return SUCCESS;      // MAX_DYNAMIC_SHARED_SIZE_BYTES
    default: return NOT_SUPPORTED; // registers and spills: ask NVRTC (check.py)
    }
}

API cuLaunchKernel(void *handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned threads, unsigned threads_y,
                   unsigned threads_z, unsigned shared_bytes, void *stream_handle, void **parameters, void **extra) {
    BEGIN(context);
    Function *function = function_of(handle);
    Stream *stream = stream_of(stream_handle);
    if (!function || !stream) return INVALID_HANDLE;
    const machine::Entry &entry = *function->entry;
    if (extra || threads_y != 1 || threads_z != 1 || threads % 32) {
        COMPLAIN("%s: blocks have one dimension and whole warps here, and arguments come as pointers", entry.name);
        return NOT_SUPPORTED;
    }
    if (!grid_x || !grid_y || !grid_z || grid_x > INT32_MAX || grid_y > 65535 || grid_z > 65535 || !threads ||
        threads > unsigned(MOST_THREADS) || (entry.arguments && !parameters)) {
        COMPLAIN("%s: a grid of %u %u %u blocks of %u threads", entry.name, grid_x, grid_y, grid_z, threads);
        return INVALID_VALUE;
    }
    if (shared_bytes > unsigned(function->dynamic_limit_bytes)) {
        COMPLAIN("%s: %u bytes of shared memory, and %d were set", entry.name, shared_bytes, function->dynamic_limit_bytes);
        return INVALID_VALUE;
    }
    if (threads > entry.most_threads) {
        COMPLAIN("%s: %u threads, and it was compiled for %u", entry.name, threads, entry.most_threads);
        return LAUNCH_OUT_OF_RESOURCES;
    }
    count_launch(entry.name);
    auto arguments = std::make_shared<Arguments>(entry, parameters);
    const Dim3 grid{grid_x, grid_y, grid_z};
    const Result wanted = strikes("launch", entry.name) ? ILLEGAL_ADDRESS : strikes("lost", entry.name) ? UNKNOWN_ERROR : SUCCESS;
    enqueue(*stream, [=, &entry] { wanted ? fail(entry, wanted) : run(entry, *arguments, grid, threads, shared_bytes); });
    return SUCCESS;
}
