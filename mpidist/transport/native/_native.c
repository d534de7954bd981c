/* What takes the time of an all-reduce in the memory of a node: the barrier, the copies, the additions.
 *
 * Python has all of this, too (shared_memory/barrier.py and two_shot.py, reduction.py), on the same layout of the same
 * memory: ranks with and without this module work together. Additions are those of NumPy, bit by bit.
 */
#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_1_23_API_VERSION
#include <Python.h>
#include <structmember.h>
#include <time.h>
#include <numpy/arrayobject.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define LINE_BYTES 128     /* of a rank's part that are the barrier's: window.py */
#define TOLD 9             /* the first of four places in that line where a rank tells words in turn: barrier.py */
#define NUM_TOLD 4
#define ROUND 16           /* elements: schedule.py */
#define BLOCK_BYTES 4096   /* what is added at once of more than two parts */
#define MOST_PARTS 1024
#define FREES_GIL_BYTES (64 << 10)
#define STREAMS_BYTES (16 << 20)    /* from here on, results are not in the cache when they are written */
#define COPIED_BLOCK (16 << 10)     /* added, and copied to other places while it is in the cache */
#define TIMED_BYTES (8 << 10)
#define MOST_NANOSECONDS 4000       /* of that many bytes; among cores that share a cache they take 300 to 2,000, else to 14,000 */
#define STREAMED_COPIES 64          /* after which it is tried again whether that is needed: ranks move to other cores */
#define LEAST_TIMED_BYTES (16 << 10) /* of sums: less is over before it can be timed */
#define TIMED_CALLS 2               /* of each of two ways to write sums */
#define CALLS_BETWEEN 96            /* from one trial of the ways to the next */

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

static inline Py_ssize_t least(Py_ssize_t one, Py_ssize_t other)
{
    return one < other ? one : other;
}

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static long long nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Copies to memory that is not in the cache, without reading it first. */
static void stream(char *to, const char *from, Py_ssize_t nbytes)
{
#if defined(__x86_64__)
    const Py_ssize_t head = least(-(npy_uintp)to & 15, nbytes);
    memcpy(to, from, head);
    Py_ssize_t at = head;
    for (; at + 64 <= nbytes; at += 64)
        for (int line = 0; line < 64; line += 16)
            _mm_stream_si128((__m128i *)(to + at + line), _mm_loadu_si128((const __m128i *)(from + at + line)));
    _mm_sfence();
    memcpy(to + at, from + at, nbytes - at);
#else
    memcpy(to, from, nbytes);
#endif
}

static void copy(char *to, const char *from, Py_ssize_t nbytes)
{
    memcpy(to, from, nbytes);
}

/* ------------------------------------------------------------------------------------------------- additions */

/* Adds [count] elements of each part, in order, divides the sums, and writes them to one or two places. */
typedef void (*Add)(char *const *parts, Py_ssize_t num_parts, Py_ssize_t count, Py_ssize_t divide_by, char *out,
                    char *second);

#define EACH(STATEMENT)                                                                                              \
    _Pragma("GCC ivdep") for (Py_ssize_t i = 0; i < length; i++) { STATEMENT; }

#define DEFINE_ADD(NAME, TYPE)                                                                                       \
    FOR_EACH_PROCESSOR static void NAME(char *const *parts, Py_ssize_t num_parts, Py_ssize_t count,                  \
                                        Py_ssize_t divide_by, char *out, char *second)                               \
    {                                                                                                                \
        enum { BLOCK = BLOCK_BYTES / sizeof(TYPE) };                                                                 \
        const Py_ssize_t step = num_parts == 2 ? count : BLOCK;                                                      \
        const TYPE divisor = (TYPE)divide_by;                                                                        \
        TYPE sums[BLOCK];                                                                                            \
        for (Py_ssize_t begin = 0; begin < count; begin += step) {                                                   \
            const Py_ssize_t length = least(step, count - begin);                                                    \
            const TYPE *sum = (const TYPE *)parts[0] + begin, *last = (const TYPE *)parts[num_parts - 1] + begin;    \
            TYPE *to = (TYPE *)out + begin, *also = second ? (TYPE *)second + begin : to;                            \
            for (Py_ssize_t at = 1; at + 1 < num_parts; at++) {                                                      \
                const TYPE *part = (const TYPE *)parts[at] + begin;                                                  \
                EACH(sums[i] = sum[i] + part[i])                                                                     \
                sum = sums;                                                                                          \
            }                                                                                                        \
            if (divide_by != 1)                                                                                      \
                EACH(to[i] = also[i] = (sum[i] + last[i]) / divisor)                                                 \
            else if (second)                                                                                         \
                EACH(to[i] = also[i] = sum[i] + last[i])                                                             \
            else                                                                                                     \
                EACH(to[i] = sum[i] + last[i])                                                                       \
        }                                                                                                            \
    }

DEFINE_ADD(add_float32, npy_float32)
DEFINE_ADD(add_float64, npy_float64)
/* Unsigned, as sums of signed numbers wrap around, too. They are never divided: means of whole numbers are floats. */
DEFINE_ADD(add_8, npy_uint8)
DEFINE_ADD(add_16, npy_uint16)
DEFINE_ADD(add_32, npy_uint32)
DEFINE_ADD(add_64, npy_uint64)

