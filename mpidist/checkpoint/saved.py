"""A checkpoint that was saved: its manifest, and the states in its files."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, final

from mpidist.checkpoint.files import MANIFEST, existing, read_manifest
from mpidist.checkpoint.leaves import Owner, form_of
from mpidist.checkpoint.parts import PartFile
from mpidist.errors import DataLossError
from mpidist.transport import dtype_named

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

    @cached_property
    def keys(self) -> dict[str, tuple[str, str]]:
        """The part and the key of every state, by a name for people: `own on rank 3`."""
        found = {}
        for part in self.manifest["parts"]:
            for key in (*self.part(part).arrays, *self.part(part).values):
                is_own = self.owners.get(key) is Owner.RANK
                found[f"{key} on {part.replace('-', ' ')}" if is_own else key] = part, key
        return found

    def state(self, name: str) -> tuple[str, Any]:
        """Return what a state of `keys` is like, `float32[3, 2]`, and the state.

        Raises:
            DataLossError: If a file is missing or damaged.
        """
        part, key = self.keys[name]
        file = self.part(part)
        form = file.form(key)
        if form is None:
            return form_of(file.values[key]), file.values[key]
        return form, file.array(key, dtype_named(file.arrays[key][0]))

    def require_whole(self, reads: bool) -> None:
        """Require that all files are there; with `reads`, that every array is the one that was written.

        Raises:
            DataLossError: If a file is missing or damaged.
        """
        for name in self.keys:
            part, key = self.keys[name]
            if reads:
                self.state(name)
            elif key in self.part(part).arrays:
                self.part(part).require_there(key)

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return sum(path.stat().st_size for path in self.place.iterdir())

    @property
    def saved_at(self) -> float:
        """When the checkpoint was saved, in seconds since 1970."""
        return (self.place / MANIFEST).stat().st_mtime
