"""Collective save of a checkpoint: the part of each rank, the publication of the folder, and the record."""

from __future__ import annotations

import copy
import logging
import math
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from mpidist import nest
from mpidist.checkpoint.folder import CheckpointFolder, make_unfinished, publish, remove, unfinished_folders
from mpidist.checkpoint.folder_lock import FolderLock
from mpidist.checkpoint.leaves import Leaf, Owner, ReplicaLeaf, leaf_of
from mpidist.checkpoint.parts import Part, Pieces, deal, part_of_rank, require_writers, write_part, writing_ranks
from mpidist.checksums import checksum, difference_error, difference_text, differences
from mpidist.context_stack import CurrentStrategy, parts_of
from mpidist.strategy_parts import StrategyParts
from mpidist.transport.arrays import without_padding
from mpidist.transport.text import size_text, time_text

__all__ = [
    "CALL",
    "CopyMemory",
    "Save",
    "SaveRecord",
    "capture",
    "leaves_in",
    "replica_key",
    "require_on_difference",
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

_Span = tuple[tuple[int, ...], int, int]  # the shape of an array, the first element that is copied, and the last's next


@final
@dataclass(frozen=True)
class SaveRecord:
    """Record of one save of this rank: its times and sizes.

    Attributes:
        path: The checkpoint.
        blocked_seconds: How long `save` stopped the program.
        total_seconds: From the call of `save` until this rank's files were on the disk; on rank 0 until the checkpoint
            was in its place.
        nbytes: The bytes of the arrays that this rank has written.
        extra_bytes: The memory that the save needed beside the state: copies for the background, which the manager
            keeps, or copies of device memory.
    """

    path: str
    blocked_seconds: float
    total_seconds: float
    nbytes: int
    extra_bytes: int

    @property
    def bytes_per_second(self) -> float:
        """`nbytes` by `total_seconds`."""
        return self.nbytes / self.total_seconds

    def __str__(self) -> str:
        times = f"blocked {time_text(self.blocked_seconds)} of {time_text(self.total_seconds)}"
        written = f"wrote {size_text(self.nbytes)}, {size_text(self.bytes_per_second)}/s"
        return f"saved {self.path}: {times}; {written}; extra memory {size_text(self.extra_bytes)}"


@final
class Save(AbstractContextManager["Save"]):
    """One save of a checkpoint. A block removes what was written, and frees the folder, if it raises an exception.

    Rank 0 locks `target`, where it saves `number`, or one more than the largest, and moves `folder`, where ranks write,
    to `place`; ranks compare `path_text`. `part` is the part of this rank, `None` for no part; `all_parts` names the
    parts of all ranks, `about` is what the manifest says, and `extra_bytes` is the memory of copies of states.
    `io_timeout_seconds` is MPIDIST_IO_TIMEOUT, if it is set.
    """

    def __init__(
        self, parts: StrategyParts, path_text: str, target: CheckpointFolder, number: int | None = None
    ) -> None:
        self.began, self.path_text = time.perf_counter(), path_text
        self.rank, self.io_timeout_seconds = parts.group.topology.rank, parts.group.settings.io_timeout_seconds
        self.lock: FolderLock | None = None  # on rank 0
        self.part: Part | None = None
        self.about: dict[str, Any] = {}
        self.all_parts: list[str] = []
        self.extra_bytes = 0
        self._target, self._number, self._replaces = target, number, False
        self._folder: Path | None = None

    def begin(self) -> tuple[str, dict[str, Any]]:
        """Lock the place, and make the folder that is written. On rank 0.

        Returns the name of the folder, and the manifest's fields of the save. An `OSError` reports that another job
        writes there, or why the folder cannot be made.
        """
        self.lock = self._target.hold_lock()
        self._target.clean_up(self.lock)
        about = self._target.choose(self._number, self.lock)
        place = self._target.place(about.get("number")).resolve()
        self._replaces = place.exists()
        self._folder = make_unfinished(place)
        unfinished_folders.add(self._folder)
        return self._folder.name, about

    def join(self, folder: str, about: Mapping[str, Any]) -> None:
        """Take over what rank 0 has begun."""
        self.about |= about
        # A thread writes there also after a change of the current folder.
        self.place = self._target.place(self.about.get("number")).resolve()
        self.folder = self.place.with_name(folder)

    def write_part(self) -> None:
        """Write the files of this rank into the folder."""
        if self.part is None:
            return
        if not self.folder.is_dir():
            raise FileNotFoundError(
                f"rank {self.rank} does not find {str(self.folder)!r}, which rank 0 made: a checkpoint must be on a "
                "file system that all ranks share; only with writers=1, and where no states differ by rank, does rank "
                "0 alone write"
            )
        write_part(self.folder, part_of_rank(self.rank), self.part)

    def publish(self) -> None:
        """Move the folder to the place, if the lock is still this process's; remove old checkpoints. On rank 0."""
        if self.lock is not None:
            self.lock.require()
            publish(self.folder, self.place, self.about, self.all_parts, self._replaces)
            self._target.remove_old(self.about.get("number"))

    def discard(self) -> None:
        """Remove the folder that is written, if there is one: the disk may be full. On rank 0."""
        if self._folder is not None:
            with suppress(OSError):  # the error of the save says more
                remove(self._folder)

    def release(self) -> None:
        """Release the lock. On rank 0."""
        if self._folder is not None:
            unfinished_folders.discard(self._folder)
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is not None:
            self.discard()
            self.release()

    @property
    def limit_seconds(self) -> float:
        """In which all ranks write their parts, if they write in the background."""
        return self.io_timeout_seconds or _PARTS_SECONDS

    def record(self, blocked_seconds: float | None = None) -> SaveRecord:
        """Describe the save, which is over now, and log it on rank 0. `None`: the program was stopped until now."""
        total = time.perf_counter() - self.began
        blocked = total if blocked_seconds is None else blocked_seconds
        nbytes = 0 if self.part is None else sum(array.nbytes for array in self.part.arrays.values())
        record = SaveRecord(str(self.place), blocked, total, nbytes, self.extra_bytes)
        if self.rank == 0:
            logger.info("mpidist: %s", record)
        return record


@final
class CopyMemory:
    """Memory of copies of arrays, which later copies of like arrays use again: new memory costs more than a copy."""

    def __init__(self) -> None:
        self._copies: dict[str, tuple[Array, _Span]] = {}
        self._new: set[str] = set()  # copies that are those of this save already

    def checksum(self, name: str, state: Any) -> int:
        """Return the checksum of a state. What the last save copied of it is copied on the way: it is read once."""
        self._new.discard(name)
        if not isinstance(state, np.ndarray):
            return checksum(state)
        if name not in self._copies or without_padding(state) is not state:
            return checksum(without_padding(state))
        memory, (shape, begin, _) = self._copies[name]
        if (memory.dtype, shape) != (state.dtype, state.shape):
            return checksum(state)
        self._new.add(name)
        return checksum(state, memory, begin)

    def copied(self, part: Part) -> Part:
        """Copy a part; the copies made before are overwritten."""
        kept, self._copies = self._copies, {}
        for name, array in part.arrays.items():
            shape, begin, end = part.pieces.get(name, (array.shape, 0, array.size))
            memory, span = kept.pop(name, (None, None))
            if memory is None or (memory.dtype, memory.shape) != (array.dtype, array.shape):
                memory = np.empty(array.shape, array.dtype)
            if name not in self._new or span != (tuple(shape), begin, end):
                np.copyto(memory, array)
            self._copies[name] = memory, (tuple(shape), begin, end)
        arrays = {name: memory for name, (memory, _) in self._copies.items()}
        return Part(arrays, copy.deepcopy(part.values), part.pieces)


def leaves_in(items: Mapping[str, Any], strategy: CurrentStrategy) -> dict[str, Leaf]:
    """Find the leaves of named nests, by name: `weights['kernel']`."""
    leaves = {}
    for item, value in items.items():
        flat, structure = nest.flatten(value)
        for path, leaf in zip(nest.paths(structure), flat, strict=True):
            if item + path in leaves:
                raise ValueError(f"two leaves of the checkpoint have the name {item + path}: rename one of them")
            leaves[item + path] = leaf_of(item + path, leaf, strategy)
    for name in leaves:
        of, _, number = name.rpartition(_OF_REPLICA)
        if number.isdigit() and isinstance(leaves.get(of), ReplicaLeaf):
            raise ValueError(f"{name!r} is a name for the copies of {of!r}: rename it")
    return leaves


def replica_key(name: str, replica_id: int) -> str:
    """Name the array of one replica."""
    return f"{name}{_OF_REPLICA}{replica_id}"


def require_on_difference(on_difference: Any) -> None:
    """Refuse an invalid `on_difference`."""
    if on_difference not in _ON_DIFFERENCE:
        raise ValueError(f"on_difference must be 'raise' or 'rank 0', got {on_difference!r}")


def capture(
    strategy: Any,
    make_save: Callable[[], Save],
    items: Mapping[str, Any],
    memory: CopyMemory | None,
    on_difference: str,
    writers: int | str,
) -> Save:
    """Begin a save, and read the state of all leaves. Collective; of parameter servers, local to the chief.

    `memory` takes copies of the states; without it the save may share memory with the leaves. What `make_save` raises
    is raised on all ranks; so is an `OSError` if rank 0 cannot make the folder, and an `InvalidArgumentError` if ranks
    save different things, or copies differ that should be equal.
    """
    extended = parts_of(strategy)
    extended.require_cross_replica(CALL)
    if not (strategy.is_chief or extended.peers.is_in_lock_step):
        raise RuntimeError(f"{CALL} of parameter servers is for the chief: write `if strategy.is_chief:` before it")
    topology = extended.group.topology
    fields = {"on_difference": on_difference, "writers": str(writers), "advice": ADVICE}
    leaves: dict[str, Leaf] = {}
    checksums: dict[str, int] = {}
    error: Exception | None = None
    try:
        save = make_save()
        fields |= {"path": save.path_text, "background": str(memory is not None)}
        require_on_difference(on_difference)
        require_writers(writers)
        leaves = leaves_in(items, strategy)
        if topology.size > 1:
            checksums = _checksums(leaves.values(), memory or CopyMemory())
    except Exception as problem:  # of any kind: the other ranks must learn of it
        error = problem
    owners, drifted = _owners(extended, fields, leaves, checksums, error)
    dealt = [leaves[name] for name, owner in owners.items() if owner is Owner.ALL and name not in drifted]
    sizes = {leaf.name: (math.prod(leaf.shape), leaf.dtype.itemsize) for leaf in dealt if leaf.dtype is not None}
    pieces = deal(sizes, writing_ranks(writers, topology))
    writing = sorted({rank for of_leaf in pieces.values() for rank, _, _ in of_leaf} | {0})
    is_any_own = any(owner is not Owner.ALL for owner in owners.values())

    def begin() -> Any:
        if is_any_own or topology.rank in writing:
            part = _part(leaves, owners, pieces, extended.replicas.ids_here, topology.rank)
            save.part = part if memory is None else memory.copied(part)
            save.extra_bytes = _extra_bytes(save.part, leaves, memory)
        return save.begin() if topology.rank == 0 else None

    with save:
        save.join(*extended.on_each_rank(CALL, ADVICE, begin)[0])
    save.about |= {"ranks": topology.size, "replicas": extended.replicas.total}
    save.about["owners"] = {name: owner.value for name, owner in owners.items()}
    save.about["shared"] = [part_of_rank(rank) for rank in writing]
    save.all_parts = [part_of_rank(rank) for rank in (range(topology.size) if is_any_own else writing)]
    return save


def _checksums(leaves: Iterable[Leaf], memory: CopyMemory) -> dict[str, int]:
    """Return what must be equal on all ranks; of equal bytes in another form, too."""
    one_each = [leaf for leaf in leaves if leaf.owner is not Owner.REPLICA]
    return {one.name: zlib.crc32(one.form.encode(), memory.checksum(one.name, one.states()[0])) for one in one_each}


def _part(
    leaves: Mapping[str, Leaf], owners: Mapping[str, Owner], pieces: Pieces, replica_ids: Sequence[int], rank: int
) -> Part:
    """Lay out this rank's part."""
    part = Part({}, {}, {})
    for name, owner in owners.items():
        own = [(begin, end) for writer, begin, end in pieces.get(name, ()) if writer == rank]
        if owner is Owner.ALL and not own and (rank or name in pieces):
            continue
        states = leaves[name].states()
        if owner is Owner.REPLICA:
            for replica_id, state in zip(replica_ids, states, strict=True):
                part.put(replica_key(name, replica_id), state)
        elif len(pieces.get(name, ())) > 1:
            part.put_piece(name, states[0], *own[0])
        else:
            part.put(name, states[0])
    return part


def _extra_bytes(part: Part, leaves: Mapping[str, Leaf], memory: CopyMemory | None) -> int:
    """Return the memory of copies of the states in a part."""
    copies = {name for name, leaf in leaves.items() if leaf.copies_state}
    arrays = part.arrays.items()
    return sum(array.nbytes for key, array in arrays if memory or key.partition(_OF_REPLICA)[0] in copies)


def write_together(strategy: Any, save: Save) -> SaveRecord:
    """Write the parts of all ranks, and move the folder to its place. Collective: an `OSError` is one of all ranks."""
    parts, limit = parts_of(strategy), save.io_timeout_seconds
    with save:
        with parts.raise_together(CALL, "writing the files", timeout_seconds=limit):
            save.write_part()
        with parts.raise_together(CALL, "publishing the files", timeout_seconds=limit):
            save.publish()
            save.release()  # before any rank goes on
    return save.record()


def _owners(
    extended: Any,
    fields: Mapping[str, str],
    leaves: Mapping[str, Leaf],
    checksums: Mapping[str, int],
    error: Exception | None,
) -> tuple[dict[str, Owner], set[str]]:
    """Find whose state each leaf is, and which copies differ, of which rank 0's are saved. Collective.

    A rank's leaf is that of all ranks if it is the same on all.
    """
    found = differences(extended, CALL, {**fields, **{f"names, {name}": "here" for name in leaves}}, checksums, error)
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
