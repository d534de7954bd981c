"""Library of a value."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from mpidist.transport import cuda
from mpidist.transport.array_libraries.dlpack_arrays import CuPyArrays, DLPackArrays
from mpidist.transport.array_libraries.jax_arrays import JaxArrays
from mpidist.transport.array_libraries.library import ArrayLibrary, kind_of
from mpidist.transport.array_libraries.numpy_arrays import ArrayLikes, NumPyArrays, NumPyScalars, PythonNumbers
from mpidist.transport.array_libraries.torch_tensors import TorchTensors
from mpidist.transport.arrays import NativeArray, is_cupy

__all__ = ["LIBRARIES", "copied", "known_library_of", "library_of", "writable_like"]

_NUMPY: Final = NumPyArrays()
_NUMBERS: Final = PythonNumbers()

# The first library that owns the value is taken. PyTorch and JAX before CuPy and DLPack, as they speak both, but not of
# every dtype; CuPy before DLPack, as all whose device memory NumPy cannot read.
LIBRARIES: Final[list[ArrayLibrary]] = [
    _NUMPY, NumPyScalars(), _NUMBERS, TorchTensors(), JaxArrays(), CuPyArrays(), DLPackArrays(), ArrayLikes(),
]  # fmt: skip

# The libraries of types whose values have been asked for: a list of thousands of arrays asks of thousands.
_BY_TYPE: Final[dict[type, ArrayLibrary]] = {np.ndarray: _NUMPY, float: _NUMBERS, int: _NUMBERS}


def library_of(value: Any) -> ArrayLibrary:
    """Return the library that a value belongs to; raise `TypeError` if no library owns it."""
    library = _BY_TYPE.get(type(value))
    if library is not None:
        return library
    for library in LIBRARIES:
        if library.owns(value):
            if library.goes_by_type or (cuda.current().is_loaded and is_cupy(value)):
                _BY_TYPE[type(value)] = library
            return library
    raise TypeError(
        f"cannot take a value of type {kind_of(value)}; needed an array of NumPy, CuPy or a library that speaks "
        f"DLPack, a number, or a list, tuple or dict of them{_advice(value)}"
    )


def known_library_of(value: Any) -> ArrayLibrary | None:
    """Return the library of a value, if its type determines it, and was looked up before. Quick."""
    return _BY_TYPE.get(type(value))


def copied(value: Any) -> Any:
    """Copy an array of any library, one of CuPy to the current device."""
    library = library_of(value)
    return library.from_native(library.to_native(value).copy(), value)


def writable_like(value: Any, array: NativeArray) -> Any:
    """Convert a native array to the kind of a value, if such a value shares the array's memory and can be written."""
    library = library_of(value)
    return array if library.to_target(value) is None else library.from_native(array, value)


def _advice(value: Any) -> str:
    if hasattr(value, "__next__"):
        return ": it can be read once, so pass list(...) of it"
    return ": pass its state_dict(), or a list of its arrays" if hasattr(value, "state_dict") else ""
