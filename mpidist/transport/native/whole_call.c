/* A repeated call of private arrays on one node, as a whole: what collectives/plans/repeated_reductions.py does in steps. And
 * the comparison alone, of any call. */
#include "native.h"

/* A flight recorder's memory in words of 8 bytes: flight_recorder.py. */
#define RING 16
#define MOST_CALLS 2048
#define CALL_WORDS 5
#define FLIGHT_WORDS (RING + MOST_CALLS * CALL_WORDS)

/* How often a rank polls before Python goes on, which polls as often as waiting.py says before it yields its core: there may
 * be fewer cores than ranks. */
#define POLLS_OF_AGREEMENT 20
#define POLLS_OF_DATA 10

/* How far a call came: `Progress` of agreement.py. */
typedef enum { JOINED, AGREED, DONE, JOINED_AGAIN } Progress;

typedef struct {
    PyObject_HEAD
    Barrier *barrier;
    TwoShot *two_shot;       /* NULL: every rank adds all numbers */
    PyArray_Descr *dtype;    /* NULL: the comparison alone */
    Combine combine;
    Py_ssize_t slot_bytes, num_slots, divide_by;
    PyObject *flight;        /* an array: this rank's flight recorder */
    npy_int64 *words;        /* of it */
    npy_int64 *recorded;     /* the words of this call */
    long long staged_for;    /* the number of the barrier that belongs to the slot in which this call was staged */
} WholeCall;

static void record_begin(WholeCall *self, npy_int64 sequence, npy_int64 text)
{
    const npy_int64 count = self->words[0];
    self->recorded = self->words + RING + count % MOST_CALLS * CALL_WORDS;
    const npy_int64 call[CALL_WORDS] = {sequence, text, nanoseconds(), 0, 0};
    memcpy(self->recorded, call, sizeof call);
    __atomic_store_n(&self->words[0], count + 1, __ATOMIC_RELEASE); /* other ranks of the node may read */
}

static void record_agreed(WholeCall *self)
{
    self->recorded[3] = nanoseconds();
}

static void record_end(WholeCall *self)
{
    self->recorded[4] = nanoseconds();
}

static int wait_for_all(const Barrier *barrier, int polls)
{
    for (int poll = 0; poll < polls; poll++)
        if (barrier_has_passed(barrier)) return 1;
    return 0;
}

static char *slot_of(const WholeCall *self, int rank, long long barrier)
{
    return self->barrier->parts[rank] + LINE_BYTES + barrier % self->num_slots * self->slot_bytes;
}

/* Copies this rank's numbers in. Returns 0 with an exception. */
static int stage(WholeCall *self, PyObject *array, PyObject *result, npy_int64 place)
{
    Barrier *barrier = self->barrier;
    if (!self->dtype) return 1;
    if (self->two_shot) {
        const int is_taken = two_shot_take(self->two_shot, array, result, place);
        if (is_taken == 0) PyErr_SetString(PyExc_TypeError, "WholeCall: these arrays are reduced by NumPy");
        return is_taken > 0;
    }
    if (!is_plain(array, self->dtype) || !is_plain(result, self->dtype) || !PyArray_ISWRITEABLE((PyArrayObject *)result) ||
        PyArray_SIZE((PyArrayObject *)array) != PyArray_SIZE((PyArrayObject *)result) ||
        PyArray_NBYTES((PyArrayObject *)array) > self->slot_bytes) {
        PyErr_SetString(PyExc_TypeError, "WholeCall: these arrays are reduced by NumPy");
        return 0;
    }
    self->staged_for = barrier->count + 1;
    char *const slot = slot_of(self, barrier->rank, self->staged_for);
    barrier_copy(barrier, slot, PyArray_BYTES((PyArrayObject *)array), PyArray_NBYTES((PyArrayObject *)array),
                 barrier->forced_way);
    return 1;
}

static void add_all(const WholeCall *self, PyArrayObject *result)
{
    const Barrier *barrier = self->barrier;
    char *parts[MOST_PARTS];
    for (int rank = 0; rank < barrier->size; rank++) parts[rank] = slot_of(self, rank, self->staged_for);
    self->combine(parts, barrier->size, PyArray_SIZE(result), self->divide_by, PyArray_BYTES(result), NULL);
}

/* Goes on from where all ranks have joined, and make the same call. Returns the progress; -1 with an exception. */
static int reduce(WholeCall *self, PyObject *result)
{
    TwoShot *two_shot = self->two_shot;
    const int has_places = two_shot ? two_shot_take_places(two_shot) : 1;
    if (has_places < 0) return -1;
    if (!has_places) return JOINED;
    record_agreed(self);
    if (!self->dtype) return AGREED;
    if (!two_shot) {
        add_all(self, (PyArrayObject *)result);
        return DONE;
    }
    for (int poll = 0; poll < POLLS_OF_DATA; poll++)
        if (two_shot_go_on(two_shot)) {
            two_shot_let_go(two_shot);
            return DONE;
        }
    return AGREED;
}

