"""CuPy and NCCL without a GPU: their interface and their rules, on host memory, with the right numbers over MPI.

A `StandIn` has the parts of CuPy that mpidist uses (arrays, streams, events, `cupy.cuda.nccl`) and goes in at
`mpidist.transport.cuda.provided_by`. It works as a GPU does, late: a call of NCCL is put on a stream and done when
somebody asks for an event. What a real one would answer with wrong numbers, a crash or a hang, it writes to `problems`,
which every test must find empty: memory that is read or freed while a call that nobody waited for still works on it;
ranks that make different calls; calls on two streams or in two threads at once; communicators that garbage collection
destroys.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from mpidist.transport import arrays, cuda
from standin import kernels as standin_kernels
from standin.staging import add_staging

__all__ = ["FakeArray", "StandIn"]

NOT_READY = 600
PATIENCE = 30.0
NAMES = {
    1: "UNHANDLED_CUDA_ERROR", 2: "SYSTEM_ERROR", 3: "INTERNAL_ERROR", 4: "INVALID_ARGUMENT", 5: "INVALID_USAGE",
    6: "REMOTE_ERROR",
}  # fmt: skip
CODES = [np.dtype(code) for code in "bBiIqQefd"] + [np.dtype(ml_dtypes.bfloat16)]
OPS = [np.add, np.multiply, np.fmax, np.fmin]  # NCCL's minimum and maximum lose a NaN


class NcclError(RuntimeError):
    """As CuPy's: it has no word for the statuses 7 and 8."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"NCCL_ERROR_{NAMES[status]}: from the stand-in")


class Allocation:
    """Device memory."""

    def __init__(self, nbytes: int, device: int = 0) -> None:
        self.device = device
        memory = np.empty(nbytes + 16 + 512, np.uint8)
        self.memory = memory[-memory.ctypes.data % 512 :]  # as CuPy's
        self.address = self.memory.__array_interface__["data"][0]
        self.nbytes = nbytes
        self.stream = 0  # the address of the one that was current


class Stream:
    """A queue of launches, and what its next work comes after."""

    def __init__(self, world: StandIn, non_blocking: bool = False, priority: int | None = None) -> None:
        self.world = world
        self.non_blocking = non_blocking
        self.priority = 0 if priority is None else priority
        self.ptr = next(world.numbers)
        self.device = world.device
        self.clock = 0
        self.knows: dict[int, int] = {}
        self.queue: deque[Launch] = deque()
        self.waits: list[Mark] = []
        self.captured: list[Callable[[], None]] | None = None  # of kernels, instead of their run
        world.streams[self.ptr] = self

    def wait_event(self, event: Event) -> None:
        self.waits = [mark for mark in (*self.waits, event.mark) if not mark.is_complete()]
        _learn(self.knows, event.knows)

    def use(self) -> Stream:
        self.world.current = self
        return self

    def is_capturing(self) -> bool:
        return self.captured is not None or self.ptr in self.world.captured

    def __enter__(self) -> Stream:
        self.before, self.world.current = self.world.current, self
        return self

    def __exit__(self, *error: Any) -> None:
        self.world.current = self.before

    def issue(self) -> None:
        """Note that work comes after all that this stream, or the host, has seen."""
        _learn(self.knows, self.world.host_knows)
        self.clock += 1
        self.knows[self.ptr] = self.clock

    def synchronize(self) -> None:
        self.world.until(lambda: not self.queue and all(event.is_complete() for event in self.waits))
        _learn(self.world.host_knows, self.knows)


class Mark:
    """A place in a stream: the launches before it, and what they come after."""

    def __init__(self, launches: list[Launch], waits: list[Mark]) -> None:
        self.launches, self.waits = launches, waits

    def is_complete(self) -> bool:
        self.launches = [launch for launch in self.launches if not launch.is_done]
        self.waits = [mark for mark in self.waits if not mark.is_complete()]
        return not self.launches and not self.waits


