"""The stand-in of `nccl_standin` with a GPU that is late in everything: kernels are queued, and NCCL can be held."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpidist.transport import arrays
from standin.nccl import Allocation, FakeArray, StandIn, Stream

__all__ = ["LateArray", "LateStandIn"]


class Kernel:
    """Work of one stream on arrays."""

    comm = None

    def __init__(self, stream: Stream, action: Callable[[], None], used: list[Allocation]) -> None:
        self.waits, stream.waits = stream.waits, []
        self.memory = [its.memory for its in used]  # so that a fault is found, and not made
        # CuPy lets memory that is freed be used again in the order of the stream that it was allocated in.
        self.addresses = {its.address for its in used if its.stream != stream.ptr}
        self.is_done = False
        self._action = action

    def step(self) -> None:
        if all(event.is_complete() for event in self.waits):
            with np.errstate(all="ignore"):
                self._action()
            self.is_done = True


class LateArray(FakeArray):
    """An array on which all work is queued."""

    _world: LateStandIn

    def _view(self, numbers: Any) -> LateArray:
        return LateArray(self._world, np.asarray(numbers), self._allocation)

    def _write(self, numbers: Any) -> None:
        copy = np.array(numbers)  # the host's, which may change
        self._fill([], lambda: copy)

    def _fill(self, sources: list[FakeArray], function: Callable[..., Any]) -> None:
        def action() -> None:
            np.copyto(self._numbers, function(*(its._numbers for its in sources)), casting="unsafe")

        self._world.queue(action, sources, self)

    def _made(self, shape: Any, dtype: Any, function: Callable[..., Any]) -> LateArray:
        made = self._world.empty(shape, dtype)
        made._fill([self], function)
        return made

    def __setitem__(self, at: Any, value: Any) -> None:
        part = self[at]
        assert isinstance(part, LateArray)
        if isinstance(value, FakeArray):
            part._fill([value], lambda numbers: numbers)
        else:
            assert np.ndim(value) == 0, "CuPy takes no NumPy array here"
            part._fill([], lambda: value)

    def reshape(self, *shape: Any) -> FakeArray:
        flat = self._numbers.reshape(*shape)
        if np.shares_memory(flat, self._numbers) or not self.size:
            return self._view(flat)
        return self._made(flat.shape, flat.dtype, lambda numbers: numbers.reshape(*shape))

    def astype(self, dtype: Any, copy: bool = True) -> FakeArray:
        if not copy and self.dtype == dtype:
            return self
        return self._made(self.shape, dtype, lambda numbers: numbers)

    def copy(self) -> FakeArray:
        return self._made(self.shape, self.dtype, lambda numbers: numbers)

    def __truediv__(self, divisor: Any) -> FakeArray:
        dtype = (np.empty(0, self.dtype) / divisor).dtype
        return self._made(self.shape, dtype, lambda numbers: numbers / divisor)

    def __itruediv__(self, divisor: Any) -> FakeArray:
        self._fill([self], lambda numbers: numbers / divisor)
        return self


class LateStandIn(StandIn):
    """One rank's CuPy and NCCL, whose GPU works only while somebody asks for an event, or waits in NCCL.

    Attributes:
        is_held: Whether NCCL's calls are held back on this rank.
        delay: How often each call of NCCL is passed over before it begins.
        threads: The threads that launched something.
        num_done: Number of kernels that have run.
        num_allocations: Number of allocations.
    """

    def __init__(self, comm: Any, **more: Any) -> None:
        super().__init__(comm, **more)
        self.is_held = False
        self.delay = 0
        self.threads: set[int] = set()
        self.num_done = self.num_allocations = 0
        self._passed: dict[int, int] = {}

    def empty(self, shape: Any, dtype: Any = np.float64) -> LateArray:
        self.num_allocations += 1
        array = super().empty(shape, dtype)
        array._allocation.stream = self.current.ptr
        return LateArray(self, array._numbers, array._allocation)

    def asnumpy(self, array: FakeArray) -> Any:
        self.touch(self.current, array)
        self.current.synchronize()
        return array._numbers.copy()

    def ufunc(self, function: Any) -> Callable[..., FakeArray]:
        def apply(one: LateArray, other: Any, out: LateArray) -> FakeArray:
            if isinstance(other, FakeArray):
                out._fill([one, other], function)
            else:
                out._fill([one], lambda numbers: function(numbers, other))
            return out

        return apply

    def computed(self, function: Any, inputs: Any) -> FakeArray:
        like = next(its for its in inputs if isinstance(its, FakeArray))
        return self.ufunc(function)(*inputs, out=self.empty(like.shape, like.dtype))

    def queue(self, action: Callable[[], None], reads: list[FakeArray], writes: FakeArray) -> None:
        """Put work on the current stream, and note what it comes after."""
        stream = self.current
        self.threads.add(threading.get_ident())
        stream.issue()
        for array, is_write in (*((its, False) for its in reads), (writes, True)):
            low, high = arrays.memory_bounds(array._numbers)
            if high > low:
                self.note(stream, array._allocation, low, high, is_write)
        stream.queue.append(Kernel(stream, action, [its._allocation for its in (*reads, writes)]))

    def reach(self, stream: Stream) -> None:
        """Nothing: kernels are queued."""

    def run_kernel(self, work: Callable[[Any], None], args: Any, ranges: list[tuple[int, int, bool]]) -> None:
        """Queue a kernel."""
        stream, used = self.current, []
        stream.issue()
        for low, high, is_write in ranges:
            used.append(self.find(low, high - low))
            self.note(stream, used[-1], low, high, is_write)
        stream.queue.append(Kernel(stream, lambda: work(args), used))

    def find(self, address: int, nbytes: int) -> Allocation:
        if threading.current_thread().name != "mpidist NCCL connects":  # which may wait there
            self.threads.add(threading.get_ident())  # every call of NCCL comes by
        return super().find(address, nbytes)

    def num_in_flight(self) -> int:
        """Count the launches of NCCL that are not done."""
        return sum(launch.comm is not None for stream in self.streams.values() for launch in stream.queue)

    def progress(self) -> None:
        for stream in list(self.streams.values()):
            if not stream.queue:
                continue
            head = stream.queue[0]
            if head.comm is not None:
                passed = self._passed[id(head)] = self._passed.get(id(head), 0) + 1
                if self.is_held or passed <= self.delay:
                    continue
            head.step()
            if head.is_done:
                self.num_done += head.comm is None
                self._passed.pop(id(head), None)
                if stream.queue and stream.queue[0] is head:
                    stream.queue.popleft()

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[Stream]:
        """Make a stream current for a while."""
        before, self.current = self.current, stream
        try:
            yield stream
        finally:
            self.current = before
