/* The barrier of a node's ranks, in shared memory: node_memory/barrier.py. */
#include "native.h"

#define WORDS 9             /* the first of four places in that line for published words, in turn: barrier.py */
#define NUM_PLACES 4

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline npy_int64 *line_of(const Barrier *self, int rank)
{
    return (npy_int64 *)self->parts[rank];
}

static int barrier_init(Barrier *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"windows", "rank", "spins", NULL};
    PyObject *windows;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!ii", names, &PyList_Type, &windows, &self->rank, &self->spins)) return -1;
    const Py_ssize_t size = PyList_GET_SIZE(windows);
    self->windows = PyList_AsTuple(windows);
    self->parts = PyMem_Calloc(size ? size : 1, sizeof *self->parts);
    if (!self->windows || !self->parts) {
        PyErr_NoMemory();
        return -1;
    }
    self->forced_way = -1;
    for (Kind kind = 0; kind < NUM_KINDS; kind++) choice_init(&self->choices[kind]);
    self->size = (int)size;
    for (Py_ssize_t at = 0; at < size; at++) {
        PyObject *window = PyTuple_GET_ITEM(self->windows, at);
        if (!PyArray_Check(window) || PyArray_NBYTES((PyArrayObject *)window) < LINE_BYTES || self->rank < 0 ||
            self->rank >= size) {
            PyErr_SetString(PyExc_ValueError, "Barrier: needed are each rank's part of a window, and a rank");
            return -1;
        }
        self->parts[at] = PyArray_BYTES((PyArrayObject *)window);
    }
    return 0;
}

