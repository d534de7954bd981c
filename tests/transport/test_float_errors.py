"""Arithmetic whose floating-point errors nobody hears of."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mpidist.transport.float_errors import without_float_errors

pytestmark = pytest.mark.no_mpi

LARGE = np.full(3, np.finfo(np.float32).max, np.float32)


def overflow() -> np.ndarray:
    return np.asarray(without_float_errors(np.add, LARGE, LARGE))


def test_no_error_is_reported_whatever_numpy_was_told() -> None:
    for how in ("raise", "warn"):
        with np.errstate(all=how):  # type: ignore[call-overload]
            before = np.geterr()
            assert np.isinf(overflow()).all()
            assert np.geterr() == before


def test_numpy_reports_as_before_outside_of_it() -> None:
    overflow()
    with np.errstate(all="raise"), pytest.raises(FloatingPointError):
        LARGE + LARGE


def test_threads_may_add_at_the_same_time() -> None:
    together = threading.Barrier(4)

    def add() -> bool:
        together.wait()
        return all(np.isinf(overflow()).all() for _ in range(200))

    with ThreadPoolExecutor(4) as pool, np.errstate(all="raise"):
        assert all(future.result() for future in [pool.submit(add) for _ in range(4)])


def test_result_goes_where_it_is_wanted() -> None:
    out = np.zeros(3, np.float32)
    assert without_float_errors(np.true_divide, np.full(3, 3, np.float32), 2, out=out) is out
    assert out.tolist() == [1.5] * 3
