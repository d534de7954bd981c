"""The parts of several ranks to one result, on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from mpidist.transport.communicator import Array
from mpidist.transport.reduction import Reduction, accumulator_dtype

__all__ = ["join_parts"]

_UFUNCS: Final = {"sum": "add", "prod": "multiply", "min": "minimum", "max": "maximum"}


def join_parts(cupy: Any, parts: Sequence[Array], reduction: Reduction, out: Array) -> None:
    """Join arrays in their order, half precision in a float32 accumulator, rounding once. On the current stream.

    Args:
        cupy: The module.
        parts: Device arrays [m] of one dtype, in rank order.
        reduction: How, and by what to divide.
        out: Where the result goes, [m]; it may be one of the parts.
    """
    ufunc = getattr(cupy, _UFUNCS[reduction.op])
    wide = accumulator_dtype(out.dtype)
    total = parts[0].astype(wide)
    for part in parts[1:]:
        ufunc(total, part.astype(wide, copy=False), out=total)
    if reduction.divisor != 1:
        total /= reduction.divisor
    out[...] = total
