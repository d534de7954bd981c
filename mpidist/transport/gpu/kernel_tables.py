"""Small tables of numbers for kernels, in device memory: brought there once, and found again by a key.

A program that makes the same calls again finds its tables where they are, at no cost. One whose arrays lie elsewhere at
every step brings new ones: through pinned memory, on the current stream, without waiting, in the place of the oldest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any, Final, final

import numpy as np

__all__ = ["DeviceTables", "Table"]

_MAX_BYTES: Final = 32 << 20  # of tables, before old ones make place; as much in pinned memory
_LEAST_WORDS: Final = 64
_WORD: Final = 8  # bytes


@final
class Table:
    """One table.

    Attributes:
        address: Where it is on the device.
        about: What its maker noted of it.
        generation: How often its place was given to another table: one that was looked up before is gone.
    """

    __slots__ = (
        "_pinned", "about", "address", "capacity", "device", "generation", "is_kept", "streams", "uploaded",
        "was_used", "words",
    )  # fmt: skip

    def __init__(self, cupy: Any, capacity: int) -> None:
        self.capacity = capacity
        self._pinned = cupy.cuda.alloc_pinned_memory(capacity * _WORD)
        self.words = np.frombuffer(self._pinned, np.uint64, capacity)
        self.device = cupy.empty(capacity, np.uint64)
        self.address = int(self.device.data.ptr)
        self.uploaded = cupy.cuda.Event(disable_timing=True)
        self.streams: set[int] = set()  # whose work came after the upload, and may use it
        self.about: Any = None
        self.generation = 0
        self.was_used = False
        self.is_kept = False

    @property
    def pinned_address(self) -> int:
        """Where it is on the host."""
        return int(self._pinned.ptr)


@final
class DeviceTables:
    """Tables of 64-bit words, by key.

    For each launch: `find` its tables, or `upload` them; `use` them; launch; `mark`. All of a launch's calls are made
    with one stream, the current one. Streams may change from launch to launch: one that gets to a table for the first
    time waits for its upload, by an event, and who writes another in its place waits for all streams that used it.

    A launch that is captured for a CUDA graph may only use tables that are there already. They are kept for good, as
    nobody tells when the graph is run again.

    Args:
        cupy: CuPy.
        max_bytes: Size of the tables, from which on those not used for longest make place.
    """

    def __init__(self, cupy: Any, max_bytes: int = _MAX_BYTES) -> None:
        self._cupy = cupy
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._tables: dict[Hashable, Table] = {}
        self._spare: defaultdict[int, list[Table]] = defaultdict(list)
        self._marks: dict[int, Any] = {}  # by stream: an event after its last launch

    def find(self, key: Hashable) -> Table | None:
        """Look a table up."""
        return self._tables.get(key)

    def upload(
        self,
        key: Hashable,
        words: np.ndarray[Any, np.dtype[np.uint64]],
        about: Any,
        stream: Any,
        beside: Sequence[Table] = (),
    ) -> Table:
        """Bring a table to the device, in the order of the stream.

        Args:
            key: How it will be found.
            words: What is in it, [n].
            about: A note to go with it.
            stream: The current stream.
            beside: Tables that the same launch needs, which stay.

        Raises:
            RuntimeError: If the stream is captured.
        """
        if stream.is_capturing():
            raise RuntimeError(
                "a call with arrays that are new cannot be captured in a CUDA graph: it copies a table of their "
                "addresses to the device; make the same call once, with the same arrays, before the capture"
            )
        capacity = max(_LEAST_WORDS, 1 << (words.size - 1).bit_length())
        while self._nbytes + capacity * _WORD > self._max_bytes and self._retire(beside):
            pass
        table = self._take(capacity, stream)
        table.words[: words.size] = words
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(
            table.address, table.pinned_address, words.size * _WORD, runtime.memcpyHostToDevice, stream.ptr
        )
        table.uploaded.record(stream)
        table.streams, table.about, table.was_used = {stream.ptr}, about, False
        self._tables[key] = table
        self._nbytes += capacity * _WORD
        self.mark(stream)
        return table

    def use(self, table: Table, stream: Any, is_capturing: bool) -> int:
        """Let a stream's next launch read a table. Returns its address."""
        table.was_used = True
        if is_capturing:
            table.is_kept = True
        elif stream.ptr not in table.streams:
            stream.wait_event(table.uploaded)
            table.streams.add(stream.ptr)
            self.mark(stream)  # now, in case that the launch fails
        return table.address

    def mark(self, stream: Any) -> None:
        """Note that a stream has work that uses tables."""
        mark = self._marks.get(stream.ptr)
        if mark is None:
            mark = self._marks[stream.ptr] = self._cupy.cuda.Event(disable_timing=True)
        mark.record(stream)

    def _retire(self, beside: Sequence[Table]) -> bool:
        """Take the place of a table that was not used since its turn came last, if there is any that may go."""
        for _ in range(2 * len(self._tables)):
            key = next(iter(self._tables))
            table = self._tables.pop(key)
            if table.is_kept or table.was_used or any(table is other for other in beside):
                table.was_used = False
                self._tables[key] = table
                continue
            table.generation += 1
            self._spare[table.capacity].append(table)
            self._nbytes -= table.capacity * _WORD
            return True
        return False

    def _take(self, capacity: int, stream: Any) -> Table:
        """Find a place for a table: one whose content has left the host; what still reads it, the stream waits for."""
        query = self._cupy.cuda.runtime.eventQuery
        spare = self._spare[capacity]
        for at, table in enumerate(spare):
            if query(table.uploaded.ptr) == 0:
                del spare[at]
                for ptr in table.streams - {stream.ptr}:
                    stream.wait_event(self._marks[ptr])
                return table
        return Table(self._cupy, capacity)
