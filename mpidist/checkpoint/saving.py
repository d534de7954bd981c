"""How ranks save a checkpoint together: what each rank writes, and who puts the folder in its place."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist import nest
from mpidist.checkpoint.files import COMMON
from mpidist.checkpoint.leaves import Leaf, Owner, State, leaf_of
from mpidist.checkpoint.parts import Part, part_of_rank, write_part
from mpidist.checkpoint.places import SavePlace
from mpidist.checkpoint.rank_0 import on_rank_0
from mpidist.checksums import checksum, difference_error, difference_text, differences
from mpidist.context_stack import CurrentStrategy, parts_of

__all__ = [
    "CALL",
    "CopyMemory",
    "Snapshot",
    "capture",
    "leaves_in",
    "publish_folder",
    "replica_key",
    "require_on_difference",
    "write_parts",
    "write_together",
]

logger = logging.getLogger("mpidist.checkpoint")

CALL: Final = "save of a checkpoint"
ADVICE: Final = "all ranks call save; rank 0 alone writes"
_ADVICE_ON_DIFFERENCE: Final = (
    "was an all_reduce left out, or a variable assigned other values on each rank? on_difference='rank 0' saves the "
    "copies of rank 0"
)
_ON_DIFFERENCE: Final = ("raise", "rank 0")


@final
class Snapshot(NamedTuple):
    """What this rank writes.

    Attributes:
        save_place: The place, as rank 0 has locked it.
        number: The number of the checkpoint; `None` if it has none.
        place: Where the checkpoint will be.
        folder: Where the parts are written, before the folder is moved to its place.
        parts: What this rank writes, by the name of the part.
        all_parts: The names of the parts of all ranks.
        about: What the manifest says.
        rank: This rank.
        began: When the save began, in seconds of `time.perf_counter`.
        extra_bytes: The memory of the copies of states.
    """

    save_place: SavePlace
    number: int | None
    place: Path
    folder: Path
    parts: Mapping[str, Part]
    all_parts: list[str]
    about: dict[str, Any]
    rank: int
    began: float
    extra_bytes: int

    @property
    def nbytes(self) -> int:
        """The bytes of the arrays that this rank writes."""
        return sum(array.nbytes for part in self.parts.values() for array in part.arrays.values())


@final
class CopyMemory:
    """Memory of copies of states, which later copies of like states use again: new memory costs more than a copy."""

    def __init__(self) -> None:
        self._copies: dict[str, list[State]] = {}

    def copied(self, states: Mapping[str, list[State]]) -> dict[str, list[State]]:
        """Copy states; the copies made before are overwritten.

        Args:
            states: The states of each leaf, by name.
        """
        kept, self._copies = self._copies, {}
        for name, of_leaf in states.items():
            before = kept.pop(name, ())
            self._copies[name] = [
                _copied(state, before[at] if at < len(before) else None) for at, state in enumerate(of_leaf)
            ]
        return self._copies


def _copied(state: State, memory: State) -> State:
    if (
        isinstance(state, np.ndarray)
        and isinstance(memory, np.ndarray)
        and (state.dtype, state.shape) == (memory.dtype, memory.shape)
    ):
        np.copyto(memory, state)
        return memory
    return np.array(state, order="C") if isinstance(state, np.ndarray) else copy.copy(state)


def leaves_in(items: Mapping[str, Any], strategy: CurrentStrategy) -> dict[str, Leaf]:
    """Find the leaves of named nests, by name: `weights['kernel']`."""
    leaves = {}
    for item, value in items.items():
        flat, structure = nest.flatten(value)
        for path, leaf in zip(nest.paths(structure), flat, strict=True):
            if item + path in leaves:
                raise ValueError(f"two leaves of the checkpoint have the name {item + path}: rename one of them")
            leaves[item + path] = leaf_of(item + path, leaf, strategy)
    return leaves


def replica_key(name: str, replica_id: int) -> str:
    """Name the array of one replica."""
    return f"{name} of replica {replica_id}"


def require_on_difference(on_difference: Any) -> None:
    """Refuse what says nothing of copies that differ.

    Raises:
        ValueError: If `on_difference` is neither `"raise"` nor `"rank 0"`.
    """
    if on_difference not in _ON_DIFFERENCE:
        raise ValueError(f"on_difference must be 'raise' or 'rank 0', got {on_difference!r}")


def capture(
    strategy: Any,
    save_place: SavePlace,
    items: Mapping[str, Any],
    memory: CopyMemory | None,
    on_difference: str,
    error: Exception | None = None,
) -> Snapshot:
    """Read the state of all leaves. Collective; of parameter servers, local to the chief.

    Args:
        strategy: The strategy.
        save_place: Where the checkpoint will be.
        items: Named nests.
        memory: Takes copies of the states; `None` for a snapshot that may share memory with the leaves.
        on_difference: Whether to raise an error if copies differ that should be equal, or to save those of rank 0.
        error: What is wrong with this rank's arguments; raised here, and told to the others.

    Raises:
        RuntimeError: In `Strategy.run`, and on a worker of parameter servers that is not the chief.
        InvalidArgumentError: If ranks save different things, copies differ that should be equal, or a rank cannot read
            its state. On every rank.
        OSError: If another job writes there, or rank 0 cannot make a folder. On every rank.
    """
    began = time.perf_counter()
    extended = parts_of(strategy)
    extended.require_cross_replica(CALL)
    if not strategy.is_chief and extended.service is not None:
        raise RuntimeError(f"{CALL} of parameter servers is for the chief: write `if strategy.is_chief:` before it")
    topology, replicas = extended.group.topology, extended.replicas
    leaves: dict[str, Leaf] = {}
    states: dict[str, list[State]] = {}
    checksums: dict[str, list[int]] = {}
    try:
        require_on_difference(on_difference)
        leaves = leaves_in(items, strategy)
        for name, leaf in leaves.items():
            of_leaf = leaf.states()
            checksums[name] = list(map(checksum, of_leaf))
            if leaf.owner is not Owner.ALL or not topology.rank:  # else a copy of device memory is needed no longer
                states[name] = of_leaf
    except Exception as problem:  # of any kind: the other ranks must learn of it
        error = error or problem
    fields = {"path": save_place.path_text, "on_difference": on_difference, "advice": ADVICE}
    owners = _owners(extended, fields, leaves, checksums, error)
    names = [COMMON]
    if any(owner is not Owner.ALL for owner in owners.values()):
        names += map(part_of_rank, range(topology.size))
    parts: dict[str, Part] = {}
    try:
        if memory is not None:
            written = {name for name, owner in owners.items() if owner is not Owner.ALL or not topology.rank}
            states = memory.copied({name: of_leaf for name, of_leaf in states.items() if name in written})
        parts = _parts(owners, states, checksums, replicas.ids_here, topology.rank)
    except Exception as problem:  # such as a lack of memory
        error = problem
    with _given_up_on_error(save_place):
        chosen = on_rank_0(extended, CALL, ADVICE, save_place.choose, error)
    place = save_place.path(chosen.number)  # a thread writes there also after a change of the current folder
    about = {**chosen.about, "ranks": topology.size, "replicas": replicas.total}
    about["owners"] = {name: owner.value for name, owner in owners.items()}
    parts = {name: part for name, part in parts.items() if name in names}
    folder = place.with_name(chosen.folder)
    is_copied = {name: memory is not None or leaf.copies_state for name, leaf in leaves.items()}
    copies = [state for name, of_leaf in states.items() if is_copied[name] for state in of_leaf]
    extra_bytes = sum(state.nbytes for state in copies if isinstance(state, np.ndarray))
    return Snapshot(save_place, chosen.number, place, folder, parts, names, about, topology.rank, began, extra_bytes)


def write_together(strategy: Any, snapshot: Snapshot) -> None:
    """Write the parts of all ranks, and move the folder to its place. Collective.

    Args:
        strategy: The strategy.
        snapshot: What this rank writes.

    Raises:
        OSError: If a rank cannot write. On every rank; what was in the place is there still.
    """
    parts = parts_of(strategy)
    with _given_up_on_error(snapshot.save_place):
        with parts.raise_together(CALL, "writing the files"):
            write_parts(snapshot)
        with parts.raise_together(CALL, "publishing the files"):
            publish_folder(snapshot)
            snapshot.save_place.release()  # before any rank goes on


@contextmanager
def _given_up_on_error(save_place: SavePlace) -> Iterator[None]:
    """Remove what was written, and free the place for other saves, if the block raises an exception."""
    try:
        yield
    except BaseException:
        save_place.discard()
        save_place.release()
        raise


def _owners(
    extended: Any,
    fields: Mapping[str, str],
    leaves: Mapping[str, Leaf],
    checksums: Mapping[str, list[int]],
    error: Exception | None,
) -> dict[str, Owner]:
    """Find whose state each leaf is. A rank's leaf is that of all ranks if it is the same on all. Collective.

    Raises:
        InvalidArgumentError: As `capture` does.
    """
    one_each = {name: of_leaf[0] for name, of_leaf in checksums.items() if leaves[name].owner is not Owner.REPLICA}
    found = differences(extended, CALL, {**fields, **{f"names, {name}": "here" for name in leaves}}, one_each, error)
    drifted = {leaves[name].label: of_ranks for name, of_ranks in found.items() if leaves[name].owner is Owner.ALL}
    if drifted and fields["on_difference"] == _ON_DIFFERENCE[0]:
        what = "copies that should be equal differ between ranks, bit by bit, so nothing was saved"
        raise difference_error(extended, CALL, what, drifted, _ADVICE_ON_DIFFERENCE)
    if drifted and extended.group.topology.rank == 0:
        logger.warning("mpidist: %s: copies differ, those of rank 0 are saved:\n%s", CALL, difference_text(drifted))
    return {
        name: Owner.ALL if leaf.owner is Owner.RANK and name not in found else leaf.owner
        for name, leaf in leaves.items()
    }


def _parts(
    owners: Mapping[str, Owner],
    states: Mapping[str, list[State]],
    checksums: Mapping[str, list[int]],
    replica_ids: Sequence[int],
    rank: int,
) -> dict[str, Part]:
    """Lay states into the parts that this rank writes."""
    common, own = Part({}, {}, {}), Part({}, {}, {})
    for name, of_leaf in states.items():
        if owners[name] is Owner.REPLICA:
            for replica_id, state, its_checksum in zip(replica_ids, of_leaf, checksums[name], strict=True):
                own.put(replica_key(name, replica_id), state, its_checksum)
        else:
            (common if owners[name] is Owner.ALL else own).put(name, of_leaf[0], checksums[name][0])
    return {part_of_rank(rank): own} | ({COMMON: common} if rank == 0 else {})


def write_parts(snapshot: Snapshot) -> None:
    """Write the files of this rank into the folder."""
    if snapshot.parts and not snapshot.folder.is_dir():
        raise FileNotFoundError(
            f"rank {snapshot.rank} does not see {str(snapshot.folder)!r}, which rank 0 has made: where states "
            "differ by rank, a checkpoint must be on a file system that all ranks share"
        )
    for name, part in snapshot.parts.items():
        write_part(snapshot.folder, name, part)


def publish_folder(snapshot: Snapshot) -> None:
    """Move the folder to its place, on rank 0."""
    if snapshot.rank == 0:
        snapshot.save_place.publish(snapshot.place, snapshot.about, snapshot.all_parts)
        snapshot.save_place.finish(snapshot.number)
