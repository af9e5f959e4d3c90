// Faults that somebody asks for, so that what the crate does about them can be seen.
//
// KVSIEVE_EMULATED_FAULTS lists them with commas between: KIND=NAME@N strikes at the N-th time, from 1, that KIND happens
// to what is called NAME; without =NAME, to anything. Kinds are `launch` (the kernel ends with an illegal address),
// `lost` (the kernel ends with an unknown error and the device is gone), `alloc` and `load` (no memory for an allocation,
// or for a module).
#include "driver.hpp"

#include <cstdlib>
#include <string>
#include <vector>

namespace {

struct Wanted {
    std::string kind, name;
    unsigned long at, seen;
};

std::vector<Wanted> read() {
    std::vector<Wanted> all;
    const char *text = getenv("KVSIEVE_EMULATED_FAULTS");
    std::string rest = text ? text : "";
    while (!rest.empty()) {
        const size_t comma = rest.find(',');
        const std::string one = rest.substr(0, comma);
        rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
        const size_t at = one.find('@'), equals = one.find('=');
        const std::string kind = one.substr(0, equals < at ? equals : at);
        const bool known = kind == "launch" || kind == "lost" || kind == "alloc" || kind == "load";
        const unsigned long number = at == std::string::npos ? 0 : strtoul(one.c_str() + at + 1, nullptr, 10);
        if (!known || !number) {
            COMPLAIN("KVSIEVE_EMULATED_FAULTS has '%s'; it should look like launch=NAME@3, lost@1, alloc@2 or load@1", one.c_str());
            exit(2);
        }
        all.push_back({kind, equals < at ? one.substr(equals + 1, at - equals - 1) : "", number, 0});
    }
    return all;
}

} // namespace

bool strikes(const char *kind, const char *name) {
    static std::vector<Wanted> all = read();
    bool now = false;
    for (Wanted &wanted : all)
        if (wanted.kind == kind && (wanted.name.empty() || wanted.name == name)) now |= ++wanted.seen == wanted.at;
    return now;
}
