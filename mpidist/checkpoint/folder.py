"""Folders of checkpoints: their manifests, atomic replacement, and retention.

A checkpoint is a folder. `manifest.json` lists its parts, one of each rank that has written: what the rank alone has,
and its share of what is equal on all ranks. A part is `rank-3.safetensors` and `rank-3.json`. The folder is written
beside its place, under a name of its own, and renamed when it is whole. The manifest has a checksum of itself and those
of the JSON files, which have those of arrays.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from numbers import Real
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from mpidist.checkpoint.folder_lock import FolderLock
from mpidist.errors import DataLossError
from mpidist.whole_number import whole_number

__all__ = [
    "MANIFEST",
    "MAX_DIGITS",
    "CheckpointFolder",
    "Retention",
    "existing",
    "make_unfinished",
    "manifest_text",
    "parse_json",
    "publish",
    "read_file",
    "read_manifest",
    "remove",
    "replaced_in",
    "sync",
    "unfinished_folders",
    "write_file",
]

logger = logging.getLogger("mpidist.checkpoint")

MANIFEST: Final = "manifest.json"
MAX_DIGITS: Final = 18  # of a number
unfinished_folders: Final[set[Path]] = set()  # which this process writes
_FORMAT: Final = {"format": "mpidist checkpoint", "version": 3}
_CHECKSUM: Final = b', "checksum": '
_FILES: Final = re.compile(r"manifest\.json|rank-\d+\.(json|safetensors)")


@final
class Retention(NamedTuple):
    """Which checkpoints stay: those that were saved last; multiples of a number of steps; and some in each few hours.

    Of those that `max_to_keep` would remove stay the first, and each that was saved so many hours after the one before
    that stays.
    """

    max_to_keep: int | None
    every_n_steps: int | None
    every_n_hours: float | None

    def require_valid(self) -> None:
        """Refuse numbers that are out of their ranges, or of no effect."""
        if self.max_to_keep is not None:
            whole_number("max_to_keep", self.max_to_keep, 1, "None for all")
        if self.every_n_steps is not None:
            whole_number("keep_every_n_steps", self.every_n_steps, 1, "None for none")
        hours = self.every_n_hours
        if hours is not None and not (isinstance(hours, Real) and hours > 0):
            raise ValueError(f"keep_checkpoint_every_n_hours must be a number above 0, or None for none, got {hours!r}")
        if self.max_to_keep is None and self != (None, None, None):
            raise ValueError(
                "max_to_keep=None keeps all checkpoints: give a number, or leave out keep_every_n_steps and "
                "keep_checkpoint_every_n_hours"
            )


@final
class CheckpointFolder:
    """The checkpoints in a folder whose names are `name-7`, or without `retention` the one whose name is `name`."""

    def __init__(self, directory: Path, name: str, retention: Retention | None = None) -> None:
        self.directory, self._name, self._retention = directory, name, retention
        number = rf"-(0|[1-9]\d{{0,{MAX_DIGITS - 1}}})" if retention is not None else ""
        self._names = re.escape(name) + number  # a regular expression

    def place(self, number: int | None) -> Path:
        """Return where a checkpoint is."""
        return self.directory / (self._name if number is None else f"{self._name}-{number}")

    def hold_lock(self) -> FolderLock:
        """Hold the lock of the folder, which is made if there is none. Raises `OSError` if another job holds it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        return FolderLock.hold(self.directory / f".{self._name}.lock")

    def clean_up(self, lock: FolderLock) -> None:
        """Put back checkpoints that were about to be replaced, and remove what killed jobs have left."""
        if not lock.is_new:
            return
        lock.remove_leftovers()
        for old, place in _find_hidden(self.directory, self._names, "old"):
            if not place.exists():
                old.rename(place)
        for folder, _ in _find_hidden(self.directory, self._names, "(new|old)"):
            if folder not in unfinished_folders:
                _try_remove(folder)
        lock.is_new = False

    def orders(self) -> dict[int, int]:
        """Return the order of the saves, by number of the checkpoint; the last save stands at the end. Local.

        The manifest says it. One that cannot be read stands behind that of the number before it; those that no manager
        has saved stand before all others, by their numbers.
        """
        pattern = re.compile(self._names)
        names = {name for name in _names_in(self.directory) if pattern.fullmatch(name)}
        names |= {place.name for _, place in _find_hidden(self.directory, self._names, "old")}
        keys, before = [], 0
        for number in sorted(_number_of(Path(name)) for name in names):
            order = _order_of(existing(self.place(number)))
            before = before if order is None else order
            keys.append((before, number))
        return {number: order for order, number in sorted(keys)}

    def choose(self, given: int | None, lock: FolderLock) -> dict[str, int]:
        """Choose number and order of the next checkpoint. Warns once of larger numbers of other runs.

        `given` is the number that the program has chosen, and `lock` the folder's lock, which this process holds.
        Raises `ValueError` if there is no larger number. Returns the fields of the manifest: none without numbers.
        """
        if self._retention is None:
            return {}
        orders = self.orders()
        hidden = _find_hidden(self.directory, self._names, "new")
        written = [_number_of(place) for folder, place in hidden if folder in unfinished_folders]
        number = max([*orders, *written], default=0) + 1 if given is None else given
        if number >= 10**MAX_DIGITS:
            raise ValueError(f"{self.directory} has no number left for {self._name}: pass one")
        larger = [other for other in orders if other > number and other not in lock.written]
        if larger and not lock.has_warned:
            lock.has_warned = True
            logger.warning(
                "mpidist: %s has a lower number than %s of another run: the last one saved is the newest, whatever its "
                "number",
                self.place(number),
                self.place(max(larger)).name,
            )
        lock.last_order = max([lock.last_order, *orders.values()]) + 1
        lock.written.add(number)
        return {"number": number, "order": lock.last_order}

    def remove_old(self, newest: int | None) -> None:
        """Remove the checkpoints that were saved first, if there are too many; never `newest`, which was saved now."""
        max_to_keep, steps, hours_apart = self._retention or (None, None, None)
        if max_to_keep is None:
            return
        numbers = list(self.orders())
        others = [number for number in numbers if number != newest and not (steps and number % steps == 0)]
        old = set(map(self.place, others[: max(len(others) + 1 - max_to_keep, 0)]))
        last_hours = -math.inf
        for place in map(self.place, numbers):
            hours = _saved_seconds(place) / 3600
            if place not in old or (hours_apart and hours - last_hours >= hours_apart):
                last_hours = hours
                continue
            if not place.is_symlink() and _others_in(place):
                continue  # no checkpoint of mpidist, or not that alone
            hidden = _hidden(place, "new")  # so that a part of the checkpoint is never taken for one
            with suppress(FileNotFoundError):  # the user has removed it
                place.rename(hidden)
            _try_remove(hidden)


