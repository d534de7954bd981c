"""The folder of a checkpoint, its manifest, and how it comes to its place.

A checkpoint is a folder. `manifest.json` lists its parts, one of each rank that has written: what the rank alone has,
and its share of what is equal on all ranks. A part is `rank-3.safetensors` and `rank-3.json`. The folder is written
beside its place, under a name of its own, and renamed when it is whole. The manifest has a checksum of itself and those
of the JSON files, which have those of arrays.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from mpidist.errors import DataLossError

__all__ = [
    "COMMON",
    "MANIFEST",
    "clean_up",
    "existing",
    "find",
    "make_unfinished",
    "parse_json",
    "publish",
    "read_file",
    "read_manifest",
    "remove",
    "sync",
    "withdraw",
    "write_file",
]

COMMON: Final = "all"  # the part of what is equal on all ranks, in earlier formats
MANIFEST: Final = "manifest.json"
_FORMAT: Final = {"format": "mpidist checkpoint", "version": 3}
_SECOND_FORMAT: Final = {**_FORMAT, "version": 2}  # what is equal on all ranks is in one part
_FIRST_FORMAT: Final = {**_FORMAT, "version": 1}  # its manifest has no checksum either, nor says which save it was
_CHECKSUM: Final = b', "checksum": '
_ABOUT: Final = {"ranks": int, "replicas": int, "owners": dict, "parts": dict}  # what a manifest says besides
_FILES: Final = re.compile(r"manifest\.json|(all|rank-\d+)\.(json|safetensors)")


def publish(folder: Path, place: Path, about: Mapping[str, Any], parts: list[str], replaces: bool) -> None:
    """Write the manifest of a folder whose parts are whole, and move the folder to its place.

    Args:
        folder: The folder.
        place: Its place.
        about: What the manifest says.
        parts: The names of the parts.
        replaces: Whether a checkpoint that is there is replaced.

    Raises:
        DataLossError: If a part is not there.
        FileExistsError: If there is something in the place, and is not to be replaced.
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
    remove(old)


def make_unfinished(place: Path) -> Path:
    """Make the folder that is to be a checkpoint, under a name that no other save has; what lies in it is never read.

    Args:
        place: The place of the checkpoint.

    Raises:
        FileExistsError: If the place is a file, or a folder that holds other things.
    """
    _require_replaceable(place)
    folder = _hidden(place, "new")
    folder.mkdir()
    return folder


def existing(place: Path) -> Path:
    """Return where a checkpoint is: beside its place, if its job was killed just when the checkpoint was replaced."""
    if place.exists():
        return place
    return next((old for old, _ in _find_hidden(place.parent, re.escape(place.name), "old")), place)


def find(directory: Path, names: str) -> set[str]:
    """Return the names of the checkpoints in a folder, if there is one, that match a regular expression."""
    pattern = re.compile(names)
    found = {path.name for path in directory.glob("*") if pattern.fullmatch(path.name)}
    return found | {place.name for _, place in _find_hidden(directory, names, "old")}


def clean_up(directory: Path, names: str, but: Collection[Path]) -> None:
    """Put back checkpoints that were about to be replaced, and remove what killed jobs have left. Under a lock.

    Args:
        directory: The folder of the checkpoints.
        names: Their names: a regular expression.
        but: What is being written.
    """
    for old, place in _find_hidden(directory, names, "old"):
        if not place.exists():
            old.rename(place)
    for folder, _ in _find_hidden(directory, names, "(new|old)"):
        if folder not in but:
            remove(folder)


def withdraw(place: Path) -> None:
    """Remove a checkpoint at once, so that a part of it is never taken for one."""
    hidden = _hidden(place, "new")
    with suppress(FileNotFoundError):  # the user has removed it
        place.rename(hidden)
    remove(hidden)


def remove(folder: Path) -> None:
    """Remove a folder, if it is there; of a link, the link alone."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def _require_replaceable(place: Path) -> None:
    """Require that a checkpoint replaces nothing but a checkpoint, whole or damaged.

    Raises:
        FileExistsError: If the place is a file, or a folder that holds other things.
    """
    if not place.exists():
        return
    if not place.is_dir():
        raise FileExistsError(f"{str(place)!r} is a file: a checkpoint is a folder; choose another path")
    others = sorted(one.name for one in place.iterdir() if not _FILES.fullmatch(one.name))
    if others:
        raise FileExistsError(
            f"{str(place)!r} holds what is no checkpoint, such as {others[0]!r}, and would be replaced: choose another "
            "path, such as a new folder in it"
        )


def read_manifest(place: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint.

    Raises:
        FileNotFoundError: If there is no such folder.
        DataLossError: If the folder is no checkpoint, or not whole.
    """
    path = place / MANIFEST
    if not place.exists():
        raise FileNotFoundError(f"there is no checkpoint {str(place.absolute())!r}")
    if not path.is_file():
        raise DataLossError(f"{str(place)!r} is no checkpoint of mpidist: it has no {MANIFEST}")
    text = read_file(path)
    manifest = parse_json(path, text)
    found = {key: manifest.get(key) for key in _FORMAT}
    if found not in (_FORMAT, _SECOND_FORMAT, _FIRST_FORMAT):
        raise DataLossError(f"{str(place)!r} is of another format: needed {_FORMAT}, got {found}")
    if found != _FIRST_FORMAT and text != _with_checksum(text.rpartition(_CHECKSUM)[0]):
        raise DataLossError(f"{str(path)!r} is damaged: it has another checksum than it says")
    lacking = [name for name, kind in _ABOUT.items() if not isinstance(manifest.get(name), kind)]
    if lacking:
        raise DataLossError(f"{str(path)!r} is damaged: it does not say {', '.join(lacking)}")
    return manifest


def _hidden(place: Path, ending: str) -> Path:
    """Return a new name beside a place."""
    return place.with_name(f".{place.name}.{secrets.token_hex(8)}.{ending}")


def _find_hidden(directory: Path, names: str, ending: str) -> list[tuple[Path, Path]]:
    """Find what `_hidden` has named, each with its place. Earlier versions used no random part."""
    pattern = re.compile(rf"\.(?P<name>{names})(\.[0-9a-f]{{16}})?\.{ending}")
    found = [(path, pattern.fullmatch(path.name)) for path in sorted(directory.glob(".*"))]
    return [(path, path.with_name(match["name"])) for path, match in found if match is not None]


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
    """Understand the text of a file of a checkpoint."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise DataLossError(f"{str(path)!r} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise DataLossError(f"{str(path)!r} is damaged: it holds no table")
    return found


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
