"""New results in shared memory, which the rank that adds writes: numbers, whose memory it is, and when it is used."""

import gc
import os
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from support.contributions import have_equal_bits, list_of_all, list_of_rank
from support.everywhere import raises_everywhere
from support.reductions import F32, all_reduce
from support.transports import WAYS_TO_WRITE, force_way_to_write, set_sizes

from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.errors import InvalidArgumentError
from mpidist.transport.native.loading import native
from mpidist.transport.node_memory.barrier import NodeBarrier
from mpidist.transport.node_memory.window import LINE_BYTES, SharedWindow

pytestmark = [
    pytest.mark.ranks(min=2),
    pytest.mark.skipif(native is None, reason="the compiled part is left out: MPIDIST_NATIVE=0, or no compiler"),
]

LISTS = ([150_001], [70_000, 3, 0, 9, 100_000, 17, 50_001], [130] * 900)


def is_shared(array):
    """Whether an array lies in shared memory of the library."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(bound, 16) for bound in line.split()[0].split("-"))
        if start <= array.ctypes.data < stop:
            return "/mpidist-" in line
    return False


@pytest.mark.parametrize("chunk_bytes", [4096, 512 << 10])
def test_direct_results_have_the_bits_of_other_results(comm, monkeypatch, chunk_bytes):
    """Whether they lie in shared memory, or in other memory as those of the first call."""
    set_sizes(monkeypatch, chunk_bytes=chunk_bytes, one_shot_bytes=256)
    with Strategy(comm=comm) as strategy:
        for lengths, (code, op) in product(LISTS, (("f", "MEAN"), ("d", "SUM"), ("B", "SUM"))):
            dtype = np.dtype(code)
            divisor = comm.size if op == "MEAN" else 1
            is_large = sum(lengths) * dtype.itemsize >= 128 << 10
            mine = [list_of_rank(comm.rank, lengths, dtype, seed) for seed in (0, 1)]
            right = [list_of_all(comm.size, lengths, dtype, divisor, seed=seed) for seed in (0, 1)]
            for call, way in enumerate(WAYS_TO_WRITE):
                force_way_to_write(strategy, way)
                value = mine[call % 2]
                results = all_reduce(strategy, op, value if len(value) > 1 else value[0])
                results = results if len(value) > 1 else [results]
                assert have_equal_bits(results, right[call % 2]), (dtype, way)
                assert is_shared(results[0]) == (call > 0 and is_large)


@pytest.mark.ranks(2)
def test_large_sums_have_the_same_bits(comm):
    """From 16 MiB on, ranks copy in to staging memory, and sums are written past the caches."""
    lengths = [4_300_000, 5, 300_001]
    mine, right = list_of_rank(comm.rank, lengths, F32), list_of_all(comm.size, lengths, F32, comm.size)
    with Strategy(comm=comm) as strategy:
        for call, way in enumerate(WAYS_TO_WRITE):
            force_way_to_write(strategy, way)
            results = all_reduce(strategy, "MEAN", mine)
            assert have_equal_bits(results, right)
            assert not call or is_shared(results[0])


@pytest.mark.ranks(2)
def test_small_results_of_a_list_keep_no_memory_of_the_list(comm):
    """A program may keep the loss of each step."""
    losses = []
    with Strategy(comm=comm) as strategy:
        for step in range(12):
            large, loss = all_reduce(strategy, "SUM", [np.full(200_000, 1.0), np.full((), step)])
            assert is_shared(large) == (step > 0)
            assert not is_shared(loss)
            losses.append(loss)
    assert losses == [step * comm.size for step in range(12)]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("deadline", [None, "600"])
def test_outs_of_some_ranks(comm, monkeypatch, deadline):
    """Then all stage once more; if that goes on, results lie in other memory, which costs nothing."""
    if deadline is not None:  # which adds a barrier between what ranks tell and when they are told it
        monkeypatch.setenv("MPIDIST_TIMEOUT_SECONDS", deadline)
    with Strategy(comm=comm) as strategy:
        for count in range(100_000, 100_004):
            mine = np.full(count, comm.rank, np.float32)
            out = np.empty_like(mine) if comm.rank == 0 else None
            for step in range(12):
                result = all_reduce(strategy, "SUM", mine + step, out=out)
                assert (result == sum(range(comm.size)) + comm.size * step).all()
                assert comm.rank == 0 or is_shared(result) == (0 < step < 9), step


@pytest.mark.ranks(3)
def test_direct_results_are_chosen_separately_for_dtypes(comm):
    """Each dtype for itself: the one is shared no longer after a while, the other always is."""
    with Strategy(comm=comm) as strategy:
        for step in range(12):
            whole = np.full((100_000, 2), step, np.float32)
            mine = whole[:, 0] if comm.rank == 0 else whole[:, 0].copy()
            results = all_reduce(strategy, "SUM", [mine, np.full(100_000, step, np.float64)])
            assert all((result == step * comm.size).all() for result in results)
            assert is_shared(results[0]) == (0 < step < 9), step
            assert is_shared(results[1]) == (step > 0), step


@pytest.mark.ranks(3)
def test_ranks_that_keep_unlike_numbers_of_results(comm):
    """No deadline, no out: one rank has no more blocks to lend before the others."""
    kept = []
    with Strategy(comm=comm) as strategy:
        for step in range(24):
            result = all_reduce(strategy, "SUM", np.full(100_000, step, np.float32))
            if comm.rank == 0:
                kept.append(result)
            assert (result == comm.size * step).all()
    assert all((result == comm.size * step).all() for step, result in enumerate(kept))


@pytest.mark.ranks(3)
def test_published_word_stays_until_all_have_read_it(comm):
    """Also if a rank has passed another barrier since then, and tells the next word."""
    window = SharedWindow(comm, LINE_BYTES)
    both = [native.Barrier(window.parts, comm.rank, 100), NodeBarrier(window, comm.rank)]
    for barrier in both:
        comm.Barrier()
        for turn in range(1, 40):
            told = barrier.count + 1
            barrier.publish(100 * turn + comm.rank)
            for _ in range(2):  # the second is a deadline's
                barrier.post()
                while not barrier.has_passed():
                    time.sleep(0)
            if comm.rank == turn % comm.size:
                time.sleep(0.002)
            assert barrier.published(told) == [100 * turn + rank for rank in range(comm.size)]
        comm.Barrier()
        for part in window.parts:
            part[:] = 0
        comm.Barrier()


@pytest.mark.ranks(2)
def test_failures_and_resets_leave_no_memory_behind(comm):
    with Strategy(comm=comm) as strategy:
        used = []
        for _ in range(5):
            for _ in range(4):
                assert (all_reduce(strategy, "SUM", np.full(1 << 20, 1.0)) == comm.size).all()
            with raises_everywhere(comm, InvalidArgumentError, "did not pass the same arguments"):
                all_reduce(strategy, "SUM", np.full((1 << 20) + comm.rank, 1.0))
            strategy.reset()
            gc.collect()  # the error's traceback
            mapped = next(line for line in Path("/proc/self/status").read_text().splitlines() if "RssShmem" in line)
            used.append((len(os.listdir("/proc/self/fd")), int(mapped.split()[1]) << 10))
        assert used[-1][0] == used[0][0]
        assert used[-1][1] < used[0][1] + (8 << 20)  # a result of each of four resets is 32 MiB; MPI takes some, too


@pytest.mark.ranks(2)
def test_direct_results_need_a_limit_above_zero(comm, monkeypatch):
    monkeypatch.setenv("MPIDIST_RESULT_BYTES", "0")
    with Strategy(comm=comm) as strategy:
        for _ in range(4):
            result = all_reduce(strategy, "SUM", np.full(100_000, 1.0))
            assert (result == comm.size).all()
            assert not is_shared(result)


@pytest.mark.ranks(2)
def test_direct_results_of_a_forked_process_are_its_own(comm):
    """As of the fork: what this process does with the memory later does not show there, nor the other way round."""
    with Strategy(comm=comm) as strategy:
        mine = np.full(100_000, 1.0)
        for _ in range(3):
            result = all_reduce(strategy, "SUM", mine)
        assert is_shared(result)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(reading, 1)
            is_right = bool((result == comm.size).all())
            result[...] = -1
            del result
            gc.collect()
            os._exit(0 if is_right else 1)
        kept = result[1:]
        result[0] = 5
        for step in range(6):
            other = all_reduce(strategy, "SUM", mine * step)
        os.write(writing, b"1")
        _, status = os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
        assert os.waitstatus_to_exitcode(status) == 0
        assert (kept == comm.size).all()
        assert (other == comm.size * 5).all()
        again = all_reduce(strategy, "SUM", mine)
        assert (again == comm.size).all()
