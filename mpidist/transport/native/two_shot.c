/* Two-shot all-reduces of arrays on one node: shared_memory/two_shot.py. */
#include "native.h"

#define ROUND 16           /* elements: schedule.py */
#define STREAMS_BYTES (16 << 20)    /* from here on, results are not in the cache when they are written */
#define COPIED_BLOCK (16 << 10)     /* bytes that are added, and copied to other places while they are in the cache */
#define GROUPS_DEPTH 2              /* two_shot.py */
#define STREAMED_BLOCK 512          /* bytes: so few that a core reads the next numbers while it writes the last ones */

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

struct TwoShot {
    PyObject_HEAD
    Barrier *barrier;
    PyArray_Descr *dtype;
    Combine combine;
    Py_ssize_t slot_bytes, num_slots, itemsize, divide_by, chunk_count, total, num_chunks;
    List sources, results;
    Cursor staged, own, added, copied, copied_in;
    PyObject *regions;              /* each rank's part of the memory of results in shared memory, or None */
    Py_ssize_t *distances;          /* [ranks] from this rank's results to those of a rank, in bytes */
    Stream *written;                /* [ranks + 1] to the places of sums that other ranks read, then to own results */
    Py_ssize_t at;                  /* the chunk that is added; -1 before the first */
    Py_ssize_t slots[1 + GROUPS_DEPTH]; /* of that chunk, and of those before it */
    Py_ssize_t next_slot;           /* of the one after it */
    int *members;                   /* [size] the ranks of the node of which this rank's group consists */
    int size, lane, lanes;          /* of the group; the lane is -1 on a rank that does not add */
    int *next;                      /* [groups] in whose slots the sums of each group are of this rank's shard */
    int num_groups, group;
    long long entered;              /* bytes read from the memory of other groups */
    int is_waiting, streams, is_one_place;
    int is_direct;                  /* the results lie in shared memory, and the rank that adds writes those of all ranks */
    int stages_in_results;          /* ranks copy in to where the results will lie, not into slots */
    long long places_barrier;       /* the number of the barrier with which ranks publish where their results lie */
};

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

static Py_ssize_t depth_of(const TwoShot *self)
{
    return self->num_groups > 1 ? GROUPS_DEPTH : 0;
}

static char *slot_of(const TwoShot *self, int rank, Py_ssize_t slot)
{
    return self->barrier->parts[rank] + LINE_BYTES + slot * self->slot_bytes;
}

/* Where the sums of a lane's shard are written for the group: in the slot of the next rank, who has staged that shard there.
 * The rank that adds has just read those lines. In its own slot it would have to take others back, which all have read. */
static char *slot_of_sums(const TwoShot *self, int lane, Py_ssize_t slot)
{
    return slot_of(self, self->members[(lane + 1) % self->size], slot);
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
    const int lanes = self->lanes, own_lane = self->lane;
    const Py_ssize_t own = own_lane < 0 ? 0 : bound(count, lanes, own_lane + 1) - bound(count, lanes, own_lane);
    Choice *choice = &barrier->choices[COPIES];
    const Timing timing = timing_begin(choice, barrier->forced_way, (count - own) * self->itemsize);
    Stream stream = {0};
    for (int lane = 0; lane < lanes; lane++) {
        if (lane == own_lane) continue;
        Py_ssize_t at = bound(count, lanes, lane), end = bound(count, lanes, lane + 1), left, room;
        for (; at < end; at += left) {
            const char *source = seek(&self->staged, first + at, self->itemsize, &left);
            char *into = slot + at * self->itemsize;
            if (self->stages_in_results) {
                into = seek(&self->copied_in, first + at, self->itemsize, &room);
                left = least(left, room);
            }
            left = least(left, end - at);
            copy_by(timing.way, &stream, into, source, left * self->itemsize);
        }
    }
    stream_flush(&stream);
    timing_end(choice, timing);
}

/* Adds [count] elements of the part of each rank of the group. Writes the sums to `own`, if there is one, which other ranks
 * do not read, and to places that they read. */
