"""What ranks notice while they wait: long waits, calls that make no progress, resets that not all make."""

import re
import signal
import time

import numpy as np
import pytest
from support.agreements import warnings_of
from support.alarms import RangError, alarm
from support.deadlines import options
from support.reductions import all_reduce
from transport.failures.clocks import come_late, given_up, let_time_pass, wait_for_late_rank

import mpidist
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.errors import DeadlineExceededError, PeerFailedError
from mpidist.transport.agreement.mpi_agreement import MpiAgreement
from mpidist.transport.failures.call_watchdog import CallWatchdog
from mpidist.transport.failures.failure_notes import GAVE_UP
from mpidist.transport.failures.status_board import StatusBoard
from mpidist.transport.mpi.communicator import MpiCommunicator
from mpidist.transport.shared_memory.two_shot import TwoShot
from mpidist.transport.text import name_ranks
from mpidist.transport.waiting import poll

pytestmark = [pytest.mark.core, pytest.mark.ranks(3)]


def test_stall_warning_is_logged_once_on_nodes(comm, placement, monkeypatch, caplog, clock):
    """The missing ranks are named with what they did last, on all nodes where ranks wait."""
    monkeypatch.setenv("MPIDIST_STALL_SECONDS", "600")
    strategy = Strategy(comm=comm)
    topology, last = strategy.topology, comm.size - 1
    speakers = {ranks[0] for ranks in topology.nodes if ranks != (last,)}
    come_late(clock, comm, last, lambda: comm.rank not in speakers or bool(warnings_of(caplog)))
    assert strategy.reduce("SUM", 1.0) == comm.size
    told = warnings_of(caplog)
    assert len(told) == (comm.rank in speakers)
    known = "finished" if any(last in ranks and len(ranks) > 1 for ranks in topology.nodes) else "nothing was heard"
    for line in told:
        start = rf"mpidist: reduce \(call 2\) on rank {comm.rank} has waited for 1\d\d\d s, and rank {last} of "
        assert re.match(rf"{start}{comm.size} ranks did not join it; rank {last}: {known}", line)
        assert "\n" not in line
    caplog.clear()
    assert strategy.reduce("SUM", 1.0) == comm.size
    assert warnings_of(caplog) == []
    strategy.close()


def started_by(rank, size):
    """Return how an error speaks of a rank that has started a call and waits for nothing, as a pattern.

    Beside others that have not noticed yet that all have joined.
    """
    doing = r"started start_all_reduce \(call 2\) \d+\.\d s ago, and has not called wait\(\) or another call since"
    return rf"ranks? [^\n]*\b{rank}\b[^\n]* of {size} ranks makes? no progress.*rank {rank}: {doing}"


@pytest.mark.parametrize("away", [0, -1])
def test_rank_that_has_started_a_call_and_waits_nowhere_is_named(comm, clock, away):
    """Within a node nobody but the rank itself makes its part of a started call progress."""
    away %= comm.size
    strategy = Strategy(None, options(600), comm=comm)
    handle = strategy.run(lambda: mpidist.get_replica_context().start_all_reduce("sum", np.ones(2_000_000)))
    comm.Barrier()
    with given_up(clock, comm, away), pytest.raises(DeadlineExceededError) as caught:
        handle.wait()
    texts = comm.allgather(str(caught.value))
    found = [re.search(f"(?s)waited 600 s, and {started_by(away, comm.size)}", text) is not None for text in texts]
    assert not found[away]
    assert any(found)
    assert all(" had given up waiting" in text for text, is_first in zip(texts, found, strict=True) if not is_first)
    strategy.reset()
    strategy.close()


@pytest.mark.parametrize("away", [0, -1])
def test_stall_warning_names_a_rank_that_only_started_the_call(comm, monkeypatch, caplog, clock, away):
    monkeypatch.setenv("MPIDIST_STALL_SECONDS", "600")
    away %= comm.size
    speaker = 1 if away == 0 else 0
    with Strategy(comm=comm) as strategy:
        value = np.ones(2_000_000)
        handle = strategy.run(lambda: mpidist.get_replica_context().start_all_reduce("sum", value))
        comm.Barrier()
        come_late(clock, comm, away, lambda: comm.rank != speaker or bool(warnings_of(caplog)))
        assert handle.wait()[-1] == comm.size
    told = [line for line in warnings_of(caplog) if "start_all_reduce" in line.split(" on rank")[0]]
    assert len(told) == (comm.rank == speaker)
    assert all(re.search(started_by(away, comm.size), line) for line in told)


def test_building_a_strategy_waits_for_all_but_not_in_silence(comm, monkeypatch, caplog, clock):
    monkeypatch.setenv("MPIDIST_STALL_SECONDS", "600")
    come_late(clock, comm, comm.size - 1)
    Strategy(comm=comm).close()
    told = warnings_of(caplog)
    counts = comm.allgather(len(told))
    assert (sum(counts), counts[-1]) == (1, 0)  # one rank of the node tells it, and not the one that is late
    for line in told:
        assert re.match(rf"mpidist: building a strategy on rank {comm.rank} has waited \d\d\d\d s", line)


