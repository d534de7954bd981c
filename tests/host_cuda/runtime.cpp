// CUDA's runtime on host memory: the functions of libcudart that CuPy calls, but for textures, managed memory, and graphs of
// more than one stream.
//
// CuPy has libcudart in its extension module. preload.py overwrites the beginning of each cudaXyz there with a jump to
// host_cudaXyz here. Device memory is the host's, filled with rubbish when it is allocated and when it is freed. What is
// put on a stream is done later, by a thread of the stream: its own, or for streams that wait for the legacy one, the
// thread of that. So work that should have waited for an event, and did not, goes wrong here, too, now and then.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "device.h"

using namespace host_cuda;

namespace {

constexpr size_t TOTAL_MEMORY = 8ull << 30;  // bytes of a device
constexpr int PINNED = -1;                   // instead of a device
constexpr unsigned char NEW = 0xA5, FREED = 0xDD;

int setting(const char* name, int otherwise) {
    const char* text = getenv(name);
    return text ? atoi(text) : otherwise;
}

const int num_devices = setting("TEST_GPUS", 0);
const int most_delay = setting("TEST_GPU_DELAY", 30);  // microseconds before each piece of work

struct Engine {  // a thread, and what it has still to do; the first is being done
    std::deque<Work> queue;
    bool ends = false;
};

typedef std::vector<Work> Graph;

struct Stream {
    int device, priority;
    unsigned flags;
    std::shared_ptr<Engine> engine;
    std::shared_ptr<Graph> captured = nullptr;  // what is put on it is not done, but noted here
};

struct Mark {  // a place in a stream
    bool is_reached = false;
    std::chrono::steady_clock::time_point when;
};

struct Event {
    int device;
    unsigned flags;
    std::shared_ptr<Mark> mark;
};

struct Block {
    size_t nbytes;
    int device;
};

// Never destroyed, because threads work with them to the end of the process. All are guarded by `lock`.
std::mutex& lock = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;
auto& streams = *new std::set<Stream*>;
auto& events = *new std::set<Event*>;
auto& legacy_streams = *new std::map<int, Stream*>;  // by device
auto& blocks = *new std::map<size_t, Block>;         // by address
auto& problems = *new std::string;

thread_local int its_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

typedef std::unique_lock<std::mutex> Hold;

cudaError_t failed(cudaError_t error) { return last_error = error; }

cudaError_t refused(cudaError_t error, const char* why) {
    problem(why);
    return failed(error);
}

void work_off(std::shared_ptr<Engine> engine) {
    std::minstd_rand random((unsigned)(size_t)engine.get());
    Hold hold(lock);
    for (;;) {
        changed.wait(hold, [&] { return !engine->queue.empty() || engine->ends; });
        if (engine->queue.empty()) return;
        Work work = std::move(engine->queue.front());
        hold.unlock();
        if (most_delay) std::this_thread::sleep_for(std::chrono::microseconds(random() % most_delay));
        work();
        hold.lock();
        engine->queue.pop_front();
        changed.notify_all();
    }
}

std::shared_ptr<Engine> new_engine() {
    auto engine = std::make_shared<Engine>();
    std::thread(work_off, engine).detach();
    return engine;
}

Stream* legacy_stream(int device) {
    Stream*& its = legacy_streams[device];
    if (!its) streams.insert(its = new Stream{device, 0, 0, new_engine()});
    return its;
}

Stream* find_stream(void* handle) {  // with `lock` held
    if ((size_t)handle <= 1) return legacy_stream(its_device);  // 0, or cudaStreamLegacy
    return streams.count((Stream*)handle) ? (Stream*)handle : nullptr;
}

Block* find_block(const void* address, size_t nbytes) {  // with `lock` held
    auto next = blocks.upper_bound((size_t)address);
    if (next == blocks.begin()) return nullptr;
    auto& [start, block] = *--next;
    return (size_t)address + nbytes <= start + block.nbytes ? &block : nullptr;
}

void put(Stream* stream, Work work) {  // with `lock` held
    if (stream->captured) return stream->captured->push_back(std::move(work));
    stream->engine->queue.push_back(std::move(work));
    changed.notify_all();
}

void wait_for_all(Hold& hold) {
    changed.wait(hold, [] {
        return std::all_of(streams.begin(), streams.end(), [](Stream* its) { return its->engine->queue.empty(); });
    });
}

Work wait_for(std::shared_ptr<Mark> mark) {
    return [mark] {
        Hold hold(lock);
        changed.wait(hold, [&] { return mark->is_reached; });
    };
}

Work reach(std::shared_ptr<Mark> mark) {
    return [mark] {
        Hold hold(lock);
        mark->is_reached = true;
        mark->when = std::chrono::steady_clock::now();
        changed.notify_all();
    };
}

cudaError_t allocate(void** address, size_t nbytes, size_t alignment, int device) {
    if (posix_memalign(address, alignment, std::max<size_t>(nbytes, 1))) return failed(cudaErrorMemoryAllocation);
    memset(*address, NEW, nbytes);
    Hold hold(lock);
    blocks[(size_t)*address] = {nbytes, device};
    return cudaSuccess;
}

cudaError_t release(void* address, bool is_pinned) {
    if (!address) return cudaSuccess;
    Hold hold(lock);
    wait_for_all(hold);  // as CUDA's do
    auto at = blocks.find((size_t)address);
    if (at == blocks.end() || (at->second.device == PINNED) != is_pinned)
        return hold.unlock(), refused(cudaErrorInvalidValue, "memory is freed that is not there");
    memset(address, FREED, at->second.nbytes);
    blocks.erase(at);
    free(address);
    return cudaSuccess;
}

cudaError_t make_stream(cudaStream_t* handle, unsigned flags, int priority) {
    Hold hold(lock);
    auto engine = flags & cudaStreamNonBlocking ? new_engine() : legacy_stream(its_device)->engine;
    auto stream = new Stream{its_device, priority, flags, engine};
    streams.insert(stream);
    *handle = (cudaStream_t)stream;
    return cudaSuccess;
}

}  // namespace

