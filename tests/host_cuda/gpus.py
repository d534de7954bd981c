"""What tests of device memory share: CuPy and NCCL, on GPUs that are real or emulated, and arrays that go there."""

import gc
import os
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, final

import numpy as np
import pytest
from support.contributions import contribution, reduction_of

from host_cuda import are_emulated
from host_cuda.emulated import Emulated, memory_is_given_back_late, problems
from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.cross_device_ops.nccl_all_reduce import NcclAllReduce
from mpidist.transport import cuda
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.nccl import handles as nccl_handles

__all__ = [
    "Compiler", "Memory", "allocations", "busy", "capturing", "compiler", "connected", "down", "emulated", "gpus",
    "group", "grown_by", "is_total", "is_working", "memory", "mine", "one_node", "only_emulated", "opened",
    "require_gpus", "up", "use_own_settings",
]  # fmt: skip

_LIMIT_BYTES, _TRIALS = 4 << 20, 4  # of growth
_LIMIT_SECONDS = 60.0  # of what keeps a stream busy
_BUSY = """
extern "C" __global__ void busy(volatile int* is_over, long long nanoseconds) {
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (!*is_over && now - start < nanoseconds);
}
"""


_ON_GPUS = pytest.param("GPU", marks=pytest.mark.gpu)  # the mark is that of all tests that use such a fixture


@pytest.fixture(params=[_ON_GPUS])
def gpus(comm):
    """CuPy with NCCL. Ranks may share GPUs."""
    with _gpus_of(comm) as found:
        yield found


@final
class Memory(NamedTuple):
    """Where a test has its arrays: what brings numbers there, and back as NumPy's."""

    up: Callable[[Any], Any]
    down: Callable[[Any], Any]


@pytest.fixture(params=["host", _ON_GPUS])
def memory(request, comm):
    """The host's memory, and that of GPUs."""
    if request.param == "host":
        yield Memory(np.asarray, np.asarray)
    else:
        with _gpus_of(comm):
            yield Memory(up, down)


@contextmanager
def _gpus_of(comm):
    found = cuda.current()
    reasons = [reason for reason in comm.allgather(found.support.reason) if reason]
    if reasons:
        pytest.skip(f"needs a GPU: {reasons[0]}")
    if os.environ.get("TEST_HOSTIDS") == "1":  # before NCCL's first call: it reads it once
        os.environ["NCCL_HOSTID"] = f"rank{comm.rank}"
    found.cupy.cuda.Device(comm.rank % found.support.num_devices).use()
    with memory_is_given_back_late():
        yield found
    assert comm.allgather(problems()) == [""] * comm.size


def require_gpus(number):
    """Skip the test where this process has fewer."""
    if cuda.current().support.num_devices < number:
        pytest.skip(f"needs a GPU: {number} of them")


