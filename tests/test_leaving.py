"""Leaving a strategy: by an exception of one rank or of all, in a `finally` clause, and by its deadline."""

import gc
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from support.everywhere import raises_everywhere
from support.replicas import inside
from transport.failures.clocks import given_up

from mpidist import CollectiveAllReduce, CommunicationOptions
from mpidist import MultiWorkerMirroredStrategy as MultiWorker
from mpidist.errors import DeadlineExceededError, InvalidArgumentError, PeerFailedError

pytestmark = pytest.mark.ranks(3)

placed = pytest.mark.parametrize("placement", ["one node", "cyclic"], indirect=True)
LEFT = "rank 0 left because of an exception: KeyError: 'labels'"


class Converged(Exception):
    """What a program may use to leave its loops."""


@pytest.mark.core
@placed
@pytest.mark.parametrize("how", ["with", "finally", "bound"])
def test_exception_of_one_rank_reaches_the_others_at_their_next_call(comm, placement, how):
    """Also where that rank catches it outside, and goes on."""

    def fail_or_reduce():
        if comm.rank == 0:
            raise KeyError("labels")
        strategy.reduce("sum", 1.0)

    def leave_with():
        with strategy:
            fail_or_reduce()

    def leave_finally():
        try:
            fail_or_reduce()
        finally:
            strategy.close()

    def leave_bound():
        with CollectiveAllReduce().bind(comm) as ops:
            if comm.rank == 0:
                raise KeyError("labels")
            ops.reduce("sum", 1.0, "all")

    strategy = MultiWorker(comm=comm)
    strategy.reduce("sum", 1.0)
    with pytest.raises(KeyError if comm.rank == 0 else PeerFailedError, match="labels") as caught:
        {"with": leave_with, "finally": leave_finally, "bound": leave_bound}[how]()
    assert comm.rank == 0 or LEFT in str(caught.value)
    strategy.close()  # where it is open still, nothing is the matter with it
    with MultiWorker(comm=comm) as again:
        assert again.reduce("sum", 1) == comm.size


@pytest.mark.core
@placed
@pytest.mark.parametrize(("counts", "timeout"), [([2_000_000], None), ([20_000, 10, 300_000], 600.0)], ids=str)
def test_exception_of_one_rank_reaches_those_that_wait_for_a_call_that_it_started(comm, placement, counts, timeout):
    """A rank that has started a call has not done its part of the call."""

    def work():
        handles = [inside(strategy, "start_all_reduce", "sum", np.ones(count)) for count in counts]
        if comm.rank == 0:
            raise KeyError("labels")
        for handle, count in zip(handles, counts, strict=True):
            assert handle.wait().sum() == count * comm.size  # of what could be done nevertheless
        strategy.reduce("sum", 1.0)

    def leave():
        try:
            work()
        finally:
            strategy.close()

    strategy = MultiWorker(comm=comm, communication_options=CommunicationOptions(timeout_seconds=timeout))
    with pytest.raises(KeyError if comm.rank == 0 else PeerFailedError, match="labels") as caught:
        leave()
    assert comm.rank == 0 or LEFT in str(caught.value)
    with MultiWorker(comm=comm) as again:
        assert again.reduce("sum", 1) == comm.size


@placed
def test_exception_of_all_ranks_after_a_started_call_is_nobodys_failure(comm, placement):
    """A slow rank still has the result that a fast one waited for, who left with another reduction under way."""

    def train(slow):
        with MultiWorker(comm=comm) as strategy:
            for step in range(4):
                first = inside(strategy, "start_all_reduce", "sum", np.ones(200_000))
                second = inside(strategy, "start_all_reduce", "sum", np.ones(100))
                if comm.rank == slow:
                    time.sleep(0.003)
                assert (first.wait() == comm.size).all()
                if step == 3:
                    raise Converged
                assert (second.wait() == comm.size).all()

    for repeat in range(3):
        with pytest.raises(Converged):
            train(repeat % comm.size)
    with MultiWorker(comm=comm) as strategy:
        assert strategy.reduce("sum", 1) == comm.size


@pytest.mark.parametrize("how", ["option", "environment"])
def test_close_keeps_the_deadline_of_every_call(comm, monkeypatch, clock, how):
    if how == "environment":
        monkeypatch.setenv("MPIDIST_TIMEOUT_SECONDS", "600")
    options = CommunicationOptions(timeout_seconds=600) if how == "option" else None
    strategy = MultiWorker(None, options, comm=comm)
    with given_up(clock, comm, 0), pytest.raises(DeadlineExceededError, match=r"close\(\)") as caught:
        strategy.close()
    assert ("rank 0 of" if comm.rank else "given up waiting") in str(caught.value)
    strategy.close()
    comm.Barrier()


