"""Nobody waits for ever for a rank that does not come."""

import gc
import re
import signal
import time
import weakref
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from support.agreements import make_agreement
from support.alarms import RangError, alarm
from support.calls import every_call
from support.deadlines import options, recorded_seconds
from transport.failures.clocks import LONG_SECONDS, come_late, given_up

from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.errors import DeadlineExceededError, PeerFailedError
from mpidist.transport import waiting
from mpidist.transport.agreement.agreement import Call
from mpidist.transport.agreement.comparison_rounds import CarryingRounds
from mpidist.transport.failures import watchdog
from mpidist.transport.text import name_ranks

pytestmark = pytest.mark.core


def late(*ranks, size):
    """Return how an error speaks of ranks of one node that do not come, as a pattern."""
    return rf"{name_ranks(ranks)} of {size} ranks did not join it"


@pytest.mark.ranks(3)
def test_deadline_ends_a_call_of_one_rank_alone(strategy, comm):
    """And the strategy is broken until all reset it."""
    deadline, patient = options(0.5), options(600)
    assert strategy.reduce("SUM", 1.0, options=patient) == comm.size
    if comm.rank == 0:
        others = late(*range(1, comm.size), size=comm.size)
        pattern = rf"^reduce \(call 3\) on rank 0 waited 0.5 s, and {others}\. Every rank must make"
        with pytest.raises(DeadlineExceededError, match=pattern) as caught:
            strategy.reduce("SUM", 1.0, options=deadline)
        assert "flight" not in str(caught.value), "no files are wanted"
        assert recorded_seconds(strategy) >= 0.5
        for later in (lambda: strategy.reduce("SUM", 1.0), lambda: strategy.gather(np.ones(1), 0)):
            with pytest.raises(DeadlineExceededError, match=r"an earlier call failed.*reduce \(call 3\)"):
                later()
    comm.Barrier()
    if comm.rank:  # too late, and it says so
        with pytest.raises(DeadlineExceededError, match=r"^reduce \(call 3\).*rank 0 had given up"):
            strategy.reduce("SUM", 1.0, options=patient)
    comm.Barrier()
    strategy.reset()
    for _ in range(2):
        assert strategy.reduce("SUM", 1.0, options=patient) == comm.size
        assert strategy.gather(np.ones(1), 0).size == comm.size


@pytest.mark.ranks(3)
def test_late_rank_of_a_part_of_the_job_has_its_number_in_the_job(comm):
    part = comm.Split(min(comm.rank, 1))
    strategy = Strategy(comm=part)
    if comm.rank == 1:
        pattern = r"rank 1 of 2 ranks did not join it(.|\n)*\n  ranks 0-1 of this group: ranks 1-2 of the job"
        with pytest.raises(DeadlineExceededError, match=pattern):
            strategy.reduce("SUM", 1.0, options=options(0.5))
    comm.Barrier()
    strategy.reset()
    strategy.close()
    part.Free()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("number", [1, -1])
def test_deadline_names_the_late_rank(comm, number, clock):
    """And no other, wherever its lateness is found out first."""
    strategy = Strategy(None, options(600), comm=comm)
    odd = number % comm.size
    with given_up(clock, comm, odd), pytest.raises(DeadlineExceededError) as caught:
        strategy.reduce("SUM", 1.0)
    waited = rf"on rank {comm.rank} waited 600 s, and {late(odd, size=comm.size)}"
    told = rf"on rank {comm.rank} cannot complete: .* had given up waiting"
    assert re.search(told if comm.rank == odd else f"{waited}|{told}", str(caught.value))
    assert any(comm.allgather(" waited 600 s" in str(caught.value)))
    strategy.reset()
    assert strategy.reduce("SUM", 1.0) == comm.size
    strategy.close()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("variable", ["MPIDIST_PRETEND_NODES", "MPIDIST_TRANSPORT"])
def test_late_ranks_are_named_across_nodes_and_over_messages(comm, monkeypatch, variable, clock):
    """Nobody answers for a node whose ranks are all late, and that takes a moment to find out."""
    monkeypatch.setenv(variable, "mpi" if variable == "MPIDIST_TRANSPORT" else "0,1,2")
    strategy = Strategy(None, options(600), comm=comm)
    if comm.rank == 0:
        others = name_ranks(range(1, comm.size))
        unheard = variable == "MPIDIST_PRETEND_NODES"
        heard = r"rank 1: finished \w+ \(call 1\) 1\d\d\d\.\d s ago"
        last = rf"{others}: nothing was heard from host" if unheard else heard
        pattern = rf"(?s)waited 600 s, and {others} of {comm.size} ranks did not join it\. .*\n  {last}"
        clock.go_on_in_wait()
        with pytest.raises(DeadlineExceededError, match=pattern):
            strategy.reduce("SUM", 1.0)
    comm.Barrier()
    strategy.reset()
    assert strategy.reduce("SUM", 1.0) == comm.size
    strategy.close()


