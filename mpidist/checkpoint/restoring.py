"""How ranks restore a checkpoint together: all of it is read and compared before anything is changed.

Rank 0 reads the files. Of arrays that are equal on all ranks each rank of a node reads some pieces, and sends
them to the others of its node. If other ranks do not find the files, rank 0 reads for all.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist import nest
from mpidist.checkpoint.folder import existing, manifest_text
from mpidist.checkpoint.leaves import Leaf, Owner, ReplicaLeaf, State
from mpidist.checkpoint.parts import SavedCheckpoint, part_of_rank
from mpidist.checkpoint.saving import leaves_in, replica_key
from mpidist.collectives.object_calls import broadcast_object
from mpidist.context_stack import parts_of
from mpidist.errors import DataLossError
from mpidist.transport.agreement.agreement import Call
from mpidist.transport.agreement.fingerprint import fingerprint_of
from mpidist.transport.arrays import bytes_of
from mpidist.transport.communicator import shard_bounds
from mpidist.whole_number import require_bool

__all__ = ["ADVICE", "CALL", "restore"]

Array = np.ndarray[Any, Any]
CALL: Final = "restore of a checkpoint"
ADVICE: Final = "all ranks call restore, and each reads a share"


@final
class _Common(NamedTuple):
    """Common part of a restore: the owner of each restored leaf, and the numbers of ranks and replicas that saved.

    `states` are numbers and texts that rank 0 has read, and states that it has combined from those of all replicas.
    `manifest` is the checksum of the manifest that rank 0 has read. `pieces` says which parts have which elements of
    each array that is equal on all ranks.
    """

    owners: Mapping[str, Owner]
    num_ranks: int
    num_replicas: int
    manifest: int
    states: dict[str, State]
    pieces: dict[str, list[tuple[str, int, int]]]


@final
class _Share(NamedTuple):
    """A piece of an array, which one rank reads for others: its bounds are in bytes."""

    name: str
    part: str
    begin: int
    end: int
    reader: int


def restore(
    strategy: Any, place: Path, items: Mapping[str, Any], partial: bool, copies: Path | None = None
) -> dict[str, Any]:
    """Put the states of a checkpoint back, and return the nests. Collective.

    A nest is another one where a leaf could not be written, such as a number. `partial`: the checkpoint may lack
    leaves, or have others. `copies`: where this rank reads the checkpoint instead.
    """
    extended = parts_of(strategy)
    extended.require_cross_replica(CALL)
    source, what = copies or place, f"{CALL} {str(place)!r}"
    common: _Common | None = None
    leaves: dict[str, Leaf] = {}
    own: dict[str, list[State]] = {}
    error: Exception | None = None
    try:
        partial = require_bool("partial", partial)
        leaves = leaves_in(items, strategy)
    except Exception as problem:  # of any kind: the other ranks must learn of it
        error = problem
    fields = {"path": str(place), "partial": str(partial), "advice": ADVICE}
    extended.agree(CALL, fields | {f"names, {name}": "here" for name in leaves}, error)
    with extended.peers.raise_together(CALL, what, ADVICE):
        if extended.group.topology.rank == 0:
            common = _read_common(strategy, place, existing(source), leaves, partial)
    common = broadcast_object(extended.group, common, 0, True, extended.options, CALL)
    forms = {name: leaves[name].form for name in [*common.states, *common.pieces]}
    sees_same = extended.agree(CALL, forms, None, fingerprint_of(manifest_text(source)) | 1)
    levels = extended.group.levels
    peers = levels.within_node if sees_same else levels.world
    shares = _deal(leaves, common.pieces, peers.size if sees_same else 1)
    with extended.peers.raise_together(CALL, f"{what}: parts of the ranks", ADVICE):
        own = _read_own(extended, source, leaves, common)
        read = _read_shares(source, shares, peers.rank)
        memories = {name: leaves[name].memory() for name in common.pieces}
        lacking = {name: leaves[name] for name, memory in memories.items() if memory is None}
        new = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in lacking.items()}
    _exchange(extended, peers, shares, read, memories | {name: bytes_of(array) for name, array in new.items()})
    states = common.states | new
    restored = {}
    with extended.peers.raise_together(CALL, f"{what}: variables", ADVICE):
        for name, leaf in leaves.items():
            if name in own and isinstance(leaf, ReplicaLeaf):
                leaf.restore_replicas(own[name])
            elif name in own or name in states:
                restored[name] = leaf.restore(own[name][0] if name in own else states[name])
    return {item: _rebuilt(item, value, restored) for item, value in items.items()}


def _read_common(strategy: Any, place: Path, source: Path, leaves: Mapping[str, Leaf], partial: bool) -> _Common:
    """Read the states that rank 0 sends to all ranks."""
    num_ranks, num_replicas = parts_of(strategy).group.topology.size, parts_of(strategy).replicas.total
    if not source.exists() and num_ranks > 1:
        raise FileNotFoundError(f"there is no checkpoint {str(place.absolute())!r}: rank 0, which reads it, finds none")
    saved = SavedCheckpoint(source)
    owners = {name: owner for name, owner in saved.owners.items() if name in leaves}
    if not partial or (leaves and not owners):  # nothing in common is a mistake
        _require_same_names(place, set(leaves), set(saved.owners), partial)
    form = saved.manifest["ranks"], saved.manifest["replicas"], zlib.crc32(manifest_text(source))
    common = _Common(owners, *form, {}, {})
    for name, owner in owners.items():
        leaf = leaves[name]
        if (owner is Owner.REPLICA) != isinstance(leaf, ReplicaLeaf):
            were, now = ("one copy for each replica", "equal copies")[:: 1 if owner is Owner.REPLICA else -1]
            raise ValueError(
                f"{name} has {were} in {str(place)!r}, and {now} here: its synchronization is another one, or only "
                "one of the two strategies has parameter servers, where a variable has no copies; restore without it"
            )
        if owner is Owner.RANK and (leaf.owner is Owner.ALL or common.num_ranks != num_ranks):
            as_many = f"there are {num_ranks}: start as many"
            now = "has equal copies here: restore it to an array" if leaf.owner is Owner.ALL else as_many
            raise ValueError(
                f"{name} differed between the {common.num_ranks} ranks that saved {str(place)!r}, and {now}, or "
                "restore without it"
            )
        if owner is Owner.ALL and leaf.dtype is None:
            common.states[name] = _state(saved, saved.shared_parts, name, leaf)
        elif owner is Owner.ALL:
            _require_form(saved, saved.shared_parts, name, leaf)
            common.pieces[name] = saved.pieces(name, saved.shared_parts)
        elif isinstance(leaf, ReplicaLeaf) and common.num_replicas != num_replicas:
            states = _states_of_replicas(saved, name, leaf, range(common.num_replicas), common)
            common.states[name] = leaf.join(states)
    return common


def _read_own(extended: Any, place: Path, leaves: Mapping[str, Leaf], common: _Common) -> dict[str, list[State]]:
    """Read what belongs to this rank, or to its replicas."""
    names = [name for name in common.owners if name not in common.states and name not in common.pieces]
    if not names:
        return {}
    place, rank = existing(place), extended.group.topology.rank
    if rank and not place.exists():
        raise FileNotFoundError(
            f"rank {rank} does not find the checkpoint {str(place.absolute())!r}, which rank 0 finds: state that "
            "differs between ranks or replicas must be on a file system that all ranks share, and a relative path "
            "begins at the current folder of each rank"
        )
    if zlib.crc32(manifest_text(place)) != common.manifest:
        raise DataLossError(
            f"rank {rank} finds another checkpoint in {str(place.absolute())!r} than rank 0: state that differs "
            "between ranks or replicas must be on a file system that all ranks share"
        )
    saved = SavedCheckpoint(place)
    own = {}
    for name in names:
        if common.owners[name] is Owner.REPLICA:
            own[name] = _states_of_replicas(saved, name, leaves[name], extended.replicas.ids_here, common)
        else:
            own[name] = [_state(saved, [part_of_rank(rank)], name, leaves[name])]
    return own


def _states_of_replicas(
    saved: SavedCheckpoint, name: str, leaf: Leaf, replica_ids: range, common: _Common
) -> list[State]:
    starts = shard_bounds(common.num_replicas, common.num_ranks)[:-1]
    parts = {replica_id: part_of_rank(bisect_right(starts, replica_id) - 1) for replica_id in replica_ids}
    return [_state(saved, [part], replica_key(name, replica_id), leaf) for replica_id, part in parts.items()]


def _state(saved: SavedCheckpoint, parts: Sequence[str], key: str, leaf: Leaf) -> State:
    """Read a state, and require that the leaf takes it."""
    _require_form(saved, parts, key, leaf)
    state = saved.state(key, parts)
    leaf.require_fitting(state)
    return state


def _require_form(saved: SavedCheckpoint, parts: Sequence[str], key: str, leaf: Leaf) -> None:
    form = saved.form(key, parts)
    if form != leaf.form:
        raise ValueError(f"{leaf.name} is {leaf.form}, and {key} in {str(saved.place)!r} is {form}")


def _require_same_names(place: Path, leaves: set[str], saved: set[str], partial: bool) -> None:
    texts, what = [], "other things than" if leaves & saved else "nothing of"
    also = "; or pass partial=True, which restores only what both have, and leaves the rest as it is"
    if leaves - saved:
        texts.append(f"{_names(leaves - saved)} {'is' if len(leaves - saved) == 1 else 'are'} not in it")
    if saved - leaves:
        texts.append(f"{_names(saved - leaves)} of it would be left")
    if texts:
        raise ValueError(
            f"{str(place)!r} holds {what} this checkpoint: {', and '.join(texts)}. Make the same nests first, also "
            f"what an optimizer makes in its first step{also * (not partial)}"
        )


def _names(names: set[str]) -> str:
    found = sorted(names)
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")


def _deal(
    leaves: Mapping[str, Leaf], pieces: Mapping[str, list[tuple[str, int, int]]], num_readers: int
) -> list[_Share]:
    """Deal pieces over the readers by bytes: to each those whose middles are in its part of all bytes."""
    itemsizes = {name: np.dtype(leaves[name].dtype).itemsize for name in pieces}
    total, at = sum(of_leaf[-1][2] * itemsizes[name] for name, of_leaf in pieces.items()), 0
    shares = []
    for name, of_leaf in pieces.items():
        itemsize = itemsizes[name]
        for part, begin, end in of_leaf:
            nbytes = (end - begin) * itemsize
            reader = (2 * at + nbytes) * num_readers // (2 * total) if nbytes else 0
            shares.append(_Share(name, part, begin * itemsize, end * itemsize, reader))
            at += nbytes
    return shares


def _read_shares(place: Path, shares: Sequence[_Share], rank: int) -> list[Array]:
    """Read the pieces that this rank sends to others, in order."""
    mine = [share for share in shares if share.reader == rank]
    if not mine:
        return []
    saved = SavedCheckpoint(place)
    return [bytes_of(saved.part(share.part).array(share.name)) for share in mine]


def _exchange(
    extended: Any, peers: Any, shares: Sequence[_Share], read: list[Array], memories: Mapping[str, Any]
) -> None:
    """Send what ranks have read into the memories of all. Collective."""
    limit = extended.options.timeout_seconds
    with extended.group.call(Call.of_fields(CALL, {"advice": ADVICE}, limit)):
        for name, _, begin, end, reader in shares:
            target = memories[name][begin:end]
            peers.broadcast(read.pop(0) if reader == peers.rank else target, reader, target)


def _rebuilt(item: str, value: Any, restored: Mapping[str, Any]) -> Any:
    """Return a nest with restored leaves; the nest itself if all of them were written where they are."""
    flat, structure = nest.flatten(value)
    new = [restored.get(item + path, leaf) for path, leaf in zip(nest.paths(structure), flat, strict=True)]
    return value if all(one is other for one, other in zip(new, flat, strict=True)) else nest.rebuild(value, new)
