// CUDA's runtime on host memory: the functions of libcudart that CuPy calls, but for textures, managed memory and graphs: what
// is captured is forgotten.
//
// CuPy has libcudart in its extension module. preload.py overwrites the beginning of each cudaXyz there with a jump to
// host_cudaXyz here. Device memory is the host's, filled with rubbish when it is allocated, in places that never come
// again. What is put on a stream is done later, by a thread of the stream: its own, or for streams that wait for the legacy
// one, the thread of that. Which memory a piece of work reads and writes is noted, and what it comes after by events and the host's
// waits: so work that should have waited for an event, and did not, is found, even where it goes well.
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
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
#include <utility>
#include <vector>

#include "accesses.h"
#include "device.h"

using namespace host_cuda;

namespace {

constexpr size_t TOTAL_MEMORY = 8ull << 30;  // bytes of a device
constexpr int PINNED = -1;                   // instead of a device
const char* const NO_STREAM = "a stream is used that is not there";
constexpr unsigned char NEW = 0xA5, FREED = 0xDD;
constexpr size_t ALL_PLACES = 1ull << 40, PAGE = 4096;  // bytes

int setting(const char* name, int otherwise) {
    const char* text = getenv(name);
    return text ? atoi(text) : otherwise;
}

const int num_devices = setting("TEST_GPUS", 0);
const int most_delay = setting("TEST_GPU_DELAY", 30);  // microseconds before each piece of work

struct Piece {
    Work work;
    Clock before;  // what it comes after, and itself
};

struct Engine {  // a thread, and what it has still to do; the first is being done
    Engine(int number, int device) : number(number), device(device) {}
    const int number, device;
    std::deque<Piece> queue = {};
    Clock before = {};  // what the last piece that was put here comes after, and itself
    long num_pieces = 0;
    bool ends = false;
    std::condition_variable arrived = {};  // by which it alone is woken
};

struct Stream {
    int device, priority;
    unsigned flags;
    std::shared_ptr<Engine> engine;
    bool is_captured = false;  // what is put on it is not done
};

struct Mark {  // a place in a stream
    Clock before;
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
    std::vector<Access> accesses = {};
};

// Never destroyed, because threads work with them to the end of the process. All are guarded by `lock`.
std::mutex& lock = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;
auto& streams = *new std::set<Stream*>;
auto& events = *new std::set<Event*>;
auto& legacy_streams = *new std::map<int, Stream*>;  // by device
auto& blocks = *new std::map<size_t, Block>;         // by address
auto& gone = *new std::map<Stream*, std::shared_ptr<Mark>>;  // by the address of a stream that is gone: its end
auto& seen_by_host = *new Clock;
const auto places = (size_t)mmap(nullptr, ALL_PLACES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
size_t next_place = places;

thread_local const Engine* its_engine = nullptr;  // of a thread that does the work of one,
thread_local const Piece* its_piece = nullptr;    // and what it does
thread_local int its_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

typedef std::unique_lock<std::mutex> Hold;

cudaError_t failed(cudaError_t error) { return last_error = error; }

cudaError_t refused(cudaError_t error, const char* why) {
    problem(why);
    return failed(error);
}

template <class T, class U> cudaError_t give(T* to, U what) {
    *to = what;
    return cudaSuccess;
}

void be_late() {
    thread_local std::minstd_rand random((unsigned)(size_t)its_engine);
    if (most_delay) std::this_thread::sleep_for(std::chrono::microseconds(random() % most_delay));
}

void work_off(std::shared_ptr<Engine> engine) {
    its_engine = engine.get();
    Hold hold(lock);
    for (;;) {
        engine->arrived.wait(hold, [&] { return !engine->queue.empty() || engine->ends; });
        if (engine->queue.empty()) return;
        Piece piece = std::move(engine->queue.front());
        its_piece = &piece;
        hold.unlock();
        be_late();
        piece.work();
        hold.lock();
        engine->queue.pop_front();
        changed.notify_all();
    }
}

std::shared_ptr<Engine> new_engine(int device) {
    static std::atomic<int> number{0};
    auto engine = std::make_shared<Engine>(number++, device);
    std::thread(work_off, engine).detach();
    return engine;
}

Stream* legacy_stream(int device) {
    Stream*& its = legacy_streams[device];
    if (!its) streams.insert(its = new Stream{device, 0, 0, new_engine(device)});
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
    if (stream->is_captured) return;
    Engine& engine = *stream->engine;
    learn(engine.before, seen_by_host);
    engine.before[engine.number] = ++engine.num_pieces;
    engine.queue.push_back({std::move(work), engine.before});
    engine.arrived.notify_all();
}

bool is_all_done() {  // with `lock` held
    return std::all_of(streams.begin(), streams.end(), [](Stream* its) { return its->engine->queue.empty(); });
}

// The host then knows of all work that it is done: what was noted is of no use any more.
void wait_for_all(Hold& hold) {
    changed.wait(hold, is_all_done);
    for (auto stream : streams) learn(seen_by_host, stream->engine->before);
    for (auto& [address, block] : blocks) block.accesses.clear();
}

Work wait_for(std::shared_ptr<Mark> mark) {
    return [mark] {
        Hold hold(lock);
        changed.wait(hold, [&] { return mark->is_reached; });
    };
}

std::shared_ptr<Mark> mark_on(Stream* stream) {  // with `lock` held
    auto mark = std::make_shared<Mark>();
    put(stream, [mark] {
        Hold hold(lock);
        mark->is_reached = true;
        mark->when = std::chrono::steady_clock::now();
        changed.notify_all();
    });
    mark->before = stream->engine->before;
    return mark;
}

void see(Hold& hold, std::shared_ptr<Mark> mark) {
    changed.wait(hold, [&] { return mark->is_reached; });
    learn(seen_by_host, mark->before);
}

cudaError_t allocate(void** address, size_t nbytes, int device) {
    Hold hold(lock);
    const size_t place = next_place, whole = (nbytes + PAGE) / PAGE * PAGE;
    if (mprotect((void*)place, whole, PROT_READ | PROT_WRITE)) return failed(cudaErrorMemoryAllocation);
    next_place += whole + PAGE;  // so that nothing lies beside it
    blocks[place] = {nbytes, device};
    memset((void*)place, NEW, nbytes);
    return give(address, (void*)place);
}

cudaError_t release(void* address, bool is_pinned) {
    if (!address) return cudaSuccess;
    Hold hold(lock);
    wait_for_all(hold);  // as CUDA's do
    auto at = blocks.find((size_t)address);
    if (at == blocks.end() || (at->second.device == PINNED) != is_pinned)
        return refused(cudaErrorInvalidValue, "memory is freed that is not there");
    madvise(address, at->second.nbytes, MADV_DONTNEED);
    blocks.erase(at);
    return cudaSuccess;
}

cudaError_t make_stream(cudaStream_t* handle, unsigned flags, int priority) {
    Hold hold(lock);
    auto engine = flags & cudaStreamNonBlocking ? new_engine(its_device) : legacy_stream(its_device)->engine;
    auto stream = new Stream{its_device, priority, flags, engine};
    // CuPy keeps free memory by the addresses of streams: who has a stream at this address gets what the last one had.
    if (auto end = gone.find(stream); end != gone.end()) {
        learn(engine->before, end->second->before);
        put(stream, wait_for(end->second));
        gone.erase(end);
    }
    if (flags & cudaStreamNonBlocking) met("a stream of its own", priority);
    streams.insert(stream);
    count("streams", 1);
    return give(handle, (cudaStream_t)stream);
}

}  // namespace

// ---- For the driver, NCCL and the tests.

int host_cuda::enqueue(void* handle, Work work) {
    Hold hold(lock);
    Stream* stream = find_stream(handle);
    if (!stream) return refused(cudaErrorInvalidResourceHandle, NO_STREAM);
    put(stream, std::move(work));
    return cudaSuccess;
}

int host_cuda::device_of_work() { return its_engine->device; }

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

// Waits at most so long until all work is done.
extern "C" void host_cuda_settle(double seconds) {
    Hold hold(lock);
    if (changed.wait_for(hold, std::chrono::duration<double>(seconds), is_all_done)) wait_for_all(hold);
}

bool host_cuda::is_emulated_memory(size_t address) { return address - places < ALL_PLACES; }

void host_cuda::uses(const void* address, size_t nbytes, bool is_write) {
    if (!nbytes || !is_emulated_memory((size_t)address)) return;
    Hold hold(lock);
    Block* block = find_block(address, nbytes);
    if (!block) return problem("memory is used that is not there");
    const Clock& before = its_piece->before;
    const int engine = its_engine->number;
    const Access its{(size_t)address, (size_t)address + nbytes, is_write, engine, before.at(engine)};
    if (add(block->accesses, its, before, seen_by_host))
        problem("a race: two streams use the same memory, without an event between");
}

// CuPy has freed memory, which it gives to whoever asks for some on the stream: from now on, only work that comes after
// this place of the stream may use it.
extern "C" void host_cuda_freed(void* address, size_t nbytes, void* handle) {
    Hold hold(lock);
    Block* block = find_block(address, nbytes);
    Stream* stream = (size_t)handle > 1 || !block ? find_stream(handle) : legacy_stream(block->device);
    if (!block || !stream || stream->is_captured) return;
    put(stream, [=] {
        uses(address, nbytes, true);
        memset(address, FREED, nbytes);
    });
}

// ---- The runtime. The first declaration lets the compiler compare the types with CUDA's.

#define RUNTIME(name) \
    extern "C" decltype(name) host_##name; \
    extern "C" cudaError_t host_##name

RUNTIME(cudaGetDeviceCount)(int* number) { return num_devices ? give(number, num_devices) : failed(cudaErrorNoDevice); }
RUNTIME(cudaGetDevice)(int* device) { return give(device, its_device); }
RUNTIME(cudaDeviceCanAccessPeer)(int* can, int, int) { return give(can, 1); }
RUNTIME(cudaDeviceEnablePeerAccess)(int, unsigned) { return cudaSuccess; }
RUNTIME(cudaGetLastError)() { return std::exchange(last_error, cudaSuccess); }

RUNTIME(cudaSetDevice)(int device) {
    return device < 0 || device >= num_devices ? failed(cudaErrorInvalidDevice) : give(&its_device, device);
}

RUNTIME(cudaDriverGetVersion)(int* version) {
    const long wanted = wished("the driver's version");
    return give(version, wanted ? wanted : 13000);
}

RUNTIME(cudaDeviceGetAttribute)(int* value, cudaDeviceAttr attribute, int) {
    const long wanted = wished("the compute capability"), capability = wanted ? wanted : 90;  // CuPy asks once
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: return give(value, capability / 10);
        case cudaDevAttrComputeCapabilityMinor: return give(value, capability % 10);
        case cudaDevAttrMultiProcessorCount: return give(value, 132);
        case cudaDevAttrMaxThreadsPerBlock: return give(value, 1024);
        case cudaDevAttrWarpSize: return give(value, 32);
        case cudaDevAttrMemoryPoolsSupported: return give(value, 0);
        default: return give(value, 1);
    }
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

// ---- Memory.

RUNTIME(cudaMalloc)(void** address, size_t nbytes) { return allocate(address, nbytes, its_device); }
RUNTIME(cudaFree)(void* address) { return release(address, false); }
RUNTIME(cudaFreeHost)(void* address) { return release(address, true); }

RUNTIME(cudaHostAlloc)(void** address, size_t nbytes, unsigned) {
    if (int status = met("cudaHostAlloc", nbytes)) return failed((cudaError_t)status);
    return allocate(address, nbytes, PINNED);
}

RUNTIME(cudaMemGetInfo)(size_t* available, size_t* total) {
    Hold hold(lock);
    size_t used = 0;
    for (auto& [address, block] : blocks) used += block.device == its_device ? block.nbytes : 0;
    *total = TOTAL_MEMORY;
    return give(available, TOTAL_MEMORY - used);
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

// Between the host and a device it takes its time, and until then there is rubbish.
static void copy(void* to, const void* from, size_t nbytes) {
    uses(from, nbytes, false);
    uses(to, nbytes, true);
    if (device_of_memory(to, nbytes) < 0 || device_of_memory(from, nbytes) < 0) {
        memset(to, NEW, nbytes);
        be_late();
    }
    memmove(to, from, nbytes);
}

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
    const char* const kinds[] = {"", "copy up", "copy down", "copy"};
    if (int status = met(kinds[to_device + 2 * from_device], nbytes)) return failed((cudaError_t)status);
    if (!source) {  // pageable memory, which may be changed when this returns
        std::string held((const char*)from, nbytes);
        return (cudaError_t)enqueue(stream, [=] { copy(to, held.data(), nbytes); });
    }
    auto error = (cudaError_t)enqueue(stream, [=] { copy(to, from, nbytes); });
    return error || target ? error : host_cudaStreamSynchronize(stream);
}

RUNTIME(cudaMemcpy)(void* to, const void* from, size_t nbytes, cudaMemcpyKind kind) {
    cudaError_t error = host_cudaMemcpyAsync(to, from, nbytes, kind, nullptr);
    return error ? error : host_cudaStreamSynchronize(nullptr);
}

RUNTIME(cudaMemcpyPeerAsync)(void* to, int, const void* from, int, size_t nbytes, cudaStream_t stream) {
    return (cudaError_t)enqueue(stream, [=] { copy(to, from, nbytes); });
}

RUNTIME(cudaMemsetAsync)(void* to, int value, size_t nbytes, cudaStream_t stream) {
    return (cudaError_t)enqueue(stream, [=] {
        uses(to, nbytes, true);
        memset(to, value, nbytes);
    });
}

extern "C" int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
    return enqueue(stream, [=] { function(data); });
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
    if (!streams.erase(stream)) return refused(cudaErrorInvalidResourceHandle, "no such stream");
    count("streams", -1);
    if (!stream->is_captured) gone[stream] = mark_on(stream);
    if (stream->flags & cudaStreamNonBlocking) stream->engine->ends = true;
    stream->engine->arrived.notify_all();
    delete stream;
    return cudaSuccess;
}

