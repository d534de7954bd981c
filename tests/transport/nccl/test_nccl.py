"""The NCCL transport; and where a rank, NCCL or a call of it fails: errors, aborts, and what begins anew."""

import gc
import os
import re
import socket
import threading
import time
import weakref
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from host_cuda.device_checks import CHECKS
from host_cuda.emulated import HANGS
from host_cuda.gpus import down, emulated, gpus, is_working, opened, up, use_own_settings
from support.contributions import COMPLEX, HALVES, UFUNCS
from support.everywhere import raises_everywhere

from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.cross_device_ops.collective_all_reduce import CollectiveAllReduce
from mpidist.cross_device_ops.hierarchical_copy_all_reduce import HierarchicalCopyAllReduce
from mpidist.cross_device_ops.nccl_all_reduce import NcclAllReduce
from mpidist.errors import DeadlineExceededError, PeerFailedError, TopologyError, UnavailableError
from mpidist.options import CommunicationOptions
from mpidist.transport import cuda
from mpidist.transport.arrays import address_of
from mpidist.transport.gpu.kernels import DeviceKernels
from mpidist.transport.nccl import handles as nccl_handles
from mpidist.transport.nccl.availability import GpuFacts, reason_against_nccl
from mpidist.transport.nccl.communicator import NcclCommunicator
from mpidist.transport.nccl.launch_queue import DeviceQueue
from mpidist.transport.reduction import Reduction
from mpidist.transport.tree import Fold

__all__ = ["emulated", "gpus"]  # fixtures

HOSTNAME = socket.gethostname()
FLOATS = [np.dtype(np.float64), *HALVES]
ONLY_NCCL = CommunicationOptions(implementation="NCCL")
CALLS_OF_NCCL = ["allReduce", "reduce", "reduceScatter", "allGather", "broadcast", "send", "recv"]


def make_handle(provider, comm):
    unique_id = comm.bcast(provider.nccl.get_unique_id() if comm.rank == 0 else None)
    device = int(provider.cupy.cuda.runtime.getDevice())
    (made,) = nccl_handles.start_init(comm.size, unique_id, {comm.rank: device}).wait()
    return made


def connect(provider, comm, name="all"):
    return NcclCommunicator(make_handle(provider, comm), name, comm.rank, comm.size, DeviceQueue(), DeviceKernels())


@pytest.fixture
def provider(gpus, comm):
    """The same, where NCCL takes these ranks together, and is to."""
    facts = comm.allgather(GpuFacts.here(gpus, os.environ, HOSTNAME))
    reason = reason_against_nccl(facts, [range(comm.size)], [HOSTNAME] * comm.size)
    if reason or os.environ.get("MPIDIST_NCCL") == "0":
        pytest.skip("needs a GPU for each rank, or a NCCL_HOSTID for each")
    return gpus


@pytest.fixture
def communicator(provider, comm):
    made = connect(provider, comm)
    yield made
    made.free()


@pytest.mark.ranks(1, 3)
def test_nccl_passes_checks_of_device_communicators(communicator):
    for check in CHECKS.values():
        check(communicator)


@pytest.mark.ranks(1)
def test_sums_in_an_order_are_left_to_kernels(communicator):
    """Of the order in which NCCL adds it says nothing."""
    for reduction in (Reduction("sum", fold=Fold(2, [[0], [1]])), Reduction("sum", in_rank_order=True)):
        assert communicator.native_dtype(np.dtype(np.float32), reduction) is None


@pytest.mark.ranks(3)
def test_one_nan_is_seen_by_all(communicator):
    for op, dtype, owner in product(UFUNCS, [*FLOATS, *COMPLEX[:2]], range(communicator.size)):
        if dtype.kind == "c" and op in ("min", "max"):
            continue
        numbers = np.ones(3, dtype)
        numbers[1] = np.nan if owner == communicator.rank else 1
        buffer = up(numbers)
        communicator.all_reduce(buffer, Reduction(op))
        assert np.isnan(down(buffer)).tolist() == [False, True, False], (op, dtype, owner)


@pytest.mark.ranks(3)
def test_parts_of_any_length_are_received_where_kernels_join_them_fastest(communicator, monkeypatch):
    """At multiples of 16 bytes."""
    combine, places = DeviceKernels.combine, set()

    def note(kernels, parts, *more):
        places.update(address_of(part) % 16 for part in parts)
        combine(kernels, parts, *more)

    monkeypatch.setattr(DeviceKernels, "combine", note)
    for count in (1, 3, 13, 1001):
        communicator.all_reduce(up(np.ones(count * communicator.size, np.float16)), Reduction())
    assert places == {0}