class Event:
    """A name for a place in a stream: who waits for it waits for the place that it has then."""

    def __init__(self, world: StandIn, disable_timing: bool = False) -> None:
        assert disable_timing, "timing costs"
        self.world = world
        self.ptr = next(world.numbers)
        self.knows: dict[int, int] = {}
        self.mark = Mark([], [])
        world.events[self.ptr] = self

    def record(self, stream: Stream) -> None:
        self.knows = dict(stream.knows)
        self.mark = Mark(list(stream.queue), list(stream.waits))

    def is_complete(self) -> bool:
        return self.mark.is_complete()


class Launch:
    """One launch: the calls of a group of NCCL's, or a copy."""

    def __init__(self, calls: list[Iterator[None]], stream: Stream, comm: Any, holds: list[Allocation]) -> None:
        self.calls = calls
        self.comm = comm
        self.waits, stream.waits = stream.waits, []
        self.addresses = {its.address for its in holds}
        self.memory = [its.memory for its in holds]  # so that a fault is found, and not made
        self.is_done = False

    def step(self) -> None:
        if all(event.is_complete() for event in self.waits):
            self.calls = [call for call in self.calls if next(call, "end") != "end"]
            self.is_done = not self.calls


class FakeArray(np.lib.mixins.NDArrayOperatorsMixin):
    """What mpidist uses of `cupy.ndarray`. All work waits for, and comes after, what the current stream holds."""

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, out: Any = None, **_: Any) -> Any:
        taken = (FakeArray, int, float, complex, np.generic)
        if method != "__call__" or not all(isinstance(its, taken) for its in (*inputs, *(out or ()))):
            return NotImplemented  # CuPy's arrays and NumPy's do not mix
        if out is None:
            return self._world.computed(function, inputs)
        return self._world.ufunc(function)(*inputs, out=out[0])

    def __init__(self, world: StandIn, numbers: Any, allocation: Allocation) -> None:
        self._world = world
        self._numbers = numbers
        self._allocation = allocation

    shape = property(lambda self: self._numbers.shape)
    dtype = property(lambda self: self._numbers.dtype)
    size = property(lambda self: self._numbers.size)
    ndim = property(lambda self: self._numbers.ndim)
    nbytes = property(lambda self: self._numbers.nbytes)
    itemsize = property(lambda self: self._numbers.itemsize)
    strides = property(lambda self: self._numbers.strides)
    flags = property(lambda self: SimpleNamespace(c_contiguous=self._numbers.flags.c_contiguous))
    device = property(lambda self: SimpleNamespace(id=self._allocation.device))
    data = property(
        lambda self: SimpleNamespace(
            ptr=self._numbers.__array_interface__["data"][0], device_id=self._allocation.device, mem=self._allocation
        )
    )
    __cuda_array_interface__ = property(lambda self: {"version": 3})

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, at: Any) -> FakeArray:
        if isinstance(at, FakeArray):
            return self._world.asarray(self._world.read(self)[self._world.read(at)])
        return self._view(self._numbers[at])

    def __setitem__(self, at: Any, value: Any) -> None:
        if isinstance(at, FakeArray):
            self._world.touch(self._world.current, self, is_write=True)
            where = self._world.read(at)
            assert len(np.unique(where)) == where.size, "a GPU writes a row once or in any order"
            self._numbers[where] = self._world.read(value)
            return
        part = self._view(self._numbers[at])
        part._write(self._world.read(value))

    def __iter__(self) -> Iterator[FakeArray]:
        return (self[at] for at in range(len(self)))

    def reshape(self, *shape: Any) -> FakeArray:
        flat = self._numbers.reshape(*shape)
        if np.shares_memory(flat, self._numbers) or not self.size:
            return self._view(flat)
        return self._world.asarray(self._world.read(self).reshape(*shape))

    def view(self, dtype: Any = None) -> FakeArray:
        return self._view(self._numbers.view(self.dtype if dtype is None else dtype))

    def swapaxes(self, one: int, other: int) -> FakeArray:
        return self._view(self._numbers.swapaxes(one, other))

    def astype(self, dtype: Any, copy: bool = True) -> FakeArray:
        if not copy and self.dtype == dtype:
            return self
        return self._world.asarray(self._world.read(self).astype(dtype))

    def copy(self) -> FakeArray:
        return self._world.asarray(np.ascontiguousarray(self._world.read(self)).reshape(self.shape))

    def __eq__(self, other: Any) -> Any:
        return self._world.asarray(self._world.read(self) == self._world.read(other))

    __hash__ = object.__hash__

    def all(self) -> FakeArray:
        return self._world.asarray(self._world.read(self).all())

    T = property(lambda self: self._view(self._numbers.T))

    def __bool__(self) -> bool:
        return bool(self._world.asnumpy(self))

    def __int__(self) -> int:
        return int(self._world.asnumpy(self))

    def __float__(self) -> float:
        return float(self._world.asnumpy(self))

    def __truediv__(self, divisor: Any) -> FakeArray:
        return self._world.asarray(self._world.read(self) / divisor)

    def __itruediv__(self, divisor: Any) -> FakeArray:
        self._write(self._world.read(self) / divisor)
        return self

    def _view(self, numbers: Any) -> FakeArray:
        if not isinstance(numbers, np.ndarray):
            numbers = np.asarray(numbers)
        return FakeArray(self._world, numbers, self._allocation)

    def _write(self, numbers: Any) -> None:
        self._world.touch(self._world.current, self, is_write=True)
        with np.errstate(all="ignore"):
            np.copyto(self._numbers, numbers, casting="unsafe")