#define WITH_STREAM(handle) \
    Hold hold(lock); \
    Stream* stream = find_stream(handle); \
    if (!stream) return refused(cudaErrorInvalidResourceHandle, NO_STREAM)

RUNTIME(cudaStreamQuery)(cudaStream_t handle) {
    WITH_STREAM(handle);
    if (!stream->engine->queue.empty()) return cudaErrorNotReady;
    learn(seen_by_host, stream->engine->before);
    return cudaSuccess;
}

RUNTIME(cudaStreamSynchronize)(cudaStream_t handle) {
    WITH_STREAM(handle);
    if (stream->is_captured) return failed(cudaErrorStreamCaptureUnsupported);
    see(hold, mark_on(stream));
    return cudaSuccess;
}

RUNTIME(cudaDeviceSynchronize)() {
    Hold hold(lock);
    wait_for_all(hold);
    return cudaSuccess;
}

// ---- Graphs: they are empty.

RUNTIME(cudaStreamIsCapturing)(cudaStream_t handle, cudaStreamCaptureStatus* status) {
    WITH_STREAM(handle);
    return give(status, stream->is_captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone);
}

RUNTIME(cudaStreamBeginCapture)(cudaStream_t handle, cudaStreamCaptureMode) {
    WITH_STREAM(handle);
    if ((size_t)handle <= 1 || stream->is_captured) return failed(cudaErrorStreamCaptureUnsupported);
    return give(&stream->is_captured, true);
}