# All together.


@pytest.mark.ranks(4)
@pytest.mark.usefixtures("provider")
def test_nccl_alone_reaches_all_nodes_and_else_its_own(comm, placement):
    for group in opened(comm):
        assert is_working(group, ONLY_NCCL)
        assert is_working(group)
        assert group.levels_of(True).is_all_nccl == (len(set(placement)) == 1)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("setting", ["MPIDIST_NCCL=0", "NCCL_COMM_BLOCKING=0"])
def test_disabled_nccl_stages_arrays_and_logs_the_reason(emulated, comm, monkeypatch, caplog, setting):
    monkeypatch.setenv(*setting.split("="))
    for group in opened(comm):
        assert is_working(group)
        assert is_working(group)
        assert group.levels_of(True).queue is None
        with raises_everywhere(comm, UnavailableError, f"cannot be had: .*{setting} (disables NCCL|is set.*unset it)"):
            is_working(group, ONLY_NCCL)
    assert emulated.calls(*CALLS_OF_NCCL) == []
    assert caplog.text.count("goes from rank to rank through the host") == (comm.rank == 0)
    assert setting in caplog.text or comm.rank


@pytest.mark.ranks(3)
def test_more_ranks_than_gpus_are_staged(gpus, comm, monkeypatch, caplog):
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
def test_other_versions_are_refused_with_a_table(emulated, comm, monkeypatch):
    emulated.wish("NCCL's version", 22809 if comm.rank else 23004)
    its = cuda.Cuda()
    monkeypatch.setattr(cuda, "current", lambda: its)
    for group in opened(comm):
        with raises_everywhere(comm, TopologyError, r"one version of NCCL.*: 2.30.4 on rank 0 .*, 2.28.9 on rank"):
            is_working(group)
        assert BoundOps(NcclAllReduce(), group).all_reduce("SUM", 1) == comm.size  # host arrays go on


@pytest.mark.ranks(3)
@pytest.mark.parametrize("way", ["NCCL", "through the host", "RING"])
def test_kernels_and_copies_go_before_the_users(emulated, comm, monkeypatch, way):
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


# What fails.


@pytest.mark.ranks(3)
def test_interrupt_while_ranks_connect_ends_in_one_abort(emulated, comm):
    """All communicators of the process go together, and later calls name it. No other array gets the memory."""
    first, second = connect(cuda.current(), comm), connect(cuda.current(), comm, "second")
    start, buffer, into = time.monotonic(), up(np.ones(comm.size, np.float16)), up(np.ones(1, np.float16))
    kept = weakref.ref(buffer), weakref.ref(into)

    def give_up():
        if time.monotonic() - start > 0.4:
            raise KeyboardInterrupt("rank 1 did not come")

    first.set_wait_hook(give_up)
    if comm.rank != 1:
        with pytest.raises(KeyboardInterrupt, match="rank 1 did not come"):
            first.reduce_scatter(buffer, Reduction(), into=into)
        assert emulated.ended() == [("abort", 2)]
        for its in (first, second):
            with pytest.raises(RuntimeError, match=r"an earlier call failed .*rank 1 did not come.*reset"):
                its.all_reduce(up(np.ones(5)), Reduction())
    else:
        nccl_handles.abort_all("the others gave up")
    nccl_handles.wait_for_endings()
    first.free()  # what is gone need not be destroyed
    second.free()
    assert emulated.ended() == [("abort", 2)]
    del first, second, buffer, into
    gc.collect()
    assert [its() is None for its in kept] == [comm.rank == 1] * 2, "a GPU that is busy may come to it later"


@pytest.mark.ranks(3)
def test_hanging_abort_is_logged_and_blocks_no_rank(emulated, comm, monkeypatch, caplog):
    monkeypatch.setattr(nccl_handles, "LIMIT_SECONDS", 1.0)
    its = connect(cuda.current(), comm)
    emulated.wish("abort", HANGS)
    nccl_handles.abort_all("of a test")
    assert not caplog.text, "nobody has waited for its end"
    nccl_handles.wait_for_endings()
    assert "did not end within" in caplog.text
    its.free()
    emulated.be_normal()


