// What the tests see of the emulated CUDA, and what they let go wrong there.
#include <condition_variable>
#include <cstdio>
#include <map>
#include <mutex>

#include "device.h"

namespace {

constexpr long HANGS = -1;

// Never destroyed, because threads use them to the end of the process. All are guarded by `lock`.
std::mutex& lock = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;
auto& problems = *new std::string;
auto& calls = *new std::string;
auto& wishes = *new std::map<std::string, long>;
auto& counts = *new std::map<std::string, long>;

typedef std::unique_lock<std::mutex> Hold;

const char* taken(std::string& lines) {
    static std::string told;
    Hold hold(lock);
    told.clear();
    told.swap(lines);
    return told.c_str();
}

}  // namespace

void host_cuda::problem(const std::string& what) {
    Hold hold(lock);
    problems += what + "\n";
    fprintf(stderr, "host CUDA: %s\n", what.c_str());
}

int host_cuda::met(const char* call, long number) {
    Hold hold(lock);
    if (wishes["calls are noted"]) calls += std::string(call) + " " + std::to_string(number) + "\n";
    changed.wait(hold, [&] { return wishes[call] != HANGS; });
    return (int)wishes[call];
}

long host_cuda::wished(const char* name) {
    Hold hold(lock);
    return wishes[name];
}

void host_cuda::count(const char* what, long change) {
    Hold hold(lock);
    counts[what] += change;
}

// What was noted since the last call, a line each.
extern "C" const char* host_cuda_problems() { return taken(problems); }

extern "C" const char* host_cuda_calls() { return taken(calls); }

extern "C" unsigned host_cuda_first_block() { return host_cuda::wished("the first block of kernels"); }

extern "C" long host_cuda_count(const char* what) {
    Hold hold(lock);
    return counts[what];
}

extern "C" void host_cuda_wish(const char* name, long number) {
    Hold hold(lock);
    wishes[name] = number;
    changed.notify_all();
}

extern "C" void host_cuda_wish_nothing() {
    Hold hold(lock);
    wishes.clear();
    changed.notify_all();
}
