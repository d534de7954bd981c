// NCCL on the host: the functions of libnccl.so.2 that CuPy calls. Processes exchange files in a folder of /dev/shm.
//
// As with NCCL, calls are work on streams; those of a group begin together, with all their communicators. Making a
// communicator, and its first use of a connection, keep the host waiting for the other ranks, unless it is aborted;
// NCCL_RUNTIME_CONNECT=0 connects for collective calls at once. A program that NCCL would not forgive is noted.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "device.h"

using host_cuda::problem;

namespace {

enum Status { SUCCESS = 0, UNHANDLED_CUDA_ERROR = 1, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6 };
enum Kind { ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, SEND, RECV };
const char* const NAMES[] = {"allReduce", "reduce", "reduceScatter", "allGather", "broadcast", "send", "recv"};
enum Op { SUM, PROD, MAX, MIN, NUM_OPS };
enum Dtype { I1, U1, I4, U4, I8, U8, F2, F4, F8, BF, NUM_DTYPES };
const size_t WIDTHS[NUM_DTYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

struct Communicator {
    std::string folder;
    int size, rank, device;
    std::atomic<bool> is_aborted{false};
    std::atomic<int> error{SUCCESS}, num_threads{0}, num_under_way{0};
    void* stream = nullptr;  // of what is under way
    long num_calls = 0;
    std::map<int, long> num_sent, num_received;  // by peer
    std::set<std::string> connections;
    std::vector<std::string> last_files;  // which the others may still read
};

struct Call {
    Communicator* its;
    Kind kind;
    const void* from;
    void* to;
    size_t count;
    int dtype, op, peer;  // or the root
    void* stream;

    size_t nbytes() const { return count * WIDTHS[dtype]; }
    bool is_for_two() const { return kind == SEND || kind == RECV; }
    bool sends() const { return kind != RECV && (kind != BROADCAST || peer == its->rank); }
    bool receives() const { return kind != SEND && (kind != REDUCE || peer == its->rank); }
    size_t bytes_sent() const { return sends() ? nbytes() * (kind == REDUCE_SCATTER ? its->size : 1) : 0; }
    size_t bytes_received() const { return receives() ? nbytes() * (kind == ALL_GATHER ? its->size : 1) : 0; }
    std::string text() const {
        std::string text;
        for (size_t number : {(size_t)kind, count, (size_t)dtype, (size_t)op, (size_t)peer}) text += std::to_string(number) + " ";
        return text;
    }
};

std::map<std::string, int>& num_here = *new std::map<std::string, int>;  // of the ranks of a communicator, in this process

struct Group {  // what the current thread has begun
    int depth = 0;
    std::vector<Communicator*> made, aborted, destroyed;
    std::vector<Call> calls;
};
thread_local Group group;

char last_warning[1024];  // of all communicators, as NCCL has it

Status failing(int status, const std::string& what) {
    if (status) snprintf(last_warning, sizeof last_warning, "%s\nfails with status %d.\n", what.c_str(), status);
    return (Status)status;
}

Status met(const char* call, long number = 0) { return failing(host_cuda::met(call, number), call); }

// ---- Files: each appears at once, and whole.

void put(Communicator* its, const std::string& name, const std::string& content) {
    const std::string path = its->folder + "/" + name, part = path + ".part" + std::to_string(its->rank);
    std::ofstream(part, std::ios::binary) << content;
    rename(part.c_str(), path.c_str());
}

// Waits for a file, and for ever if a rank has aborted. Returns false if this rank has, before the file comes.
bool get(Communicator* its, const std::string& name, std::string& content, const char* aborted = "aborted") {
    const std::string path = its->folder + "/" + name, end = its->folder + "/" + aborted;
    for (int naps = 0; access(path.c_str(), R_OK) || !access(end.c_str(), F_OK); naps++) {
        if (its->is_aborted) return false;
        usleep(std::min(20 + naps, 1000));
    }
    std::ifstream file(path, std::ios::binary);
    content.assign(std::istreambuf_iterator<char>(file), {});
    return true;
}

void forget(Communicator* its, const std::string& name) { unlink((its->folder + "/" + name).c_str()); }

std::string of_rank(const std::string& name, int rank) { return name + "." + std::to_string(rank); }

void remove_folder(const std::string& folder) {
    if (std::system(("rm -rf '" + folder + "'").c_str())) problem("the folder of a communicator cannot be removed");
}

void come(Communicator* its, const std::string& name, const std::string& what = "") {
    put(its, of_rank(name, its->rank), what);
}

Status wait_for(Communicator* its, const std::string& name, int rank) {
    std::string nothing;
    return get(its, of_rank(name, rank), nothing) ? SUCCESS : REMOTE_ERROR;
}

// The last one removes the folder.
void leave(Communicator* its) {
    for (auto& name : its->last_files) forget(its, name);
    come(its, "left");
    for (int rank = 0; rank < its->size; rank++)
        if (access((its->folder + "/" + of_rank("left", rank)).c_str(), R_OK)) return;
    remove_folder(its->folder);
}

// ---- Sums, in the order of the ranks.

struct Bfloat16 {
    unsigned short bits;
    Bfloat16(float x) {
        unsigned all;
        memcpy(&all, &x, 4);
        bits = x != x ? 0x7FC0 : (unsigned short)((all + 0x7FFF + (all >> 16 & 1)) >> 16);
    }
    operator float() const {
        const unsigned all = (unsigned)bits << 16;
        float x;
        memcpy(&x, &all, 4);
        return x;
    }
};

template <class T> T joined(T a, T b, int op) {
    if (op == SUM) return a + b;
    if (op == PROD) return a * b;
    return op == MAX ? std::max(a, b) : std::min(a, b);
}
template <> float joined(float a, float b, int op) {  // a maximum or minimum loses what is no number
    return op == SUM ? a + b : op == PROD ? a * b : op == MAX ? std::fmax(a, b) : std::fmin(a, b);
}
template <> double joined(double a, double b, int op) {
    return op == SUM ? a + b : op == PROD ? a * b : op == MAX ? std::fmax(a, b) : std::fmin(a, b);
}

template <class T, class Wide = T> void join(void* total, const void* more, size_t count, int op) {
    auto a = (T*)total;
    auto b = (const T*)more;
    for (size_t at = 0; at < count; at++) a[at] = T(joined<Wide>(Wide(a[at]), Wide(b[at]), op));
}

void join(void* total, const void* more, const Call& call) {
    typedef void (*Join)(void*, const void*, size_t, int);
    static const Join joins[NUM_DTYPES] = {
        join<signed char>, join<unsigned char>, join<int>, join<unsigned>, join<long long>, join<unsigned long long>,
        join<_Float16, float>, join<float>, join<double>, join<Bfloat16, float>,
    };
    joins[call.dtype](total, more, call.count, call.op);
}

std::string sum(const std::vector<std::string>& parts, size_t begin, const Call& call) {
    std::string total = parts[0].substr(begin, call.nbytes());
    for (size_t rank = 1; rank < parts.size(); rank++) join(&total[0], parts[rank].data() + begin, call);
    return total;
}

// ---- Work on a stream.

std::string result(const Call& call, const std::vector<std::string>& parts) {
    if (call.kind == BROADCAST) return parts[call.peer];
    if (call.kind == REDUCE_SCATTER) return sum(parts, call.its->rank * call.nbytes(), call);
    if (call.kind != ALL_GATHER) return sum(parts, 0, call);
    std::string all;
    for (auto& part : parts) all += part;
    return all;
}

bool finish_collective(const Call& call, const std::string& name) {
    const std::string head = call.text();
    std::vector<std::string> parts(call.its->size);
    for (int rank = 0; rank < call.its->size; rank++) {
        if (!get(call.its, of_rank(name, rank), parts[rank])) return false;
        if (parts[rank].compare(0, head.size(), head)) {
            problem("ranks make other calls of NCCL: " + head + "and " + parts[rank].substr(0, head.size()));
            call.its->error = INVALID_USAGE;
            return false;
        }
        parts[rank].erase(0, head.size());
    }
    if (!call.receives()) return true;
    const std::string got = result(call, parts);
    memcpy(call.to, got.data(), got.size());
    return true;
}

bool finish_receive(const Call& call, const std::string& name) {
    std::string got;
    if (!get(call.its, name, got)) return false;
    if (got.size() != call.nbytes()) problem("NCCL receives another number of bytes than was sent");
    memcpy(call.to, got.data(), std::min(got.size(), call.nbytes()));
    forget(call.its, name);
    return true;
}

std::string message(int from, int to, long number) {
    return "message." + std::to_string(from) + "." + std::to_string(to) + "." + std::to_string(number);
}

// Gives away the part of this rank. Returns the name under which the others' come.
std::string begin(const Call& call) {
    Communicator* its = call.its;
    if (call.kind == RECV) return message(call.peer, its->rank, its->num_received[call.peer]++);
    const std::string own((const char*)call.from, call.bytes_sent());
    if (call.kind == SEND) {
        put(its, message(its->rank, call.peer, its->num_sent[call.peer]++), own);
        return "";
    }
    const std::string name = "call." + std::to_string(its->num_calls++);
    put(its, of_rank(name, its->rank), call.text() + own);
    return name;
}

bool is_any_aborted(const std::vector<Call>& calls) {
    return std::any_of(calls.begin(), calls.end(), [](const Call& call) { return call.its->is_aborted.load(); });
}

void run(const std::vector<Call>& calls) {
    for (auto& call : calls) {
        host_cuda::uses(call.from, call.bytes_sent(), false);
        host_cuda::uses(call.to, call.bytes_received(), true);
    }
    usleep(host_cuda::wished("NCCL's delay"));
    while (host_cuda::wished("NCCL is held back") && !is_any_aborted(calls)) usleep(200);
    std::vector<std::string> names;
    std::map<Communicator*, std::vector<std::string>> files;
    for (auto& call : calls) {
        if (call.its->is_aborted) return;
        names.push_back(begin(call));
        if (!call.is_for_two()) files[call.its].push_back(of_rank(names.back(), call.its->rank));
    }
    for (size_t at = 0; at < calls.size(); at++) {
        const Call& call = calls[at];
        const bool is_done = call.kind == SEND || (call.kind == RECV ? finish_receive : finish_collective)(call, names[at]);
        if (!is_done) return;
    }
    for (auto& [its, own] : files) {  // all ranks have read the files of the calls before
        for (auto& name : its->last_files) forget(its, name);
        its->last_files = own;
    }
}

// ---- Groups.

Status connect(const std::vector<Call>& calls) {
    std::vector<std::pair<Call, std::string>> wanted;
    const char* at_once = getenv("NCCL_RUNTIME_CONNECT");
    for (auto& call : calls) {
        const int low = std::min(call.its->rank, call.peer), high = std::max(call.its->rank, call.peer);
        const std::string name = call.is_for_two() ? "pair." + std::to_string(low) + "." + std::to_string(high) : "all";
        if (!call.is_for_two() && at_once && !strcmp(at_once, "0")) continue;
        if (!call.its->connections.insert(name).second) continue;
        come(call.its, name);
        wanted.push_back({call, name});
    }
    for (auto& [call, name] : wanted)
        if (num_here[call.its->folder] < call.its->size && gettid() == getpid())
            problem("the main thread waits in NCCL, where no deadline holds");
    for (auto& [call, name] : wanted)
        for (int rank = 0; rank < call.its->size; rank++)
            if ((!call.is_for_two() || rank == call.peer) && wait_for(call.its, name, rank)) return REMOTE_ERROR;
    return SUCCESS;
}

Status launch(const std::vector<Call>& calls) {
    if (Status status = connect(calls)) return status;
    std::map<void*, std::vector<Call>> by_stream;
    for (auto& call : calls) by_stream[call.stream].push_back(call);
    for (auto& [stream, its] : by_stream) {
        for (auto& call : its) {
            if (call.its->num_under_way++ && call.its->stream != stream)
                problem("a communicator has work under way on two streams");
            call.its->stream = stream;
        }
        host_cuda::count("launches of NCCL under way", 1);
        const auto work = [held = its] {
            run(held);
            for (auto& call : held) call.its->num_under_way--;
            host_cuda::count("launches of NCCL under way", -1);
        };
        if (host_cuda::enqueue(stream, work)) return UNHANDLED_CUDA_ERROR;
    }
    return SUCCESS;
}

std::string place_of(Communicator* its) {
    const char* host = getenv("NCCL_HOSTID");
    return (host ? host : "this host") + (" " + std::to_string(its->device));
}

Status meet(Communicator* its) {
    std::set<std::string> places;
    for (int rank = 0; rank < its->size; rank++) {
        std::string place;
        if (!get(its, of_rank("made", rank), place, "never")) return REMOTE_ERROR;
        places.insert(place);
    }
    const char* may_share = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    const bool is_shared = (int)places.size() < its->size && !(may_share && !strcmp(may_share, "1"));
    return failing(is_shared ? INVALID_USAGE : SUCCESS, "Duplicate GPU detected");
}

bool is_at_work(Communicator* its) {
    for (int turn = 0; turn < 2500 && its->num_under_way; turn++) usleep(200);
    return its->num_under_way;
}

void end(const char* how, const std::vector<Communicator*>& communicators) {
    host_cuda::met(how, communicators.size());
    for (auto its : communicators) {
        its->is_aborted = !strcmp(how, "abort");
        if (its->is_aborted) put(its, "aborted", "");
        else if (is_at_work(its)) problem("a communicator is destroyed that has work under way, for which NCCL waits");
        leave(its);
    }
}

Status end_group() {
    Group ended;
    std::swap(ended, group);
    for (auto its : ended.made)
        if (Status status = meet(its)) return status;
    if (Status status = launch(ended.calls)) return status;
    if (!ended.aborted.empty()) end("abort", ended.aborted);
    if (!ended.destroyed.empty()) end("destroy", ended.destroyed);
    return SUCCESS;
}

bool is_on_device(const Call& call) {
    const int device = call.its->device;
    return (!call.sends() || host_cuda::device_of_memory(call.from, call.bytes_sent()) == device) &&
           (!call.receives() || host_cuda::device_of_memory(call.to, call.bytes_received()) == device) &&
           host_cuda::device_of_stream(call.stream) == device;
}

Status add(const Call& call) {
    if (!call.its || call.dtype < 0 || call.dtype >= NUM_DTYPES || call.op < 0 || call.op >= NUM_OPS) return INVALID_ARGUMENT;
    if (call.peer < 0 || call.peer >= call.its->size) return INVALID_ARGUMENT;
    const std::string of_rank = std::string(NAMES[call.kind]) + " of rank " + std::to_string(call.its->rank);
    if (Status status = met(NAMES[call.kind], call.nbytes())) return status;
    if (Status status = failing(host_cuda::wished(of_rank.c_str()), of_rank)) return status;
    if (call.its->num_threads++) problem("two threads are in one communicator at once");
    if (call.count && !is_on_device(call)) problem("NCCL gets memory or a stream that is not its device's");
    call.its->num_threads--;
    if (!group.depth) return launch({call});
    group.calls.push_back(call);
    return SUCCESS;
}

}  // namespace

// ---- As in nccl.h.

struct UniqueId { char internal[128]; };

#define NCCL extern "C" int

extern "C" const char* ncclGetErrorString(int) { return "of the emulated NCCL"; }

extern "C" const char* ncclGetLastError(Communicator*) { return last_warning; }

NCCL ncclGetVersion(int* version) {
    const long wished = host_cuda::wished("NCCL's version");
    *version = wished ? (int)wished : 23003;  // the first that lets ranks share a GPU
    return SUCCESS;
}

NCCL ncclGetUniqueId(UniqueId* id) {
    if (Status status = met("ncclGetUniqueId")) return status;
    static std::set<std::string>& folders = *new std::set<std::string>;
    static const bool is_first = !atexit([] { for (auto& folder : folders) if (!access(folder.c_str(), F_OK)) remove_folder(folder); });
    memset(id, 0, sizeof *id);
    strcpy(id->internal, "/dev/shm/host-nccl-XXXXXX");
    if (!is_first || !mkdtemp(id->internal)) return UNHANDLED_CUDA_ERROR;
    folders.insert(id->internal);
    return SUCCESS;
}

NCCL ncclCommInitRankConfig(Communicator** made, int size, UniqueId id, int rank, void*) {
    if (Status status = met("ncclCommInitRank")) return status;
    auto its = new Communicator;
    its->folder = id.internal;
    its->size = size;
    its->rank = rank;
    its->device = host_cuda::current_device();
    num_here[its->folder]++;
    *made = its;
    come(its, "made", place_of(its));
    if (!group.depth) return meet(its);
    group.made.push_back(its);
    return SUCCESS;
}

NCCL ncclCommGetAsyncError(Communicator* its, int* error) {
    if (!its) return INVALID_ARGUMENT;
    const int wished = failing(host_cuda::wished("an error of NCCL"), "what is found later");
    *error = wished ? wished : its->error.load();
    return SUCCESS;
}

NCCL ncclCommAbort(Communicator* its) {
    if (its && group.depth) group.aborted.push_back(its);
    else if (its) end("abort", {its});
    return SUCCESS;
}

NCCL ncclCommDestroy(Communicator* its) {
    if (its && group.depth) group.destroyed.push_back(its);
    else if (its) end("destroyed alone", {its});
    return its ? SUCCESS : INVALID_ARGUMENT;
}

// CuPy asks for these when it is loaded. mpidist does not call them.
#define NOT_EMULATED(name) extern "C" int name() { return INVALID_USAGE; }
NOT_EMULATED(ncclCommInitAll) NOT_EMULATED(ncclCommSplit) NOT_EMULATED(ncclBroadcast)
NOT_EMULATED(ncclCommCuDevice) NOT_EMULATED(ncclCommUserRank) NOT_EMULATED(ncclCommCount)

NCCL ncclGroupStart() {
    group.depth++;
    return SUCCESS;
}

NCCL ncclGroupEnd() {
    if (!group.depth) return INVALID_USAGE;
    if (Status status = met("ncclGroupEnd")) return group = {}, status;
    if (group.depth == 1) return end_group();
    group.depth--;
    return SUCCESS;
}

NCCL ncclAllReduce(const void* from, void* to, size_t count, int dtype, int op, Communicator* its, void* stream) {
    return add({its, ALL_REDUCE, from, to, count, dtype, op, 0, stream});
}

NCCL ncclReduce(const void* from, void* to, size_t count, int dtype, int op, int root, Communicator* its, void* stream) {
    return add({its, REDUCE, from, to, count, dtype, op, root, stream});
}

NCCL ncclReduceScatter(const void* from, void* to, size_t count, int dtype, int op, Communicator* its, void* stream) {
    return add({its, REDUCE_SCATTER, from, to, count, dtype, op, 0, stream});
}

NCCL ncclAllGather(const void* from, void* to, size_t count, int dtype, Communicator* its, void* stream) {
    return add({its, ALL_GATHER, from, to, count, dtype, 0, 0, stream});
}

NCCL ncclBcast(void* at, size_t count, int dtype, int root, Communicator* its, void* stream) {
    return add({its, BROADCAST, at, at, count, dtype, 0, root, stream});
}

NCCL ncclSend(const void* from, size_t count, int dtype, int peer, Communicator* its, void* stream) {
    return add({its, SEND, from, nullptr, count, dtype, 0, peer, stream});
}

NCCL ncclRecv(void* to, size_t count, int dtype, int peer, Communicator* its, void* stream) {
    return add({its, RECV, nullptr, to, count, dtype, 0, peer, stream});
}
