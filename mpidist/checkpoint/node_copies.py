"""The newest checkpoint in the memory of nodes: each keeps the parts of its own ranks, and of those of the node before.

A job that is started again without one of its nodes finds all parts on those that are left. The manifest in the file
system says which parts they are; all else is read from memory, and what a node lacks is sent to it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from mpidist.checkpoint.background import FAILED
from mpidist.checkpoint.files import MANIFEST, existing, read_manifest
from mpidist.checkpoint.parts import part_of_rank
from mpidist.checkpoint.restoring import ADVICE, CALL
from mpidist.checkpoint.saving import Snapshot
from mpidist.collectives.broadcast import broadcast
from mpidist.errors import DataLossError
from mpidist.strategy_parts import StrategyParts
from mpidist.transport.mpi.shared_files import SHARED_MEMORY

__all__ = ["NodeCopies"]

logger = logging.getLogger("mpidist.checkpoint")

_ENDINGS: Final = ("safetensors", "json")  # the text of JSON last: it says that the part is whole
_IN_USE: Final = "in-use"  # a file that ranks keep open, so that `mpidist doctor --clean` leaves the folder

_Sizes = dict[str, tuple[int, int]]  # of the two files of each part, by its name


@final
class NodeCopies:
    """This node's copies of the parts of the newest checkpoint, in a folder of its shared memory.

    Args:
        parts: The strategy's.
        directory: The folder of the checkpoints, as an absolute path.
        name: How the names of the checkpoints begin.
    """

    def __init__(self, parts: StrategyParts, directory: Path, name: str) -> None:
        group, self._parts = parts.group, parts
        pretended, label = group.settings.pretend_nodes, ""
        if pretended is not None and group.membership is not None:
            label = str(pretended[group.membership.world_rank])
        digest = hashlib.sha256(f"{directory}\0{name}\0{label}".encode()).hexdigest()[:16]
        self._folder = Path(SHARED_MEMORY) / f"mpidist-copies-{digest}"
        self._in_use: int | None = None
        self._has_warned = False

    def keep(self, snapshot: Snapshot) -> None:
        """Copy this rank's share of the parts, and forget earlier ones. Local; warns once if it cannot.

        A rank copies its own part, and some of the ranks of the node before, as soon as these are written.
        """
        topology = self._parts.group.topology
        ranks = {topology.rank, *topology.nodes[topology.node - 1][topology.local_rank :: topology.local_size]}
        try:
            into = self._folder / snapshot.folder.name.removeprefix(".")
            self._make(into)
            for name in {part_of_rank(rank) for rank in ranks}.intersection(snapshot.all_parts):
                _wait_for(name, snapshot)
                for ending in _ENDINGS:
                    _copy(f"{name}.{ending}", snapshot, into)
        except OSError as error:
            self._warn(error)

    def complete(self, place: Path) -> Path | None:
        """Let each node have copies of all parts of a checkpoint. Collective: three small rounds, and the parts.

        Returns:
            The folder of the copies, a checkpoint of its own; `None` if a part is on no node, or there is no room.
        """
        parts = self._parts
        text, names = parts.on_rank_0(CALL, ADVICE, lambda: _manifest(place))
        folder, found = self._find(names)
        everyone = parts.on_each_rank(CALL, ADVICE, lambda: found)
        topology, error = parts.group.topology, None
        of_nodes = [everyone[ranks[0]] for ranks in topology.nodes]
        if not names or any(all(name not in here for here in of_nodes) for name in names):
            return None
        for name in names:
            root = next(ranks[0] for ranks, here in zip(topology.nodes, of_nodes, strict=True) if name in here)
            if all(name in here for here in of_nodes):
                continue
            for ending, nbytes in zip(_ENDINGS, everyone[root][name], strict=True):
                file = folder / f"{name}.{ending}"
                own = _bytes(file, nbytes) if topology.rank == root else np.empty(nbytes, np.uint8)
                sent = broadcast(parts.group, CALL, own, "all", parts.options, root=root)
                error = self._write(file, sent) if topology.is_leader and name not in found and not error else error
        if topology.is_leader:
            error = error or self._write(folder / MANIFEST, np.frombuffer(text, np.uint8))
        has_all = all(parts.on_each_rank(CALL, ADVICE, lambda: error is None))
        return folder if has_all else None

    def remove(self) -> None:
        """Remove the copies, if the job ends well: else it may be started again. Local."""
        if sys.exc_info()[0] is None and self._parts.group.agreement.broken is None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._in_use is not None:
            os.close(self._in_use)
            self._in_use = None

    def _make(self, into: Path) -> None:
        """Make a folder of copies, and remove the others."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if self._folder.is_symlink() or self._folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{str(self._folder)!r} is another user's")
        if self._in_use is None:
            self._in_use = os.open(self._folder / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        for other in self._folder.iterdir():
            if other.is_dir() and other != into:
                shutil.rmtree(other, ignore_errors=True)
        into.mkdir(exist_ok=True)

    def _find(self, names: Mapping[str, int]) -> tuple[Path, _Sizes]:
        """Find the folder that has most of the parts whose texts have these checksums; and the sizes of its files."""
        best: tuple[Path, _Sizes] = (self._folder / "sent", {})
        for folder in self._folder.glob("*/"):
            found: _Sizes = {}
            for name, checksum in names.items():
                files = [folder / f"{name}.{ending}" for ending in _ENDINGS]
                with suppress(FileNotFoundError):
                    if zlib.crc32(files[-1].read_bytes()) == checksum:
                        found[name] = files[0].stat().st_size, files[1].stat().st_size
            best = (folder, found) if len(found) > len(best[1]) else best
        return best

    def _write(self, file: Path, data: Any) -> OSError | None:
        try:
            self._make(file.parent)
            file.write_bytes(data)
        except OSError as error:
            self._warn(error)
            return error
        return None

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("mpidist: no copies of the checkpoint are kept in the memory of this node: %s", error)


def _copy(file: str, snapshot: Snapshot, into: Path) -> None:
    """Copy a file of a part, which the folder has until it is moved to its place."""
    for folder in (snapshot.folder, snapshot.place):
        with suppress(FileNotFoundError):
            shutil.copyfile(folder / file, into / f"{file}.new")
            (into / f"{file}.new").rename(into / file)
            return
    raise FileNotFoundError(f"{str(snapshot.place / file)!r} is gone")


def _wait_for(name: str, snapshot: Snapshot) -> None:
    """Wait until another rank has written its part."""
    until = time.monotonic() + snapshot.limit_seconds
    while snapshot.folder.is_dir() and not (snapshot.folder / f"{name}.json").exists():
        if time.monotonic() > until or any(snapshot.folder.glob(f"*{FAILED}")):
            raise TimeoutError(f"{name} was not written to {str(snapshot.folder)!r}")
        time.sleep(0.01)


def _manifest(place: Path) -> tuple[bytes, dict[str, int]]:
    """Read the manifest, and which checksums the texts of parts have; nothing if it is not whole, as `restore` says."""
    try:
        return (existing(place) / MANIFEST).read_bytes(), read_manifest(existing(place))["parts"]
    except (OSError, DataLossError):
        return b"", {}


def _bytes(file: Path, nbytes: int) -> Any:
    """Read a file; what cannot be read is sent as zeros, which have another checksum."""
    with suppress(OSError):
        data = np.fromfile(file, np.uint8)
        if data.size == nbytes:
            return data
    return np.zeros(nbytes, np.uint8)