static void add_to(const TwoShot *self, char *const *parts, Py_ssize_t count, char *own, char *const *shared, int num_shared,
                   Way way)
{
    const int num_parts = self->size;
    const Py_ssize_t divide_by = self->num_groups > 1 ? 1 : self->divide_by;
    if (way == CACHED && !self->streams && (own != NULL) + num_shared <= 2) {
        char *const out = own ? own : shared[0], *const second = !own ? NULL : num_shared ? shared[0] : NULL;
        self->combine(parts, num_parts, count, divide_by, out, second);
        return;
    }
    char *blocks[MOST_PARTS], block[COPIED_BLOCK] __attribute__((aligned(CACHE_LINE)));
    const int streams_own = own && self->streams;
    const Py_ssize_t most = (streams_own || way == STREAMED ? STREAMED_BLOCK : COPIED_BLOCK) / self->itemsize;
    for (Py_ssize_t begin = 0, length; begin < count; begin += length) {
        length = least(most, count - begin);
        const Py_ssize_t at = begin * self->itemsize, nbytes = length * self->itemsize;
        char *const sums = own && !streams_own ? own + at : block;
        for (int part = 0; part < num_parts; part++) blocks[part] = parts[part] + at;
        self->combine(blocks, num_parts, length, divide_by, sums, NULL);
        for (int place = 0; place < num_shared; place++) copy_by(way, &self->written[place], shared[place] + at, sums, nbytes);
        if (streams_own) stream_write(&self->written[num_shared], own + at, sums, nbytes);
    }
}

static Kind kind_of_sums(const TwoShot *self)
{
    return self->is_one_place ? SUMS_IN_ONE_PLACE : self->is_direct ? SUMS_IN_RESULTS : SUMS_IN_SLOTS;
}

/* Adds this rank's shard of all ranks of its group: into a slot and, where that is all, this rank's results; into the
 * results of all ranks; or into the one place of the results of all. */
static void fold(TwoShot *self)
{
    Barrier *barrier = self->barrier;
    const Py_ssize_t count = chunk_length(self, self->at), first = self->at * self->chunk_count;
    const Py_ssize_t start = bound(count, self->lanes, self->lane), end = bound(count, self->lanes, self->lane + 1);
    char *parts[MOST_PARTS], *shared[MOST_PARTS];
    Choice *choice = &barrier->choices[kind_of_sums(self)];
    int way = barrier->forced_way;  /* large results are in no cache, whoever shares one */
    if (way < 0 && self->streams && (self->is_one_place || self->is_direct)) way = STREAMED;
    const Timing timing = timing_begin(choice, way, (end - start) * self->itemsize);
    for (Py_ssize_t at = start, left, room; at < end; at += left) {
        char *const source = seek(&self->own, first + at, self->itemsize, &left), *result = NULL;
        left = least(left, end - at);
        if (self->results.num_pieces && self->num_groups < 2) {
            result = seek(&self->added, first + at, self->itemsize, &room);
            left = least(left, room);
        }
        int num_shared = 0;
        for (int member = 0; member < self->size; member++) {
            const int other = self->members[member];
            char *const in_results = self->is_direct ? result + self->distances[other] : NULL;
            char *const staged = slot_of(self, other, self->slots[0]) + at * self->itemsize;
            parts[member] = other == barrier->rank ? source : self->stages_in_results ? in_results : staged;
            if (self->is_direct && other != barrier->rank) shared[num_shared++] = in_results;
        }
        if (!self->is_direct) {
            char *const in_slot = slot_of_sums(self, self->lane, self->slots[0]) + at * self->itemsize;
            shared[num_shared++] = self->is_one_place ? result : in_slot;
        }
        add_to(self, parts, left, self->is_one_place ? NULL : result, shared, num_shared, timing.way);
    }
    for (int at = 0; at <= self->size; at++) stream_flush(&self->written[at]);
    if (self->streams) end_streams();
    timing_end(choice, timing);
}

/* Adds the groups' sums of one part of this rank's shard, if `adds`, into this group's memory; or copies there what other
 * groups have added, each its part. Of the chunk `back` before that which is added, if there is such a chunk. */
