"""The files of a checkpoint: arrays in safetensors files, and beside each a JSON file that describes them.

A checkpoint is a folder. `manifest.json` lists its parts: `all`, which one rank writes, and `rank-3`, what only rank 3
has. A part is `all.safetensors` and `all.json`. The folder is written beside its place, and renamed when it is whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, Final, NamedTuple, final

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mpidist.errors import DataLossError
from mpidist.transport import bytes_of

__all__ = [
    "COMMON",
    "Part",
    "PartFile",
    "part_of_rank",
    "publish",
    "read_manifest",
    "recover",
    "recover_all",
    "remove",
    "remove_leftovers",
    "require_replaceable",
    "unfinished",
    "withdraw",
    "write_part",
]

Array = np.ndarray[Any, Any]

COMMON: Final = "all"
_FORMAT: Final = {"format": "mpidist checkpoint", "version": 1}
_MANIFEST: Final = "manifest.json"
_ABOUT: Final = {"ranks": int, "replicas": int, "owners": dict, "parts": dict}  # what a manifest says besides
_FILES: Final = re.compile(r"manifest\.json|(all|rank-\d+)\.(json|safetensors)")
_KNOWN: Final = frozenset(  # dtypes that a safetensors file names; others are written as their bytes
    ["bool", "int8", "uint8", "int16", "uint16", "float16", "int32", "uint32", "float32", "int64", "uint64", "float64"]
)


@final
class Part(NamedTuple):
    """What one rank writes.

    Attributes:
        arrays: Arrays by name.
        values: What JSON can hold, by name.
    """

    arrays: dict[str, Array]
    values: dict[str, Any]

    def put(self, name: str, state: Any) -> None:
        """Add a state: an array, or what JSON can hold."""
        if isinstance(state, np.ndarray):
            self.arrays[name] = state
        else:
            self.values[name] = state


def part_of_rank(rank: int) -> str:
    """Name the part of what only one rank has."""
    return f"rank-{rank}"


def write_part(folder: Path, name: str, part: Part) -> None:
    """Write a part into a folder, and wait until it is on the disk. Its JSON file is there when all of it is."""
    plain = {key: np.ascontiguousarray(array).reshape(array.shape) for key, array in part.arrays.items()}
    file = folder / f"{name}.safetensors"
    checksums: Future[list[int]] = Future()

    def add() -> None:
        try:
            checksums.set_result(list(map(_checksum, plain.values())))
        except BaseException as error:
            checksums.set_exception(error)

    # While the disk writes. No pool of threads, which takes no more work once the program has come to its end.
    Thread(target=add, name="mpidist.checksums").start()
    try:
        save_file({key: one if one.dtype.name in _KNOWN else bytes_of(one) for key, one in plain.items()}, file)
        file.chmod(folder.stat().st_mode & 0o666)  # `save_file` makes it for its owner alone
        _sync(file)
    except SafetensorError as error:
        raise OSError(f"{str(file)!r} cannot be written: {error}") from error
    finally:
        wait([checksums])
    about = {
        key: [array.dtype.name, list(array.shape), checksum]
        for (key, array), checksum in zip(plain.items(), checksums.result(), strict=True)
    }
    _write_json(folder / f"{name}.json", {"arrays": about, "values": part.values})


def publish(folder: Path, place: Path, about: Mapping[str, Any], parts: list[str]) -> None:
    """Write the manifest of a folder whose parts are whole, and move the folder to its place.

    Args:
        folder: The folder.
        place: Its place. A checkpoint that is there is replaced.
        about: What the manifest says.
        parts: The names of the parts.

    Raises:
        DataLossError: If a part is not there.
    """
    checksums = {name: zlib.crc32(_read_file(folder / f"{name}.json")) for name in parts}
    _write_json(folder / _MANIFEST, {**_FORMAT, **about, "parts": checksums})
    old = _replaced(place)
    if place.exists():
        remove(old)
        place.rename(old)
    _sync(folder)
    folder.rename(place)
    _sync(place.parent)
    remove(old)


def unfinished(place: Path) -> Path:
    """Name the folder that is to be a checkpoint, or was one: what lies there is never read."""
    return place.with_name(f".{place.name}.new")


def recover(place: Path) -> None:
    """Move a checkpoint back whose job was killed just when the checkpoint was replaced."""
    if not place.exists() and _replaced(place).exists():
        _replaced(place).rename(place)


def recover_all(directory: Path, name: str) -> None:
    """Do so for all numbered checkpoints with a name in a folder, if there is such a folder."""
    for old in _hidden(directory, name, "old"):
        recover(_place_of(old))


def remove_leftovers(directory: Path, name: str, but: Collection[Path]) -> None:
    """Remove what jobs that were killed while they saved have left of numbered checkpoints with a name.

    Args:
        directory: The folder of the checkpoints.
        name: How their names begin.
        but: What is being written.
    """
    recover_all(directory, name)
    for folder in (*_hidden(directory, name, "new"), *_hidden(directory, name, "old")):
        if folder not in but:
            remove(folder)


def withdraw(place: Path) -> None:
    """Remove a checkpoint at once, so that a part of it is never taken for one."""
    remove(unfinished(place))
    with suppress(FileNotFoundError):  # another job of the same folder has removed it
        place.rename(unfinished(place))
    remove(unfinished(place))


def remove(folder: Path) -> None:
    """Remove a folder, if it is there; of a link, the link alone."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def require_replaceable(place: Path) -> None:
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
    if not place.exists():
        raise FileNotFoundError(f"there is no checkpoint {str(place)!r}")
    if not (place / _MANIFEST).is_file():
        raise DataLossError(f"{str(place)!r} is no checkpoint of mpidist: it has no {_MANIFEST}")
    manifest = _parse(place / _MANIFEST, _read_file(place / _MANIFEST))
    found = {key: manifest.get(key) for key in _FORMAT}
    if found != _FORMAT:
        raise DataLossError(f"{str(place)!r} is of another format: needed {_FORMAT}, got {found}")
    lacking = [name for name, kind in _ABOUT.items() if not isinstance(manifest.get(name), kind)]
    if lacking:
        raise DataLossError(f"{str(place / _MANIFEST)!r} is damaged: it does not say {', '.join(lacking)}")
    return manifest