/* Returns NULL for dtypes that are added by NumPy. */
static Add add_of(PyArray_Descr *dtype)
{
    if (!PyArray_ISNBO(dtype->byteorder)) return NULL;
    switch (dtype->kind) {
    case 'f': return dtype->type_num == NPY_FLOAT ? add_float32 : dtype->type_num == NPY_DOUBLE ? add_float64 : NULL;
    case 'i':
    case 'u': break;
    default: return NULL;
    }
    switch (PyDataType_ELSIZE(dtype)) {
    case 1: return add_8;
    case 2: return add_16;
    case 4: return add_32;
    case 8: return add_64;
    }
    return NULL;
}

/* Whether an object is an array of numbers side by side. */
static int is_plain(PyObject *item, PyArray_Descr *dtype)
{
    if (!PyArray_Check(item) || !PyArray_IS_C_CONTIGUOUS((PyArrayObject *)item)) return 0;
    PyArray_Descr *its = PyArray_DESCR((PyArrayObject *)item);
    const int is_alike = its->kind == dtype->kind && PyDataType_ELSIZE(its) == PyDataType_ELSIZE(dtype);
    return PyArray_ISALIGNED((PyArrayObject *)item) && (its == dtype || (is_alike && add_of(its)));
}

/* Returns where an array's numbers lie, if it is plain, of this length, and overlaps the result nowhere or everywhere. */
static char *part_of(PyObject *item, PyArrayObject *out)
{
    if (!is_plain(item, PyArray_DESCR(out)) || PyArray_SIZE((PyArrayObject *)item) != PyArray_SIZE(out)) return NULL;
    char *part = PyArray_BYTES((PyArrayObject *)item), *begin = PyArray_BYTES(out);
    const int is_apart = part >= begin + PyArray_NBYTES(out) || begin >= part + PyArray_NBYTES(out);
    return is_apart || part == begin ? part : NULL;
}

PyDoc_STRVAR(add_doc,
             "add(parts, out, divide_by, second)\n--\n\n"
             "Add arrays in order, divide the sums, and write them to `out`, and to `second` if it is an array.\n\n"
             "Returns whether that was done: NumPy adds what has another dtype or another layout.");

static PyObject *add(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t num_given)
{
    if (num_given != 4 || !PyList_Check(given[0]) || !PyArray_Check(given[1])) {
        PyErr_SetString(PyExc_TypeError, "add: needed are a list of arrays, an array, a divisor, an array or None");
        return NULL;
    }
    PyArrayObject *out = (PyArrayObject *)given[1];
    PyArray_Descr *dtype = PyArray_DESCR(out);
    const Py_ssize_t num_parts = PyList_GET_SIZE(given[0]), divide_by = PyLong_AsSsize_t(given[2]);
    if (divide_by == -1 && PyErr_Occurred()) return NULL;
    Add add = add_of(dtype);
    char *parts[MOST_PARTS], *second = NULL;
    if (!add || num_parts < 2 || num_parts > MOST_PARTS || (divide_by != 1 && dtype->kind != 'f') ||
        !is_plain(given[1], dtype) || !PyArray_ISWRITEABLE(out))
        Py_RETURN_FALSE;
    for (Py_ssize_t at = 0; at < num_parts; at++)
        if (!(parts[at] = part_of(PyList_GET_ITEM(given[0], at), out))) Py_RETURN_FALSE;
    if (given[3] != Py_None) {
        if (!(second = part_of(given[3], out)) || !PyArray_ISWRITEABLE((PyArrayObject *)given[3])) Py_RETURN_FALSE;
        for (Py_ssize_t at = 0; at < num_parts; at++) {
            const Py_ssize_t nbytes = PyArray_NBYTES(out);
            if (parts[at] != second && parts[at] < second + nbytes && second < parts[at] + nbytes) Py_RETURN_FALSE;
        }
    }
    if (PyArray_NBYTES(out) < FREES_GIL_BYTES)
        add(parts, num_parts, PyArray_SIZE(out), divide_by, PyArray_BYTES(out), second);
    else {
        Py_BEGIN_ALLOW_THREADS
        add(parts, num_parts, PyArray_SIZE(out), divide_by, PyArray_BYTES(out), second);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_TRUE;
}

/* --------------------------------------------------------------------------------------------------- barrier */

/* Which of two ways takes less time, by trial: 0 or 1. Each rank finds out for itself. */
typedef struct {
    int best, calls;
    double costs[2];     /* the least of this trial, in nanoseconds for a byte */
} Trial;

static int next_way(const Trial *trial)
{
    return trial->calls < TIMED_CALLS ? !trial->best : trial->best;
}

static void learn(Trial *trial, int way, long long begun, Py_ssize_t nbytes)
{
    const double cost = (double)(nanoseconds() - begun) / (double)nbytes;
    if (trial->calls < 2 * TIMED_CALLS) {
        const int is_first = trial->calls % TIMED_CALLS == 0;
        if (is_first || cost < trial->costs[way]) trial->costs[way] = cost;
    }
    if (++trial->calls == 2 * TIMED_CALLS && trial->costs[!trial->best] < trial->costs[trial->best])
        trial->best = !trial->best;
    if (trial->calls == CALLS_BETWEEN) trial->calls = 0;
}

typedef struct {
    PyObject_HEAD
    long long count;     /* of the barrier that this rank posted last */
    int rank, size, spins;
    int copies_to_stream;
    Trial sums, shared;  /* sums into slots, and into results in shared memory: one by one, or by copies */
    PyObject *windows;   /* [ranks] each rank's part, which this object keeps */
    char **parts;        /* [ranks] where the part begins: with the line of the barrier */
} Barrier;

static inline npy_int64 *line_of(const Barrier *self, int rank)
{
    return (npy_int64 *)self->parts[rank];
}

static int barrier_init(Barrier *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"windows", "rank", "spins", NULL};
    PyObject *windows;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!ii", names, &PyList_Type, &windows, &self->rank, &self->spins))
        return -1;
    const Py_ssize_t size = PyList_GET_SIZE(windows);
    PyObject *kept = PyList_AsTuple(windows);
    char **parts = PyMem_Calloc(size ? size : 1, sizeof *parts);
    if (!kept || !parts) {
        Py_XDECREF(kept);
        PyMem_Free(parts);
        PyErr_NoMemory();
        return -1;
    }
    Py_XSETREF(self->windows, kept);
    PyMem_Free(self->parts);
    self->parts = parts;
    self->size = (int)size;
    for (Py_ssize_t at = 0; at < size; at++) {
        PyObject *window = PyTuple_GET_ITEM(kept, at);
        if (!PyArray_Check(window) || PyArray_NBYTES((PyArrayObject *)window) < LINE_BYTES || self->rank < 0 ||
            self->rank >= size) {
            PyErr_SetString(PyExc_ValueError, "Barrier: needed are each rank's part of a window, and a rank");
            return -1;
        }
        parts[at] = PyArray_BYTES((PyArrayObject *)window);
    }
    return 0;
}

