"""Arithmetic whose floating-point errors nobody hears of."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mpidist.transport.float_errors import without_float_errors

pytestmark = pytest.mark.no_mpi

LARGE = np.full(3, np.finfo(np.float32).max, np.float32)


def test_float_errors_are_ignored_under_any_setting_of_numpy():
    for how in ("raise", "warn"):
        with np.errstate(all=how):
            before, out = np.geterr(), np.zeros(3, np.float32)
            assert without_float_errors(np.add, LARGE, LARGE, out=out) is out
            assert np.isinf(out).all()
            assert np.geterr() == before


def test_threads_may_add_at_the_same_time():
    together = threading.Barrier(4)

    def add():
        together.wait()
        return all(np.isinf(without_float_errors(np.add, LARGE, LARGE)).all() for _ in range(200))

    with ThreadPoolExecutor(4) as pool, np.errstate(all="raise"):
        assert all(future.result() for future in [pool.submit(add) for _ in range(4)])
