"""Nests as bytes: what comes back is what was written, and anything else is refused."""

from itertools import product
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from mpidist.nest import decode, encode

pytestmark = pytest.mark.no_mpi


class Pair(NamedTuple):
    left: int
    right: int


ITEMS: list[Any] = [
    None, True, 0, -1, 10**40, 0.1, -0.0, float("inf"), 2 - 3j, "", "ä\0\n", [], (), {}, [[[]]], {"a": {1: (None,)}},
]  # fmt: skip
DTYPES: list[Any] = [
    "?", "i1", "u8", ">i4", "f2", "c16", "U3", "S2", "M8[s]",
    ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz, ml_dtypes.int4,
]  # fmt: skip


def test_what_python_has_comes_back() -> None:
    for item in ITEMS:
        found = decode(encode([item, item], "it"))
        assert found == [item, item]
        assert [type(one) for one in found] == [type(item)] * 2
        assert repr(found[0]) == repr(item)
    assert np.isnan(decode(encode(float("nan"), "it")))


def test_arrays_come_back() -> None:
    shapes: list[tuple[int, ...]] = [(), (3,), (0, 2), (2, 1, 2)]
    for dtype, shape in product(DTYPES, shapes):
        array = np.arange(int(np.prod(shape)), dtype=np.int16).reshape(shape).astype(dtype)
        found, other = decode(encode({"it": (array, array.T)}, "it"))["it"]
        assert (found.dtype, found.shape, other.shape) == (array.dtype, shape, shape[::-1])
        assert (found == array).all()
        assert (other == array.T).all()
        assert found.flags.writeable
        assert found.flags.aligned


def test_results_share_no_memory() -> None:
    data = encode([np.zeros(3), np.zeros(3)], "it")
    first, second = decode(data)
    first += 1
    assert (second == 0).all()
    assert (decode(data)[0] == 0).all()


def test_anything_else_is_refused() -> None:
    wrong: list[Any] = [{1}, object(), len, np.array([None]), np.zeros(2, "V3"), b"bytes", Pair(1, 2), range(3)]
    for item in wrong:
        with pytest.raises(TypeError, match=r"the result of 'step' has an? .*need"):
            encode([1, {"a": (item,)}], "the result of 'step'")


def test_handles_stand_for_something_else() -> None:
    data = encode([range(3), 1], "it", lambda item: (len(item), -1) if isinstance(item, range) else None)
    assert decode(data, lambda handle: f"data set {handle}") == ["data set (3, -1)", 1]


def test_too_many_bytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpidist.nest.encoding.MAX_BYTES", 100)
    with pytest.raises(ValueError, match=r"it takes \d+ bytes, and at most 100 can be sent"):
        encode(np.zeros(20), "it")