// ---- For the driver, NCCL and the tests.

void host_cuda::problem(const std::string& what) {
    Hold hold(lock);
    problems += what + "\n";
    fprintf(stderr, "host CUDA: %s\n", what.c_str());
}

int host_cuda::enqueue(void* handle, Work work) {
    Hold hold(lock);
    Stream* stream = find_stream(handle);
    if (!stream) return hold.unlock(), refused(cudaErrorInvalidResourceHandle, "a stream is used that is not there");
    put(stream, std::move(work));
    return cudaSuccess;
}

int host_cuda::current_device() { return its_device; }

int host_cuda::device_of_stream(void* handle) {
    Hold hold(lock);
    Stream* stream = find_stream(handle);
    return stream ? stream->device : -1;
}

int host_cuda::device_of_memory(const void* address, size_t nbytes) {
    Hold hold(lock);
    Block* block = find_block(address, nbytes);
    return block ? block->device : -1;
}

// What was noted since the last call, a line each.
extern "C" const char* host_cuda_problems() {
    static std::string told;
    Hold hold(lock);
    told.swap(problems);
    problems.clear();
    return told.c_str();
}

// ---- The runtime. The first declaration lets the compiler compare the types with CUDA's.

#define RUNTIME(name) \
    extern "C" decltype(name) host_##name; \
    extern "C" cudaError_t host_##name

RUNTIME(cudaGetDeviceCount)(int* number) {
    *number = num_devices;
    return num_devices ? cudaSuccess : failed(cudaErrorNoDevice);
}

RUNTIME(cudaGetDevice)(int* device) {
    *device = its_device;
    return cudaSuccess;
}

RUNTIME(cudaSetDevice)(int device) {
    if (device < 0 || device >= num_devices) return failed(cudaErrorInvalidDevice);
    its_device = device;
    return cudaSuccess;
}

RUNTIME(cudaDriverGetVersion)(int* version) {
    *version = 13000;
    return cudaSuccess;
}

