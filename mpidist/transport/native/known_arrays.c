/* Comparison of arrays with those of an earlier call, and descriptions of lists of arrays. */
#include "native.h"

#define MOST_WORDS 10 /* that describe an array */

/* Whether a weak reference is to an object: never to `None`, which stands for an object that is gone. */
static int refers_to(PyObject *ref, PyObject *array)
{
    if (array == Py_None) return 0;
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
             "Whether arrays are those of weak references, and are `arrays`, or NumPy's of the form (shape, dtype, is "
             "C-contiguous).\n"
             "NumPy's can be written, and have that layout.");

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
        if (is_of_numpy) {
            if (!PyTuple_Check(form) || PyTuple_GET_SIZE(form) != 3) Py_RETURN_FALSE;
            const int was_contiguous = PyTuple_GET_ITEM(form, 2) == Py_True;
            if (!PyArray_ISWRITEABLE((PyArrayObject *)out)) Py_RETURN_FALSE;
            if (PyArray_IS_C_CONTIGUOUS((PyArrayObject *)out) != was_contiguous) Py_RETURN_FALSE;
        }
        if (!PyWeakref_CheckRef(ref) || !refers_to(ref, out)) Py_RETURN_FALSE;
        if (out == PyList_GET_ITEM(given[1], at)) continue;
        if (!is_of_numpy || !has_form((PyArrayObject *)out, form)) Py_RETURN_FALSE;
    }
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_TRUE;
}

PyDoc_STRVAR(have_forms_doc,
             "have_forms(arrays, forms, own_data, writeable)\n--\n\n"
             "Whether all items of a list are NumPy's arrays, aligned and C-contiguous, of these (shape, dtype), and perhaps\n"
             "no views of others, and can be written.");

