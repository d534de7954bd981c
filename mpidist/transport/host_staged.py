"""Device memory by way of the host: every call copies out, moves host memory, and copies back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from mpidist.transport import arrays
from mpidist.transport.communicator import Array, Communicator, shard_bounds
from mpidist.transport.reduction import Reduction

__all__ = ["HostStagedCommunicator"]


@final
class HostStagedCommunicator(Communicator):
    """A communicator of host memory, for device arrays.

    Each call moves as much between ranks as the one it stands on, and the buffer (or the shard) once each way
    between device and host. Copies are in the order of the current stream.

    Args:
        host: The communicator of host memory. It stays its owner's, who frees it; its traffic is counted there.
    """

    def __init__(self, host: Communicator) -> None:
        super().__init__(f"{host.name} through the host", host.rank, host.size)
        self._host = host
        self.traffic = host.traffic

    def pack_buffer(self, count: int, dtype: np.dtype[Any]) -> Array:
        return arrays.empty((count,), dtype, device=True)

    def all_reduce(self, buffer: Array, reduction: Reduction) -> None:
        staged = arrays.to_host(buffer)
        self._host.all_reduce(staged, reduction)
        buffer[...] = arrays.from_host(staged, buffer)

    def reduce(self, buffer: Array, reduction: Reduction, root: int) -> None:
        staged = arrays.to_host(buffer)
        self._host.reduce(staged, reduction, root)
        if self.rank == root:
            buffer[...] = arrays.from_host(staged, buffer)

    def reduce_scatter(
        self, buffer: Array, reduction: Reduction, bounds: Sequence[int] | None = None, into: Array | None = None
    ) -> Array:
        if bounds is None:
            bounds = shard_bounds(buffer.size, self.size)
        shard = self._host.reduce_scatter(arrays.to_host(buffer), reduction, bounds)
        own = buffer[bounds[self.rank] : bounds[self.rank + 1]] if into is None else into
        own[...] = arrays.from_host(shard, buffer)
        return own

    def all_gather(self, buffer: Array, bounds: Sequence[int] | None = None) -> None:
        staged = arrays.to_host(buffer)
        self._host.all_gather(staged, bounds)
        buffer[...] = arrays.from_host(staged, buffer)

    def broadcast(self, buffer: Array, root: int, into: Array | None = None) -> None:
        target = buffer if into is None else into
        staged = arrays.to_host(buffer) if self.rank == root else np.empty(target.size, target.dtype)
        self._host.broadcast(staged, root)
        if self.rank != root:
            target[...] = arrays.from_host(staged, target)
        elif into is not None:
            into[...] = buffer

    def gather(self, buffer: Array, root: int) -> Array | None:
        rows = self._host.gather(arrays.to_host(buffer), root)
        return None if rows is None else arrays.from_host(rows, buffer)

    def exchange(self, outgoing: Array, to: int, incoming: Array, source: int) -> None:
        received = np.empty(incoming.size, incoming.dtype)
        self._host.exchange(arrays.to_host(outgoing), to, received, source)
        incoming[...] = arrays.from_host(received, incoming)

    def free(self) -> None:
        pass
