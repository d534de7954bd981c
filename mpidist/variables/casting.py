"""Casts of assigned values: within a kind of number, and Python's integers within the range of the dtype."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from mpidist.transport import arrays
from mpidist.transport.array_libraries.libraries import library_of

__all__ = ["cast_for", "is_python_number", "native_of", "require_mean"]


def is_python_number(value: Any) -> bool:
    """Whether a value is a Python number, which has no dtype."""
    return isinstance(value, (int, float, complex)) and not isinstance(value, np.generic)


def native_of(value: Any, what: str) -> arrays.NativeArray:
    """Return an array of any library, a number, or a list or tuple of numbers as a native array.

    Raises:
        ValueError: If the lists in a list differ in length.
        TypeError: If the value is none of these; the error begins with `what`, the name of the variable.
    """
    if isinstance(value, (list, tuple)):
        try:
            return np.asarray(value)
        except ValueError as error:
            raise ValueError(f"{what} takes lists of equal lengths: {error}") from None
    try:
        library = library_of(value)
    except TypeError as error:
        raise TypeError(f"{what} {error}") from None
    return library.to_native(value)


def require_mean(dtype: np.dtype[Any], what: str) -> None:
    """Require that a variable can have the aggregation MEAN.

    Raises:
        ValueError: If its numbers are whole numbers or booleans.
    """
    if dtype.kind in "iub":
        raise ValueError(
            f"{what} of dtype {dtype.name} cannot have aggregation MEAN, as a mean has a fraction; give the variable a "
            "dtype of floating-point numbers (dtype='float32'), or another aggregation, as SUM"
        )


def cast_for(target: arrays.NativeArray, value: Any, what: str) -> arrays.NativeArray:
    """Return a value with the dtype and in the memory (host or device) of an array. Copied only if one differs.

    Args:
        target: The array.
        value: An array, a number, or a list or tuple of numbers.
        what: The name of the target, for errors.

    Raises:
        ValueError: If the cast would lose a fraction or an imaginary part, if a Python integer is out of range, as 300
            is for uint8, or if the lists in a list differ in length.
        TypeError: If the value is neither an array nor a number.
    """
    dtype = target.dtype
    if is_python_number(value):
        array = _from_number(value, dtype, what)
    else:
        is_list = isinstance(value, (list, tuple))
        array = native_of(value, what)
        if is_list and array.size and array.dtype.kind in "iu" and dtype.kind in "iu":
            for number in (array.min(), array.max()):
                _require_range(int(number), dtype, what)
        elif array.size or not is_list:  # an empty list has no kind of number
            _require_kind(array.dtype, dtype, what)
        array = array.astype(dtype, copy=False)
    if arrays.is_device(target):
        return array if arrays.is_device(array) else arrays.to_device(array)
    return arrays.on_host(array)


def _from_number(value: Any, dtype: np.dtype[Any], what: str) -> np.ndarray[Any, Any]:
    if not isinstance(value, int) or isinstance(value, bool) or dtype.kind == "b":
        _require_kind(np.asarray(value).dtype, dtype, what)
    elif dtype.kind in "iu":
        _require_range(value, dtype, what)
    try:
        return np.asarray(float(value) if dtype.kind == "V" else value, dtype)  # bfloat16 refuses large integers
    except OverflowError:
        raise ValueError(f"{value} does not fit in {what}, which is of dtype {dtype.name}") from None


def _require_kind(given: np.dtype[Any], wanted: np.dtype[Any], what: str) -> None:
    if given == wanted:
        return
    drops_imaginary = given.kind == "c" and wanted.kind != "c"  # NumPy would allow it for bfloat16
    if drops_imaginary or not np.can_cast(given, wanted, "same_kind"):
        raise ValueError(
            f"{what} is of dtype {wanted.name} and cannot take a value of dtype {given.name}, which is another kind of "
            f"number; if that is meant, cast the value: numpy.asarray(value).astype({wanted.name!r})"
        )


def _require_range(number: Any, dtype: np.dtype[Any], what: str) -> None:
    low, high = _limits(dtype)
    if not low <= number <= high:
        raise ValueError(f"{number} does not fit in {what}, which is of dtype {dtype.name} and takes {low} to {high}")


@cache
def _limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)