@pytest.mark.ranks(3)
def test_deadline_of_the_strategy_holds_for_all_calls(comm, clock, tmp_path):
    strategy, folder = Strategy(None, options(600), comm=comm), Path(comm.bcast(str(tmp_path)))
    pattern = rf"\(call \d+\) on rank 0 waited 600 s, and {late(*range(1, comm.size), size=comm.size)}"
    for name in every_call(strategy, folder):
        call = every_call(strategy, folder)[name]
        if comm.rank == 0:
            clock.go_on_in_wait()
            with pytest.raises(DeadlineExceededError, match=f"^{name} {pattern}"):
                call()
            with pytest.raises(DeadlineExceededError, match="an earlier call failed"):  # at once
                strategy.reduce("SUM", 1.0)  # which is a repeated one
        comm.Barrier()
        strategy.reset()
        assert strategy.reduce("SUM", 1.0) == comm.size, name
    strategy.close()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("given", [None, 0, 100 * LONG_SECONDS])
def test_deadline_none_or_long_waits_for_a_slow_rank(comm, given, clock):
    """0 and None are no deadline; 0 switches off the strategy's own."""
    with Strategy(None, options(600) if given is not None else None, comm=comm) as strategy:
        come_late(clock, comm, comm.size - 1)
        assert strategy.reduce("SUM", 1.0, options=options(given)) == comm.size


@pytest.mark.ranks(3)
@pytest.mark.parametrize("num_leaving", [1, 2])
def test_close_of_a_rank_is_named_on_the_others(strategy, comm, num_leaving):
    """It closes its strategy while the others call; nobody hangs, and all may close."""
    if comm.rank >= num_leaving:
        leavers = "rank 0" if num_leaving == 1 else "ranks 0-1"
        with pytest.raises(PeerFailedError, match=rf"{leavers} closed the strategy .* called reduce \(call 2\)"):
            strategy.reduce("SUM", 1.0)
        with pytest.raises(PeerFailedError, match=f"an earlier call failed.*{leavers}"):
            strategy.reduce("SUM", 1.0)
    strategy.close()
    strategy.close()
    with pytest.raises(RuntimeError, match="closed"):
        strategy.reduce("SUM", 1.0)


@pytest.mark.ranks(3)
def test_signal_handlers_run_while_a_rank_waits(strategy, comm, clock):
    """Ctrl-C is one; afterwards the strategy says what happened."""
    if comm.rank == 0:
        clock.do_in_wait(lambda: signal.raise_signal(signal.SIGALRM))
        with pytest.raises(RangError), alarm(600):
            strategy.reduce("SUM", 1.0)
        with pytest.raises(RuntimeError, match=r"reduce \(call 2\) was interrupted by RangError"):
            strategy.reduce("SUM", 1.0)
    comm.Barrier()
    strategy.reset()
    assert strategy.reduce("SUM", 1.0) == comm.size


@pytest.mark.ranks(3)
def test_signal_handler_cannot_make_calls_while_its_rank_waits_in_one(strategy, comm, clock):
    """The others would wait for this rank, and this rank for them. The call that it interrupts goes on."""

    text = r"(reduce|close\(\)) in the middle of reduce \(call 2\): a signal handler"

    def handle():
        try:
            for call in (lambda: strategy.reduce("SUM", 9.0, options=options(0.5)), strategy.close):
                with pytest.raises(RuntimeError, match=text):
                    call()
        finally:
            for other in range(1, comm.size):
                comm.send(None, other)

    if comm.rank == 0:
        clock.do_in_wait(handle)
    else:
        comm.recv(source=0)
    assert strategy.reduce("SUM", 1.0) == strategy.reduce("SUM", 1.0) == comm.size