def use_own_settings(monkeypatch):
    """Let device memory go as the test says, and not as who has started the tests (see benchmarks/gpu/running.py)."""
    for name in ("MPIDIST_NCCL", "MPIDIST_PRETEND_NODES", "MPIDIST_STAGING_BYTES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def one_node(monkeypatch):
    """Let all ranks be on one node, whatever who has started the tests pretends: some strategies need that."""
    monkeypatch.delenv("MPIDIST_PRETEND_NODES", raising=False)


@pytest.fixture
def only_emulated():
    """Skip the test where GPUs are real."""
    _require_emulated()


def _require_emulated():
    if not are_emulated():
        pytest.skip("needs a GPU that is emulated")


@pytest.fixture
def emulated(gpus, comm, monkeypatch):
    """GPUs that show what they are asked for, and let it fail."""
    use_own_settings(monkeypatch)
    _require_emulated()
    its = Emulated()
    yield its
    its.be_normal()
    gc.collect()
    assert comm.allgather(nccl_handles.num_open()) == [0] * comm.size
    assert its.calls("destroyed alone") == [], "by garbage collection"


@final
class Compiler:
    """Stands in the place of `cupy.RawModule`.

    Attributes:
        seconds: How much longer the next kernel takes.
        error: What compiling raises.
        compiled: Kernels by the ends of their names.
        late: Those of them that a call compiled while its deadline ran.
    """

    def __init__(self, raw_module):
        self.seconds = 0.0
        self.error: Exception | None = None
        self.compiled: set[str] = set()
        self.late: set[str] = set()
        self._raw_module = raw_module

    def __call__(self, code, options):
        """Return a module whose kernels are compiled when they are asked for."""
        module = self._raw_module(code=code, options=options)

        def get_function(name):
            self.compiled.add(kernel := name.removeprefix("mpidist_").removeprefix("combine_"))
            if threading.current_thread() is threading.main_thread():
                self.late.add(kernel)
            seconds, self.seconds = self.seconds, 0.0
            time.sleep(seconds)
            if self.error is not None:
                raise self.error
            return module.get_function(name)

        return SimpleNamespace(get_function=get_function)


@pytest.fixture
def compiler(gpus, monkeypatch):
    """What compiles mpidist's kernels."""
    its = Compiler(gpus.cupy.RawModule)
    monkeypatch.setattr(gpus.cupy, "RawModule", its)
    return its


@pytest.fixture(params=["1", "0"], ids=["NCCL", "staged"])
def group(request, gpus, comm, monkeypatch):
    """Ranks whose device memory goes by NCCL, or through the host."""
    use_own_settings(monkeypatch)
    monkeypatch.setenv("MPIDIST_NCCL", request.param)
    yield from opened(comm)


@pytest.fixture
def connected(emulated, comm):
    """Ranks of one node, whose communicators are made."""
    for made in opened(comm):
        assert is_working(made)
        yield made


def is_working(group, options=None, dtype="f8"):
    """Add the ones of all ranks; say whether the sum is right. Collective."""
    result = BoundOps(NcclAllReduce(), group).all_reduce("SUM", up(np.ones(5, dtype)), options)
    return bool((down(result) == group.topology.size).all())


def opened(comm):
    """Make a group, and close it."""
    made = SyncGroup.from_mpi(comm)
    yield made
    made.close()


@contextmanager
def allocations():
    """Note the bytes of each array that is made meanwhile."""
    noted = []

    class Noting(cuda.current().cupy.cuda.memory_hook.MemoryHook):
        name = "noting"

        def malloc_postprocess(self, *, size, **_):
            noted.append(size)

    with Noting():
        yield noted


@contextmanager
def capturing():
    """Let what is launched meanwhile go into a CUDA graph."""
    with cuda.current().cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        yield
        stream.end_capture()


def holdings():
    """Count what the process holds now."""
    cupy = cuda.current().cupy
    cupy.cuda.runtime.deviceSynchronize()
    cupy.cuda.alloc_pinned_memory(1)  # when CuPy lets go of the events of its own copies that are done
    gc.collect()
    objects = [type(its) for its in gc.get_objects()]
    own = {"device memory of the GPU": -int(cupy.cuda.runtime.memGetInfo()[0])} if are_emulated() else {}
    return own | {
        "device memory in use": int(cupy.get_default_memory_pool().used_bytes()),
        "pinned blocks": int(cupy.get_default_pinned_memory_pool().n_free_blocks()),
        "device memory of CuPy": int(cupy.get_default_memory_pool().total_bytes()),
        "host memory": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "events": objects.count(cupy.cuda.Event),
        "streams": objects.count(cupy.cuda.Stream),
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def grown_by(call, number):
    """Say what grows in so many calls, after a tenth of them, in each trial: not once, as when events come late."""
    # Of which libraries take some, too, now and then; and on a real GPU other processes.
    coarse = ("host memory", "device memory of CuPy", "device memory of the GPU")
    grown = {}
    for _ in range(_TRIALS):
        for _ in range(number // 10):
            call()
        before = holdings()
        for _ in range(number):
            call()
        growth = {name: many - before[name] for name, many in holdings().items()}
        grown = {name: by for name, by in growth.items() if by > (_LIMIT_BYTES if name in coarse else 0)}
        if not grown:
            break
    return grown


@contextmanager
def busy():
    """Keep the current stream busy until the body ends. Yields the event of the end."""
    its, kernel = cuda.current().cupy.cuda, cuda.current().cupy.RawKernel(_BUSY, "busy")
    is_over = np.ndarray(1, np.int32, buffer=its.PinnedMemoryPointer(its.PinnedMemory(512), 0))

    def launch(ends_at_once):
        is_over[0] = ends_at_once
        kernel((1,), (1,), (is_over.ctypes.data, int(_LIMIT_SECONDS * 1e9)))

    launch(True)  # and compile
    its.get_current_stream().synchronize()
    launch(False)
    event = its.get_current_stream().record(its.Event(disable_timing=True))
    try:
        yield event
    finally:
        is_over[0] = 1
        event.synchronize()


def up(numbers):
    """Copy numbers to the device."""
    return cuda.current().cupy.asarray(numbers)


def down(array):
    """Copy an array to the host."""
    return cuda.current().cupy.asnumpy(array)


def mine(rank, count, dtype=np.float32):
    """Return what a rank adds, whose sums are exact in any order, on the device."""
    return up(contribution("sum", rank, count, np.dtype(dtype)))


def is_total(array, size, count, dtype=np.float32):
    """Whether an array, in any memory, is the sum of what so many ranks add."""
    return bool((down(array) == reduction_of("sum", size, count, np.dtype(dtype))).all())
