"""What the GPU check uses of CuPy beyond the library's own needs, on the stand-in: clocks, graphs, pools, plain copies.

Nothing here takes the time that a GPU would: it shows that the check runs and looks at its results, not how fast.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from standin.nccl import Event, Launch, StandIn
from standin.staging import use

__all__ = ["Graph", "add_measuring"]

TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3


class TimedEvent(Event):
    """An event that knows when it was recorded."""

    def __init__(self, world: StandIn, disable_timing: bool = False) -> None:
        super().__init__(world, True)
        self.has_time = not disable_timing
        self.seconds = 0.0

    def record(self, stream: Any = None) -> None:
        super().record(self.world.current if stream is None else stream)
        self.seconds = time.perf_counter()


class Graph:
    """What was launched while a stream was capturing."""

    def __init__(self, world: StandIn, calls: list[Callable[[], None]]) -> None:
        self.world, self.calls = world, calls

    def launch(self, stream: Any = None) -> None:
        self.world.current.synchronize()
        for call in self.calls:
            call()


def elapsed(begin: TimedEvent, end: TimedEvent) -> float:
    """As CuPy's: in milliseconds, of events that were recorded with their time."""
    assert begin.has_time, "made without timing"
    assert end.has_time, "made without timing"
    assert begin.is_complete(), "it has not come"
    assert end.is_complete(), "it has not come"
    return max(end.seconds - begin.seconds, 1e-9) * 1e3


class Kernel:
    """As `cupy.RawKernel`: a kernel that only passes time, so many nanoseconds if it is called `hold`."""

    def __init__(self, world: StandIn, code: str, name: str) -> None:
        assert f"__global__ void {name}(long long" in code
        self.world, self.name = world, name

    def __call__(self, grid: Any, block: Any, args: Any) -> None:
        assert all(type(its) is tuple for its in (grid, block, args)), "CuPy wants tuples"
        assert all(type(its) is int for its in (*grid, *block, *args))
        stream, seconds = self.world.current, args[0] / 1e9 if self.name == "hold" else 0.0

        def work() -> Iterator[None]:
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                yield

        stream.issue()
        stream.queue.append(Launch([work()], stream, None, []))


def add_measuring(world: StandIn) -> None:
    """Give a stand-in what the GPU check uses."""
    cupy, cuda = world.module, world.module.cuda
    cuda.Event = lambda disable_timing=False: TimedEvent(world, disable_timing)
    cuda.get_elapsed_time = elapsed
    cupy.RawKernel = lambda code, name, options=(): Kernel(world, code, name)
    cupy.zeros = lambda shape, dtype=float: world.asarray(np.zeros(shape, dtype))
    runtime = cuda.runtime
    runtime.deviceSynchronize = lambda: [stream.synchronize() for stream in list(world.streams.values())] and None
    runtime.memGetInfo = lambda: (1 << 30, 1 << 31)
    runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost, runtime.memcpyDeviceToDevice = TO_DEVICE, TO_HOST, ON_DEVICE
    runtime.memcpyAsync = lambda *arguments: copy(world, *arguments)
    properties = {"name": b"Stand-in", "totalGlobalMem": 1 << 31, "multiProcessorCount": 1, "l2CacheSize": 1 << 20}
    of_device = runtime.getDeviceProperties
    runtime.getDeviceProperties = lambda index: {**of_device(index), **properties}
    pool = SimpleNamespace(used_bytes=lambda: 0, total_bytes=lambda: 0, n_free_blocks=lambda: 0)
    cupy.get_default_memory_pool = cupy.get_default_pinned_memory_pool = lambda: pool
    cuda.alloc_pinned_memory = lambda nbytes: Pinned(np.zeros(nbytes, np.uint8))
    add_graphs(world)


class Pinned(np.ndarray):
    """Pinned memory: its address, and the buffer protocol."""

    def __new__(cls, memory: Any) -> Any:
        return memory.view(cls)

    ptr = property(lambda self: self.ctypes.data)


def copy(world: StandIn, to: int, source: int, nbytes: int, kind: int, ptr: int) -> None:
    """As `cudaMemcpyAsync`, late, from and to device memory and any memory of the host."""
    assert all(type(its) is int for its in (to, source, nbytes, kind, ptr)), "CuPy takes plain ints"
    stream, holds, memory = world.streams[ptr], [], []
    stream.issue()
    on_device = {TO_DEVICE: (False, True), TO_HOST: (True, False), ON_DEVICE: (True, True)}[kind]
    for address, is_device, is_write in ((source, on_device[0], False), (to, on_device[1], True)):
        if not is_device:
            memory.append(np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)))
            continue
        memory.append(use(world, stream, address, nbytes, is_write, holds))

    def work() -> Iterator[None]:
        yield
        memory[1][...] = memory[0]

    stream.queue.append(Launch([work()], stream, None, holds))


def add_graphs(world: StandIn) -> None:
    """Let streams capture kernels, and the all-reduce of a communicator of one rank."""
    make_stream, make_communicator = world.module.cuda.Stream, world.nccl.NcclCommunicator

    def stream(non_blocking: bool = False, priority: int | None = None) -> Any:
        its = make_stream(non_blocking, priority)

        def begin_capture() -> None:
            its.captured = []

        def end_capture() -> Graph:
            calls, its.captured = its.captured, None
            return Graph(world, calls)

        its.begin_capture, its.end_capture = begin_capture, end_capture
        return its

    def communicator(*arguments: Any) -> Any:
        its = make_communicator(*arguments)
        all_reduce = its.allReduce

        def captured(*its_arguments: Any) -> None:
            current = world.streams[its_arguments[-1]]
            if current.captured is None:
                all_reduce(*its_arguments)
            else:
                current.captured.append(lambda: captured(*its_arguments))

        its.allReduce = captured
        return its

    world.module.cuda.Stream = stream
    world.nccl.NcclCommunicator = communicator
