"""Communicators of device memory whose primitives are messages of MPI."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist.transport import arrays
from mpidist.transport.communicator import Array, Communicator, Traffic, shard_bounds
from mpidist.transport.device_over_mpi.buffers import Buffers
from mpidist.transport.device_over_mpi.messages import DeviceMessages
from mpidist.transport.device_over_mpi.staging import Staging
from mpidist.transport.mpi import MpiCommunicator
from mpidist.transport.reduction import Reduction

__all__ = ["MessagedCommunicator"]


class MessagedCommunicator(Communicator, ABC):
    """Ranks whose device memory MPI carries as bytes, by `DeviceMessages`, and whose GPUs add, in rank order.

    Args:
        name: For logs and errors.
        mpi: Carries the bytes. It stays its owner's.
        staging: Streams and memory. It stays its owner's.
        buffers: How pieces come to MPI.
        traffic: Where calls are counted: one for each of this object's.
    """

    def __init__(self, name: str, mpi: MpiCommunicator, staging: Staging, buffers: Buffers, traffic: Traffic) -> None:
        super().__init__(name, mpi.rank, mpi.size)
        self._messages = DeviceMessages(mpi, staging, buffers, lambda: self._check_peers())
        self.traffic = traffic

    def pack_buffer(self, count: int, dtype: np.dtype[Any]) -> Array:
        return arrays.empty((count,), dtype, device=True)

    def all_reduce(self, buffer: Array, reduction: Reduction) -> None:
        self.traffic.add("all_reduce", 2 * buffer.nbytes * (self.size - 1) // self.size)
        self._messages.all_reduce(buffer, reduction)

    def reduce(self, buffer: Array, reduction: Reduction, root: int) -> None:
        self.traffic.add("reduce", buffer.nbytes)
        self._messages.reduce(buffer, reduction, root)

    def reduce_scatter(
        self, buffer: Array, reduction: Reduction, bounds: Sequence[int] | None = None, into: Array | None = None
    ) -> Array:
        bounds = shard_bounds(buffer.size, self.size) if bounds is None else bounds
        shard: Array = buffer[bounds[self.rank] : bounds[self.rank + 1]] if into is None else into
        self.traffic.add("reduce_scatter", buffer.nbytes - shard.nbytes)
        self._messages.reduce_scatter(buffer, reduction, bounds, shard)
        return shard

    def all_gather(self, buffer: Array, bounds: Sequence[int] | None = None) -> None:
        self._messages.all_gather(buffer, self._start_all_gather(buffer, bounds))

    def broadcast(self, buffer: Array, root: int, into: Array | None = None) -> None:
        self._messages.broadcast(self._start_broadcast(buffer, root, into), root)

    def gather(self, buffer: Array, root: int) -> Array | None:
        self.traffic.add("gather", buffer.nbytes * (self.size - 1 if self.rank == root else 1))
        rows = None
        if self.rank == root:
            rows = arrays.empty((self.size, buffer.size), buffer.dtype, device=True)
            rows[root] = buffer
        self._messages.gather(buffer, root, rows)
        return rows

    def send_receive(self, outgoing: Array, to: int, incoming: Array, source: int) -> None:
        self.traffic.add("exchange", max(outgoing.nbytes, incoming.nbytes))
        if to == source == self.rank:
            incoming[...] = outgoing
            return
        self._messages.send_receive(outgoing, to, incoming, source)

    def free(self) -> None:
        """Nothing: what it stands on is its owner's."""
