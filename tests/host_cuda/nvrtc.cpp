// NVRTC on the host: the functions of libnvrtc.so.12 that CuPy calls. g++ makes of a program a shared library, which is
// what driver.cpp takes for a module.
//
// The program is preprocessed first, in order to find the kernels also where macros make them. What was compiled is kept,
// for all processes, in the folder HOST_CUDA, where kernel.h is; and kernel.h itself, which halves the time of a kernel.
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "device.h"

typedef int nvrtcResult;

namespace {

enum { SUCCESS = 0, COMPILATION = 6, NOT_EMULATED = 11 };

// What is undefined ends the process: 16 bytes from an address that is no multiple of 16, say, which a GPU refuses.
// Before each access to memory there is a call, which accesses.cpp has.
const char* const COMMAND =
    "g++ -O1 -std=c++17 -w -fpermissive -ffp-contract=off -fPIC -shared "
    "-fsanitize=alignment -fsanitize-undefined-trap-on-error -fsanitize=kernel-address "
    "--param asan-instrumentation-with-call-threshold=0 --param asan-stack=0 --param asan-globals=0 ";
const std::string MANY = "-DHOST_CUDA_PARAMETERS=32764 ", FEW = "-DHOST_CUDA_PARAMETERS=4096 ";
// Complex numbers of CuPy are aligned to their size only for CUDA's own compilers.
const std::string COMPLEX = "#include <cupy/complex.cuh>", ALIGNED_COMPLEX =
    "#include <cupy/complex/namespace.h>\n#define __CUDACC__\n#include <cupy/complex.cuh>\n#undef __CUDACC__";
// CUDA's compilers know this type without a header, which other programs include.
const std::string VECTOR = "struct alignas(16) uint4 { unsigned x, y, z, w; };\n";
const std::string CLOCK = "asm volatile(\"mov.u64 %0, %globaltimer;\" : \"=l\"";

struct Program {
    std::string source, log, image;
};

std::string folder() {
    const char* named = getenv("HOST_CUDA");
    return named ? named : ".";
}

std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

void write(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

bool succeeds(const std::string& command, const std::string& log) {
    return std::system((command + " > '" + log + "' 2>&1").c_str()) == 0;
}

std::string for_the_host(const std::string& source) {
    const bool is_alone = source.find("#include") == source.npos;
    std::string text = (is_alone ? VECTOR : "") + "#line 1 \"kernel.cu\"\n" + source;
    if (const size_t at = text.find(COMPLEX); at != text.npos) text.replace(at, COMPLEX.size(), ALIGNED_COMPLEX);
    for (size_t at; (at = text.find(CLOCK)) != text.npos;) text.replace(at, CLOCK.size(), "host_cuda::read_clock(");
    return text;
}

// `__global__ void name(`, with __launch_bounds__(...) before or after `void`
std::set<std::string> kernels_of(const std::string& preprocessed) {
    static const std::regex name("^\\s*(?:__launch_bounds__\\([^)]*\\)\\s*|void\\s+)*(\\w+)\\s*\\(");
    std::set<std::string> names;
    const std::string mark = "__global__";
    for (size_t at = 0; (at = preprocessed.find(mark, at)) != preprocessed.npos;) {
        at += mark.size();
        const std::string after = preprocessed.substr(at, 300);
        std::smatch found;
        if (std::regex_search(after, found, name)) names.insert(found[1]);
    }
    return names;
}

// `asm("add.rn.f32" " %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b))` to `c = ptx_add_rn_f32(a, b)`, which kernel.h has
std::string with_calls_of_ptx(std::string text) {
    static const std::regex assembly("^asm\\s*\\(((?:\"[^\"]*\"\\s*)+):\\s*\"=\\w\"\\(([^)]*)\\)\\s*:([^;]*)\\)\\s*;");
    static const std::regex word("[a-z]+(?:\\.[a-z]+)*(?:\\.f\\d\\d)+"), constraint("\"\\w\"");
    for (size_t at = 0; (at = text.find("asm", at)) != text.npos; at++) {
        const std::string after = text.substr(at, 300);
        std::smatch found, instruction;
        if (!std::regex_search(after, found, assembly)) continue;
        const std::string code = found[1];
        if (!std::regex_search(code, instruction, word)) continue;
        const std::string name = std::regex_replace(instruction.str(), std::regex("\\."), "_");
        const std::string call = found.str(2) + " = ptx_" + name + "(" + std::regex_replace(found.str(3), constraint, "") + ");";
        text.replace(at, found.length(), call);
    }
    return text;
}

std::string with_launches(const std::string& preprocessed) {
    std::string text = "#define __global__\n#define __launch_bounds__(...)\n" + preprocessed + "\n";
    for (auto& name : kernels_of(preprocessed))
        text += "extern \"C\" std::function<void()>* launch_" + name +
                "(void** parameters, const unsigned* grid, const unsigned* block) "
                "{ return host_cuda::launch(" + name + ", parameters, grid, block); }\n"
                "extern \"C\" size_t parameters_" + name + "() { return host_cuda::parameter_bytes(" + name + "); }\n";
    return text;
}

int version() {  // as CUDA writes it
    const long wished = host_cuda::wished("NVRTC's version");
    return wished ? (int)wished : 12090;
}

// Whether parameters of more than 4,096 bytes are compiled: since CUDA 12.1, and for GPUs since Volta.
bool takes_many(int number, const char* const* options) {
    int capability = 0;
    for (int at = 0; at < number; at++) sscanf(options[at], "-arch=%*[a-z]_%d", &capability);
    return version() >= 12010 && capability >= 70;
}

bool compile(Program& program, const std::string& options, const std::string& path) {
    const std::string part = path + "." + std::to_string(getpid()), log = part + ".log", header = folder() + "/kernel.h";
    const bool has_fibers = program.source.find("__syncthreads") != std::string::npos;
    const std::string command = COMMAND + options + (has_fibers ? "-DHOST_CUDA_FIBERS " : "");
    if (access((header + ".gch").c_str(), R_OK) != 0 &&  // which g++ takes where these options are the same, as mostly
        succeeds(COMMAND + MANY + "-x c++-header '" + header + "' -o '" + part + ".gch'", log))
        rename((part + ".gch").c_str(), (header + ".gch").c_str());
    write(part + ".cu", for_the_host(program.source));
    bool is_done = succeeds(command + "-x c++ -imacros '" + header + "' -E '" + part + ".cu' -o '" + part + ".ii'", log);
    if (is_done) {
        write(part + ".cpp", with_launches(with_calls_of_ptx(read(part + ".ii"))));
        is_done = succeeds(command + "-x c++ -include '" + header + "' '" + part + ".cpp' -o '" + part + ".so'", log);
    }
    program.log = read(log);
    if (is_done) rename((part + ".so").c_str(), path.c_str());
    for (auto end : {".cu", ".ii", ".cpp", ".log"}) unlink((part + end).c_str());
    return is_done;
}

}  // namespace

#define NVRTC extern "C" nvrtcResult

extern "C" const char* nvrtcGetErrorString(nvrtcResult code) {
    return code == COMPILATION ? "NVRTC_ERROR_COMPILATION" : code ? "not emulated" : "NVRTC_SUCCESS";
}

template <class T, class U> static nvrtcResult give(T* to, U what) {
    *to = what;
    return SUCCESS;
}

static nvrtcResult copy(const std::string& from, char* to) {  // with the zero at its end, if it is a text
    memcpy(to, from.data(), from.size());
    return SUCCESS;
}

NVRTC nvrtcVersion(int* major, int* minor) { return give(major, version() / 1000), give(minor, version() / 10 % 100); }

NVRTC nvrtcCreateProgram(Program** program, const char* source, const char*, int, const char* const*, const char* const*) {
    return give(program, new Program{source, "", ""});
}

NVRTC nvrtcDestroyProgram(Program** program) {
    delete *program;
    return give(program, nullptr);
}

NVRTC nvrtcCompileProgram(Program* program, int number, const char* const* options) {
    std::string used;
    for (int at = 0; at < number; at++)
        if (!strncmp(options[at], "-I", 2) || !strncmp(options[at], "-D", 2)) used += "'" + std::string(options[at]) + "' ";
    used += "-I'" + folder() + "/include' " + (takes_many(number, options) ? MANY : FEW);
    const size_t digest = std::hash<std::string>()(used + program->source);
    const std::string path = folder() + "/kernels/" + std::to_string(digest) + ".so";
    const int lock = open((path + ".lock").c_str(), O_CREAT | O_RDWR, 0600);  // one process compiles it, and the others wait
    flock(lock, LOCK_EX);
    const bool is_there = access(path.c_str(), R_OK) == 0 || compile(*program, used, path);
    close(lock);
    if (!is_there) return COMPILATION;
    program->image = read(path);
    return SUCCESS;
}

// Of an empty program, of which CuPy wants to know the version only.
static const std::string PTX("// compiled for the host\n\0", 26);

NVRTC nvrtcGetCUBINSize(Program* program, size_t* nbytes) { return give(nbytes, program->image.size()); }
NVRTC nvrtcGetCUBIN(Program* program, char* image) { return copy(program->image, image); }
NVRTC nvrtcGetPTXSize(Program*, size_t* nbytes) { return give(nbytes, PTX.size()); }
NVRTC nvrtcGetPTX(Program*, char* text) { return copy(PTX, text); }
NVRTC nvrtcGetProgramLogSize(Program* program, size_t* nbytes) { return give(nbytes, program->log.size() + 1); }
NVRTC nvrtcGetProgramLog(Program* program, char* text) { return copy(program->log + '\0', text); }
NVRTC nvrtcAddNameExpression(Program*, const char*) { return NOT_EMULATED; }
