"""Device memory through the host."""

import gc
import math
import time
import weakref
from typing import Any, ClassVar

import numpy as np
import pytest
from host_cuda import are_emulated
from host_cuda.device_checks import CHECKS, CHUNK
from host_cuda.gpus import down, emulated, gpus, grown_by, is_total, mine, opened, up
from support.everywhere import raises_everywhere

from mpidist.cli.cuda_aware_mpi import hint
from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.cross_device_ops.collective_all_reduce import CollectiveAllReduce
from mpidist.errors import DeadlineExceededError, TopologyError
from mpidist.transport import cuda
from mpidist.transport.device_over_mpi.messages import MessagedCommunicator
from mpidist.transport.device_over_mpi.pieces import StagingSizes
from mpidist.transport.device_over_mpi.staging import Staging
from mpidist.transport.gpu.kernels import DeviceKernels
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.mpi.communicator import MpiCommunicator
from mpidist.transport.node_memory.staging_slots import Slots
from mpidist.transport.node_memory.window import LINE_BYTES
from mpidist.transport.reduction import Reduction
from mpidist.transport.settings import LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES
from mpidist.transport.shared_memory.communicator import SharedMemoryCommunicator
from mpidist.transport.shared_memory.fused_reducer import FusedReducer

__all__ = ["emulated", "gpus"]  # fixtures

pytestmark = pytest.mark.ranks(3)

F64 = np.dtype(np.float64)
KINDS = ["GPUs add", "MPI adds", "shared memory adds"]
DIRECT = "MPI takes device memory"
NO_JOIN = 1 << 60
OUT_OF_MEMORY, ILLEGAL_ADDRESS = 2, 700  # CUDA's


class Rig:
    """A staged communicator, with what it is made of."""

    def __init__(self, comm, kind, sizes=None):
        self.mpi = MpiCommunicator(comm.Dup(), "all")
        self.host: Any = self.mpi
        if kind == "shared memory adds":
            slots = Slots(comm, LINE_BYTES)
            self.host = SharedMemoryCommunicator(self.mpi, FusedReducer(slots, comm.size, 64, self.mpi.traffic))
        join = 1 if kind == "GPUs add" else NO_JOIN
        sizes = StagingSizes(CHUNK, join_bytes=join) if sizes is None else sizes
        self.staging = Staging(sizes, DeviceKernels(), lambda what: None, is_direct=kind == DIRECT)
        self.its: Any = MessagedCommunicator(self.host, self.staging)

    def free(self):
        self.staging.free()
        self.host.free()


@pytest.fixture(params=[*KINDS, DIRECT])
def rig(request, gpus, comm):
    if request.param == DIRECT and not are_emulated() and not hint().works:  # every MPI takes the host's memory
        pytest.skip("needs a GPU, and MPI that takes its memory")
    made = Rig(comm, request.param)
    yield made
    made.free()


@pytest.fixture
def pinned(gpus, monkeypatch):
    """Note the pinned memory of staging: CuPy's pool has its own."""
    real = gpus.cupy.cuda.PinnedMemory

    class Noted(real):
        made: ClassVar[int] = 0
        most_at_once: ClassVar[int] = 0
        there: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

        def __init__(self, nbytes):
            super().__init__(nbytes)
            Noted.made += 1
            Noted.there.add(self)
            Noted.most_at_once = max(Noted.most_at_once, len(Noted.there))

    monkeypatch.setattr(gpus.cupy.cuda, "PinnedMemory", Noted)
    return Noted


def test_staging_passes_checks_of_device_communicators(rig):
    for check in CHECKS.values():
        check(rig.its)


