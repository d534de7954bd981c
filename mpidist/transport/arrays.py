"""Conversion of arrays of any library to native arrays (NumPy or CuPy), and back.

Other modules see only arrays of NumPy (host memory) or CuPy (device memory). Each library is one class; `LIBRARIES`
lists the classes in the order in which they are asked.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final, final

import numpy as np

from mpidist.transport import cuda

__all__ = [
    "LIBRARIES",
    "ArrayLibrary",
    "ArrayLikes",
    "CuPyArrays",
    "DLPackArrays",
    "NativeArray",
    "NumPyArrays",
    "NumPyScalars",
    "PythonNumbers",
    "are_native_of_gpu",
    "are_on_one_device",
    "bytes_of",
    "copied",
    "copied_here",
    "current_gpu",
    "empty",
    "is_aligned",
    "is_cupy",
    "is_device",
    "library_of",
    "make_read_only",
    "memory_bounds",
    "num_visible_gpus",
    "on_current_device",
    "on_host",
    "read_only_view",
    "require_not_capturing",
    "share_memory",
    "stays_writable",
    "to_device",
    "to_host",
    "use_gpu",
    "wait_for_stream",
]

_dtype_of: Final = attrgetter("dtype")
_gpu_of: Final = attrgetter("data.device_id")  # sooner than `device.id`, which makes an object
_MAX_WORK: Final[Any] = 10_000  # of `np.shares_memory`; some 10 ms

NativeArray = Any  # numpy.ndarray or cupy.ndarray


class ArrayLibrary(ABC):
    """Conversion of one library's values to native arrays, and back."""

    @abstractmethod
    def owns(self, value: Any) -> bool:
        """Say whether `value` is of this library. Must not import the library."""

    @abstractmethod
    def to_native(self, value: Any) -> NativeArray:
        """View a value as a native array, without a copy where the library allows it."""

    @abstractmethod
    def from_native(self, array: NativeArray, like: Any) -> Any:
        """Convert a native array to the kind of `like`. May return `array` itself, which the caller must not keep."""

    def to_target(self, value: Any) -> NativeArray | None:
        """View a value as a native array through which results are written to the value; `None` if it has none."""
        return None


@final
class NumPyArrays(ArrayLibrary):
    """`numpy.ndarray`, as it is."""

    def owns(self, value: Any) -> bool:
        return isinstance(value, np.ndarray)

    def to_native(self, value: Any) -> NativeArray:
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError("cannot take a masked array, whose mask would be lost: pass value.filled(0), for example")
        return np.asarray(value)

    def from_native(self, array: NativeArray, like: Any) -> Any:
        return array

    def to_target(self, value: Any) -> NativeArray | None:
        return self.to_native(value)


@final
class NumPyScalars(ArrayLibrary):
    """NumPy's scalars, converted to 0-d arrays."""

    def owns(self, value: Any) -> bool:
        return isinstance(value, np.generic)

    def to_native(self, value: Any) -> NativeArray:
        return np.asarray(value)

    def from_native(self, array: NativeArray, like: Any) -> Any:
        return array[()]


@final
class PythonNumbers(ArrayLibrary):
    """Python's numbers: an int counts as int64, a float as float64, a complex as complex128."""

    DTYPES: Final = {bool: np.bool_, int: np.int64, float: np.float64, complex: np.complex128}

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
class CuPyArrays(ArrayLibrary):
    """Device memory: CuPy's arrays, and objects with `__cuda_array_interface__`.

    Other libraries have streams of their own. Through DLPack, they let CuPy's current stream wait for the work on
    theirs, which `__cuda_array_interface__` leaves to the user. An array of another device is copied to the current
    device.
    """

    def owns(self, value: Any) -> bool:
        return hasattr(value, "__cuda_array_interface__")

    def to_native(self, value: Any) -> NativeArray:
        cupy = _cupy()
        if isinstance(value, cupy.ndarray):
            _BY_TYPE[type(value)] = self
        elif hasattr(value, "__dlpack__"):
            value = cupy.from_dlpack(value)
        array = cupy.asarray(value)
        if not array.dtype.isnative:
            raise TypeError(
                f"CuPy needs native byte order, got {array.dtype.str!r}; convert with "
                "x.astype(x.dtype.newbyteorder('='))"
            )
        return array

    def from_native(self, array: NativeArray, like: Any) -> Any:
        return array if isinstance(like, _cupy().ndarray) else _through_dlpack(array, like)

    def to_target(self, value: Any) -> NativeArray | None:
        return value if isinstance(value, _cupy().ndarray) else None  # other libraries' streams would not wait for it