RUNTIME(cudaGetLastError)() {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

RUNTIME(cudaDeviceGetAttribute)(int* value, cudaDeviceAttr attribute, int) {
    static const std::map<cudaDeviceAttr, int> values = {
        {cudaDevAttrComputeCapabilityMajor, 9}, {cudaDevAttrComputeCapabilityMinor, 0},
        {cudaDevAttrMultiProcessorCount, 132},  {cudaDevAttrMaxThreadsPerBlock, 1024},
        {cudaDevAttrWarpSize, 32},              {cudaDevAttrMemoryPoolsSupported, 0},
    };
    auto found = values.find(attribute);
    *value = found == values.end() ? 1 : found->second;
    return cudaSuccess;
}

RUNTIME(cudaGetDeviceProperties_v2)(cudaDeviceProp* properties, int device) {
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, "a GPU emulated on the host");
    for (int at = 0; at < 16; at++) properties->uuid.bytes[at] = (char)(17 * device + at + 1);
    memset(properties->luid, 0x5A, sizeof properties->luid);  // which CUDA leaves undefined on Linux
    properties->totalGlobalMem = TOTAL_MEMORY;
    properties->multiProcessorCount = 132;
    properties->major = 9;
    properties->l2CacheSize = 1 << 20;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->unifiedAddressing = 1;
    return cudaSuccess;
}

