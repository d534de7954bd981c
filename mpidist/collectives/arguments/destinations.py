"""A user's values and their destinations: the leaves that are sent, the mirrored leaves, the destination ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from types import MappingProxyType
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist import nest
from mpidist.collectives.arguments.operands import replica_components, require_values
from mpidist.errors import InvalidTypeError
from mpidist.options import ReduceOp
from mpidist.replicas import Replicas
from mpidist.transport.communicator import Communicator
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.text import value_text
from mpidist.values import (
    Contributions,
    DistributedValues,
    PerReplica,
    has_distributed,
    is_mirrored,
    require_contributions,
)

__all__ = [
    "NO_CONTRIBUTIONS",
    "FlatContributions",
    "MirroredLeaves",
    "flatten_contributions",
    "group_by_destinations",
    "per_replica_value",
    "ranks_of",
    "rebuild_results",
    "send_to",
    "values_and_ranks",
]

MirroredLeaves = Mapping[int, Any]  # index of a mirrored leaf in the nest -> this rank's copy of the leaf
_NO_MIRRORED: Final[MirroredLeaves] = MappingProxyType({})

_INT64: Final = range(-(2**63), 2**63)
_DEVICE: Final = re.compile(r"/rank:(\d+)(/(cpu|gpu):\d+)?", re.IGNORECASE)  # /rank:3  /rank:3/GPU:0
_KINDS: Final = (
    'a rank, a sequence of ranks, "all", a device string with a rank such as "/rank:3", a distributed value '
    "or a variable"
)


def ranks_of(destinations: Any, size: int, value: Any = None) -> tuple[int, ...]:
    """Return the ranks that a `destinations` argument stands for, in ascending order, or refuse it.

    The same object as the value to reduce means an all-reduce, unless it is an `int`: of these Python has one object
    for all that are equal.
    """
    if destinations is not None and destinations is value and type(value) is not int:
        return tuple(range(size))
    if _is_rank(destinations):
        return (_in_range(int(destinations), size),)
    if isinstance(destinations, str):
        return _ranks_of_text(destinations, size)
    if isinstance(destinations, DistributedValues):
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


@final
class FlatContributions(NamedTuple):
    """Leaves of the contributions of this rank's replicas to a reduction.

    Attributes:
        leaves: The leaves that are sent for this rank's first replica: all but mirrored ones.
        mirrored: The mirrored leaves. They are not sent, as each is its own mean, minimum and maximum.
        others: The leaves that are sent for each other replica of this rank.
    """

    leaves: list[Any]
    structure: nest.Structure
    mirrored: MirroredLeaves = _NO_MIRRORED
    others: Sequence[list[Any]] = ()


NO_CONTRIBUTIONS: Final = FlatContributions([], nest.LEAF)


def flatten_contributions(op: ReduceOp, value: Any, group: SyncGroup, replicas: Replicas) -> FlatContributions:
    """Split the leaves of a nest, or of the nests of this rank's replicas, into those to send and mirrored ones.

    Raises:
        ValueError: If a leaf that is mirrored over several replicas is to be summed or multiplied; or, if the number of
            replicas was chosen, a leaf that no replica contributes.
        InvalidTypeError: If a leaf is neither an array nor a number.
    """
    mirrored = _NO_MIRRORED
    if isinstance(value, Contributions):
        of_replicas, structure = value.flatten(replicas.ids_here)
        nests: Sequence[Any] = value.nests
    else:
        leaves, structure = nest.flatten(value)
        if has_distributed(leaves):
            require_contributions(op, leaves, group, replicas.total)
            mirrored = {at: _copied(leaf.values[0]) for at, leaf in enumerate(leaves) if is_mirrored(leaf, group)}
        if mirrored:
            leaves = [leaf for at, leaf in enumerate(leaves) if at not in mirrored]
        of_replicas, nests = [leaves], [value]
        if not replicas.are_bare:
            may_repeat = op in (ReduceOp.MIN, ReduceOp.MAX)
            components = [replica_components(str(op), leaf, replicas, may_repeat) for leaf in leaves]
            of_replicas = nests = [[of_leaf[at] for of_leaf in components] for at in range(replicas.num_here)]
    for own_leaves, own_nest in zip(of_replicas, nests, strict=True):
        require_values(own_leaves, own_nest)
        if op in (ReduceOp.SUM, ReduceOp.PROD):
            _require_small_ints(op, own_leaves, replicas.total)
    return FlatContributions(of_replicas[0], structure, mirrored, of_replicas[1:])


def _require_small_ints(op: ReduceOp, leaves: Sequence[Any], num_replicas: int) -> None:
    """Refuse a Python int so large that the sum or product of as large ones of all replicas would not fit in 64 bits.

    Each rank checks its own numbers: if no replica has a larger one, no result overflows, and no message is needed.
    """
    if int not in set(map(type, leaves)):
        return
    for leaf in leaves:
        if type(leaf) is not int or leaf not in _INT64:
            continue
        if (leaf * num_replicas if op is ReduceOp.SUM else leaf**num_replicas) not in _INT64:
            what, limit = "sum", _INT64[-1] // num_replicas
            if op is ReduceOp.PROD:
                what, limit = "product", int(_INT64[-1] ** (1 / num_replicas) - 1e-9)  # 2 ** (63 / n) may be whole
            raise ValueError(
                f"a Python int counts as int64, in which the {what} of {num_replicas} numbers like {leaf} may not fit: "
                f"the largest that is safe is {limit}; pass a float, or np.int64({leaf}), whose {what} wraps"
            )


def per_replica_value(components: Sequence[Any], replicas: Replicas) -> Any:
    """Return the value of which a call takes these components of this rank's replicas: see `replica_components`."""
    return components[0] if replicas.are_bare else PerReplica(tuple(components))


