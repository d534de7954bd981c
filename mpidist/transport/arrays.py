"""Native arrays: of NumPy in host memory, of CuPy in device memory. Most modules handle no other arrays.

`array_libraries` converts arrays of any library to native ones, and back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, reduce
from operator import attrgetter, or_
from typing import Any, Final

import numpy as np

from mpidist.transport import cuda
from mpidist.transport.half import is_of_numpy
from mpidist.transport.native.loading import native

__all__ = [
    "NativeArray",
    "address_of",
    "aligned",
    "are_native_of_gpu",
    "are_on_one_device",
    "bytes_of",
    "copied_here",
    "current_gpu",
    "described_on_gpu",
    "empty",
    "is_aligned",
    "is_computed_on_gpus",
    "is_cupy",
    "is_device",
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
    "wait_for_writes",
    "without_padding",
    "write",
]

NativeArray = Any  # numpy.ndarray or cupy.ndarray

_dtype_of: Final = attrgetter("dtype")
_gpu_of: Final = attrgetter("data.device_id")  # faster than `device.id`, which makes an object
address_of: Final = attrgetter("data.ptr")  # of a device array
_is_contiguous: Final = attrgetter("_c_contiguous")
_allocation_of: Final = attrgetter("data.mem")
_MAX_WORK: Final[Any] = 10_000  # the limit of `np.shares_memory`: some 10 ms


def is_device(array: NativeArray) -> bool:
    """Whether a native array lies in device memory."""
    return not isinstance(array, np.ndarray)


def _has_interface_of_gpus(value: Any) -> bool:
    try:
        return hasattr(value, "__cuda_array_interface__")
    except RuntimeError:  # raised by a tensor of PyTorch that requires a gradient on a GPU, or of layout CSR anywhere
        return bool(getattr(value, "is_cuda", True))


def is_cupy(value: Any) -> bool:
    """Whether a value is an array of CuPy."""
    return _has_interface_of_gpus(value) and isinstance(value, cuda.cupy().ndarray)


def are_native_of_gpu(types: set[type], values: Sequence[Any]) -> bool:
    """Whether all values are native arrays on the current GPU already: of CuPy, aligned, in native byte order."""
    if len(types) != 1 or not is_cupy(values[0]) or types != {cuda.cupy().ndarray}:
        return False
    dtypes = set(map(_dtype_of, values))
    if set(map(_gpu_of, values)) != {current_gpu()} or not all(map(is_computed_on_gpus, dtypes)):
        return False
    odd = reduce(or_, map(address_of, values)) & (max(dtype.itemsize for dtype in dtypes) - 1)
    is_plain = not odd and all(map(_is_contiguous, values))
    return is_plain or all(map(is_aligned, values))  # which takes ten times as long


def described_on_gpu(values: list[Any]) -> bytes | None:
    """Describe contiguous arrays of CuPy by their addresses, dtypes and shapes; `None` for other lists. Quick."""
    if native is None or not cuda.current().is_loaded:
        return None
    described: bytes | None = native.described(values, cuda.cupy().ndarray)
    return described


def is_computed_on_gpus(dtype: np.dtype[Any]) -> bool:
    """Whether CuPy can compute with a dtype: not with float8, and not in another byte order."""
    return dtype.isnative and (dtype.itemsize > 1 or is_of_numpy(dtype))


def is_aligned(array: NativeArray) -> bool:
    """Whether all elements' addresses are multiples of their size. True of all host arrays, which need no alignment."""
    if not is_device(array) or not array.size:
        return True
    steps = (stride for length, stride in zip(array.shape, array.strides, strict=True) if length > 1)
    return not any(place % array.itemsize for place in (array.data.ptr, *steps))


def aligned(array: NativeArray) -> NativeArray:
    """Return an array itself, or a C-contiguous copy of a device array that is not aligned.

    A view of real numbers as complex ones may begin anywhere. No context of a GPU survives a kernel, CuPy's own
    included, that reads or writes whole numbers there. The copy is one of bytes, on the current stream.
    """
    if is_aligned(array):
        return array
    copy = empty(array.shape, array.dtype, device=True)
    _bytes_on_gpu(copy)[...] = _bytes_on_gpu(array)
    return copy


def write(target: NativeArray, source: NativeArray) -> None:
    """Copy an array into another one of its shape, in any layout, also one that is not aligned."""
    if is_aligned(target):
        target[...] = source
    else:
        _bytes_on_gpu(target)[...] = _bytes_on_gpu(source)


def _bytes_on_gpu(array: NativeArray) -> NativeArray:
    """View a device array as bytes, with one more dimension."""
    shape, strides = (*array.shape, array.itemsize), (*array.strides, 1)
    return cuda.cupy().ndarray(shape, np.uint8, array.data, strides)


def to_host(array: NativeArray) -> np.ndarray[Any, Any]:
    """Copy an array to new host memory. A device array is copied after all work on the current stream."""
    host: np.ndarray[Any, Any] = cuda.cupy().asnumpy(array) if is_device(array) else array.copy()
    return host


def on_host(array: NativeArray) -> np.ndarray[Any, Any]:
    """Return an array in host memory: a device array is copied, any other one is returned itself."""
    return to_host(array) if is_device(array) else array


