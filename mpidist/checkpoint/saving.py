"""How ranks save a checkpoint together: what each rank writes, and who puts the folder in its place."""

from __future__ import annotations

import copy
import logging
import math
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist import nest
from mpidist.checkpoint.dealing import deal, require_writers, writing_ranks
from mpidist.checkpoint.leaves import Leaf, Owner, State, leaf_of
from mpidist.checkpoint.parts import Part, part_of_rank, write_part
from mpidist.checkpoint.places import SavePlace
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

Array = np.ndarray[Any, Any]

CALL: Final = "save of a checkpoint"
ADVICE: Final = "all ranks call save, and each writes a share"
_ADVICE_ON_DIFFERENCE: Final = (
    "was an all_reduce left out, or a variable assigned other values on each rank? on_difference='rank 0' saves the "
    "copies of rank 0"
)
_OF_REPLICA: Final = " of replica "
_ON_DIFFERENCE: Final = ("raise", "rank 0")
_PARTS_SECONDS: Final = 600.0  # without MPIDIST_IO_TIMEOUT


@final
class Snapshot(NamedTuple):
    """What this rank writes.

    Attributes:
        save_place: The place, as rank 0 has locked it.
        number: The number of the checkpoint; `None` if it has none.
        place: Where the checkpoint will be.
        folder: Where the parts are written, before the folder is moved to its place.
        part: What this rank writes; `None` for nothing.
        all_parts: The names of the parts of all ranks.
        about: What the manifest says.
        rank: This rank.
        began: When the save began, in seconds of `time.perf_counter`.
        extra_bytes: The memory of the copies of states.
        io_timeout_seconds: `MPIDIST_IO_TIMEOUT`; `None` if it is not set.
    """

    save_place: SavePlace
    number: int | None
    place: Path
    folder: Path
    part: Part | None
    all_parts: list[str]
    about: dict[str, Any]
    rank: int
    began: float
    extra_bytes: int
    io_timeout_seconds: float | None

    @property
    def nbytes(self) -> int:
        """The bytes of the arrays that this rank writes."""
        return 0 if self.part is None else sum(array.nbytes for array in self.part.arrays.values())

    @property
    def limit_seconds(self) -> float:
        """In which all ranks write their parts, if they write in the background."""
        return self.io_timeout_seconds or _PARTS_SECONDS


@final
class CopyMemory:
    """Memory of copies of arrays, which later copies of like arrays use again: new memory costs more than a copy."""

    def __init__(self) -> None:
        self._copies: dict[str, Array] = {}
        self._spans: dict[str, Any] = {}  # what of an array is copied: see `_span`
        self._new: set[str] = set()  # copies that are those of this save already

    def checksum(self, name: str, state: Any) -> int:
        """Return the checksum of a state. What the last save copied of it is copied on the way: it is read once."""
        memory, (shape, begin, _) = self._copies.get(name), self._spans.get(name, (None, 0, 0))
        if not isinstance(state, np.ndarray) or memory is None or (memory.dtype, shape) != (state.dtype, state.shape):
            self._new.discard(name)
            return checksum(state)
        self._new.add(name)
        return checksum(state, memory, begin)

    def copied(self, part: Part) -> Part:
        """Copy a part; the copies made before are overwritten."""
        kept, self._copies = self._copies, {}
        old, self._spans = self._spans, {name: _span(part, name) for name in part.arrays}
        for name, array in part.arrays.items():
            memory = kept.pop(name, None)
            if memory is None or (memory.dtype, memory.shape) != (array.dtype, array.shape):
                memory = np.empty(array.shape, array.dtype)
            if name not in self._new or old[name] != self._spans[name]:
                np.copyto(memory, array)
            self._copies[name] = memory
        return Part(dict(self._copies), copy.deepcopy(part.values), part.pieces)


