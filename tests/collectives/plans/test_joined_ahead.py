"""Started calls between nodes whose comparison begins while the calls before them are under way."""

from contextlib import suppress
from itertools import product

import numpy as np
import pytest
from support.everywhere import raises_everywhere

import mpidist
from mpidist import CommunicationOptions
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.errors import DeadlineExceededError, InvalidArgumentError, PeerFailedError
from mpidist.transport.agreement.comparison_rounds import CarryingRounds
from mpidist.transport.group.started_calls import Workplace

pytestmark = [pytest.mark.core, pytest.mark.ranks(2, 3)]


@pytest.fixture(autouse=True)
def two_nodes(comm, monkeypatch):
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", ",".join(str(rank % 2) for rank in range(comm.size)))


@pytest.fixture(params=[None, 600.0], ids=["no deadline", "deadline"])
def strategy(comm, request):
    with Strategy(None, CommunicationOptions(timeout_seconds=request.param), comm=comm) as made:
        yield made


@pytest.fixture
def without_thread(monkeypatch):
    """Only the program itself advances its calls."""
    monkeypatch.setattr(Workplace, "of_thread", lambda _: ())


def agreement_of(strategy):
    return parts_of(strategy).group.agreement


def start(strategy, value, out=None, options=None):
    return strategy.run(lambda: mpidist.get_replica_context().start_all_reduce("sum", value, options, out=out))


def start_alike(strategy, num, first=0):
    return [start(strategy, np.full(3, float(at))) for at in range(first, first + num)]


def are_right(handles, size, first=0):
    return all((handle.wait() == at * size).all() for at, handle in enumerate(handles, first))


@pytest.mark.usefixtures("without_thread")
def test_started_calls_end_while_a_rank_that_has_started_them_does_other_work(comm):
    """All comparisons are under way at the same time, and MPI completes them while the last rank receives a message."""
    others = range(comm.size - 1)
    with Strategy(comm=comm) as strategy:
        handles = start_alike(strategy, 20)
        if comm.rank not in others:
            for rank in others:
                comm.recv(source=rank)
        assert are_right(handles, comm.size)
        if comm.rank in others:
            comm.send(None, comm.size - 1)


def test_more_started_calls_than_there_is_room_for_are_right(strategy, comm):
    assert are_right(start_alike(strategy, 150), comm.size)
    handles = start_alike(strategy, 70)
    assert (strategy.gather(np.ones(1), 0) == 1).all()
    assert all(handle.is_done() for handle in handles)
    assert (handles[-1].wait() == 69 * comm.size).all()
    assert are_right(handles, comm.size)


def test_longer_arrays_among_small_ones_are_right(strategy, comm):
    counts = [3, 3, 50_000, 3, 3, 3, 1000, 3, 3, 50_000]
    for _ in range(3):
        handles = [start(strategy, np.full(count, float(at))) for at, count in enumerate(counts)]
        assert are_right(handles, comm.size)


def test_unlike_call_at_every_position_is_an_error_of_that_call_alone(strategy, comm):
    blocking = object()
    others = [np.ones(2), np.ones(20_000), "text", blocking]
    for position, other in product(range(5), others):
        is_odd = comm.rank == position % comm.size
        handles, later = start_alike(strategy, position), []
        with raises_everywhere(comm, InvalidArgumentError, "did not pass the same|cannot take a value"):
            if is_odd and other is blocking:
                strategy.reduce("sum", np.ones(3))
            odd = start(strategy, other if is_odd else np.ones(3))
            later = start_alike(strategy, 5 - position)
            odd.wait()
        later = later or start_alike(strategy, 5 - position)
        assert are_right(handles, comm.size)
        assert are_right(later, comm.size)
    assert strategy.reduce("sum", 1) == comm.size


