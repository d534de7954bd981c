"""What is special in data sets where a rank carries several replicas, or puts their parts on GPUs."""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from host_cuda.gpus import gpus, one_node, require_gpus
from support.everywhere import raises_everywhere
from support.replicas import shared_ranks

from mpidist import InputContext, InputOptions, MirroredStrategy, PerReplica, Variable
from mpidist import MultiWorkerMirroredStrategy as MultiWorker
from mpidist.context_stack import parts_of
from mpidist.errors import InvalidArgumentError
from mpidist.transport import arrays

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["gpus", "one_node"]

PER_REPLICA = InputOptions(experimental_replication_mode="PER_REPLICA")


@pytest.fixture
def strategy(comm: Intracomm, replicas: int | None) -> Iterator[MultiWorker]:
    with MultiWorker(replicas=replicas, comm=comm) as made:
        yield made


def expected_parts(batch: Any, num_replicas: int) -> list[Any]:
    """Cut a batch by the number of replicas alone: lengths differ by one at most, longer parts first."""
    lengths = [len(batch) // num_replicas + (at < len(batch) % num_replicas) for at in range(num_replicas)]
    starts = [sum(lengths[:at]) for at in range(num_replicas)]
    return [batch[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def of_all_replicas(comm: Intracomm, value: Any) -> list[Any]:
    """List the components of all replicas, in the order of replicas. Collective."""
    assert type(value) is PerReplica
    mine = [np.asarray(part).tolist() for part in value.values]
    return [part for of_rank in comm.allgather(mine) for part in of_rank]


@pytest.mark.ranks(1)
@shared_ranks
def test_one_rank_with_replicas_compares_no_checksum(strategy: MultiWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zlib, "crc32", lambda *arguments: pytest.fail("there is nobody to compare with"))
    assert len(list(strategy.experimental_distribute_dataset([np.ones(4)]))) == 1


@pytest.mark.ranks(3)
def test_replicas_of_a_rank_must_make_batches_of_one_form(comm: Intracomm) -> None:
    last = 2 * comm.size - 1

    def make(context: InputContext) -> list[Any]:
        return [(np.ones(2), np.ones(2)) if context.input_pipeline_id == last else {"x": np.ones(2)}]

    with MultiWorker(replicas=2 * comm.size, comm=comm) as strategy:
        steps = iter(strategy.distribute_datasets_from_function(make, PER_REPLICA))
        with raises_everywhere(
            comm, InvalidArgumentError, f"replica {last} passes .* and replica {last - 1} .*one form"
        ):
            next(steps)
        assert list(steps) == []


@pytest.mark.ranks(3)
@shared_ranks
def test_pipelines_of_ranks_are_warned_of_once(
    comm: Intracomm, strategy: MultiWorker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "mpidist")
    list(strategy.distribute_datasets_from_function(lambda context: range(2), PER_REPLICA))
    list(strategy.experimental_distribute_dataset([np.ones(2)]))
    with MultiWorker(comm=comm) as other:
        list(other.distribute_datasets_from_function(lambda context: range(2)))
    assert caplog.messages == []
    dataset = strategy.distribute_datasets_from_function(lambda context: range(2))
    list(dataset)
    list(dataset)
    assert len(caplog.messages) == (comm.rank == 0)
    for text in caplog.messages:
        assert "depend on the number of ranks" in text
        assert "each of the 7 replicas" in text
        assert "experimental_replication_mode='per_replica'" in text


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mpidist.read_ahead"]


@pytest.mark.ranks(3)
@shared_ranks
@pytest.mark.parametrize("kind", ["global", "PER_WORKER", "PER_REPLICA"])
def test_steps_are_read_ahead(comm: Intracomm, strategy: MultiWorker, kind: str) -> None:
    mode = "PER_REPLICA" if kind == "PER_REPLICA" else "PER_WORKER"
    options = InputOptions(experimental_replication_mode=mode, experimental_per_replica_buffer_size=3)
    ahead, now = (
        strategy.experimental_distribute_dataset([np.arange(9) + step for step in range(6)], given)
        if kind == "global"
        else strategy.distribute_datasets_from_function(lambda context: [np.arange(3) + at for at in range(6)], given)
        for given in (options, InputOptions(experimental_replication_mode=mode))
    )
    assert [of_all_replicas(comm, part) for part in ahead] == [of_all_replicas(comm, part) for part in now]
    for part in ahead:
        assert len(part.values) == parts_of(strategy).replicas.num_here
        break
    wait_until(lambda: not readers())
    assert len(list(ahead)) == len(list(now))


@pytest.mark.usefixtures("one_node")
@pytest.mark.parametrize("first_kind", ["GPU", "CPU"])
def test_parts_are_put_on_the_devices_of_their_replicas(
    comm: Intracomm, gpus: Any, monkeypatch: pytest.MonkeyPatch, first_kind: str
) -> None:
    """On GPUs that one process may not have: the test notes which one would be current at each copy."""
    require_gpus(2 * comm.size)
    current: list[int] = []
    copied: list[tuple[int, list[int]]] = []
    to_device = arrays.to_device

    def noting(array: Any) -> Any:
        copied.append((current[-1], array.tolist()))
        return to_device(array)

    monkeypatch.setattr(arrays, "use_gpu", current.append)
    monkeypatch.setattr(arrays, "to_device", noting)
    devices = [f"{first_kind if at % 2 == 0 else 'GPU'}:{at}" for at in range(2 * comm.size)]
    with MirroredStrategy(devices, comm=comm) as strategy:
        batches = [{"x": np.arange(8)}]
        (part,) = strategy.experimental_distribute_dataset(batches)
        mine = range(2 * comm.rank, 2 * comm.rank + 2)
        on_gpus = [at for at in mine if devices[at].startswith("GPU")]
        expected = expected_parts(np.arange(8), 2 * comm.size)
        assert copied == [(at, expected[at].tolist()) for at in on_gpus]
        kinds = [np.ndarray if at not in on_gpus else gpus.cupy.ndarray for at in mine]
        assert [type(rows) for rows in part["x"].values] == kinds
        assert first_kind == "CPU" or current[-1] == mine[0]  # a rank's first device is its current one
        copied.clear()
        list(strategy.experimental_distribute_dataset(batches, InputOptions(experimental_fetch_to_device=False)))
        assert copied == []


def test_a_numpy_program_stays_one_where_the_strategy_finds_gpus(comm: Intracomm, gpus: Any) -> None:
    """The example of the README: only a GPU that has been named, or an option, makes batches CuPy arrays."""
    batches = [np.ones((2 * comm.size, 3))]
    with MultiWorker(comm=comm) as strategy, strategy.scope():
        weights = Variable(np.zeros((3, 2)))
        for x in strategy.experimental_distribute_dataset(batches):
            strategy.run(lambda x: weights.assign_sub(x.T @ (x @ weights - 1)), args=(x,))
        assert isinstance(weights.local_value(), np.ndarray)
        options = InputOptions(experimental_fetch_to_device=True)
        (part,) = strategy.experimental_distribute_dataset(batches, options)
        assert isinstance(part, gpus.cupy.ndarray) == parts_of(strategy).devices_here[0].is_gpu
