"""A rank that fails in the middle of a call: nobody gets wrong numbers, and nobody waits."""

import gc
import sys
from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest
from support.alarms import RangError, alarm
from support.everywhere import raises_everywhere
from support.reductions import all_reduce

import mpidist
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.errors import DeadlineExceededError, InvalidArgumentError, PeerFailedError
from mpidist.transport import arrays
from mpidist.transport.host_memory.result_memory import RecycledResults, ResultMemory
from mpidist.transport.native.loading import native
from mpidist.transport.node_memory.barrier import NodeBarrier
from mpidist.transport.shared_memory.two_shot import TwoShot

pytestmark = pytest.mark.core


def start(strategy, value, **options):
    return strategy.run(lambda: mpidist.get_replica_context().start_all_reduce("SUM", value, **options).wait())


def reduce(strategy, value):
    return all_reduce(strategy, "SUM", value)


def no_memory(*_, **__):
    raise MemoryError("Unable to allocate 9 TiB")


def memory_ends(monkeypatch):
    """Let there be no memory once all have agreed on the call."""
    monkeypatch.setattr(TwoShot, "steps", no_memory)


def interrupted(monkeypatch):
    """Let Ctrl-C come while the rank is in its third barrier from now; before that one, if compiled code passes it."""
    if native is not None:
        monkeypatch.setattr(TwoShot, "steps", interrupt)
        return
    really, calls = NodeBarrier.post, []

    def post(barrier):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        really(barrier)

    monkeypatch.setattr(NodeBarrier, "post", post)


