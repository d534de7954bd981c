// Before a kernel's text, when it is compiled for the host: what NVRTC knows by itself, and how a kernel is launched.
//
// All threads of all blocks run one after another on one thread of the host, the last first. In a program with
// __syncthreads, each thread of a block is a fiber, and each waits there for the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <new>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <math.h>
#include <time.h>
#include <ucontext.h>

#define __CUDACC_VER_MAJOR__ 12
#define __CUDACC_VER_MINOR__ 9
#define __forceinline__ inline
#define __noinline__
#define __device__
#define __host__
#define __shared__ static thread_local __attribute__((aligned(16)))  // a block is on one thread
#define __constant__ static

namespace host_cuda {
struct Place { unsigned x, y, z; };
}

static thread_local host_cuda::Place blockIdx, threadIdx, blockDim, gridDim;

// ---- Functions without a header.

// Kernels of other streams may run at the same time: that is no race, and not noted.
#define ATOMIC template <class T> __attribute__((noinline, no_sanitize("kernel-address"))) static T

ATOMIC atomicAdd(T* at, T number) {
    if constexpr (std::is_integral<T>::value) return __atomic_fetch_add(at, number, __ATOMIC_RELAXED);
    T was = *at;
    *at = was + number;
    return was;
}
ATOMIC atomicCAS(T* at, T wanted, T number) {
    __atomic_compare_exchange_n(at, &wanted, number, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return wanted;
}
template <class T> static T min(T a, T b) { return a < b ? a : b; }
template <class T> static T max(T a, T b) { return a < b ? b : a; }

namespace host_cuda {
template <class To, class From> To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "the bits of one are those of the other");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline void read_clock(long long& nanoseconds) {  // instead of PTX's %globaltimer
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    nanoseconds = now.tv_sec * 1000000000ll + now.tv_nsec;
}
}  // namespace host_cuda

// ---- PTX: nvrtc.cpp makes a call of what `asm` says.

static inline float ptx_add_rn_f32(float a, float b) { return a + b; }
static inline float ptx_sub_rn_f32(float a, float b) { return a - b; }
static inline float ptx_mul_rn_f32(float a, float b) { return a * b; }
static inline float ptx_div_rn_f32(float a, float b) { return a / b; }
static inline unsigned ptx_setp_lt_f32(float a, float b) { return a < b; }

static inline float ptx_cvt_f32_f16(unsigned short half) {
    const unsigned sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
    if (rest >= 0x7c00u) return host_cuda::bits<float>(sign | 0x7f800000u | (rest << 13));
    const float size = host_cuda::bits<float>(rest << 13) * host_cuda::bits<float>((127 + 112) << 23);  // exact
    return host_cuda::bits<float>(sign | host_cuda::bits<unsigned>(size));
}

static inline unsigned short ptx_cvt_rn_f16_f32(float x) {
    const unsigned its = host_cuda::bits<unsigned>(x), size = its & 0x7fffffffu;
    unsigned rest;
    if (size > 0x7f800000u) rest = 0x7e00u;
    else if (size >= 0x477ff000u) rest = 0x7c00u;  // 65520 is the least that rounds to infinity
    else if (size < 0x38800000u) rest = host_cuda::bits<unsigned>(host_cuda::bits<float>(size) + 0.5f) - 0x3f000000u;
    else rest = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
    return (its >> 16 & 0x8000u) | rest;
}

#define __ldcs(from) (*(from))

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
static inline float __int_as_float(int x) { return host_cuda::bits<float>(x); }
static inline int __float_as_int(float x) { return host_cuda::bits<int>(x); }
static inline long long __double_as_longlong(double x) { return host_cuda::bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return host_cuda::bits<double>(x); }

// ---- Launches.

namespace host_cuda {

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool is_done;
};
static thread_local std::vector<Fiber> fibers;
static thread_local ucontext_t scheduler;
static thread_local unsigned running;  // which fiber
static thread_local const std::function<void()>* body;

static void yield() { swapcontext(&fibers[running].context, &scheduler); }

static void begin() {
    (*body)();
    fibers[running].is_done = true;
    yield();
}

static Place place_of(unsigned thread) {
    return {thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / blockDim.x / blockDim.y};
}

static void run_fibers(unsigned number, const std::function<void()>& call) {
    body = &call;
    if (fibers.size() < number) fibers.resize(number);
    for (unsigned at = 0; at < number; at++) {
        Fiber& its = fibers[at];
        its.stack.resize(1 << 16);
        its.is_done = false;
        getcontext(&its.context);
        its.context.uc_stack.ss_sp = its.stack.data();
        its.context.uc_stack.ss_size = its.stack.size();
        its.context.uc_link = &scheduler;
        makecontext(&its.context, begin, 0);
    }
    for (bool is_any_left = true; is_any_left;) {
        is_any_left = false;
        for (running = 0; running < number; running++) {
            if (fibers[running].is_done) continue;
            threadIdx = place_of(running);
            swapcontext(&scheduler, &fibers[running].context);
            is_any_left |= !fibers[running].is_done;
        }
    }
}

static void run_block(unsigned number, const std::function<void()>& call) {
#ifdef HOST_CUDA_FIBERS
    run_fibers(number, call);
#else
    for (unsigned at = number; at-- > 0;) {
        threadIdx = place_of(at);
        call();
    }
#endif
}

extern "C" unsigned host_cuda_first_block();

static void run_grid(Place grid, Place block, const std::function<void()>& call) {
    gridDim = grid;
    blockDim = block;
    for (unsigned z = grid.z; z-- > 0;)
        for (unsigned y = grid.y; y-- > 0;)
            for (unsigned x = grid.x, first = host_cuda_first_block(); x-- > first;) {
                blockIdx = {x, y, z};
                run_block(block.x * block.y * block.z, call);
            }
}

template <class... Types> constexpr size_t parameter_bytes(void (*)(Types...) = nullptr) {
    return (sizeof(typename std::decay<Types>::type) + ... + 0);
}

// Copies the parameters at once, as the caller may change them, and returns the work.
template <class... Types, size_t... AT> std::function<void()>* prepare(
    void (*kernel)(Types...), void** parameters, const unsigned* grid, const unsigned* block, std::index_sequence<AT...>
) {
    static_assert(parameter_bytes<Types...>() <= HOST_CUDA_PARAMETERS, "NVRTC takes no more parameters for this GPU");
    auto held = std::make_tuple(*(typename std::decay<Types>::type*)parameters[AT]...);
    const Place blocks = {grid[0], grid[1], grid[2]}, threads = {block[0], block[1], block[2]};
    return new std::function<void()>([=] { run_grid(blocks, threads, [&] { kernel(std::get<AT>(held)...); }); });
}

template <class... Types> std::function<void()>* launch(
    void (*kernel)(Types...), void** parameters, const unsigned* grid, const unsigned* block
) {
    return prepare(kernel, parameters, grid, block, std::index_sequence_for<Types...>());
}

}  // namespace host_cuda

static inline void __syncthreads() { host_cuda::yield(); }
static inline void __syncwarp(unsigned = 0) { host_cuda::yield(); }
