"""Writes of single replicas to arrays that all replicas of a rank share: committed once all of them wrote the same.

At a call in which the replicas meet, a rank first checks the writes of its replicas, then the ranks compare the call,
of which a conflict of one rank is a part, and only then each rank commits: a write is kept on all ranks, or on none.
At the end of `run` the ranks compare nothing, so others keep a write that one rank refuses: the error has the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from mpidist.transport import arrays

__all__ = ["PendingWrites"]


@final
class PendingWrites:
    """The writes of this rank's replicas to shared arrays since they last met in a call, by the id of the array.

    A replica writes to a copy of its own, which the other replicas do not see. Replicas that wrote the same bits share
    one copy, so the copies take the memory of one array, and of one or two more while replicas write.
    """

    def __init__(self, replica_ids: Sequence[int]) -> None:
        self._ids = replica_ids
        self.written: dict[int, _WrittenArray] = {}

    def read(self, replica_id: int, shared: Any) -> Any:
        """Return a shared array as a replica sees it: with the replica's own writes. Local."""
        written = self.written.get(id(shared))
        return shared if written is None else written.seen_by(replica_id)

    def change(
        self, replica_id: int, name: str, shared: Any, change: Callable[[Any], None], on_commit: Callable[[], None]
    ) -> None:
        """Call `change` on this replica's copy of an array. `on_commit` follows the write itself. Local."""
        written = self.written.get(id(shared)) or _WrittenArray(name, shared, on_commit)
        written.change(replica_id, change)
        self.written[id(shared)] = written

    def conflict(self) -> Exception | None:
        """Return a `ValueError`, to be raised on all ranks, if replicas wrote different bits. Local."""
        try:
            for written in self.written.values():
                written.require_equal(self._ids)
        except Exception as problem:  # of any kind: the other ranks must learn of it
            return problem
        return None

    def commit(self) -> None:
        """Write the shared arrays, of which `conflict` has found all well, and drop the copies. Local."""
        while self.written:
            self.written.popitem()[1].commit()

    def discard(self) -> None:
        """Drop the copies: the shared arrays keep their values. Local."""
        self.written.clear()


@final
class _WrittenArray:
    """A shared array, and the copies to which replicas wrote."""

    def __init__(self, name: str, shared: Any, on_commit: Callable[[], None]) -> None:
        self._name, self._shared, self._on_commit = name, shared, on_commit
        self._first_writer = -1
        self._copies: dict[int, Any] = {}  # by replica id; equal copies on one device are one array

    def seen_by(self, replica_id: int) -> Any:
        return self._copies.get(replica_id, self._shared)

    def change(self, replica_id: int, change: Callable[[Any], None]) -> None:
        if not self._copies:
            self._first_writer = replica_id
        is_first, first = replica_id == self._first_writer, self._copies.get(self._first_writer)
        own = self._copies.get(replica_id)
        if sum(copy is own for copy in self._copies.values()) != 1:  # copy on write
            own = arrays.copied_here(self.seen_by(replica_id))
        change(own)
        is_like_first = not is_first and arrays.are_on_one_device(own, first) and _same_bits(own, first)
        self._copies[replica_id] = first if is_like_first else own

    def require_equal(self, replica_ids: Sequence[int]) -> None:
        first = self._copies[self._first_writer]
        for replica_id in replica_ids:
            copy = self.seen_by(replica_id)
            if copy is first or _same_bits(copy, first):
                continue
            did = "another value" if replica_id in self._copies else "nothing"
            raise ValueError(
                f"copies would differ: replica {self._first_writer} assigned a value to variable {self._name!r}, and "
                f"replica {replica_id} {did}, and the replicas of a rank share one copy. With aggregation NONE, assign "
                "what is the same on all replicas, such as what all_reduce returns; or make the variable with "
                "aggregation SUM, MEAN or ONLY_FIRST_REPLICA, or with synchronization ON_READ"
            )

    def commit(self) -> None:
        self._shared[...] = arrays.on_current_device(self._copies[self._first_writer])
        self._on_commit()


def _same_bits(one: Any, other: Any) -> bool:
    one, other = map(arrays.on_current_device, (one, other))
    if one.dtype.type in (np.longdouble, np.clongdouble):  # 6 of 16 bytes are padding, so numbers are compared
        return bool(((one == other) | ((one != one) & (other != other))).all())
    size = min(one.dtype.itemsize, 8)
    words = np.dtype(f"u{size}") if one.dtype.itemsize % size == 0 and size in (1, 2, 4, 8) else np.dtype(np.uint8)
    return bool((one.reshape(-1).view(words) == other.reshape(-1).view(words)).all())
