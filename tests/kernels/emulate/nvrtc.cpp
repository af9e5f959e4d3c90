// libnvrtc.so.13 for the emulated device: the program is compiled by g++ against machine.hpp, and what it gives as
// machine code is a shared object for this CPU, which the emulated driver loads.
//
// It takes the options that the crate uses and refuses others, as NVRTC does. FOLDER (of machine.hpp) and CXX are set
// when this library is built.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <spawn.h>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

extern "C" char **environ;

#define API extern "C" __attribute__((visibility("default")))

namespace {

enum Result { SUCCESS = 0, CREATION_FAILURE = 2, INVALID_INPUT = 3, INVALID_PROGRAM = 4, INVALID_OPTION = 5, COMPILATION = 6 };

constexpr int ARCHITECTURES[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};

struct Program {
    std::string source, log, code;
};

struct Folder {
    std::filesystem::path path;
    Folder() {
        std::string name = (std::filesystem::temp_directory_path() / "kvsieve-emulated-XXXXXX").string();
        if (const char *made = mkdtemp(name.data())) path = made;
    }
    ~Folder() {
        std::error_code ignored;
        if (!path.empty()) std::filesystem::remove_all(path, ignored);
    }
};

std::string contents(const std::filesystem::path &path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

// Runs a command with what it says in `log`; its exit status.
int run(const std::vector<std::string> &words, const std::filesystem::path &log) {
    std::vector<char *> arguments;
    for (const std::string &word : words) arguments.push_back(const_cast<char *>(word.c_str()));
    arguments.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    pid_t child;
    int status = posix_spawnp(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    if (status != 0) return 127;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

// The program with a table of its kernels at the end. Kernels are known by the macro that makes them.
std::string with_table(const std::string &source, const std::string &number, const std::string &feature) {
    static const std::regex kernel(R"((?:^|\n)KERNEL\w*\(([^)]*)\)\s*(\w+)\s*\()");
    std::string text = source + "\n#define KVSIEVE_EXPORT extern \"C\" __attribute__((visibility(\"default\"))) const\n";
    text += "KVSIEVE_EXPORT machine::Entry kvsieve_kernels[] = {\n";
    for (std::sregex_iterator found(source.begin(), source.end(), kernel), end; found != end; ++found) {
        const std::string threads = (*found)[1], name = (*found)[2];
        text += "    machine::Export<" + name + ">::entry(\"" + name + "\", " + threads + "),\n";
    }
    text += "    {}};\nKVSIEVE_EXPORT machine::Architecture kvsieve_architecture = {" + number;
    return text + ", '" + (feature.empty() ? "\\0" : feature) + "'};\n";
}

bool starts_with(const std::string &text, const char *start) { return text.rfind(start, 0) == 0; }

} // namespace

API int nvrtcVersion(int *major, int *minor) {
    *major = 13, *minor = 0;
    return SUCCESS;
}

// Those of NVRTC 13.0.
API int nvrtcGetNumSupportedArchs(int *count) {
    *count = int(std::size(ARCHITECTURES));
    return SUCCESS;
}

API int nvrtcGetSupportedArchs(int *architectures) {
    std::copy(std::begin(ARCHITECTURES), std::end(ARCHITECTURES), architectures);
    return SUCCESS;
}

API const char *nvrtcGetErrorString(int result) {
    static const char *const names[] = {"NVRTC_SUCCESS", "NVRTC_ERROR_OUT_OF_MEMORY", "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
                                        "NVRTC_ERROR_INVALID_INPUT", "NVRTC_ERROR_INVALID_PROGRAM",
                                        "NVRTC_ERROR_INVALID_OPTION", "NVRTC_ERROR_COMPILATION"};
    return result >= 0 && result <= COMPILATION ? names[result] : "NVRTC_ERROR unknown";
}

API int nvrtcCreateProgram(void **program, const char *source, const char *, int headers, const char *const *, const char *const *) {
    if (!program || !source) return INVALID_INPUT;
    if (headers) return CREATION_FAILURE; // the crate puts headers into the text
    *program = new Program{source, {}, {}};
    return SUCCESS;
}

API int nvrtcDestroyProgram(void **program) {
    if (!program || !*program) return INVALID_PROGRAM;
    delete static_cast<Program *>(*program);
    *program = nullptr;
    return SUCCESS;
}

API int nvrtcCompileProgram(void *handle, int count, const char *const *options) {
    Program &program = *static_cast<Program *>(handle);
    Folder folder;
    if (folder.path.empty()) return program.log = "no temporary folder", COMPILATION;
    const std::filesystem::path source = folder.path / "kernels.cpp", code = folder.path / "kernels.so", log = folder.path / "log";
    // Hidden names and no unique ones: two loaded programs must not share a variable of the same name.
    std::vector<std::string> command = {CXX, "-shared", "-fPIC", "-O2", "-g1", "-fvisibility=hidden", "-fno-gnu-unique"};
    command.insert(command.end(), {"-Wl,-Bsymbolic", "-DKVSIEVE_EMULATE", "-I" FOLDER, "-w"});
    // fmaf and conversions of f16 as instructions, not calls; what the source does not fuse stays apart.
    if (__builtin_cpu_supports("x86-64-v3")) command.insert(command.end(), {"-march=x86-64-v3", "-ffp-contract=off"});
    std::string number = "52", feature; // NVRTC's own default is as old
    for (int i = 0; i < count; i++) {
        static const std::regex architecture("(?:--gpu-architecture|-arch)=sm_([0-9]+)([af]?)");
        const std::string option = options[i];
        std::smatch found;
        if (std::regex_match(option, found, architecture))
            number = found[1], feature = found[2];
        else if (starts_with(option, "-D") || starts_with(option, "-std="))
            command.push_back(option);
        else if (!starts_with(option, "--ptxas-options=") && option != "-lineinfo" && option != "--generate-line-info")
            return program.log = "the emulated NVRTC does not know the option '" + option + "'", INVALID_OPTION;
    }
    command.push_back("-D__CUDA_ARCH__=" + number + "0");
    if (!feature.empty()) command.push_back("-D__CUDA_ARCH_FEAT_SM" + number + "_ALL");
    std::ofstream(source) << with_table(program.source, number, feature);
    command.insert(command.end(), {source.string(), "-o", code.string()});
    const int status = run(command, log);
    program.log = contents(log);
    if (status == 127) program.log += CXX " could not be started";
    program.code = status == 0 ? contents(code) : "";
    return program.code.empty() ? COMPILATION : SUCCESS;
}

API int nvrtcGetProgramLogSize(void *program, size_t *bytes) {
    *bytes = static_cast<Program *>(program)->log.size() + 1;
    return SUCCESS;
}

API int nvrtcGetProgramLog(void *program, char *log) {
    const std::string &text = static_cast<Program *>(program)->log;
    memcpy(log, text.c_str(), text.size() + 1);
    return SUCCESS;
}

API int nvrtcGetCUBINSize(void *program, size_t *bytes) {
    *bytes = static_cast<Program *>(program)->code.size();
    return *bytes ? SUCCESS : INVALID_PROGRAM;
}

API int nvrtcGetCUBIN(void *program, char *code) {
    const std::string &bytes = static_cast<Program *>(program)->code;
    memcpy(code, bytes.data(), bytes.size());
    return bytes.empty() ? INVALID_PROGRAM : SUCCESS;
}
