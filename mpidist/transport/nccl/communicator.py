"""Device memory over NCCL: ranks with a GPU each, and flat CuPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final, TypeAlias, final

import numpy as np

from mpidist.transport import cuda
from mpidist.transport.arrays import address_of
from mpidist.transport.communicator import Array, Communicator, shard_bounds
from mpidist.transport.gpu.kernels import DeviceKernels
from mpidist.transport.nccl import handles as nccl_handles
from mpidist.transport.nccl.handles import Handle
from mpidist.transport.nccl.launch_queue import DeviceQueue
from mpidist.transport.reduction import UFUNCS, Reduction, is_low_precision

__all__ = ["NcclCommunicator"]

_ALIGNMENT: Final = 16  # bytes: of what is joined fastest
_DTYPES: Final = {
    "i1": "NCCL_INT8", "u1": "NCCL_UINT8", "i4": "NCCL_INT32", "u4": "NCCL_UINT32", "i8": "NCCL_INT64",
    "u8": "NCCL_UINT64", "f4": "NCCL_FLOAT32", "f8": "NCCL_FLOAT64",
}  # fmt: skip

Launch = Callable[[Any, int], None]  # with CuPy's communicator, and the address of the stream
_Part: TypeAlias = tuple[int, int, int]  # another rank, the address here, and the bytes of what is sent or received


@final
class NcclCommunicator(Communicator):
    """Ranks of an NCCL communicator.

    NCCL reduces integers of 8, 32 and 64 bits, and sums and products of float32 and float64. Everything else is joined
    in rank order: every rank receives all ranks' parts of its shard, joins them on the GPU, and the shards are
    gathered. Those are float16 and bfloat16, which NCCL would round at every hop and which here have a float32
    accumulator; minima and maxima of floating-point numbers, of which NCCL may lose a NaN; the dtypes that NCCL lacks
    (16-bit integers, complex numbers); and reductions that require rank order.
    That moves no more than NCCL's own all-reduce, 2 S (P - 1) / P bytes a rank, but needs memory for S bytes more.

    Within `DeviceQueue.launch` a call returns at once, and else when its work is done. After an error all NCCL
    communicators of the process are aborted. The communicator owns its handle, and shares queue and kernels.
    """

    def __init__(
        self, handle: Handle, name: str, rank: int, size: int, queue: DeviceQueue, kernels: DeviceKernels
    ) -> None:
        super().__init__(name, rank, size)
        self._handle, self._queue, self._kernels = handle, queue, kernels
        queue.add(handle, f"rank {rank} of {size} ({name})")
        nccl = cuda.nccl()
        self._ops = {op: int(getattr(nccl, f"NCCL_{op.upper()}")) for op in UFUNCS}
        self._codes = {code: int(getattr(nccl, name)) for code, name in _DTYPES.items()}
        self._byte = self._codes["u1"]

    def set_wait_hook(self, check_peers: Callable[[], None]) -> None:
        self._queue.check_peers = check_peers

    def pack_buffer(self, count: int, dtype: np.dtype[Any]) -> Array:
        return self._queue.buffer("pack", count * dtype.itemsize).view(dtype)

    def all_reduce(self, buffer: Array, reduction: Reduction) -> None:
        self.traffic.add("all_reduce", 2 * buffer.nbytes * (self.size - 1) // self.size)
        native = self.native_dtype(buffer.dtype, reduction)
        if native is None:
            self._all_gather(buffer, self._join_in_place(buffer, reduction))
            return
        at, op = address_of(buffer), self._ops[reduction.op]
        self._run("all_reduce", [buffer], lambda comm, to: comm.allReduce(at, at, buffer.size, native, op, to))

    def reduce(self, buffer: Array, reduction: Reduction, root: int) -> None:
        self.traffic.add("reduce", buffer.nbytes)
        native = self.native_dtype(buffer.dtype, reduction)
        if native is None:
            self._collect(buffer, self._join_in_place(buffer, reduction), root)
            return
        at, op = address_of(buffer), self._ops[reduction.op]
        self._run("reduce", [buffer], lambda comm, to: comm.reduce(at, at, buffer.size, native, op, root, to))

    def _scatter(self, buffer: Array, reduction: Reduction, bounds: Sequence[int], own: Array, shard: Array) -> None:
        self.traffic.add("reduce_scatter", buffer.nbytes - own.nbytes)
        native = self.native_dtype(buffer.dtype, reduction)
        if native is None:
            self._join_shard(buffer, bounds, reduction, shard)
            return
        to_shard, op = address_of(shard), self._ops[reduction.op]

        def launch(comm: Any, to: int) -> None:
            if _are_even(bounds):
                comm.reduceScatter(address_of(buffer), to_shard, bounds[1], native, op, to)
                return
            for root, sent, nbytes in _shards(buffer, bounds):
                received = to_shard if root == self.rank else sent
                comm.reduce(sent, received, nbytes // buffer.itemsize, native, op, root, to)

        self._run("reduce_scatter", (buffer, shard), launch)

    def all_gather(self, buffer: Array, bounds: Sequence[int] | None = None) -> None:
        bounds = self._start_all_gather(buffer, bounds)
        self._all_gather(buffer, bounds)

    def broadcast(self, buffer: Array, root: int, into: Array | None = None) -> None:
        buffer = self._start_broadcast(buffer, root, into)
        at = address_of(buffer)
        self._run("broadcast", [buffer], lambda comm, to: comm.bcast(at, buffer.nbytes, self._byte, root, to))

    def send_receive(self, outgoing: Array, to: int, incoming: Array, source: int) -> None:
        self.traffic.add("exchange", max(outgoing.nbytes, incoming.nbytes))
        sends, receives = (to, address_of(outgoing), outgoing.nbytes), (source, address_of(incoming), incoming.nbytes)
        self._exchange("exchange", (outgoing, incoming), [sends], [receives])

    def free(self) -> None:
        nccl_handles.destroy([self._handle])
        self._queue.remove(self._handle)

    def native_dtype(self, dtype: np.dtype[Any], reduction: Reduction) -> int | None:
        """Return NCCL's dtype; `None` if ranks join each other's parts by `DeviceKernels.combine`. Local."""
        may_lose_nan = dtype.kind == "f" and reduction.op in ("min", "max")
        if reduction.in_rank_order or reduction.fold is not None or is_low_precision(dtype) or may_lose_nan:
            return None
        return self._codes.get(f"{dtype.kind}{dtype.itemsize}")

    def _join_in_place(self, buffer: Array, reduction: Reduction) -> Sequence[int]:
        bounds = shard_bounds(buffer.size, self.size)
        self._join_shard(buffer, bounds, reduction, buffer[bounds[self.rank] : bounds[self.rank + 1]])
        return bounds

    def _join_shard(self, buffer: Array, bounds: Sequence[int], reduction: Reduction, shard: Array) -> None:
        """Receive every rank's part of this rank's shard and join them in rank order, rounding once."""
        width, count = buffer.itemsize, shard.size
        step = -(-count * width // _ALIGNMENT) * _ALIGNMENT

        def join() -> None:
            memory = self._queue.buffer("parts", self.size * step)
            parts = memory.view(buffer.dtype).reshape(self.size, step // width)[:, :count]
            parts[self.rank] = buffer[bounds[self.rank] : bounds[self.rank + 1]]
            first, peers = address_of(parts), (peer for peer in range(self.size) if peer != self.rank)
            receives = [(peer, first + peer * step, count * width) for peer in peers]
            self._exchange("reduce", (buffer, parts), _shards(buffer, bounds, without=self.rank), receives)
            if count:
                self._kernels.combine(parts, reduction, shard)

        self._queue.run("reduce", join, (buffer, shard))  # the memory for parts is lent until the sum is done

    def _all_gather(self, buffer: Array, bounds: Sequence[int]) -> None:
        def launch(comm: Any, to: int) -> None:
            if _are_even(bounds):
                at, own = address_of(buffer), bounds[1] * buffer.itemsize
                comm.allGather(at + self.rank * own, at, own, self._byte, to)
                return
            for root, at, nbytes in _shards(buffer, bounds):
                comm.bcast(at, nbytes, self._byte, root, to)

        self._run("all_gather", [buffer], launch)

    def _collect(self, buffer: Array, bounds: Sequence[int], root: int) -> None:
        """Bring every rank's shard to the root's buffer."""
        if self.rank == root:
            self._exchange("reduce", [buffer], [], _shards(buffer, bounds, without=root))
        else:
            own = [(root, at, nbytes) for rank, at, nbytes in _shards(buffer, bounds) if rank == self.rank]
            self._exchange("reduce", [buffer], own, [])

    def _exchange(self, what: str, memory: Sequence[Array], sends: Sequence[_Part], receives: Sequence[_Part]) -> None:
        """Send parts to ranks, and receive parts from ranks, as one group. Empty parts are left out."""

        def launch(comm: Any, to: int) -> None:
            for call, parts in ((comm.send, sends), (comm.recv, receives)):
                for peer, at, nbytes in parts:
                    if nbytes:
                        call(at, nbytes, self._byte, peer, to)

        peers = (tuple(peer for peer, _, nbytes in parts if nbytes) for parts in (sends, receives))
        self._run(what, memory, launch, tuple(peers))

    def _run(self, what: str, memory: Sequence[Array], launch: Launch, kind: Any = "") -> None:
        """Issue calls, unless all arrays are empty: see `DeviceQueue.issue`."""
        if any(array.size for array in memory):
            self._queue.issue(what, self._handle, memory, launch, kind)


def _are_even(bounds: Sequence[int]) -> bool:
    step = bounds[1]
    return all(stop - start == step for start, stop in pairwise(bounds))


def _shards(buffer: Array, bounds: Sequence[int], without: int = -1) -> list[_Part]:
    """List the shards of ranks that are not empty, but for one rank's."""
    at, width = address_of(buffer), buffer.itemsize
    return [
        (rank, at + start * width, (stop - start) * width)
        for rank, (start, stop) in enumerate(pairwise(bounds))
        if stop > start and rank != without
    ]