def fall_asleep_in(comm, patch, owner, method):
    """Let this rank fall asleep in the middle of a call, until the others have given up; what they sent is left."""
    really, is_asleep = getattr(owner, method), [False]

    def sleep(*given, **named):
        if not is_asleep[0]:
            is_asleep[0] = True
            let_time_pass(comm)
        while not all(comm.Iprobe(rank) for rank in range(comm.size) if rank != comm.rank):
            time.sleep(0.01)
        return really(*given, **named)

    patch.setattr(owner, method, sleep)


@pytest.mark.parametrize(
    ("transport", "owner", "method"), [("mpi", MpiCommunicator, "all_reduce"), ("shared_memory", TwoShot, "steps")]
)
def test_deadline_holds_while_data_move(comm, monkeypatch, transport, owner, method, clock):
    """All ranks have come, and one of them stops in the middle."""
    monkeypatch.setenv("MPIDIST_TRANSPORT", transport)
    strategy, last = Strategy(None, options(600), comm=comm), comm.size - 1
    all_reduce(strategy, "SUM", np.ones(1_000_000))
    value = np.ones(999_999)  # of whose call nothing is known, so that compiled code does not make all of it
    comm.Barrier()
    stuck = f"all {comm.size} ranks joined it, but its data did not come in time|ranks? .* makes? no progress"
    pattern = f"waited 600 s, and ({stuck})|had given up waiting"
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == last:
            fall_asleep_in(comm, patch, owner, method)

            def twice():  # the first one raises, if the others' parts have not all come before
                for _ in range(2):
                    all_reduce(strategy, "SUM", value)

            with pytest.raises(DeadlineExceededError, match="had given up waiting"):
                twice()
            for other in range(last):
                comm.recv(source=other)
        else:
            wait_for_late_rank(clock, comm, last, lambda: False)
            with pytest.raises(DeadlineExceededError, match=pattern):
                all_reduce(strategy, "SUM", value)
            clock.in_wait = lambda: None
            comm.send(None, last)
    comm.Barrier()
    strategy.reset()
    assert (all_reduce(strategy, "SUM", value) == comm.size).all()
    strategy.close()


def test_reset_of_some_ranks_ends_at_the_deadline(comm, monkeypatch, clock):
    monkeypatch.setenv("MPIDIST_TIMEOUT_SECONDS", "600")
    strategy = Strategy(comm=comm)
    if comm.rank == 0:
        pattern = rf"^reset\(\) on rank 0 waited 600 s, and {name_ranks(range(1, comm.size))} of .* did not join it"
        clock.go_on_in_wait()
        with pytest.raises(DeadlineExceededError, match=pattern):
            strategy.reset()
    comm.Barrier()
    if comm.rank:
        with pytest.raises(DeadlineExceededError, match=r"reset\(\) .* had given up"):
            strategy.reset()
    comm.Barrier()
    for _ in range(2):  # what was sent for the first one may still be under way
        with pytest.raises(DeadlineExceededError, match=r"an earlier reset\(\) failed.* start it again"):
            strategy.reset()
    comm.Barrier()


def test_reset_interrupted_on_one_rank_fails_on_all(comm, clock):
    strategy = Strategy(comm=comm)
    if comm.rank == 0:
        clock.do_in_wait(lambda: signal.raise_signal(signal.SIGALRM))
        with pytest.raises(RangError), alarm(600):
            strategy.reset()
    comm.Barrier()
    text = "an earlier reset() failed: reset() was interrupted by RangError"
    if comm.rank:
        text = f"reset() on rank {comm.rank} cannot complete: rank 0 broke off in the middle of a call"
    with pytest.raises(PeerFailedError if comm.rank else RuntimeError, match=re.escape(text)):
        strategy.reset()
    comm.Barrier()


def test_reset_during_a_call_of_others_is_named_at_once(comm, placement):
    with Strategy(comm=comm) as strategy:
        if comm.rank != 1:
            with pytest.raises(PeerFailedError) as caught:
                strategy.reduce("SUM", 1.0, options=options(600))
            instead = r"rank 1 called reset\(\) instead, after call 1"
            assert re.search(rf"{instead}|rank 1 of 3 ranks did not join it, and .* had given up", str(caught.value))
        strategy.reset()
        assert strategy.reduce("SUM", 1.0) == comm.size


def test_giving_up_on_the_next_call_does_not_fail_this_one(comm):
    """A rank may be at the end of a call still, when the others wait in the next one in vain."""
    own = comm.Dup()
    watch = CallWatchdog(own, StatusBoard(comm, range(comm.size)), ("here",) * comm.size)
    if comm.rank:
        watch.begin(2, "reduce", "", 0.1)
        watch.watchdog.tell(GAVE_UP, "")
    comm.Barrier()
    if comm.rank == 0:
        watch.begin(1, "reduce", "", None)
        for _ in range(50):
            watch.check_peers()
        watch.begin(2, "reduce", "", None)
        with pytest.raises(DeadlineExceededError, match=r"reduce \(call 2\) on rank 0 cannot complete: .* given up"):
            watch.check_peers()
    comm.Barrier()


