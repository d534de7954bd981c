"""The NCCL transport."""

import os
import re
import socket
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from host_cuda.device_checks import CHECKS
from host_cuda.emulated import Emulated
from host_cuda.gpus import down, emulated, gpus, is_working, opened, up, use_own_settings
from support.contributions import COMPLEX, HALVES, UFUNCS
from support.everywhere import raises_everywhere
from support.ranks import Intracomm
from transport.nccl.made_communicators import connect

from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.cross_device_ops.collective_all_reduce import CollectiveAllReduce
from mpidist.cross_device_ops.hierarchical_copy_all_reduce import HierarchicalCopyAllReduce
from mpidist.cross_device_ops.nccl_all_reduce import NcclAllReduce
from mpidist.errors import TopologyError, UnavailableError
from mpidist.options import CommunicationOptions
from mpidist.transport import cuda
from mpidist.transport.gpu.array_lists import address_of
from mpidist.transport.gpu.kernels import DeviceKernels
from mpidist.transport.group.levels import NcclReach
from mpidist.transport.nccl.availability import GpuFacts, reason_against_nccl
from mpidist.transport.nccl.communicator import NcclCommunicator
from mpidist.transport.reduction import Reduction
from mpidist.transport.tree import Fold

__all__ = ["emulated", "gpus"]  # fixtures

HOSTNAME = socket.gethostname()
FLOATS = [np.dtype(np.float64), *HALVES]
ONLY_NCCL = CommunicationOptions(implementation="NCCL")
CALLS_OF_NCCL = ["allReduce", "reduce", "reduceScatter", "allGather", "broadcast", "send", "recv"]


@pytest.fixture
def provider(gpus: cuda.Cuda, comm: Intracomm) -> cuda.Cuda:
    """The same, where NCCL takes these ranks together, and is to."""
    facts = comm.allgather(GpuFacts.here(gpus, os.environ, HOSTNAME))
    reason = reason_against_nccl(facts, [range(comm.size)], [HOSTNAME] * comm.size)
    if reason or os.environ.get("MPIDIST_NCCL") == "0":
        pytest.skip("needs a GPU for each rank, or a NCCL_HOSTID for each")
    return gpus


@pytest.fixture
def communicator(provider: cuda.Cuda, comm: Intracomm) -> Iterator[NcclCommunicator]:
    made = connect(provider, comm)
    yield made
    made.free()


@pytest.mark.ranks(1, 3)
def test_what_every_communicator_of_device_memory_must_do(communicator: NcclCommunicator) -> None:
    for check in CHECKS.values():
        check(communicator)


@pytest.mark.ranks(1)
def test_sums_in_an_order_are_left_to_kernels(communicator: NcclCommunicator) -> None:
    """Of the order in which NCCL adds it says nothing."""
    for reduction in (Reduction("sum", fold=Fold(2, [[0], [1]])), Reduction("sum", in_rank_order=True)):
        assert communicator.native_dtype(np.dtype(np.float32), reduction) is None


@pytest.mark.ranks(3)
def test_one_nan_is_seen_by_all(communicator: NcclCommunicator) -> None:
    for op, dtype, owner in product(UFUNCS, [*FLOATS, *COMPLEX[:2]], range(communicator.size)):
        if dtype.kind == "c" and op in ("min", "max"):
            continue
        numbers = np.ones(3, dtype)
        numbers[1] = np.nan if owner == communicator.rank else 1
        buffer = up(numbers)
        communicator.all_reduce(buffer, Reduction(op))
        assert np.isnan(down(buffer)).tolist() == [False, True, False], (op, dtype, owner)


