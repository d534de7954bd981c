"""Arrays of JAX."""

from __future__ import annotations

import sys
from typing import Any, Final, final

import numpy as np

from mpidist.transport.array_libraries.dlpack_arrays import CuPyArrays
from mpidist.transport.array_libraries.library import ArrayLibrary
from mpidist.transport.arrays import NativeArray

__all__ = ["JaxArrays", "is_compiled"]

_CUPY: Final = CuPyArrays()


@final
class JaxArrays(ArrayLibrary):
    """`jax.Array`, of every dtype. Results are on the devices of the values.

    An array in host memory is viewed where it lies. A result becomes JAX's without a copy if it lies at a multiple of
    64 bytes, as large results do. Without `jax_enable_x64`, JAX has no numbers of 64 bits, and makes 32 of them.
    """

    goes_by_type = True
    why_no_target = "arrays of JAX never change: leave `out` out, and take the result"

    def owns(self, value: Any) -> bool:
        jax = sys.modules.get("jax")
        return jax is not None and isinstance(value, jax.Array)

    def to_native(self, value: Any) -> NativeArray:
        if isinstance(value, sys.modules["jax"].core.Tracer):
            raise TypeError(
                "JAX traces this array, which has no numbers yet: call mpidist outside of functions that jax.jit, "
                "jax.grad or jax.vmap transform, on what they return, or mpidist.jax.psum inside"
            )
        if hasattr(value, "__cuda_array_interface__"):
            return _CUPY.to_native(value)
        try:
            return np.asarray(value)
        except (RuntimeError, TypeError, ValueError) as error:
            raise TypeError(f"the array of JAX, {value.aval}, has no view of NumPy: {error}") from error

    def from_native(self, array: NativeArray, like: Any) -> Any:
        if not isinstance(array, np.ndarray):
            return _CUPY.from_native(array, like)
        return sys.modules["jax"].device_put(array, _place_of(like, array.shape))


def is_compiled(value: Any) -> bool:
    """Whether a value is one of a function that JAX compiles: other numbers which that uses become constants of it."""
    jax = sys.modules.get("jax")
    trace = getattr(value, "_trace", None) if jax is not None and isinstance(value, jax.core.Tracer) else None
    while trace is not None and type(trace).__name__ != "DynamicJaxprTrace":  # as inside of grad or vmap in jit
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def _place_of(like: Any, shape: tuple[int, ...]) -> Any:
    """Return where a result of a shape goes: to the devices of `like`, if it was put there; `None` leaves it to JAX.

    A result of another shape, such as that of a gather, cannot always be cut as `like` is: it follows one device only.
    """
    if not like.committed:
        return None
    if like.shape == shape:
        return like.sharding
    devices = like.devices()
    return next(iter(devices)) if len(devices) == 1 else None
