"""NumPy's arrays and scalars, Python's numbers, and what NumPy can make an array of."""

from __future__ import annotations

from typing import Any, Final, final

import numpy as np

from mpidist.transport.array_libraries.library import ArrayLibrary
from mpidist.transport.arrays import NativeArray

__all__ = ["ArrayLikes", "NumPyArrays", "NumPyScalars", "PythonNumbers"]


@final
class NumPyArrays(ArrayLibrary):
    """`numpy.ndarray`, as it is."""

    goes_by_type = True

    def owns(self, value: Any) -> bool:
        return isinstance(value, np.ndarray)

    def to_native(self, value: Any) -> NativeArray:
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError("cannot take a masked array, whose mask would be lost: pass value.filled(0), for example")
        return np.asarray(value)

    def to_target(self, value: Any) -> NativeArray | None:
        return self.to_native(value)


@final
class NumPyScalars(ArrayLibrary):
    """NumPy's scalars, converted to 0-d arrays."""

    goes_by_type = True

    def owns(self, value: Any) -> bool:
        return isinstance(value, np.generic)

    def from_native(self, array: NativeArray, like: Any) -> Any:
        return array[()]


@final
class PythonNumbers(ArrayLibrary):
    """Python's numbers: an int counts as int64, a float as float64, a complex as complex128."""

    DTYPES: Final = {bool: np.bool_, int: np.int64, float: np.float64, complex: np.complex128}
    goes_by_type = True

    def owns(self, value: Any) -> bool:
        return isinstance(value, (bool, int, float, complex))

    def to_native(self, value: Any) -> NativeArray:
        kind = next(kind for kind in self.DTYPES if isinstance(value, kind))
        try:
            return np.asarray(value, self.DTYPES[kind])
        except OverflowError:
            raise ValueError(f"a Python int counts as int64, and {value} does not fit in it") from None

    def from_native(self, array: NativeArray, like: Any) -> Any:
        return array.item() if array.ndim == 0 else array


@final
class ArrayLikes(ArrayLibrary):
    """Objects with `__array__`: variables, and arrays of libraries without DLPack. Results are NumPy's."""

    def owns(self, value: Any) -> bool:
        return hasattr(value, "__array__")
