"""Where a result shall be: the kinds of destination as rank numbers, and the way there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from mpidist.transport import Communicator, value_text
from mpidist.values import DistributedValues

__all__ = ["ranks_of", "send_to"]

_DEVICE: Final = re.compile(r"/rank:(\d+)(/(cpu|gpu):\d+)?", re.IGNORECASE)  # /rank:3  /rank:3/GPU:0
_KINDS: Final = (
    'a rank, a sequence of ranks, "all", a device string with a rank such as "/rank:3", a distributed value '
    "or a variable"
)


def ranks_of(destinations: Any, size: int, value: Any = None) -> tuple[int, ...]:
    """Name the ranks that a destination means.

    Args:
        destinations: A rank, a sequence of ranks, `"all"`, `"/rank:3"` or `"/rank:3/GPU:0"`, a `DistributedValues`
            such as a variable (all ranks hold their components).
        size: Number of ranks.
        value: What is to be reduced. Naming the very same object as its destination asks for an all-reduce.

    Returns:
        Ranks, in order, each once.

    Raises:
        ValueError: If it is none of these, or a rank is out of range.
    """
    if _is_rank(destinations):
        return (_in_range(int(destinations), size),)
    if isinstance(destinations, str):
        return _ranks_of_text(destinations, size)
    if isinstance(destinations, DistributedValues):
        return tuple(range(size))
    if destinations is not None and destinations is value:
        return tuple(range(size))
    if isinstance(destinations, (Sequence, set, frozenset)) and destinations and all(map(_is_rank, destinations)):
        return tuple(sorted({_in_range(int(rank), size) for rank in destinations}))
    raise ValueError(f"destinations must be one of {_KINDS}; got {value_text(destinations)}")


def _is_rank(item: Any) -> bool:
    return isinstance(item, (int, np.integer)) and not isinstance(item, bool)


def _ranks_of_text(text: str, size: int) -> tuple[int, ...]:
    if text == "all":
        return tuple(range(size))
    match = _DEVICE.fullmatch(text)
    if not match:
        raise ValueError(f"destinations must be one of {_KINDS}; got the string {text!r}")
    return (_in_range(int(match[1]), size),)


def _in_range(rank: int, size: int) -> int:
    if not 0 <= rank < size:
        raise ValueError(f"destination rank {rank} is not one of the {size} ranks 0 to {size - 1}")
    return rank


def send_to(world: Communicator, buffer: Any, root: int, ranks: Sequence[int]) -> None:
    """Copy the root's buffer to some ranks: a broadcast if they are all, else one message each. Collective."""
    if len(ranks) == world.size:
        world.broadcast(buffer, root)
        return
    nothing = buffer[:0]
    for rank in ranks:
        if rank == root:
            continue
        if world.rank == root:
            world.exchange(buffer, rank, nothing, rank)
        elif world.rank == rank:
            world.exchange(nothing, root, buffer, root)