def publish(folder: Path, place: Path, about: Mapping[str, Any], parts: list[str], replaces: bool) -> None:
    """Write the manifest of a folder whose `parts` are whole, and move the folder to its place.

    A checkpoint that is there is replaced if `replaces`; else that is a `FileExistsError`.
    """
    checksums = {name: zlib.crc32(read_file(folder / f"{name}.json")) for name in parts}
    write_file(folder / MANIFEST, _with_checksum(json.dumps({**_FORMAT, **about, "parts": checksums})[:-1].encode()))
    sync(folder)
    old = folder.with_suffix(".old")
    if replaces and place.exists():
        place.rename(old)
    try:
        folder.rename(place)
    except OSError as error:
        if old.exists() and not place.exists():
            old.rename(place)
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise FileExistsError(f"{str(place)!r} was made by another save meanwhile") from error
    sync(place.parent)
    if "MPIDIST_SAVED_FILE" in os.environ:  # `mpidist run --max-restarts` looks for it
        with suppress(OSError):
            Path(os.environ["MPIDIST_SAVED_FILE"]).touch()
    _try_remove(old)


def make_unfinished(place: Path) -> Path:
    """Make the folder that is to be a checkpoint, under a name that no other save has; what lies in it is never read.

    Raises `FileExistsError` if the place is a file, or a folder that holds other things.
    """
    if place.exists() and not place.is_dir():
        raise FileExistsError(f"{str(place)!r} is a file: a checkpoint is a folder; choose another path")
    others = _others_in(place)
    if others:
        raise FileExistsError(
            f"{str(place)!r} contains other files that would be replaced, such as {others[0]!r}: choose another "
            "path, such as a new folder in it"
        )
    folder = _hidden(place, "new")
    folder.mkdir()
    return folder


def existing(place: Path) -> Path:
    """Return where a checkpoint is: beside its place, if its job was killed just when the checkpoint was replaced."""
    if place.exists():
        return place
    return next((old for old, _ in _find_hidden(place.parent, re.escape(place.name), "old")), place)


