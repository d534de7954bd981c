"""Collective operations on flat arrays: the interface `Communicator`, and the communicator of one rank.

Each transport is a subclass of `Communicator`: MPI on host memory, device memory staged through the host, and others.
Algorithms use this interface alone.

Each method counts, in `Traffic`, the bytes in the busier direction of a rank's link: those of the algorithm that moves
the least, as the docstrings state them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from mpidist.transport import arrays
from mpidist.transport.reduction import Reduction

__all__ = ["Array", "Communicator", "SoloCommunicator", "Traffic", "shard_bounds"]

# A flat, contiguous array [n] of NumPy or CuPy, whichever kind of memory the communicator is for.
Array = Any


def shard_bounds(count: int, size: int) -> list[int]:
    """Cut `count` elements into `size` shards whose lengths differ by at most one, longer shards first.

    Returns:
        `size + 1` bounds: rank r's shard is `buffer[bounds[r]:bounds[r + 1]]`.
    """
    least, more = divmod(count, size)
    return [rank * least + min(rank, more) for rank in range(size + 1)]


@final
class Traffic:
    """Counts the calls and bytes of this rank in a communicator, by primitive, since it was made or since `clear`.

    Attributes:
        overflowed: How many finite numbers this rank rounded to an infinite float16.
    """

    def __init__(self) -> None:
        self.overflowed = 0
        self._sums: dict[str, list[int]] = {}  # calls and bytes of each primitive

    @property
    def calls(self) -> Counter[str]:
        """Number of calls of each primitive."""
        return Counter({primitive: calls for primitive, (calls, _) in self._sums.items() if calls})

    @property
    def nbytes(self) -> Counter[str]:
        """Bytes that each primitive moved over this rank's link."""
        return Counter({primitive: nbytes for primitive, (calls, nbytes) in self._sums.items() if calls})

    def add(self, primitive: str, nbytes: int) -> None:
        """Count one call that moves `nbytes` bytes over this rank's link."""
        sums = self.sums_of(primitive)
        sums[0] += 1
        sums[1] += nbytes

    def sums_of(self, primitive: str) -> list[int]:
        """Return the calls and bytes of a primitive, to which the caller adds: repeated calls do, without `add`."""
        return self._sums.setdefault(primitive, [0, 0])

    def clear(self) -> None:
        """Set all sums to 0."""
        for sums in self._sums.values():
            sums[:] = 0, 0
        self.overflowed = 0