static void join_groups(TwoShot *self, int back, int adds)
{
    const Py_ssize_t chunk = self->at - back, itemsize = self->itemsize;
    if (self->num_groups < 2 || self->lane < 0 || chunk < 0 || chunk >= self->num_chunks) return;
    const Py_ssize_t count = chunk_length(self, chunk), start = bound(count, self->lanes, self->lane);
    const Py_ssize_t shard = bound(count, self->lanes, self->lane + 1) - start;
    char *sums[MOST_PARTS];
    for (int group = 0; group < self->num_groups; group++)
        sums[group] = slot_of(self, self->next[group], self->slots[back]) + start * itemsize;
    char *const own = sums[self->group];
    for (int group = 0; group < self->num_groups; group++) {
        const Py_ssize_t begin = bound(shard, self->num_groups, group);
        const Py_ssize_t length = bound(shard, self->num_groups, group + 1) - begin;
        if (!length || adds != (group == self->group)) continue;
        self->entered += length * itemsize * (adds ? self->num_groups - 1 : 1);
        if (adds) {
            for (int part = 0; part < self->num_groups; part++) sums[part] += begin * itemsize;
            self->combine(sums, self->num_groups, length, self->divide_by, own + begin * itemsize, NULL);
        } else {
            memcpy(own + begin * itemsize, sums[group] + begin * itemsize, length * itemsize);
        }
    }
}

/* Copies the sums of a chunk out: the other lanes' shards, and this lane's where `fold` has not written it. */
static void copy_out(TwoShot *self)
{
    const int back = (int)depth_of(self);
    const Py_ssize_t chunk = self->at - back, count = chunk_length(self, chunk), first = chunk * self->chunk_count;
    if (!self->results.num_pieces || self->is_one_place || self->is_direct) return;
    Stream stream = {0};
    for (int lane = 0; lane < self->lanes; lane++) {
        if (lane == self->lane && self->num_groups < 2) continue;
        const char *slot = slot_of_sums(self, lane, self->slots[back]);
        Py_ssize_t at = bound(count, self->lanes, lane), end = bound(count, self->lanes, lane + 1), left;
        for (; at < end; at += left) {
            char *result = seek(&self->copied, first + at, self->itemsize, &left);
            left = least(left, end - at);
            copy_by(self->streams ? STREAMED : CACHED, &stream, result, slot + at * self->itemsize, left * self->itemsize);
        }
    }
    stream_flush(&stream);
    if (self->streams) end_streams();
}

/* Goes on until this rank has to wait. Returns whether everything is done. */
static int advance(TwoShot *self)
{
    for (;;) {
        if (self->is_waiting) {
            if (!barrier_has_passed(self->barrier)) return 0;
            self->is_waiting = 0;
            if (self->at >= depth_of(self)) copy_out(self);
            memmove(&self->slots[1], &self->slots[0], sizeof self->slots - sizeof self->slots[0]);
            self->slots[0] = self->next_slot;
            if (++self->at == self->num_chunks + depth_of(self)) return 1;
        }
        if (self->at + 1 < self->num_chunks) stage(self, self->at + 1);
        if (self->at >= 0 && self->at < self->num_chunks && self->lane >= 0) fold(self);
        join_groups(self, 1, 1);
        join_groups(self, GROUPS_DEPTH, 0);
        barrier_post(self->barrier);
        self->is_waiting = 1;
    }
}

static void two_shot_dealloc(TwoShot *self)
{
    list_clear(&self->sources);
    list_clear(&self->results);
    PyMem_Free(self->distances);
    PyMem_Free(self->written);
    PyMem_Free(self->members);
    PyMem_Free(self->next);
    Py_XDECREF(self->regions);
    Py_XDECREF(self->barrier);
    Py_XDECREF(self->dtype);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Returns the numbers of ranks in a tuple, and how many there are; NULL with an exception. */
static int *ranks_of(PyObject *given, int *num)
{
    int *ranks = PyMem_Calloc(PyTuple_GET_SIZE(given) + 1, sizeof *ranks);
    if (!ranks) PyErr_NoMemory();
    *num = (int)PyTuple_GET_SIZE(given);
    for (int at = 0; ranks && at < *num; at++) ranks[at] = (int)PyLong_AsLong(PyTuple_GET_ITEM(given, at));
    return ranks;
}

static int two_shot_init(TwoShot *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"barrier", "slot_bytes", "num_slots", "op",   "dtype", "divide_by", "is_one_place",
                            "regions", "members",    "lanes",     "next", "group", NULL};
    PyObject *barrier, *dtype, *regions, *members, *next;
    Op op;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!nnO&O!npOO!iO!i", names, &BarrierType, &barrier, &self->slot_bytes,
                                     &self->num_slots, set_op, &op, &PyArrayDescr_Type, &dtype, &self->divide_by,
                                     &self->is_one_place, &regions, &PyTuple_Type, &members, &self->lanes, &PyTuple_Type, &next,
                                     &self->group))
        return -1;
    self->combine = combine_for(op, (PyArray_Descr *)dtype, self->divide_by, ((Barrier *)barrier)->size);
    if (!self->combine) return -1;
    self->barrier = (Barrier *)Py_NewRef(barrier);
    self->dtype = (PyArray_Descr *)Py_NewRef(dtype);
    self->regions = Py_NewRef(regions);
    self->members = ranks_of(members, &self->size);
    self->next = ranks_of(next, &self->num_groups);
    if (PyErr_Occurred()) return -1;
    self->distances = PyMem_Calloc(self->barrier->size, sizeof *self->distances);
    self->written = PyMem_Calloc(self->barrier->size + 1, sizeof *self->written);
    if (!self->distances || !self->written) {
        PyErr_NoMemory();
        return -1;
    }
    self->itemsize = PyDataType_ELSIZE(self->dtype);
    self->chunk_count = self->slot_bytes / self->itemsize;
    self->at = self->lane = -1;
    for (int lane = 0; lane < least(self->lanes, self->size); lane++)
        if (self->members[lane] == self->barrier->rank) self->lane = lane;
    self->staged.list = self->own.list = &self->sources;
    self->added.list = self->copied.list = self->copied_in.list = &self->results;
    return 0;
}