def _span(part: Part, name: str) -> tuple[tuple[int, ...], int, int]:
    """Return the shape of a whole array of which a part has some elements, the first one, and that behind the last."""
    shape, begin, end = part.pieces.get(name, (part.arrays[name].shape, 0, part.arrays[name].size))
    return tuple(shape), begin, end


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
    return f"{name}{_OF_REPLICA}{replica_id}"


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
    writers: int | str,
    error: Exception | None = None,
) -> Snapshot:
    """Read the state of all leaves. Collective; of parameter servers, local to the chief.

    Args:
        strategy: The strategy.
        save_place: Where the checkpoint will be.
        items: Named nests.
        memory: Takes copies of the states; `None` for a snapshot that may share memory with the leaves.
        on_difference: Whether to raise an error if copies differ that should be equal, or to save those of rank 0.
        writers: Which ranks write what is equal on all ranks.
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
    topology = extended.group.topology
    read = _Read({}, {}, {})
    try:
        require_on_difference(on_difference)
        require_writers(writers)
        read.leaves.update(leaves_in(items, strategy))
        read.all(topology.size == 1, CopyMemory() if memory is None else memory)
    except Exception as problem:  # of any kind: the other ranks must learn of it
        error = error or problem
    fields = {"path": save_place.path_text, "on_difference": on_difference, "writers": str(writers), "advice": ADVICE}
    owners, drifted = _owners(extended, fields, read, error)
    dealt = [name for name, owner in owners.items() if owner is Owner.ALL and name not in drifted]
    pieces = read.dealt(dealt, writing_ranks(writers, topology))
    writing = {rank for of_leaf in pieces.values() for rank, _, _ in of_leaf} | {0}
    is_any_own = any(owner is not Owner.ALL for owner in owners.values())
    part: Part | None = None
    try:
        if is_any_own or topology.rank in writing:
            part = read.part(owners, pieces, extended.replicas.ids_here, topology.rank)
            part = part if memory is None else memory.copied(part)
    except Exception as problem:  # such as a lack of memory
        error = problem
    with _given_up_on_error(save_place):
        chosen = extended.on_rank_0(CALL, ADVICE, save_place.choose, error)
    place = save_place.path(chosen.number)  # a thread writes there also after a change of the current folder
    about = {**chosen.about, "ranks": topology.size, "replicas": extended.replicas.total}
    about["owners"] = {name: owner.value for name, owner in owners.items()}
    about["shared"] = [part_of_rank(rank) for rank in sorted(writing)]
    names = [part_of_rank(rank) for rank in (range(topology.size) if is_any_own else sorted(writing))]
    folder = place.with_name(chosen.folder)
    extra_bytes = 0 if part is None else read.extra_bytes(part, memory)
    limit = extended.group.settings.io_timeout_seconds
    return Snapshot(
        save_place, chosen.number, place, folder, part, names, about, topology.rank, began, extra_bytes, limit
    )


@final
class _Read(NamedTuple):
    """What this rank has read of its leaves.

    Attributes:
        leaves: The leaves by name.
        checksums: The checksums of the states of each leaf, if there are other ranks to compare them with.
        states: The states that are kept, by name: those whose memory is the leaf's.
    """

    leaves: dict[str, Leaf]
    checksums: dict[str, list[int]]
    states: dict[str, list[State]]

    def all(self, is_alone: bool, memory: CopyMemory) -> None:
        """Read all states; copies of device memory are kept if nobody else might write them."""
        for name, leaf in self.leaves.items():
            of_leaf = leaf.states()
            if not is_alone:
                self.checksums[name] = [memory.checksum(name, state) for state in of_leaf]
            if is_alone or not leaf.copies_state:
                self.states[name] = of_leaf

    def dealt(self, names: Sequence[str], ranks: Sequence[int]) -> dict[str, list[tuple[int, int, int]]]:
        """Deal the arrays among leaves that are equal on all ranks."""
        arrays = {name: self.leaves[name] for name in names if self.leaves[name].dtype is not None}
        return deal({name: (math.prod(one.shape), np.dtype(one.dtype).itemsize) for name, one in arrays.items()}, ranks)

    def part(
        self,
        owners: Mapping[str, Owner],
        pieces: Mapping[str, list[tuple[int, int, int]]],
        replica_ids: Sequence[int],
        rank: int,
    ) -> Part:
        """Lay out what this rank writes."""
        part = Part({}, {}, {})
        for name, owner in owners.items():
            own = [(begin, end) for writer, begin, end in pieces.get(name, ()) if writer == rank]
            if owner is Owner.ALL and not own and (rank or name in pieces):
                continue
            of_leaf = self.states.get(name) or self.leaves[name].states()
            if owner is Owner.REPLICA:
                for replica_id, state in zip(replica_ids, of_leaf, strict=True):
                    part.put(replica_key(name, replica_id), state)
            elif len(pieces.get(name, ())) > 1:
                part.put_piece(name, of_leaf[0], *own[0])
            else:
                part.put(name, of_leaf[0])
        return part

    def extra_bytes(self, part: Part, memory: CopyMemory | None) -> int:
        """Return the memory of copies of the states in a part."""
        if memory is not None:
            return sum(array.nbytes for array in part.arrays.values())
        copies = {name for name, leaf in self.leaves.items() if leaf.copies_state}
        return sum(array.nbytes for name, array in part.arrays.items() if name.partition(_OF_REPLICA)[0] in copies)


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
        limit = snapshot.io_timeout_seconds
        with parts.raise_together(CALL, "writing the files", timeout_seconds=limit):
            write_parts(snapshot)
        with parts.raise_together(CALL, "publishing the files", timeout_seconds=limit):
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
    extended: Any, fields: Mapping[str, str], read: _Read, error: Exception | None
) -> tuple[dict[str, Owner], set[str]]:
    """Find whose state each leaf is. A rank's leaf is that of all ranks if it is the same on all. Collective.

    Returns:
        The owners by name, and the names of copies that differ, of which those of rank 0 are saved.

    Raises:
        InvalidArgumentError: As `capture` does.
    """
    leaves = read.leaves
    one_each = {  # of equal bytes in another form, too
        name: zlib.crc32(leaves[name].form.encode(), of_leaf[0])
        for name, of_leaf in read.checksums.items()
        if leaves[name].owner is not Owner.REPLICA
    }
    found = differences(extended, CALL, {**fields, **{f"names, {name}": "here" for name in leaves}}, one_each, error)
    drifted = {name: of_ranks for name, of_ranks in found.items() if leaves[name].owner is Owner.ALL}
    labelled = {leaves[name].label: of_ranks for name, of_ranks in drifted.items()}
    if drifted and fields["on_difference"] == _ON_DIFFERENCE[0]:
        what = "copies that should be equal differ between ranks, bit by bit, so nothing was saved"
        raise difference_error(extended, CALL, what, labelled, _ADVICE_ON_DIFFERENCE)
    if drifted and extended.group.topology.rank == 0:
        logger.warning("mpidist: %s: copies differ, those of rank 0 are saved:\n%s", CALL, difference_text(labelled))
    owners = {
        name: Owner.ALL if leaf.owner is Owner.RANK and name not in found else leaf.owner
        for name, leaf in leaves.items()
    }
    return owners, set(drifted)


def write_parts(snapshot: Snapshot) -> None:
    """Write the files of this rank into the folder."""
    if snapshot.part is None:
        return
    if not snapshot.folder.is_dir():
        raise FileNotFoundError(
            f"rank {snapshot.rank} does not see {str(snapshot.folder)!r}, which rank 0 has made: a checkpoint must be "
            "on a file system that all ranks share; only with writers=1, and where no states differ by rank, does rank "
            "0 alone write"
        )
    write_part(snapshot.folder, part_of_rank(snapshot.rank), snapshot.part)


def publish_folder(snapshot: Snapshot) -> None:
    """Move the folder to its place, on rank 0."""
    if snapshot.rank == 0:
        snapshot.save_place.publish(snapshot.place, snapshot.about, snapshot.all_parts)
        snapshot.save_place.finish(snapshot.number)
