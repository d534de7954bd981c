"""New results lie in memory of results that the program has let go: numbers, what is kept, and what it costs."""

import resource

import numpy as np
import pytest
from support.everywhere import raises_everywhere
from support.placements import one_and_two_nodes
from support.reductions import all_reduce

import mpidist
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.errors import InvalidArgumentError

pytestmark = pytest.mark.core

SHAPES = (300, 200), (64,), (40, 1000), (), (100_000,), (3, 3, 64, 64)


def gradients(step):
    return {f"layer {at}": np.full(shape, step + at, np.float32) for at, shape in enumerate(SHAPES)}


def require(results, size, step):
    for at, shape in enumerate(SHAPES):
        result = results[f"layer {at}"]
        assert result.shape == shape
        assert (result == size * (step + at)).all(), (step, at)


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@one_and_two_nodes
def test_results_of_kept_steps_stay_unchanged(placement, strategy):
    """All of them, or those of the last few steps; results may be written by the program."""
    size = strategy.num_replicas_in_sync
    history = [all_reduce(strategy, "SUM", gradients(step)) for step in range(7)]
    for step, results in enumerate(history):
        require(results, size, step)
    for step in range(7, 16):
        history.append(all_reduce(strategy, "SUM", gradients(step)))
        history.pop(0)
        for at, results in enumerate(history):
            require(results, size, step - 6 + at)
        kept = history[3]["layer 4"][5:10]
        history[3]["layer 4"] += 1  # the program's own array
        history[3]["layer 4"] -= 1
        assert (kept == size * (step - 3 + 4)).all()


@one_and_two_nodes
def test_results_as_arguments_and_as_outs(placement, strategy):
    """Of the call after, and of calls with other shapes in between."""
    size = strategy.num_replicas_in_sync
    value, other = gradients(1), np.ones((500, 100), np.float32)
    for _ in range(6):
        first = all_reduce(strategy, "SUM", value)
        second = all_reduce(strategy, "MEAN", first)
        third = all_reduce(strategy, "SUM", other, out=np.empty_like(other))
        require(first, size, 1)
        require(second, size, 1)
        assert all_reduce(strategy, "MEAN", second, out=second) is second
        require(second, size, 1)
        assert (third == size).all()


@pytest.mark.ranks(1, 2)
def test_results_of_a_repeated_step_take_no_pages(comm):
    """Once it has been made a few times: the results of the step before are let go."""
    with Strategy(comm=comm) as strategy:
        value = gradients(1) | {"large": np.ones(1 << 20, np.float32)}
        results = None
        for _ in range(8):
            results = all_reduce(strategy, "SUM", value)
        least = 1 << 30
        for _ in range(20):  # a page now and then is Python's own
            before = faults()
            results = all_reduce(strategy, "SUM", value)
            least = min(least, faults() - before)
        assert results is not None
        assert least <= 2, f"{least} pages of 4 KiB for {5 << 20} bytes of results"


@one_and_two_nodes
def test_other_calls_take_kept_memory_too(placement, strategy):
    size, history = strategy.topology.size, []
    large = np.full((size * 50, 2000), strategy.topology.rank, np.float32)

    def step():
        context = mpidist.get_replica_context()
        assert context is not None
        return context.all_gather(large, 0), context.reduce_scatter("SUM", large)

    for _ in range(6):
        history.append((*strategy.run(step), strategy.broadcast(large, 0)))
    for gathered, shard, sent in history:
        assert (gathered[:: size * 50, 0] == np.arange(size)).all()
        assert (shard == sum(range(size))).all()
        assert shard.shape == (50, 2000)
        assert (sent == 0).all()
    history.clear()
    pages = []
    for _ in range(20):
        before = faults()
        gathered, shard = strategy.run(step)
        sent = strategy.broadcast(large, 0)
        pages.append(faults() - before)
    assert min(pages) <= 8, f"{pages} pages of 4 KiB"


@pytest.mark.ranks(2)
def test_after_an_error_and_after_close(comm):
    size = comm.size
    strategy = Strategy(comm=comm)
    kept = all_reduce(strategy, "SUM", gradients(1))
    if size > 1:
        with raises_everywhere(comm, InvalidArgumentError, "did not pass the same arguments"):
            all_reduce(strategy, "SUM", np.ones(50_000 + comm.rank))
    again = all_reduce(strategy, "SUM", gradients(2))
    strategy.close()
    with Strategy(comm=comm) as other:
        third = all_reduce(other, "SUM", gradients(3))
        require(kept, size, 1)
        require(again, size, 2)
        require(third, size, 3)
