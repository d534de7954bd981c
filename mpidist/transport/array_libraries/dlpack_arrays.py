"""Arrays of libraries that speak DLPack, in host memory, or with `__cuda_array_interface__` in device memory."""

from __future__ import annotations

import sys
from typing import Any, final

import numpy as np

from mpidist.transport import cuda
from mpidist.transport.array_libraries.library import ArrayLibrary, kind_of
from mpidist.transport.arrays import NativeArray, is_computed_on_gpus, on_current_device

__all__ = ["CuPyArrays", "DLPackArrays"]


@final
class CuPyArrays(ArrayLibrary):
    """Device memory: CuPy's arrays, and objects with `__cuda_array_interface__`.

    Other libraries have streams of their own. Through DLPack, they let CuPy's current stream wait for the work on
    theirs, which `__cuda_array_interface__` leaves to the user. An array of another device is copied to the current
    device. For what is written to theirs, the host waits: `arrays.wait_for_writes`.
    """

    why_no_target = "its library has no DLPack, by which streams wait for each other: take the new result"

    def owns(self, value: Any) -> bool:
        return hasattr(value, "__cuda_array_interface__")

    def to_native(self, value: Any) -> NativeArray:
        viewed = self.to_target(value)
        array = cuda.cupy().asarray(value if viewed is None else on_current_device(viewed))
        if not array.dtype.isnative:
            raise TypeError(
                f"CuPy needs native byte order, got {array.dtype.str!r}; convert with "
                "x.astype(x.dtype.newbyteorder('='))"
            )
        if not is_computed_on_gpus(array.dtype):
            raise TypeError(f"CuPy cannot add or copy {array.dtype.name}: send a view of uint8, or reduce bfloat16")
        return array

    def from_native(self, array: NativeArray, like: Any) -> Any:
        return array if isinstance(like, cuda.cupy().ndarray) else _through_dlpack(array, like)

    def to_target(self, value: Any) -> NativeArray | None:
        cupy = cuda.cupy()
        if isinstance(value, cupy.ndarray):
            return value
        return cupy.from_dlpack(value) if hasattr(value, "__dlpack__") else None


@final
class DLPackArrays(ArrayLibrary):
    """Host arrays of other libraries with DLPack; results are converted back if the library has `from_dlpack`."""

    def owns(self, value: Any) -> bool:
        return hasattr(value, "__dlpack__")

    def to_native(self, value: Any) -> NativeArray:
        try:
            return np.from_dlpack(value)
        except (BufferError, RuntimeError) as error:
            raise TypeError(f"the {kind_of(value)} cannot be read through DLPack: {error}") from error

    def from_native(self, array: NativeArray, like: Any) -> Any:
        return _through_dlpack(array, like)

    def to_target(self, value: Any) -> NativeArray | None:
        return self.to_native(value)


def _through_dlpack(array: NativeArray, like: Any) -> Any:
    if hasattr(like, "__array_namespace__"):
        return like.__array_namespace__().from_dlpack(array)
    package = sys.modules[type(like).__module__.partition(".")[0]]
    return package.from_dlpack(array) if hasattr(package, "from_dlpack") else array