class ForeignMemory:
    """As `cupy.cuda.UnownedMemory`, that of another library's arrays."""


class StandIn:
    """One rank's CuPy and NCCL.

    Args:
        comm: The ranks that NCCL may join.
        device: This rank's GPU.
        nccl_version: As NCCL numbers it.

    Attributes:
        problems: What a real GPU would not have forgiven.
        fails: What shall fail on this rank: `"unique_id"`, `"constructor"`.
        hangs: What shall never return: `"abort"`, `"destroy"`.
        log: What became of communicators: `("abort", 2)` for two in one group.
        num_issued: Number of calls of NCCL.
    """

    def __init__(self, comm: Any, device: int | None = None, nccl_version: int = 22809) -> None:
        self.comm = comm.Dup()
        self.device = comm.rank if device is None else device
        self.problems: list[str] = []
        self.fails: set[str] = set()
        self.hangs: set[str] = set()
        self.log: list[tuple[str, int]] = []
        self.num_issued = 0
        self.is_over = False
        self.numbers = itertools.count(1000)
        self.streams: dict[int, Stream] = {}
        self.events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()
        self.host_knows: dict[int, int] = {}
        self.accesses: dict[int, list[tuple[int, int, int, int, bool]]] = defaultdict(list)
        self.allocations: weakref.WeakValueDictionary[int, Allocation] = weakref.WeakValueDictionary()
        self.current_streams: dict[int, Stream] = {}  # by device
        self.communicators: weakref.WeakSet[Any] = weakref.WeakSet()
        self.in_process: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
        self.moved: list[tuple[str, int]] = []  # the calls of NCCL that move bytes: each with what it sends or receives
        self.sent: list[Any] = []
        self.folders: list[str] = []
        self.captured: set[int] = set()  # addresses of streams that go into a CUDA graph
        self.busy = threading.Lock()
        self.local = threading.local()
        self.module = _cupy_module(self)
        self.nccl = _nccl_module(self, nccl_version)
        self.staging = add_staging(self)
        self.cuda = cuda.Cuda({"cupy": self.module, "cupy.cuda.nccl": self.nccl}.__getitem__, lambda name: True)

    @property
    def current(self) -> Stream:
        """The current stream of the current device."""
        if self.device not in self.current_streams:
            self.current_streams[self.device] = Stream(self)
        return self.current_streams[self.device]

    @current.setter
    def current(self, stream: Stream) -> None:
        self.current_streams[stream.device] = stream

    # Arrays.

    def empty(self, shape: Any, dtype: Any = np.float64) -> FakeArray:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = np.dtype(dtype)
        if dtype.char in "gG":
            raise TypeError(f"a GPU has no {dtype}")
        nbytes = math.prod(shape) * dtype.itemsize
        allocation = Allocation(nbytes, self.device)
        self.allocations[allocation.address] = allocation
        weakref.finalize(allocation, self._freed, allocation.address).atexit = False
        return FakeArray(self, allocation.memory[:nbytes].view(dtype).reshape(shape), allocation)

    def asarray(self, value: Any) -> FakeArray:
        if isinstance(value, FakeArray):
            if value.device.id == self.device:
                return value
            copied = self.empty(value.shape, value.dtype)
            self.current.issue()
            low, high = arrays.memory_bounds(value._numbers)
            self.note(self.current, value._allocation, low, high, False)  # no stream waits for those of other devices
            np.copyto(copied._numbers, value._numbers)
            return copied
        value = np.asarray(value)
        array = self.empty(value.shape, value.dtype)
        array._write(value)
        return array

    def asnumpy(self, array: FakeArray) -> Any:
        before, self.device = self.device, array.device.id
        numbers = self.read(array).copy()
        self.current.synchronize()
        self.device = before
        return numbers

    def read(self, value: Any) -> Any:
        if isinstance(value, FakeArray):
            self.touch(self.current, value)
            return value._numbers
        assert np.ndim(value) == 0, "CuPy takes no NumPy array here"
        return value

    def computed(self, function: Any, inputs: Any) -> FakeArray:
        """Compute a new array."""
        with np.errstate(all="ignore"):
            return self.asarray(function(*map(self.read, inputs)))

    def ufunc(self, function: Any) -> Callable[..., FakeArray]:
        def apply(one: FakeArray, other: Any, out: FakeArray) -> FakeArray:
            with np.errstate(all="ignore"):
                out._write(function(self.read(one), self.read(other)))
            return out

        return apply

    # Order.

    def touch(self, stream: Stream, array: FakeArray, is_write: bool = False) -> None:
        """Let a stream work on an array at once: what the stream holds is done before."""
        if array._allocation.device != self.device:
            self.problems.append(f"work on GPU {self.device} with an array of GPU {array._allocation.device}")
        self.until(lambda: not stream.queue and all(event.is_complete() for event in stream.waits))
        stream.waits.clear()
        stream.issue()
        low, high = arrays.memory_bounds(array._numbers)
        self.note(stream, array._allocation, low, high, is_write)

    def note(self, stream: Stream, allocation: Allocation, low: int, high: int, is_write: bool) -> None:
        """Note that memory is used, and find out whether somebody else may be using it."""
        kept = []
        for access in self.accesses[allocation.address]:
            its_low, its_high, its_stream, its_clock, its_write = access
            if self.host_knows.get(its_stream, 0) >= its_clock:
                continue  # whatever is issued from now on comes after it
            is_before = stream.knows.get(its_stream, 0) >= its_clock
            if not is_before and its_low < high and low < its_high and (is_write or its_write):
                self.problems.append(f"race: stream {stream.ptr} came before stream {its_stream} was done")
            if not (is_before and low <= its_low and its_high <= high and is_write >= its_write):
                kept.append(access)
        kept.append((low, high, stream.ptr, stream.clock, is_write))
        self.accesses[allocation.address] = kept

    def _freed(self, address: int) -> None:
        self.accesses.pop(address, None)
        if any(address in launch.addresses for stream in self.streams.values() for launch in stream.queue):
            self.problems.append("memory was freed while NCCL worked on it")

    def progress(self) -> None:
        for stream in list(self.streams.values()):  # of which another thread may make more
            if stream.queue:
                stream.queue[0].step()
                if stream.queue[0].is_done:
                    stream.queue.popleft()

    def until(self, is_done: Callable[[], bool]) -> None:
        start = time.monotonic()
        while not is_done():
            self.progress()
            if time.monotonic() - start > PATIENCE:
                raise AssertionError("the host waits for a GPU that waits for ever")

    def reach(self, stream: Stream) -> None:
        """Do what a stream holds before the kernel that it gets now."""
        self.until(lambda: not stream.queue and all(event.is_complete() for event in stream.waits))
        stream.waits.clear()

    def run_kernel(self, work: Callable[[Any], None], args: Any, ranges: list[tuple[int, int, bool]]) -> None:
        """Run a kernel on the current stream, and note the memory that it reads and writes."""
        self.current.issue()
        for low, high, is_write in ranges:
            allocation = self.find(low, high - low)
            if allocation.device != self.device:
                self.problems.append(f"a kernel on GPU {self.device} with memory of GPU {allocation.device}")
            self.note(self.current, allocation, low, high, is_write)
        work(args)

    def query(self, ptr: int) -> int:
        self.progress()
        event = self.events[ptr]
        if not event.is_complete():
            return NOT_READY
        _learn(self.host_knows, event.knows)
        return 0

    # NCCL.

    def find(self, address: int, nbytes: int) -> Allocation:
        for allocation in list(self.allocations.values()):
            if allocation.address <= address and address + nbytes <= allocation.address + allocation.nbytes:
                return allocation
        self.problems.append("NCCL was given memory that is not there")
        raise NcclError(4)

    def inject(self, status: int) -> None:
        """Let every communicator of this rank have an error, as the network makes them."""
        for communicator in self.communicators:
            communicator.status = status

    def close(self) -> None:
        """Leave MPI as it was. Collective."""
        self.is_over = True
        self.comm.Barrier()
        while (message := self.comm.improbe()) is not None:
            message.recv()
        for request in self.sent:
            request.wait()
        self.comm.Barrier()
        self.comm.Free()
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


