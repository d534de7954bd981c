"""Values of any library, as native arrays and back."""

import enum
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tensors import Tensor

from mpidist.transport import arrays
from mpidist.transport.array_libraries.libraries import LIBRARIES, library_of

pytestmark = pytest.mark.no_mpi

BF16 = np.dtype(ml_dtypes.bfloat16)


class StandardTensor(Tensor):
    """An array of a library that follows the array API standard."""

    def __array_namespace__(self):
        return SimpleNamespace(from_dlpack=lambda array: StandardTensor(np.from_dlpack(array)))


class Forgetful(Tensor):
    """An array of a library that lets arrays out and none in."""

    __module__ = "math"


class Variable:
    """What has `__array__` alone."""

    def __array__(self, dtype=None, copy=None):
        return np.arange(3.0)


class OnDevice(Tensor):
    """What says that it lies in device memory."""

    __cuda_array_interface__: Any = None


class Level(enum.IntEnum):
    LOW = 1


def through(value):
    """Take a value in, and give a copy of it out."""
    library = library_of(value)
    return library.from_native(library.to_native(value).copy(), value)


NUMBERS = {
    True: "bool",
    3: "int64",
    -(2**63): "int64",
    2.5: "float64",
    1 + 2j: "complex128",
    np.float32(1.25): "float32",
    np.int8(-3): "int8",
    BF16.type(0.5): "bfloat16",
}
ARRAYS = [
    (Level.LOW, "int64"),
    (np.arange(3, dtype=np.uint16), "uint16"),
    (np.array(7, np.int32), "int32"),
    (np.zeros((0, 4), np.float16), "float16"),
    (np.ones((2, 3), BF16), "bfloat16"),
    (np.arange(4, dtype=">f8"), "float64"),
    (Tensor(np.arange(4, dtype=np.float32)), "float32"),
    (StandardTensor(np.arange(4, dtype=np.int16)), "int16"),
    (Variable(), "float64"),
]


def test_values_have_a_dtype_and_a_host_array():
    for value, dtype in [*NUMBERS.items(), *ARRAYS]:
        library = library_of(value)
        native = library.to_native(value)
        assert type(native) is np.ndarray
        assert native.dtype.name == dtype
        assert not arrays.is_device(native)
        assert library is next(one for one in LIBRARIES if one.owns(value)), "the short cut by type"
        if type(value) is np.ndarray:
            assert native is value
            assert library.from_native(native, value) is value


def test_numbers_come_back_as_the_numbers_they_were():
    for value in NUMBERS:
        again = through(value)
        assert type(again) is type(value)
        assert again == value
    assert library_of(1.0).from_native(np.arange(2.0), 1.0).tolist() == [0.0, 1.0], "a result that is an array"


@pytest.mark.parametrize("kind", [Tensor, StandardTensor])
def test_dlpack_arrays_are_viewed_and_come_back_in_their_kind(kind):
    value = kind(np.arange(6.0).reshape(2, 3))
    native = library_of(value).to_native(value)
    assert np.shares_memory(native, value.array)
    again = through(value)
    assert type(again) is kind
    assert (again.array == value.array).all()
    assert not np.shares_memory(again.array, value.array)
    again = through(kind(np.array(2.5)))
    assert (again.array.shape, again.array) == ((), 2.5)


def test_values_without_a_way_back_become_numpy_arrays():
    for value in (Variable(), Forgetful(np.arange(3.0))):
        again = through(value)
        assert type(again) is np.ndarray
        assert again.tolist() == [0, 1, 2]


def test_device_memory_is_not_converted_on_the_host():
    """It speaks DLPack too; and CuPy is not imported to find out whose it is."""
    library = library_of(OnDevice(np.ones(1)))
    assert type(library).__name__ == "CuPyArrays"


REFUSED = [
    (Tensor(np.ones(2, BF16)), TypeError, r"tensors\.Tensor cannot be read through DLPack"),
    *(
        (value, TypeError, f"{kind}.*needed an array of NumPy, CuPy or a library that speaks DLPack")
        for value, kind in (
            ("text", "builtins.str"), (None, "builtins.NoneType"), (object(), "builtins.object"),
            ({1, 2}, "builtins.set"), (Fraction(1, 2), "fractions.Fraction"), (range(3), "builtins.range"),
        )
    ),
    *(
        (number, ValueError, f"counts as int64, and {number} does not fit")
        for number in (2**63, -(2**63) - 1, 10**100)
    ),
    # What is masked would be added as if it was not.
    (np.ma.masked_array([1.0, 99.0], [False, True]), TypeError, "whose mask would be lost"),
]  # fmt: skip


def test_value_that_is_no_array_of_numbers_is_refused_by_its_kind():
    for value, kind, text in REFUSED:
        with pytest.raises(kind, match=text):
            through(value)


_MEMORY = np.zeros((4, 6), np.float32)


def test_memory_bounds_hold_every_element():
    start = _MEMORY.__array_interface__["data"][0]
    for array, first, stop in (
        (_MEMORY.T, 0, 96),
        (_MEMORY[1], 24, 48),
        (_MEMORY[:, 2], 8, 84),
        (_MEMORY[::-1, ::-2], 4, 96),
        (_MEMORY[2, 3:4].reshape(()), 60, 64),
        (np.broadcast_to(_MEMORY[1], (9, 6)), 24, 48),
    ):
        low, high = arrays.memory_bounds(array)
        assert (low - start, high - start) == (first, stop)
    for empty in (_MEMORY[1:1], _MEMORY[:, 6:], _MEMORY[:0, ::-1]):
        low, high = arrays.memory_bounds(empty)
        assert low == high
