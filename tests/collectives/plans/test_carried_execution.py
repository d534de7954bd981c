"""Small arrays between nodes, which the comparison of the call carries to all ranks."""

import numpy as np
import pytest
from support.everywhere import raises_everywhere

import mpidist
from mpidist import CommunicationOptions
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.errors import InvalidArgumentError
from mpidist.transport.agreement import comparison_rounds
from mpidist.transport.agreement.comparison_rounds import carried_bytes

pytestmark = [pytest.mark.core, pytest.mark.ranks(2, 3, 4)]

DTYPES = ["f2", "f4", "f8", "g", "c8", "c16", "i1", "i8", "u4"]


@pytest.fixture(params=[None, 600.0], ids=["no deadline", "deadline"])
def strategy(comm, request, monkeypatch):
    """A strategy on two nodes. With a deadline there are two rounds a call."""
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", ",".join(str(rank % 2) for rank in range(comm.size)))
    with Strategy(None, CommunicationOptions(timeout_seconds=request.param), comm=comm) as made:
        yield made


def replica():
    return mpidist.get_replica_context()


def forms_of(strategy):
    """Which primitives of all ranks the calls since the last question took."""
    traffic = parts_of(strategy).group.levels.world.traffic
    names = [*traffic.calls]
    traffic.clear()
    return names


def test_carried_sums_are_those_of_numpy_in_rank_order(strategy, comm):
    random = np.random.default_rng(0)
    for step in range(40):
        dtypes = random.choice(DTYPES, random.integers(1, 4))
        shapes = [(int(random.integers(0, 3)), 1) for _ in dtypes]
        values = [
            [(random.integers(-9, 9, shape) / 4).astype(dtype) for dtype, shape in zip(dtypes, shapes, strict=True)]
            for _ in range(comm.size)
        ]
        own = [value.copy() for value in values[comm.rank]]
        forms_of(strategy)
        if step % 3 == 0:
            result = strategy.run(lambda own: replica().start_all_reduce("sum", own), (own,)).wait()
        else:
            out = own if step % 3 == 1 else [np.empty(2 * value.size, value.dtype)[::2] for value in own]
            out = [part.reshape(value.shape) for part, value in zip(out, own, strict=True)] if step % 3 == 2 else out
            result = strategy.run(lambda own, out: replica().all_reduce("sum", own, out=out), (own, out))
        for at, got in enumerate(result):
            want = np.zeros_like(values[0][at])
            for rank in range(comm.size):
                want = want + values[rank][at]
            np.testing.assert_array_equal(got, want)
            assert got.dtype == want.dtype
        if sum(value.nbytes for value in own):
            assert forms_of(strategy) == ["compare"]


def test_largest_array_that_is_carried_and_the_next_one_are_right(strategy, comm):
    most = carried_bytes(comm.size) // 4
    for count, is_carried in ((most, True), (most + 1, False)) * 2:
        forms_of(strategy)
        assert (strategy.reduce("mean", np.full(count, comm.rank, np.float32)) == (comm.size - 1) / 2).all()
        assert (forms_of(strategy) == ["compare"]) == is_carried


def test_differing_calls_of_carried_arrays_are_refused_on_all_ranks(strategy, comm):
    for step in range(4):
        is_odd = comm.rank == step % comm.size
        for other in (np.ones(2), np.ones(5000), "text"):
            with raises_everywhere(comm, InvalidArgumentError, "did not pass the same|cannot take a value"):
                strategy.reduce("sum", other if is_odd else np.ones(3))
        assert (strategy.reduce("sum", np.full(3, float(step))) == step * comm.size).all()


def test_many_ranks_carry_nothing(comm, monkeypatch):
    """Each would receive what all carry. Here many are more than one."""
    monkeypatch.setattr(comparison_rounds, "CARRYING_RANKS", 1)
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", ",".join(str(rank % 2) for rank in range(comm.size)))
    with Strategy(comm=comm) as strategy:
        assert strategy.reduce("sum", 1.5) == 1.5 * comm.size
        with raises_everywhere(comm, InvalidArgumentError, "did not pass the same"):
            strategy.reduce("sum", np.ones(2 + (comm.rank == 0)))
        assert "compare" not in forms_of(strategy)


def test_calls_that_are_not_compared_are_not_carried(comm, monkeypatch):
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", ",".join(str(rank % 2) for rank in range(comm.size)))
    monkeypatch.setenv("MPIDIST_CHECK", "0")
    with Strategy(comm=comm) as strategy:
        for timeout in (None, 600):
            options = CommunicationOptions(timeout_seconds=timeout)
            assert strategy.reduce("sum", 1.5, options=options) == 1.5 * comm.size
        assert "compare" not in forms_of(strategy)


def test_carried_numbers_of_chosen_replicas_are_added_in_the_order_of_the_tree(comm, monkeypatch):
    """The bits do not depend on the nodes."""
    value = np.random.default_rng(comm.rank).normal(size=10).astype(np.float32)
    results = []
    for nodes in ("0," * comm.size, ",".join(str(rank % 2) for rank in range(comm.size))):
        monkeypatch.setenv("MPIDIST_PRETEND_NODES", nodes.rstrip(","))
        with Strategy(comm=comm, replicas=comm.size) as strategy:
            for _ in range(2):
                reduced = strategy.run(lambda: replica().all_reduce("sum", value))
                results.append(strategy.experimental_local_results(reduced)[0].tobytes())
    assert len(set(results)) == 1
