// What the emulated runtime, driver and NCCL share: streams, which do their work later, memory, and what tests control.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

namespace host_cuda {

typedef std::function<void()> Work;

// Notes what a GPU would answer with wrong numbers, a crash or a hang. The tests look at it: host_cuda_problems().
void problem(const std::string& what);

// Notes a call, with a number. Returns the status with which a test lets it fail: 0 if it is to succeed. A call that is to
// hang does not return before the test has ended.
int met(const char* call, long number = 0);

long wished(const char* name);              // what a test has set, or 0
void count(const char* what, long change);  // how many of these there are

// Puts work on a stream, whose thread does it later. Returns a code of CUDA's; 0 is success.
int enqueue(void* stream, Work work);

// Notes memory that the current piece of work reads or writes, and that no other may be writing or reading at the time.
void uses(const void* address, size_t nbytes, bool is_write);

// Lets kernels' accesses be noted from now on, and notes those that were made.
void begin_kernel();
void end_kernel();

int current_device();
int device_of_work();                                      // which the current thread does
int device_of_stream(void* stream);                        // -1: there is no such stream
int device_of_memory(const void* address, size_t nbytes);  // -1: not the memory of a device, or not all of it
bool is_emulated_memory(size_t address);                   // that it was, or may be yet

}  // namespace host_cuda
