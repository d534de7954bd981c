"""Device memory by MPI that reads it itself: no copies through the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from mpidist.transport import arrays
from mpidist.transport.communicator import Array, Communicator, shard_bounds
from mpidist.transport.device_messages import DeviceMessages
from mpidist.transport.mpi import MpiCommunicator
from mpidist.transport.passages import DirectPassage
from mpidist.transport.reduction import Reduction
from mpidist.transport.staging import Staging

__all__ = ["DeviceMpiCommunicator"]


@final
class DeviceMpiCommunicator(Communicator):
    """Ranks of an MPI communicator that carries bytes of device memory; GPUs add, in rank order.

    Only messages from rank to rank: MPI's own reductions of device memory go through the host, or crash. As many bytes
    as `HostStagedCommunicator` between nodes, from where they are. `device_mpi_support` must have proven that MPI can.

    MPI knows no streams, so a call waits for what the caller's current stream holds before the first message, and
    returns when its work is done. NCCL's calls return when they are done as well: never are both under way, which
    could end in a deadlock.

    Args:
        mpi: Carries the bytes. It stays its owner's; traffic is counted there.
        staging: Streams, and device memory for what comes; it stays its owner's. No pinned memory is used.
    """

    def __init__(self, mpi: MpiCommunicator, staging: Staging) -> None:
        super().__init__(f"{mpi.name} from device memory", mpi.rank, mpi.size)
        self._messages = DeviceMessages(mpi, staging, DirectPassage(staging), lambda: self._is_over())
        self.traffic = mpi.traffic

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

    def exchange(self, outgoing: Array, to: int, incoming: Array, source: int) -> None:
        self.traffic.add("exchange", max(outgoing.nbytes, incoming.nbytes))
        if to == source == self.rank:
            incoming[...] = outgoing
            return
        self._messages.exchange(outgoing, to, incoming, source)

    def free(self) -> None:
        pass
