"""Memory of results that were let go: what is used again, what is never, and how much is kept."""

import gc
import sys

import numpy as np
import pytest

from mpidist.transport.host_memory.result_memory import RecycledResults, ResultMemory

pytestmark = pytest.mark.no_mpi

FLOAT = np.dtype(np.float32)
LARGE = (64, 1024)  # 256 KiB
NBYTES = 4 * 64 * 1024


def address(array):
    return int(array.ctypes.data)


@pytest.fixture
def memory():
    return ResultMemory(1 << 30)


def repeated(memory, shapes, dtypes):
    """Return results of calls of which one was made before."""
    results = RecycledResults(memory, shapes, dtypes)
    assert [array.shape for array in results.take()] == shapes
    return results


def test_memory_of_sums_is_kept_up_to_the_limit_until_it_is_cleared(memory):
    for sums, is_kept in ((memory.sums, True), (memory.products, True), (ResultMemory(NBYTES - 1).sums, False)):
        (first,), (second,) = (sums.take([LARGE], [FLOAT]) for _ in range(2))
        assert (first is second, np.shares_memory(first, second)) == (is_kept, is_kept)
        memory.clear()
        assert not np.shares_memory(sums.take([LARGE], [FLOAT])[0], first)


def test_result_memory_keeps_nothing_of_a_single_call(memory):
    RecycledResults(memory, [LARGE], [FLOAT]).take()
    memory.empty(LARGE, FLOAT, device=False)
    assert memory.nbytes == 0


def test_result_memory_keeps_nothing_where_references_cannot_be_counted(monkeypatch):
    """As in a Python without a GIL."""
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    memory = ResultMemory(1 << 30)
    results = repeated(memory, [LARGE], [FLOAT])
    assert not np.shares_memory(results.take()[0], memory.empty(LARGE, FLOAT, device=False))
    assert memory.nbytes == len(results.kept) == 0


def exported(array):
    class Foreign:
        """Holds a capsule of DLPack, as an array of another library does."""

        def __init__(self):
            self.capsule = array.__dlpack__()

    return Foreign()


VIEWS = (
    lambda array: array,
    lambda array: array[3:5, 7],
    lambda array: array.view(np.uint8).T[1:],
    lambda array: memoryview(array),
    lambda array: np.frombuffer(memoryview(array), np.int32),
    lambda array: array.flat,
    lambda array: np.lib.stride_tricks.sliding_window_view(array, 3, 0),
    exported,
)


def test_result_memory_is_not_reused_while_a_view_lives():
    for view in VIEWS:
        results = repeated(ResultMemory(1 << 30), [LARGE], [FLOAT])
        (array,) = results.take()
        array[...] = 7
        start, stop = address(array), address(array) + NBYTES
        kept = view(array)
        del array
        gc.collect()
        for _ in range(6):
            (other,) = results.take()
            assert address(other) + NBYTES <= start or stop <= address(other)
            other[...] = 1
        del kept, other
        gc.collect()
        again = [results.take() for _ in range(4)]
        assert start in {address(array) for (array,) in again}  # and there again, once nobody looks


def test_small_results_are_kept_apart(memory):
    """A loss of each step that is kept does not hold the gradients' memory."""
    results = repeated(memory, [(), LARGE, (0,), (10,)], [np.dtype(np.float64), FLOAT, FLOAT, FLOAT])
    losses, addresses = [], set()
    for _ in range(8):
        loss, gradient, empty, few = results.take()
        assert loss.shape == ()
        assert empty.shape == (0,)
        assert few.shape == (10,)
        losses.append(loss)
        addresses.add(address(gradient))
    assert len(addresses) == 2


def test_result_memory_stays_within_its_limit():
    """What was not used for the longest time goes first; a list that is larger than the limit is not kept."""
    memory = ResultMemory(3 * NBYTES + 1024)
    lists = [repeated(memory, [(64 + at, 1000)], [FLOAT]) for at in range(8)]
    for results in lists * 3:
        results.take()
        assert memory.nbytes <= 3 * NBYTES + 1024
    assert len({address(lists[-1].take()[0]) for _ in range(3)}) == 1
    too_large = repeated(memory, [(2000, 1000)], [FLOAT])
    assert too_large.take()[0].shape == (2000, 1000)
    assert NBYTES <= memory.nbytes <= 3 * NBYTES + 1024


def test_result_memory_releases_unused_results(memory):
    once = repeated(memory, [(1000, 1000)], [FLOAT])
    once.take()
    often = repeated(memory, [LARGE], [FLOAT])
    for _ in range(1023):
        often.take()
    assert memory.nbytes > 4_000_000
    for _ in range(3):
        often.take()
    assert memory.nbytes <= NBYTES + 1024
    assert once.take()[0].shape == (1000, 1000)


def test_clear_gives_back_all_that_nobody_looks_at(memory):
    results = repeated(memory, [LARGE], [FLOAT])
    (kept,) = results.take()
    kept[...] = 3
    for _ in range(2):
        memory.empty(LARGE, FLOAT, device=False)
    assert memory.nbytes >= 2 * NBYTES
    memory.clear()
    assert memory.nbytes == 0
    results.take()[0][...] = 4
    assert (kept == 3).all()