def bytes_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of a contiguous host array, without a copy."""
    return array.reshape(-1).view(np.uint8)


def without_padding(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array, or the bytes that its numbers are in: of a long double of x86 6 of 16 bytes are padding."""
    if array.dtype.type not in (np.longdouble, np.clongdouble) or np.finfo(array.dtype).nmant != 63:
        return array
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    flat = np.ascontiguousarray(native).reshape(-1).view(np.uint8)
    return flat.reshape(-1, np.dtype(np.longdouble).itemsize)[:, :10]


def to_device(array: np.ndarray[Any, Any]) -> NativeArray:
    """Copy a host array to the current device."""
    return cuda.cupy().asarray(array)


def on_current_device(value: Any) -> Any:
    """Return an array of CuPy on the current device, copied if it lies on another one, or is not aligned.

    Any other value is returned unchanged.
    The copy comes after the work that the current stream of the other device holds, and that stream waits for the copy,
    so that the memory can be used again.
    """
    if not is_cupy(value):
        return value
    cupy = cuda.cupy()
    if value.device.id == current_gpu():
        return aligned(cupy.asarray(value))
    with value.device:
        contiguous = cupy.ascontiguousarray(aligned(value)).reshape(value.shape)  # which has a dimension at least
        is_written = cupy.cuda.get_current_stream().record()
    here = cupy.cuda.get_current_stream()
    here.wait_event(is_written)  # not above: a null stream is that of the current device
    array = cupy.asarray(contiguous)
    is_read = here.record()
    with value.device:
        cupy.cuda.get_current_stream().wait_event(is_read)
    return array


def copied_here(array: NativeArray) -> NativeArray:
    """Copy an array: of NumPy in host memory, of CuPy, from whichever device, to the current device."""
    here = on_current_device(array)
    return array.copy() if here is array else here


def are_on_one_device(one: NativeArray, other: NativeArray) -> bool:
    """Whether two arrays lie in one memory: both on one GPU, or both in host memory."""
    if not (is_device(one) and is_device(other)):
        return is_device(one) == is_device(other)
    return bool(one.device.id == other.device.id)


def read_only_view(value: Any) -> Any:
    """Return a read-only view of an array of NumPy; any other value unchanged: see `stays_writable`."""
    if isinstance(value, np.ndarray):
        value = value.view()
        value.setflags(write=False)
    return value


def stays_writable(value: Any) -> bool:
    """Whether a value is an array that cannot be made read-only: one of another library than NumPy."""
    is_of_numpy = isinstance(value, (np.ndarray, np.generic))
    return not is_of_numpy and (_has_interface_of_gpus(value) or hasattr(value, "__dlpack__"))


def wait_for_stream() -> None:
    """Wait until the work on the current device's current stream is done."""
    cuda.cupy().cuda.get_current_stream().synchronize()


def wait_for_writes(arrays: Iterable[NativeArray]) -> None:
    """Wait for what the current stream writes to memory of other libraries than CuPy: no stream of theirs does."""
    on_gpu = [array for array in arrays if not isinstance(array, np.ndarray)]
    if on_gpu and not _own_memory().issuperset(map(type, map(_allocation_of, on_gpu))):
        wait_for_stream()


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], device: bool) -> NativeArray:
    """Allocate an uninitialised array in host memory, or on the current device."""
    return cuda.cupy().empty(shape, dtype) if device else np.empty(shape, dtype)


@cache
def _own_memory() -> frozenset[type]:
    """Return the types of memory that CuPy allocates. Others may be parts of what another object owns."""
    its = cuda.cupy().cuda.memory
    return frozenset((its.PooledMemory, its.Memory, its.MemoryAsync, its.ManagedMemory))


def memory_bounds(array: NativeArray) -> tuple[int, int]:
    """Return the addresses of an array's first byte and of the byte after its last."""
    start = array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data.ptr
    if array.flags.c_contiguous:
        return start, start + array.nbytes
    low = high = start
    for length, stride in zip(array.shape, array.strides, strict=True):
        if length == 0:
            return start, start
        low, high = low + min(0, stride * (length - 1)), high + max(0, stride * (length - 1))
    return low, high + array.itemsize


def share_memory(one: NativeArray, other: NativeArray) -> bool:
    """Whether two arrays whose bounds overlap share memory. True if it takes too long to find out."""
    if is_device(one) or is_device(other):
        return True
    try:
        return np.shares_memory(one, other, max_work=_MAX_WORK)
    except RuntimeError:  # NumPy's TooHardError, which is in other modules in other versions
        return True


def num_visible_gpus() -> int:
    """Return the number of GPUs that this process may use: 0 without CuPy, driver or GPUs. Cached."""
    return cuda.current().support.num_devices


def current_gpu() -> int:
    """Return the index of the current device of this thread."""
    return int(cuda.cupy().cuda.runtime.getDevice())


def use_gpu(index: int) -> None:
    """Make a GPU the current device of this thread."""
    cuda.cupy().cuda.Device(index).use()


def require_not_capturing(call: str) -> None:
    """Check that the current stream is not captured in a CUDA graph."""
    if cuda.cupy().cuda.get_current_stream().is_capturing():
        raise RuntimeError(
            f"{call} cannot be captured in a CUDA graph: the ranks agree on each call over MPI, which replaying the "
            "graph would leave out; call it between graphs"
        )
