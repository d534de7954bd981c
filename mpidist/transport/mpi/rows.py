"""All-reduce of rows of a replica tree by messages: the rank that adds a shard receives the rows of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Final

from mpidist.transport.communicator import Array, shard_bounds
from mpidist.transport.mpi.communicator import MpiCommunicator

__all__ = ["exchange_rows", "row_traffic"]

_CHUNK_BYTES: Final = 4 << 20  # of the sum: what the rows of a shard take is a few times as much


def exchange_rows(
    communicator: MpiCommunicator,
    num_rows: Sequence[int],
    rows: Sequence[Array],
    out: Array,
    add: Callable[[Sequence[Array], Sequence[Array]], None],
    lanes: int | None = None,
) -> None:
    """Add the rows of all ranks on every rank, and write the sum to `out` [n], which may be one of `rows`. Collective.

    Every rank sends the first `lanes` ranks, by default all, its rows of their shards; each of these adds its own
    shard, and sends the sum to all: two rounds of messages, of which the first has one message for each row. With P
    ranks, S bytes and k rows on this rank, whose shard has s bytes, it sends k (S - s) + (P - 1) s bytes.

    `add`, as `Fold.combine`, adds parts, of all `num_rows` in rank order, to one shard, which may be one of them.
    """
    rank, others = communicator.rank, communicator.others
    lanes = communicator.size if lanes is None else lanes
    first = list(accumulate(num_rows, initial=0))  # of the parts of each rank
    nbytes = 0
    step = max(1, min(_CHUNK_BYTES, communicator.max_chunk_bytes) // out.itemsize)
    for begin in range(0, out.size, step):
        end = min(begin + step, out.size)
        bounds = [*(begin + bound for bound in shard_bounds(end - begin, lanes)), *[end] * (communicator.size - lanes)]
        shards = [slice(start, stop) for start, stop in pairwise(bounds)]
        own = out[shards[rank]]
        parts = list(communicator.scratch(first[-1] * own.size, out.dtype).reshape(first[-1], own.size))
        parts[first[rank] : first[rank + 1]] = [row[shards[rank]] for row in rows]
        communicator.transfer(
            [(row[shards[other]], other) for other in others for row in rows],
            [(part, other) for other in others for part in parts[first[other] : first[other + 1]]],
        )
        if own.size:
            add(parts, (own,))
        communicator.transfer([(own, other) for other in others], [(out[shards[other]], other) for other in others])
        nbytes += own.nbytes
    communicator.traffic.add("all_reduce", max(row_traffic(num_rows, rank, out.nbytes, nbytes)))


def row_traffic(num_rows: Sequence[int], rank: int, nbytes: int, own: int) -> tuple[int, int]:
    """Return how many bytes a rank sends and receives if ranks exchange rows, and then the sums of shards.

    Rows have `nbytes`, and the rank's own shard of each has `own` bytes.
    """
    of_others = sum(num_rows) - num_rows[rank]
    return num_rows[rank] * (nbytes - own) + (len(num_rows) - 1) * own, of_others * own + nbytes - own