static void barrier_dealloc(Barrier *self)
{
    PyMem_Free(self->parts);
    Py_XDECREF(self->windows);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static void post(Barrier *self)
{
    __atomic_store_n(line_of(self, self->rank), ++self->count, __ATOMIC_RELEASE);
}

static int has_passed(const Barrier *self)
{
    int rank = 0;
    for (int spin = 0; spin <= self->spins; spin++) {
        while (rank < self->size && __atomic_load_n(line_of(self, rank), __ATOMIC_ACQUIRE) >= self->count) rank++;
        if (rank == self->size) return 1;
        relax();
    }
    return 0;
}

/* Copies to shared memory. Where the ranks' cores share no cache, each line that others have read must be taken back from
 * them before it is written, one after the other, which takes up to fifty times as long as to write past the caches. */
static void copy_to_others(Barrier *self, char *to, const char *from, Py_ssize_t nbytes)
{
    Py_ssize_t timed = 0;
    if (nbytes >= 2 * TIMED_BYTES && --self->copies_to_stream < 0) {
        char read = 0;  /* first, as what is timed is the writing alone */
        for (Py_ssize_t at = 0; at < TIMED_BYTES; at += 64) read ^= from[at];
        __asm__ volatile("" : : "r"(read) : "memory");
        const long long begun = nanoseconds();
        memcpy(to, from, timed = TIMED_BYTES);
        self->copies_to_stream = nanoseconds() - begun > MOST_NANOSECONDS ? STREAMED_COPIES : 0;
    }
    (self->copies_to_stream > 0 ? stream : copy)(to + timed, from + timed, nbytes - timed);
}

PyDoc_STRVAR(copy_doc, "copy(into, source)\n--\n\nCopy an array to shared memory; False if NumPy has to.");

static PyObject *barrier_copy(Barrier *self, PyObject *const *given, Py_ssize_t num_given)
{
    if (num_given != 2 || !PyArray_Check(given[0])) {
        PyErr_SetString(PyExc_TypeError, "copy: needed are two arrays");
        return NULL;
    }
    PyArrayObject *into = (PyArrayObject *)given[0];
    if (!add_of(PyArray_DESCR(into)) || !is_plain(given[0], PyArray_DESCR(into)) ||
        !is_plain(given[1], PyArray_DESCR(into)) || PyArray_SIZE(into) != PyArray_SIZE((PyArrayObject *)given[1]))
        Py_RETURN_FALSE;
    copy_to_others(self, PyArray_BYTES(into), PyArray_BYTES((PyArrayObject *)given[1]), PyArray_NBYTES(into));
    Py_RETURN_TRUE;
}

static PyObject *barrier_post(Barrier *self, PyObject *Py_UNUSED(none))
{
    post(self);
    Py_RETURN_NONE;
}

static PyObject *barrier_post_words(Barrier *self, PyObject *const *given, Py_ssize_t num_given)
{
    if (num_given != 2) {
        PyErr_SetString(PyExc_TypeError, "post_words: needed are two words");
        return NULL;
    }
    const long long first = PyLong_AsLongLong(given[0]), second = PyLong_AsLongLong(given[1]);
    if (PyErr_Occurred()) return NULL;
    /* Two places in turn: slow ranks may still read the words of the last barrier. */
    npy_int64 *words = line_of(self, self->rank) + 1 + (self->count + 1) % 2 * 4;
    words[0] = first;
    words[1] = second;
    post(self);
    Py_RETURN_NONE;
}

static PyObject *barrier_tell(Barrier *self, PyObject *word)
{
    const long long told = PyLong_AsLongLong(word);
    if (told == -1 && PyErr_Occurred()) return NULL;
    line_of(self, self->rank)[TOLD + (self->count + 1) % NUM_TOLD] = told;
    Py_RETURN_NONE;
}

static PyObject *barrier_told(Barrier *self, PyObject *number)
{
    const long long count = PyLong_AsLongLong(number);
    if (count == -1 && PyErr_Occurred()) return NULL;
    PyObject *words = PyList_New(self->size);
    if (!words) return NULL;
    for (int rank = 0; rank < self->size; rank++)
        PyList_SET_ITEM(words, rank, PyLong_FromLongLong(line_of(self, rank)[TOLD + count % NUM_TOLD]));
    return words;
}

static PyObject *barrier_has_passed(Barrier *self, PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(has_passed(self));
}

static PyObject *barrier_has_equal_words(Barrier *self, PyObject *Py_UNUSED(none))
{
    const Py_ssize_t at = 1 + self->count % 2 * 4;
    const npy_int64 *own = line_of(self, self->rank) + at;
    int same_first = 1, same_second = 1;
    for (int rank = 0; rank < self->size; rank++) {
        const npy_int64 *words = line_of(self, rank) + at;
        same_first &= words[0] == own[0];
        same_second &= words[1] == own[1];
    }
    return Py_BuildValue("(OO)", same_first ? Py_True : Py_False, same_second ? Py_True : Py_False);
}

static PyMethodDef barrier_methods[] = {
    {"copy", (PyCFunction)(void (*)(void))barrier_copy, METH_FASTCALL, copy_doc},
    {"post", (PyCFunction)barrier_post, METH_NOARGS, "Post this rank's arrival."},
    {"post_words", (PyCFunction)(void (*)(void))barrier_post_words, METH_FASTCALL,
     "Post this rank's arrival, with two words of 63 bits."},
    {"tell", (PyCFunction)barrier_tell, METH_O, "Tell the other ranks a word of 63 bits with the next barrier."},
    {"told", (PyCFunction)barrier_told, METH_O,
     "Return [ranks], what each told with a barrier, the last one or the one before."},
    {"has_passed", (PyCFunction)barrier_has_passed, METH_NOARGS, "Whether all ranks have arrived."},
    {"has_equal_words", (PyCFunction)barrier_has_equal_words, METH_NOARGS,
     "Whether all ranks posted the same first word, and the same second word, in the barrier passed last."},
    {NULL}};

static PyMemberDef barrier_members[] = {
    {"count", T_LONGLONG, offsetof(Barrier, count), READONLY, "The number of the barrier posted last."},
    {"copies_to_stream", T_INT, offsetof(Barrier, copies_to_stream), 0,
     "How many copies are written past the caches, before it is tried again whether that is needed."},
    {NULL}};

static PyTypeObject BarrierType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpidist.transport.native._native.Barrier",
    .tp_doc = "The barrier of a node's ranks, as in shared_memory/barrier.py.",
    .tp_basicsize = sizeof(Barrier),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)barrier_init,
    .tp_dealloc = (destructor)barrier_dealloc,
    .tp_methods = barrier_methods,
    .tp_members = barrier_members,
};

