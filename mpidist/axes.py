"""Which axes of an array a caller means."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from mpidist.errors import InvalidArgumentError
from mpidist.transport.texts import value_text

__all__ = ["axes_of", "axes_text", "axis_of"]


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
    at = _index(axis, "a whole number")
    if not -len(shape) <= at < len(shape):
        what = f"an array of shape {list(shape)}" if shape else "a scalar"
        raise InvalidArgumentError(f"cannot {verb} along axis {at}: {what} has no such axis")
    return at % len(shape)


def axes_of(axis: Any, shape: tuple[int, ...], verb: str) -> tuple[int, ...]:
    """Count axes from the front: of a whole number, or a tuple of them.

    Raises:
        TypeError: If `axis` is neither.
        InvalidArgumentError: If the array has no such axis, or one is there twice.
    """
    axes = tuple(axis_of(one, shape, verb) for one in _each(axis))
    if len(set(axes)) < len(axes):
        raise InvalidArgumentError(f"cannot {verb} along {axes_text(axis)}: an axis is there twice")
    return axes


def axes_text(axis: Any) -> str:
    """Name axes as the caller did: `axis 0`, `axes (0, -1)`.

    Raises:
        TypeError: If they are none.
    """
    axes = _each(axis)
    return f"axes {axes}" if isinstance(axis, tuple) else f"axis {axes[0]}"


def _each(axis: Any) -> tuple[int, ...]:
    what = "a whole number or a tuple of them"
    return tuple(_index(one, what) for one in (axis if isinstance(axis, tuple) else (axis,)))


def _index(axis: Any, what: str) -> int:
    try:
        if isinstance(axis, (bool, np.bool_)):
            raise TypeError
        return operator.index(axis)
    except TypeError:
        raise TypeError(f"axis must be {what}, got {value_text(axis)}") from None