@pytest.mark.core
def test_error_of_some_ranks_reaches_the_others_of_a_larger_group_at_once(comm):
    """What a group of their own refused is nothing that all ranks of the larger group know."""
    part = comm.Split(int(comm.rank < 2))

    def fail_in_part():
        with MultiWorker(comm=comm) as everyone, MultiWorker(comm=part) as some:
            if comm.rank < 2:
                some.reduce("sum", np.ones(1 + comm.rank))
            everyone.reduce("sum", 1.0)

    with pytest.raises(InvalidArgumentError if comm.rank < 2 else PeerFailedError, match="did not pass the same"):
        fail_in_part()
    part.Free()


@pytest.mark.core
@pytest.mark.parametrize("timeout", [None, 600.0])
def test_reset_names_a_rank_that_has_left(comm, timeout):
    """And nothing advises to reset: a new strategy works."""
    strategy = MultiWorker(comm=comm, communication_options=CommunicationOptions(timeout_seconds=timeout))

    def work():
        with strategy:
            if comm.rank == 0:
                raise KeyError("labels")
            with pytest.raises(PeerFailedError, match="close it, and make a new one on all ranks") as caught:
                strategy.reduce("sum", 1.0)
            assert "reset()" not in str(caught.value).partition("\n")[0]
            strategy.reset()

    with pytest.raises(KeyError if comm.rank == 0 else PeerFailedError, match="labels") as caught:
        work()
    assert comm.rank == 0 or str(caught.value).startswith(f"reset() on rank {comm.rank} cannot complete: {LEFT}")
    with MultiWorker(comm=comm) as again:
        assert again.reduce("sum", 1) == comm.size


@pytest.mark.parametrize("is_left", [True, False], ids=["left", "closed"])
def test_reset_names_a_rank_closed_after_a_failed_call(comm, is_left):
    strategy = MultiWorker(comm=comm)
    if comm.rank == 0:
        with pytest.raises(DeadlineExceededError):
            strategy.reduce("sum", 1.0, options=CommunicationOptions(timeout_seconds=0.2))
        comm.Barrier()
        pattern = r"ranks? .+ closed the strategy after a call that had failed: reduce \(call 2\)\. .* make a new one"
        with pytest.raises(PeerFailedError, match=pattern):
            strategy.reset()
    else:
        comm.Barrier()
        with suppress(KeyError), strategy:
            with pytest.raises(DeadlineExceededError):
                strategy.reduce("sum", 1.0)
            if is_left:
                raise KeyError("labels")
    strategy.close()
    with MultiWorker(comm=comm) as again:
        assert again.reduce("sum", 1) == comm.size


def test_exception_that_was_handled_during_a_call_is_not_the_end_of_a_strategy(comm):
    """A function that closes what it used, called again by a handler."""
    strategy = MultiWorker(comm=comm)

    def train(value):
        try:
            return float(strategy.reduce("sum", value))
        finally:
            strategy.close()

    try:
        if comm.rank == 0:
            raise FileNotFoundError("cache")
        result = train(1.0)
    except FileNotFoundError:
        result = train(2.0)
    assert result == comm.size + 1


def test_leaving_ranks_give_their_error_to_the_one_that_handled_it(comm):
    def work():
        with MultiWorker(comm=comm) as strategy:
            try:
                strategy.reduce("sum", np.ones(1 + comm.rank))
            except InvalidArgumentError:
                if comm.rank:
                    raise
            strategy.reduce("sum", 1.0)

    with pytest.raises(InvalidArgumentError if comm.rank else PeerFailedError, match="did not pass the same") as caught:
        work()
    assert comm.rank or "closed the strategy, because of an exception: mpidist.errors.Invalid" in str(caught.value)


def test_call_of_a_finally_clause_that_no_other_rank_makes_names_the_exception(comm):
    def fail():
        try:
            raise KeyError("labels")
        finally:
            strategy.reduce("sum", 1.0)

    with MultiWorker(comm=comm) as strategy:
        with raises_everywhere(comm, InvalidArgumentError, "exception: rank 0: KeyError: 'labels'; ranks? [0-9-]+: -"):
            fail() if comm.rank == 0 else strategy.barrier()
        assert strategy.reduce("sum", 1) == comm.size


def test_strategy_that_an_exception_ended_gives_its_memory_back(comm):
    def shared_kib():
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssShmem")]
        return int(line.split()[1])

    def fail():
        with MultiWorker(comm=comm) as strategy:
            strategy.reduce("sum", np.ones(1 << 18))
            raise Converged

    used = []
    for _ in range(4):
        with pytest.raises(Converged):
            fail()
        gc.collect()
        used.append(shared_kib())
    assert used[-1] - used[0] < 5 * 1024, used  # it took 4 MiB and more, each time
