"""All-reduce of rows of a replica tree by messages: the rank that adds a shard receives the rows of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from mpidist.transport.communicator import Array, shard_bounds
from mpidist.transport.mpi.communicator import MpiCommunicator
from mpidist.transport.tree import Fold

__all__ = ["all_reduce_rows", "row_traffic"]


def all_reduce_rows(
    communicator: MpiCommunicator,
    fold: Fold,
    num_rows: Sequence[int],
    ufunc: np.ufunc,
    rows: Sequence[Array],
    out: Array,
) -> None:
    """Add the rows of all ranks on every rank, and write the sum to `out` [n], which may be one of `rows`. Collective.

    Every rank sends each other rank its rows of that rank's shard, adds its own shard, and sends the sum to all: two
    rounds of messages, of which the first has one message for each row. With P ranks, S bytes and k rows on this rank,
    whose shard has s bytes, it sends k (S - s) + (P - 1) s bytes. `fold` is of all `num_rows`, in rank order.
    """
    rank, others = communicator.rank, communicator.others
    bounds = shard_bounds(out.size, communicator.size)
    nbytes = (bounds[rank + 1] - bounds[rank]) * out.itemsize
    communicator.traffic.add("all_reduce", max(row_traffic(num_rows, rank, out.nbytes, nbytes)))
    first = list(accumulate(num_rows, initial=0))  # of the parts of each rank
    step = max(1, communicator.max_chunk_bytes // (out.itemsize * max(num_rows)))
    for begin in range(0, out.size, step):
        bounds = shard_bounds(min(step, out.size - begin), communicator.size)
        shards = [slice(begin + start, begin + stop) for start, stop in pairwise(bounds)]
        own = out[shards[rank]]
        parts = list(communicator.scratch(fold.num_parts * own.size, out.dtype).reshape(fold.num_parts, own.size))
        parts[first[rank] : first[rank] + num_rows[rank]] = [row[shards[rank]] for row in rows]
        communicator.transfer(
            [(row[shards[other]], other) for other in others for row in rows],
            [(parts[first[other] + at], other) for other in others for at in range(num_rows[other])],
        )
        fold.combine(ufunc, parts, (own,))
        communicator.transfer([(own, other) for other in others], [(out[shards[other]], other) for other in others])


def row_traffic(num_rows: Sequence[int], rank: int, nbytes: int, own: int) -> tuple[int, int]:
    """Return how many bytes a rank sends and receives if ranks exchange rows, and then the sums of shards.

    Rows have `nbytes`, and the rank's own shard of each has `own` bytes.
    """
    of_others = sum(num_rows) - num_rows[rank]
    return num_rows[rank] * (nbytes - own) + (len(num_rows) - 1) * own, of_others * own + nbytes - own
