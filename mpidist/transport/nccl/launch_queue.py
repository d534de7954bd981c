"""The launches of a rank on its GPU, in one order, and how the host waits for them.

A stream carries NCCL's work of all communicators of a group, so that their launches have one order on the GPU, too.
Kernels that pack and unpack run on two lanes in turn, streams with memory: while NCCL reduces one pack, the next one is
packed. Streams wait for each other by events; the host waits once, at the end of a call, and polls while it does, so
that errors, deadlines and Ctrl-C end the wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, final

import numpy as np

from mpidist.errors import DeadlineExceededError, PeerFailedError
from mpidist.transport.communicator import Array
from mpidist.transport.cuda import Cuda
from mpidist.transport.gpu import Background, Events, Launched, is_complete, new_stream, on_stream
from mpidist.transport.nccl import handles as nccl_handles
from mpidist.transport.nccl.errors import translated
from mpidist.transport.nccl.handles import Handle
from mpidist.transport.text import first_line
from mpidist.transport.waiting import never_free, poll, tell_wait

__all__ = ["DeviceQueue"]

_CONNECTS: Final = "mpidist NCCL connects"  # the name of the thread that may wait in NCCL
_SPIN_SECONDS: Final = 0.00005
_NAP_SECONDS: Final = 0.00005  # with the timer's own 50 us still half of what completion may be late
_LONG_NAP_SECONDS: Final = 0.001
_NAPS_IN_A_WAIT: Final = 64  # a nap is at most this part of the wait before it, and so is what it adds
_CHECK_SECONDS: Final = 0.01  # between two looks at NCCL's own errors and at the other ranks


@final
@dataclass(slots=True, eq=False)
class _Lane:
    """A stream for kernels, and the memory that they pack into."""

    stream: Any
    memory: dict[Any, Array] = field(default_factory=dict)


@final
@dataclass(slots=True, eq=False)
class _Launching:
    """A launch that the host is in the middle of.

    Attributes:
        fork: The event that the work begins after.
        memory: What must live as long as the work.
        lane: The lane whose stream is current: the first one, but for packs.
        num_packs: Number of calls of `pack_stream`.
    """

    fork: Any
    memory: list[Any]
    lane: _Lane
    num_packs: int = 0


@final
class DeviceQueue:
    """The launches of one rank and group on one GPU. For one thread: the thread that calls the strategy.

    Args:
        cuda: CuPy and NCCL.
        events: Where events come from.

    Attributes:
        stream: NCCL's stream.
        num_waits: How often the host has waited.
    """

    def __init__(self, cuda: Cuda, events: Events | None = None) -> None:
        self.num_waits = 0
        self._cuda = cuda
        self._events = Events(cuda) if events is None else events
        cupy = cuda.cupy.cuda
        self.stream = new_stream(cupy)
        self._lanes = [_Lane(new_stream(cupy)) for _ in range(2)]
        self._ready, self._done, self._fork, self._end = (cupy.Event(disable_timing=True) for _ in range(4))
        self._outside: dict[Any, Array] = {}  # memory for calls that the host waits for
        self._names: dict[Handle, str] = {}
        self._flying: list[Launched] = []
        self._under_way: _Launching | None = None
        self._next_check = 0.0
        self._failure: BaseException | None = None
        self._check_peers: Callable[[], None] = lambda: None

    def set_wait_hook(self, check_peers: Callable[[], None]) -> None:
        """Call `check_peers` while the host waits: `check_peers` raises where there is no sense in waiting on."""
        self._check_peers = check_peers

    def add(self, handle: Handle, name: str) -> None:
        """Let a communicator launch here. `name`: which rank of which communicator, for errors."""
        self._names[handle] = name
        handle.keeps = self  # if the process ends before its work does, nothing of this may be collected

    def remove(self, handle: Handle) -> None:
        """Forget a communicator that was freed, and with the last communicator all memory for packs."""
        self._names.pop(handle, None)
        if not self._names:
            for memory in (self._outside, *(lane.memory for lane in self._lanes)):
                memory.clear()

    def buffer(self, key: Any, nbytes: int) -> Array:
        """Lend memory [nbytes] to the current lane, whose stream orders the work that uses the memory.

        Outside of `launch` the host waits for that work. Memory lent there is never lent to a lane: CuPy allocated
        the memory on the caller's stream, and could give it away while a lane still works on it.
        """
        memory = self._outside if self._under_way is None else self._under_way.lane.memory
        buffer = memory.get(key)
        if buffer is None or buffer.size < nbytes:
            memory[key] = buffer = self._cuda.cupy.empty(nbytes, np.uint8)
        return buffer[:nbytes]

    def launch(self, what: str, work: Callable[[], Any], memory: Any = None, after: Any = None) -> Launched:
        """Call `work`, which launches work on the GPU and waits for nothing.

        The caller's current stream waits for that work, unless `after` is given.

        Args:
            what: The call, for errors.
            work: Calls transports and works on arrays; its current stream is a lane's.
            memory: Arrays that must live as long as the work.
            after: An event of `Events.record` that the work on the GPU begins after; by default the work begins after
                what the caller's current stream holds now.

        Returns:
            The work under way, for `wait` or `is_complete`.
        """
        current = self._cuda.cupy.cuda.get_current_stream()
        self._require_usable(what)
        if after is None:
            self._fork.record(current)
        first, fork = self._lanes[0], self._fork if after is None else after
        self._under_way = launching = _Launching(fork, [memory], first)
        try:
            first.stream.wait_event(fork)
            with on_stream(self._cuda.cupy, first.stream):
                result = work()
                self.join()
                event = self._events.record()
            if after is None:
                current.wait_event(event)
            else:
                self._events.give_back(after)
        except BaseException as error:
            self.give_up(error, launching.memory)
            raise
        finally:
            self._under_way = None
            self._lanes.reverse()  # the next launch begins on the other one
        launched = Launched(what, result, event, launching.memory)
        self._flying.append(launched)
        return launched

    @contextmanager
    def pack_stream(self) -> Iterator[None]:
        """Take the next lane, for a pack that needs nothing of the last one. Nothing outside of `launch`."""
        launching = self._under_way
        if launching is None:
            yield
            return
        first, lane = self._lanes[0], self._lanes[launching.num_packs % len(self._lanes)]
        launching.num_packs += 1
        launching.lane = lane
        lane.stream.wait_event(launching.fork)
        try:
            with on_stream(self._cuda.cupy, lane.stream):
                yield
        finally:
            launching.lane = first

    def join(self) -> None:
        """Let the lane that a launch began on wait for the other one. Nothing outside of `launch`."""
        if self._under_way is not None and self._under_way.num_packs > 1:
            first, second = self._lanes
            self._end.record(second.stream)
            first.stream.wait_event(self._end)

    def wait_for_stream(self, what: str) -> None:
        """Wait on the host until the current stream is done, within `launch`; elsewhere nothing is under way.

        For calls that go on on the host, which no stream can be told to wait for.
        """
        if self._under_way is not None:
            event = self._events.record()
            self._poll(event, what)
            self._events.give_back(event)

    def issue(self, what: str, handle: Handle, memory: Any, launch: Callable[[Any, int], None], kind: Any = "") -> None:
        """Give NCCL a group of calls, after what the current stream holds, and let that stream wait for them.

        Outside of `launch` the host waits for them, too. The first calls of a kind connect ranks, for which NCCL waits
        in `ncclGroupEnd`: they are made in a thread of their own, so that this one notices that a rank has stopped.

        Args:
            what: The primitive, for errors.
            handle: The communicator.
            memory: The arrays that the calls read and write.
            launch: Makes the calls: with CuPy's communicator, and the address of the stream.
            kind: Equal for calls that go to the same ranks in the same ways; by default `what`.
        """
        current, launching = self._cuda.cupy.cuda.get_current_stream(), self._under_way
        self._require_usable(what)
        try:
            with translated(self._cuda.nccl, f"{what} with NCCL on {self._names[handle]}"):
                self._ready.record(current)
                self.stream.wait_event(self._ready)
                group = partial(self._call_as_group, handle, launch)
                if (kind or what) in handle.connected:
                    group()
                else:
                    self._connect(what, group)
                    handle.connected.add(kind or what)
            if launching is not None:
                launching.memory.append(memory)
                self._done.record(self.stream)
                current.wait_event(self._done)
                return
            launched = Launched(what, None, self._events.record(self.stream), memory)
            current.wait_event(launched.event)
            self._flying.append(launched)
        except BaseException as error:
            self.give_up(error, memory)
            raise
        self.wait(launched)

    def is_complete(self, launched: Launched) -> bool:
        """Say whether work is done; once it is, let go of the memory. Never waits.

        Raises:
            Exception: If NCCL failed, in this work or earlier.
        """
        if launched.is_done:
            return True
        try:
            if not self._has_ended(launched.event, launched.what):
                if time.monotonic() >= self._next_check:
                    self._check(launched.what)
                return False
        except BaseException as error:
            self.give_up(error)
            raise
        launched.is_done, launched.memory = True, None
        self._events.give_back(launched.event)
        self._flying.remove(launched)
        return True

    def wait(self, launched: Launched, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait on the host until work is done.

        Args:
            launched: The work.
            meanwhile: Done now and then.

        Raises:
            Exception: What the hook raises, or NCCL's failure. All communicators of NCCL are aborted then.
        """
        if launched.is_done:
            return
        try:
            self._poll(launched.event, launched.what, meanwhile)
        except BaseException as error:
            self.give_up(error)
            raise
        self.is_complete(launched)

    def drain(self) -> None:
        """Wait on the host for all that is under way."""
        for launched in tuple(self._flying):
            self.wait(launched)

    def give_up(self, error: BaseException, memory: Any = None) -> None:
        """Abort NCCL's communicators. What the GPU may still work on is never freed."""
        if self._failure is None:
            self._failure = error
            nccl_handles.abort_all(f"an earlier call failed ({type(error).__name__}: {first_line(error)})")
            if self._flying or self._under_way is not None:
                never_free((self,))
        if memory is not None:
            never_free((self, memory))

    def _call_as_group(self, handle: Handle, launch: Callable[[Any, int], None]) -> None:
        self._cuda.nccl.groupStart()
        try:
            launch(handle.comm, self.stream.ptr)
        finally:
            self._cuda.nccl.groupEnd()

    def _connect(self, what: str, group: Callable[[], None]) -> None:
        """Make a group of calls in a thread, and watch the other ranks until it returns."""
        making = Background(self._cuda, _CONNECTS, group)
        poll(lambda: making.outcome()[0], lambda: self._look(what), is_message=False)
        making.take()

    def _poll(self, event: Any, what: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.num_waits += 1
        start, begun = time.monotonic(), time.monotonic_ns()
        while not self._has_ended(event, what):
            now = time.monotonic()
            if now < start + _SPIN_SECONDS:
                continue
            self._look(what)
            meanwhile()
            time.sleep(min(max((now - start) / _NAPS_IN_A_WAIT, _NAP_SECONDS), _LONG_NAP_SECONDS))
        tell_wait(begun, time.monotonic_ns())

    def _has_ended(self, event: Any, what: str) -> bool:
        if not is_complete(self._cuda.cupy, event, what, "with NCCL"):
            return False
        self._require_usable(what)  # an abort ends work, too
        return True

    def _look(self, what: str) -> None:
        """Look at NCCL's errors and at the other ranks, now and then."""
        if time.monotonic() >= self._next_check:
            self._check(what)
            self._check_peers()

    def _check(self, what: str) -> None:
        self._next_check = time.monotonic() + _CHECK_SECONDS
        for handle, name in self._names.items():
            with translated(self._cuda.nccl, f"{what} with NCCL on {name}"):
                handle.check()

    def _require_usable(self, what: str) -> None:
        for handle, name in self._names.items():
            if handle.ended:
                kind = type(self._failure)
                if kind not in (DeadlineExceededError, PeerFailedError):
                    kind = RuntimeError
                raise kind(
                    f"{what} with NCCL on {name}: the communicator cannot be used any more, because {handle.ended}; "
                    "call strategy.reset() on all ranks"
                )
