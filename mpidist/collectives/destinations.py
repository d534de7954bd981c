"""A user's values and their destinations: the leaves that are sent, the mirrored leaves, the destination ranks."""

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
    "NO_MIRRORED",
    "MirroredLeaves",
    "ValueWithDestinations",
    "rebuild_results",
    "ranks_of",
    "send_to",
    "flatten_contributions",
]

MirroredLeaves = Mapping[int, Any]  # index of a mirrored leaf in the nest -> this rank's copy of the leaf
NO_MIRRORED: Final[MirroredLeaves] = MappingProxyType({})

_DEVICE: Final = re.compile(r"/rank:(\d+)(/(cpu|gpu):\d+)?", re.IGNORECASE)  # /rank:3  /rank:3/GPU:0
_KINDS: Final = (
    'a rank, a sequence of ranks, "all", a device string with a rank such as "/rank:3", a distributed value '
    "or a variable"
)


def ranks_of(destinations: Any, size: int, value: Any = None) -> tuple[int, ...]:
    """Return the ranks that a `destinations` argument stands for.

    Args:
        destinations: A rank, a sequence of ranks, `"all"`, `"/rank:3"` or `"/rank:3/GPU:0"`, a `DistributedValues`
            such as a variable (all ranks hold their components).
        size: Number of ranks.
        value: The value to reduce. The same object as `destinations` asks for an all-reduce.

    Returns:
        The ranks in ascending order, without repetition.

    Raises:
        ValueError: If `destinations` is none of these, or a rank is out of range.
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
    """Copy the root's buffer to some ranks: by a broadcast to all ranks, else by a message to each. Collective."""
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


def flatten_contributions(
    op: ReduceOp, value: Any, group: SyncGroup
) -> tuple[list[Any], nest.Structure, MirroredLeaves]:
    """Split the leaves of a nest into those to send and mirrored ones, which are their own mean, minimum and maximum.

    Args:
        op: The reduction.
        value: The nest.
        group: The ranks.

    Returns:
        The leaves to send, the form of the nest, and the mirrored leaves.

    Raises:
        ValueError: If a leaf that is mirrored over several ranks is to be summed or multiplied.
        TypeError: If a leaf is neither an array nor a number.
    """
    if type(value) is np.ndarray:
        return [value], nest.LEAF, NO_MIRRORED
    leaves, structure = nest.flatten(value)
    mirrored = NO_MIRRORED
    if has_distributed(leaves):
        require_contributions(op, leaves, group)
        mirrored = {at: _copied(contribution(leaf)) for at, leaf in enumerate(leaves) if is_mirrored(leaf, group)}
    if mirrored:
        leaves = [leaf for at, leaf in enumerate(leaves) if at not in mirrored]
    require_values(leaves, value)
    return leaves, structure, mirrored


def rebuild_results(value: Any, results: list[Any], mirrored: MirroredLeaves) -> Any:
    """Build a nest like `value`, of the results of the leaves that were sent and of the mirrored leaves."""
    if not mirrored:
        return nest.rebuild(value, results)
    rest = iter(results)
    return nest.rebuild(
        value, [mirrored[at] if at in mirrored else next(rest) for at in range(len(results) + len(mirrored))]
    )


def _copied(own: Any) -> Any:
    """Copy an array, so that results share no memory with the caller's values."""
    return own.copy() if hasattr(own, "dtype") and hasattr(own, "copy") else own


@final
@dataclass(frozen=True)
class ValueWithDestinations:
    """One value of a reducing call, and its destinations.

    Attributes:
        value: The caller's nest.
        ranks: The ranks that get the result.
        leaves: The leaves to send: all but the mirrored ones.
        structure: The form of the nest.
        mirrored: The mirrored leaves, which every rank has already.
    """

    value: Any
    ranks: tuple[int, ...]
    leaves: list[Any]
    structure: tuple[Any, ...]
    mirrored: MirroredLeaves

    @classmethod
    def open(cls, op: ReduceOp, pair: Any, group: SyncGroup) -> ValueWithDestinations:
        """Check and flatten a tuple of a value and its destinations.

        Raises:
            ValueError: If `pair` is no tuple of two, if `ranks_of` refuses the destinations, or if a mirrored value of
                several ranks is to be summed.
            TypeError: If a leaf is neither an array nor a number.
        """
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                "value_destination_pairs: each should be a tuple of size 2, (value, destinations); got a "
                f"{_kind_of(pair)}"
            )
        value, destinations = pair
        return cls(value, ranks_of(destinations, group.topology.size, value), *flatten_contributions(op, value, group))

    def close(self, results: Iterator[Any], rank: int) -> Any:
        """Build the value's result from the next results of leaves; `None` where `rank` is no destination."""
        own = list(islice(results, len(self.leaves)))
        return rebuild_results(self.value, own, self.mirrored) if rank in self.ranks else None


def _kind_of(pair: object) -> str:
    """Describe a wrong pair by type and size, which are equal on all ranks where the values may differ."""
    return f"{type(pair).__name__} of size {len(pair)}" if isinstance(pair, Sized) else type(pair).__name__