@pytest.mark.ranks(3)
def test_free_of_a_communicator_waits_until_it_is_gone(emulated, comm):
    its = connect(cuda.current(), comm)
    emulated.wish("destroy", HANGS)
    threading.Timer(0.5, emulated.be_normal).start()
    its.free()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("mpidist the end")]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("is_interrupted", [True, False])
def test_hanging_start_of_nccl_is_given_up_and_aborted_later(emulated, comm, monkeypatch, is_interrupted):
    """By an interrupt on rank 0, or as it takes too long."""
    if comm.rank == 1:
        emulated.wish("ncclCommInitRank", HANGS)
    kind = UnavailableError
    for group in opened(comm):
        if is_interrupted:
            kind = KeyboardInterrupt if comm.rank == 0 else PeerFailedError
            if comm.rank == 0:
                emulated.interrupt_in("ncclCommInitRank")
        with monkeypatch.context() as patch:
            patch.setattr(nccl_handles, "START_SECONDS", 600.0 if is_interrupted else 2.0)
            with pytest.raises(kind, match=None if is_interrupted else "ranks 0.*: it did not start within 2 s"):
                is_working(group)
        emulated.be_normal()
        emulated.wait_for_end()
        nccl_handles.wait_for_endings()
        assert emulated.ended() == [("abort", 1)]
        group.reset()
        assert is_working(group)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("call", "status", "kind", "text"),
    [
        ("an error of NCCL", 2, PeerFailedError, ": NCCL_ERROR.*; NCCL's last warning.*fails with status 2. Look"),
        ("an error of NCCL", 6, PeerFailedError, ": NCCL_ERROR.*; NCCL's last warning.*fails with status 6. Look"),
        (
            "an error of NCCL",
            3,
            UnavailableError,
            ": NCCL_ERROR.*; NCCL's last warning.*fails with status 3. NCCL_D",
        ),
        # For which CuPy has no word:
        ("ncclGroupEnd", 7, UnavailableError, "'s status 7; .*: ncclGroupEnd fails .* 7; unset NCCL_COMM"),
        ("ncclGroupEnd", 8, DeadlineExceededError, "'s status 8; .*: ncclGroupEnd fails .* 8; unset NCCL_COMM"),
    ],
)
def test_errors_of_nccl_become_ours(emulated, comm, call, status, kind, text):
    its = connect(cuda.current(), comm)
    if comm.rank == 0:
        emulated.wish(call, status)
        with pytest.raises(kind, match=rf"all_reduce with NCCL on rank 0 of \d \(all\) failed.*{text}"):
            its.all_reduce(up(np.ones(5)), Reduction())
        emulated.be_normal()
    nccl_handles.abort_all("of a test")
    nccl_handles.wait_for_endings()
    assert emulated.ended() == [("abort", 1)] or call == "ncclGroupEnd", "which also ends the group of aborts"


@pytest.mark.ranks(3)
@pytest.mark.parametrize("what", ["ncclGetUniqueId", "ncclCommInitRank"])
def test_failed_start_on_one_rank_raises_on_all_and_can_be_repeated(emulated, comm, what):
    failing = 0 if what == "ncclGetUniqueId" else comm.size - 1
    if comm.rank == failing:
        emulated.wish(what, 2)
    warning = f"NCCL's last warning here: {what} fails with status 2"
    pattern = rf"could not be started \(within_node\): rank {failing}: NCCL_ERROR.*; {warning}. NCCL_DEBUG"
    for group in opened(comm):
        with raises_everywhere(comm, UnavailableError, pattern):
            is_working(group)
        emulated.be_normal()
        assert is_working(group)


@pytest.mark.ranks(3)
def test_error_check_and_abort_of_a_communicator_exclude_each_other(emulated, comm):
    """Another thread aborts all communicators of a process: the look reads memory that the abort frees."""
    handle, order = make_handle(cuda.current(), comm), []
    real, look = handle.comm, handle.comm.check_async_error

    def slow_look():
        other = threading.Thread(target=lambda: (nccl_handles.abort_all("of a test"), order.append("aborted")))
        other.start()
        other.join(0.2)
        order.append("looked")
        threads.append(other)
        look()

    threads = []
    handle.comm = SimpleNamespace(check_async_error=slow_look, abort=real.abort)
    handle.check()
    threads[0].join()
    handle.check()
    nccl_handles.wait_for_endings()
    assert order == ["looked", "aborted"]
    assert emulated.ended() == [("abort", 1)]
