"""How ranks save a checkpoint together: what each rank writes, and who puts the folder in its place."""

from __future__ import annotations

import copy
import json
import logging
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist import nest
from mpidist.checkpoint.files import (
    COMMON,
    Part,
    part_of_rank,
    publish,
    remove,
    require_replaceable,
    unfinished,
    write_part,
)
from mpidist.checkpoint.leaves import Leaf, Owner, State, leaf_of
from mpidist.context_stack import CurrentStrategy, parts_of
from mpidist.errors import DeadlineExceededError
from mpidist.transport import bytes_of, text_of

__all__ = [
    "ADVICE",
    "BackgroundWriting",
    "CALL",
    "CopyMemory",
    "Snapshot",
    "capture",
    "discard",
    "folders_under_way",
    "leaves_in",
    "replica_key",
    "write_together",
]

logger = logging.getLogger("mpidist.checkpoint")

CALL: Final = "save of a checkpoint"
ADVICE: Final = "all ranks call save; rank 0 alone writes"
_PARTS_SECONDS: Final = 600.0  # in which the other ranks write their parts, in the background
_under_way: Final[set[Path]] = set()  # the folders that threads of this process write


@final
class Snapshot(NamedTuple):
    """What this rank writes.

    Attributes:
        place: Where the checkpoint will be.
        parts: What this rank writes, by the name of the part.
        all_parts: The names of the parts of all ranks.
        about: What the manifest says.
        rank: This rank.
    """

    place: Path
    parts: Mapping[str, Part]
    all_parts: list[str]
    about: Mapping[str, Any]
    rank: int

    @property
    def folder(self) -> Path:
        """Where the parts are written, before the folder is moved to its place."""
        return unfinished(self.place)


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


def capture(
    strategy: Any,
    place: Path,
    items: Mapping[str, Any],
    memory: CopyMemory | None,
    about: Mapping[str, Any],
    error: Exception | None = None,
) -> Snapshot:
    """Read the state of all leaves. Collective; of parameter servers, local to the chief.

    Args:
        strategy: The strategy.
        place: Where the checkpoint will be.
        items: Named nests.
        memory: Takes copies of the states; `None` for a snapshot that may share memory with the leaves.
        about: What else the manifest says.
        error: What is wrong with this rank's arguments; raised here, and told to the others.

    Raises:
        RuntimeError: In `Strategy.run`, and on a worker of parameter servers that is not the chief.
        InvalidArgumentError: If ranks save different things, or one cannot read its state. On every rank.
        OSError: If rank 0 cannot make a folder. On every rank.
    """
    extended = parts_of(strategy)
    extended.require_cross_replica(CALL)
    if not strategy.is_chief and extended.service is not None:
        raise RuntimeError(f"{CALL} of parameter servers is for the chief: write `if strategy.is_chief:` before it")
    topology, replicas = extended.group.topology, extended.replicas
    states: dict[str, list[State]] = {}
    leaves: dict[str, Leaf] = {}
    try:
        leaves = leaves_in(items, strategy)
        states = {
            name: leaf.states() for name, leaf in leaves.items() if leaf.owner is not Owner.ALL or not topology.rank
        }
    except Exception as problem:  # of any kind: the other ranks must learn of it
        error = error or problem
    fields = {"path": str(place), "advice": ADVICE} | {f"names, {name}": "here" for name in leaves}
    extended.agree(CALL, fields, error)
    place = place.resolve()  # a thread writes there also after a change of the current folder
    with extended.raise_together(f"{CALL} {str(place)!r}"):
        if topology.rank == 0:
            _make_folder(place)
    owners = _owners(extended, leaves, states)
    if memory is not None:
        written = {name for name, owner in owners.items() if owner is not Owner.ALL or not topology.rank}
        states = memory.copied({name: of_leaf for name, of_leaf in states.items() if name in written})
    parts = _parts(owners, states, replicas.ids_here, topology.rank)
    names = [COMMON]
    if any(owner is not Owner.ALL for owner in owners.values()):
        names += map(part_of_rank, range(topology.size))
    found = {name: owner.value for name, owner in owners.items()}
    about = {**about, "ranks": topology.size, "replicas": replicas.total, "owners": found}
    return Snapshot(place, {name: part for name, part in parts.items() if name in names}, names, about, topology.rank)


def write_together(strategy: Any, snapshot: Snapshot, finish: Callable[[], None]) -> None:
    """Write the parts of all ranks, and move the folder to its place. Collective.

    Args:
        strategy: The strategy.
        snapshot: What this rank writes.
        finish: Called on rank 0 at the end.

    Raises:
        OSError: If a rank cannot write. On every rank; what was in the place is there still.
    """
    extended = parts_of(strategy)
    try:
        with extended.raise_together("writing a checkpoint"):
            _write_parts(snapshot)
        with extended.raise_together("publishing a checkpoint"):
            _publish(snapshot, finish)
    except Exception:
        discard(snapshot)
        raise


def discard(snapshot: Snapshot) -> None:
    """Remove what all ranks have written, on rank 0: the disk may be full, and the next save needs the room. Local."""
    if snapshot.rank == 0:
        with suppress(OSError):  # the error of the save says more
            remove(snapshot.folder)


