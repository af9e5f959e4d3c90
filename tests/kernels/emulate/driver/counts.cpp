// How often each function of the driver was called, for tests of what a step of the host code costs: written at the end of
// the process to the file that KVSIEVE_EMULATED_COUNT names, a line for each function, and one for each kernel's launches.
#include "driver.hpp"

#include <cstdlib>
#include <map>
#include <string>

namespace {

struct Counts {
    std::map<std::string, uint64_t> of;
    const char *file = getenv("KVSIEVE_EMULATED_COUNT");

    ~Counts() {
        FILE *to = file ? fopen(file, "w") : nullptr;
        if (file && !to) COMPLAIN("KVSIEVE_EMULATED_COUNT is '%s', which cannot be written", file);
        if (!to) return;
        for (const auto &[name, count] : of) fprintf(to, "%s %llu\n", name.c_str(), (unsigned long long)count);
        fclose(to);
    }
};
Counts counts;
int depth; // of calls in calls; the driver's lock is held

} // namespace

Call::Call(const char *name) {
    if (depth++ == 0 && counts.file) counts.of[name]++;
}

Call::~Call() { depth--; }

void count_launch(const char *kernel) {
    if (counts.file) counts.of[std::string("launch ") + kernel]++;
}