def _learn(one: dict[int, int], other: dict[int, int]) -> None:
    for stream, clock in other.items():
        one[stream] = max(one.get(stream, 0), clock)


def _cupy_module(world: StandIn) -> Any:
    def device(index: int) -> Any:
        return SimpleNamespace(
            id=index, use=lambda: setattr(world, "device", index), pci_bus_id=f"0000:{index:02x}:00.0"
        )

    runtime = SimpleNamespace(
        getDeviceCount=lambda: 8,
        getDevice=lambda: world.device,
        runtimeGetVersion=lambda: 12090,
        driverGetVersion=lambda: 13000,
        getDeviceProperties=lambda index: {},
        eventQuery=world.query,
    )
    cuda = SimpleNamespace(
        is_available=lambda: True,
        UnownedMemory=ForeignMemory,
        runtime=runtime,
        Device=device,
        Stream=lambda non_blocking=False, priority=None: Stream(world, non_blocking, priority),
        Event=lambda disable_timing=False: Event(world, disable_timing),
        get_current_stream=lambda: world.current,
    )
    functions = {name: world.ufunc(getattr(np, name)) for name in ("add", "multiply", "minimum", "maximum")}
    module = SimpleNamespace(
        __version__="14.2.0",
        cuda=cuda,
        ndarray=FakeArray,
        empty=world.empty,
        split=lambda array, bounds: [array[a:b] for a, b in itertools.pairwise([0, *bounds, len(array)])],
        asarray=world.asarray,
        asnumpy=world.asnumpy,
        from_dlpack=lambda value: value.__dlpack__(stream=world.current.ptr),
        **functions,
    )
    standin_kernels.add_to(world, module)
    return module


