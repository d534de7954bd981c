"""Which axes of an array a caller means."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from mpidist.errors import InvalidArgumentError
from mpidist.transport import value_text

__all__ = ["axes_of", "axes_text", "axis_of", "whole_axes"]


def axis_of(axis: Any, shape: tuple[int, ...], verb: str) -> int:
    """Count an axis from the front.

    Args:
        axis: A whole number; negative counts from the end.
        shape: Of the array.
        verb: What is done along it, for errors.

    Raises:
        TypeError: If `axis` is no whole number.
        InvalidArgumentError: If the array has no such axis.
    """
    at = axis if type(axis) is int else _index(axis, "a whole number")
    if not -len(shape) <= at < len(shape):
        what = f"an array of shape {list(shape)}" if shape else "a scalar"
        raise InvalidArgumentError(f"cannot {verb} along axis {at}: {what} has no such axis")
    return at % len(shape)


def whole_axes(axis: Any) -> tuple[int, ...]:
    """Take an axis, or a tuple of them, as a tuple.

    Raises:
        TypeError: If `axis` is neither.
    """
    if type(axis) is int:
        return (axis,)
    what = "a whole number or a tuple of them"
    return tuple(_index(one, what) for one in axis) if isinstance(axis, tuple) else (_index(axis, what),)


def axes_of(axes: tuple[int, ...], shape: tuple[int, ...], verb: str) -> tuple[int, ...]:
    """Count axes from the front.

    Raises:
        InvalidArgumentError: If the array has no such axis, or one is there twice.
    """
    counted = tuple([axis_of(axis, shape, verb) for axis in axes])
    if len(axes) > 1 and len(set(counted)) < len(axes):
        raise InvalidArgumentError(f"cannot {verb} along {axes_text(axes)}: an axis is there twice")
    return counted


def axes_text(axes: tuple[int, ...]) -> str:
    """Name axes as the caller did: `axis 0`, `axes (0, -1)`."""
    return f"axis {axes[0]}" if len(axes) == 1 else f"axes {axes}"


def _index(axis: Any, what: str) -> int:
    try:
        if isinstance(axis, (bool, np.bool_)):
            raise TypeError
        return operator.index(axis)
    except TypeError:
        raise TypeError(f"axis must be {what}, got {value_text(axis)}") from None
