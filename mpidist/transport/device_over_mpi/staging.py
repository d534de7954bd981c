"""Chunks of device memory on their way to MPI and back: copies down, the host's work and copies up, at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, TypeAlias, final

import numpy as np

from mpidist.transport.communicator import Array
from mpidist.transport.cuda import Cuda
from mpidist.transport.device_over_mpi.pieces import Copy, Piece, Pieces, aligned
from mpidist.transport.device_over_mpi.sizes import StagingSizes
from mpidist.transport.gpu import DeviceKernels, is_complete, new_stream, on_stream
from mpidist.transport.mpi import load_mpi
from mpidist.transport.text import first_line, size_text
from mpidist.transport.waiting import never_free, poll

__all__ = ["Phase", "Staging"]

logger = logging.getLogger("mpidist.transport")


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

    Two streams: `down` for copies from the device, `up` for those that come back and what the GPU adds then. A slot is
    written again only when all that read it is done, by events; the host polls events, and calls `check_peers`
    meanwhile. Memory is allocated at first use, grows in powers of two when nothing is under way, and is given back by
    `free`.

    After an error in the middle of a call nothing is reused or freed, since MPI and the GPU may still work on it: the
    object cannot be used again, and `strategy.reset()` makes another one.

    Args:
        cuda: What this process has of CuPy.
        sizes: Those of chunks.
        kernels: What joins parts on the GPU; by default new ones.
        wait_for_launches: Called with the name of a primitive before the host begins it: waits for what this rank has
            launched on its GPU in the call under way. The host must not wait for a GPU but by polling.
        is_direct: Whether MPI takes device memory, as the user says: then nothing is copied, and no slot is needed.

    Attributes:
        sizes: As above.
        kernels: As above.
        is_direct: As above.
    """

    def __init__(
        self,
        cuda: Cuda,
        sizes: StagingSizes,
        kernels: DeviceKernels | None = None,
        wait_for_launches: Callable[[str], None] = lambda what: None,
        is_direct: bool = False,
    ) -> None:
        self.sizes, self.is_direct = sizes, is_direct
        self._wait_for_launches = wait_for_launches
        self.kernels = DeviceKernels(cuda) if kernels is None else kernels
        self._cuda = cuda
        self._memory: Array = np.empty(0, np.uint8)
        self._slot_nbytes = 0
        self._scratch: Array = None
        self._is_pinned = True
        self._ended = ""

    def reserve(self, count: int, nbytes: int) -> None:
        """Have a slot of `nbytes` bytes of pinned memory for each of `count` chunks that are under way at once."""
        count, nbytes = min(count, self.sizes.depth), aligned(nbytes)
        if self._memory.size < count * nbytes and not self.is_direct:
            self._require_usable("staging")
            self._memory = np.empty(0, np.uint8)  # before there is more: pinned memory is scarce
            self._memory = self._pinned(_power_of_two(count * nbytes))
        self._slot_nbytes = nbytes

    def open(self, slot: int, at: int, array: Array, pieces: Sequence[Piece]) -> Pieces:
        """Lay pieces of an array one after the other into a slot, from byte `at` on, for one call of `run`."""
        width, base = array.itemsize, int(array.data.ptr)
        sizes = [(stop - start) * width for start, stop in pieces]
        places = [base + start * width for start, _ in pieces]
        if self.is_direct:
            view = load_mpi().buffer.fromaddress
            return Pieces(list(map(view, places, sizes)))
        room = self._memory[slot * self._slot_nbytes : (slot + 1) * self._slot_nbytes]
        host: int = room.__array_interface__["data"][0]
        offsets = list(accumulate(sizes, initial=at))
        return Pieces(
            [room[start:stop] for start, stop in pairwise(offsets)],
            [(host + offset, *of_piece) for offset, *of_piece in zip(offsets, places, sizes, strict=False)],
            room[at : offsets[-1]],
        )

    def scratch(self, count: int, nbytes: int) -> list[Array]:
        """Lend device memory for as many chunks: arrays of bytes."""
        count, nbytes = min(count, self.sizes.depth), aligned(nbytes)
        if self._scratch is None or self._scratch.size < count * nbytes:
            self._require_usable("staging")
            self._scratch = None
            self._scratch = self._cuda.cupy.empty(_power_of_two(count * nbytes), np.uint8)
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
        cupy = self._cuda.cupy
        way = "of device memory through the host"
        poll(lambda: is_complete(cupy, event, what, way), check_peers, is_message=False)

    @cached_property
    def _streams(self) -> _Streams:
        cuda = self._cuda.cupy.cuda
        ready, *of_slots = (cuda.Event(disable_timing=True) for _ in range(1 + 2 * self.sizes.depth))
        return _Streams(new_stream(cuda), new_stream(cuda), ready, of_slots[::2], of_slots[1::2])

    def _pinned(self, nbytes: int) -> Array:
        cuda = self._cuda.cupy.cuda
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
class _Streams:
    """What orders the work on the GPU.

    Attributes:
        down: The stream of copies from the device.
        up: The stream of copies to the device, and of what the GPU adds then.
        ready: The event of what the caller's stream holds.
        downloaded: For each slot, the event after the copies from the device: the host may work on the slot.
        returned: For each slot, the event after the copies to the device, and what the GPU adds then.
    """

    down: Any
    up: Any
    ready: Any
    downloaded: Sequence[Any]
    returned: Sequence[Any]


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
        self._cupy = staging._cuda.cupy
        runtime = self._cupy.cuda.runtime
        self._copy = runtime.memcpyAsync
        self._to_host, self._to_device = int(runtime.memcpyDeviceToHost), int(runtime.memcpyHostToDevice)

    def run(self) -> None:
        streams = self._streams
        streams.ready.record(self._cupy.cuda.get_current_stream())
        streams.down.wait_event(streams.ready)
        streams.up.wait_event(streams.ready)
        for chunk in range(self._depth):
            self._start(chunk)
        for turn in range(self._count + 1):
            if turn < self._count:
                self._advance(turn, 0)
            if turn:
                self._advance(turn - 1, 1)
        for returned in streams.returned[: self._depth]:
            self._staging.wait(returned, self._what, self._check_peers)

    def _start(self, chunk: int) -> None:
        slot = chunk % self._depth
        self._phases[slot] = self._phases_of(chunk, slot)
        self._lower(self._phases[slot][0], slot)

    def _advance(self, chunk: int, number: int) -> None:
        streams, slot = self._streams, chunk % self._depth
        phases, returned = self._phases[slot], streams.returned[slot]
        if number >= len(phases):
            return
        phase = phases[number]
        self._staging.wait(streams.downloaded[slot], self._what, self._check_peers)
        phase.move()
        for host, device, nbytes in phase.up:
            self._copy(device, host, nbytes, self._to_device, streams.up.ptr)
        if phase.join is not None:
            with on_stream(self._cupy, streams.up):
                phase.join()
        returned.record(streams.up)
        if number + 1 < len(phases):
            streams.down.wait_event(returned)
            self._lower(phases[number + 1], slot)
        elif chunk + self._depth < self._count:
            streams.down.wait_event(returned)
            self._start(chunk + self._depth)

    def _lower(self, phase: Phase, slot: int) -> None:
        for host, device, nbytes in phase.down:
            self._copy(host, device, nbytes, self._to_host, self._streams.down.ptr)
        self._streams.downloaded[slot].record(self._streams.down)


def _power_of_two(nbytes: int) -> int:
    return 1 << max(nbytes - 1, 0).bit_length()
