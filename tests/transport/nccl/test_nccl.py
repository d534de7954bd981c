"""The NCCL transport."""

from __future__ import annotations

import itertools
import os
import re
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest
from host_cuda.device_checks import CHECKS
from host_cuda.emulated import Emulated
from host_cuda.gpus import anywhere, down, emulated, gpus, is_working, opened, up, use_own_settings
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
from transport.nccl.made_communicators import connect

from mpidist.collectives import all_gather, reduce_scatter
from mpidist.cross_device_ops import (
    CollectiveAllReduce,
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from mpidist.errors import TopologyError, UnavailableError
from mpidist.options import CommunicationOptions
from mpidist.replicas import Replicas
from mpidist.transport import cuda
from mpidist.transport.communicator import shard_bounds
from mpidist.transport.group import NcclReach, SyncGroup
from mpidist.transport.nccl.availability import GpuFacts, reason_against_nccl
from mpidist.transport.nccl.communicator import NcclCommunicator
from mpidist.transport.reduction import Reduction
from mpidist.transport.topology import Topology

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["anywhere", "emulated", "gpus"]  # fixtures

HOSTNAME = socket.gethostname()
A_FEW = [*map(np.dtype, ("int16", "int32", "float32", "float64")), *HALVES]
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
    for dtype in [*A_FEW[3:], *(COMPLEX[:2] if op in ("sum", "prod") else [])]:
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


# All together.


def all_ops() -> list[CrossDeviceOps]:
    return [
        NcclAllReduce(), NcclAllReduce(2), HierarchicalCopyAllReduce(), CollectiveAllReduce(), ReductionToOneDevice(),
    ]  # fmt: skip


OPTIONS = {
    "AUTO": CommunicationOptions(),
    "NCCL": ONLY_NCCL,
    "RING": CommunicationOptions(implementation="RING"),
    "small packs": CommunicationOptions(bytes_per_pack=1199),
    "a pack each": CommunicationOptions(bytes_per_pack=1),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_algorithm_on_every_placement(anywhere: SyncGroup, comm: Intracomm, name: str) -> None:
    """Of GPU and host arrays, into new results, into others, and in place."""
    if name == "NCCL" and not can_meet(cuda.current(), comm):
        pytest.skip("needs a GPU for each rank, or a NCCL_HOSTID for each")
    for ops, dtype in itertools.product([its.bound_to(anywhere, OPTIONS[name]) for its in all_ops()], A_FEW):
        numbers = [contribution("sum", comm.rank, count, dtype) for count in (1, 0, 40, 9000, 100, 100, 7)]
        totals = [reduction_of("sum", comm.size, its.size, dtype) for its in (*numbers, numbers[2])]
        arrays = [*map(up, numbers), numbers[2].copy()]
        mean = ops.all_reduce("MEAN", arrays[2])
        assert np.allclose(down(mean).astype(float), totals[2].astype(float) / comm.size, rtol=1e-2)
        for out in (None, [*(up(np.zeros_like(its)) for its in numbers), np.zeros_like(numbers[2])], arrays):
            *results, on_host = ops.all_reduce("SUM", arrays, out=out)
            assert isinstance(on_host, np.ndarray)
            for result, total in zip([*map(down, results), on_host], totals, strict=True):
                assert (result == total).all(), (ops, dtype, total.size)
    if name == "RING" or not can_meet(cuda.current(), comm):
        return
    reach = anywhere.levels_of(True).nccl
    one_node = len(set(anywhere.topology.node_of_rank)) == 1
    assert reach is (NcclReach.WORLD if one_node else NcclReach.NODE)


def test_large_means_and_flags_on_every_placement(anywhere: SyncGroup, comm: Intracomm) -> None:
    for ops in [its.bound_to(anywhere, options) for its in all_ops() for options in (OPTIONS["AUTO"], OPTIONS["RING"])]:
        large = np.full(9000, 2**63, np.uint64)
        assert (down(ops.all_reduce("MEAN", up(large))) == 2.0**63).all()
        flags = np.arange(9000) % comm.size == comm.rank
        assert down(ops.all_reduce("MAX", up(flags))).all()
        assert (down(ops.all_reduce("MIN", up(flags))) == (comm.size == 1)).all()


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