@final
class DLPackArrays(ArrayLibrary):
    """Host arrays of other libraries with DLPack, through which results are converted back."""

    def owns(self, value: Any) -> bool:
        return hasattr(value, "__dlpack__")

    def to_native(self, value: Any) -> NativeArray:
        try:
            return np.from_dlpack(value)
        except (BufferError, RuntimeError) as error:
            raise TypeError(f"the {_kind(value)} cannot be read through DLPack: {error}") from error

    def from_native(self, array: NativeArray, like: Any) -> Any:
        return _through_dlpack(array, like)

    def to_target(self, value: Any) -> NativeArray | None:
        return self.to_native(value)


@final
class ArrayLikes(ArrayLibrary):
    """Objects with `__array__`: variables, and arrays of libraries without DLPack. Results are NumPy's."""

    def owns(self, value: Any) -> bool:
        return hasattr(value, "__array__")

    def to_native(self, value: Any) -> NativeArray:
        return np.asarray(value)

    def from_native(self, array: NativeArray, like: Any) -> Any:
        return array


_NUMPY: Final = NumPyArrays()
_NUMBERS: Final = PythonNumbers()

# The first library that owns the value is taken. CuPy before DLPack, as all whose device memory NumPy cannot read.
LIBRARIES: Final[list[ArrayLibrary]] = [
    _NUMPY, NumPyScalars(), _NUMBERS, CuPyArrays(), DLPackArrays(), ArrayLikes(),
]  # fmt: skip

# Types that have one library: a tensor of another library may lie in host or in device memory. CuPy's is added
# when the first array of it is seen.
_BY_TYPE: Final[dict[type, ArrayLibrary]] = {np.ndarray: _NUMPY, float: _NUMBERS, int: _NUMBERS}


def library_of(value: Any) -> ArrayLibrary:
    """Return the library that a value belongs to.

    Raises:
        TypeError: If no library owns it.
    """
    library = _BY_TYPE.get(type(value)) or next((library for library in LIBRARIES if library.owns(value)), None)
    if library is None:
        raise TypeError(
            f"cannot take a value of type {_kind(value)}; needed an array of NumPy, CuPy or a library that speaks "
            "DLPack, a number, or a list, tuple or dict of them"
        )
    return library


def is_device(array: NativeArray) -> bool:
    """Whether a native array lies in device memory."""
    return not isinstance(array, np.ndarray)


def is_cupy(value: Any) -> bool:
    """Whether a value is an array of CuPy."""
    return hasattr(value, "__cuda_array_interface__") and isinstance(value, _cupy().ndarray)


def are_native_of_gpu(types: set[type], values: Sequence[Any]) -> bool:
    """Whether all values are arrays of CuPy on the current device, of native byte order: `to_native` returns them.

    Args:
        types: The types of the values.
        values: The values.
    """
    if len(types) != 1 or not hasattr(next(iter(types)), "__cuda_array_interface__") or types != {_cupy().ndarray}:
        return False
    dtypes = set(map(_dtype_of, values))
    return set(map(_gpu_of, values)) == {current_gpu()} and all(dtype.isnative for dtype in dtypes)


def is_aligned(array: NativeArray) -> bool:
    """Whether an array's address is a multiple of its item size. True for all host arrays, which need not be."""
    return not (is_device(array) and array.size and array.data.ptr % array.itemsize)


def to_host(array: NativeArray) -> np.ndarray[Any, Any]:
    """Copy an array to new host memory; a device array after all work on the current stream."""
    host: np.ndarray[Any, Any] = _cupy().asnumpy(array) if is_device(array) else array.copy()
    return host


def on_host(array: NativeArray) -> np.ndarray[Any, Any]:
    """Return an array in host memory: a device array is copied, any other one is returned itself."""
    return to_host(array) if is_device(array) else array


