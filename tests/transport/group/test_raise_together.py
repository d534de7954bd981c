"""One rank's exception is everybody's, where the program wants it."""

import re

import numpy as np
import pytest
from transport.failures.clocks import let_time_pass, wait_for_late_rank

from mpidist import CommunicationOptions
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.errors import DeadlineExceededError, InvalidArgumentError, PeerFailedError

pytestmark = [pytest.mark.core, pytest.mark.ranks(3)]


def fail(error, if_):
    if if_:
        raise error


class Awkward(Exception):
    """An exception that does not come out of a copy as it went in."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


# Ranks that fail, and with what; the others raise an error of the same type, so that all handle it alike.
FAILURES = {
    "first rank": ([0], FileNotFoundError),
    "last rank": ([2], FileNotFoundError),
    "two ranks": ([1, 2], OSError),
    "end of the data": ([0], StopIteration),  # which no generator can raise
}


def test_raise_together_some_ranks_fail_all_raise_the_lowest_ranks_error(strategy):
    """And go on, as they do where none fails."""
    rank = strategy.topology.rank
    with strategy.raise_together("reading"):
        number = rank
    assert strategy.reduce("SUM", number) == 3
    for failing, kind in FAILURES.values():
        with pytest.raises(kind, match=rf"^mine is rank {failing[0]}$") as caught, strategy.raise_together("reading"):
            fail(kind(f"mine is rank {rank}"), rank in failing)
        if rank not in failing:
            cause = str(caught.value.__cause__)
            assert isinstance(caught.value.__cause__, PeerFailedError)
            assert cause.startswith(f"on rank {failing[0]} (")
            assert "test_raise_together.py" in cause  # where it was raised
            assert ("; also rank" in cause) == (len(failing) > 1)
        assert strategy.reduce("SUM", 1.0) == 3


def test_raise_together_ends_calls_in_the_block(strategy):
    """The others wait in another call: that is no hang either."""

    def train():
        with strategy.raise_together("training"):
            fail(KeyError("mine"), strategy.topology.rank == 1)
            strategy.reduce("SUM", 1.0)
            pytest.fail("the others go on")

    pattern = r"call: ranks? [^:]+: reduce; rank 1: raise_together\n  exception: .*rank 1: KeyError: 'mine'"
    with pytest.raises(InvalidArgumentError, match=pattern) as caught:
        train()
    if strategy.topology.rank == 1:
        assert isinstance(caught.value.__context__, KeyError)


def test_blocks_of_different_names_are_refused(strategy):
    block = strategy.raise_together("b" if strategy.topology.rank else "a")
    with pytest.raises(InvalidArgumentError, match=r"what: rank 0: a; ranks? 1.*: b"), block:
        pass


def test_raise_together_names_a_rank_late_in_the_block(comm, clock):
    strategy = Strategy(None, CommunicationOptions(timeout_seconds=600), comm=comm)
    if comm.rank == 0:
        let_time_pass(comm)
    else:
        wait_for_late_rank(clock, comm, 0, lambda: False)
        with pytest.raises(DeadlineExceededError, match=r"raise_together .* rank 0 of"), strategy.raise_together():
            pass
    clock.in_wait = lambda: None
    comm.Barrier()
    strategy.reset()
    strategy.close()


def test_interruptions_are_each_ranks_own(strategy):
    """Ctrl-C ends the program; nobody has to be asked."""
    with pytest.raises(KeyboardInterrupt), strategy.raise_together():
        raise KeyboardInterrupt
    assert strategy.reduce("SUM", 1.0) == strategy.topology.size


class Mute(Exception):
    """An exception that cannot say what it is."""

    def __str__(self):
        raise ValueError("no text")


class Odd(Exception):
    """An exception that only one rank knows."""


def test_raise_together_reports_strange_exceptions(strategy, monkeypatch):
    """Nobody is left waiting for a report that could not be made, or read."""
    rank = strategy.topology.rank
    for kind, pattern in ((Mute, ""), (Odd, ""), (Awkward, r"^rank 1: [\w.]*Awkward: this and that$")):
        error = kind("this", "that")
        if rank != 1 and kind is not Awkward:
            monkeypatch.delattr(f"{__name__}.{kind.__name__}")
        with pytest.raises(kind if rank == 1 else PeerFailedError) as caught, strategy.raise_together():
            fail(error, rank == 1)
        assert rank == 1 or re.search(pattern, str(caught.value))
    assert strategy.reduce("SUM", 1.0) == strategy.topology.size


def test_raise_together_shares_an_error_of_a_part_of_ranks(comm):
    part = comm.Split(comm.rank < 2, comm.rank)
    with Strategy(comm=comm) as strategy, Strategy(comm=part) as of_part:

        def work():
            with strategy.raise_together():
                of_part.reduce("SUM", np.ones(1 + (comm.rank == 1)))

        with pytest.raises(InvalidArgumentError, match="array 0"):
            work()
        assert strategy.reduce("SUM", 1.0) == comm.size
    part.Free()


def test_raise_together_closed_strategy_keeps_the_exception(comm):
    strategy = Strategy(comm=comm)

    def work():
        with strategy.raise_together():
            strategy.close()
            raise OSError("mine")

    with pytest.raises(RuntimeError, match="raise_together on a closed strategy") as caught:
        work()
    assert isinstance(caught.value.__cause__, OSError)