def rebuild_results(value: Any, results: list[Any], mirrored: MirroredLeaves) -> Any:
    """Build a nest like `value`, of the results of the leaves that were sent and of the mirrored leaves."""
    if type(value) is Contributions:
        value = value.nests[0]
    if not mirrored:
        return nest.rebuild(value, results)
    rest = iter(results)
    return nest.rebuild(
        value, [mirrored[at] if at in mirrored else next(rest) for at in range(len(results) + len(mirrored))]
    )


def _copied(own: Any) -> Any:
    """Copy an array, so that results share no memory with the caller's values."""
    return own.copy() if hasattr(own, "dtype") and hasattr(own, "copy") else own


def values_and_ranks(pairs: Any, size: int) -> tuple[list[Any], list[tuple[int, ...]]]:
    """Check tuples of a value and its destinations; list the values, and the ranks of each."""
    if not isinstance(pairs, Iterable):
        raise InvalidTypeError(
            f"value_destination_pairs is not iterable: needed tuples (value, destinations), got {value_text(pairs)}"
        )
    values, ranks = [], []
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                "value_destination_pairs: each should be a tuple of size 2, (value, destinations); got a "
                f"{_kind_of(pair)}"
            )
        values.append(pair[0])
        ranks.append(ranks_of(pair[1], size, pair[0]))
    return values, ranks


def _kind_of(pair: object) -> str:
    """Describe a wrong pair by type and size, which are equal on all ranks where the values may differ."""
    return f"{type(pair).__name__} of size {len(pair)}" if isinstance(pair, Sized) else type(pair).__name__


def group_by_destinations(
    destinations: tuple[tuple[int, ...], ...] | None, num_values: int, num_ranks: int
) -> dict[tuple[int, ...] | None, list[int]]:
    """Group the indices of values by the ranks that get the results."""
    everywhere = tuple(range(num_ranks))
    parts: dict[tuple[int, ...] | None, list[int]] = {}
    for index in range(num_values):
        ranks = everywhere if destinations is None else destinations[index]
        parts.setdefault(None if ranks == everywhere else ranks, []).append(index)
    return parts
