"""A rank that fails in the middle of a call: nobody gets wrong numbers, and nobody waits."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.alarms import RangError, alarm
from support.everywhere import raises_everywhere
from support.reductions import all_reduce

import mpidist
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.errors import DeadlineExceededError, InvalidArgumentError, PeerFailedError
from mpidist.transport import RecycledResults, native
from mpidist.transport.node_memory import NodeBarrier
from mpidist.transport.shared_memory import TwoShot

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

pytestmark = pytest.mark.core

several = pytest.mark.ranks(min=2)


def start(strategy: Strategy, value: Any, **options: Any) -> Any:
    return strategy.run(lambda: mpidist.get_replica_context().start_all_reduce("SUM", value, **options).wait())


def reduce(strategy: Strategy, value: Any) -> Any:
    return all_reduce(strategy, "SUM", value)


def no_memory(*_: Any, **__: Any) -> None:
    raise MemoryError("Unable to allocate 9 TiB")


def memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be no memory once all have agreed on the call."""
    monkeypatch.setattr(TwoShot, "steps", no_memory)


def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ctrl-C come while the rank is in its third barrier from now; before that one, if compiled code passes it."""
    if native is not None:
        monkeypatch.setattr(TwoShot, "steps", interrupt)
        return
    really, calls = NodeBarrier.post, []

    def post(barrier: NodeBarrier) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        really(barrier)

    monkeypatch.setattr(NodeBarrier, "post", post)


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@several
@pytest.mark.parametrize("call", [reduce, start], ids=["all_reduce", "start_all_reduce"])
@pytest.mark.parametrize("fail", [memory_ends, interrupted])
def test_the_others_raise_at_once_and_nobody_goes_on(
    comm: Intracomm, fail: Callable[[pytest.MonkeyPatch], None], call: Callable[[Strategy, Any], Any]
) -> None:
    """The rank has its own error, the others are told of it, and all have to reset."""
    value = [np.full(1_000_000, 1.0), np.full(1_000_000, 1.0, np.float32)]
    strategy = Strategy(comm=comm)
    assert all((result == comm.size).all() for result in call(strategy, value))
    last = comm.size - 1
    begun = time.monotonic()
    if comm.rank == last:
        with pytest.MonkeyPatch.context() as monkeypatch:
            fail(monkeypatch)
            with pytest.raises((MemoryError, KeyboardInterrupt)):
                call(strategy, value)
        for _ in range(3):
            with pytest.raises(RuntimeError, match=rf"an earlier call failed.* was broken off on rank {last} by \w+"):
                call(strategy, value)
    else:
        with pytest.raises(PeerFailedError, match=rf"rank {last} broke off in the middle of a call, with an error"):
            call(strategy, value)
        with pytest.raises(PeerFailedError, match="an earlier call failed"):
            call(strategy, value)
    assert time.monotonic() - begun < 10
    comm.Barrier()
    strategy.reset()
    assert all((result == comm.size).all() for result in call(strategy, value))
    strategy.close()


@several
@pytest.mark.parametrize("call", [reduce, start], ids=["all_reduce", "start_all_reduce"])
@pytest.mark.parametrize("num_arrays", [1, 3])
def test_want_of_memory_for_a_result_is_the_error_of_all(
    comm: Intracomm, placement: tuple[int, ...], call: Callable[[Strategy, Any], Any], num_arrays: int
) -> None:
    """Before data moves: the next call goes well."""
    value: Any = [np.full(1_000_000, 1.0)] * num_arrays
    last = comm.size - 1
    with Strategy(comm=comm) as strategy:
        for _ in range(3):
            assert all((result == comm.size).all() for result in call(strategy, value))
            with pytest.MonkeyPatch.context() as monkeypatch:
                if comm.rank == last:
                    monkeypatch.setattr(RecycledResults, "lend", no_memory)
                with raises_everywhere(
                    comm, InvalidArgumentError, f"rank {last}: MemoryError: Unable to allocate 9 TiB"
                ):
                    call(strategy, value)


@several
@pytest.mark.parametrize("milliseconds", [1, 2, 3, 5, 8])
def test_a_signal_handler_that_raises_anywhere(comm: Intracomm, milliseconds: float) -> None:
    """On one rank, while all go on with calls: right numbers or an error, on every rank."""
    value = np.full(300_000, comm.rank + 1.0)
    total = comm.size * (comm.size + 1) / 2
    with Strategy(comm=comm) as strategy:
        errors: list[BaseException] = []
        gc.collect()  # what a handler raises while memory of earlier tests is given back, Python ignores
        comm.Barrier()  # a rank that is still making its strategy would have none to reset
        try:
            with alarm(milliseconds / 1000 if comm.rank == 0 else 60):
                end = time.monotonic() + 20
                while time.monotonic() < end:
                    assert (reduce(strategy, value) == total).all()
        except (RangError, PeerFailedError, DeadlineExceededError, InvalidArgumentError) as error:
            errors.append(error)  # the last is of all ranks: it came while this rank looked at its arguments
        if isinstance(errors[0], RangError):
            strategy.extended.group.break_off(errors[0])  # if it came between two calls
        assert len(errors) == 1
        comm.Barrier()
        strategy.reset()
        assert (reduce(strategy, value) == total).all()


@pytest.mark.parametrize("num_arrays", [1, 600])
@pytest.mark.parametrize("name", ["all_reduce", "start_all_reduce", "broadcast", "all_gather", "reduce_scatter"])
def test_results_larger_than_the_node_are_refused_at_once(comm: Intracomm, name: str, num_arrays: int) -> None:
    """Whatever the system promises, and without a plan of every chunk; the next call goes well."""
    value = [np.broadcast_to(np.float32(1), 600_000_000_000 // num_arrays)] * num_arrays
    with Strategy(comm=comm) as strategy:
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: reduce(strategy, value),
            "start_all_reduce": lambda: start(strategy, value),
            "broadcast": lambda: strategy.broadcast(value),
            "all_gather": lambda: strategy.gather(value, 0),
            "reduce_scatter": lambda: strategy.run(
                lambda: mpidist.get_replica_context().reduce_scatter("SUM", value * comm.size)
            ),
        }
        with pytest.raises(MemoryError, match=r"the results of one rank need \d+ GiB of new memory, and its node has"):
            calls[name]()
        assert strategy.reduce("SUM", 1) == comm.size