/* -------------------------------------------------------------------------------------------------- two-shot */

typedef struct {
    PyObject *arrays;    /* a tuple, which keeps the memory */
    char **data;         /* [pieces] */
    Py_ssize_t *ends;    /* [pieces] in elements of the whole list */
    Py_ssize_t num_pieces;
} List;

/* A place in a list that only goes forward. */
typedef struct {
    const List *list;
    Py_ssize_t piece;
} Cursor;

typedef struct {
    PyObject_HEAD
    Barrier *barrier;
    PyArray_Descr *dtype;
    Add add;
    Py_ssize_t slot_bytes, num_slots, itemsize, divide_by, chunk_count, total, num_chunks;
    List sources, results;
    Cursor staged, own, added, copied, copied_in;
    PyObject *regions;              /* each rank's part of the memory of results in shared memory, or None */
    Py_ssize_t *distances;          /* [ranks] from this rank's results to those of a rank, in bytes */
    Py_ssize_t at;                  /* the chunk that is added; -1 before the first */
    Py_ssize_t slot, next_slot;     /* of that chunk, and of the one after it */
    int is_waiting, streams, is_one_place;
    int is_direct;                  /* the results lie in shared memory, and the rank that adds writes those of all ranks */
} TwoShot;

static void list_clear(List *list)
{
    PyMem_Free(list->data);
    PyMem_Free(list->ends);
    Py_CLEAR(list->arrays);
    *list = (List){0};
}

