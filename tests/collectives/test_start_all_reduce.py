"""Reductions that are started, and waited for later."""

import random
import time
from contextlib import suppress
from itertools import product

import numpy as np
import pytest
from support.deadlines import recorded_seconds
from support.everywhere import raises_everywhere
from support.placements import PLACEMENTS
from support.transports import TRANSPORTS
from support.used import least_called
from transport.failures.clocks import LONG_SECONDS

import mpidist
from mpidist import CommunicationOptions
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.errors import DeadlineExceededError, InvalidArgumentError, PeerFailedError
from mpidist.transport.agreement.mpi_agreement import MpiAgreement
from mpidist.transport.mpi.communicator import MpiCommunicator
from mpidist.transport.native.loading import native

pytestmark = pytest.mark.core

COUNTS = [3, 50_000, 1, 200_000, 7]  # elements: one round, many chunks


@pytest.fixture(params=product(TRANSPORTS, ["one node", "even"]), ids="-".join)
def strategy(comm, request, monkeypatch):
    """A strategy on every transport, on one node and on two."""
    over, nodes = request.param
    monkeypatch.setenv("MPIDIST_TRANSPORT", over)
    nodes_of_ranks = [PLACEMENTS[nodes](rank, comm.size) for rank in range(comm.size)]
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", ",".join(map(str, nodes_of_ranks)))
    with Strategy(comm=comm) as made:
        yield made


def start(strategy, value, op="SUM", **options):
    return strategy.run(lambda: mpidist.get_replica_context().start_all_reduce(op, value, **options))


def numbers(rank, at, count):
    """What a rank gives in its reduction number `at`."""
    return (np.arange(count) + 5 * rank + 11 * at) % 17.0


def total(strategy, at, count):
    return sum(numbers(rank, at, count) for rank in range(strategy.num_replicas_in_sync))


@pytest.mark.parametrize("order", ["in order", "last first", "at random"])
def test_waiting_in_any_order_of_each_rank(strategy, order):
    """The ranks need not wait in the same order: reductions are made in the order of their start."""
    rank = strategy.topology.rank
    for step in range(3):
        handles = [start(strategy, numbers(rank, at + step, count)) for at, count in enumerate(COUNTS)]
        indices = list(range(len(COUNTS)))
        if order == "last first":
            indices.reverse()
        elif order == "at random":
            random.Random(rank + 10 * step).shuffle(indices)
        for at in indices:
            result = handles[at].wait()
            assert (result == total(strategy, at + step, COUNTS[at])).all()
            assert handles[at].is_done()
            assert handles[at].wait() is result or (handles[at].wait() == result).all()


def test_any_other_call_finishes_those_under_way(strategy):
    rank, size = strategy.topology.rank, strategy.num_replicas_in_sync
    handles = [start(strategy, numbers(rank, at, count)) for at, count in enumerate(COUNTS)]
    assert strategy.reduce("MAX", float(rank)) == size - 1
    assert all(handle.is_done() for handle in handles)
    late = start(strategy, {"a": np.full(4, rank), "b": [np.float32(1)]}, "MEAN")
    assert (strategy.gather(np.full(1, rank), 0) == np.arange(size)).all()
    assert late.is_done()
    result = late.wait()
    assert (result["a"] == (size - 1) / 2).all()
    assert result["b"][0] == 1
    for at, handle in enumerate(handles):
        assert (handle.wait() == total(strategy, at, COUNTS[at])).all()


def test_start_all_reduce_completes_by_is_done_alone(strategy):
    """Without waiting, as a training loop does between two layers."""
    rank = strategy.topology.rank
    handle = start(strategy, numbers(rank, 1, 300_000))
    while not handle.is_done():
        time.sleep(0.0002)
    assert (handle.wait() == total(strategy, 1, 300_000)).all()