static PyObject *have_forms(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t num_given)
{
    if (num_given != 4 || !PyList_Check(given[0]) || !PyList_Check(given[1]) ||
        PyList_GET_SIZE(given[0]) != PyList_GET_SIZE(given[1])) {
        PyErr_SetString(PyExc_TypeError, "have_forms: needed are two lists of one length");
        return NULL;
    }
    const int flags =
        NPY_ARRAY_CARRAY_RO | (given[2] == Py_True ? NPY_ARRAY_OWNDATA : 0) | (given[3] == Py_True ? NPY_ARRAY_WRITEABLE : 0);
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(given[0]); at++) {
        PyObject *array = PyList_GET_ITEM(given[0], at), *form = PyList_GET_ITEM(given[1], at);
        if (!PyArray_CheckExact(array) || !PyArray_CHKFLAGS((PyArrayObject *)array, flags)) Py_RETURN_FALSE;
        if (!PyArray_ISNOTSWAPPED((PyArrayObject *)array)) Py_RETURN_FALSE;
        if (!PyTuple_Check(form) || PyTuple_GET_SIZE(form) < 2 || !has_form((PyArrayObject *)array, form)) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

/* Describes an array of CuPy in up to `MOST_WORDS` words: its address, dtype and shape. Returns their number; 0 for an array
 * that is not contiguous, not in native byte order or has too many axes, and on an error. */
static Py_ssize_t describe(PyObject *array, npy_int64 *words)
{
    enum { IS_CONTIGUOUS, DTYPE, SHAPE, DATA, POINTER, NUM };
    static const char *const names[NUM] = {"_c_contiguous", "dtype", "shape", "data", "ptr"};
    static PyObject *getters[NUM], *kinds[NUM]; /* the descriptors of the names in the classes: they are not looked up again */
    PyObject *its[NUM] = {NULL};
    Py_ssize_t num = 0;
    for (int at = 0; at < NUM; at++) {
        PyObject *owner = at == POINTER ? its[DATA] : array, *kind = (PyObject *)Py_TYPE(owner);
        if (kinds[at] != kind) {
            Py_XSETREF(getters[at], PyObject_GetAttrString(kind, names[at]));
            Py_XSETREF(kinds[at], Py_NewRef(kind));
        }
        if (getters[at] == NULL || Py_TYPE(getters[at])->tp_descr_get == NULL) goto end;
        if ((its[at] = Py_TYPE(getters[at])->tp_descr_get(getters[at], owner, kind)) == NULL) goto end;
    }
    if (its[IS_CONTIGUOUS] != Py_True || !PyArray_DescrCheck(its[DTYPE]) || !PyTuple_Check(its[SHAPE])) goto end;
    const PyArray_Descr *dtype = (const PyArray_Descr *)its[DTYPE];
    const Py_ssize_t num_axes = PyTuple_GET_SIZE(its[SHAPE]);
    if (!PyArray_ISNBO(dtype->byteorder) || num_axes + 2 > MOST_WORDS) goto end;
    words[num++] = (npy_int64)PyLong_AsUnsignedLongLongMask(its[POINTER]);
    words[num++] = (npy_int64)num_axes << 32 | dtype->type_num;
    for (Py_ssize_t axis = 0; axis < num_axes; axis++) words[num++] = PyLong_AsLongLong(PyTuple_GET_ITEM(its[SHAPE], axis));
end:
    for (int at = 0; at < NUM; at++) Py_XDECREF(its[at]);
    return PyErr_Occurred() ? 0 : num;
}

PyDoc_STRVAR(described_doc,
             "described(arrays, kind)\n--\n\n"
             "Return the addresses, dtypes and shapes of a list of CuPy's contiguous arrays, all exactly of class `kind`, as\n"
             "bytes; `None` for other lists.");

static PyObject *described(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t num_given)
{
    if (num_given != 2 || !PyList_Check(given[0])) {
        PyErr_SetString(PyExc_TypeError, "described: needed are a list and a class");
        return NULL;
    }
    const Py_ssize_t num = PyList_GET_SIZE(given[0]);
    npy_int64 *words = PyMem_Malloc(num * MOST_WORDS * sizeof(*words));
    if (words == NULL) return PyErr_NoMemory();
    Py_ssize_t used = 0;
    int is_plain = 1;
    for (Py_ssize_t at = 0; is_plain && at < num; at++) {
        PyObject *array = PyList_GET_ITEM(given[0], at);
        const Py_ssize_t more = (PyObject *)Py_TYPE(array) == given[1] ? describe(array, words + used) : 0;
        is_plain = more > 0;
        used += more;
    }
    PyObject *text = NULL;
    if (!PyErr_Occurred())
        text = is_plain ? PyBytes_FromStringAndSize((const char *)words, used * sizeof(*words)) : Py_NewRef(Py_None);
    PyMem_Free(words);
    return text;
}

/* Whether two arrays have bytes in common: both are contiguous. */
static int overlap(PyArrayObject *one, PyArrayObject *other)
{
    return PyArray_BYTES(one) < PyArray_BYTES(other) + PyArray_NBYTES(other) &&
           PyArray_BYTES(other) < PyArray_BYTES(one) + PyArray_NBYTES(one);
}

PyDoc_STRVAR(key_of_array_doc,
             "key_of_array(op_types, name, reduce_op, value, out, overrides)\n--\n\n"
             "Describe a reduction of one array: see `collectives.repeated_calls.key_of_array`.");

static PyObject *key_of_array(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t num_given)
{
    enum { OP_TYPES, NAME, OP, VALUE, OUT, OVERRIDES, NUM };
    const int is_known_op = num_given == NUM ? PySet_Contains(given[OP_TYPES], (PyObject *)Py_TYPE(given[OP])) : -1;
    if (is_known_op < 0) {
        PyErr_SetString(PyExc_TypeError, "key_of_array: needed are a set of types and five arguments of a call");
        return NULL;
    }
    PyObject *value = given[VALUE], *out = given[OUT];
    if (!is_known_op || !PyArray_CheckExact(value) || !PyArray_ISCARRAY_RO((PyArrayObject *)value)) Py_RETURN_NONE;
    PyArrayObject *array = (PyArrayObject *)value, *into = (PyArrayObject *)out;
    if (out != Py_None) {
        if (!PyArray_CheckExact(out) || !PyArray_ISCARRAY(into)) Py_RETURN_NONE;
        if (out != value && (!PyArray_SAMESHAPE(array, into) || overlap(array, into))) Py_RETURN_NONE;
        if (out != value && !PyArray_EquivTypes(PyArray_DESCR(array), PyArray_DESCR(into))) Py_RETURN_NONE;
    }
    PyObject *shape = PyArray_IntTupleFromIntp(PyArray_NDIM(array), PyArray_DIMS(array));
    if (!shape) return NULL;
    return Py_BuildValue("(OONOOO)OOO", given[NAME], given[OP], shape, PyArray_DESCR(array), given[OVERRIDES],
                         out == Py_None ? Py_False : Py_True, value, out, Py_None);
}

PyDoc_STRVAR(split_doc,
             "split(whole, shapes)\n--\n\nReturn a list of views of a flat array: of these shapes, one after the other.");

static PyObject *split(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t num_given)
{
    if (num_given != 2 || !PyArray_Check(given[0]) || !PyArray_ISCARRAY((PyArrayObject *)given[0]) || !PyList_Check(given[1])) {
        PyErr_SetString(PyExc_TypeError, "split: needed are a contiguous array and a list of shapes");
        return NULL;
    }
    PyArrayObject *whole = (PyArrayObject *)given[0];
    PyObject *views = PyList_New(PyList_GET_SIZE(given[1]));
    char *at = PyArray_BYTES(whole), *const end = at + PyArray_NBYTES(whole);
    for (Py_ssize_t index = 0; views && index < PyList_GET_SIZE(views); index++) {
        PyArray_Dims shape = {NULL, 0};
        PyObject *view = NULL;
        if (PyArray_IntpConverter(PyList_GET_ITEM(given[1], index), &shape)) {
            const Py_ssize_t nbytes = PyArray_MultiplyList(shape.ptr, shape.len) * PyArray_ITEMSIZE(whole);
            if (nbytes > end - at)
                PyErr_SetString(PyExc_ValueError, "split: the array is smaller than these shapes");
            else {
                Py_INCREF(PyArray_DESCR(whole));
                view = PyArray_NewFromDescr(&PyArray_Type, PyArray_DESCR(whole), shape.len, shape.ptr, NULL, at,
                                            NPY_ARRAY_CARRAY, NULL);
                at += nbytes;
            }
            PyDimMem_FREE(shape.ptr);
        }
        if (view && PyArray_SetBaseObject((PyArrayObject *)view, Py_NewRef(given[0])) < 0) Py_CLEAR(view);
        if (view)
            PyList_SET_ITEM(views, index, view);
        else
            Py_CLEAR(views);
    }
    return views;
}

PyMethodDef known_arrays_functions[] = {
    {"are_known", (PyCFunction)(void (*)(void))are_known, METH_FASTCALL, are_known_doc},
    {"have_forms", (PyCFunction)(void (*)(void))have_forms, METH_FASTCALL, have_forms_doc},
    {"described", (PyCFunction)(void (*)(void))described, METH_FASTCALL, described_doc},
    {"key_of_array", (PyCFunction)(void (*)(void))key_of_array, METH_FASTCALL, key_of_array_doc},
    {"split", (PyCFunction)(void (*)(void))split, METH_FASTCALL, split_doc},
    {NULL},
};