def _nccl_module(world: StandIn, version: int) -> Any:
    def get_unique_id() -> bytes:
        if "unique_id" in world.fails:
            raise NcclError(2)
        folder = tempfile.mkdtemp(prefix="nccl-")
        number = world.comm.rank * 1000 + len(world.folders)
        world.folders.append(folder)
        return f"{number}:{folder}".encode().ljust(128, b"\0")

    def group_start() -> None:
        world.local.depth = getattr(world.local, "depth", 0) + 1
        if world.local.depth == 1:
            world.local.calls, world.local.aborts, world.local.made, world.local.destroyed = [], [], [], []

    def group_end() -> None:
        world.local.depth -= 1
        if world.local.depth == 0:
            calls, world.local.calls = world.local.calls, []
            aborts, world.local.aborts = world.local.aborts, []
            for communicator in world.local.made:
                communicator.meet()
            _connect({comm for comm, *_ in calls})
            _launch(world, calls)
            _end(world, "abort", aborts)
            _end(world, "destroy", world.local.destroyed)

    names = ["INT8", "UINT8", "INT32", "UINT32", "INT64", "UINT64", "FLOAT16", "FLOAT32", "FLOAT64", "BFLOAT16"]
    codes = {f"NCCL_{name}": code for code, name in enumerate(names)}
    ops = {f"NCCL_{name}": code for code, name in enumerate(["SUM", "PROD", "MAX", "MIN", "AVG"])}
    return SimpleNamespace(
        available=True,
        get_version=lambda: version,
        get_unique_id=get_unique_id,
        groupStart=group_start,
        groupEnd=group_end,
        NcclError=NcclError,
        NcclCommunicator=lambda *arguments: Communicator(world, *arguments),
        **codes,
        **ops,
    )