static void barrier_dealloc(Barrier *self)
{
    PyMem_Free(self->parts);
    Py_XDECREF(self->windows);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

void barrier_post(Barrier *self)
{
    __atomic_store_n(line_of(self, self->rank), ++self->count, __ATOMIC_RELEASE);
}

int barrier_has_passed(const Barrier *self)
{
    int rank = 0;
    for (int spin = 0; spin <= self->spins; spin++) {
        while (rank < self->size && __atomic_load_n(line_of(self, rank), __ATOMIC_ACQUIRE) >= self->count) rank++;
        if (rank == self->size) return 1;
        relax();
    }
    return 0;
}

void barrier_post_words(Barrier *self, npy_int64 first, npy_int64 second)
{
    /* Two places in turn: slow ranks may still read the words of the last barrier. */
    npy_int64 *words = line_of(self, self->rank) + 1 + (self->count + 1) % 2 * 4;
    words[0] = first;
    words[1] = second;
    barrier_post(self);
}

void barrier_has_equal_words(const Barrier *self, int *same_first, int *same_second)
{
    const Py_ssize_t at = 1 + self->count % 2 * 4;
    const npy_int64 *own = line_of(self, self->rank) + at;
    *same_first = *same_second = 1;
    for (int rank = 0; rank < self->size; rank++) {
        const npy_int64 *words = line_of(self, rank) + at;
        *same_first &= words[0] == own[0];
        *same_second &= words[1] == own[1];
    }
}

void barrier_publish(Barrier *self, npy_int64 word)
{
    line_of(self, self->rank)[WORDS + (self->count + 1) % NUM_PLACES] = word;
}

npy_int64 barrier_published(const Barrier *self, int rank, long long count)
{
    return line_of(self, rank)[WORDS + count % NUM_PLACES];
}

void barrier_copy(Barrier *self, char *into, const char *source, Py_ssize_t nbytes, int forced_way)
{
    Choice *choice = &self->choices[COPIES];
    const Timing timing = timing_begin(choice, forced_way, nbytes);
    Stream stream = {0};
    copy_by(timing.way, &stream, into, source, nbytes);
    stream_flush(&stream);
    timing_end(choice, timing);
}

PyDoc_STRVAR(copy_doc,
             "copy(into, source, is_far=False)\n--\n\n"
             "Copy an array to shared memory, or to memory that is in no cache (`is_far`); False if NumPy has to.");

static PyObject *call_copy(Barrier *self, PyObject *const *given, Py_ssize_t num_given)
{
    if (num_given < 2 || num_given > 3 || !PyArray_Check(given[0])) {
        PyErr_SetString(PyExc_TypeError, "copy: needed are two arrays");
        return NULL;
    }
    PyArrayObject *into = (PyArrayObject *)given[0], *source = (PyArrayObject *)given[1];
    if (!PyArray_Check(source) || PyArray_SIZE(into) != PyArray_SIZE(source) || PyDataType_REFCHK(PyArray_DESCR(into)) ||
        !PyArray_EquivTypes(PyArray_DESCR(into), PyArray_DESCR(source)) || !PyArray_IS_C_CONTIGUOUS(into) ||
        !PyArray_IS_C_CONTIGUOUS(source) || !PyArray_ISWRITEABLE(into))
        Py_RETURN_FALSE;
    const int is_far = num_given == 3 && PyObject_IsTrue(given[2]);
    const int way = is_far && self->forced_way < 0 ? STREAMED : self->forced_way;
    barrier_copy(self, PyArray_BYTES(into), PyArray_BYTES(source), PyArray_NBYTES(into), way);
    Py_RETURN_TRUE;
}

static PyObject *call_post(Barrier *self, PyObject *Py_UNUSED(none))
{
    barrier_post(self);
    Py_RETURN_NONE;
}

static PyObject *call_post_words(Barrier *self, PyObject *const *given, Py_ssize_t num_given)
{
    if (num_given != 2) {
        PyErr_SetString(PyExc_TypeError, "post_words: needed are two words");
        return NULL;
    }
    const long long first = PyLong_AsLongLong(given[0]), second = PyLong_AsLongLong(given[1]);
    if (PyErr_Occurred()) return NULL;
    barrier_post_words(self, first, second);
    Py_RETURN_NONE;
}

static PyObject *call_publish(Barrier *self, PyObject *word)
{
    const long long published = PyLong_AsLongLong(word);
    if (published == -1 && PyErr_Occurred()) return NULL;
    barrier_publish(self, published);
    Py_RETURN_NONE;
}

static PyObject *call_published(Barrier *self, PyObject *number)
{
    const long long count = PyLong_AsLongLong(number);
    if (count == -1 && PyErr_Occurred()) return NULL;
    PyObject *words = PyList_New(self->size);
    if (!words) return NULL;
    for (int rank = 0; rank < self->size; rank++)
        PyList_SET_ITEM(words, rank, PyLong_FromLongLong(barrier_published(self, rank, count)));
    return words;
}

static PyObject *call_has_passed(Barrier *self, PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(barrier_has_passed(self));
}

static PyObject *call_has_equal_words(Barrier *self, PyObject *Py_UNUSED(none))
{
    int same_first, same_second;
    barrier_has_equal_words(self, &same_first, &same_second);
    return Py_BuildValue("(OO)", same_first ? Py_True : Py_False, same_second ? Py_True : Py_False);
}

static PyObject *get_streams(Barrier *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(self->forced_way < 0 ? self->choices[COPIES].way == STREAMED : self->forced_way == STREAMED);
}

static PyGetSetDef barrier_properties[] = {
    {"streams", (getter)get_streams, NULL, "Whether copies are written past the caches at the moment.", NULL},
    {NULL},
};

static PyMethodDef barrier_methods[] = {
    {"copy", (PyCFunction)(void (*)(void))call_copy, METH_FASTCALL, copy_doc},
    {"post", (PyCFunction)call_post, METH_NOARGS, "Post this rank's arrival."},
    {"post_words", (PyCFunction)(void (*)(void))call_post_words, METH_FASTCALL,
     "Post this rank's arrival, with two words of 63 bits."},
    {"publish", (PyCFunction)call_publish, METH_O, "Publish a word of 63 bits with the next barrier."},
    {"published", (PyCFunction)call_published, METH_O,
     "Return [ranks], the words published with a barrier, the last one or the one before."},
    {"has_passed", (PyCFunction)call_has_passed, METH_NOARGS, "Whether all ranks have arrived."},
    {"has_equal_words", (PyCFunction)call_has_equal_words, METH_NOARGS,
     "Whether all ranks posted the same first word, and the same second word, in the barrier passed last."},
    {NULL}};

static PyMemberDef barrier_members[] = {
    {"count", T_LONGLONG, offsetof(Barrier, count), READONLY, "The number of the barrier posted last."},
    {"forced_way", T_INT, offsetof(Barrier, forced_way), 0,
     "How memory that others read is written, for tests: 0 in the caches, 1 past them; negative: in the way that takes less."},
    {NULL}};

PyTypeObject BarrierType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpidist.transport.native._native.Barrier",
    .tp_doc = "The barrier of a node's ranks, as in node_memory/barrier.py.",
    .tp_basicsize = sizeof(Barrier),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)barrier_init,
    .tp_dealloc = (destructor)barrier_dealloc,
    .tp_methods = barrier_methods,
    .tp_members = barrier_members,
    .tp_getset = barrier_properties,
};
