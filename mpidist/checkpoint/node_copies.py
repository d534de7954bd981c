"""The newest checkpoint in the memory of nodes: each keeps the parts of its own ranks, and of those of the node before.

A job that is started again without one of its nodes finds all parts on those that are left. The manifest in the file
system says which parts they are; all else is read from memory, and what a node lacks is sent to it.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import sys
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from mpidist.checkpoint.folder import MANIFEST, existing, manifest_text, read_manifest
from mpidist.checkpoint.parts import part_of_rank
from mpidist.checkpoint.restoring import ADVICE, CALL
from mpidist.checkpoint.saving import Save
from mpidist.collectives.broadcast import broadcast
from mpidist.collectives.object_calls import broadcast_object
from mpidist.strategy_parts import StrategyParts
from mpidist.transport.mpi.shared_files import SHARED_MEMORY

__all__ = ["NodeCopies"]

logger = logging.getLogger("mpidist.checkpoint")

_ENDINGS: Final = ("safetensors", "json")  # the text of JSON last: it says that the part is whole
_IN_USE: Final = "in-use"  # a file that ranks lock as long as they use the folder, and that `mpidist doctor` looks at
_CHUNK_BYTES: Final = 64 << 20

_Sizes = dict[str, tuple[int, int]]  # of the two files of each part, by its name


@final
class NodeCopies:
    """This node's copies of the parts of the newest checkpoint, in shared memory until the strategy is closed.

    `directory` is that of the checkpoints, as an absolute path, and `name` how their names begin.
    """

    def __init__(self, parts: StrategyParts, directory: Path, name: str) -> None:
        group, self._parts = parts.group, parts
        pretended, label = group.settings.pretend_nodes, ""
        if pretended is not None and group.membership is not None:
            label = str(pretended[group.membership.world_rank])
        text = os.fsencode(f"{os.getuid()}\0{directory}\0{name}\0{label}")
        self._folder = Path(SHARED_MEMORY) / f"mpidist-copies-{hashlib.sha256(text).hexdigest()[:16]}"
        self._in_use: int | None = None
        self._has_warned = self._is_over = self._ends_well = False
        atexit.register(self.remove)
        parts.at_close.append(self.remove)

    def keep(self, save: Save) -> None:
        """Copy this rank's share of the parts, once the checkpoint is in its place. Local; warns once if it cannot.

        A rank copies its own part, and some of the ranks of the node before. Earlier copies are forgotten.
        """
        topology = self._parts.group.topology
        ranks = {topology.rank, *topology.nodes[topology.node - 1][topology.local_rank :: topology.local_size]}
        names = {part_of_rank(rank) for rank in ranks}.intersection(save.all_parts)
        files = [f"{name}.{ending}" for name in sorted(names) for ending in _ENDINGS]
        into = self._folder / save.folder.name.removeprefix(".")

        def copy() -> None:
            self._make(into)
            for other in self._folder.glob("*.new"):
                if other != into:
                    shutil.rmtree(other, ignore_errors=True)
            self._make(into, sum((save.place / file).stat().st_size for file in files))
            for file in files:
                shutil.copyfile(save.place / file, into / f"{file}.new")
                (into / f"{file}.new").rename(into / file)

        self._tried(into, copy)
        if self._is_over:  # the strategy was closed while a thread copied
            self.remove()

    def complete(self, place: Path) -> Path | None:
        """Complete each node's copies of all parts of a checkpoint. Collective: some small rounds, and the parts.

        Returns the folder of the copies, a checkpoint of its own; `None` if a part is on no node, or there is no room.
        """
        parts, topology = self._parts, self._parts.group.topology
        manifest: tuple[bytes, dict[str, int]] = b"", {}  # if it is not whole, as `restore` says
        with suppress(OSError):
            if topology.rank == 0:
                manifest = manifest_text(place), read_manifest(existing(place))["parts"]
        text, names = broadcast_object(parts.group, manifest, 0, True, parts.options, CALL)
        found = parts.on_each_rank(CALL, ADVICE, lambda: self._find(names) if topology.is_leader else None)
        of_nodes = [found[ranks[0]] for ranks in topology.nodes]
        sizes: _Sizes = {name: size for _, here in of_nodes for name, size in here.items()}
        if not names or sizes.keys() != names.keys():
            return None
        folder, here = of_nodes[topology.node]
        lacking = {name: size for name, size in sizes.items() if name not in here} if topology.is_leader else {}

        if not self._all_tried(folder, lambda: self._make(folder, sum(map(sum, lacking.values())))):
            return None
        for name, size in sizes.items():
            owners = [ranks[0] for ranks, (_, here) in zip(topology.nodes, of_nodes, strict=True) if name in here]
            if len(owners) < topology.num_nodes:
                for ending, nbytes in zip(_ENDINGS, size, strict=True):
                    self._send(folder / f"{name}.{ending}", nbytes, owners[0], name in lacking)
        return folder if self._all_tried(folder, lambda: (folder / MANIFEST).write_bytes(text)) else None

    def remove(self) -> None:
        """Remove the copies if this job ends well: else it may start again. The last rank of a node does it. Local."""
        if not self._is_over:
            self._is_over = True
            ends_well = sys.exc_info()[0] is None and not hasattr(sys, "last_type")
            self._ends_well = ends_well and self._parts.group.agreement.broken is None
        in_use, self._in_use = self._in_use, None
        if in_use is None:
            return
        if self._ends_well:
            with suppress(OSError):
                fcntl.flock(in_use, fcntl.LOCK_UN)  # of two ranks that both held it, none could have it alone
                fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(self._folder)
        os.close(in_use)

    def _send(self, file: Path, nbytes: int, root: int, is_written: bool) -> None:
        """Send a file to all ranks, of which some write it. Collective."""
        parts = self._parts
        for begin in range(0, nbytes, _CHUNK_BYTES):
            data = np.zeros(min(_CHUNK_BYTES, nbytes - begin), np.uint8)  # what cannot be read has another checksum
            if parts.group.topology.rank == root:
                with suppress(OSError), file.open("rb") as source:
                    source.seek(begin)
                    source.readinto(data.data)
            broadcast(parts.group, CALL, data, "all", parts.options, root=root, out=data)
            if is_written:
                with suppress(OSError), file.open("ab" if begin else "wb") as into:  # then its size is another one
                    into.write(data.data)

    def _make(self, folder: Path, nbytes: int = 0) -> None:
        """Make a folder of copies; refuse to take more than half of the free memory.

        This memory is also that of MPI, and of other programs.
        """
        if self._is_over:
            raise FileNotFoundError("the strategy is closed")
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if not self._is_own():
            raise PermissionError(f"{str(self._folder)!r} is another user's")
        if self._in_use is None:
            self._in_use = os.open(self._folder / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._in_use, fcntl.LOCK_SH)
        free = shutil.disk_usage(self._folder).free
        if 2 * nbytes > free:
            raise OSError(errno.ENOSPC, f"{nbytes} bytes are needed, and {free} are free", str(self._folder))
        with suppress(FileExistsError):  # `exist_ok` fails if another rank, which lacks room, removes it meanwhile
            folder.mkdir()

    def _is_own(self) -> bool:
        """Whether the folder is there, and of this user: anybody could have made one of this name."""
        with suppress(OSError):
            about = self._folder.lstat()
            return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()
        return False

    def _find(self, names: Mapping[str, int]) -> tuple[Path, _Sizes]:
        """Find the folder that has most of the parts whose texts have these checksums; and the sizes of its files."""
        best: tuple[Path, _Sizes] = (self._folder / "sent.new", {})
        for folder in self._folder.glob("*.new") if self._is_own() else ():
            found: _Sizes = {}
            for name, checksum in names.items():
                first, last = (folder / f"{name}.{ending}" for ending in _ENDINGS)
                with suppress(OSError):  # mostly there is none
                    if zlib.crc32(last.read_bytes()) == checksum:
                        found[name] = first.stat().st_size, last.stat().st_size
            best = (folder, found) if len(found) > len(best[1]) else best
        return best

    def _tried(self, folder: Path, work: Callable[[], Any]) -> bool:
        """Do work on a folder. If it fails, leave the memory to others, which may need it, and warn once."""
        try:
            work()
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            if self._parts.group.topology.is_leader and not (self._has_warned or self._is_over):
                self._has_warned = True
                node = self._parts.group.topology.node_name
                logger.warning("mpidist: %s keeps no copies of the checkpoint in memory: %s", node, error)
            return False
        return True

    def _all_tried(self, folder: Path, work: Callable[[], Any]) -> bool:
        """Do work on the first rank of each node. Collective; returns whether all of them succeeded."""
        is_leader = self._parts.group.topology.is_leader
        return all(self._parts.on_each_rank(CALL, ADVICE, lambda: not is_leader or self._tried(folder, work)))