/* Returns 1; 0 if NumPy has to take the arrays; -1 with an exception. */
static int list_set(List *list, PyObject *arrays, PyArray_Descr *dtype)
{
    PyObject *kept = PySequence_Tuple(arrays);
    if (!kept) return -1;
    const Py_ssize_t num = PyTuple_GET_SIZE(kept);
    List made = {kept, PyMem_Malloc((num + 1) * sizeof(char *)), PyMem_Malloc((num + 1) * sizeof(Py_ssize_t)), num};
    if (!made.data || !made.ends) {
        list_clear(&made);
        PyErr_NoMemory();
        return -1;
    }
    Py_ssize_t end = 0;
    for (Py_ssize_t at = 0; at < num; at++) {
        PyObject *array = PyTuple_GET_ITEM(kept, at);
        if (!is_plain(array, dtype)) {
            list_clear(&made);
            return 0;
        }
        made.data[at] = PyArray_BYTES((PyArrayObject *)array);
        made.ends[at] = end += PyArray_SIZE((PyArrayObject *)array);
    }
    list_clear(list);
    *list = made;
    return 1;
}

/* Returns where the element lies, and how many follow in its piece. */
static char *seek(Cursor *cursor, Py_ssize_t element, Py_ssize_t itemsize, Py_ssize_t *left)
{
    const Py_ssize_t *ends = cursor->list->ends;
    while (ends[cursor->piece] <= element) cursor->piece++;
    *left = ends[cursor->piece] - element;
    const Py_ssize_t start = cursor->piece ? ends[cursor->piece - 1] : 0;
    return cursor->list->data[cursor->piece] + (element - start) * itemsize;
}

/* The bounds of a rank's shard in a chunk: chunk_bounds of schedule.py. */
static Py_ssize_t bound(Py_ssize_t count, Py_ssize_t lanes, Py_ssize_t lane)
{
    const Py_ssize_t step = count < lanes * ROUND * 4 ? 1 : ROUND, units = (count + step - 1) / step;
    return least(count, step * (lane * (units / lanes) + least(lane, units % lanes)));
}

/* Adds, and writes the sums to one place and to others; or to one other place in the same pass, unless `by_copies`. Lines
 * that another core holds take three times as long to be written one by one as to be copied to, but where the cores share
 * a cache: there they take less. */
static void add_to_all(Add add, char *const *parts, Py_ssize_t num_parts, Py_ssize_t count, Py_ssize_t itemsize,
                       Py_ssize_t divide_by, char *out, char *const *others, Py_ssize_t num_others, int by_copies)
{
    if (num_others == 0 || (num_others == 1 && !by_copies)) {
        add(parts, num_parts, count, divide_by, out, num_others ? others[0] : NULL);
        return;
    }
    char *blocks[MOST_PARTS];
    const Py_ssize_t step = COPIED_BLOCK / itemsize;
    for (Py_ssize_t begin = 0; begin < count; begin += step) {
        const Py_ssize_t length = least(step, count - begin), at = begin * itemsize;
        for (Py_ssize_t part = 0; part < num_parts; part++) blocks[part] = parts[part] + at;
        add(blocks, num_parts, length, divide_by, out + at, NULL);
        for (Py_ssize_t other = 0; other < num_others; other++) memcpy(others[other] + at, out + at, length * itemsize);
    }
}

static char *slot_of(const TwoShot *self, int rank, Py_ssize_t slot)
{
    return self->barrier->parts[rank] + LINE_BYTES + slot * self->slot_bytes;
}

static Py_ssize_t chunk_length(const TwoShot *self, Py_ssize_t chunk)
{
    return least(self->chunk_count, self->total - chunk * self->chunk_count);
}

/* Copies this rank's contribution to a chunk, but for the rank's own shard, into its slot of the next barrier, or to where
 * the results will lie. */
static void stage(TwoShot *self, Py_ssize_t chunk)
{
    Barrier *barrier = self->barrier;
    const Py_ssize_t count = chunk_length(self, chunk), first = chunk * self->chunk_count;
    self->next_slot = (Py_ssize_t)((barrier->count + 1) % self->num_slots);
    char *slot = slot_of(self, barrier->rank, self->next_slot);
    for (int lane = 0; lane < barrier->size; lane++) {
        if (lane == barrier->rank) continue;
        Py_ssize_t at = bound(count, barrier->size, lane), end = bound(count, barrier->size, lane + 1), left, room;
        for (; at < end; at += left) {
            const char *source = seek(&self->staged, first + at, self->itemsize, &left);
            char *into = slot + at * self->itemsize;
            if (self->is_direct) {
                into = seek(&self->copied_in, first + at, self->itemsize, &room);
                left = least(left, room);
            }
            left = least(left, end - at);
            copy_to_others(barrier, into, source, left * self->itemsize);
        }
    }
}

