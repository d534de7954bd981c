"""Tensors of PyTorch."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, Final, final

import numpy as np

from mpidist.transport.array_libraries.dlpack_arrays import CuPyArrays
from mpidist.transport.array_libraries.library import ArrayLibrary, NativeArray
from mpidist.transport.half import dtype_named, is_of_numpy

__all__ = ["TorchTensors"]

_CUPY: Final = CuPyArrays()


@final
class TorchTensors(ArrayLibrary):
    """`torch.Tensor`, of bfloat16 and float8 too, and parameters. Results are tensors that require no gradient.

    A tensor in host memory shares it with its native array, one on a GPU too. NumPy sees the bits of bfloat16 and
    float8 as integers, and then as a dtype of `ml_dtypes`.
    """

    goes_by_type = True
    why_no_target = f"on a GPU, {_CUPY.why_no_target}"

    def owns(self, value: Any) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(value, torch.Tensor)

    def to_native(self, value: Any) -> NativeArray:
        torch = sys.modules["torch"]
        if value.requires_grad and not value.is_leaf and torch.is_grad_enabled():
            raise TypeError(
                f"the tensor is a result that PyTorch differentiates ({type(value.grad_fn).__name__}), and no gradient "
                "goes back through other ranks: pass tensor.detach()"
            )
        return _view(value.detach().resolve_conj().resolve_neg())

    def from_native(self, array: NativeArray, like: Any) -> Any:
        torch = sys.modules["torch"]
        integers = _integers_for(array.dtype)
        if integers is not None:
            return self.from_native(array.view(integers), like).view(getattr(torch, array.dtype.name))
        return torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.from_dlpack(array)

    def to_target(self, value: Any) -> NativeArray | None:
        if value.is_conj() or value.is_neg():
            raise TypeError("the tensor is a view of numbers that are conjugated or negated when they are read: clone it")
        return None if value.is_cuda else self.to_native(value)


def _view(tensor: Any) -> NativeArray:
    """View a tensor as a native array."""
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided:
        raise TypeError(f"the tensor's layout is {tensor.layout}, and a dense one is needed: pass tensor.to_dense()")
    if not (tensor.is_cpu or tensor.is_cuda):
        raise TypeError(f"the tensor is on device {tensor.device}, and the CPU or CUDA is needed: pass tensor.cpu()")
    dtype = _missing_in_numpy(tensor.dtype)
    if dtype is not None:
        if tensor.is_cuda and dtype.itemsize == 1:
            raise TypeError(f"CuPy has no {dtype.name}: pass tensor.cpu(), or a tensor of bfloat16")
        return _view(tensor.view(torch.uint8 if dtype.itemsize == 1 else torch.int16)).view(dtype)
    if tensor.is_cuda:
        return _CUPY.to_native(tensor)
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
