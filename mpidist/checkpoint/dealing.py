"""Which rank writes what is equal on all ranks: it is dealt over the ranks by bytes, large arrays in pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from mpidist.transport.communicator import shard_bounds
from mpidist.transport.topology import Topology
from mpidist.whole_number import whole_number

__all__ = ["deal", "require_writers", "writing_ranks"]

_LEAST_BYTES: Final = 1 << 20  # for each writer: a file costs as much as some of them
_LEAST_PIECE_BYTES: Final = 1 << 16
_ALL: Final = "all"
_PER_NODE: Final = "per node"


def require_writers(writers: Any) -> None:
    """Refuse what says nothing of writers.

    Raises:
        TypeError: If `writers` is no whole number and no text.
        ValueError: If it is neither `"all"`, `"per node"` nor a number from 1 on.
    """
    if isinstance(writers, str):
        if writers not in (_ALL, _PER_NODE):
            raise ValueError(f"writers must be 'all', 'per node' or a number of ranks, got {writers!r}")
    else:
        whole_number("writers", writers, 1, "'all' or 'per node'")


def writing_ranks(writers: int | str, topology: Topology) -> list[int]:
    """Return the ranks that write what is equal, rank 0 first; a number of them is spread over the nodes."""
    if writers == _ALL:
        return list(range(topology.size))
    leaders_first = sorted(range(topology.size), key=lambda rank: (topology.local_ranks[rank], rank))
    return leaders_first[: topology.num_nodes if writers == _PER_NODE else int(writers)]


def deal(sizes: Mapping[str, tuple[int, int]], ranks: Sequence[int]) -> dict[str, list[tuple[int, int, int]]]:
    """Deal arrays over ranks. Equal on all ranks.

    Args:
        sizes: The number of elements, and the bytes of one, by name.
        ranks: The ranks, the first of which writes what is too small to be dealt.

    Returns:
        Who writes what of each array: a rank, the first element, and the one behind the last. Arrays are cut where
        both pieces are large.
    """
    total = sum(count * itemsize for count, itemsize in sizes.values())
    bounds = shard_bounds(total, max(1, min(len(ranks), total // _LEAST_BYTES)))
    pieces: dict[str, list[tuple[int, int, int]]] = {}
    turn, at = 0, 0  # of the ranks, and of all bytes
    for name, (count, itemsize) in sizes.items():
        pieces[name], begin = [], 0
        while turn + 2 < len(bounds) and bounds[turn + 1] < at + (count - begin) * itemsize:
            length = (bounds[turn + 1] - at) // itemsize
            rest = count - begin - length
            if min(length, rest) * itemsize >= _LEAST_PIECE_BYTES:
                pieces[name].append((ranks[turn], begin, begin + length))
                begin, at = begin + length, at + length * itemsize
            elif length >= rest:
                break
            turn += 1
        pieces[name].append((ranks[turn], begin, count))
        at += (count - begin) * itemsize
    return pieces
