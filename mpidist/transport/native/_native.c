/* The module: what takes the time of an all-reduce in the memory of a node. native.h says what is where. */
#define IMPORTS_NUMPY
#include "native.h"

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native",
                                        "Barriers, copies and reductions in the memory of a node.", -1, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    import_array();
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    if (PyModule_AddFunctions(module, combining_functions) < 0 || PyModule_AddFunctions(module, known_arrays_functions) < 0 ||
        PyModule_AddFunctions(module, checksum_functions) < 0 || PyModule_AddType(module, &BarrierType) < 0 ||
        PyModule_AddType(module, &TwoShotType) < 0 || PyModule_AddType(module, &WholeCallType) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
