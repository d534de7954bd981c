"""The NCCL transport."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from host_cuda.device_checks import CHECKS
from host_cuda.emulated import HANGS, Emulated
from host_cuda.gpus import anywhere, connected, down, emulated, gpus, is_working, opened, up, use_own_settings
from support.contributions import (
    COMPLEX,
    HALVES,
    UFUNCS,
    bits,
    contribution,
    flat_trees,
    in_tree_order,
    reduction_of,
    rows_of_this_rank,
    unlike_numbers,
)
from support.everywhere import raises_everywhere

from mpidist.collectives import all_gather, reduce_scatter
from mpidist.cross_device_ops import (
    CollectiveAllReduce,
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from mpidist.errors import DeadlineExceededError, PeerFailedError, TopologyError, UnavailableError
from mpidist.options import CommunicationOptions
from mpidist.replicas import Replicas
from mpidist.transport import cuda
from mpidist.transport.communicator import shard_bounds
from mpidist.transport.group import NcclReach, SyncGroup
from mpidist.transport.nccl import handles as nccl_handles
from mpidist.transport.nccl.availability import GpuFacts, reason_against_nccl
from mpidist.transport.nccl.communicator import NcclCommunicator
from mpidist.transport.nccl.handles import Handle
from mpidist.transport.reduction import Reduction
from mpidist.transport.topology import Topology

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["anywhere", "connected", "emulated", "gpus"]  # fixtures

_HAS_RAISED: Final = 21  # a tag

HOSTNAME = socket.gethostname()
A_FEW = [np.dtype(np.int16), np.dtype(np.int32), np.dtype(np.float64), *HALVES]
ONLY_NCCL = CommunicationOptions(implementation="NCCL")
CALLS_OF_NCCL = ["allReduce", "reduce", "reduceScatter", "allGather", "broadcast", "send", "recv"]


def can_meet(found: cuda.Cuda, comm: Intracomm) -> bool:
    """Whether NCCL takes these ranks together, and is to."""
    if os.environ.get("MPIDIST_NCCL") == "0":
        return False
    facts = comm.allgather(GpuFacts.here(found, os.environ, HOSTNAME))
    return not reason_against_nccl(facts, [range(comm.size)], [HOSTNAME] * comm.size)


@pytest.fixture
def provider(gpus: cuda.Cuda, comm: Intracomm) -> cuda.Cuda:
    """The same, where every rank has a GPU of its own."""
    if not can_meet(gpus, comm):
        pytest.skip("needs a GPU for each rank, or a NCCL_HOSTID for each")
    return gpus


@pytest.fixture
def communicator(provider: cuda.Cuda, comm: Intracomm) -> Iterator[NcclCommunicator]:
    made = connect(provider, comm)
    yield made
    made.free()


def make_handle(provider: cuda.Cuda, comm: Intracomm) -> Handle:
    unique_id = comm.bcast(provider.nccl.get_unique_id() if comm.rank == 0 else None)
    device = int(provider.cupy.cuda.runtime.getDevice())
    return Handle(provider, provider.nccl.NcclCommunicator(comm.size, unique_id, comm.rank), device)


def connect(provider: cuda.Cuda, comm: Intracomm, name: str = "all") -> NcclCommunicator:
    return NcclCommunicator(make_handle(provider, comm), name, comm.rank, comm.size)


@pytest.mark.parametrize("check", CHECKS)
def test_what_every_communicator_of_device_memory_must_do(communicator: NcclCommunicator, check: str) -> None:
    CHECKS[check](communicator)


def test_the_order_of_a_fold_is_kept_to_the_bit(communicator: NcclCommunicator) -> None:
    """NCCL brings the parts, and CuPy adds them."""
    size = communicator.size
    for tree in flat_trees(Topology.from_labels(communicator.rank, [0] * size, ["host"] * size)):
        numbers = unlike_numbers(tree.total, 2 * size + 5, np.float32)
        buffer = up(rows_of_this_rank(tree, np.add, numbers)[0])
        communicator.all_reduce(buffer, Reduction("sum", fold=tree.world))
        assert bits(down(buffer)) == bits(in_tree_order(np.add, numbers)), tree


@pytest.mark.parametrize("op", UFUNCS)
def test_one_nan_is_seen_by_all(communicator: NcclCommunicator, op: str) -> None:
    for dtype in [*A_FEW[2:], *(COMPLEX[:2] if op in ("sum", "prod") else [])]:
        for owner in range(communicator.size):
            numbers = np.ones(3, dtype)
            numbers[1] = np.nan if owner == communicator.rank else 1
            buffer = up(numbers)
            communicator.all_reduce(buffer, Reduction(op))
            assert np.isnan(down(buffer)).tolist() == [False, True, False], (dtype, owner)


def test_many_calls_leave_nothing_behind(emulated: Emulated, comm: Intracomm) -> None:
    its = connect(cuda.current(), comm)
    buffers = [up(contribution("sum", comm.rank, 9, dtype)) for dtype in (A_FEW[0], A_FEW[1])]
    assert emulated.grown_by(lambda: [its.all_reduce(buffer, Reduction()) for buffer in buffers], 5, 100) == (0, 0, 0)
    its.free()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("kind", [DeadlineExceededError, KeyboardInterrupt])
def test_what_a_rank_raises_while_it_waits_ends_in_one_abort(emulated: Emulated, comm: Intracomm, kind: Any) -> None:
    """All communicators of the process go together, the error comes in time, and later calls name it."""
    first, second = connect(cuda.current(), comm), connect(cuda.current(), comm, "second")
    start = time.monotonic()

    def give_up() -> None:
        if time.monotonic() - start > 0.4:
            raise kind("rank 1 did not come")

    first.set_wait_hook(give_up)
    if comm.rank != 1:
        with pytest.raises(kind, match="rank 1 did not come"):
            first.all_reduce(up(np.ones(5)), Reduction())
        assert time.monotonic() - start < 10
        assert emulated.ended() == [("abort", 2)]
        for its in (first, second):
            with pytest.raises(
                (RuntimeError, DeadlineExceededError), match=r"an earlier call failed .*rank 1 did not come.*reset"
            ):
                its.all_reduce(up(np.ones(5)), Reduction())
    else:
        nccl_handles.abort_all("the others gave up")
    nccl_handles.wait_for_endings()
    first.free()  # what is gone need not be destroyed
    second.free()
    assert emulated.ended() == [("abort", 2)]


@pytest.mark.ranks(2)
def test_an_abort_that_hangs_holds_nobody_up(
    emulated: Emulated, comm: Intracomm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nccl_handles, "LIMIT_SECONDS", 4.0)
    its = connect(cuda.current(), comm)
    emulated.wish("abort", HANGS)
    start = time.monotonic()
    nccl_handles.abort_all("of a test")
    assert time.monotonic() - start < 3.9
    nccl_handles.wait_for_endings()
    assert 3.9 < time.monotonic() - start < 20
    assert "did not end within" in caplog.text
    its.free()
    assert time.monotonic() - start < 20
    emulated.be_normal()


@pytest.mark.parametrize(("status", "kind"), [(2, PeerFailedError), (6, PeerFailedError), (3, UnavailableError)])
@pytest.mark.ranks(min=2)
def test_errors_of_nccl_become_ours(emulated: Emulated, comm: Intracomm, status: int, kind: Any) -> None:
    its = connect(cuda.current(), comm)
    if comm.rank == 0:
        emulated.wish("an error of NCCL", status)
        with pytest.raises(kind, match=r"all_reduce with NCCL on rank 0 of \d \(all\) failed: NCCL_ERROR.*NCCL_DEBUG"):
            its.all_reduce(up(np.ones(5)), Reduction())
    nccl_handles.abort_all("of a test")
    nccl_handles.wait_for_endings()
    assert emulated.ended() == [("abort", 1)]


def test_statuses_that_cupy_has_no_word_for(emulated: Emulated, comm: Intracomm) -> None:
    for status, kind in ((7, UnavailableError), (8, DeadlineExceededError)):
        its = connect(cuda.current(), comm)
        its.set_wait_hook(lambda: None)
        emulated.wish("ncclGroupEnd", status)
        with pytest.raises(kind, match=f"NCCL's status {status}; unset NCCL_COMM_BLOCKING"):
            its.all_reduce(up(np.ones(5)), Reduction())
        emulated.wish("ncclGroupEnd", 0)
        comm.Barrier()
    nccl_handles.wait_for_endings()


# All together.


def all_ops() -> list[CrossDeviceOps]:
    return [
        NcclAllReduce(), NcclAllReduce(2), HierarchicalCopyAllReduce(), CollectiveAllReduce(), ReductionToOneDevice(),
    ]  # fmt: skip


@pytest.mark.parametrize("implementation", ["AUTO", "NCCL", "RING"])
def test_every_algorithm_on_every_placement(anywhere: SyncGroup, comm: Intracomm, implementation: str) -> None:
    if implementation == "NCCL" and not can_meet(cuda.current(), comm):
        pytest.skip("needs a GPU for each rank, or a NCCL_HOSTID for each")
    options = CommunicationOptions(implementation=implementation)
    for ops in [its.bound_to(anywhere, options) for its in all_ops()]:
        for dtype in A_FEW:
            numbers = [contribution("sum", comm.rank, count, dtype) for count in (1, 0, 40, 9000)]
            results = ops.all_reduce("SUM", [*map(up, numbers), numbers[2]])
            for count, result in zip((1, 0, 40, 9000), results, strict=False):
                assert (down(result) == reduction_of("sum", comm.size, count, dtype)).all(), (ops, dtype, count)
            assert isinstance(results[4], np.ndarray)
            assert (results[4] == reduction_of("sum", comm.size, 40, dtype)).all()
            mean = ops.all_reduce("MEAN", up(numbers[2]))
            sums = reduction_of("sum", comm.size, 40, np.dtype(np.float64))
            assert np.allclose(down(mean).astype(np.float64), sums / comm.size, rtol=1e-2)
        large = np.full(9000, 2**63, np.uint64)
        assert (down(ops.all_reduce("MEAN", up(large))) == 2.0**63).all()
        flags = np.arange(9000) % comm.size == comm.rank
        assert down(ops.all_reduce("MAX", up(flags))).all()
        assert (down(ops.all_reduce("MIN", up(flags))) == (comm.size == 1)).all()
    if implementation == "RING" or not can_meet(cuda.current(), comm):
        return
    reach = anywhere.levels_of(True).nccl
    one_node = len(set(anywhere.topology.node_of_rank)) == 1
    assert reach is (NcclReach.WORLD if one_node else NcclReach.NODE)


def test_gather_and_reduce_scatter_go_by_levels(anywhere: SyncGroup, comm: Intracomm) -> None:
    size, rank = comm.size, comm.rank
    for dtype in A_FEW:
        for count in (size, 3 * size + 1):
            numbers = np.stack([contribution("sum", rank, count, dtype)] * 2, axis=1)
            whole = np.stack([reduction_of("sum", size, count, dtype)] * 2, axis=1)
            start, stop = shard_bounds(count, size)[rank:][:2]
            part = reduce_scatter(anywhere, "reduce_scatter", "SUM", up(numbers), 0, CommunicationOptions())
            assert (down(part) == whole[start:stop]).all(), (dtype, count)
            mean = reduce_scatter(anywhere, "reduce_scatter", "MEAN", up(numbers), 0, CommunicationOptions())
            assert np.allclose(down(mean).astype(float), whole[start:stop].astype(float) / size, rtol=1e-2)
            replicas = Replicas.one_per_rank(anywhere.topology)
            everything = all_gather(anywhere, "all_gather", part, 0, CommunicationOptions(), replicas)
            assert (down(everything) == whole).all(), (dtype, count)


def test_reduce_and_broadcast_reach_their_destinations(anywhere: SyncGroup, comm: Intracomm) -> None:
    for ops in [its.bound_to(anywhere) for its in all_ops()]:
        last = comm.size - 1
        result = ops.reduce("SUM", up(contribution("sum", comm.rank, 40, A_FEW[1])), last)
        assert (result is None) == (comm.rank != last)
        assert result is None or (down(result) == reduction_of("sum", comm.size, 40, A_FEW[1])).all()
        sent = ops.broadcast(up(contribution("sum", comm.rank, 40, A_FEW[0])), "all")
        assert (down(sent) == contribution("sum", 0, 40, A_FEW[0])).all()


@pytest.mark.ranks(min=2)
def test_host_staging_moves_no_byte_by_nccl(
    emulated: Emulated, comm: Intracomm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MPIDIST_NCCL", "0")
    for group in opened(comm):
        assert is_working(group)
        assert is_working(group)
    assert emulated.calls(*CALLS_OF_NCCL) == []
    assert caplog.text.count("goes from rank to rank through the host") == (comm.rank == 0)
    assert "MPIDIST_NCCL=0" in caplog.text or comm.rank


@pytest.mark.ranks(min=2)
def test_more_ranks_than_gpus_are_staged(
    gpus: cuda.Cuda,
    comm: Intracomm,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    use_own_settings(monkeypatch)
    for name in ("NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    gpus.cupy.cuda.Device(0).use()
    for group in opened(comm):
        assert is_working(group)
        assert re.search(r"share GPU \w+:\w\w:00.0 of", caplog.text) or comm.rank
        with raises_everywhere(comm, UnavailableError, '"NCCL" cannot be had: ranks 0.* share GPU'):
            is_working(group, ONLY_NCCL)


@pytest.mark.ranks(min=2)
def test_other_versions_are_refused_with_a_table(
    emulated: Emulated, comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated.wish("NCCL's version", 22809 if comm.rank else 23004)
    its = cuda.Cuda()
    monkeypatch.setattr(cuda, "current", lambda: its)
    for group in opened(comm):
        with raises_everywhere(comm, TopologyError, r"one version of NCCL.*: 2.30.4 on rank 0 .*, 2.28.9 on rank"):
            is_working(group)
        assert NcclAllReduce().bound_to(group).all_reduce("SUM", 1) == comm.size  # host arrays go on


@pytest.mark.ranks(min=2)
def test_communicators_that_do_not_block_are_done_without(
    emulated: Emulated, comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "0")
    for group in opened(comm):
        assert is_working(group)
        assert group.levels_of(True).nccl is NcclReach.NOWHERE
        with raises_everywhere(comm, UnavailableError, "cannot be had: .*NCCL_COMM_BLOCKING=0 is set.*unset it"):
            is_working(group, ONLY_NCCL)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("what", ["ncclGetUniqueId", "ncclCommInitRank"])
def test_what_fails_on_one_rank_fails_on_all_and_can_be_tried_again(
    emulated: Emulated, comm: Intracomm, what: str
) -> None:
    failing = 0 if what == "ncclGetUniqueId" else comm.size - 1
    if comm.rank == failing:
        emulated.wish(what, 2)
    start, pattern = time.monotonic(), rf"could not be started \(within_node\): rank {failing}: NCCL_ERROR"
    for group in opened(comm):
        with raises_everywhere(comm, UnavailableError, pattern):
            is_working(group)
        assert time.monotonic() - start < 20
        emulated.be_normal()
        assert is_working(group)


@pytest.mark.ranks(min=2)
def test_after_a_failure_reset_makes_new_ones(emulated: Emulated, connected: SyncGroup, comm: Intracomm) -> None:
    for _ in range(2):
        if comm.rank == 0:
            emulated.wish("an error of NCCL", 6)

        def call_on() -> None:
            while True:  # a rank may be done before the error
                is_working(connected, CommunicationOptions(timeout_seconds=2))

        with pytest.raises((PeerFailedError, RuntimeError)):
            call_on()
        emulated.wish("an error of NCCL", 0)
        connected.reset()
        assert is_working(connected)
    connected.close()
    assert emulated.ended() == [("abort", 1), ("abort", 1), ("destroy", 1)]


@pytest.mark.ranks(min=2)
def test_a_missing_rank_ends_the_communicators_of_all_groups(
    emulated: Emulated, connected: SyncGroup, comm: Intracomm
) -> None:
    """It is named. NCCL wants the communicators of a process aborted together; each group is reset."""
    for other in opened(comm):
        assert is_working(other)
        start = time.monotonic()
        if comm.rank != 1:
            with pytest.raises(DeadlineExceededError, match="rank 1"):
                is_working(connected, CommunicationOptions(timeout_seconds=0.5))
        assert time.monotonic() - start < 10
        comm.Barrier()
        connected.reset()
        with pytest.raises((RuntimeError, PeerFailedError), match=r"call strategy.reset\(\) on all ranks"):
            is_working(other)
        comm.Barrier()
        other.reset()
        assert is_working(connected)
        assert is_working(other)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("dtype", ["f8", "f2"], ids=["connected", "connects"])
def test_a_rank_that_stops_within_a_call_is_noticed(
    emulated: Emulated, connected: SyncGroup, comm: Intracomm, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """All have agreed on the call, and one does not come to NCCL: the others abort, and so does it when it comes.

    Also where NCCL first has to connect the ranks, for which it waits before its call returns.
    """
    run, others = NcclCommunicator._run, [rank for rank in range(comm.size) if rank != 1]

    def come_last(*args: Any, **more: Any) -> Any:
        for rank in others:  # those that waited for this one would wait for ever
            assert comm.recv(None, rank, _HAS_RAISED) == rank
        return run(*args, **more)

    with monkeypatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(NcclCommunicator, "_run", come_last)
        with pytest.raises((DeadlineExceededError, PeerFailedError), match="reset"):
            is_working(connected, CommunicationOptions(timeout_seconds=2.0), dtype)
        nccl_handles.wait_for_endings()
        if comm.rank != 1:
            comm.send(comm.rank, 1, _HAS_RAISED)
    assert emulated.ended() == [("abort", 1)]
    connected.reset()
    assert is_working(connected)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("way", ["NCCL", "through the host", "RING"])
def test_kernels_and_copies_go_before_the_users(
    emulated: Emulated, comm: Intracomm, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Which fill the GPU in a backward pass; only streams of a higher priority get on meanwhile."""
    monkeypatch.setenv("MPIDIST_NCCL", "1" if way == "NCCL" else "0")
    options = CommunicationOptions(implementation="RING" if way == "RING" else "AUTO")
    for group in opened(comm):
        for ops in (CollectiveAllReduce().bound_to(group), HierarchicalCopyAllReduce().bound_to(group)):
            values = [up(np.ones(count)) for count in (5, 7000)]
            ops.all_reduce("SUM", values, options)
            ops.start_all_reduce("SUM", values, options).wait()
    made = [priority for _, priority in emulated.calls("a stream of its own")]
    assert len(made) == 3, "NCCL's own and two of packs; or copies down, copies up, and work that waits for no caller"
    assert all(priority < 0 for priority in made)


