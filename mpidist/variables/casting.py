"""Casts of assigned values: within a kind of number, and integers within the range of the dtype."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from mpidist.transport import arrays
from mpidist.transport.array_libraries.libraries import library_of
from mpidist.transport.half import is_of_numpy
from mpidist.transport.reduction import is_low_precision

__all__ = ["cast_for", "initial_array", "is_python_number", "require_added", "require_mean"]


def is_python_number(value: Any) -> bool:
    """Whether a value is a Python number, which has no dtype."""
    return isinstance(value, (int, float, complex)) and not isinstance(value, np.generic)


def initial_array(value: Any, dtype: Any, what: str) -> arrays.NativeArray:
    """Return the initial value of a variable as a native array of native byte order: the value itself, if it is one."""
    array = _native_of(value, what)
    if dtype is not None:
        try:
            dtype = np.dtype(dtype)
        except TypeError:
            raise TypeError(f"{what}: the dtype must be one of NumPy's, as 'float32', got {dtype!r}") from None
        array = cast_for(array.reshape(-1)[:0].real.astype(dtype), value, what)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def require_mean(dtype: np.dtype[Any], what: str) -> None:
    """Require that a variable can have the aggregation MEAN: that its numbers are no integers or booleans."""
    if dtype.kind in "iub":
        raise ValueError(
            f"{what} of dtype {dtype.name} cannot have aggregation MEAN, as a mean has a fraction; give the variable a "
            "dtype of floating-point numbers (dtype='float32'), or another aggregation, as SUM"
        )


def require_added(dtype: np.dtype[Any], what: str, aggregation: object) -> None:
    """Require that copies of a variable can be added: that it is of NumPy's dtypes, or one that is added as float32."""
    if not (is_of_numpy(dtype) or is_low_precision(dtype)):
        raise ValueError(
            f"{what} of dtype {dtype.name} cannot be ON_READ with aggregation {aggregation}, as its copies cannot be "
            "added; give the variable another dtype (dtype='float32'), or the aggregation ONLY_FIRST_REPLICA"
        )


def cast_for(target: arrays.NativeArray, value: Any, what: str) -> arrays.NativeArray:
    """Return a value with the dtype and in the memory (host or device) of an array. Copied only if one differs.

    Refused are casts that would lose a fraction or an imaginary part, integers out of range, as 300 for uint8,
    and lists of lists whose lengths differ. `what` is the name of the target, for errors.
    """
    dtype = target.dtype
    if is_python_number(value):
        array = _from_number(value, dtype, what)
    else:
        is_list = isinstance(value, (list, tuple))
        array = _native_of(value, what)
        are_integers = array.dtype.kind in "iu" and dtype.kind in "iu"
        if not is_list or (array.size and not are_integers):  # an empty list has no kind of number
            _require_kind(array.dtype, dtype, what)
        if are_integers and array.size and not np.can_cast(array.dtype, dtype):
            for number in (array.min(), array.max()):
                _require_range(int(number), dtype, what)
        array = array.astype(dtype, copy=False)
    if arrays.is_device(target):
        return array if arrays.is_device(array) else arrays.to_device(array)
    return arrays.on_host(array)


def _native_of(value: Any, what: str) -> arrays.NativeArray:
    """Return an array of any library, a number, or a list or tuple of numbers as a native array; refuse all else.

    `what` it is for, the name of the variable, begins the error.
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