def test_started_call_reads_the_out_of_an_earlier_one_under_way(strategy, comm):
    for _ in range(3):
        value = np.ones(4)
        handles = [start(strategy, value[:3], out=value[:3]) for _ in range(4)]
        part = start(strategy, value[1:2])
        other = start(strategy, np.ones(1))
        assert (other.wait() == comm.size).all()
        assert (part.wait() == comm.size**5).all()
        assert all(handle.is_done() for handle in handles)
        assert value.tolist() == [comm.size**4] * 3 + [1]


def test_notice_between_started_calls_reaches_all_ranks(strategy, comm):
    handles = start_alike(strategy, 3)
    if comm.rank == comm.size - 1:
        agreement_of(strategy).notice.give("the test")
    handles += start_alike(strategy, 5, first=3)
    assert are_right(handles, comm.size)
    assert agreement_of(strategy).notice.reason == "the test"
    assert comm.allgather(agreement_of(strategy).notice.stop_step) == [1] * comm.size


@pytest.mark.usefixtures("without_thread")
def test_interrupt_while_a_call_is_joined_ahead_breaks_off(strategy, comm, monkeypatch):
    really, num_left = CarryingRounds.post_ahead, 3

    def interrupted(rounds, *words):
        nonlocal num_left
        num_left -= 1
        really(rounds, *words)
        if num_left == 0 and comm.rank == 0:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CarryingRounds, "post_ahead", interrupted)
        if comm.rank == 0:
            with pytest.raises(KeyboardInterrupt):
                start_alike(strategy, 5)
            with pytest.raises(RuntimeError, match="broken off on rank 0 by KeyboardInterrupt"):
                strategy.reduce("sum", 1)
        else:
            handles = start_alike(strategy, 5)
            with pytest.raises(PeerFailedError, match=r"rank 0 broke off in the middle of a call.*KeyboardInterrupt"):
                handles[-1].wait()
    comm.Barrier()
    strategy.reset()
    assert are_right(start_alike(strategy, 5), comm.size)


@pytest.mark.ranks(2)
def test_rank_that_starts_fewer_calls_is_named_when_the_deadline_has_passed(comm):
    with Strategy(None, CommunicationOptions(timeout_seconds=600.0), comm=comm) as strategy:
        handles, soon = start_alike(strategy, 3), CommunicationOptions(timeout_seconds=0.5)
        if comm.rank == 0:
            handles += [start(strategy, np.full(3, float(at)), options=soon) for at in range(3, 8)]
        assert are_right(handles[:3], comm.size)
        if comm.rank == 0:
            with pytest.raises(DeadlineExceededError, match="rank 1 of 2 ranks did not join it"):
                handles[3].wait()
            for handle in handles[4:]:
                with pytest.raises(DeadlineExceededError, match="an earlier call failed"):
                    handle.wait()
        comm.Barrier()
        strategy.reset()
        assert are_right(start_alike(strategy, 5), comm.size)


def test_reset_gives_up_calls_that_were_joined_ahead(strategy, comm):
    """Another rank may have the numbers of calls that this one gives up: then its results are right."""
    for _ in range(3):
        handles = start_alike(strategy, 2 if comm.rank else 6)
        if comm.rank:
            for at, handle in enumerate(handles):
                with suppress(PeerFailedError):
                    assert (handle.wait() == at * comm.size).all()
        strategy.reset()
        if comm.rank == 0:
            with pytest.raises(RuntimeError, match=r"given up by reset\(\)|reset\(\) gave up a call that was started"):
                handles[-1].wait()
        assert are_right(start_alike(strategy, 5), comm.size)


@pytest.mark.usefixtures("without_thread")
def test_calls_behind_one_that_a_function_makes_wait_for_it(strategy, comm):
    """The function may compare several calls."""
    ops = parts_of(strategy).cross_device_ops

    def function():
        return float(ops.all_reduce("sum", 1.0) + ops.all_reduce("sum", np.ones(500))[0])

    for _ in range(3):
        first = start_alike(strategy, 3)
        made = ops.group.calls.start_function(function)
        later = start_alike(strategy, 3)
        assert are_right(later, comm.size)
        assert are_right(first, comm.size)
        assert made.result == 2 * comm.size