def test_nobody_looks_for_errors_of_a_communicator_that_is_being_aborted(emulated: Emulated, comm: Intracomm) -> None:
    """Another thread aborts all communicators of a process: the look reads memory that the abort frees."""
    handle, order = make_handle(cuda.current(), comm), []
    real, look = handle.comm, handle.comm.check_async_error

    def slow_look() -> None:
        other = threading.Thread(target=lambda: (nccl_handles.abort_all("of a test"), order.append("aborted")))
        other.start()
        other.join(0.2)
        order.append("looked")
        threads.append(other)
        look()

    threads: list[threading.Thread] = []
    handle.comm = SimpleNamespace(check_async_error=slow_look, abort=real.abort)
    handle.check()
    threads[0].join()
    handle.check()
    nccl_handles.wait_for_endings()
    assert order == ["looked", "aborted"]
    assert emulated.ended() == [("abort", 1)]


@pytest.mark.ranks(min=2)
def test_a_constructor_that_was_given_up_is_aborted_when_it_returns(emulated: Emulated, comm: Intracomm) -> None:
    unique_id = comm.bcast(cuda.current().nccl.get_unique_id() if comm.rank == 0 else None)
    if comm.rank == 0:
        making = nccl_handles.start_init(cuda.current(), comm.size, unique_id, {0: 0})
        time.sleep(0.1)
        assert making.outcome() == (False, "")
        making.cancel()
    comm.Barrier()
    if comm.rank:
        making = nccl_handles.start_init(cuda.current(), comm.size, unique_id, {comm.rank: 0})
        while not making.outcome()[0]:
            time.sleep(0.01)
        making.cancel()
    until = time.monotonic() + 5
    while not emulated.ended() and time.monotonic() < until:
        time.sleep(0.01)
    nccl_handles.wait_for_endings()
    assert emulated.ended() == [("abort", 1)]
