"""The launches of a rank on its GPU, in one order, and how the host waits for them.

Work goes one way, through three streams that wait for each other by events: arrays are packed on the first one; NCCL's
calls of all communicators of a group, and the kernels between them, have the second one, and so one order on the GPU,
too; results are unpacked on the third one. While NCCL reduces one pack, the next one is packed, of the same call or of
a later one that was started, and the last one is unpacked.

With one stream for both ends, a pack of the next call would wait until the last call's is unpacked, and NCCL for both:
by bandwidths of an H200 for some 30 us, next to the 140 us that NCCL takes for 32 MB on 8 of them. Not measured.

The host waits once, at the end of a call, and polls while it does, so that errors, deadlines and Ctrl-C end the wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, final

import numpy as np

from mpidist.errors import DeadlineExceededError, PeerFailedError
from mpidist.transport import cuda
from mpidist.transport.communicator import Array
from mpidist.transport.gpu.background import Background
from mpidist.transport.gpu.events import Launched, is_complete, new_event, new_stream, on_stream, record_event
from mpidist.transport.nccl import handles as nccl_handles
from mpidist.transport.nccl.handles import Handle, translated
from mpidist.transport.waiting import never_free, poll

__all__ = ["DeviceQueue"]

_CONNECTS: Final = "mpidist NCCL connects"  # the name of the thread that may wait in NCCL
_BUSY_SECONDS: Final = 0.00005  # of a wait before its first nap
_CHECK_SECONDS: Final = 0.01  # between two looks at NCCL's own errors


@final
class DeviceQueue:
    """The launches of one rank and group on one GPU. For one thread: the thread that calls the strategy.

    Attributes:
        stream: NCCL's.
        check_peers: Called while the host waits. Raises where there is no sense in waiting on.
    """

    def __init__(self) -> None:
        self._cuda = cuda.cupy().cuda
        self._packs, self.stream, self._unpacks = (new_stream() for _ in range(3))
        self._begin, self._ready, self._done, *self._unpacked = (new_event() for _ in range(5))
        self._turn = 0  # which of two packs in memory is the last one
        self._memory: dict[tuple[str, Any], Array] = {}
        self._names: dict[Handle, str] = {}
        self._flying: list[Launched] = []
        self._held: list[Any] | None = None  # what must live as long as the launch that the host is in the middle of
        self._next_check = 0.0
        self._failure: BaseException | None = None
        self.check_peers: Callable[[], None] = lambda: None

    def add(self, handle: Handle, name: str) -> None:
        """Register a communicator for launches here. `name`: its rank and communicator, for errors."""
        self._names[handle] = name
        handle.keeps = self  # if the process ends before its work does, nothing of this may be collected

    def remove(self, handle: Handle) -> None:
        """Forget a communicator that was freed, and with the last communicator all memory for packs."""
        self._names.pop(handle, None)
        if not self._names:
            self._memory.clear()

    def buffer(self, what: str, nbytes: int) -> Array:
        """Lend memory [nbytes] within `launch`. A stream orders its use; two packs have their own memory, in turn."""
        key = what, self._turn if self._cuda.get_current_stream() == self._packs else None
        buffer = self._memory.get(key)
        if buffer is None or buffer.size < nbytes:
            self._memory[key] = buffer = cuda.cupy().empty(nbytes, np.uint8)
        return buffer[:nbytes]

    def launch(self, what: str, work: Callable[[], Any], memory: Any = None, after: Any = None) -> Launched:
        """Call `work`, which launches work on the GPU and waits for nothing. Returns the argument of `wait`.

        The current stream of `work` is NCCL's, and `memory` must live as long as the work. It begins `after` an event;
        by default after the work of the caller's current stream, and that stream waits for it.
        """
        current = self._cuda.get_current_stream()
        self._require_usable(what)
        if after is None:
            self._begin.record(current)
        self._held = held = [memory]
        try:
            for stream in (self._packs, self.stream):
                stream.wait_event(self._begin if after is None else after)
            with on_stream(self.stream):
                result = work()
                with self.unpacking():
                    event = record_event()
            if after is None:
                current.wait_event(event)
        except BaseException as error:
            self.give_up(error)
            raise
        finally:
            self._held = None
        return self._launched(what, result, event, held)

    def run(self, what: str, work: Callable[[], Any], memory: Any = None) -> None:
        """Launch work as `launch` does, and wait for it on the host; within `launch`, call it alone."""
        if self._held is None:
            self.wait(self.launch(what, work, memory))
        else:
            work()

    @contextmanager
    def packing(self) -> Iterator[None]:
        """Pack within `launch`, when the pack before the last one is unpacked; what comes then waits."""
        self._turn ^= 1
        self._packs.wait_event(self._unpacked[self._turn])
        with on_stream(self._packs):
            yield
        self._ready.record(self._packs)
        self.stream.wait_event(self._ready)

    @contextmanager
    def unpacking(self) -> Iterator[None]:
        """Unpack the last pack within `launch`, after all that was launched; nothing waits for it."""
        self._done.record(self.stream)
        self._unpacks.wait_event(self._done)
        with on_stream(self._unpacks):
            yield
        self._unpacked[self._turn].record(self._unpacks)

    def wait_for_stream(self, what: str) -> None:
        """Wait within `launch` until the current stream is done: for calls that go on on the host."""
        if self._held is not None:
            self.wait(self._launched(what, None, record_event(), None))

    def issue(self, what: str, handle: Handle, memory: Any, launch: Callable[[Any, int], None], kind: Any = "") -> None:
        """Give NCCL a group of calls within `launch`; outside of it the host launches them so, and waits for them.

        The first calls of a kind connect ranks, for which NCCL waits in `ncclGroupEnd`: they are made in a thread of
        their own, so that this one notices that a rank has stopped.

        `memory` is what the calls read and write. `kind` is equal for calls that go to the same ranks in the same ways;
        by default `what`.
        """
        if self._held is None:
            self.run(what, partial(self.issue, what, handle, memory, launch, kind))
            return
        self._require_usable(what)
        self._held.append(memory)

        def group() -> None:
            with nccl_handles.group_of_calls():
                launch(handle.comm, self.stream.ptr)

        with translated(f"{what} with NCCL on {self._names[handle]}"):
            if (kind or what) in handle.connected:
                group()
            else:
                self._connect(what, group)
                handle.connected.add(kind or what)

    def is_complete(self, launched: Launched) -> bool:
        """Return whether work is done, or raise NCCL's failure; once it is done, release the memory. Never waits."""
        if launched not in self._flying:
            return True
        try:
            if not is_complete(launched.event, launched.what, "with NCCL"):
                self._check(launched.what)
                return False
            self._require_usable(launched.what)  # an abort ends work, too
        except BaseException as error:
            self.give_up(error)
            raise
        self._flying.remove(launched)
        return True

    def wait(self, launched: Launched, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait on the host until work is done. `meanwhile`: done now and then.

        Raises:
            Exception: What the hook raises, or NCCL's failure. All communicators of NCCL are aborted then.
        """

        def look() -> None:
            self.check_peers()
            meanwhile()

        try:
            poll(lambda: self.is_complete(launched), look, _BUSY_SECONDS, is_message=False)
        except BaseException as error:
            self.give_up(error)
            raise

    def drain(self) -> None:
        """Wait on the host for all that is under way."""
        for launched in tuple(self._flying):
            self.wait(launched)

    def give_up(self, error: BaseException) -> None:
        """Abort NCCL's communicators. What the GPU may still work on is never freed, and comes before later work."""
        if self._failure is None:
            self._failure = error
            nccl_handles.abort_all(error)
        if self._flying or self._held is not None:
            never_free((self, self._held))
        with suppress(self._cuda.runtime.CUDARuntimeError):  # once the context is lost, nothing runs late
            for launched in self._flying:  # of a call that was started, the caller's stream does not wait for the end
                self._cuda.get_current_stream().wait_event(launched.event)

    def _launched(self, what: str, result: Any, event: Any, memory: Any) -> Launched:
        self._flying.append(Launched(what, result, event, memory))
        return self._flying[-1]

    def _connect(self, what: str, group: Callable[[], None]) -> None:
        """Make a group of calls in a thread, and watch the other ranks until it returns."""

        def look() -> None:
            self._check(what)
            self.check_peers()

        Background(_CONNECTS, group).wait(look)

    def _check(self, what: str) -> None:
        """Look at NCCL's own errors, now and then."""
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + _CHECK_SECONDS
        for handle, name in self._names.items():
            with translated(f"{what} with NCCL on {name}"):
                handle.check()

    def _require_usable(self, what: str) -> None:
        shared = DeadlineExceededError, PeerFailedError  # which all ranks have
        kind = next((kind for kind in shared if isinstance(self._failure, kind)), RuntimeError)
        for handle, name in self._names.items():
            handle.require_usable(f"{what} with NCCL on {name}", kind)
