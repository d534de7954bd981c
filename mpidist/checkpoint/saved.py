"""A checkpoint that was saved: its manifest, and the states in its files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np

from mpidist.checkpoint.files import COMMON, MANIFEST, existing, read_manifest
from mpidist.checkpoint.leaves import Owner, form_of
from mpidist.checkpoint.parts import PartFile
from mpidist.errors import DataLossError
from mpidist.transport.half import dtype_named

__all__ = ["SavedCheckpoint"]


@final
class SavedCheckpoint:
    """A checkpoint that is read. Its files are opened when they are needed.

    Args:
        place: The folder.

    Attributes:
        place: The folder, or the one beside it that was to be replaced when its job was killed.
        manifest: What the manifest says.
        owners: Whose state each leaf is, by name.

    Raises:
        FileNotFoundError: If there is no such folder.
        DataLossError: If the folder is no checkpoint, or its manifest is damaged.
    """

    def __init__(self, place: Path) -> None:
        self.place = existing(place)
        self.manifest = read_manifest(self.place)
        try:
            self.owners = {name: Owner(owner) for name, owner in self.manifest["owners"].items()}
        except ValueError as error:  # of the first format, whose manifest has no checksum
            raise DataLossError(f"{str(self.place)!r} is damaged: {error}") from None
        self._parts: dict[str, PartFile] = {}

    def part(self, name: str) -> PartFile:
        """Open a part.

        Raises:
            DataLossError: If a file is missing or damaged.
        """
        if name not in self._parts:
            self._parts[name] = PartFile(self.place, name, self.manifest)
        return self._parts[name]

    @property
    def shared_parts(self) -> list[str]:
        """The parts that have what is equal on all ranks."""
        return list(self.manifest.get("shared", [COMMON]))

    @cached_property
    def keys(self) -> dict[str, tuple[str, list[str]]]:
        """The key and the parts of every state, by a name for people: `own on rank 3`."""
        found: dict[str, tuple[str, list[str]]] = {}
        for part in self.manifest["parts"]:
            for key in (*self.part(part).arrays, *self.part(part).values):
                is_own = self.owners.get(key) is Owner.RANK
                found.setdefault(f"{key} on {part.replace('-', ' ')}" if is_own else key, (key, []))[1].append(part)
        return found

    def form(self, key: str, parts: Sequence[str]) -> str:
        """Return what a state is like: `float32[3, 2]`.

        Raises:
            DataLossError: If none of the parts has it, or a file is damaged.
        """
        file = self._files_with(key, parts)[0]
        return form_of(file.values[key]) if key in file.values else str(file.form(key))

    def state(self, key: str, parts: Sequence[str]) -> Any:
        """Read a state; its pieces, if parts have them.

        Raises:
            DataLossError: If a file is missing or damaged.
        """
        files = self._files_with(key, parts)
        if key in files[0].values:
            return files[0].values[key]
        name, shape, *_ = files[0].arrays[key]
        whole = np.empty(shape, dtype_named(name))
        for part, begin, end in self.pieces(key, parts):
            whole.reshape(-1)[begin:end] = self.part(part).array(key).reshape(-1)
        return whole

    def pieces(self, key: str, parts: Sequence[str]) -> list[tuple[str, int, int]]:
        """Return which parts have which elements of an array, in their order. No array is read.

        Raises:
            DataLossError: If elements are in none of the parts, or a file is missing or damaged.
        """
        size = math.prod(self._files_with(key, parts)[0].arrays[key][1])
        about = {part: self.part(part).arrays.get(key) for part in parts}
        found = [(part, *(one[3:] or (0, size))) for part, one in about.items() if one is not None]
        found.sort(key=lambda piece: piece[1:])
        if [begin for _, begin, _ in found] + [size] != [0] + [end for _, _, end in found]:
            raise DataLossError(f"{str(self.place)!r} is damaged: it has not all of {key}")
        return found

    def _files_with(self, key: str, parts: Sequence[str]) -> list[PartFile]:
        files = [file for file in map(self.part, parts) if key in file.arrays or key in file.values]
        if not files:
            raise DataLossError(f"{str(self.place)!r} is damaged: it does not have {key}")
        return files

    def require_whole(self, reads: bool) -> None:
        """Require that all files are there, and none is cut; with `reads`, that every array is what was written.

        Raises:
            DataLossError: If a file is missing or damaged.
        """
        for key, parts in self.keys.values():
            for file in self._files_with(key, parts):
                if reads and key in file.arrays:
                    file.array(key)

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return sum(path.stat().st_size for path in self.place.iterdir())

    @property
    def saved_at(self) -> float:
        """When the checkpoint was saved, in seconds since 1970."""
        return (self.place / MANIFEST).stat().st_mtime
