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


def no_memory(monkeypatch: pytest.MonkeyPatch, from_call: int = 2) -> None:
    """Let there be no memory for the results of the second dtype, once all have agreed on the call."""
    really, calls = RecycledResults.lend, []

    def fail(results: RecycledResults) -> Any:
        calls.append(1)
        if len(calls) >= from_call:
            raise MemoryError("Unable to allocate 9 TiB")
        return really(results)

    monkeypatch.setattr(RecycledResults, "lend", fail)


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
@pytest.mark.parametrize("fail", [no_memory, interrupted])
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
def test_want_of_memory_for_a_result_is_the_error_of_all(comm: Intracomm, call: Callable[[Strategy, Any], Any]) -> None:
    """Before data moves: the next call goes well."""
    value, last = np.full(1_000_000, 1.0), comm.size - 1
    with Strategy(comm=comm) as strategy:
        for _ in range(3):
            assert (call(strategy, value) == comm.size).all()
            with pytest.MonkeyPatch.context() as monkeypatch:
                if comm.rank == last:
                    no_memory(monkeypatch, from_call=1)
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
