/* Whether a program passes the arrays again that it passed before. */
#include "native.h"

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
             "Whether arrays are those of weak references, and are `arrays`, or NumPy's of (shape, dtype, is C-contiguous). NumPy's\n"
             "can be written, and have that layout.");

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
        if (!is_of_numpy) Py_RETURN_FALSE;
        if (!has_form((PyArrayObject *)out, form)) Py_RETURN_FALSE;
    }
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_TRUE;
}

PyMethodDef known_arrays_functions[] = {
    {"are_known", (PyCFunction)(void (*)(void))are_known, METH_FASTCALL, are_known_doc},
    {NULL},
};