/* Joins one round or two of comparison, and goes on. Returns the progress; -1 with an exception. */
static int join(WholeCall *self, PyObject *result, npy_int64 fingerprint, npy_int64 variant, int has_second_round)
{
    int same_fingerprint, same_variant;
    barrier_post_words(self->barrier, fingerprint, variant);
    if (!wait_for_all(self->barrier, POLLS_OF_AGREEMENT)) return JOINED;
    barrier_has_equal_words(self->barrier, &same_fingerprint, &same_variant);
    if (!same_fingerprint || !same_variant) return JOINED;
    if (has_second_round) {
        barrier_post_words(self->barrier, 0, 0);
        if (!wait_for_all(self->barrier, POLLS_OF_AGREEMENT)) return JOINED_AGAIN;
    }
    const int progress = reduce(self, result);
    return progress == JOINED && has_second_round ? JOINED_AGAIN : progress;
}

PyDoc_STRVAR(
    run_doc,
    "run(array, result, place, sequence, text, fingerprint, variant, has_second_round)\n--\n\n"
    "Stage an array or, for a two-shot all-reduce, a list of arrays, record the call, join the rounds of the call, and\n"
    "reduce. Without a dtype, record and join alone, until all ranks agree. Does not wait long.\n\n"
    "Returns how far the call came, as `Progress`. All ranks have passed the first round, and pass the same words, where\n"
    "this rank has joined the second one.");

static PyObject *whole_call_run(WholeCall *self, PyObject *const *given, Py_ssize_t num_given)
{
    long long numbers[6];
    if (num_given != 8) {
        PyErr_SetString(PyExc_TypeError, "run: needed are two arrays, or two lists, and six numbers");
        return NULL;
    }
    for (int at = 0; at < 6; at++) {
        numbers[at] = PyLong_AsLongLong(given[2 + at]);
        if (numbers[at] == -1 && PyErr_Occurred()) return NULL;
    }
    if (!stage(self, given[0], given[1], numbers[0])) return NULL;
    record_begin(self, numbers[1], numbers[2]);
    const int progress = join(self, given[1], numbers[3], numbers[4], numbers[5] != 0);
    if (progress < 0) return NULL;
    if (progress == DONE) record_end(self);
    return PyLong_FromLong(progress);
}

static void whole_call_dealloc(WholeCall *self)
{
    Py_XDECREF(self->barrier);
    Py_XDECREF(self->two_shot);
    Py_XDECREF(self->dtype);
    Py_XDECREF(self->flight);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int whole_call_init(WholeCall *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"barrier", "flight", "slot_bytes", "num_slots", "op", "dtype", "divide_by", "two_shot", NULL};
    PyObject *barrier, *flight, *dtype = NULL, *two_shot = Py_None;
    Op op = SUM;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!|nnO&O!nO", names, &BarrierType, &barrier, &PyArray_Type, &flight,
                                     &self->slot_bytes, &self->num_slots, set_op, &op, &PyArrayDescr_Type, &dtype,
                                     &self->divide_by, &two_shot))
        return -1;
    if (dtype) {
        self->combine = combine_for(op, (PyArray_Descr *)dtype, self->divide_by, ((Barrier *)barrier)->size);
        if (!self->combine) return -1;
    }
    if (PyArray_NBYTES((PyArrayObject *)flight) < 8 * FLIGHT_WORDS || !PyArray_ISCARRAY((PyArrayObject *)flight) ||
        (two_shot != Py_None && !PyObject_TypeCheck(two_shot, &TwoShotType))) {
        PyErr_SetString(PyExc_ValueError, "WholeCall: needed are a flight recorder's memory, and a TwoShot or None");
        return -1;
    }
    self->barrier = (Barrier *)Py_NewRef(barrier);
    self->dtype = (PyArray_Descr *)Py_XNewRef(dtype);
    self->flight = Py_NewRef(flight);
    self->two_shot = two_shot == Py_None ? NULL : (TwoShot *)Py_NewRef(two_shot);
    self->words = (npy_int64 *)PyArray_BYTES((PyArrayObject *)flight);
    return 0;
}

static PyMethodDef whole_call_methods[] = {
    {"run", (PyCFunction)(void (*)(void))whole_call_run, METH_FASTCALL, run_doc},
    {NULL},
};

static PyMemberDef whole_call_members[] = {
    {"staged_for", T_LONGLONG, offsetof(WholeCall, staged_for), READONLY,
     "The number of the barrier that belongs to the slot in which a one-shot all-reduce was staged last."},
    {NULL},
};

PyTypeObject WholeCallType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpidist.transport.native._native.WholeCall",
    .tp_doc = "Repeated calls of private arrays on one node: of one, or of a list.",
    .tp_basicsize = sizeof(WholeCall),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)whole_call_init,
    .tp_dealloc = (destructor)whole_call_dealloc,
    .tp_methods = whole_call_methods,
    .tp_members = whole_call_members,
};
