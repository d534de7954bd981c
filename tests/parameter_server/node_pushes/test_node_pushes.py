"""Pushes that the workers of a node make together: one a node, of the sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from parameter_server.clusters import on_workers

from mpidist import CommunicationOptions, IndexedSlices, Variable
from mpidist.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from mpidist.experimental import ParameterServerStrategy, coordinator, partitioners, server_rules

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

PUSHES = 5


@server_rules.register("counts pushes")
def count(value: Any, gradient: Any, memory: Any) -> None:
    """Count in the first number, and add to the others."""
    value[0] += 1
    value[1:] += gradient[1:]


@server_rules.register("fails at 7")
def fail(value: Any, gradient: Any, memory: Any) -> None:
    if gradient[0] >= 7:
        raise ValueError("too much")
    value += gradient


COUNTS = server_rules.Registered("counts pushes")
FAILS = server_rules.Registered("fails at 7")


def num_nodes_of(strategy: ParameterServerStrategy) -> int:
    return strategy.topology.num_nodes


@pytest.mark.core
@pytest.mark.parametrize("num_ps", [1, 2])
def test_a_server_gets_one_push_a_node(comm: Intracomm, placement: Sequence[int], num_ps: int) -> None:
    if 1 < comm.size <= num_ps:
        return

    def work(strategy: ParameterServerStrategy) -> None:
        rank, workers = strategy.topology.rank, strategy.topology.size
        with strategy.scope():
            both = [Variable(np.zeros(4)), Variable(np.zeros((300, 1000)))]
        large = np.full((300, 1000), rank + 1.0)
        for step in range(PUSHES):
            strategy.push(both, [np.full(4, rank + 1.0), large], COUNTS)
            own = (step + 1) * (rank + 1)
            assert both[0].numpy()[1] >= own  # a worker reads its own changes
            assert both[1].numpy()[-1, -1] >= own
            both[0].assign_add([0.0, 0.0, 0.0, 1.0])  # of this worker alone
        strategy.barrier()
        total = PUSHES * workers * (workers + 1) / 2
        for value in strategy.read(both):
            assert value.reshape(-1)[0] == PUSHES * num_nodes_of(strategy)
            assert value.reshape(-1)[-1] == total + (PUSHES * workers if value.ndim == 1 else 0)
        strategy.barrier()

    on_workers(comm, work, num_ps=num_ps, aggregate_in_node=True)


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32"])
def test_sums_are_in_the_order_of_workers(comm: Intracomm, dtype: str) -> None:
    """Also where arrays of several dtypes go together, and all workers hold different numbers."""

    def of(rank: int) -> Any:
        return (np.random.default_rng(rank).normal(size=70_001) * 100).astype(dtype)

    def work(strategy: ParameterServerStrategy) -> None:
        with strategy.scope():
            variables = [Variable(np.zeros(3)), Variable(np.zeros(70_001, dtype)), Variable(np.zeros((), np.int64))]
        for _ in range(2):
            strategy.push(variables, [np.ones(3), of(strategy.topology.rank), 1], "assign_sub")
        strategy.barrier()
        workers = strategy.topology.size
        wide = np.float32 if dtype == "float16" else dtype
        total = of(0).astype(wide)
        for rank in range(1, workers):
            total = total + of(rank).astype(wide)
        once = -total.astype(dtype)
        first, second, third = strategy.read(variables)
        np.testing.assert_array_equal(second, once + once)
        assert (first[0], third) == (-2 * workers, -2 * workers)

    on_workers(comm, work, aggregate_in_node=True)


@pytest.mark.parametrize("num_ps", [1, 2])
def test_rows_of_all_workers_arrive(comm: Intracomm, placement: Sequence[int], num_ps: int) -> None:
    """Also where some workers have none, and in shards."""
    if 1 < comm.size <= num_ps:
        return

    def work(strategy: ParameterServerStrategy) -> None:
        rank, workers = strategy.topology.rank, strategy.topology.size
        with strategy.scope():
            table, bias = Variable(np.zeros((20, 3))), Variable(np.zeros(2))
        for step in range(PUSHES):
            rows = np.arange(rank if step % 2 else 0)
            strategy.push([table, bias], [IndexedSlices(np.ones((rows.size, 3)), 19 - rows), np.ones(2)])
        strategy.barrier()
        expected = [2.0 * max(0, workers - 1 - row) for row in range(20)]
        np.testing.assert_array_equal(table.numpy()[::-1, 1], expected)
        assert bias.numpy()[0] == PUSHES * workers

    cut = partitioners.FixedShardsPartitioner(2)
    on_workers(comm, work, num_ps=num_ps, variable_partitioner=cut, aggregate_in_node=True)


def test_who_waits_for_all_workers_is_not_awaited(comm: Intracomm, placement: Sequence[int]) -> None:
    """Workers make unlike numbers of pushes, come together, and push on."""

    def work(strategy: ParameterServerStrategy) -> None:
        rank, workers = strategy.topology.rank, strategy.topology.size
        with strategy.scope():
            variable = Variable(np.zeros(3))
        for epoch in range(1, 21):
            for _ in range((rank + epoch) % 4):
                strategy.push(variable, np.ones(3))
            strategy.barrier()
            expected = sum((other + past) % 4 for other in range(workers) for past in range(1, epoch + 1))
            assert variable.numpy()[0] == expected
            strategy.barrier()

    on_workers(comm, work, aggregate_in_node=True)


def test_who_has_ended_is_not_awaited(comm: Intracomm, placement: Sequence[int]) -> None:
    def work(strategy: ParameterServerStrategy) -> float:
        with strategy.scope():
            variable = Variable(np.zeros(3))
        for _ in range(20 * strategy.topology.rank + 1):
            strategy.push(variable, np.ones(3))
        return float(variable.numpy()[0])

    values = on_workers(comm, work, aggregate_in_node=True)
    if placement.count(placement[0]) == comm.size:  # on one node, all push at once
        assert values[-1] == sum(20 * rank + 1 for rank in range(len(values)))


def test_what_differs_is_refused_before_data_moves(comm: Intracomm) -> None:
    def work(strategy: ParameterServerStrategy) -> None:
        rank, workers = strategy.topology.rank, strategy.topology.size
        with strategy.scope():
            one, other = Variable(np.zeros(3), name="one"), Variable(np.zeros(4), name="other")
        last = rank == workers - 1
        if workers > 1:
            with pytest.raises(InvalidArgumentError, match=r"(?s)same.*array 0: 'one' float64\[3\].*'other' float64"):
                strategy.push(other if last else one, 1.0)
            with pytest.raises(InvalidArgumentError, match=r"update: assign_add on rank"):
                strategy.push(one, 1.0, "assign_sub" if last else "assign_add")
            with pytest.raises(InvalidArgumentError, match="array 0: none on rank"):
                strategy.push(one, IndexedSlices(np.ones(1), [0]) if last else 1.0)
            with pytest.raises(ValueError if last else InvalidArgumentError, match=r"shape \[3\]"):
                strategy.push(one, np.ones(2 if last else 3))
            with pytest.raises(ValueError, match="a sum is not assigned"):
                strategy.push(one, 1.0, "assign")
        strategy.push(one, 1.0)
        strategy.barrier()
        assert one.numpy().tolist() == [workers] * 3
        assert other.numpy().tolist() == [0.0] * 4

    on_workers(comm, work, aggregate_in_node=True)


def test_what_fails_on_a_server_is_an_error_of_all_workers(comm: Intracomm) -> None:
    def work(strategy: ParameterServerStrategy) -> None:
        workers = strategy.topology.size
        with strategy.scope():
            variable = Variable(np.zeros(3))
        if comm.size == 1:
            return
        strategy.push(variable, 7.0, FAILS)
        with pytest.raises(RuntimeError, match="too much"):
            variable.numpy()
        strategy.push(variable, 1.0, FAILS)
        strategy.barrier()
        assert variable.numpy()[0] == workers

    on_workers(comm, work, aggregate_in_node=True)


def test_a_push_after_one_that_failed_is_of_all_workers_or_of_none(comm: Intracomm) -> None:
    """One worker learns of the failure when it reads, the others when they push, and yet they push on alike."""

    def work(strategy: ParameterServerStrategy) -> None:
        workers = strategy.topology.size
        with strategy.scope():
            variable = Variable(np.zeros(3))
        if workers < 2:
            return
        strategy.push(variable, 7.0, FAILS)
        if strategy.is_chief:
            with pytest.raises(RuntimeError, match="too much"):
                variable.numpy()
        with pytest.raises((RuntimeError, InvalidArgumentError), match=r"an error on a worker|too much"):
            strategy.push(variable, 2.0)
        strategy.push(variable, 1.0)
        strategy.barrier()
        assert variable.numpy().tolist() == [workers] * 3

    on_workers(comm, work, aggregate_in_node=True)


def test_who_was_late_for_the_others_pushes_no_more(comm: Intracomm) -> None:
    """Nobody knows which of their pushes its next one would belong to."""

    def work(strategy: ParameterServerStrategy) -> None:
        workers = strategy.topology.size
        with strategy.scope():
            variable = Variable(np.zeros(3))
        if workers < 2:
            return
        others = range(workers - 1)
        if comm.rank not in others:
            with pytest.raises(DeadlineExceededError, match="did not make this call"):
                strategy.barrier()
            with pytest.raises(DeadlineExceededError, match="did not make this call"):
                strategy.push(variable, 100.0)
            for rank in others:
                comm.send(None, rank)
        else:
            for _ in range(2):
                strategy.push(variable, 1.0)
            comm.recv(source=workers - 1)
        strategy.barrier()
        assert variable.numpy().tolist() == [2 * (workers - 1)] * 3
        strategy.barrier()
        if comm.rank in others:
            strategy.push(variable, 1.0)

    options = CommunicationOptions(timeout_seconds=5)
    on_workers(comm, work, aggregate_in_node=True, communication_options=options)


def test_wrong_input_is_refused(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="aggregate_in_node must be True or False, got 'yes'"):
        ParameterServerStrategy(comm=comm, aggregate_in_node="yes")  # type: ignore[arg-type]
    if comm.size > 1:
        with pytest.raises(InvalidArgumentError, match="aggregate_in_node must be the same on all ranks"):
            ParameterServerStrategy(comm=comm, aggregate_in_node=comm.rank == 0)

    def work(strategy: ParameterServerStrategy) -> None:
        with pytest.raises(ValueError, match="aggregate_in_node=False"):
            coordinator.ClusterCoordinator(strategy)

    if comm.size > 1:
        on_workers(comm, work, aggregate_in_node=True)
    if comm.size > 2:
        monkeypatch.setenv("MPIDIST_TRANSPORT", "mpi")
        with pytest.raises(UnavailableError, match="needs shared memory on each node, and ranks 0"):
            ParameterServerStrategy(comm=comm, aggregate_in_node=True)