@pytest.mark.ranks(2, 3)
def test_mistakes_are_the_error_of_that_reduction_alone(strategy, comm):
    """No start waits to find out: another rank may be in a call of its own, where it waits for this one."""
    for _ in range(5):
        good = start(strategy, np.ones(5))
        bad = start(strategy, np.ones(5 + (comm.rank == comm.size - 1)))
        ugly = start(strategy, "text" if comm.rank == 0 else np.ones(3))
        if comm.rank == 0:
            time.sleep(0.002)  # all have started them
        after = start(strategy, np.ones(50_000))
        comm.Barrier()
        for _ in range(2):  # also when asked again
            with raises_everywhere(comm, InvalidArgumentError, "did not pass the same arguments"):
                bad.wait()
            with raises_everywhere(comm, InvalidArgumentError, "rank 0: InvalidTypeError: cannot take a value"):
                ugly.wait()
        assert (good.wait() == comm.size).all()
        assert (after.wait() == comm.size).all()
    assert strategy.reduce("SUM", 1) == comm.size


@pytest.mark.ranks(2, 3)
def test_start_all_reduce_wait_raises_at_its_deadline(strategy, comm):
    """From when it is waited for; and no reduction under way is forgotten."""
    if comm.rank == 0:
        options = CommunicationOptions(timeout_seconds=0.5)
        handles = [start(strategy, np.ones(10), options=options) for _ in range(2)]
        with pytest.raises(DeadlineExceededError, match=r"all_reduce \(call \d+\) on rank 0 waited 0.5 s"):
            handles[0].wait()
        assert recorded_seconds(strategy) >= 0.5
        with pytest.raises(DeadlineExceededError, match="an earlier call failed"):
            handles[1].wait()
    comm.Barrier()
    strategy.reset()
    assert (start(strategy, np.ones(10)).wait() == comm.size).all()


@pytest.mark.ranks(2)
def test_deadline_of_a_started_call_does_not_count_the_time_until_all_have_started_it(comm, monkeypatch, clock):
    """Where a thread moves the data, while the rank computes."""
    monkeypatch.setenv("MPIDIST_TRANSPORT", "mpi")
    with Strategy(None, CommunicationOptions(timeout_seconds=LONG_SECONDS / 2), comm=comm) as strategy:
        if comm.rank == comm.size - 1:
            comm.recv(source=0)
            really = MpiCommunicator.all_reduce
            monkeypatch.setattr(MpiCommunicator, "all_reduce", lambda *given: (time.sleep(0.05), really(*given)))
        handle = start(strategy, np.ones(300_000))
        if comm.rank == 0:
            clock.go_on()
            comm.send(None, comm.size - 1)
        while not handle.is_done():
            time.sleep(0.001)
        assert (handle.wait() == comm.size).all()


@pytest.mark.ranks(2, 3)
def test_start_all_reduce_given_up_by_reset_raises(strategy, comm):
    """A rank that starts what the others do not."""
    handle = start(strategy, np.ones(10)) if comm.rank == 0 else None
    comm.Barrier()
    strategy.reset()
    if handle is not None:
        with pytest.raises(RuntimeError, match=r"given up by reset\(\) before it was done; start it again"):
            handle.wait()
    assert (start(strategy, np.ones(10)).wait() == comm.size).all()


@pytest.mark.ranks(3)
def test_close_finishes_calls_under_way(comm):
    strategy = Strategy(comm=comm)
    handles = [start(strategy, np.full(count, 1.0)) for count in COUNTS]
    strategy.close()
    assert all((handle.wait() == comm.size).all() for handle in handles)
    with pytest.raises(RuntimeError, match="closed"):
        start(strategy, np.ones(1)).wait()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("placement", ["one node", "cyclic"], indirect=True)
def test_close_raises_the_error_of_a_call_that_another_rank_did_not_start(comm, placement):
    strategy, gradient = Strategy(comm=comm), np.ones(4)
    if comm.rank == 1:
        strategy.close()
        return
    start(strategy, gradient, out=gradient)
    with pytest.raises(PeerFailedError, match=r"rank 1 closed the strategy while rank 0 called start_all_reduce"):
        strategy.close()