@pytest.mark.ranks(3)
def test_parts_of_any_length_are_received_where_kernels_join_them_fastest(
    communicator: NcclCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At multiples of 16 bytes."""
    combine, places = DeviceKernels.combine, set()

    def note(kernels: Any, parts: Any, *more: Any) -> None:
        places.update(address_of(part) % 16 for part in parts)
        combine(kernels, parts, *more)

    monkeypatch.setattr(DeviceKernels, "combine", note)
    for count in (1, 3, 13, 1001):
        communicator.all_reduce(up(np.ones(count * communicator.size, np.float16)), Reduction())
    assert places == {0}


# All together.


@pytest.mark.ranks(4)
@pytest.mark.usefixtures("provider")
def test_nccl_alone_reaches_all_nodes_and_else_its_own(comm: Intracomm, placement: tuple[int, ...]) -> None:
    for group in opened(comm):
        assert is_working(group, ONLY_NCCL)
        assert is_working(group)
        assert group.levels_of(True).nccl is (NcclReach.WORLD if len(set(placement)) == 1 else NcclReach.NODE)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("setting", ["MPIDIST_NCCL=0", "NCCL_COMM_BLOCKING=0"])
def test_without_nccl_arrays_are_staged_and_the_reason_is_said(
    emulated: Emulated, comm: Intracomm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, setting: str
) -> None:
    monkeypatch.setenv(*setting.split("="))
    for group in opened(comm):
        assert is_working(group)
        assert is_working(group)
        assert group.levels_of(True).nccl is NcclReach.NOWHERE
        with raises_everywhere(comm, UnavailableError, f"cannot be had: .*{setting} (asks to|is set.*unset it)"):
            is_working(group, ONLY_NCCL)
    assert emulated.calls(*CALLS_OF_NCCL) == []
    assert caplog.text.count("goes from rank to rank through the host") == (comm.rank == 0)
    assert setting in caplog.text or comm.rank


@pytest.mark.ranks(3)
def test_more_ranks_than_gpus_are_staged(
    gpus: cuda.Cuda, comm: Intracomm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_own_settings(monkeypatch)
    for name in ("NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    gpus.cupy.cuda.Device(0).use()
    for group in opened(comm):
        assert is_working(group)
        assert re.search(r"share GPU \w+:\w\w:\w\w\.\w of", caplog.text) or comm.rank
        with raises_everywhere(comm, UnavailableError, '"NCCL" cannot be had: ranks 0.* share GPU'):
            is_working(group, ONLY_NCCL)


@pytest.mark.ranks(3)
def test_other_versions_are_refused_with_a_table(
    emulated: Emulated, comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated.wish("NCCL's version", 22809 if comm.rank else 23004)
    its = cuda.Cuda()
    monkeypatch.setattr(cuda, "current", lambda: its)
    for group in opened(comm):
        with raises_everywhere(comm, TopologyError, r"one version of NCCL.*: 2.30.4 on rank 0 .*, 2.28.9 on rank"):
            is_working(group)
        assert BoundOps(NcclAllReduce(), group).all_reduce("SUM", 1) == comm.size  # host arrays go on


@pytest.mark.ranks(3)
@pytest.mark.parametrize("way", ["NCCL", "through the host", "RING"])
def test_kernels_and_copies_go_before_the_users(
    emulated: Emulated, comm: Intracomm, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Which fill the GPU in a backward pass; only streams of a higher priority get on meanwhile."""
    monkeypatch.setenv("MPIDIST_NCCL", "1" if way == "NCCL" else "0")
    options = CommunicationOptions(implementation="RING" if way == "RING" else "AUTO")
    for group in opened(comm):
        for ops in (BoundOps(CollectiveAllReduce(), group), BoundOps(HierarchicalCopyAllReduce(), group)):
            values = [up(np.ones(count)) for count in (5, 7000)]
            ops.all_reduce("SUM", values, options)
            ops.start_all_reduce("SUM", values, options).wait()
    made = [priority for _, priority in emulated.calls("a stream of its own")]
    assert len(made) == 3, "NCCL's own and two of packs; or copies down, copies up, and work that waits for no caller"
    assert all(priority < 0 for priority in made)