def bytes_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of a contiguous host array, without a copy."""
    return array.reshape(-1).view(np.uint8)


def to_device(array: np.ndarray[Any, Any]) -> NativeArray:
    """Copy a host array to the current device."""
    return _cupy().asarray(array)


def on_current_device(value: Any) -> Any:
    """Return an array of CuPy on the current device, copied if it lies on another one; any other value unchanged."""
    return _cupy().asarray(value) if is_cupy(value) else value


def copied_here(array: NativeArray) -> NativeArray:
    """Copy an array: of NumPy in host memory, of CuPy, from whichever device, to the current device."""
    here = on_current_device(array)
    return array.copy() if here is array else here


def are_on_one_device(one: NativeArray, other: NativeArray) -> bool:
    """Whether two arrays lie in one memory: both on one GPU, or both in host memory."""
    if not (is_device(one) and is_device(other)):
        return is_device(one) == is_device(other)
    return bool(one.device.id == other.device.id)


def make_read_only(value: Any) -> Any:
    """Mark an array of NumPy as read-only, and return it; any other value unchanged: see `stays_writable`."""
    if isinstance(value, np.ndarray):
        value.setflags(write=False)
    return value


def read_only_view(value: Any) -> Any:
    """Return a read-only view of an array of NumPy; any other value unchanged."""
    return make_read_only(value.view()) if isinstance(value, np.ndarray) else value


def stays_writable(value: Any) -> bool:
    """Whether a value is an array that cannot be made read-only: those of other libraries than NumPy."""
    is_of_numpy = isinstance(value, (np.ndarray, np.generic))
    return not is_of_numpy and (hasattr(value, "__cuda_array_interface__") or hasattr(value, "__dlpack__"))


def copied(value: Any) -> Any:
    """Copy an array of any library, one of CuPy to the current device."""
    library = library_of(value)
    return library.from_native(library.to_native(value).copy(), value)


def wait_for_stream() -> None:
    """Wait until the work on the current device's current stream is done."""
    _cupy().cuda.get_current_stream().synchronize()


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], device: bool) -> NativeArray:
    """Allocate an uninitialised array in host memory, or on the current device."""
    return _cupy().empty(shape, dtype) if device else np.empty(shape, dtype)


def memory_bounds(array: NativeArray) -> tuple[int, int]:
    """Return the addresses of an array's first byte and of the byte after its last."""
    start = array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data.ptr
    low = high = start
    for length, stride in zip(array.shape, array.strides, strict=True):
        if length == 0:
            return start, start
        low, high = low + min(0, stride * (length - 1)), high + max(0, stride * (length - 1))
    return low, high + array.itemsize


def share_memory(one: NativeArray, other: NativeArray) -> bool:
    """Whether two arrays whose bounds overlap share memory. True if that takes too long to find out."""
    if is_device(one) or is_device(other):
        return True
    try:
        return np.shares_memory(one, other, max_work=_MAX_WORK)
    except RuntimeError:  # NumPy's TooHardError, which is found in another module in each version
        return True


def num_visible_gpus() -> int:
    """Return the number of GPUs that this process may use: 0 without CuPy, driver or GPUs. Cached."""
    return cuda.current().support.num_devices


def current_gpu() -> int:
    """Return the index of the current device of this thread."""
    return int(_cupy().cuda.runtime.getDevice())


def use_gpu(index: int) -> None:
    """Make a GPU the current device of this thread."""
    _cupy().cuda.Device(index).use()


def require_not_capturing(call: str) -> None:
    """Check that the current stream is not captured in a CUDA graph.

    Raises:
        RuntimeError: If the stream is captured.
    """
    if _cupy().cuda.get_current_stream().is_capturing():
        raise RuntimeError(
            f"{call} cannot be captured in a CUDA graph: the ranks agree on each call over MPI, which replaying the "
            "graph would leave out; call it between graphs"
        )


def _cupy() -> Any:
    return cuda.current().cupy  # only where a value or the user asks for device memory


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _through_dlpack(array: NativeArray, like: Any) -> Any:
    if hasattr(like, "__array_namespace__"):
        return like.__array_namespace__().from_dlpack(array)
    package = sys.modules[type(like).__module__.partition(".")[0]]
    if not hasattr(package, "from_dlpack"):
        raise TypeError(f"results cannot be given back as {_kind(like)}: {package.__name__} has no from_dlpack")
    return package.from_dlpack(array)
