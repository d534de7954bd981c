// What the emulated runtime, driver and NCCL share: streams, which do their work later, and memory.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

namespace host_cuda {

typedef std::function<void()> Work;

// Notes what a GPU would answer with wrong numbers, a crash or a hang. The tests look at it: host_cuda_problems().
void problem(const std::string& what);

// Puts work on a stream, whose thread does it later. Returns a code of CUDA's; 0 is success.
int enqueue(void* stream, Work work);

int current_device();
int device_of_stream(void* stream);                        // -1: there is no such stream
int device_of_memory(const void* address, size_t nbytes);  // -1: not the memory of a device, or not all of it

}  // namespace host_cuda