/* Adds this rank's shard of all ranks into the results of all ranks. */
static void fold_directly(TwoShot *self)
{
    Barrier *barrier = self->barrier;
    const Py_ssize_t count = chunk_length(self, self->at), first = self->at * self->chunk_count;
    char *parts[MOST_PARTS], *others[MOST_PARTS];
    const Py_ssize_t start = bound(count, barrier->size, barrier->rank);
    const Py_ssize_t end = bound(count, barrier->size, barrier->rank + 1);
    const int is_timed = (end - start) * self->itemsize >= LEAST_TIMED_BYTES && barrier->size == 2;
    const int by_copies = is_timed ? next_way(&barrier->shared) : barrier->shared.best;
    const long long begun = is_timed ? nanoseconds() : 0;
    for (Py_ssize_t at = start, left, room; at < end; at += left) {
        char *source = seek(&self->own, first + at, self->itemsize, &left);
        char *result = seek(&self->added, first + at, self->itemsize, &room);
        left = least(least(left, room), end - at);
        for (int rank = 0, other = 0; rank < barrier->size; rank++) {
            parts[rank] = rank == barrier->rank ? source : result + self->distances[rank];
            if (rank != barrier->rank) others[other++] = parts[rank];
        }
        add_to_all(self->add, parts, barrier->size, left, self->itemsize, self->divide_by, result, others,
                   barrier->size - 1, by_copies);
    }
    if (is_timed) learn(&barrier->shared, by_copies, begun, (end - start) * self->itemsize);
}

/* Adds this rank's shard of all ranks, into its slot and its results; or into the one place of the results of all. */
static void fold(TwoShot *self)
{
    Barrier *barrier = self->barrier;
    const Py_ssize_t count = chunk_length(self, self->at), first = self->at * self->chunk_count;
    char *parts[MOST_PARTS], *slot = slot_of(self, barrier->rank, self->slot);
    char block[COPIED_BLOCK] __attribute__((aligned(64)));
    const Py_ssize_t start = bound(count, barrier->size, barrier->rank);
    const Py_ssize_t end = bound(count, barrier->size, barrier->rank + 1);
    const int is_timed = (end - start) * self->itemsize >= LEAST_TIMED_BYTES && !self->is_one_place;
    const int by_copies = is_timed ? next_way(&barrier->sums) : barrier->sums.best;
    const long long begun = is_timed ? nanoseconds() : 0;
    for (Py_ssize_t at = start, left, room; at < end; at += left) {
        char *source = seek(&self->own, first + at, self->itemsize, &left), *result = NULL;
        if (self->results.num_pieces) {
            result = seek(&self->added, first + at, self->itemsize, &room);
            left = least(left, room);
        }
        left = least(left, end - at);
        for (int rank = 0; rank < barrier->size; rank++)
            parts[rank] = rank == barrier->rank ? source : slot_of(self, rank, self->slot) + at * self->itemsize;
        char *own = slot + at * self->itemsize;
        if (self->is_one_place)
            self->add(parts, barrier->size, left, self->divide_by, result, NULL);
        else if (self->streams || (!result && by_copies)) {
            left = least(left, COPIED_BLOCK / self->itemsize);
            self->add(parts, barrier->size, left, self->divide_by, block, NULL);
            memcpy(own, block, left * self->itemsize);
            if (result) stream(result, block, left * self->itemsize);
        }
        else if (!result)
            self->add(parts, barrier->size, left, self->divide_by, own, NULL);
        else
            add_to_all(self->add, parts, barrier->size, left, self->itemsize, self->divide_by, result, &own, 1, by_copies);
    }
    if (is_timed) learn(&barrier->sums, by_copies, begun, (end - start) * self->itemsize);
}

/* Copies the other ranks' shards of the sums out. */
static void copy_out(TwoShot *self)
{
    const Barrier *barrier = self->barrier;
    const Py_ssize_t count = chunk_length(self, self->at), first = self->at * self->chunk_count;
    if (!self->results.num_pieces || self->is_one_place || self->is_direct) return;
    for (int lane = 0; lane < barrier->size; lane++) {
        if (lane == barrier->rank) continue;
        const char *slot = slot_of(self, lane, self->slot);
        Py_ssize_t at = bound(count, barrier->size, lane), end = bound(count, barrier->size, lane + 1), left;
        for (; at < end; at += left) {
            char *result = seek(&self->copied, first + at, self->itemsize, &left);
            left = least(left, end - at);
            (self->streams ? stream : copy)(result, slot + at * self->itemsize, left * self->itemsize);
        }
    }
}

/* Goes on until this rank has to wait. Returns whether everything is done. */
static int advance(TwoShot *self)
{
    for (;;) {
        if (self->is_waiting) {
            if (!has_passed(self->barrier)) return 0;
            self->is_waiting = 0;
            if (self->at >= 0) copy_out(self);
            self->slot = self->next_slot;
            if (++self->at == self->num_chunks) return 1;
        }
        if (self->at + 1 < self->num_chunks) stage(self, self->at + 1);
        if (self->at >= 0) (self->is_direct ? fold_directly : fold)(self);
        post(self->barrier);
        self->is_waiting = 1;
    }
}

