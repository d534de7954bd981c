"""`ReplicaContext.reduce_scatter`: the part of an all-reduce that belongs to a rank."""

from itertools import product

import numpy as np
import pytest
from support.contributions import HALVES, bits
from support.everywhere import raises_everywhere
from support.replicas import inside

from mpidist import CommunicationOptions
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.errors import InvalidArgumentError

pytestmark = pytest.mark.core


def part(strategy, whole, axis):
    return np.array_split(whole, strategy.topology.size, axis)[strategy.topology.rank]


def test_reduce_scatter_gives_ranks_their_part_of_the_all_reduce(comm, placement):
    with Strategy(comm=comm) as strategy:
        random = np.random.default_rng(comm.rank)
        shape = (comm.size + 2, 3 * comm.size - 1, 2)
        for dtype, op in product((np.float32, np.int8, ">f8", *HALVES), ("SUM", "MEAN", "MIN", "MAX", "PROD")):
            value = random.integers(1, 3, shape).astype(dtype)
            value.flags.writeable = False
            whole = strategy.reduce(op, value)
            for axis in (0, 1, -1):
                got, want = inside(strategy, "reduce_scatter", op, value, axis=axis), part(strategy, whole, axis)
                assert got.dtype == want.dtype
                assert got.shape == want.shape
                # halves are rounded once per phase
                assert np.allclose(got.astype(float), want.astype(float), rtol=1e-2), (dtype, op, axis)
        # fewer rows than ranks, and large arrays
        value = {"one": np.full(1, comm.rank + 1.0), "large": np.arange(700_003, dtype=np.float32), "none": np.ones(0)}
        got = inside(strategy, "reduce_scatter", "SUM", value)
        for name, array in value.items():
            assert np.array_equal(got[name], part(strategy, strategy.reduce("SUM", array), 0)), name
        options = CommunicationOptions(reproducible=True)
        value = np.random.default_rng(comm.rank).standard_normal(5000)
        whole = strategy.reduce("SUM", value, options=options)
        assert bits(inside(strategy, "reduce_scatter", "SUM", value, options=options)) == bits(part(strategy, whole, 0))


@pytest.mark.ranks(2, 3)
def test_axis_that_is_no_number_is_every_ranks_error(comm, strategy):
    for wrong in (True, 0.0, None, "0", (0,), object()):
        with raises_everywhere(comm, TypeError, "axis must be a whole number, got"):
            inside(strategy, "reduce_scatter", "SUM", np.ones((4, 4)), axis=wrong)
        assert strategy.reduce("SUM", 1.0) == comm.size
    with raises_everywhere(comm, InvalidArgumentError, "reduce_scatter: a scalar has no axis 0"):
        inside(strategy, "reduce_scatter", "SUM", 1.0)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.usefixtures("placement")
def test_reduce_scatter_of_many_small_arrays_makes_a_message_a_dtype(comm, axis):
    """A large, an empty and no small array are alone; the numbers are those of arrays that come one by one."""
    dtypes = np.float32, np.int16, np.float32, np.float16
    some = [np.full((1 + at % 7, 2 + at % 5), comm.rank + at, dtypes[at % 4], "CF"[at % 2]) for at in range(60)]
    value = [np.full((300, 300), comm.rank + 0.5), *some, np.ones((0, 0)), np.arange(4.0).reshape(2, 2)]
    with Strategy(comm=comm) as strategy:
        levels = parts_of(strategy).group.levels
        for op in ("SUM", "MEAN", "MAX"):
            whole = [part(strategy, strategy.reduce(op, one), axis) for one in value]
            levels.world.traffic.clear()
            levels.within_node.traffic.clear()
            got = inside(strategy, "reduce_scatter", op, value, axis=axis)
            calls = [its.traffic.calls.get("reduce_scatter", 0) for its in (levels.world, levels.within_node)]
            assert comm.size == 1 or max(calls) == 6
            for mine, wanted in zip(got, whole, strict=True):
                assert (mine.dtype, mine.shape) == (wanted.dtype, wanted.shape)
                assert np.allclose(mine, wanted)
            outs = [np.empty_like(one) for one in got]
            assert inside(strategy, "reduce_scatter", op, value, axis=axis, out=outs) is outs
            assert all(map(np.array_equal, outs, got))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("nodes", ["0,0,1,1", "0,1,0,1"])
def test_nodes_exchange_no_more_than_they_must(comm, nodes, monkeypatch):
    """S (K - 1) / K bytes per node of two: a quarter of S for each of its two ranks."""
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", nodes)
    with Strategy(comm=comm) as strategy:
        levels = parts_of(strategy).group.levels
        levels.world.traffic.clear()
        levels.across_nodes.traffic.clear()
        value = np.arange(8000.0) + comm.rank
        got = inside(strategy, "reduce_scatter", "SUM", value)
        assert np.array_equal(got, part(strategy, 4 * np.arange(8000.0) + 6, 0))
        assert levels.across_nodes.traffic.nbytes == {"reduce_scatter": value.nbytes // 4}
        assert not levels.world.traffic.nbytes
