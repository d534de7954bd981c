"""The parts of a checkpoint: what one rank writes, arrays in a safetensors file, and what they are in a JSON file."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy as np
from safetensors import SafetensorError, safe_open

from mpidist.checkpoint.files import parse_json, read_file, sync, write_file
from mpidist.checksums import checksum
from mpidist.errors import DataLossError
from mpidist.transport.arrays import bytes_of
from mpidist.transport.half import dtype_named

__all__ = ["Part", "PartFile", "part_of_rank", "write_part"]

Array = np.ndarray[Any, Any]

_LENGTH_BYTES: Final = 8  # at the begin of a safetensors file: the length of its header
_KNOWN: Final = frozenset(  # dtypes that a safetensors file names; others are written as their bytes
    ["bool", "int8", "uint8", "int16", "uint16", "float16", "int32", "uint32", "float32", "int64", "uint64", "float64"]
)


@final
class Part(NamedTuple):
    """What one rank writes.

    Attributes:
        arrays: Arrays by name, whole or flat pieces.
        values: What JSON can hold, by name.
        pieces: Of each piece the shape of the whole, its first element, and the one behind its last.
    """

    arrays: dict[str, Array]
    values: dict[str, Any]
    pieces: dict[str, tuple[list[int], int, int]]

    def put(self, name: str, state: Any) -> None:
        """Add a state: an array, or what JSON can hold."""
        (self.arrays if isinstance(state, np.ndarray) else self.values)[name] = state

    def put_piece(self, name: str, state: Array, begin: int, end: int) -> None:
        """Add some elements of an array."""
        self.arrays[name] = state.reshape(-1)[begin:end]
        self.pieces[name] = list(state.shape), begin, end


def part_of_rank(rank: int) -> str:
    """Name the part of a rank."""
    return f"rank-{rank}"


def write_part(folder: Path, name: str, part: Part) -> None:
    """Write a part into a folder, and wait until it is on the disk. Its JSON file is there when all of it is.

    Arrays are written from their own memory, and the GIL is released meanwhile.
    """
    file, about = folder / f"{name}.safetensors", {}
    arrays = dict(sorted(part.arrays.items(), key=lambda item: -item[1].itemsize))  # so each begins at a whole element
    try:
        with file.open("wb") as out:
            out.write(_header(arrays))
            for key, array in arrays.items():
                plain = np.ascontiguousarray(array)
                out.write(bytes_of(plain).data)
                shape, *bounds = part.pieces.get(key, (list(array.shape),))
                about[key] = [array.dtype.name, shape, checksum(plain), *bounds]
        sync(file)
    except OSError as error:
        failure = type(error)(f"{str(file)!r} cannot be written: {error}")
        failure.errno = error.errno
        raise failure from error
    write_file(folder / f"{name}.json", json.dumps({"arrays": about, "values": part.values}).encode())


def _header(arrays: Mapping[str, Array]) -> bytes:
    """Return how a safetensors file begins: the length of a text of JSON, and the text, which says where arrays are."""
    head, end = {}, 0
    for key, array in arrays.items():
        begin, end, kind = end, end + array.nbytes, array.dtype.kind
        code = "BOOL" if kind == "b" else f"{kind.upper()}{8 * array.itemsize}"
        dtype, shape = (code, array.shape) if array.dtype.name in _KNOWN else ("U8", (array.nbytes,))
        head[key] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


@final
class PartFile:
    """A part that is read.

    Args:
        place: The folder of the checkpoint.
        name: The name of the part.
        manifest: The manifest of the checkpoint.

    Attributes:
        values: As in `Part`.
        arrays: Of each array dtype and shape of the whole, and the checksum of what is here; of a piece also its first
            element, and the one behind its last.

    Raises:
        DataLossError: If a file is missing, or is not the one that was written.
        OSError: If a file cannot be read for another reason.
    """

    def __init__(self, place: Path, name: str, manifest: Mapping[str, Any]) -> None:
        text = read_file(place / f"{name}.json")
        if zlib.crc32(text) != manifest["parts"].get(name):
            raise DataLossError(f"{place / name!s}.json is damaged: its checksum is not that of the manifest")
        about = parse_json(place / f"{name}.json", text)
        self.values: dict[str, Any] = about["values"]
        self.arrays: dict[str, Any] = about["arrays"]
        self._path = place / f"{name}.safetensors"
        try:
            with self._path.open("rb") as file:
                safe_open(self._path, framework="numpy")  # requires a header that describes all bytes
                self._start = _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")
                self._header = json.loads(file.read(self._start - _LENGTH_BYTES))
        except (FileNotFoundError, SafetensorError) as error:
            raise DataLossError(f"{str(self._path)!r} is missing or damaged: {error}") from None

    def form(self, key: str) -> str | None:
        """Return dtype and shape of an array, `float32[3, 2]`; `None` if there is no such array."""
        about = self.arrays.get(key)
        return None if about is None else f"{about[0]}{about[1]}"

    def array(self, key: str) -> Array:
        """Read an array, or the piece that is here, and nothing else, and compare its checksum."""
        name, shape, its_checksum, *bounds = self.arrays[key]
        array: Array = np.empty([bounds[1] - bounds[0]] if bounds else shape, dtype_named(name))
        found = self._header.get(key, {"shape": None})
        if found["shape"] not in (list(array.shape), [array.nbytes]):
            raise DataLossError(f"{key} in {str(self._path)!r} is missing or damaged: its shape is {found['shape']}")
        with self._path.open("rb") as file:
            file.seek(self._start + found["data_offsets"][0])
            num_read = file.readinto(bytes_of(array).data)
        if num_read != array.nbytes or checksum(array) != its_checksum:
            raise DataLossError(f"{key} in {str(self._path)!r} is damaged: another checksum was written")
        return array
