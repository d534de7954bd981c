"""A user's values and where their results go: what travels of a nest, what every rank has already, which ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, final

import numpy as np

from mpidist import nest
from mpidist.collectives.arguments import require_values
from mpidist.options import ReduceOp
from mpidist.transport import Communicator, SyncGroup, value_text
from mpidist.values import DistributedValues, contribution, has_distributed, is_mirrored, require_contributions

__all__ = [
    "NOTHING_KEPT",
    "Kept",
    "ValueWithDestinations",
    "put_together",
    "ranks_of",
    "send_to",
    "take_apart",
]

Kept = Mapping[int, Any]  # a mirrored leaf's place in the nest -> this rank's copy of it
NOTHING_KEPT: Final[Kept] = MappingProxyType({})

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
            world.send_receive(buffer, rank, nothing, rank)
        elif world.rank == rank:
            world.send_receive(nothing, root, buffer, root)


def take_apart(op: ReduceOp, value: Any, group: SyncGroup) -> tuple[list[Any], nest.Structure, Kept]:
    """List what has to travel of a nest, and keep what is mirrored: its mean, minimum and maximum are itself.

    Args:
        op: The reduction.
        value: The nest.
        group: The ranks.

    Returns:
        The leaves that travel, the form of the nest, and what was kept.

    Raises:
        ValueError: If what is mirrored over several ranks is to be summed or multiplied.
        TypeError: If a leaf is neither an array nor a number.
    """
    if type(value) is np.ndarray:
        return [value], nest.LEAF, NOTHING_KEPT
    leaves, structure = nest.flatten(value)
    kept = NOTHING_KEPT
    if has_distributed(leaves):
        require_contributions(op, leaves, group)
        kept = {at: _copied(contribution(leaf)) for at, leaf in enumerate(leaves) if is_mirrored(leaf, group)}
    if kept:
        leaves = [leaf for at, leaf in enumerate(leaves) if at not in kept]
    require_values(leaves, value)
    return leaves, structure, kept


def put_together(value: Any, results: list[Any], kept: Kept) -> Any:
    """Build a nest of the results of what travelled and of what was kept."""
    if not kept:
        return nest.rebuild(value, results)
    rest = iter(results)
    return nest.rebuild(value, [kept[at] if at in kept else next(rest) for at in range(len(results) + len(kept))])


def _copied(own: Any) -> Any:
    """Copy an array, so that a result is nobody else's."""
    return own.copy() if hasattr(own, "dtype") and hasattr(own, "copy") else own


@final
@dataclass(frozen=True)
class ValueWithDestinations:
    """One value of a reducing call, opened for sending.

    Attributes:
        value: The nest that the caller gave.
        ranks: Where its result goes.
        leaves: What has to travel: its leaves, but for mirrored ones, which every rank has already.
        structure: Its form.
        kept: The mirrored leaves.
    """

    value: Any
    ranks: tuple[int, ...]
    leaves: list[Any]
    structure: tuple[Any, ...]
    kept: Kept

    @classmethod
    def open(cls, op: ReduceOp, pair: Any, group: SyncGroup) -> ValueWithDestinations:
        """Open a tuple of a value and its destinations.

        Raises:
            ValueError: If it is no tuple of two, the destinations mean nothing, or a mirrored value of several ranks is
                to be summed.
            TypeError: If a leaf is neither an array nor a number.
        """
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                "value_destination_pairs: each should be a tuple of size 2, (value, destinations); got a "
                f"{_kind_of(pair)}"
            )
        value, destinations = pair
        return cls(value, ranks_of(destinations, group.topology.size, value), *take_apart(op, value, group))

    def close(self, results: Iterator[Any], rank: int) -> Any:
        """Build the result from those of the leaves; `None` where `rank` is no destination."""
        own = list(islice(results, len(self.leaves)))
        return put_together(self.value, own, self.kept) if rank in self.ranks else None


def _kind_of(pair: object) -> str:
    """Name what is no pair by what is equal on all ranks that make the same mistake: its values may differ."""
    return f"{type(pair).__name__} of size {len(pair)}" if isinstance(pair, Sized) else type(pair).__name__