static void two_shot_dealloc(TwoShot *self)
{
    list_clear(&self->sources);
    list_clear(&self->results);
    PyMem_Free(self->distances);
    Py_XDECREF(self->regions);
    Py_XDECREF(self->barrier);
    Py_XDECREF(self->dtype);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int two_shot_init(TwoShot *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"barrier", "slot_bytes", "num_slots", "dtype", "divide_by", "is_one_place", "regions", NULL};
    PyObject *barrier, *dtype, *regions;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!nnO!npO", names, &BarrierType, &barrier, &self->slot_bytes,
                                     &self->num_slots, &PyArrayDescr_Type, &dtype, &self->divide_by,
                                     &self->is_one_place, &regions))
        return -1;
    self->add = add_of((PyArray_Descr *)dtype);
    if (!self->add || (self->divide_by != 1 && ((PyArray_Descr *)dtype)->kind != 'f') ||
        ((Barrier *)barrier)->size > MOST_PARTS) {
        PyErr_SetString(PyExc_ValueError, "TwoShot: these numbers are added by NumPy");
        return -1;
    }
    Py_INCREF(barrier);
    Py_XSETREF(self->barrier, (Barrier *)barrier);
    Py_INCREF(dtype);
    Py_XSETREF(self->dtype, (PyArray_Descr *)dtype);
    Py_INCREF(regions);
    Py_XSETREF(self->regions, regions);
    PyMem_Free(self->distances);
    self->distances = PyMem_Calloc(self->barrier->size, sizeof *self->distances);
    if (!self->distances) {
        PyErr_NoMemory();
        return -1;
    }
    self->itemsize = PyDataType_ELSIZE(self->dtype);
    self->chunk_count = self->slot_bytes / self->itemsize;
    self->at = -1;
    self->staged.list = self->own.list = &self->sources;
    self->added.list = self->copied.list = self->copied_in.list = &self->results;
    return 0;
}

PyDoc_STRVAR(set_sources_doc, "Set the arrays that are added; False if NumPy has to. Once, or again with copies.");

static PyObject *two_shot_set_sources(TwoShot *self, PyObject *arrays)
{
    const int is_set = list_set(&self->sources, arrays, self->dtype);
    if (is_set < 0) return NULL;
    if (!is_set) Py_RETURN_FALSE;
    const List *list = &self->sources;
    self->total = list->num_pieces ? list->ends[list->num_pieces - 1] : 0;
    self->num_chunks = (self->total + self->chunk_count - 1) / self->chunk_count;
    Py_RETURN_TRUE;
}

static PyObject *two_shot_set_results(TwoShot *self, PyObject *arrays)
{
    const int is_set = list_set(&self->results, arrays, self->dtype);
    if (is_set < 0) return NULL;
    const List *list = &self->results;
    if (is_set && list->num_pieces && list->ends[list->num_pieces - 1] != self->total) {
        PyErr_SetString(PyExc_ValueError, "TwoShot: the results have another length than the sources");
        return NULL;
    }
    /* Where sources become results, the numbers that are written have just been read. */
    const int is_in_place = list->num_pieces && self->sources.num_pieces && list->data[0] == self->sources.data[0];
    self->streams = !is_in_place && self->total * self->itemsize >= STREAMS_BYTES;
    return PyBool_FromLong(is_set);
}

PyDoc_STRVAR(begin_doc,
             "begin(is_direct)\n--\n\n"
             "Copy the first chunk in: to the results that are set, where they lie in shared memory and `is_direct` says so. A "
             "barrier of the node and `advance` follow; then other arrays, and the same again.");

static PyObject *two_shot_begin(TwoShot *self, PyObject *is_direct)
{
    self->is_direct = PyObject_IsTrue(is_direct);
    if (!self->num_chunks) Py_RETURN_NONE;
    self->staged.piece = self->own.piece = self->added.piece = self->copied.piece = self->copied_in.piece = 0;
    self->is_waiting = 0;
    stage(self, 0);
    self->slot = self->next_slot;
    self->at = 0;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(set_places_doc,
             "set_places(places)\n--\n\n"
             "Set where the results of each rank lie in its part of the shared memory of results: before a direct `advance`.");

static PyObject *two_shot_set_places(TwoShot *self, PyObject *places)
{
    const int size = self->barrier->size, rank = self->barrier->rank;
    if (!PyList_Check(places) || PyList_GET_SIZE(places) != size || !PyList_Check(self->regions) ||
        PyList_GET_SIZE(self->regions) != size) {
        PyErr_SetString(PyExc_ValueError, "set_places: needed are a place in the memory of each rank, and that memory");
        return NULL;
    }
    const char *results[MOST_PARTS];
    for (int at = 0; at < size; at++) {
        PyArrayObject *region = (PyArrayObject *)PyList_GET_ITEM(self->regions, at);
        const Py_ssize_t place = PyLong_AsSsize_t(PyList_GET_ITEM(places, at));
        if (place == -1 && PyErr_Occurred()) return NULL;
        if (!PyArray_Check(region) || place < 0 || place >= PyArray_NBYTES(region)) {
            PyErr_SetString(PyExc_ValueError, "set_places: a place lies outside the memory of its rank");
            return NULL;
        }
        results[at] = PyArray_BYTES(region) + place;
    }
    for (int at = 0; at < size; at++) self->distances[at] = results[at] - results[rank];
    Py_RETURN_NONE;
}

static PyObject *two_shot_advance(TwoShot *self, PyObject *Py_UNUSED(none))
{
    int is_done = !self->num_chunks || self->at == self->num_chunks;
    if (is_done) Py_RETURN_TRUE;
    if (self->total * self->itemsize < FREES_GIL_BYTES) return PyBool_FromLong(advance(self));
    Py_BEGIN_ALLOW_THREADS
    is_done = advance(self);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(is_done);
}

static PyObject *two_shot_forget(TwoShot *self, PyObject *Py_UNUSED(none))
{
    list_clear(&self->sources);
    list_clear(&self->results);
    Py_RETURN_NONE;
}

static PyMethodDef two_shot_methods[] = {
    {"set_sources", (PyCFunction)two_shot_set_sources, METH_O, set_sources_doc},
    {"set_results", (PyCFunction)two_shot_set_results, METH_O,
     "Set the arrays that take the sums, none on a rank that gets none; False if NumPy has to."},
    {"begin", (PyCFunction)two_shot_begin, METH_O, begin_doc},
    {"set_places", (PyCFunction)two_shot_set_places, METH_O, set_places_doc},
    {"advance", (PyCFunction)two_shot_advance, METH_NOARGS,
     "Go on until this rank has to wait for others. Returns whether everything is done."},
    {"forget", (PyCFunction)two_shot_forget, METH_NOARGS, "Let the arrays go. Others have to be set before the next call."},
    {NULL}};

static PyTypeObject TwoShotType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpidist.transport.native._native.TwoShot",
    .tp_doc = "One all-reduce of private arrays, as in shared_memory/two_shot.py: into results of this rank, or of all ranks.",
    .tp_basicsize = sizeof(TwoShot),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)two_shot_init,
    .tp_dealloc = (destructor)two_shot_dealloc,
    .tp_methods = two_shot_methods,
};

