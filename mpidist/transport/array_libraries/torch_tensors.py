"""Tensors of PyTorch."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.transport.array_libraries.dlpack_arrays import CuPyArrays
from mpidist.transport.array_libraries.library import ArrayLibrary
from mpidist.transport.arrays import NativeArray
from mpidist.transport.half import dtype_named, is_of_numpy
from mpidist.transport.native.loading import native

__all__ = ["TorchTensors"]

_CUPY: Final = CuPyArrays()
_dtype_of: Final = attrgetter("dtype")
_MOST_LISTS: Final = 256


@final
class TorchTensors(ArrayLibrary):
    """`torch.Tensor`, of bfloat16 and float8 too, and parameters. Results are tensors that require no gradient.

    A tensor in host memory shares it with its native array, one on a GPU too. NumPy sees the bits of bfloat16 and
    float8 as integers, and then as a dtype of `ml_dtypes`.
    """

    goes_by_type = True
    knows_lists = True

    def owns(self, value: Any) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(value, torch.Tensor)

    def to_native(self, value: Any) -> NativeArray:
        _require_no_history(value)
        if value.is_cpu:
            return _VIEWS.of(value)
        _VIEWS.forget(value)  # `module.to("cuda")` leaves the parameters their names, and takes their memory away
        return _CUPY.to_native(_view(value.detach()))

    def from_native(self, array: NativeArray, like: Any) -> Any:
        torch = sys.modules["torch"]
        integers = _integers_for(array.dtype)
        if integers is not None:
            return self.from_native(array.view(integers), like).view(getattr(torch, array.dtype.name))
        return torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.from_dlpack(array)

    def from_natives(self, arrays: list[NativeArray], likes: Sequence[Any]) -> list[Any]:
        if set(map(type, arrays)) == {np.ndarray} and all(map(is_of_numpy, set(map(_dtype_of, arrays)))):
            return list(map(sys.modules["torch"].from_numpy, arrays))
        return super().from_natives(arrays, likes)

    def to_target(self, value: Any) -> NativeArray | None:
        if value.is_conj() or value.is_neg():
            raise TypeError("the tensor is a view whose numbers are conjugated or negated as they are read: clone it")
        if not value.is_cuda:
            return self.to_native(value)
        _require_no_history(value)
        return _view(value.detach())

    def is_target(self, value: Any, array: NativeArray) -> bool:
        return _VIEWS.has(value, array)

    def known_natives(self, values: list[Any]) -> list[NativeArray] | None:
        return _LISTS.find(values)

    def note_natives(self, values: list[Any], natives: Sequence[NativeArray]) -> bool:
        return _LISTS.note(values, natives)


class _Known(NamedTuple):
    """A tensor, and its native array: which is right while the other attributes are those of the tensor."""

    reference: Any  # weak
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    array: NativeArray

    def is_of(self, tensor: Any) -> bool:
        """Whether this is the array of a tensor, which may have got other memory since."""
        return (
            self.reference() is tensor
            and self.address == tensor.data_ptr()
            and self.shape == tensor.shape
            and self.strides == tensor.stride()
            and self.dtype is tensor.dtype
            and not (tensor.is_conj() or tensor.is_neg())
        )


@final
class _Views:
    """The native arrays of tensors in host memory, until the tensors are gone.

    To make an array takes longer than to see that it is still right. And a call with the arrays of an earlier call
    need not look again where they lie.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def of(self, tensor: Any) -> NativeArray:
        """Return the native array of a tensor: the same one, as long as the tensor has the same memory."""
        key, known = id(tensor), self._known
        found = known.get(key)
        if found is not None and found.is_of(tensor):
            return found.array
        # Of another object of PyTorch: else the array would keep the tensor.
        plain = tensor.detach().resolve_conj().resolve_neg()
        array = _view(plain)
        if plain.data_ptr() == tensor.data_ptr():  # a copy would be one of the numbers of today
            gone = weakref.ref(tensor, lambda _: known.pop(key, None))
            known[key] = _Known(gone, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, array)
        return array

    def has(self, tensor: Any, array: NativeArray) -> bool:
        """Whether an array was the native array of a tensor when that was looked up last, and no copy."""
        found = self._known.get(id(tensor))
        return found is not None and found.array is array

    def forget(self, tensor: Any) -> None:
        """Keep no memory that a tensor had before."""
        self._known.pop(id(tensor), None)


_VIEWS: Final = _Views()


@cache
def _questions() -> Sequence[Callable[[Any], Any]]:
    """List the fields that identify a real tensor's array; each is read of a whole list at once, which is quick."""
    tensor = sys.modules["torch"].Tensor
    return (
        attrgetter("shape"),
        attrgetter("dtype"),
        attrgetter("requires_grad"),
        attrgetter("is_leaf"),
        tensor.data_ptr,
        tensor.stride,
        tensor.is_neg,
    )