def replaced_in(directory: Path) -> list[Path]:
    """Return the places in a folder whose checkpoint is beside them, as `existing` finds it."""
    return [place for _, place in _find_hidden(directory, ".+?", "old") if not place.exists()]


def remove(folder: Path) -> None:
    """Remove a folder, if it is there; of a link, the link alone."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def _number_of(place: Path) -> int:
    return int(place.name.rpartition("-")[2])


def _try_remove(folder: Path) -> None:
    """Remove a folder, if it exists and may be removed: the checkpoint is whole in both cases."""
    try:
        remove(folder)
    except OSError as error:
        logger.warning("mpidist: %s cannot be removed: %s", folder, error)


def _others_in(place: Path) -> list[str]:
    """List the entries of a folder that are no files of a checkpoint; none for a file."""
    if not place.is_dir():
        return [place.name] if place.exists() else []
    return sorted(name for name in _names_in(place) if not _FILES.fullmatch(name))


def _names_in(directory: Path) -> list[str]:
    """List the names in a folder; none if it is missing. `Path.glob` would hide that it may not be read."""
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def manifest_text(place: Path) -> bytes:
    """Return the manifest of a checkpoint as this rank reads it; empty if it finds none."""
    try:
        return (existing(place) / MANIFEST).read_bytes()
    except OSError:
        return b""


def read_manifest(place: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint; raises `DataLossError` if a part is missing or damaged."""
    path = place / MANIFEST
    if not place.exists():
        raise FileNotFoundError(f"there is no checkpoint {str(place.absolute())!r}")
    if not path.is_file():
        raise DataLossError(f"{str(place)!r} is no checkpoint of mpidist: it has no {MANIFEST}")
    text = read_file(path)
    manifest = parse_json(path, text)
    found = {key: manifest.get(key) for key in _FORMAT}
    if found != _FORMAT:
        raise DataLossError(f"{str(place)!r} is of another format: needed {_FORMAT}, got {found}")
    if text != _with_checksum(text.rpartition(_CHECKSUM)[0]):
        raise DataLossError(f"{str(path)!r} is damaged: its checksum does not match")
    return manifest


def _hidden(place: Path, ending: str) -> Path:
    """Return a new name beside a place."""
    return place.with_name(f".{place.name}.{secrets.token_hex(8)}.{ending}")


def _find_hidden(directory: Path, names: str, ending: str) -> list[tuple[Path, Path]]:
    """Find the folders named by `_hidden`, each with its place."""
    pattern = re.compile(rf"\.(?P<name>{names})\.[0-9a-f]{{16}}\.{ending}")
    found = [(name, pattern.fullmatch(name)) for name in sorted(_names_in(directory))]
    return [(directory / name, directory / match["name"]) for name, match in found if match is not None]


def _with_checksum(text: bytes) -> bytes:
    """Add the checksum of a text of JSON, whose last brace lacks."""
    return b"%s%s%d}" % (text, _CHECKSUM, zlib.crc32(text))


def write_file(path: Path, text: bytes) -> None:
    """Write a file, which is there when all of it is on the disk."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(text)
    sync(new)
    new.rename(path)


def read_file(path: Path) -> bytes:
    """Read a file of a checkpoint."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataLossError(f"{str(path)!r} is missing") from None


def parse_json(path: Path, text: bytes) -> dict[str, Any]:
    """Parse the text of a file of a checkpoint."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise DataLossError(f"{str(path)!r} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise DataLossError(f"{str(path)!r} is damaged: it is not a JSON object")
    return found


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _saved_seconds(place: Path) -> float:
    """Return when a checkpoint was saved, in seconds since 1970; 0 if its manifest is missing."""
    try:
        return (place / MANIFEST).stat().st_mtime
    except OSError:
        return 0.0


def _order_of(place: Path) -> int | None:
    """Return the order of a checkpoint's save; 0 if no manager saved it; `None` if it cannot be read."""
    try:
        about = (place / MANIFEST).stat()
        return _read_order(place, about.st_ino, about.st_mtime_ns)
    except (OSError, DataLossError):
        return None


@lru_cache(4096)
def _read_order(place: Path, inode: int, changed: int) -> int:
    """Read a manifest, unless the file has been read before."""
    order: int = read_manifest(place).get("order", 0)
    return order