/* ---------------------------------------------------------------------------------------------------- module */

static int refers_to(PyObject *ref, PyObject *array)
{
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *its = NULL;
    const int is_alive = PyWeakref_GetRef(ref, &its) == 1;
    Py_XDECREF(its);
    return is_alive && its == array;
#else
    return PyWeakref_GET_OBJECT(ref) == array;
#endif
}

static int has_form(PyArrayObject *array, PyObject *form)
{
    PyObject *shape = PyTuple_GET_ITEM(form, 0), *dtype = PyTuple_GET_ITEM(form, 1);
    if (!PyTuple_Check(shape) || PyTuple_GET_SIZE(shape) != PyArray_NDIM(array) || !PyArray_DescrCheck(dtype)) return 0;
    for (int axis = 0; axis < PyArray_NDIM(array); axis++)
        if (PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, axis)) != PyArray_DIM(array, axis)) return 0;
    return PyArray_DESCR(array) == (PyArray_Descr *)dtype || PyArray_EquivTypes(PyArray_DESCR(array), (PyArray_Descr *)dtype);
}

PyDoc_STRVAR(are_known_doc,
             "are_known(outs, arrays, refs, forms)\n--\n\n"
             "Whether arrays are those of weak references, and are `arrays`, or NumPy's of (shape, dtype). NumPy's can be written.");

static PyObject *are_known(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t num_given)
{
    const Py_ssize_t num = num_given == 4 && PyList_Check(given[0]) ? PyList_GET_SIZE(given[0]) : 0;
    for (Py_ssize_t which = 0; which < 4; which++)
        if (num_given != 4 || !PyList_Check(given[which]) || PyList_GET_SIZE(given[which]) != num) {
            PyErr_SetString(PyExc_TypeError, "are_known: needed are four lists of one length");
            return NULL;
        }
    for (Py_ssize_t at = 0; at < num; at++) {
        PyObject *out = PyList_GET_ITEM(given[0], at), *ref = PyList_GET_ITEM(given[2], at);
        PyObject *form = PyList_GET_ITEM(given[3], at);
        const int is_of_numpy = PyArray_CheckExact(out);
        if (is_of_numpy && !PyArray_ISWRITEABLE((PyArrayObject *)out)) Py_RETURN_FALSE;
        if (!PyWeakref_CheckRef(ref) || !refers_to(ref, out)) Py_RETURN_FALSE;
        if (out == PyList_GET_ITEM(given[1], at)) continue;
        if (!is_of_numpy) Py_RETURN_FALSE;
        if (!PyTuple_Check(form) || PyTuple_GET_SIZE(form) != 2 || !has_form((PyArrayObject *)out, form)) Py_RETURN_FALSE;
    }
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_TRUE;
}

PyDoc_STRVAR(adds_doc, "adds(dtype)\n--\n\nWhether numbers of a dtype are added here.");

static PyObject *adds(PyObject *Py_UNUSED(module), PyObject *dtype)
{
    return PyBool_FromLong(PyArray_DescrCheck(dtype) && add_of((PyArray_Descr *)dtype) != NULL);
}

static PyMethodDef functions[] = {{"add", (PyCFunction)(void (*)(void))add, METH_FASTCALL, add_doc},
                                  {"adds", adds, METH_O, adds_doc},
                                  {"are_known", (PyCFunction)(void (*)(void))are_known, METH_FASTCALL, are_known_doc},
                                  {NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native",
                                        "Barriers, copies and additions in the memory of a node.", -1, functions};

PyMODINIT_FUNC PyInit__native(void)
{
    import_array();
    if (PyType_Ready(&BarrierType) < 0 || PyType_Ready(&TwoShotType) < 0) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    Py_INCREF(&BarrierType);
    Py_INCREF(&TwoShotType);
    if (PyModule_AddObject(module, "Barrier", (PyObject *)&BarrierType) < 0 ||
        PyModule_AddObject(module, "TwoShot", (PyObject *)&TwoShotType) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