RUNTIME(cudaStreamEndCapture)(cudaStream_t handle, cudaGraph_t* graph) {
    WITH_STREAM(handle);
    if (!std::exchange(stream->is_captured, false)) return failed(cudaErrorIllegalState);
    return give(graph, (cudaGraph_t)stream);
}

RUNTIME(cudaGraphInstantiate)(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
    return give(made, (cudaGraphExec_t)graph);
}

RUNTIME(cudaGraphDestroy)(cudaGraph_t) { return cudaSuccess; }
RUNTIME(cudaGraphExecDestroy)(cudaGraphExec_t) { return cudaSuccess; }

// ---- Events.

#define WITH_EVENT(handle) \
    Hold hold(lock); \
    auto event = (Event*)handle; \
    if (!events.count(event)) \
        return refused(cudaErrorInvalidResourceHandle, "an event is used that is not there")

RUNTIME(cudaEventCreateWithFlags)(cudaEvent_t* handle, unsigned flags) {
    Hold hold(lock);
    auto event = new Event{its_device, flags, nullptr};
    events.insert(event);
    count("events", 1);
    return give(handle, (cudaEvent_t)event);
}

RUNTIME(cudaEventCreate)(cudaEvent_t* handle) { return host_cudaEventCreateWithFlags(handle, 0); }