RUNTIME(cudaDeviceGetPCIBusId)(char* text, int size, int device) {
    snprintf(text, size, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

RUNTIME(cudaDeviceCanAccessPeer)(int* can, int, int) {
    *can = 1;
    return cudaSuccess;
}

RUNTIME(cudaDeviceEnablePeerAccess)(int, unsigned) { return cudaSuccess; }

// ---- Memory.

RUNTIME(cudaMalloc)(void** address, size_t nbytes) { return allocate(address, nbytes, 512, its_device); }

RUNTIME(cudaHostAlloc)(void** address, size_t nbytes, unsigned) { return allocate(address, nbytes, 4096, PINNED); }

RUNTIME(cudaFree)(void* address) { return release(address, false); }

RUNTIME(cudaFreeHost)(void* address) { return release(address, true); }

RUNTIME(cudaMemGetInfo)(size_t* available, size_t* total) {
    Hold hold(lock);
    size_t used = 0;
    for (auto& [address, block] : blocks) used += block.device == its_device ? block.nbytes : 0;
    *total = TOTAL_MEMORY;
    *available = TOTAL_MEMORY - used;
    return cudaSuccess;
}

RUNTIME(cudaPointerGetAttributes)(cudaPointerAttributes* attributes, const void* address) {
    Hold hold(lock);
    Block* block = find_block(address, 1);
    const bool is_pinned = block && block->device == PINNED;
    memset(attributes, 0, sizeof *attributes);
    attributes->type = !block ? cudaMemoryTypeUnregistered : is_pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = !block ? -2 : is_pinned ? 0 : block->device;
    attributes->devicePointer = (void*)address;
    attributes->hostPointer = block && !is_pinned ? nullptr : (void*)address;
    return cudaSuccess;
}

RUNTIME(cudaStreamSynchronize)(cudaStream_t stream);

RUNTIME(cudaMemcpyAsync)(void* to, const void* from, size_t nbytes, cudaMemcpyKind kind, cudaStream_t stream) {
    if (!nbytes) return cudaSuccess;
    Hold hold(lock);
    Block *target = find_block(to, nbytes), *source = find_block(from, nbytes);
    hold.unlock();
    const bool to_device = target && target->device != PINNED, from_device = source && source->device != PINNED;
    const bool should[] = {kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice,
                           kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice};
    if (kind != cudaMemcpyDefault && (to_device != should[0] || from_device != should[1]))
        return refused(cudaErrorInvalidValue, "a copy's kind is not that of its memory");
    if (!source) {  // pageable memory, which may be changed when this returns
        std::string held((const char*)from, nbytes);
        return (cudaError_t)enqueue(stream, [=] { memcpy(to, held.data(), nbytes); });
    }
    auto error = (cudaError_t)enqueue(stream, [=] { memmove(to, from, nbytes); });
    return error || target ? error : host_cudaStreamSynchronize(stream);
}

RUNTIME(cudaMemcpy)(void* to, const void* from, size_t nbytes, cudaMemcpyKind kind) {
    cudaError_t error = host_cudaMemcpyAsync(to, from, nbytes, kind, nullptr);
    return error ? error : host_cudaStreamSynchronize(nullptr);
}

RUNTIME(cudaMemcpyPeerAsync)(void* to, int, const void* from, int, size_t nbytes, cudaStream_t stream) {
    return (cudaError_t)enqueue(stream, [=] { memmove(to, from, nbytes); });
}

RUNTIME(cudaMemsetAsync)(void* to, int value, size_t nbytes, cudaStream_t stream) {
    return (cudaError_t)enqueue(stream, [=] { memset(to, value, nbytes); });
}

RUNTIME(cudaMemset)(void* to, int value, size_t nbytes) { return host_cudaMemsetAsync(to, value, nbytes, nullptr); }

// ---- Streams.

RUNTIME(cudaStreamCreate)(cudaStream_t* stream) { return make_stream(stream, 0, 0); }

RUNTIME(cudaStreamCreateWithFlags)(cudaStream_t* stream, unsigned flags) { return make_stream(stream, flags, 0); }

RUNTIME(cudaStreamCreateWithPriority)(cudaStream_t* stream, unsigned flags, int priority) {
    return make_stream(stream, flags, std::clamp(priority, -5, 0));
}

RUNTIME(cudaStreamDestroy)(cudaStream_t handle) {  // what is on the stream is still done
    Hold hold(lock);
    auto stream = (Stream*)handle;
    if (!streams.erase(stream)) return hold.unlock(), refused(cudaErrorInvalidResourceHandle, "no such stream");
    if (stream->flags & cudaStreamNonBlocking) stream->engine->ends = true;
    changed.notify_all();
    delete stream;
    return cudaSuccess;
}

#define WITH_STREAM(handle) \
    Hold hold(lock); \
    Stream* stream = find_stream(handle); \
    if (!stream) return hold.unlock(), refused(cudaErrorInvalidResourceHandle, "a stream is used that is not there")

RUNTIME(cudaStreamGetFlags)(cudaStream_t handle, unsigned* flags) {
    WITH_STREAM(handle);
    *flags = stream->flags;
    return cudaSuccess;
}

RUNTIME(cudaStreamGetPriority)(cudaStream_t handle, int* priority) {
    WITH_STREAM(handle);
    *priority = stream->priority;
    return cudaSuccess;
}

RUNTIME(cudaStreamIsCapturing)(cudaStream_t handle, cudaStreamCaptureStatus* status) {
    WITH_STREAM(handle);
    *status = stream->captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

RUNTIME(cudaStreamQuery)(cudaStream_t handle) {
    WITH_STREAM(handle);
    return stream->engine->queue.empty() ? cudaSuccess : cudaErrorNotReady;
}

RUNTIME(cudaStreamSynchronize)(cudaStream_t handle) {
    WITH_STREAM(handle);
    if (stream->captured) return failed(cudaErrorStreamCaptureUnsupported);
    auto mark = std::make_shared<Mark>();
    put(stream, reach(mark));
    changed.wait(hold, [&] { return mark->is_reached; });
    return cudaSuccess;
}

RUNTIME(cudaDeviceSynchronize)() {
    Hold hold(lock);
    wait_for_all(hold);
    return cudaSuccess;
}

// ---- Graphs. A handle is a Graph, which is never destroyed, as it may still be under way.

RUNTIME(cudaStreamBeginCapture)(cudaStream_t handle, cudaStreamCaptureMode) {
    WITH_STREAM(handle);
    if ((size_t)handle <= 1 || stream->captured) return failed(cudaErrorStreamCaptureUnsupported);
    stream->captured = std::make_shared<Graph>();
    return cudaSuccess;
}

RUNTIME(cudaStreamEndCapture)(cudaStream_t handle, cudaGraph_t* graph) {
    WITH_STREAM(handle);
    if (!stream->captured) return failed(cudaErrorIllegalState);
    *graph = (cudaGraph_t) new Graph(*stream->captured);
    stream->captured = nullptr;
    return cudaSuccess;
}

RUNTIME(cudaGraphInstantiate)(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
    *executable = (cudaGraphExec_t)graph;
    return cudaSuccess;
}

RUNTIME(cudaGraphLaunch)(cudaGraphExec_t executable, cudaStream_t handle) {
    WITH_STREAM(handle);
    for (auto& work : *(Graph*)executable) put(stream, work);
    return cudaSuccess;
}

RUNTIME(cudaGraphUpload)(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }

RUNTIME(cudaGraphDestroy)(cudaGraph_t) { return cudaSuccess; }

RUNTIME(cudaGraphExecDestroy)(cudaGraphExec_t) { return cudaSuccess; }

// ---- Events.

#define WITH_EVENT(handle) \
    Hold hold(lock); \
    auto event = (Event*)handle; \
    if (!events.count(event)) \
        return hold.unlock(), refused(cudaErrorInvalidResourceHandle, "an event is used that is not there")

RUNTIME(cudaEventCreateWithFlags)(cudaEvent_t* handle, unsigned flags) {
    Hold hold(lock);
    auto event = new Event{its_device, flags, nullptr};
    events.insert(event);
    *handle = (cudaEvent_t)event;
    return cudaSuccess;
}

RUNTIME(cudaEventCreate)(cudaEvent_t* handle) { return host_cudaEventCreateWithFlags(handle, 0); }

RUNTIME(cudaEventDestroy)(cudaEvent_t handle) {
    WITH_EVENT(handle);
    events.erase(event);
    delete event;
    return cudaSuccess;
}

RUNTIME(cudaEventRecord)(cudaEvent_t handle, cudaStream_t its_stream) {
    WITH_EVENT(handle);
    Stream* stream = find_stream(its_stream);
    if (!stream || stream->device != event->device)
        return hold.unlock(), refused(cudaErrorInvalidResourceHandle, "an event is recorded on another device's stream");
    if (stream->captured) return failed(cudaErrorStreamCaptureUnsupported);
    event->mark = std::make_shared<Mark>();
    put(stream, reach(event->mark));
    return cudaSuccess;
}

RUNTIME(cudaEventQuery)(cudaEvent_t handle) {
    WITH_EVENT(handle);
    return !event->mark || event->mark->is_reached ? cudaSuccess : cudaErrorNotReady;
}

RUNTIME(cudaEventSynchronize)(cudaEvent_t handle) {
    WITH_EVENT(handle);
    auto mark = event->mark;
    changed.wait(hold, [&] { return !mark || mark->is_reached; });
    return cudaSuccess;
}

RUNTIME(cudaEventElapsedTime)(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
    Hold hold(lock);
    auto first = (Event*)from, second = (Event*)to;
    if ((first->flags | second->flags) & cudaEventDisableTiming || !first->mark || !second->mark)
        return failed(cudaErrorInvalidResourceHandle);
    if (!first->mark->is_reached || !second->mark->is_reached) return failed(cudaErrorNotReady);
    *milliseconds = std::chrono::duration<float, std::milli>(second->mark->when - first->mark->when).count();
    return cudaSuccess;
}

RUNTIME(cudaStreamWaitEvent)(cudaStream_t its_stream, cudaEvent_t handle, unsigned) {
    WITH_EVENT(handle);
    Stream* stream = find_stream(its_stream);
    if (!stream) return hold.unlock(), refused(cudaErrorInvalidResourceHandle, "a stream is used that is not there");
    if (event->mark && !event->mark->is_reached) put(stream, wait_for(event->mark));
    return cudaSuccess;
}

// ---- Texts.

extern "C" const char* host_cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaErrorNoDevice: return "cudaErrorNoDevice";
        case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        default: return "cudaError of the emulated runtime";
    }
}

extern "C" const char* host_cudaGetErrorString(cudaError_t) { return "of the emulated runtime"; }