def interrupt(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("call", [reduce, start], ids=["all_reduce", "start_all_reduce"])
@pytest.mark.parametrize("fail", [memory_ends, interrupted])
def test_all_reduce_broken_off_on_one_rank_raises_on_all_until_reset(comm, fail, call):
    """The rank has its own error, the others are told of it, and all have to reset."""
    value = [np.full(1_000_000, 1.0), np.full(1_000_000, 1.0, np.float32)]
    strategy = Strategy(comm=comm)
    assert all((result == comm.size).all() for result in call(strategy, value))
    last = comm.size - 1
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
    comm.Barrier()
    strategy.reset()
    assert all((result == comm.size).all() for result in call(strategy, value))
    strategy.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("milliseconds", [1, 2, 3, 5, 8])
def test_reduce_broken_off_by_a_signal_handler_raises(comm, milliseconds, strategy):
    """On one rank, while all go on with calls: right numbers or an error, on every rank."""
    value = np.full(300_000, comm.rank + 1.0)
    total = comm.size * (comm.size + 1) / 2
    errors = []
    gc.collect()  # what a handler raises while memory of earlier tests is given back, Python ignores
    comm.Barrier()  # a rank that is still making its strategy would have none to reset
    try:
        with alarm(milliseconds / 1000) if comm.rank == 0 else nullcontext():
            while True:
                assert (reduce(strategy, value) == total).all()
    except (RangError, PeerFailedError, DeadlineExceededError, InvalidArgumentError) as error:
        errors.append(error)  # the last is of all ranks: it came while this rank looked at its arguments
    if isinstance(errors[0], RangError):
        parts_of(strategy).group.break_off(errors[0])  # if it came between two calls
    assert len(errors) == 1
    comm.Barrier()
    strategy.reset()
    assert (reduce(strategy, value) == total).all()


@pytest.mark.ranks(1, 3)
def test_results_larger_than_the_node_are_refused_at_once(comm, strategy):
    """Whatever the system promises, and without a plan of every chunk; the next call goes well."""
    text = r"the results of the \d ranks? of a node need [\d.]+ TiB of new memory, and the node has"
    calls = [
        lambda value: reduce(strategy, value),
        lambda value: start(strategy, value),
        lambda value: strategy.broadcast(value),
        lambda value: strategy.gather(value, 0),
        lambda value: scatter(strategy, value * comm.size),
    ]
    for call, num_arrays in product(calls, (1, 600)):
        value = [np.broadcast_to(np.float32(1), 600_000_000_000 // num_arrays)] * num_arrays
        with pytest.raises(MemoryError, match=text):
            call(value)
        assert strategy.reduce("SUM", 1) == comm.size


def gather_unevenly(strategy, value):
    """Let the first rank pass nothing, and the last one twice as much."""
    rank, size = strategy.topology.rank, strategy.topology.size
    others = {0: value[:0], size - 1: np.concatenate([value, value])} if size > 1 else {}
    return strategy.gather(others.get(rank, value), 0)


def reduce_scatter(strategy, value):
    return scatter(strategy, np.tile(value, strategy.topology.size))


# The call, and whether its result has the bytes of all ranks' arguments.
NEW_RESULTS = {
    "all_reduce": (reduce, False),
    "start_all_reduce": (start, False),
    "broadcast": (lambda strategy, value: strategy.broadcast(value), False),
    "gather": (lambda strategy, value: strategy.gather(value, 0), True),
    "gather of other lengths": (gather_unevenly, True),
    "reduce_scatter": (reduce_scatter, False),
}


def test_results_larger_than_memory_of_the_node_are_refused(comm, placement, monkeypatch):
    """Else the call is refused on all ranks before data moves, and the next call goes well."""
    value = np.full(1000, 1.0, np.float32)

    def node_has(nbytes):
        for module in ("arguments.operands", "all_gather"):
            monkeypatch.setattr(sys.modules[f"mpidist.collectives.{module}"], "node_bytes", lambda: nbytes)

    for call, is_of_all in NEW_RESULTS.values():
        needed = value.nbytes * (comm.size if is_of_all else 1) * max(map(placement.count, placement))
        node_has(needed - 1)
        with Strategy(comm=comm) as strategy:  # of its own, which knows no call: what a node has is read once for each
            with raises_everywhere(comm, (MemoryError, InvalidArgumentError), "of new memory, and .*; pass fewer"):
                call(strategy, value)
            assert strategy.gather(value[:1], 0).size == comm.size
        node_has(needed)
        with Strategy(comm=comm) as strategy:
            assert call(strategy, value).min() >= 1
    node_has(value.nbytes)
    with Strategy(comm=comm) as strategy:  # a reduction to one rank has its result in the memory of one rank
        result = strategy.extended.reduce_to("SUM", value, 0)
        assert result is None if comm.rank else (result == comm.size).all()


def scatter(strategy, value, op="SUM", axis=0):
    return strategy.run(lambda: mpidist.get_replica_context().reduce_scatter(op, value, axis))


def large(call, number):
    """Give the call lists of large arrays, for whose results memory is kept."""
    return lambda strategy, value: call(strategy, [np.full(1_000_000, 1.0)] * number)


LACKING = {"results": (ResultMemory, "empty"), "copies": (arrays, "empty"), "kept results": (RecycledResults, "lend")}
# Calls of a matrix whose elements are 1, and what may lack memory for it.
IN_NEW_MEMORY = {
    "all_reduce": (large(reduce, 1), "kept results"),
    "all_reduce of a list": (large(reduce, 3), "kept results"),
    "start_all_reduce": (large(start, 1), "kept results"),
    "start_all_reduce of a list": (large(start, 3), "kept results"),
    "gather": (lambda strategy, value: strategy.gather(value, 0), "results"),
    "gather of other lengths": (gather_unevenly, "results"),
    "gather along another axis": (lambda strategy, value: strategy.gather(value, 1), "results, copies"),
    "reduce_scatter": (scatter, "results"),
    "reduce_scatter of another axis": (lambda strategy, value: scatter(strategy, value, axis=1), "results, copies"),
    "of integers": (lambda strategy, value: scatter(strategy, value.astype(int), "MEAN"), "results, copies"),
    "of columns": (lambda strategy, value: scatter(strategy, np.asfortranarray(value)), "results, copies"),
}


def test_memory_that_is_missing_on_one_rank_is_the_error_of_all(comm, placement, strategy):
    """Before data moves, and the next call goes well."""
    value, last = np.full((200, 300), 1.0), comm.size - 1
    for name, (call, lacking) in IN_NEW_MEMORY.items():
        for what in lacking.split(", "):
            for _ in range(2):
                right = call(strategy, value)
            with pytest.MonkeyPatch.context() as monkeypatch:
                if comm.rank == last:
                    monkeypatch.setattr(*LACKING[what], no_memory)
                who = f"rank {last}: MemoryError: " if what == "kept results" and comm.size > 1 else ""
                with raises_everywhere(comm, (MemoryError, InvalidArgumentError), who + "Unable to allocate 9 TiB"):
                    call(strategy, value)
            assert np.array_equal(call(strategy, value), right), name
            assert strategy.reduce("SUM", 1) == comm.size