def test_end_of_a_rank_after_a_call_leaves_others_time_to_complete_it(comm):
    """What the rank has sent for the call may need several tests of MPI still, but not for long."""
    own = comm.Dup()
    watch = CallWatchdog(own, StatusBoard(comm, range(comm.size)), ("here",) * comm.size)
    watch.begin(1, "reduce", "", None)
    if comm.rank == 1:
        watch.watchdog.tell_end("KeyError: 'mine'")
    comm.Barrier()
    if comm.rank == 0:
        while not watch.watchdog.has_notes():
            pass
        watch.check_peers()
        with pytest.raises(PeerFailedError, match=r"reduce \(call 1\) on rank 0 cannot complete: rank 1 ended"):
            poll(lambda: False, watch.check_peers)
    if comm.rank == 2:
        watch.begin(2, "reduce", "", None)
        while not watch.watchdog.has_notes():
            pass
        with pytest.raises(PeerFailedError, match=r"reduce \(call 2\) on rank 2 cannot complete: rank 1 ended"):
            watch.check_peers()
    comm.Barrier()


@pytest.mark.parametrize("is_heard", [True, False])
def test_stragglers_exclude_waiting_ranks_if_all_answer(comm, is_heard):
    """A rank that has not found that all joined may wait for that word from a host that is silent."""
    own, last = comm.Dup(), comm.size - 1
    board = StatusBoard(comm, range(comm.size))
    watch = CallWatchdog(own, board, ("here",) * comm.size)
    watch.begin(1, "reduce", "", None)
    if comm.rank == 0:
        watch.recorder.agree()
    comm.Barrier()
    if comm.rank == 0:
        near = range(comm.size if is_heard else last)
        statuses = {rank: status for rank, status in board.statuses().items() if rank in near}
        late = watch.stragglers(statuses, near, ("here",) * comm.size)
        assert late.ranks == (list(range(1, comm.size)) if is_heard else [last])
    comm.Barrier()


def test_reset_with_calls_under_way_raises_on_the_others(strategy, comm):
    """Others may wait for this rank's part of a call that was started."""
    value = np.ones(500_000)

    def step():
        handle = mpidist.get_replica_context().start_all_reduce("SUM", value)
        if comm.rank:
            handle.wait()

    if comm.rank:
        comm.recv(source=0)  # else rank 0 may do its part while it starts the call
        with pytest.raises(PeerFailedError, match=r"rank 0 (broke off|called reset)"):
            strategy.run(step)
    else:
        strategy.run(step)
        for other in range(1, comm.size):
            comm.send(None, other)
    strategy.reset()
    assert (all_reduce(strategy, "SUM", value) == comm.size).all()


def test_reset_and_close_receive_late_notes(comm, placement, monkeypatch):
    """MPI frees no communicator with messages left in it: those of long waits that ended well are taken before."""
    monkeypatch.setenv("MPIDIST_STALL_SECONDS", "0.05")
    strategy = Strategy(comm=comm)
    for number in range(6):
        if comm.rank == number % comm.size:
            time.sleep(0.06)
        assert strategy.reduce("SUM", 1.0) == comm.size
        if number == 3:
            strategy.reset()
    strategy.close()


@pytest.mark.parametrize("end", [Strategy.reset, Strategy.close])
def test_reset_and_close_send_no_notes_while_counting_them(comm, placement, end, monkeypatch):
    """The others would not know of it, and wait for the wrong number, all of them, for ever."""
    monkeypatch.setenv("MPIDIST_STALL_SECONDS", "0.05")
    strategy = Strategy(comm=comm)
    if comm.rank == 0:
        really = MpiAgreement.all_gather_object

        def late(agreement, item):
            time.sleep(0.3)
            return really(agreement, item)

        monkeypatch.setattr(MpiAgreement, "all_gather_object", late)
        time.sleep(0.2)
    assert strategy.reduce("SUM", 1.0) == comm.size
    end(strategy)
    comm.Barrier()
    strategy.close()


def test_notes_of_a_deadline_are_as_many_as_nodes_times_ranks(comm, monkeypatch, clock):
    """One rank of each node tells the other nodes: of pairs of ranks there are too many in a large job."""
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", "0,0,1")
    strategy = Strategy(comm=comm)
    comm.Barrier()
    pattern = r"rank 2 of 3 ranks did not join it|had given up"
    with given_up(clock, comm, 2), pytest.raises(DeadlineExceededError, match=pattern):
        strategy.reduce("SUM", 1.0, options=options(600))
    watchdog = parts_of(strategy).group.watchdog
    sent = comm.allgather(watchdog._notes.sent)
    assert sum(sent[0]) > 0
    assert sent[1][2] == 0
    strategy.close()