@final
class PartFile:
    """A part that is read.

    Args:
        place: The folder of the checkpoint.
        name: The name of the part.
        manifest: The manifest of the checkpoint.

    Attributes:
        values: As in `Part`.

    Raises:
        DataLossError: If a file is missing, or is not the one that was written.
        OSError: If a file cannot be read for another reason.
    """

    def __init__(self, place: Path, name: str, manifest: Mapping[str, Any]) -> None:
        text = _read_file(place / f"{name}.json")
        if zlib.crc32(text) != manifest["parts"].get(name):
            raise DataLossError(f"{place / name!s}.json is damaged: its checksum is not that of the manifest")
        about = _parse(place / f"{name}.json", text)
        self.values: dict[str, Any] = about["values"]
        self._about: dict[str, Any] = about["arrays"]
        self._path = place / f"{name}.safetensors"
        _require_readable(self._path)
        try:
            self._file = safe_open(self._path, framework="numpy")
        except (OSError, SafetensorError) as error:
            raise DataLossError(f"{str(self._path)!r} is missing or damaged: {error}") from None

    def form(self, key: str) -> str | None:
        """Return dtype and shape of an array, `float32[3, 2]`; `None` if there is no such array."""
        about = self._about.get(key)
        return None if about is None else f"{about[0]}{about[1]}"

    def array(self, key: str, dtype: np.dtype[Any]) -> Array:
        """Read an array, whose dtype has the name that `form` returns, and compare its checksum."""
        _, shape, checksum = self._about[key]
        try:
            array: Array = self._file.get_tensor(key)  # type: ignore[no-untyped-call]
        except (OSError, SafetensorError) as error:
            raise DataLossError(f"{key} in {str(self._path)!r} is missing or damaged: {error}") from None
        if _checksum(array) != checksum:
            raise DataLossError(f"{key} in {str(self._path)!r} is damaged: another checksum was written")
        return array if array.dtype == dtype else array.view(dtype).reshape(shape)


def _checksum(array: Array) -> int:
    return zlib.crc32(bytes_of(array).data) if array.size else 0


def _replaced(place: Path) -> Path:
    return place.with_name(f".{place.name}.old")


def _hidden(directory: Path, name: str, ending: str) -> list[Path]:
    """Find the folders that are not at their place, or not any more."""
    pattern = re.compile(rf"\.{re.escape(name)}-\d+\.{ending}")
    return [path for path in directory.glob(f".*.{ending}") if pattern.fullmatch(path.name)]


def _place_of(hidden: Path) -> Path:
    return hidden.with_name(hidden.stem.removeprefix("."))


def _write_json(path: Path, item: Any) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(item))
    _sync(new)
    new.rename(path)


def _require_readable(path: Path) -> None:
    """Raise what the system says of a file: `safe_open` calls one missing that it may not read."""
    try:
        path.open("rb").close()
    except FileNotFoundError as error:
        raise DataLossError(f"{str(path)!r} is missing or damaged: {error}") from None


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataLossError(f"{str(path)!r} is missing") from None


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise DataLossError(f"{str(path)!r} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise DataLossError(f"{str(path)!r} is damaged: it holds no table")
    return found


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
