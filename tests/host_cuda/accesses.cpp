// The memory that kernels read and write: g++ puts a call before each access, as it does for the sanitizer of a kernel of an
// operating system (see nvrtc.cpp).
#include <algorithm>
#include <vector>

#include "device.h"

namespace {

struct Range {
    size_t low, high;
};

constexpr int NUM_OPEN = 16;

// Ranges that grow: the threads of a kernel go through a few of them at the same pace.
struct Ranges {
    Range open[NUM_OPEN] = {};
    int next = 0;  // the one that is likely to grow
    std::vector<Range> closed;

    void add(size_t low, size_t high) {
        for (int tries = 0; tries < NUM_OPEN; tries++, next = (next + 1) % NUM_OPEN) {
            Range& its = open[next];
            if (low > its.high || high < its.low || its.low == its.high) continue;
            its = {std::min(low, its.low), std::max(high, its.high)};
            next = (next + 1) % NUM_OPEN;
            return;
        }
        if (open[next].high) closed.push_back(open[next]);
        open[next] = {low, high};
        next = (next + 1) % NUM_OPEN;
    }

    std::vector<Range> joined() {
        for (auto& its : open)
            if (its.high) closed.push_back(its);
        std::sort(closed.begin(), closed.end(), [](const Range& a, const Range& b) { return a.low < b.low; });
        std::vector<Range> all;
        for (auto& its : closed) {
            if (!all.empty() && its.low <= all.back().high) all.back().high = std::max(all.back().high, its.high);
            else all.push_back(its);
        }
        *this = {};
        return all;
    }
};

thread_local bool is_noted = false;
thread_local Ranges read, written;

void touch(Ranges& ranges, size_t address, size_t nbytes) {
    if (is_noted && host_cuda::is_emulated_memory(address)) ranges.add(address, address + nbytes);
}

}  // namespace

void host_cuda::begin_kernel() { is_noted = true; }

void host_cuda::end_kernel() {
    is_noted = false;
    for (bool is_write : {false, true})
        for (auto& its : (is_write ? written : read).joined()) {
            const auto address = (const void*)its.low;
            uses(address, its.high - its.low, is_write);
            const int device = device_of_memory(address, 1);
            if (device >= 0 && device != device_of_work()) problem("a kernel uses memory of another device");
        }
}

#define ACCESSES(number) \
    extern "C" void __asan_load##number##_noabort(size_t address) { touch(read, address, number); } \
    extern "C" void __asan_store##number##_noabort(size_t address) { touch(written, address, number); }

ACCESSES(1) ACCESSES(2) ACCESSES(4) ACCESSES(8) ACCESSES(16)

extern "C" void __asan_loadN_noabort(size_t address, size_t nbytes) { touch(read, address, nbytes); }

extern "C" void __asan_storeN_noabort(size_t address, size_t nbytes) { touch(written, address, nbytes); }

extern "C" void __asan_handle_no_return() {}