@pytest.mark.ranks(2)
def test_close_raises_no_error_of_a_started_call_that_the_program_has_read(comm):
    for reads in (0, 2, None):
        strategy = Strategy(comm=comm)
        handles = [start(strategy, np.ones(4 + comm.rank)) for _ in range(3)]
        if reads is not None:
            with pytest.raises(InvalidArgumentError):
                handles[reads].wait()
            strategy.barrier()  # the others fail, too
            strategy.close()
        else:
            with pytest.raises(InvalidArgumentError, match="did not pass the same arguments"):
                strategy.close()


@pytest.mark.ranks(2)
def test_next_call_names_the_error_of_a_started_call(comm):
    strategy = Strategy(comm=comm)
    if comm.rank == 0:
        start(strategy, np.ones(4))
    with pytest.raises(PeerFailedError if comm.rank == 0 else InvalidArgumentError) as caught, strategy:
        strategy.barrier()
    assert comm.rank == 1 or "rank 1: barrier" in str(caught.value.__cause__)


@pytest.mark.ranks(1, 3)
def test_numpys_traps_for_overflow_are_left_alone(comm):
    """One rank lets NumPy raise where numbers overflow: the reduction gives infinity on all, and the trap stays."""
    huge = np.full(50_000, 3e38, np.float32)
    with Strategy(comm=comm) as strategy, np.errstate(all="raise" if comm.rank == 0 else "ignore"):
        for value in (huge, huge[:3], np.full(3, np.inf, np.float16)):
            ring = CommunicationOptions(implementation="RING")
            results = [
                start(strategy, value).wait(),
                *(strategy.reduce("SUM", value, options=its) for its in (None, ring)),
            ]
            for result in results:
                assert np.isinf(result).all() == (comm.size > 1 or value.dtype == np.float16)
        if comm.rank == 0:
            with pytest.raises(FloatingPointError):
                huge * huge


@pytest.mark.ranks(2, 3)
def test_starting_never_waits(strategy, comm):
    """Also with a deadline: ranks may have messages of their own to exchange between starting and waiting."""
    options = CommunicationOptions(timeout_seconds=600)
    for step in range(5):
        handles = [start(strategy, np.ones(count), options=options) for count in (3, 100_000)]
        comm.bcast(None, step % comm.size)
        time.sleep(0.002 * (comm.rank == step % comm.size))
        handles.append(start(strategy, np.ones(5), options=options))
        comm.Barrier()
        assert all((handle.wait() == comm.size).all() for handle in handles)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", ["strided", "shared", "list", "late"])
def test_started_call_like_an_earlier_one_meets_one_that_is_not(strategy, comm, kind):
    for count in (5, 50_000):
        shared, strided, private = strategy.symmetric_empty(count, float), np.empty(2 * count)[::2], np.empty(count)
        for step in range(6):
            is_odd = comm.rank == step % comm.size
            value = private if not is_odd or kind == "late" else shared if kind == "shared" else strided
            value[:] = np.arange(count) + step
            given = value if kind != "list" else [value, *([np.ones(3)] if step > 3 else [])]
            if kind == "late" and is_odd:
                time.sleep(0.002)
            handles = [start(strategy, given, out=given if step % 2 else None) for _ in range(1 if step % 2 else 3)]
            for handle in reversed(handles):
                result = handle.wait()
                first = result[0] if kind == "list" else result
                assert (first == comm.size * (np.arange(count) + step)).all()


@pytest.mark.ranks(2)
def test_started_call_like_an_earlier_one_passes_through_few_functions(comm):
    most = 50 if native is not None else 120
    with Strategy(comm=comm) as strategy:
        value = np.ones(5)
        assert least_called(comm, lambda: start(strategy, value, out=value).wait(), most) <= most


