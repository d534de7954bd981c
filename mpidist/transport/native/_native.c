/* The module: what takes the time of an all-reduce in the memory of a node. native.h says what is where. */
#define IMPORTS_NUMPY
#include "native.h"

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native",
                                        "Barriers, copies and reductions in the memory of a node.", -1, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    import_array();
    if (PyType_Ready(&BarrierType) < 0 || PyType_Ready(&TwoShotType) < 0 || PyType_Ready(&WholeCallType) < 0) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    if (PyModule_AddFunctions(module, combining_functions) < 0 || PyModule_AddFunctions(module, known_arrays_functions) < 0 ||
        PyModule_AddFunctions(module, checksum_functions) < 0 ||
        PyModule_AddObjectRef(module, "Barrier", (PyObject *)&BarrierType) < 0 ||
        PyModule_AddObjectRef(module, "TwoShot", (PyObject *)&TwoShotType) < 0 ||
        PyModule_AddObjectRef(module, "WholeCall", (PyObject *)&WholeCallType) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
