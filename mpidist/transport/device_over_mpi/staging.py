"""Chunks of device memory on their way to MPI and back: copies down, the host's work and copies up, at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple, TypeAlias, final

import numpy as np

from mpidist.transport import cuda
from mpidist.transport.arrays import address_of
from mpidist.transport.communicator import Array
from mpidist.transport.device_over_mpi.pieces import Copy, Piece, Pieces, StagingSizes, aligned
from mpidist.transport.gpu.events import is_complete, new_event, new_stream, on_stream
from mpidist.transport.gpu.kernels import DeviceKernels
from mpidist.transport.mpi.library import load_mpi
from mpidist.transport.text import first_line, size_text
from mpidist.transport.waiting import never_free, poll

__all__ = ["Phase", "Staging", "wait_for_event"]

logger = logging.getLogger("mpidist.transport")

_END: Final = object()


@final
class Phase(NamedTuple):
    """One turn of a chunk: copies to its slot, work of the host, copies from its slot, work of the GPU."""

    move: Callable[[], object]  # the host's work; returns when it needs the slot no more
    down: Sequence[Copy] = ()  # from the device, done before `move`
    up: Sequence[Copy] = ()  # to the device, after it
    join: Callable[[], None] | None = None  # puts work on the current stream, after `up` and before the next phase


PhasesOf: TypeAlias = Callable[[int, int], Sequence[Phase]]  # one or two phases, for a chunk and its slot, by number


@final
class Staging:
    """A process's streams and pinned slots for staging. One call at a time.

    Two streams: `down` for copies from the device, `up` for those that come back and for the GPU's sums. A slot is
    written again only when all that read it is done, by events; the host polls events, and calls `check_peers`
    meanwhile. Pinned memory is allocated at first use, and grows in powers of two when nothing is under way.

    After an error in the middle of a call nothing is reused or freed, since MPI and the GPU may still work on it: the
    object cannot be used again, and `strategy.reset()` makes another one.

    Args:
        sizes: Those of chunks.
        kernels: What joins parts on the GPU.
        wait_for_launches: Polls, before the host begins a primitive, for what this rank has launched on its GPU.
        is_direct: Whether MPI takes device memory, as the user says: then nothing is copied, and no slot is needed.
    """

    def __init__(
        self,
        sizes: StagingSizes,
        kernels: DeviceKernels,
        wait_for_launches: Callable[[str], None],
        is_direct: bool = False,
    ) -> None:
        self.sizes, self.kernels, self.is_direct = sizes, kernels, is_direct
        self._wait_for_launches = wait_for_launches
        self._memory: Array = np.empty(0, np.uint8)
        self._slot_nbytes = 0
        self._is_pinned = True
        self._ended = ""
        self._cuda = cuda.cupy().cuda
        self._down, self._up = new_stream(), new_stream()
        # What the caller's stream holds; and for each slot, what each of these streams has done for it.
        self._ready, *of_slots = (new_event() for _ in range(1 + 2 * sizes.depth))
        self._downloaded, self._returned = of_slots[: sizes.depth], of_slots[sizes.depth :]

    def open(self, slot: int, at: int, array: Array, pieces: Sequence[Piece]) -> Pieces:
        """Lay pieces of an array one after the other into a slot, from byte `at` on. Within `run`."""
        width, base = array.itemsize, address_of(array)
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

    def run(
        self, what: str, count: int, nbytes: int, phases_of: PhasesOf, check_peers: Callable[[], None], keeps: Any
    ) -> None:
        """Pass chunks through their phases, after the work on the current stream; return when all is done.

        The first phases of as many chunks as there are slots are begun at once. Then, in the order of all ranks: the
        first phase of chunk i + 1 moves while the GPU works for the second of chunk i.

        `count`: of chunks, of which each takes `nbytes` of its slot. `keeps`: what must not be freed after an error.
        """
        self._require_usable(what)
        self._wait_for_launches(what)
        self._reserve(min(count, self.sizes.depth), aligned(nbytes))
        try:
            self._run(what, count, phases_of, check_peers)
        except BaseException as error:
            self._ended = f"an earlier call failed ({type(error).__name__}: {first_line(error)})"
            events = self._ready, self._downloaded, self._returned
            never_free((self._memory, self._down, self._up, events, keeps))
            raise

    def free(self) -> None:
        """Give the memory back. Local; nothing may be under way."""
        self._memory = np.empty(0, np.uint8)

    def _reserve(self, count: int, nbytes: int) -> None:
        """Reserve slots of pinned memory."""
        if self._memory.size < count * nbytes and not self.is_direct:
            self._memory = np.empty(0, np.uint8)  # before there is more: pinned memory is scarce
            self._memory = self._pinned(1 << (count * nbytes - 1).bit_length())
        self._slot_nbytes = nbytes

    def _pinned(self, nbytes: int) -> Array:
        if self._is_pinned:
            try:
                memory = self._cuda.PinnedMemoryPointer(self._cuda.PinnedMemory(nbytes), 0)
                return np.ndarray(nbytes, np.uint8, buffer=memory)
            except (RuntimeError, MemoryError) as error:  # this rank's affair: its copies are right, only slow
                self._is_pinned = False
                text = "no %s of pinned memory (%s): device memory goes through pageable memory, which is slower; see "
                limits = "`ulimit -l` and the memory limit of the job"
                logger.warning(text + limits, size_text(nbytes), first_line(error))
        return np.empty(nbytes, np.uint8)

    def _require_usable(self, what: str) -> None:
        if self._ended:
            text = f"{what} of device memory cannot go through the host any more, because {self._ended}"
            raise RuntimeError(f"{text}; call strategy.reset() on all ranks")

    def _run(self, what: str, count: int, phases_of: PhasesOf, check_peers: Callable[[], None]) -> None:
        depth = min(count, self.sizes.depth)
        passing: dict[int, Iterator[None]] = {}

        def begin(chunk: int) -> None:
            slot = chunk % depth
            passing[chunk] = self._pass(phases_of(chunk, slot), slot, what, check_peers)
            next(passing[chunk])

        self._ready.record(self._cuda.get_current_stream())
        for stream in (self._down, self._up):
            stream.wait_event(self._ready)
        for chunk in range(depth):
            begin(chunk)
        for turn in range(count + 1):
            for chunk in (turn, turn - 1):
                if chunk in passing and next(passing[chunk], _END) is _END:
                    del passing[chunk]
                    if chunk + depth < count:
                        begin(chunk + depth)
        for returned in self._returned[:depth]:
            wait_for_event(returned, what, check_peers)

    def _pass(self, phases: Sequence[Phase], slot: int, what: str, check_peers: Callable[[], None]) -> Iterator[None]:
        """Pass a chunk through its phases; yields in each of them when the copies from the device are under way."""
        its = self._cuda.runtime
        for phase in phases:
            for host, device, nbytes in phase.down:
                its.memcpyAsync(host, device, nbytes, its.memcpyDeviceToHost, self._down.ptr)
            self._downloaded[slot].record(self._down)
            yield
            wait_for_event(self._downloaded[slot], what, check_peers)
            phase.move()
            for host, device, nbytes in phase.up:
                its.memcpyAsync(device, host, nbytes, its.memcpyHostToDevice, self._up.ptr)
            if phase.join is not None:
                with on_stream(self._up):
                    phase.join()
            self._returned[slot].record(self._up)
            self._down.wait_event(self._returned[slot])  # what is copied to the slot next comes after that


def wait_for_event(event: Any, what: str, check_peers: Callable[[], None]) -> None:
    """Poll until an event is complete, for work that is not NCCL's. `what`: the call, for errors."""
    poll(lambda: is_complete(event, what, "of device memory through the host"), check_peers, is_message=False)