@pytest.mark.ranks(2)
def test_interrupt_that_the_program_catches_stays_the_error_of_its_call(comm, monkeypatch):
    with Strategy(comm=comm) as strategy:
        value = np.ones(5)
        if comm.rank == 0:
            handle = start(strategy, value, out=value)

            def interrupted(*_):
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(MpiAgreement, "have_all_arrived", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    handle.is_done()
            with suppress(Exception):
                start(strategy, np.ones(3))
            with pytest.raises(KeyboardInterrupt):
                handle.wait()
        comm.Barrier()
        strategy.reset()


@pytest.mark.ranks(2)
def test_start_all_reduce_is_done_after_another_rank_gave_up(comm):
    with Strategy(comm=comm) as strategy:
        assert all((start(strategy, np.ones(5)).wait() == comm.size).all() for _ in range(3))
        if comm.rank == 1:
            handle = start(strategy, np.ones(5))
            while not handle.is_done():
                time.sleep(0.001)
            with pytest.raises(PeerFailedError, match=r"rank 0 called reset\(\) instead"):
                handle.wait()
        strategy.reset()


def test_start_all_reduce_list_may_be_filled_anew(strategy):
    """Only the arrays belong to the reduction, not the list that they came in."""
    size = strategy.num_replicas_in_sync
    bucket = [np.ones(3), np.ones(50_000)]
    first = start(strategy, bucket)
    bucket.clear()
    bucket.append(np.full(2, 2.0))
    second = start(strategy, bucket)
    assert [part.tolist()[:2] for part in first.wait()] == [[size] * 2] * 2
    assert [part.tolist() for part in second.wait()] == [[2 * size] * 2]


@pytest.mark.ranks(3)
def test_started_call_of_another_strategy_gets_on_while_a_rank_waits(comm):
    """Ranks may wait for calls of two strategies in another order each, as with MPI's own non-blocking calls."""
    options = CommunicationOptions(timeout_seconds=600)
    with Strategy(None, options, comm=comm) as one, Strategy(None, options, comm=comm) as two:
        value = np.ones(1000, np.float32)

        def start():
            return mpidist.get_replica_context().start_all_reduce("sum", value)

        comm.Barrier()
        if comm.rank == 0:
            handle = two.run(start)
            assert one.reduce("sum", 1) == comm.size
            assert handle.wait()[0] == comm.size
        else:
            time.sleep(0.1)  # rank 0 waits in `one` already
            assert two.run(start).wait()[0] == comm.size
            assert one.reduce("sum", 1) == comm.size


@pytest.mark.ranks(3)
def test_started_calls_that_differ_show_the_line_of_each_start(comm, monkeypatch):
    """Between nodes a thread of the library may join them, and finds the difference."""
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", "0,1,2")

    def usual():
        return mpidist.get_replica_context().start_all_reduce("SUM", np.ones(3))

    def other():
        return mpidist.get_replica_context().start_all_reduce("SUM", np.ones(4))

    with Strategy(comm=comm) as strategy:
        handle = strategy.run(other if comm.rank == 1 else usual)
        lines = r"line: ranks 0, 2: \S*:\d+ in usual; rank 1: \S*:\d+ in other"
        with raises_everywhere(comm, InvalidArgumentError, lines):
            handle.wait()


@pytest.mark.ranks(3)
def test_calls_started_in_several_runs_are_compared_by_the_run_of_their_start(comm, monkeypatch):
    """Of a chosen number of replicas. A rank that joins a call late may be in a later run by then."""
    for nodes in ("0,0,0", "0,1,0"):
        monkeypatch.setenv("MPIDIST_PRETEND_NODES", nodes)
        with Strategy(comm=comm, replicas=comm.size) as strategy:
            for step in range(4):
                started = [start(strategy, np.full(50_000, float(at))) for at in range(6)]
                if comm.rank == step % comm.size:
                    strategy.experimental_local_results(started[0])[0].wait()
                started += [start(strategy, np.full(3, float(at))) for at in range(6, 12)]
                for at, handle in enumerate(started):
                    result = strategy.experimental_local_results(handle)[0].wait()
                    assert (result == at * comm.size).all()