def _connect(communicators: set[Communicator]) -> None:
    """Connect communicators for what they are about to do, as NCCL does: the host waits until the others come to it."""
    wanted = [(its, own, other) for its in communicators for own, other in its.wanted if own not in its.connected]
    for its, own, _ in wanted:
        its.connected.add(own)
        Path(its.folder, own).touch()
    has_others = any(its.members != [its.world.comm.rank] * its.size for its, *_ in wanted)
    if has_others and threading.current_thread() is threading.main_thread():
        wanted[0][0].world.problems.append("the thread that makes calls waits in NCCL, where no deadline holds")
    until = time.monotonic() + PATIENCE
    for its, _, other in wanted:
        while its.is_aborted_somewhere() or not Path(its.folder, other).exists():
            if its.has_ended or its.world.is_over or time.monotonic() > until:
                raise NcclError(6)
            its.world.progress()  # the GPU works on: other ranks may wait for what it has under way
            time.sleep(0.001)
    for its in communicators:
        its.wanted.clear()


def _launch(world: StandIn, calls: list[Any]) -> None:
    by_stream: dict[int, list[Any]] = defaultdict(list)
    for comm, stream, call, holds in calls:
        by_stream[stream].append((comm, call, holds))
    for ptr, its in by_stream.items():
        comm, stream = its[0][0], world.streams[ptr]
        for other in world.streams.values():
            if other is not stream and any(launch.comm is comm for launch in other.queue):
                world.problems.append("two calls in flight on one communicator, on two streams")
        launch = Launch([call for _, call, _ in its], stream, comm, [part for _, _, holds in its for part in holds])
        stream.queue.append(launch)


def _end(world: StandIn, how: str, communicators: list[Communicator]) -> None:
    if not communicators:
        return
    world.log.append((how, len(communicators)))
    while how in world.hangs and not world.is_over:
        time.sleep(0.001)
    for communicator in communicators:
        communicator.has_ended = True
        if how == "abort" and communicator.aborted.parent.exists():
            communicator.aborted.touch()
        for stream in world.streams.values():
            for launch in stream.queue:
                launch.is_done = launch.is_done or launch.comm is communicator
            stream.queue = deque(launch for launch in stream.queue if not launch.is_done)