def test_bytes_are_counted_as_without_chunks_and_so_many_are_sent(gpus, comm, monkeypatch):
    sent = []
    transfer = MpiCommunicator.transfer

    def count(its, sends, receives):
        sent.extend(part.nbytes for part, _ in sends)
        transfer(its, sends, receives)

    monkeypatch.setattr(MpiCommunicator, "transfer", count)
    rig, size, chunks = Rig(comm, "GPUs add"), comm.size, 8 * comm.size
    its, nbytes = rig.its, chunks * CHUNK
    buffer, other = up(np.ones(nbytes // 4, np.float32)), up(np.ones(nbytes // 4, np.float32))
    share, after, before = nbytes * (size - 1) // size, (comm.rank + 1) % size, (comm.rank - 1) % size
    calls = {  # bytes, and messages
        "all_reduce": (lambda: its.all_reduce(buffer, Reduction()), 2 * share, 2 * chunks * (size - 1)),
        "reduce": (lambda: its.reduce(buffer, Reduction(), 0), nbytes, None),
        "reduce_scatter": (lambda: its.reduce_scatter(buffer, Reduction()), share, chunks * (size - 1)),
        "all_gather": (lambda: its.all_gather(buffer), share, chunks * (size - 1)),
        "broadcast": (lambda: its.broadcast(buffer, 0), nbytes, None),
        "exchange": (lambda: its.send_receive(buffer, after, other, before), nbytes, None),
    }
    for call, num_bytes, num_messages in calls.values():
        sent.clear()
        call()
        assert num_messages is None or (sum(sent), len(sent)) == (num_bytes, num_messages)
    assert its.traffic is rig.mpi.traffic
    assert dict(its.traffic.calls) == dict.fromkeys(calls, 1)
    assert dict(its.traffic.nbytes) == {name: num_bytes for name, (_, num_bytes, _) in calls.items()}
    rig.free()


def test_staging_copies_no_more_bytes_than_needed(emulated, comm):
    """And no more: a rank's own part of a sum stays where it is until it is whole."""
    size, nbytes = comm.size, 8 * comm.size * CHUNK
    others, own = nbytes * (size - 1) // size, nbytes // size
    for kind, lowered, raised in (
        ("GPUs add", others + own * (size > 1), (size - 1) * own + others),
        ("shared memory adds", nbytes, nbytes),
    ):
        rig = Rig(comm, kind)
        buffer = up(np.ones(nbytes // 4, np.float32))
        emulated.forget()
        rig.its.all_reduce(buffer, Reduction())
        assert emulated.nbytes("copy down") == lowered
        assert emulated.nbytes("copy up") == raised
        rig.free()


@pytest.mark.parametrize("kind", KINDS)
def test_staging_copies_next_chunks_while_one_is_moved(emulated, comm, monkeypatch, kind):
    """Copies of the chunks to come are begun before a chunk is moved, and none waits for the last one to be up."""
    rig = Rig(comm, kind)
    depth, chunks = rig.staging.sizes.depth, 8
    down_before = []
    name = "transfer" if kind == "GPUs add" else "all_reduce"
    do = getattr(type(rig.host), name)

    def note(*arguments):
        down_before.append(emulated.nbytes("copy down"))
        do(*arguments)

    monkeypatch.setattr(type(rig.host), name, note)
    buffer = up(np.ones(chunks * CHUNK // 4, np.float32))
    emulated.forget()
    rig.its.all_reduce(buffer, Reduction())
    if kind == "GPUs add":  # first and second phases in turn: 0, 1, 0, 2, 1, ...
        first_phase, second_phase = CHUNK * (comm.size - 1) // comm.size, CHUNK // comm.size * (comm.size > 1)
        expected = []
        for turn in range(chunks + 1):
            begun = min(chunks, depth + max(0, turn - 1)) * first_phase
            expected += [begun + turn * second_phase] * (turn < chunks)
            expected += [begun + min(chunks, turn + 1) * second_phase] * (turn > 0)
        assert down_before == expected
    else:
        assert down_before == [min(chunks, depth + at) * CHUNK for at in range(chunks)]
    rig.free()


def test_slots_are_few_and_made_anew_when_more_is_needed(emulated, pinned, comm):
    rig = Rig(comm, "GPUs add")
    buffer = up(np.ones(3 * CHUNK, np.float32))
    for _ in range(3):
        rig.its.all_reduce(buffer, Reduction())
        rig.its.reduce_scatter(buffer, Reduction())
        rig.its.broadcast(buffer, 0)
    assert pinned.made == 1
    assert sum(its.size for its in pinned.there) <= rig.staging.sizes.depth * 2 * 1024
    assert grown_by(lambda: rig.its.all_reduce(buffer, Reduction()), 10) == {}
    rig.free()
    gc.collect()
    assert not pinned.there
    rig = Rig(comm, "GPUs add", StagingSizes(join_bytes=1))
    for count in (10, 1000, 100, 70_000, 60_000, 2_000_000, 300):
        rig.its.all_reduce(buffer := up(np.ones(count, np.float32)), Reduction())
        assert (down(buffer) == comm.size).all()
    gc.collect()
    assert pinned.made <= 6
    assert len(pinned.there) == pinned.most_at_once == 1
    rig.free()


def test_staging_adds_small_arrays_on_the_host(emulated, comm):
    count, size = 100 * comm.size, comm.size
    nbytes = 8 * count
    for sizes, do_gpus_add in (
        (StagingSizes(join_bytes=nbytes + 1), False),
        (StagingSizes(join_bytes=nbytes), True),
        (StagingSizes(join_bytes=1, join_ranks=size - 1), False),
        (StagingSizes(join_bytes=1, join_ranks=size), True),
    ):
        rig, buffer = Rig(comm, "as the sizes say", sizes), mine(comm.rank, count, F64)
        emulated.forget()
        rig.its.all_reduce(buffer, Reduction())
        assert bool(emulated.calls("a kernel")) == do_gpus_add, sizes
        assert is_total(buffer, size, count, F64)
        rig.free()


@pytest.mark.filterwarnings("ignore:Using synchronous transfer")  # CuPy's own copies
@pytest.mark.parametrize("kind", KINDS)
def test_staging_falls_back_to_pageable_memory(emulated, pinned, comm, caplog, kind):
    emulated.wish("cudaHostAlloc", OUT_OF_MEMORY * (comm.rank == 0))
    rig = Rig(comm, kind)
    for count in (50, 500):
        buffer = mine(comm.rank, count, F64)
        rig.its.all_reduce(buffer, Reduction())
        assert is_total(buffer, comm.size, count, F64)
    assert caplog.text.count("of pinned memory (cudaErrorMemoryAllocation: ") == (comm.rank == 0)
    assert pinned.made == 0 or comm.rank
    rig.free()


# Sizes.


@pytest.mark.no_mpi
@pytest.mark.parametrize(
    ("speed", "chunks"),
    [
        (1e9, {0: 0, 1: 1, 256 << 10: 1, 1 << 20: 4, 16 << 20: 13}),
        (1.25e9, {100_000_000: math.ceil(1e8 / math.sqrt(1e8 * 230e-6 * 1.25e9 / 2))}),
        (1e6, {1 << 29: (1 << 29) // LEAST_CHUNK_BYTES}),
        (1e12, {4 << 20: 1, 1 << 40: (1 << 40) // MOST_CHUNK_BYTES}),
        (None, {0: 0, 1: 1, 100: 1, 101: 2, 1000: 10}),
    ],
)
def test_number_of_chunks(speed, chunks):
    """By the speed of the network, or of a size that was set."""
    sizes = StagingSizes(100) if speed is None else StagingSizes(bytes_per_second=speed)
    assert {nbytes: sizes.num_chunks(nbytes) for nbytes in chunks} == chunks


def test_sizes_must_be_the_same_on_all_ranks(comm, monkeypatch):
    for text, kind, pattern in (
        ("524288", TopologyError, "MPIDIST_STAGING_BYTES must be the same on all ranks"),
        ("0", ValueError, "rank 0: MPIDIST_STAGING_BYTES='0'"),
    ):
        monkeypatch.setenv("MPIDIST_STAGING_BYTES", "262144" if comm.rank else text)
        with raises_everywhere(comm, kind, pattern):
            SyncGroup.from_mpi(comm)


def test_staging_bytes_sets_the_chunk(emulated, comm, monkeypatch):
    monkeypatch.setenv("MPIDIST_STAGING_BYTES", str(LEAST_CHUNK_BYTES))
    monkeypatch.setenv("MPIDIST_NCCL", "0")
    for group in opened(comm):
        value = up(np.ones(4 * LEAST_CHUNK_BYTES, np.uint8))
        result = BoundOps(CollectiveAllReduce(), group).all_reduce("SUM", value)
        assert (down(result) == comm.size).all()
        assert emulated.calls("copy down") == [*[("copy down", LEAST_CHUNK_BYTES)] * 4, ("copy down", value.nbytes)]


# What goes wrong.


@pytest.mark.parametrize(
    ("kind", "call", "error"),
    [
        *((kind, "all_reduce", DeadlineExceededError) for kind in KINDS),
        ("GPUs add", "broadcast", DeadlineExceededError),
        ("GPUs add", "exchange", KeyboardInterrupt),
    ],
)
def test_staging_call_with_a_missing_rank_ends_without_memory_reuse(emulated, pinned, comm, kind, call, error):
    rig = Rig(comm, kind)
    buffer = up(np.ones(5 * CHUNK, np.float32))
    rig.its.all_reduce(buffer, Reduction())
    kept = weakref.ref(buffer)
    calls = {
        "all_reduce": lambda: rig.its.all_reduce(buffer, Reduction()),
        "broadcast": lambda: rig.its.broadcast(buffer, 1),
        "exchange": lambda: rig.its.send_receive(buffer, 1, buffer.copy(), 1),
    }
    start = time.monotonic()

    def check_peers():
        if time.monotonic() - start > 0.3:
            raise error("rank 1 did not come")

    rig.host.set_wait_hook(check_peers)
    rig.its.set_wait_hook(check_peers)
    if comm.rank != 1:
        with pytest.raises(error, match="rank 1 did not come"):
            calls[call]()
        with pytest.raises(RuntimeError, match=r"an earlier call failed .*rank 1 did not come.*reset"):
            calls[call]()
        rig.staging.free()
        del rig.its, rig.staging, buffer
        gc.collect()
        assert len(pinned.there) == 1, "MPI may still write it"
        assert kept() is not None, "the GPU may still copy it"
    comm.Barrier()


@pytest.mark.parametrize("text", ["cudaErrorIllegalAddress", "through the host failed: CUDA's status 700"])
def test_staging_is_broken_by_an_error_of_cuda(emulated, comm, monkeypatch, text):
    """Of a copy; or of an event, where it is told from work that is not done."""
    rig, buffer = Rig(comm, "GPUs add"), up(np.ones(20 * CHUNK, np.float32))
    if text == "cudaErrorIllegalAddress":
        emulated.wish("copy down", ILLEGAL_ADDRESS)  # before any message
    else:
        monkeypatch.setattr(cuda.current().cupy.cuda.runtime, "eventQuery", lambda ptr: ILLEGAL_ADDRESS)
    with raises_everywhere(comm, RuntimeError, text):
        rig.its.all_reduce(buffer, Reduction())
    with raises_everywhere(comm, RuntimeError, f"an earlier call failed .*{text}.*reset"):
        rig.its.reduce_scatter(buffer, Reduction())
    rig.mpi.free()
