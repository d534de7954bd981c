"""Pinned memory and copies of the stand-in for CuPy: late, and merciless to whoever does not wait.

A copy is put on its stream and done when the stream gets there, some looks at events later. Where it goes is filled
with rubbish when it begins, so that who reads too early finds that, or what was there before; what it reads is read
when it ends, so that who writes too early is found as well. The stand-in itself notes streams that work on the same
memory without an event between.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from standin.nccl import StandIn

__all__ = ["StagingLog", "add_staging", "use"]

TO_DEVICE, TO_HOST = 1, 2
RUBBISH = 0xA5
NO_MEMORY = "cudaErrorMemoryAllocation: out of memory"


@dataclass
class StagingLog:
    """What was done, and what shall go wrong.

    Attributes:
        order: What was begun, in order: `("down", bytes)`, `("up", bytes)`, and what tests add.
        num_pinned: Number of allocations of pinned memory so far.
        pinned_bytes: Sizes of those that are there now.
        has_no_memory: Whether there is no pinned memory.
        fails_at: The number of the copy that fails, counted from 0; -1 for none.
        slowest: How many looks at events the slowest copy takes.
    """

    order: list[tuple[str, int]] = field(default_factory=list)
    num_pinned: int = 0
    pinned_bytes: list[int] = field(default_factory=list)
    has_no_memory: bool = False
    fails_at: int = -1
    num_copies: int = 0
    slowest: int = 12
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))


def add_staging(world: StandIn) -> StagingLog:
    """Give a stand-in's CuPy pinned memory and copies."""
    log = StagingLog()
    cuda = world.module.cuda

    def allocate(nbytes: int) -> Any:
        from standin.nccl import Allocation

        if log.has_no_memory:
            raise RuntimeError(NO_MEMORY)
        allocation = Allocation(nbytes, world.device)
        world.allocations[allocation.address] = allocation
        log.num_pinned += 1
        log.pinned_bytes.append(nbytes)
        weakref.finalize(allocation, freed, allocation.address, nbytes).atexit = False
        return allocation

    def freed(address: int, nbytes: int) -> None:
        log.pinned_bytes.remove(nbytes)
        world._freed(address)

    def pointer(memory: Any, offset: int) -> Any:
        pinned = (ctypes.c_uint8 * (memory.nbytes - offset)).from_address(memory.address + offset)
        pinned.allocation = memory  # lives as long as somebody uses it
        return pinned

    cuda.PinnedMemory, cuda.PinnedMemoryPointer = allocate, pointer
    runtime = cuda.runtime
    runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost = TO_DEVICE, TO_HOST
    runtime.memcpyAsync = partial(copy, world, log)
    return log


def copy(world: StandIn, log: StagingLog, to: int, source: int, nbytes: int, kind: int, ptr: int) -> None:
    """As CUDA's `cudaMemcpyAsync`: addresses, a size, a kind and a stream, all plain ints."""
    from standin.nccl import Launch

    assert all(type(its) is int for its in (to, source, nbytes, kind, ptr)), "CuPy takes plain ints"
    assert kind in (TO_DEVICE, TO_HOST)
    log.order.append(("up" if kind == TO_DEVICE else "down", nbytes))
    log.num_copies += 1
    if log.num_copies - 1 == log.fails_at:
        raise RuntimeError("cudaErrorIllegalAddress: of a test")
    stream, holds, memory = world.streams[ptr], [], []
    stream.issue()
    for address, is_write in ((source, False), (to, True)):
        host = address == (to if kind == TO_HOST else source)
        if host and log.has_no_memory:
            memory.append(np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)))
            continue
        memory.append(use(world, stream, address, nbytes, is_write, holds))

    def work() -> Iterator[None]:
        memory[1][...] = RUBBISH
        for _ in range(int(log.random.integers(log.slowest + 1))):
            yield
        memory[1][...] = memory[0]

    stream.queue.append(Launch([work()], stream, log, holds))


def use(world: StandIn, stream: Any, address: int, nbytes: int, is_write: bool, holds: list[Any]) -> Any:
    """Return memory of the stand-in that a stream's next work uses, noted for the search for races, and held."""
    allocation = world.find(address, nbytes)
    world.note(stream, allocation, address, address + nbytes, is_write)
    holds.append(allocation)
    start = address - allocation.address
    return allocation.memory[start : start + nbytes]