class Communicator:
    """As CuPy's `NcclCommunicator`: blocks until all ranks have come, without a limit."""

    def __init__(self, world: StandIn, ndev: int, comm_id: bytes, rank: int) -> None:
        self.has_ended = True  # until it is made
        self.world = world
        if "constructor" in world.fails:
            raise NcclError(2)
        assert isinstance(comm_id, bytes), "CuPy 14 wants bytes"
        assert len(comm_id) == 128
        number, _, folder = comm_id.rstrip(b"\0").decode().partition(":")
        (Path(folder) / f"new{rank}").write_text(str(world.comm.rank))
        (Path(folder) / f"new{rank}").rename(Path(folder) / str(rank))
        self.folder, self.size, self.device = folder, ndev, world.device
        self.members: list[int] = []
        self.rank, self.tag, self.status = rank, int(number), 0
        self.sequence = 0
        self.connected: set[str] = set()
        self.wanted: list[tuple[str, str]] = []  # files that tell of one end of a connection, and of the other
        self.aborted = Path(folder) / "aborted"
        self.inbox: dict[tuple[int, Any], Any] = {}
        self.p2p: dict[tuple[int, bool], int] = defaultdict(int)
        if getattr(world.local, "depth", 0):
            world.local.made.append(self)
        else:
            self.meet()

    def meet(self) -> None:
        """Wait until all ranks have come."""
        places = [Path(self.folder) / str(at) for at in range(self.size)]
        while not all(place.exists() for place in places):
            if self.world.is_over:
                raise NcclError(6)
            time.sleep(0.001)
        self.members = [int(place.read_text()) for place in places]
        self.has_ended = False
        self.world.communicators.add(self)
        self.world.in_process[self.folder, self.rank] = self

    def __del__(self) -> None:
        if not self.has_ended:
            self.world.problems.append("garbage collection destroyed a communicator")

    def is_aborted_somewhere(self) -> bool:
        """Whether a rank has aborted: what the others wait for never comes then."""
        return self.aborted.exists()

    def check_async_error(self) -> None:
        if self.status:
            raise NcclError(self.status)

    def abort(self) -> None:
        if getattr(self.world.local, "depth", 0):
            self.world.local.aborts.append(self)
        else:
            _end(self.world, "abort", [self])

    def destroy(self) -> None:
        if self.has_ended:
            return
        if getattr(self.world.local, "depth", 0):
            self.world.local.destroyed.append(self)
        else:
            _end(self.world, "destroy", [self])

    # Calls: pointers, counts, codes and streams are plain ints.

    def allReduce(self, sent: int, received: int, count: int, code: int, op: int, stream: int) -> None:  # noqa: N802
        def finish(parts: list[Any], result: Any) -> None:
            result[...] = _joined(parts, op)

        self._collective(("allReduce", count, code, op), sent, count, received, count, code, stream, finish, op)

    def reduce(self, sent: int, received: int, count: int, code: int, op: int, root: int, stream: int) -> None:
        def finish(parts: list[Any], result: Any) -> None:
            if self.rank == root:
                result[...] = _joined(parts, op)

        size = count if self.rank == root else 0
        self._collective(("reduce", count, code, op, root), sent, count, received, size, code, stream, finish, op)

    def reduceScatter(self, sent: int, received: int, count: int, code: int, op: int, stream: int) -> None:  # noqa: N802
        def finish(parts: list[Any], result: Any) -> None:
            result[...] = _joined([part[self.rank * count : (self.rank + 1) * count] for part in parts], op)

        total = count * len(self.members)
        self._collective(("reduceScatter", count, code, op), sent, total, received, count, code, stream, finish, op)

    def allGather(self, sent: int, received: int, count: int, code: int, stream: int) -> None:  # noqa: N802
        def finish(parts: list[Any], result: Any) -> None:
            result[...] = np.concatenate(parts)

        total = count * len(self.members)
        self._collective(("allGather", count, code), sent, count, received, total, code, stream, finish)

    def bcast(self, at: int, count: int, code: int, root: int, stream: int) -> None:
        def finish(parts: list[Any], result: Any) -> None:
            result[...] = parts[root]

        self.world.moved.append(("bcast", count * CODES[code].itemsize))
        self._collective(("bcast", count, code, root), at, count, at, count, code, stream, finish)

    def send(self, at: int, count: int, code: int, peer: int, stream: int) -> None:
        self._check(at, count, code, peer, stream)
        self.world.moved.append(("send", count * CODES[code].itemsize))
        key = ("p2p", self._next(peer, True))
        data, holds = self._memory(stream, at, count, code, False)

        def call() -> Iterator[None]:
            self._post(peer, key, (count, code), data.tobytes())
            yield

        self._enqueue(call(), stream, holds)

    def recv(self, at: int, count: int, code: int, peer: int, stream: int) -> None:
        self._check(at, count, code, peer, stream)
        key = ("p2p", self._next(peer, False))
        data, holds = self._memory(stream, at, count, code, True)

        def call() -> Iterator[None]:
            while not self._has(peer, key):
                yield
            while self.is_aborted_somewhere():
                yield
            head, numbers = self.inbox.pop((peer, key))
            if head != (count, code):
                self.world.problems.append(f"sent {head}, and received {(count, code)}")
            data[...] = np.frombuffer(numbers, data.dtype)

        self._enqueue(call(), stream, holds)

    def _collective(
        self, head: Any, sent: int, num_sent: int, received: int, num_received: int, code: int, stream: int,
        finish: Callable[[list[Any], Any], None], op: int = 0,
    ) -> None:  # fmt: skip
        self._check(sent, received, num_sent, num_received, code, op, stream)
        if not 0 <= op < len(OPS):
            raise NcclError(4)
        key, self.sequence = ("all", self.sequence), self.sequence + 1
        if os.environ.get("NCCL_RUNTIME_CONNECT") != "0":  # else they were connected when they were made
            self.wanted += [(f"all{self.rank}", f"all{peer}") for peer in range(self.size)]
        source, holds = self._memory(stream, sent, num_sent, code, False)
        target, more = self._memory(stream, received, num_received, code, True)

        def call() -> Iterator[None]:
            others = [peer for peer in range(len(self.members)) if peer != self.rank]
            own = source.copy()
            for peer in others:
                self._post(peer, key, head, own.tobytes())
            while not all(self._has(peer, key) for peer in others):
                yield
            while self.is_aborted_somewhere():
                yield
            parts = {peer: self.inbox.pop((peer, key)) for peer in others}
            if any(its != head for its, _ in parts.values()):
                self.world.problems.append(f"ranks make other calls: {head} and {[its for its, _ in parts.values()]}")
                self.status = 5
                while True:
                    yield
            numbers = {peer: np.frombuffer(its, source.dtype) for peer, (_, its) in parts.items()}
            finish([numbers.get(peer, own) for peer in range(len(self.members))], target)

        self._enqueue(call(), stream, holds + more)

    def _check(self, *arguments: Any) -> None:
        if self.has_ended:
            raise NcclError(4)
        if any(type(its) is not int for its in arguments):
            raise TypeError(f"NCCL takes plain ints, got {arguments}")
        if not self.world.busy.acquire(blocking=False):
            self.world.problems.append("two threads in NCCL at once")
            raise NcclError(5)
        self.world.num_issued += 1
        self.world.busy.release()

    def _memory(self, stream: int, at: int, count: int, code: int, is_write: bool) -> tuple[Any, list[Allocation]]:
        if not 0 <= code < len(CODES) or stream not in self.world.streams:
            raise NcclError(4)
        nbytes = count * CODES[code].itemsize
        if not nbytes:
            return np.empty(0, CODES[code]), []
        allocation, queue = self.world.find(at, nbytes), self.world.streams[stream]
        if not allocation.device == queue.device == self.device:
            self.world.problems.append(
                f"NCCL of GPU {self.device} with memory of GPU {allocation.device} on a stream of GPU {queue.device}"
            )
        queue.issue()
        self.world.note(queue, allocation, at, at + nbytes, is_write)
        start = at - allocation.address
        return allocation.memory[start : start + nbytes].view(CODES[code]), [allocation]

    def _enqueue(self, call: Iterator[None], stream: int, holds: list[Allocation]) -> None:
        if getattr(self.world.local, "depth", 0):
            self.world.local.calls.append((self, stream, call, holds))
        else:
            _connect({self})
            _launch(self.world, [(self, stream, call, holds)])

    def _next(self, peer: int, is_send: bool) -> int:
        self.wanted.append((f"{self.rank}-{peer}-{is_send}", f"{peer}-{self.rank}-{not is_send}"))
        self.p2p[peer, is_send] += 1
        return self.p2p[peer, is_send]

    def _post(self, peer: int, key: Any, head: Any, numbers: bytes) -> None:
        here = self.world.in_process.get((self.folder, peer))
        if here is not None:  # of this process
            here.inbox[self.rank, key] = head, numbers
            return
        request = self.world.comm.isend((key, head, numbers), self.members[peer], self.tag)
        self.world.sent = [its for its in self.world.sent if not its.Test()] + [request]

    def _has(self, peer: int, key: Any) -> bool:
        if (self.folder, peer) in self.world.in_process:
            return (peer, key) in self.inbox
        while (message := self.world.comm.improbe(self.members[peer], self.tag)) is not None:
            its_key, head, numbers = message.recv()
            self.inbox[peer, its_key] = head, numbers
        return (peer, key) in self.inbox


def _joined(parts: list[Any], op: int) -> Any:
    total = parts[0].copy()
    with np.errstate(all="ignore"):
        for part in parts[1:]:
            total = OPS[op](total, part)
    return total