@final
class BackgroundWriting(Thread):
    """Writes a snapshot without MPI: rank 0 waits for the files of the other ranks, and publishes.

    Args:
        snapshot: What this rank writes.
        finish: Called on rank 0 at the end.

    Attributes:
        snapshot: As given.
        error: What went wrong, or `None`.
        is_done: Whether it has written or failed; `is_alive` may be wrong after a `join` that was interrupted.
    """

    def __init__(self, snapshot: Snapshot, finish: Callable[[], None]) -> None:
        super().__init__(name="mpidist.checkpoint")
        self.error: Exception | None = None
        self.is_done = False
        self.snapshot, self._finish = snapshot, finish
        _under_way.add(snapshot.folder)

    def run(self) -> None:
        """Write; see `Thread`."""
        snapshot = self.snapshot
        try:
            _write_parts(snapshot)
            _wait_for_parts(snapshot)
            _publish(snapshot, self._finish)
        except Exception as problem:  # of any kind: `CheckpointManager.wait` raises it
            self.error = problem
            logger.error("mpidist: the checkpoint %s is not written: %s", snapshot.place, text_of(problem))
            _tell_failure(snapshot, problem)
        finally:
            _under_way.discard(snapshot.folder)
            self.is_done = True


def folders_under_way() -> frozenset[Path]:
    """Return the folders that are written in the background now."""
    return frozenset(_under_way)


def _make_folder(place: Path) -> None:
    require_replaceable(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    folder = unfinished(place)
    remove(folder)  # of a job that was killed while it saved
    folder.mkdir()


def _owners(extended: Any, leaves: Mapping[str, Leaf], states: Mapping[str, list[State]]) -> dict[str, Owner]:
    """Find whose state each leaf is. A rank's leaf is that of all ranks if it is the same on all. Collective."""
    owners = {name: leaf.owner for name, leaf in leaves.items()}
    own = [name for name, owner in owners.items() if owner is Owner.RANK]
    if not own:
        return owners
    checksums = np.array([_checksum(states[name][0]) for name in own], np.int64)
    ops = extended.cross_device_ops
    lowest, highest = (ops.all_reduce(op, checksums, call=CALL) for op in ("min", "max"))
    for name, is_same in zip(own, lowest == highest, strict=True):
        owners[name] = Owner.ALL if is_same else Owner.RANK
    return owners


def _checksum(state: State) -> int:
    if isinstance(state, np.ndarray):
        return zlib.crc32(bytes_of(np.ascontiguousarray(state)).data) if state.size else 0
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def _parts(
    owners: Mapping[str, Owner], states: Mapping[str, list[State]], replica_ids: Sequence[int], rank: int
) -> dict[str, Part]:
    """Lay states into the parts that this rank writes."""
    common, own = Part({}, {}), Part({}, {})
    for name, of_leaf in states.items():
        if owners[name] is Owner.REPLICA:
            for replica_id, state in zip(replica_ids, of_leaf, strict=True):
                own.put(replica_key(name, replica_id), state)
        else:
            (common if owners[name] is Owner.ALL else own).put(name, of_leaf[0])
    return {part_of_rank(rank): own} | ({COMMON: common} if rank == 0 else {})


def _write_parts(snapshot: Snapshot) -> None:
    if snapshot.parts and not snapshot.folder.is_dir():
        raise FileNotFoundError(
            f"rank {snapshot.rank} does not see {str(snapshot.folder)!r}, which rank 0 has made: where states "
            "differ by rank, a checkpoint must be on a file system that all ranks share"
        )
    for name, part in snapshot.parts.items():
        write_part(snapshot.folder, name, part)


def _publish(snapshot: Snapshot, finish: Callable[[], None]) -> None:
    """Move the folder to its place, on rank 0."""
    if snapshot.rank == 0:
        publish(snapshot.folder, snapshot.place, snapshot.about, snapshot.all_parts)
        finish()


def _wait_for_parts(snapshot: Snapshot) -> None:
    """Wait for the files of all ranks, on rank 0."""
    if snapshot.rank != 0:
        return
    until = time.monotonic() + _PARTS_SECONDS
    for name in snapshot.all_parts:
        while not (snapshot.folder / f"{name}.json").exists():
            failed = snapshot.folder / f"{name}.failed"
            if failed.exists():
                raise OSError(f"{name} could not write its part: {failed.read_text()}")
            if not snapshot.folder.is_dir():
                raise FileNotFoundError(f"{str(snapshot.folder)!r} was removed while ranks wrote into it")
            if time.monotonic() > until:
                raise DeadlineExceededError(f"the part {name} did not come within {_PARTS_SECONDS:.0f} s")
            time.sleep(0.01)


def _tell_failure(snapshot: Snapshot, error: Exception) -> None:
    """Let rank 0 know, which waits for this rank's files."""
    with suppress(OSError):  # then rank 0 waits until its deadline
        (snapshot.folder / f"{part_of_rank(snapshot.rank)}.failed").write_text(text_of(error))
