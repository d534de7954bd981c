"""The ring all-reduce: every rank exchanges messages with its two neighbours alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from mpidist.transport.communicator import Communicator, shard_bounds
from mpidist.transport.reduction import Reduction, accumulator_dtype

__all__ = ["ring_all_reduce"]


def ring_all_reduce(communicator: Communicator, buffer: Any, reduction: Reduction) -> None:
    """Pass partial sums round a ring of all ranks, then the finished shards. Collective.

    2 (P - 1) steps, 2 S (P - 1) / P bytes per rank: as few as any all-reduce, over one link at a time. Half
    precision travels as float32, because a partial sum must not be rounded P - 1 times.

    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009.
    """
    if communicator.size > 1:
        with np.errstate(all="ignore"):  # an overflow is a result; raising it on one rank would leave the others
            _pass_round(communicator, buffer, reduction)


def _pass_round(communicator: Communicator, buffer: Any, reduction: Reduction) -> None:
    rank, size = communicator.rank, communicator.size
    wide = accumulator_dtype(buffer.dtype)
    work = buffer if wide == buffer.dtype else buffer.astype(wide)
    bounds = shard_bounds(work.size, size)
    shards = [work[start:stop] for start, stop in pairwise(bounds)]
    after, before = (rank + 1) % size, (rank - 1) % size
    incoming = communicator.pack_buffer(bounds[1], np.dtype(wide))
    for step in range(size - 1):
        target = shards[(rank - step - 1) % size]
        part = incoming[: target.size]
        communicator.send_receive(shards[(rank - step) % size], after, part, before)
        reduction.ufunc(target, part, out=target)
    if reduction.divisor != 1:
        work /= reduction.divisor
    for step in range(size - 1):
        communicator.send_receive(shards[(rank - step + 1) % size], after, shards[(rank - step) % size], before)
    if work is not buffer:
        buffer[...] = work