/* The next three return 1; 0 if NumPy has to take the arrays; -1 with an exception. */
static int set_sources(TwoShot *self, PyObject *arrays)
{
    const int is_set = list_set(&self->sources, arrays, self->dtype);
    const List *list = &self->sources;
    if (is_set <= 0) return is_set;
    self->total = list->num_pieces ? list->ends[list->num_pieces - 1] : 0;
    self->num_chunks = (self->total + self->chunk_count - 1) / self->chunk_count;
    return 1;
}

static int set_results(TwoShot *self, PyObject *arrays)
{
    const int is_set = list_set(&self->results, arrays, self->dtype);
    if (is_set < 0) return -1;
    const List *list = &self->results;
    if (is_set && list->num_pieces && list->ends[list->num_pieces - 1] != self->total) {
        PyErr_SetString(PyExc_ValueError, "TwoShot: the results have another length than the sources");
        return -1;
    }
    /* Where sources become results, the numbers that are written have just been read. */
    const int is_in_place = list->num_pieces && self->sources.num_pieces && list->data[0] == self->sources.data[0];
    self->streams = !is_in_place && self->total * self->itemsize >= STREAMS_BYTES;
    return is_set;
}

static void begin(TwoShot *self, int is_direct)
{
    self->is_direct = is_direct && self->num_groups < 2;
    /* Results that are not in the cache would be read first, to be written twice. */
    self->stages_in_results = self->is_direct && self->total * self->itemsize < STREAMS_BYTES;
    self->places_barrier = self->barrier->count + 1;
    if (!self->num_chunks) return;
    self->staged.piece = self->own.piece = self->added.piece = self->copied.piece = self->copied_in.piece = 0;
    self->is_waiting = 0;
    stage(self, 0);
    self->slots[0] = self->next_slot;
    self->at = 0;
}

/* Returns where the results of a rank begin; NULL with an exception. */
static const char *results_at(const TwoShot *self, int rank, npy_int64 place)
{
    PyObject *region = PyList_Check(self->regions) ? PyList_GetItem(self->regions, rank) : Py_None;
    if (region && PyArray_Check(region) && place >= 0 && place < PyArray_NBYTES((PyArrayObject *)region))
        return PyArray_BYTES((PyArrayObject *)region) + place;
    PyErr_SetString(PyExc_ValueError, "TwoShot: a place lies outside the memory of its rank");
    return NULL;
}

/* Returns a new reference to an array in a tuple, or to the sequence of arrays that an object is. */
static PyObject *sequence_of(PyObject *arrays)
{
    return PyArray_Check(arrays) ? PyTuple_Pack(1, arrays) : Py_NewRef(arrays);
}

int two_shot_take(TwoShot *self, PyObject *arrays, PyObject *into, npy_int64 place)
{
    PyObject *sources = sequence_of(arrays), *results = sequence_of(into);
    int is_set = sources && results ? set_sources(self, sources) : -1;
    if (is_set > 0) is_set = set_results(self, results);
    Py_XDECREF(sources);
    Py_XDECREF(results);
    if (is_set <= 0) return is_set;
    barrier_publish(self->barrier, self->num_groups < 2 ? place : 0);
    begin(self, place != 0);
    return 1;
}

