/* What the files of the compiled part share.
 *
 * Python has all of this, too (node_memory/barrier.py, shared_memory/two_shot.py, reduction.py), on the same layout of the
 * same memory: ranks with and without the compiled part work together. Numbers are those of NumPy on x86, bit by bit.
 */
#ifndef MPIDIST_NATIVE_H
#define MPIDIST_NATIVE_H

#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_1_23_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL mpidist_native_numpy
#ifndef IMPORTS_NUMPY /* _native.c does, for all files */
#define NO_IMPORT_ARRAY
#endif
#include <Python.h>
#include <structmember.h>
#include <numpy/arrayobject.h>

#define LINE_BYTES 128           /* of a rank's part that are the barrier's: window.py */
#define MOST_PARTS 1024
#define CACHE_LINE 64
#define FREES_GIL_BYTES (64 << 10)

static inline Py_ssize_t least(Py_ssize_t one, Py_ssize_t other)
{
    return one < other ? one : other;
}

/* ---------------------------------------------------------------------------------------------- combining.c */

typedef enum { SUM, PROD, MIN, MAX, NUM_OPS } Op;

/* Sets an operation by its name, for `PyArg_Parse`. Returns 0 with an exception. */
int set_op(PyObject *name, void *op);

/* Reduces [count] elements of each part, in order, divides the totals, and writes them to one or two places. */
typedef void (*Combine)(char *const *parts, Py_ssize_t num_parts, Py_ssize_t count, Py_ssize_t divide_by, char *out,
                        char *second);

/* Returns NULL for dtypes that are reduced by NumPy. */
Combine combine_of(Op op, PyArray_Descr *dtype);

/* Returns what reduces numbers of so many ranks and divides them; NULL with an exception if NumPy has to. */
Combine combine_for(Op op, PyArray_Descr *dtype, Py_ssize_t divide_by, Py_ssize_t num_parts);

/* Whether sums of a dtype may be divided: means of whole numbers are floats. */
int divides(PyArray_Descr *dtype);

/* Whether an object is an array of numbers side by side. */
int is_plain(PyObject *item, PyArray_Descr *dtype);

extern PyMethodDef combining_functions[];

/* ------------------------------------------------------------------------------------------------ writing.c */

/* How numbers are written to memory that other ranks have read. */
typedef enum { CACHED, STREAMED, NUM_WAYS } Way;

/* Which way takes less. Each rank finds out for itself, for each kind of memory. */
typedef struct {
    Way way;
    int calls, interval;     /* since the way was changed; after how many the other way is tried */
    double costs[NUM_WAYS];  /* nanoseconds for a byte, the mean of the last calls; 0 if none is known */
} Choice;

typedef struct {
    Way way;
    long long begun;         /* nanoseconds; 0 if the time is not taken */
    Py_ssize_t nbytes;
} Timing;

/* Of the monotonic clock. */
long long nanoseconds(void);

void choice_init(Choice *choice);

/* Begins to write that many bytes, in the way that is taken; `forced` is that way if it is not negative. */
Timing timing_begin(const Choice *choice, int forced, Py_ssize_t nbytes);

/* Ends the streams, and learns from the time since `timing_begin`. */
void timing_end(Choice *choice, Timing timing);

/* Memory that is written past the caches: without reading its lines, or taking them from other cores one by one. Only whole
 * lines are fast, so a line of which a part is known waits for the rest. Begins as {0}. */
typedef struct {
    char *to;                /* where the next byte goes */
    Py_ssize_t held;         /* bytes before it that are not in memory yet, but in `line` */
    char line[CACHE_LINE];
} Stream;

/* Writes after what was written last, or at another place. `stream_flush` follows. */
void stream_write(Stream *stream, char *to, const char *from, Py_ssize_t nbytes);
void stream_flush(Stream *stream);

/* Before another rank may read what was written in streams. */
void end_streams(void);

static inline void copy_by(Way way, Stream *stream, char *to, const char *from, Py_ssize_t nbytes)
{
    if (way == STREAMED)
        stream_write(stream, to, from, nbytes);
    else
        memcpy(to, from, nbytes);
}

/* ------------------------------------------------------------------------------------------------ barrier.c */

/* What is written. */
typedef enum { SUMS_IN_SLOTS, SUMS_IN_ONE_PLACE, SUMS_IN_RESULTS, COPIES, NUM_KINDS } Kind;

typedef struct {
    PyObject_HEAD
    long long count;     /* of the barrier that this rank posted last */
    int rank, size, spins;
    int forced_way;      /* negative: by trial */
    Choice choices[NUM_KINDS];
    PyObject *windows;   /* [ranks] each rank's part, which this object keeps */
    char **parts;        /* [ranks] where the part begins: with the line of the barrier */
} Barrier;

extern PyTypeObject BarrierType;

void barrier_post(Barrier *self);

/* Whether all ranks have arrived. Polls for a while. */
int barrier_has_passed(const Barrier *self);

/* Posts this rank's arrival, with two words that `barrier_has_equal_words` compares. */
void barrier_post_words(Barrier *self, npy_int64 first, npy_int64 second);
void barrier_has_equal_words(const Barrier *self, int *same_first, int *same_second);

/* Passes a word to the other ranks, with the next barrier; and reads one that came with barrier `count`, the last or the one
 * before. */
void barrier_publish(Barrier *self, npy_int64 word);
npy_int64 barrier_published(const Barrier *self, int rank, long long count);

/* Copies to memory that other ranks read. */
void barrier_copy(Barrier *self, char *into, const char *source, Py_ssize_t nbytes, int forced_way);

/* ----------------------------------------------------------------------------------------------- two_shot.c */

typedef struct TwoShot TwoShot;

extern PyTypeObject TwoShotType;

/* Sets an array, or a sequence, and what takes the result, and copies the first chunk in: `place` is where the result lies
 * in this rank's part of the shared memory of results, or 0. Returns 1; 0 if NumPy has to; -1 with an exception. */
int two_shot_take(TwoShot *self, PyObject *arrays, PyObject *into, npy_int64 place);

/* Takes the places that the ranks have published. Returns 0 if some ranks have none, and others do; -1 with an exception. */
int two_shot_take_places(TwoShot *self);

/* Goes on until this rank has to wait. Returns whether everything is done. */
int two_shot_go_on(TwoShot *self);

void two_shot_let_go(TwoShot *self);

/* --------------------------------------------------------------------------------- whole_call.c, known_arrays.c */

extern PyTypeObject WholeCallType;
extern PyMethodDef known_arrays_functions[];

/* ----------------------------------------------------------------------------------------------- checksum.c */

extern PyMethodDef checksum_functions[];

#endif
