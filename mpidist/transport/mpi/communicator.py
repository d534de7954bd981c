"""Host memory over MPI: the communicator that works wherever mpi4py does."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

import numpy as np

from mpidist.errors import PeerFailedError
from mpidist.transport.communicator import Array, Communicator, shard_bounds
from mpidist.transport.mpi.library import Intracomm, Request, failed_ranks, load_mpi, ranks_in_world
from mpidist.transport.reduction import Reduction, is_low_precision
from mpidist.transport.text import name_ranks
from mpidist.transport.waiting import poll_or_keep

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MAX_CHUNK_BYTES", "NEWS_SECONDS", "MpiCommunicator"]

# Open MPI 5 refuses calls of 2^31 bytes and more, whatever MPI 4 says; half of that leaves room for displacements.
MAX_CHUNK_BYTES: Final = 1 << 30

_DIRECT_BYTES: Final = 256 << 10  # all-reduces from this size on go directly: see `_goes_directly`
_DIRECT_RANKS: Final = 16  # with more ranks, each would get many small parts
_MOST_CUT_BYTES: Final = 4 << 20  # longer arrays are not cut: the rendezvous is a small part of their time
_SHORT_SECONDS: Final = 0.002
NEWS_SECONDS: Final = 1.0  # after an error of MPI, in which other ranks tell which rank is lost
_SLOW_BYTES_PER_SECOND: Final = 50e6  # the slowest network whose messages are polled without naps

_OPS: Final = {"sum": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX"}


@functools.cache
def _mpi_dtype(dtype: np.dtype[Any]) -> MPI.Datatype:
    datatype: MPI.Datatype = load_mpi().Datatype.fromcode(dtype.char)  # the predefined one: MPI_FLOAT for "f"
    return datatype


@final
class MpiCommunicator(Communicator):
    """Ranks of an MPI communicator, and flat NumPy arrays.

    Sums of half precision, and of 8 and 16-bit integers (Open MPI's saturate), minima and maxima of floating-point
    numbers (MPI may lose a NaN), and reductions that ask for it are combined in rank order: every rank receives all
    ranks' parts of its shard, combines them, and the shards are gathered. That moves no more bytes than MPI's own
    all-reduce, 2 S (P - 1) / P bytes a rank.

    Args:
        comm: An intra-communicator of mpi4py. This object owns it and frees it.
        message_bytes: Arrays of up to a few MiB that ranks send each other directly are cut into messages of at most
            this size: the eager limit, for example. The same on all ranks.

    Attributes:
        comm: That of the argument.
        others: All ranks but this one, from the next one on.
        max_chunk_bytes: The largest array that goes in one call.
    """

    def __init__(
        self,
        comm: Intracomm,
        name: str,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        message_bytes: int = MAX_CHUNK_BYTES,
    ) -> None:
        super().__init__(name, comm.Get_rank(), comm.Get_size())
        comm.Set_name(f"mpidist.{name}")
        mpi = load_mpi()
        self.comm = comm
        self._in_place = mpi.IN_PLACE
        self._byte = mpi.BYTE
        self._ops: dict[str, MPI.Op] = {op: getattr(mpi, name) for op, name in _OPS.items()}
        self._test_all: Callable[[Any], Any] = mpi.Request.Testall
        self._mpi_error: type[Exception] = mpi.Exception
        self.max_chunk_bytes, self._message_bytes = max_chunk_bytes, message_bytes
        self.others = [(self.rank + step) % self.size for step in range(1, self.size)]  # not all to rank 0 first
        self._pack = np.empty(0, np.uint8)
        self._scratch = np.empty(0, np.uint8)

    def pack_buffer(self, count: int, dtype: np.dtype[Any]) -> Array:
        nbytes = count * dtype.itemsize
        if self._pack.size < nbytes:
            self._pack = np.empty(nbytes, np.uint8)
        return self._pack[:nbytes].view(dtype)

    def all_reduce(self, buffer: Array, reduction: Reduction) -> None:
        nbytes = buffer.nbytes
        self.traffic.add("all_reduce", 2 * nbytes * (self.size - 1) // self.size)
        if _is_right_in_mpi(buffer.dtype, reduction) and not self._goes_directly(nbytes):
            op, mpi_dtype = self._ops[reduction.op], _mpi_dtype(buffer.dtype)
            if nbytes <= self.max_chunk_bytes:  # spares small calls the generator
                self._wait(self.comm.Iallreduce(self._in_place, [buffer, mpi_dtype], op), buffer)
                return
            for chunk in self._chunks(buffer):
                self._wait(self.comm.Iallreduce(self._in_place, [chunk, mpi_dtype], op), buffer)
            return
        for chunk in self._chunks(buffer):
            bounds = shard_bounds(chunk.size, self.size)
            self._combine_shard(chunk, bounds, reduction, chunk[bounds[self.rank] : bounds[self.rank + 1]])
            self._wait_all(self.start_shards(chunk, bounds, 1), chunk)

    def reduce(self, buffer: Array, reduction: Reduction, root: int) -> None:
        self.traffic.add("reduce", buffer.nbytes)
        for chunk in self._chunks(buffer):
            self._reduce(chunk, reduction, root)

    def _scatter(self, buffer: Array, reduction: Reduction, bounds: Sequence[int], own: Array, shard: Array) -> None:
        self.traffic.add("reduce_scatter", buffer.nbytes - own.nbytes)
        if buffer.nbytes > self.max_chunk_bytes:
            if shard is own:
                self._reduce_scatter_in_pieces(buffer, reduction, bounds)
            else:  # reductions of pieces overwrite what they reduce
                shard[...] = self._reduce_scatter_in_pieces(buffer.copy(), reduction, bounds)
        elif _is_right_in_mpi(buffer.dtype, reduction):
            mpi_dtype = _mpi_dtype(buffer.dtype)
            # An empty array may be a view of the buffer, which MPI refuses.
            received = shard if shard is not own and shard.size else self.scratch(own.size, buffer.dtype)
            counts = [stop - start for start, stop in pairwise(bounds)]
            # MPI's in-place form would leave the shard at the front of the buffer
            op = self._ops[reduction.op]
            request = self.comm.Ireduce_scatter([buffer, mpi_dtype], [received, mpi_dtype], counts, op)
            self._wait(request, buffer, received, counts)
            if shard is own:
                shard[...] = received
        else:
            self._combine_shard(buffer, bounds, reduction, shard)

    def all_gather(self, buffer: Array, bounds: Sequence[int] | None = None) -> None:
        bounds = self._start_all_gather(buffer, bounds)
        self._wait_all(self.start_shards(buffer, bounds, 1), buffer)

    def broadcast(self, buffer: Array, root: int, into: Array | None = None) -> None:
        buffer = self._start_broadcast(buffer, root, into)
        for chunk in self._chunks(buffer):
            self._wait(self.comm.Ibcast([_bytes(chunk), self._byte], root), chunk)

    def send_receive(self, outgoing: Array, to: int, incoming: Array, source: int) -> None:
        self.traffic.add("exchange", max(outgoing.nbytes, incoming.nbytes))
        self.transfer([(outgoing, to)], [(incoming, source)])

    def send(self, buffer: Array, to: int, tag: int) -> list[Request]:
        """Start to send an array, or MPI's buffer. Local."""
        return [self.comm.Isend([part, self._byte], to, tag) for part in self._messages(buffer)]

    def receive(self, buffer: Array, source: int, tag: int) -> list[Request]:
        """Start to receive an array. Local."""
        return [self.comm.Irecv([part, self._byte], source, tag) for part in self._messages(buffer)]

    def start_parts(self, buffer: Array, bounds: Sequence[int], rows: Array, tag: int) -> list[Request]:
        """Start to send every rank its part of `buffer`, and to receive all ranks' parts as `rows` [P, m]. Local."""
        requests = [request for rank in self.others for request in self.receive(rows[rank], rank, tag)]
        for rank in self.others:
            requests += self.send(buffer[bounds[rank] : bounds[rank + 1]], rank, tag)
        return requests

    def join_parts(self, rows: Array, own: Array, reduction: Reduction, shard: Array) -> None:
        """Join the received parts and this rank's own one in rank order, into `shard` [m]. Local."""
        if own.size:
            parts = [own if rank == self.rank else rows[rank] for rank in range(self.size)]
            self.traffic.overflowed += reduction.combine(parts, shard)

    def start_shards(self, buffer: Array, bounds: Sequence[int], tag: int) -> list[Request]:
        """Start to send this rank's shard to all ranks, and to receive theirs, in place. Local."""
        parts = [buffer[start:stop] for start, stop in pairwise(bounds)]
        requests = [request for rank in self.others for request in self.receive(parts[rank], rank, tag)]
        for rank in self.others:
            requests += self.send(parts[self.rank], rank, tag)
        return requests

    def transfer(self, sends: Sequence[tuple[Any, int]], receives: Sequence[tuple[Any, int]]) -> None:
        """Send and receive some arrays at once, and wait for them. Counts nothing.

        Each is an array, or MPI's buffer, with the other rank. Empty ones are left out.
        """
        requests = [request for part, other in receives if part.nbytes for request in self.receive(part, other, 0)]
        requests += [request for part, other in sends if part.nbytes for request in self.send(part, other, 0)]
        if requests:
            self._wait_all(requests, *(part for part, _ in (*sends, *receives)))

    def scratch(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Return memory to receive into [count], uninitialised, until the next call overwrites it. Local."""
        nbytes = count * dtype.itemsize
        if self._scratch.size < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes].view(dtype)

    def test_all(self, requests: list[Request]) -> bool:
        """Return whether messages are complete, and advance them; raise if MPI cannot complete them. Local."""
        try:
            return bool(self._test_all(requests))
        except self._mpi_error as error:
            self.raise_loss(error)

    def free(self) -> None:
        self.comm.Free()
        self._pack = self._scratch = np.empty(0, np.uint8)

    def _wait(self, request: Request, *memory: Any) -> None:
        """Poll until a call is complete: a blocking call would notice no deadline, signal or lost rank."""
        try:
            poll_or_keep(request.Test, self._check_peers, (request, memory), _busy_seconds(memory))
        except self._mpi_error as error:
            self.raise_loss(error)

    def _wait_all(self, requests: list[Request], *memory: Any) -> None:
        poll_or_keep(partial(self.test_all, requests), self._check_peers, (requests, memory), _busy_seconds(memory))

    def raise_loss(self, error: Exception) -> NoReturn:
        """Raise that another rank is lost: the error of the wait hook, which names the rank, or else that of MPI.

        MPI may find a loss in a message before this rank looks at processes and notes.
        """
        until = time.monotonic() + NEWS_SECONDS
        while time.monotonic() < until:
            self._check_peers()
            time.sleep(_SHORT_SECONDS)
        world = load_mpi().COMM_WORLD
        failed, others = failed_ranks(self.comm, world), ranks_in_world(self.comm) - {world.rank}
        if failed:
            why = f"the process of {name_ranks(failed)} of the job has failed"
        elif len(others) == 1:
            why = f"{name_ranks(others)} of the job, to which they go, was probably killed, or its host is lost"
        else:
            why = "another rank was probably killed, or its host is lost; see which rank's process has ended"
        raise PeerFailedError(
            f"MPI cannot complete the messages of {self.name} on rank {self.rank} ({error}), and no rank reports why: "
            f"{why}"
        ) from error

    def _goes_directly(self, nbytes: int) -> bool:
        """Whether messages from rank to rank are faster than MPI's own all-reduce, both polled."""
        return nbytes >= _DIRECT_BYTES and self.size <= _DIRECT_RANKS

    def _chunks(self, buffer: Array) -> Iterator[Array]:
        step = max(1, self.max_chunk_bytes // buffer.itemsize)
        for start in range(0, buffer.size, step):
            yield buffer[start : start + step]

    def _reduce_scatter_in_pieces(self, buffer: Array, reduction: Reduction, bounds: Sequence[int]) -> Array:
        for root in range(self.size):
            for chunk in self._chunks(buffer[bounds[root] : bounds[root + 1]]):
                self._reduce(chunk, reduction, root)
        return buffer[bounds[self.rank] : bounds[self.rank + 1]]

    def _reduce(self, chunk: Array, reduction: Reduction, root: int) -> None:
        if _is_right_in_mpi(chunk.dtype, reduction):
            spec, op = [chunk, _mpi_dtype(chunk.dtype)], self._ops[reduction.op]
            if self.rank == root:
                self._wait(self.comm.Ireduce(self._in_place, spec, op, root), chunk)
            else:
                self._wait(self.comm.Ireduce(spec, None, op, root), chunk)
            return
        bounds = shard_bounds(chunk.size, self.size)
        own = chunk[bounds[self.rank] : bounds[self.rank + 1]]
        self._combine_shard(chunk, bounds, reduction, own)
        if self.rank == root:
            self.transfer([], [(chunk[bounds[rank] : bounds[rank + 1]], rank) for rank in self.others])
        else:
            self.transfer([(own, root)], [])

    def _combine_shard(self, buffer: Array, bounds: Sequence[int], reduction: Reduction, shard: Array) -> None:
        """Receive every rank's part of this rank's shard, and combine them in rank order."""
        own = buffer[bounds[self.rank] : bounds[self.rank + 1]]
        rows = self.scratch(self.size * own.size, buffer.dtype).reshape(self.size, own.size)
        self._wait_all(self.start_parts(buffer, bounds, rows, 0), buffer, rows)
        self.join_parts(rows, own, reduction, shard)

    def _messages(self, buffer: Array) -> list[Array]:
        """Cut an array into as few messages as the limits allow, of about equal length."""
        sent, most = _bytes(buffer), self.max_chunk_bytes
        if sent.nbytes <= _MOST_CUT_BYTES:
            most = min(most, self._message_bytes)
        if sent.nbytes <= most:
            return [sent]
        step = math.ceil(sent.nbytes / math.ceil(sent.nbytes / most))
        return [sent[start : start + step] for start in range(0, sent.nbytes, step)]


def _is_right_in_mpi(dtype: np.dtype[Any], reduction: Reduction) -> bool:
    """Whether MPI's own reduction gives the right numbers, and the same ones on every rank."""
    if reduction.in_rank_order or reduction.fold is not None or is_low_precision(dtype):
        return False
    if dtype.kind in "iu":
        return reduction.op != "sum" or dtype.itemsize > 2  # sums of Open MPI saturate, and ours wrap
    return reduction.op in ("sum", "prod")  # MPI's MIN and MAX may drop a NaN, and then not on every rank


def _busy_seconds(memory: tuple[Any, ...]) -> float:
    """Return for how many seconds this rank polls a message without naps between two tests."""
    return _SHORT_SECONDS + sum(getattr(part, "nbytes", 0) for part in memory) / _SLOW_BYTES_PER_SECOND


def _bytes(buffer: Array) -> Array:
    return buffer.view(np.uint8) if isinstance(buffer, np.ndarray) else buffer  # MPI's own buffers are bytes
