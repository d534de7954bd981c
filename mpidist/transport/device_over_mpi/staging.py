"""Chunks of device memory by way of pinned host memory: copies down, the host's work and copies up, at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeAlias, final

import numpy as np

from mpidist.transport.communicator import Array
from mpidist.transport.cuda import Cuda
from mpidist.transport.device_over_mpi.sizes import StagingSizes
from mpidist.transport.gpu import DeviceKernels, is_complete, new_stream, on_stream
from mpidist.transport.text import first_line, size_text
from mpidist.transport.waiting import never_free, poll

__all__ = ["Copy", "Phase", "Staging", "aligned"]

logger = logging.getLogger("mpidist.transport")

_LINE: Final = 512  # bytes; what is handed to GPU and network begins at multiples of it

Copy: TypeAlias = tuple[int, int, int]  # address on the host, address on the device, bytes


@final
@dataclass(frozen=True)
class Phase:
    """One turn of a chunk: copies to its slot, work of the host, copies from its slot, work of the GPU.

    Attributes:
        move: The host's work; returns when it needs the slot no more.
        down: Copies from the device, done before `move`.
        up: Copies to the device, after it.
        join: Puts work for the GPU on the current stream, to be done after `up`; the next phase comes after it.
    """

    move: Callable[[], object]
    down: Sequence[Copy] = ()
    up: Sequence[Copy] = ()
    join: Callable[[], None] | None = None


PhasesOf: TypeAlias = Callable[[int, int], Sequence[Phase]]  # one or two phases, for a chunk and its slot, by number


@final
class Staging:
    """A process's streams, pinned slots and scratch memory for staging. One call at a time.

    Three streams: `down` for the first copies of chunks, `up` for those that come back, `join` for what the GPU adds
    and the copies that follow from that. A slot is written again only when all that read it is done, by events; the
    host polls events, and calls `check_peers` meanwhile. Memory is allocated at first use, grows in powers
    of two when nothing is under way, and is given back by `free`.

    After an error in the middle of a call nothing is reused or freed, since MPI and the GPU may still work on it: the
    object cannot be used again, and `strategy.reset()` makes another one.

    Args:
        cuda: What this process has of CuPy.
        sizes: Those of chunks.
        kernels: What joins parts on the GPU; by default new ones.
        wait_for_launches: Called with the name of a primitive before the host begins it: waits for what this rank has
            launched on its GPU in the call under way. The host must not wait for a GPU but by polling.

    Attributes:
        sizes: As above.
        kernels: As above.
    """

    def __init__(
        self,
        cuda: Cuda,
        sizes: StagingSizes,
        kernels: DeviceKernels | None = None,
        wait_for_launches: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.sizes = sizes
        self._wait_for_launches = wait_for_launches
        self.kernels = DeviceKernels(cuda) if kernels is None else kernels
        self._cuda = cuda
        self._memory: Array = np.empty(0, np.uint8)
        self._slot_nbytes = 0
        self._scratch: Array = None
        self._is_pinned = True
        self._ended = ""

    @property
    def cupy(self) -> Any:
        """The module."""
        return self._cuda.cupy

    def reserve(self, count: int, nbytes: int) -> None:
        """Have a slot of `nbytes` bytes of pinned memory for each of `count` chunks that are under way at once."""
        count, nbytes = min(count, self.sizes.depth), aligned(nbytes)
        if self._memory.size < count * nbytes:
            self._require_usable("staging")
            self._memory = np.empty(0, np.uint8)  # before there is more: pinned memory is scarce
            self._memory = self._pinned(_power_of_two(count * nbytes))
        self._slot_nbytes = nbytes

    def slot(self, number: int) -> Array:
        """Lend a slot, for one call of `run`, which `reserve` comes before."""
        return self._memory[number * self._slot_nbytes : (number + 1) * self._slot_nbytes]

    def scratch(self, count: int, nbytes: int) -> list[Array]:
        """Lend device memory for as many chunks: arrays of bytes."""
        count, nbytes = min(count, self.sizes.depth), aligned(nbytes)
        if self._scratch is None or self._scratch.size < count * nbytes:
            self._require_usable("staging")
            self._scratch = None
            self._scratch = self.cupy.empty(_power_of_two(count * nbytes), np.uint8)
        return [self._scratch[at * nbytes : (at + 1) * nbytes] for at in range(count)]

    def run(self, what: str, count: int, phases_of: PhasesOf, check_peers: Callable[[], None], keeps: Any) -> None:
        """Pass chunks through their phases, after what the current stream holds; return when all is done.

        The first phases of as many chunks as there are slots are begun at once. Then, in the order of all ranks: the
        first phase of chunk i + 1 moves while the GPU works for the second of chunk i.

        Args:
            what: The primitive, for errors.
            count: Number of chunks.
            phases_of: Makes a chunk's phases.
            check_peers: Asked while this rank waits for the GPU; may raise.
            keeps: What must not be freed after an error.
        """
        if not count:
            return
        self._require_usable(what)
        self._wait_for_launches(what)
        streams = self._streams
        try:
            _Pass(self, what, count, phases_of, check_peers).run()
        except BaseException as error:
            self._ended = f"an earlier call failed ({type(error).__name__}: {first_line(error)})"
            never_free((self._memory, self._scratch, streams, keeps))
            raise

    def free(self) -> None:
        """Give the memory back. Local; nothing may be under way."""
        self._memory, self._scratch = np.empty(0, np.uint8), None

    def wait(self, event: Any, what: str, check_peers: Callable[[], None]) -> None:
        """Poll until an event is complete."""
        cupy = self.cupy
        way = "of device memory through the host"
        poll(lambda: is_complete(cupy, event, what, way), check_peers, is_message=False)

    @cached_property
    def _streams(self) -> _Streams:
        cuda = self.cupy.cuda
        down, up, join = (new_stream(cuda) for _ in range(3))
        events = [[cuda.Event(disable_timing=True) for _ in range(3)] for _ in range(self.sizes.depth)]
        return _Streams(
            down, up, join, cuda.Event(disable_timing=True), tuple(_SlotEvents(*of_slot) for of_slot in events)
        )

    def _pinned(self, nbytes: int) -> Array:
        cuda = self.cupy.cuda
        if self._is_pinned:
            try:
                memory = cuda.PinnedMemoryPointer(cuda.PinnedMemory(nbytes), 0)
                return np.ndarray(nbytes, np.uint8, buffer=memory)
            except (RuntimeError, MemoryError) as error:  # this rank's affair: its copies are right, only slow
                self._is_pinned = False
                logger.warning(
                    "no %s of pinned memory (%s): device memory goes through pageable memory, which is slower; see "
                    "`ulimit -l` and the memory limit of the job",
                    size_text(nbytes),
                    first_line(error),
                )
        return np.empty(nbytes, np.uint8)

    def _require_usable(self, what: str) -> None:
        if self._ended:
            raise RuntimeError(
                f"{what} of device memory cannot go through the host any more, because {self._ended}; call "
                "strategy.reset() on all ranks"
            )


@final
@dataclass(frozen=True)
class _SlotEvents:
    """The events of one slot.

    Attributes:
        downloaded: Event after the copies from the device: the host may work on the slot.
        uploaded: Event after the copies to the device.
        released: Event after the last work that reads or writes the slot.
    """

    downloaded: Any
    uploaded: Any
    released: Any


@final
@dataclass(frozen=True)
class _Streams:
    down: Any
    up: Any
    join: Any
    ready: Any  # the event of what the caller's stream holds
    events: tuple[_SlotEvents, ...]


@final
class _Pass:
    """One call's way through the slots."""

    def __init__(
        self, staging: Staging, what: str, count: int, phases_of: PhasesOf, check_peers: Callable[[], None]
    ) -> None:
        self._staging, self._what, self._count, self._check_peers = staging, what, count, check_peers
        self._streams = staging._streams
        self._phases_of = phases_of
        self._depth = min(count, staging.sizes.depth)
        self._phases: list[Sequence[Phase]] = [()] * self._depth
        runtime = staging.cupy.cuda.runtime
        self._copy = runtime.memcpyAsync
        self._to_host, self._to_device = int(runtime.memcpyDeviceToHost), int(runtime.memcpyHostToDevice)

    def run(self) -> None:
        streams = self._streams
        streams.ready.record(self._staging.cupy.cuda.get_current_stream())
        for stream in (streams.down, streams.up, streams.join):
            stream.wait_event(streams.ready)
        for chunk in range(self._depth):
            self._start(chunk)
        for turn in range(self._count + 1):
            if turn < self._count:
                self._advance(turn, 0)
            if turn:
                self._advance(turn - 1, 1)
        for events in streams.events[: self._depth]:
            self._staging.wait(events.released, self._what, self._check_peers)

    def _start(self, chunk: int) -> None:
        slot = chunk % self._depth
        self._phases[slot] = self._phases_of(chunk, slot)
        self._lower(self._phases[slot][0], self._streams.down, slot)

    def _advance(self, chunk: int, number: int) -> None:
        streams, slot = self._streams, chunk % self._depth
        phases, events = self._phases[slot], streams.events[slot]
        if number >= len(phases):
            return
        phase = phases[number]
        self._staging.wait(events.downloaded, self._what, self._check_peers)
        phase.move()
        for host, device, nbytes in phase.up:
            self._copy(device, host, nbytes, self._to_device, streams.up.ptr)
        goes_on = number + 1 < len(phases)
        if goes_on or phase.join is not None:
            events.uploaded.record(streams.up)
            streams.join.wait_event(events.uploaded)
        if phase.join is not None:
            with on_stream(self._staging.cupy, streams.join):
                phase.join()
        if goes_on:
            self._lower(phases[number + 1], streams.join, slot)
            return
        events.released.record(streams.up if phase.join is None else streams.join)
        if chunk + self._depth < self._count:
            streams.down.wait_event(events.released)
            self._start(chunk + self._depth)

    def _lower(self, phase: Phase, stream: Any, slot: int) -> None:
        for host, device, nbytes in phase.down:
            self._copy(host, device, nbytes, self._to_host, stream.ptr)
        self._streams.events[slot].downloaded.record(stream)


def aligned(nbytes: int) -> int:
    """Round a size up to a multiple of 512 bytes."""
    return -(-nbytes // _LINE) * _LINE


def _power_of_two(nbytes: int) -> int:
    return 1 << max(nbytes - 1, 0).bit_length()