class Communicator(ABC):
    """A group of ranks that move and reduce flat arrays. Every method but `free` is collective over the group.

    `buffer` is always flat and contiguous, [n], of the same length and dtype on every rank. With P ranks, S bytes
    in `buffer` and s bytes in this rank's shard, the busier direction of this rank's link carries at least the
    bytes that each method states.

    Attributes:
        name: For logs and errors, for example `"within_node"`.
        rank: This rank in the group.
        size: Number of ranks, P.
        traffic: The calls and bytes of this rank.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.traffic = Traffic()
        self._check_peers: Callable[[], None] = lambda: None

    def set_wait_hook(self, check_peers: Callable[[], None]) -> None:
        """Set a function that this rank calls while it waits for others. It raises if waiting cannot help."""
        self._check_peers = check_peers

    def _start_all_gather(self, buffer: Array, bounds: Sequence[int] | None) -> Sequence[int]:
        """Count an all-gather, and return its bounds."""
        bounds = shard_bounds(buffer.size, self.size) if bounds is None else bounds
        own = (bounds[self.rank + 1] - bounds[self.rank]) * buffer.itemsize
        self.traffic.add("all_gather", buffer.nbytes - own)
        return bounds

    def _start_broadcast(self, buffer: Array, root: int, into: Array | None) -> Array:
        """Count a broadcast, and return the array to broadcast in place."""
        self.traffic.add("broadcast", buffer.nbytes if into is None else into.nbytes)
        if into is None:
            return buffer
        if self.rank == root:
            into[...] = buffer
        return into

    @abstractmethod
    def pack_buffer(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Return memory to pack into, which this transport reads without another copy. Local.

        Returns:
            A buffer [count], uninitialised. It belongs to the transport: the next call overwrites it.
        """

    @abstractmethod
    def all_reduce(self, buffer: Array, reduction: Reduction) -> None:
        """Leave the reduction of all ranks' buffers in every rank's buffer. 2 S (P - 1) / P bytes."""

    @abstractmethod
    def reduce(self, buffer: Array, reduction: Reduction, root: int) -> None:
        """Leave the reduction in the root's buffer, and overwrite the buffers of the other ranks. S bytes."""

    @final
    def reduce_scatter(
        self, buffer: Array, reduction: Reduction, bounds: Sequence[int] | None = None, into: Array | None = None
    ) -> Array:
        """Leave the reduction of each shard with its rank. S - s bytes.

        Args:
            buffer: [n], this rank's contribution.
            reduction: The elementwise operation.
            bounds: The bounds of the shards; by default those of `shard_bounds`.
            into: [s], which takes the shard; then `buffer` is only read.

        Returns:
            This rank's shard: `into`, or a view of `buffer`, the rest of which is overwritten.
        """
        bounds = shard_bounds(buffer.size, self.size) if bounds is None else bounds
        own = buffer[bounds[self.rank] : bounds[self.rank + 1]]
        shard = own if into is None else into
        self._scatter(buffer, reduction, bounds, own, shard)
        return shard

    @abstractmethod
    def _scatter(self, buffer: Array, reduction: Reduction, bounds: Sequence[int], own: Array, shard: Array) -> None:
        """Carry out `reduce_scatter`. `own`: this rank's part of `buffer`; `shard`: takes the result, may be `own`."""

    @abstractmethod
    def all_gather(self, buffer: Array, bounds: Sequence[int] | None = None) -> None:
        """Give every rank the shard of every other, in place. S - s bytes in.

        Args:
            buffer: [n], of which this rank has filled its shard.
            bounds: The bounds of the shards; by default those of `shard_bounds`.
        """

    @abstractmethod
    def broadcast(self, buffer: Array, root: int, into: Array | None = None) -> None:
        """Copy the root's buffer into every rank's. S bytes.

        Args:
            buffer: [n], the numbers to send on the root.
            root: The rank that sends.
            into: [n], which takes the numbers on every rank; then `buffer` is only read, and only on the root.
        """

    @abstractmethod
    def send_receive(self, outgoing: Array, to: int, incoming: Array, source: int) -> None:
        """Send one flat array and receive another, at the same time. As many bytes as the larger array has.

        Not collective: each send needs a matching receive. For an empty array no message is sent.
        """

    def free(self) -> None:  # noqa: B027  most have nothing of their own
        """Free the resources of the transport, if it has any. The communicator cannot be used again."""


@final
class SoloCommunicator(Communicator):
    """The communicator of one rank, which moves nothing: a reduction is at most a division."""

    def __init__(self, name: str, device: bool = False) -> None:
        super().__init__(name, rank=0, size=1)
        self._device = device

    def pack_buffer(self, count: int, dtype: np.dtype[Any]) -> Array:
        return arrays.empty((count,), dtype, self._device)

    def all_reduce(self, buffer: Array, reduction: Reduction) -> None:
        reduction.finish(buffer)

    def reduce(self, buffer: Array, reduction: Reduction, root: int) -> None:
        reduction.finish(buffer)

    def _scatter(self, buffer: Array, reduction: Reduction, bounds: Sequence[int], own: Array, shard: Array) -> None:
        if shard is not own:
            shard[...] = own
        reduction.finish(shard)

    def all_gather(self, buffer: Array, bounds: Sequence[int] | None = None) -> None:
        pass

    def broadcast(self, buffer: Array, root: int, into: Array | None = None) -> None:
        if into is not None:
            into[...] = buffer

    def send_receive(self, outgoing: Array, to: int, incoming: Array, source: int) -> None:
        incoming[...] = outgoing