@pytest.mark.ranks(3)
def test_closing_does_not_wait_for_ranks_that_gave_up(comm):
    """A program that ends must end: nobody else will come. A rank that has not heard of it yet learns it."""
    for ends in (Strategy.close, lambda strategy: parts_of(strategy).group.end_with_program()):
        strategy = Strategy(comm=comm)
        if comm.rank == 0:
            with pytest.raises(DeadlineExceededError):
                strategy.reduce("SUM", 1.0, options=options(0.2))
        comm.Barrier()
        learns = ends is Strategy.close and comm.rank > 0
        text = r"close\(\) \(call 2\) .* rank 0 had given up waiting"
        with pytest.raises(DeadlineExceededError, match=text) if learns else nullcontext():
            ends(strategy)
        strategy.close()


@pytest.mark.ranks(3)
def test_end_of_the_program_waits_for_slow_ranks(comm, monkeypatch, clock):
    """Longer than any deadline: they may have work of their own left. Then all free together."""
    from mpi4py import MPI

    monkeypatch.setenv("MPIDIST_TIMEOUT_SECONDS", "600")
    strategy = Strategy(comm=comm)
    world = parts_of(strategy).group.levels.world
    come_late(clock, comm, comm.size - 1)
    parts_of(strategy).group.end_with_program()
    assert world.comm == MPI.COMM_NULL


@pytest.mark.ranks(3)
def test_deadlines_work_without_checks(comm, monkeypatch):
    """`MPIDIST_CHECK=0`: a call with a deadline still waits for all ranks, and closing hangs on nobody."""
    monkeypatch.setenv("MPIDIST_CHECK", "0")
    strategy = Strategy(comm=comm)
    strategy.symmetric_empty(3, np.float32)  # in a window, which ranks can only free together
    assert strategy.reduce("SUM", 1.0, options=options(600)) == comm.size
    if comm.rank == 0:
        with pytest.raises(DeadlineExceededError, match=r"waited 0\.2 s"):
            strategy.reduce("SUM", 1.0, options=options(0.2))
        assert recorded_seconds(strategy) >= 0.2
    comm.Barrier()
    with pytest.raises(DeadlineExceededError) if comm.rank else nullcontext():
        strategy.close()


@pytest.mark.ranks(3)
def test_memory_that_mpi_may_still_write_is_never_freed(comm):
    """Requests of mpi4py do not hold the buffers of an all-reduce; a late rank's message lies in them."""
    agreement = make_agreement(comm, 0.2)
    rounds = vars(agreement)["_rounds"]
    assert isinstance(rounds, CarryingRounds)
    memory = [weakref.ref(array) for array in (rounds.sent, rounds.received)]
    if comm.rank == 0:
        with pytest.raises(DeadlineExceededError):
            agreement.join(Call("reduce", 0, dict))
    comm.Barrier()
    del agreement, rounds
    gc.collect()
    assert all((array() is not None) == (comm.rank == 0) for array in memory)


@pytest.mark.ranks(3)
def test_work_between_the_last_call_and_a_reset_counts_for_no_deadline(comm, monkeypatch, clock):
    monkeypatch.setenv("MPIDIST_TIMEOUT_SECONDS", "600")
    with Strategy(comm=comm) as strategy:
        time.sleep(0.05 * comm.rank)  # so that the others wait in the call
        assert strategy.reduce("SUM", 1.0) == comm.size
        clock.go_on()  # the ranks compute
        devices = parts_of(strategy).group.devices
        free = devices.free

        def free_slowly():
            time.sleep(0.05 * comm.rank)  # so that the others wait in the reset itself
            free()

        monkeypatch.setattr(devices, "free", free_slowly)
        strategy.reset()
        assert strategy.reduce("SUM", 1.0) == comm.size


@pytest.mark.ranks(4)
def test_rank_that_gave_up_and_resets_already_is_not_named_among_the_late(comm, monkeypatch):
    """Ranks of other nodes hear of it from a rank of its node, whose board shows it in the reset."""
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", "0,0,1,1")
    monkeypatch.setattr(watchdog, "_ANSWER_SECONDS", 5.0)
    with Strategy(comm=comm) as strategy:
        comm.Barrier()
        if comm.rank != 2:
            if comm.rank == 0:  # reads notes seldom
                monkeypatch.setattr(waiting, "_pause", lambda *_: time.sleep(0.47))
            with pytest.raises(DeadlineExceededError, match="did not join it" if comm.rank == 1 else late(2, size=4)):
                strategy.reduce("SUM", 1.0, options=options(3 if comm.rank == 1 else 600))
            comm.send(None, 2)
        else:
            for other in (0, 1, 3):
                comm.recv(source=other)
        strategy.reset()
        assert strategy.reduce("SUM", 1.0) == 4