def _answers_of(tensors: list[Any]) -> list[list[Any]]:
    return [list(map(question, tensors)) for question in _questions()]


@final
class _Lists:
    """Lists of tensors in host memory that repeat, with their native arrays. Keeps no memory of a tensor alive.

    It has none without the compiled part of the library.
    """

    def __init__(self) -> None:
        # By the first tensor, and their number: weak references to the tensors, what was asked of them, and weak
        # references to their arrays, which `_VIEWS` keeps.
        self._known: dict[tuple[int, int], tuple[list[Any], list[list[Any]], list[Any]]] = {}

    def find(self, tensors: list[Any]) -> list[NativeArray] | None:
        """Return the arrays of a list that was noted, if they are still right."""
        refs, answers, references = self._of(tensors)
        if not refs or len(refs) != len(tensors) or not native.are_known(tensors, tensors, refs, refs):
            return None
        arrays = [reference() for reference in references]
        are_alive = set(map(type, arrays)) == {np.ndarray}
        return arrays if are_alive and answers == _answers_of(tensors) else None

    def note(self, tensors: list[Any], arrays: Sequence[NativeArray]) -> bool:
        """Note the arrays of a list, when its first tensor repeats; whether that was so."""
        if native is None or not tensors:
            return False
        refs, _, _ = self._of(tensors)
        if not (refs and refs[0]() is tensors[0]):  # most lists never repeat
            self._keep(tensors, tensors[:1], [], [])
            return False
        if not all(map(_VIEWS.has, tensors, arrays)):  # as where some are of another kind, or were copied
            return False
        # A complex tensor may be a conjugated view at any time, and one with a history is refused now and then.
        if any(its.is_complex() or (its.requires_grad and not its.is_leaf) for its in tensors):
            return False
        self._keep(tensors, tensors, _answers_of(tensors), list(map(weakref.ref, arrays)))
        return True

    def _of(self, tensors: list[Any]) -> tuple[list[Any], list[list[Any]], list[Any]]:
        return self._known.get((id(tensors[0]), len(tensors)), ([], [], [])) if tensors else ([], [], [])

    def _keep(self, tensors: list[Any], noted: list[Any], answers: list[list[Any]], references: list[Any]) -> None:
        if len(self._known) >= _MOST_LISTS:
            self._known.clear()
        self._known[id(tensors[0]), len(tensors)] = list(map(weakref.ref, noted)), answers, references


_LISTS: Final = _Lists()


def _require_no_history(tensor: Any) -> None:
    """Refuse a tensor that PyTorch differentiates."""
    if tensor.requires_grad and not tensor.is_leaf and sys.modules["torch"].is_grad_enabled():
        raise TypeError(
            f"the tensor is a result that PyTorch differentiates ({type(tensor.grad_fn).__name__}), and no gradient "
            "goes back through other ranks: pass tensor.detach()"
        )


def _view(tensor: Any) -> NativeArray:
    """View a tensor as a native array, on whichever GPU it lies."""
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided:
        raise TypeError(f"the tensor's layout is {tensor.layout}, and a dense one is needed: pass tensor.to_dense()")
    if hasattr(tensor, "full_tensor"):
        raise TypeError(f"a DTensor of {[*tensor.shape]} lies on several ranks: pass its to_local(), or full_tensor()")
    if not (tensor.is_cpu or tensor.is_cuda):
        raise TypeError(f"the tensor is on device {tensor.device}, and the CPU or CUDA is needed: pass tensor.cpu()")
    dtype = _missing_in_numpy(tensor.dtype)
    if dtype is not None:
        return _view(tensor.view(torch.uint8 if dtype.itemsize == 1 else torch.int16)).view(dtype)
    if tensor.is_cuda:
        return _CUPY.to_target(tensor)
    try:
        return tensor.numpy()
    except (RuntimeError, TypeError) as error:
        raise TypeError(f"the {type(tensor).__name__} of {tensor.dtype} has no view of NumPy: {error}") from error


@cache
def _missing_in_numpy(dtype: Any) -> np.dtype[Any] | None:
    """Return the dtype of `ml_dtypes` for a dtype of PyTorch; `None` for one that NumPy has itself, or nobody."""
    name = str(dtype).removeprefix("torch.")
    return dtype_named(name) if name == "bfloat16" or name.startswith("float8") else None


@cache
def _integers_for(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return integers of PyTorch that have the bits of a dtype of `ml_dtypes`; `None` for a dtype of NumPy."""
    if is_of_numpy(dtype):
        return None
    return np.dtype(np.uint8 if dtype.itemsize == 1 else np.int16)