int two_shot_take_places(TwoShot *self)
{
    const Barrier *barrier = self->barrier;
    const long long count = self->places_barrier;
    int num_placed = 0;
    for (int at = 0; at < barrier->size; at++) num_placed += barrier_published(barrier, at, count) != 0;
    if (num_placed == 0 || num_placed < barrier->size) return num_placed == 0;
    const char *own = results_at(self, barrier->rank, barrier_published(barrier, barrier->rank, count));
    for (int at = 0; at < barrier->size; at++) {
        const char *results = results_at(self, at, barrier_published(barrier, at, count));
        if (!own || !results) return -1;
        self->distances[at] = results - own;
    }
    return 1;
}

int two_shot_go_on(TwoShot *self)
{
    int is_done = !self->num_chunks || self->at == self->num_chunks + depth_of(self);
    if (is_done) return 1;
    if (self->total * self->itemsize < FREES_GIL_BYTES) return advance(self);
    Py_BEGIN_ALLOW_THREADS
    is_done = advance(self);
    Py_END_ALLOW_THREADS
    return is_done;
}

void two_shot_let_go(TwoShot *self)
{
    list_clear(&self->sources);
    list_clear(&self->results);
}

static PyObject *bool_or_error(int is_true)
{
    return is_true < 0 ? NULL : PyBool_FromLong(is_true);
}

PyDoc_STRVAR(set_sources_doc, "Set the arrays that are added; False if NumPy has to. Once, or again with copies.");

static PyObject *call_set_sources(TwoShot *self, PyObject *arrays)
{
    return bool_or_error(set_sources(self, arrays));
}

static PyObject *call_set_results(TwoShot *self, PyObject *arrays)
{
    return bool_or_error(set_results(self, arrays));
}

PyDoc_STRVAR(begin_doc,
             "begin(is_direct)\n--\n\n"
             "Copy the first chunk in: to the results that are set, where they lie in shared memory and `is_direct` says so. A "
             "barrier of the node and `advance` follow; then other arrays, and the same again.");

static PyObject *call_begin(TwoShot *self, PyObject *is_direct)
{
    begin(self, PyObject_IsTrue(is_direct));
    Py_RETURN_NONE;
}

static PyObject *call_take_places(TwoShot *self, PyObject *Py_UNUSED(none))
{
    return bool_or_error(two_shot_take_places(self));
}

static PyObject *call_advance(TwoShot *self, PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(two_shot_go_on(self));
}

static PyObject *call_forget(TwoShot *self, PyObject *Py_UNUSED(none))
{
    two_shot_let_go(self);
    Py_RETURN_NONE;
}

static PyMethodDef two_shot_methods[] = {
    {"set_sources", (PyCFunction)call_set_sources, METH_O, set_sources_doc},
    {"set_results", (PyCFunction)call_set_results, METH_O,
     "Set the arrays that take the sums, none on a rank that gets none; False if NumPy has to."},
    {"begin", (PyCFunction)call_begin, METH_O, begin_doc},
    {"take_places", (PyCFunction)call_take_places, METH_NOARGS,
     "Take the places that the ranks have published; False if some have none, and others do. Before a direct `advance`."},
    {"advance", (PyCFunction)call_advance, METH_NOARGS,
     "Go on until this rank has to wait for others. Returns whether everything is done."},
    {"forget", (PyCFunction)call_forget, METH_NOARGS, "Let the arrays go. Others have to be set before the next call."},
    {NULL}};

static PyMemberDef two_shot_members[] = {
    {"places_barrier", T_LONGLONG, offsetof(TwoShot, places_barrier), READONLY,
     "The number of the barrier with which ranks publish where their results lie, in a `WholeCall`."},
    {"entered", T_LONGLONG, offsetof(TwoShot, entered), READONLY, "Bytes read from the memory of other groups of ranks."},
    {NULL}};

PyTypeObject TwoShotType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpidist.transport.native._native.TwoShot",
    .tp_doc = "One all-reduce of private arrays, as in shared_memory/two_shot.py: into results of this rank, or of all ranks.",
    .tp_basicsize = sizeof(TwoShot),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)two_shot_init,
    .tp_dealloc = (destructor)two_shot_dealloc,
    .tp_methods = two_shot_methods,
    .tp_members = two_shot_members,
};