RUNTIME(cudaEventDestroy)(cudaEvent_t handle) {
    WITH_EVENT(handle);
    events.erase(event);
    count("events", -1);
    delete event;
    return cudaSuccess;
}

RUNTIME(cudaEventRecord)(cudaEvent_t handle, cudaStream_t its_stream) {
    WITH_EVENT(handle);
    Stream* stream = find_stream(its_stream);
    if (!stream || stream->device != event->device)
        return refused(cudaErrorInvalidResourceHandle, "an event is recorded on another device's stream");
    if (stream->is_captured) return failed(cudaErrorStreamCaptureUnsupported);
    event->mark = mark_on(stream);
    return cudaSuccess;
}

RUNTIME(cudaEventQuery)(cudaEvent_t handle) {
    WITH_EVENT(handle);
    if (event->mark && !event->mark->is_reached) return cudaErrorNotReady;
    if (event->mark) learn(seen_by_host, event->mark->before);
    return cudaSuccess;
}

RUNTIME(cudaEventSynchronize)(cudaEvent_t handle) {
    WITH_EVENT(handle);
    if (event->mark) see(hold, event->mark);
    return cudaSuccess;
}

RUNTIME(cudaEventElapsedTime)(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
    Hold hold(lock);
    auto first = (Event*)from, second = (Event*)to;
    if ((first->flags | second->flags) & cudaEventDisableTiming || !first->mark || !second->mark)
        return failed(cudaErrorInvalidResourceHandle);
    if (!first->mark->is_reached || !second->mark->is_reached) return failed(cudaErrorNotReady);
    return give(milliseconds, std::chrono::duration<float, std::milli>(second->mark->when - first->mark->when).count());
}

RUNTIME(cudaStreamWaitEvent)(cudaStream_t its_stream, cudaEvent_t handle, unsigned) {
    WITH_EVENT(handle);
    Stream* stream = find_stream(its_stream);
    if (!stream) return refused(cudaErrorInvalidResourceHandle, NO_STREAM);
    if (!event->mark) return cudaSuccess;
    learn(stream->engine->before, event->mark->before);
    if (!event->mark->is_reached) put(stream, wait_for(event->mark));
    return cudaSuccess;
}

// ---- Texts.

extern "C" const char* host_cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaErrorNoDevice: return "cudaErrorNoDevice";
        case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
        default: return "cudaError of the emulated runtime";
    }
}

extern "C" const char* host_cudaGetErrorString(cudaError_t) { return "of the emulated runtime"; }
