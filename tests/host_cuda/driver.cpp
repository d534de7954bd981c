// CUDA's driver on the host: the functions of libcuda.so.1 that CuPy calls, to load and launch kernels.
//
// A module is a shared library of the host, as nvrtc.cpp makes it. It has for each kernel a function launch_KERNEL, that
// copies the kernel's parameters and returns the work. Its threads run one after another, on the thread of the stream.
#include <cuda.h>

#include <dlfcn.h>
#include <elf.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "device.h"

using namespace host_cuda;

extern "C" int host_cudaDriverGetVersion(int* version);  // of runtime.cpp

namespace {

typedef Work* (*Launch)(void** parameters, const unsigned* grid, const unsigned* block);

struct Module {
    void* library;
    int device;
};

struct Function {
    Launch launch;
    int device;
    size_t parameter_bytes;
};

size_t size_of(const void* image) {
    auto head = (const Elf64_Ehdr*)image;
    return head->e_shoff + (size_t)head->e_shnum * head->e_shentsize;  // the sections' table is the last thing in it
}

void* load(const void* image) {  // by a name of its own, as what is loaded is known by its name
    char path[] = "/dev/shm/host-cuda-XXXXXX";
    const int file = mkstemp(path);
    const size_t nbytes = size_of(image);
    const bool is_written = write(file, image, nbytes) == (ssize_t)nbytes;
    void* library = is_written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
    close(file);
    unlink(path);
    return library;
}

}  // namespace

#define DRIVER extern "C" CUresult

template <class T, class U> static CUresult give(T* to, U what) {
    *to = what;
    return CUDA_SUCCESS;
}

DRIVER cuGetErrorName(CUresult, const char** text) { return give(text, "CUDA_ERROR of the emulated driver"); }
DRIVER cuGetErrorString(CUresult, const char** text) { return give(text, "of the emulated driver"); }
DRIVER cuCtxGetCurrent(CUcontext* its) { return give(its, (CUcontext)(size_t)(1 + current_device())); }  // each device has one
DRIVER cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
DRIVER cuCtxGetDevice(CUdevice* device) { return give(device, current_device()); }
DRIVER cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }  // a kernel of it may still be queued
DRIVER cuFuncGetAttribute(int* value, CUfunction_attribute, CUfunction) { return give(value, 32); }
DRIVER cuOccupancyMaxActiveBlocksPerMultiprocessor(int* number, CUfunction, int, size_t) { return give(number, 8); }

DRIVER cuModuleLoadData(CUmodule* module, const void* image) {
    void* library = load(image);
    if (!library) {
        fprintf(stderr, "host CUDA: a module cannot be loaded: %s\n", dlerror());
        return CUDA_ERROR_INVALID_IMAGE;
    }
    return give(module, (CUmodule) new Module{library, current_device()});
}

DRIVER cuModuleGetFunction(CUfunction* function, CUmodule handle, const char* name) {
    auto module = (Module*)handle;
    auto launch = (Launch)dlsym(module->library, (std::string("launch_") + name).c_str());
    auto parameter_bytes = (size_t(*)())dlsym(module->library, (std::string("parameters_") + name).c_str());
    if (!launch || !parameter_bytes) return CUDA_ERROR_NOT_FOUND;
    return give(function, (CUfunction) new Function{launch, module->device, parameter_bytes()});
}

DRIVER cuLaunchKernel(
    CUfunction handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
    unsigned block_z, unsigned, CUstream stream, void** parameters, void**
) {
    auto function = (Function*)handle;
    const unsigned grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
    const unsigned long long num_threads = (unsigned long long)block_x * block_y * block_z;
    if (!grid_x || !grid_y || !grid_z || !num_threads || num_threads > 1024) return CUDA_ERROR_INVALID_VALUE;
    if (function->device != current_device() || function->device != device_of_stream(stream)) {
        problem("a kernel is launched on another device than its own");
        return CUDA_ERROR_INVALID_HANDLE;
    }
    int version = 0;
    host_cudaDriverGetVersion(&version);
    if (function->parameter_bytes > (version < 12010 ? 4096 : 32764)) {
        problem("a kernel has more parameters than the driver takes");
        return CUDA_ERROR_INVALID_VALUE;
    }
    Work* work = function->launch(parameters, grid, block);
    met("a kernel");
    const int error = enqueue(stream, [its = std::move(*work)] {
        begin_kernel();
        its();
        end_kernel();
        count("kernels", 1);
    });
    delete work;
    return (CUresult)error;
}
