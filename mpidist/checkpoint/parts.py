"""The parts of a checkpoint, written and read: arrays in a safetensors file of a rank, what they are in a JSON file.

What is equal on all ranks is dealt over the ranks by bytes, large arrays in pieces.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy as np
from safetensors import SafetensorError, safe_open

from mpidist.checkpoint.folder import (
    MANIFEST,
    existing,
    parse_json,
    read_file,
    read_manifest,
    sync,
    write_file,
)
from mpidist.checkpoint.leaves import Owner, form_of
from mpidist.checksums import checksum
from mpidist.errors import DataLossError
from mpidist.transport.arrays import bytes_of
from mpidist.transport.communicator import shard_bounds
from mpidist.transport.half import dtype_named
from mpidist.transport.topology import Topology
from mpidist.whole_number import whole_number

__all__ = [
    "Part",
    "PartFile",
    "Pieces",
    "SavedCheckpoint",
    "deal",
    "part_of_rank",
    "require_writers",
    "write_part",
    "writing_ranks",
]

Array = np.ndarray[Any, Any]

Pieces = dict[str, list[tuple[int, int, int]]]  # of each array a rank, its first element, and the one behind its last

_LEAST_BYTES: Final = 1 << 20  # for each writer: a file costs as much as some of them
_LEAST_PIECE_BYTES: Final = 1 << 16
_ALL: Final = "all"
_PER_NODE: Final = "per node"
_BUFFER_BYTES: Final = 8 << 10  # Python reads as many ahead; 128 KiB from 3.14 on, which would be read twice
_LENGTH_BYTES: Final = 8  # at the begin of a safetensors file: the length of its header
_KNOWN: Final = frozenset(  # dtypes that a safetensors file names; others are written as their bytes
    ["bool", "int8", "uint8", "int16", "uint16", "float16", "int32", "uint32", "float32", "int64", "uint64", "float64"]
)


@final
class Part(NamedTuple):
    """One rank's part of a checkpoint: arrays, whole or flat pieces, and JSON values, by name.

    Of each piece `pieces` has the shape of the whole, its first element, and the one behind its last.
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
    """Return the header of a safetensors file: the length of a JSON text, and the text, with the places of arrays."""
    head, end = {}, 0
    for key, array in arrays.items():
        begin, end, kind = end, end + array.nbytes, array.dtype.kind
        code = "BOOL" if kind == "b" else f"{kind.upper()}{8 * array.itemsize}"
        dtype, shape = (code, array.shape) if array.dtype.name in _KNOWN else ("U8", (array.nbytes,))
        head[key] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def require_writers(writers: Any) -> None:
    """Refuse an invalid `writers`."""
    if isinstance(writers, str):
        if writers not in (_ALL, _PER_NODE):
            raise ValueError(f"writers must be 'all', 'per node' or a number of ranks, got {writers!r}")
    else:
        whole_number("writers", writers, 1, "'all' or 'per node'")


def writing_ranks(writers: int | str, topology: Topology) -> list[int]:
    """Return the ranks that write the equal arrays, rank 0 first; a number of them is spread over the nodes."""
    if writers == _ALL:
        return list(range(topology.size))
    leaders_first = sorted(range(topology.size), key=lambda rank: (topology.local_ranks[rank], rank))
    return leaders_first[: topology.num_nodes if writers == _PER_NODE else int(writers)]


def deal(sizes: Mapping[str, tuple[int, int]], ranks: Sequence[int]) -> Pieces:
    """Assign pieces of each array to the ranks that write them. Equal on all ranks.

    `sizes` has the number of elements, and the bytes of one, by name. Arrays are cut where both pieces are large; the
    first of `ranks` writes what is too small to be dealt.
    """
    total = sum(count * itemsize for count, itemsize in sizes.values())
    bounds = shard_bounds(total, max(1, min(len(ranks), total // _LEAST_BYTES)))
    pieces: Pieces = {}
    turn, at = 0, 0  # of the ranks, and of all bytes
    for name, (count, itemsize) in sizes.items():
        pieces[name], begin = [], 0
        while turn + 2 < len(bounds) and bounds[turn + 1] < at + (count - begin) * itemsize:
            length = (bounds[turn + 1] - at) // itemsize
            rest = count - begin - length
            if min(length, rest) * itemsize >= _LEAST_PIECE_BYTES:
                pieces[name].append((ranks[turn], begin, begin + length))
                begin, at = begin + length, at + length * itemsize
            elif length >= rest:
                break
            turn += 1
        pieces[name].append((ranks[turn], begin, count))
        at += (count - begin) * itemsize
    return pieces


@final
class PartFile:
    """A part that is read. A file that is missing, or is not the one that was written, is a `DataLossError`.

    `values` are those of `Part`; `arrays` has of each array dtype and shape of the whole, and the checksum of what is
    here; of a piece also its first element, and the one behind its last.
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
            with BufferedReader(self._path.open("rb", buffering=0), _BUFFER_BYTES) as file:
                safe_open(self._path, framework="numpy")  # requires a header that describes all bytes
                self._start = _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")
                self._header = json.loads(file.read(self._start - _LENGTH_BYTES))
        except (FileNotFoundError, SafetensorError) as error:
            raise DataLossError(f"{str(self._path)!r} is missing or damaged: {error}") from None

    def array(self, key: str) -> Array:
        """Read an array, or the piece that is here, and nothing else, and compare its checksum."""
        name, shape, its_checksum, *bounds = self.arrays[key]
        array: Array = np.empty([bounds[1] - bounds[0]] if bounds else shape, dtype_named(name))
        found = self._header.get(key, {"shape": None})
        if found["shape"] not in (list(array.shape), [array.nbytes]):
            raise DataLossError(f"{key} in {str(self._path)!r} is missing or damaged: its shape is {found['shape']}")
        with BufferedReader(self._path.open("rb", buffering=0), _BUFFER_BYTES) as file:
            file.seek(self._start + found["data_offsets"][0])
            num_read = file.readinto(bytes_of(array).data)
        if num_read != array.nbytes or checksum(array) != its_checksum:
            raise DataLossError(f"{key} in {str(self._path)!r} is damaged: another checksum was written")
        return array


@final
class SavedCheckpoint:
    """A checkpoint that is read. Its files are opened when they are needed.

    Args:
        place: The folder.

    Attributes:
        place: The folder, or the one beside it that was to be replaced when its job was killed.
        manifest: The content of the manifest.
        owners: Whose state each leaf is, by name.

    Raises:
        FileNotFoundError: If there is no such folder.
        DataLossError: If the folder is no checkpoint, or its manifest is damaged. From methods, if another file is
            missing or damaged, or none of the parts has the requested state.
    """

    def __init__(self, place: Path) -> None:
        self.place = existing(place)
        self.manifest = read_manifest(self.place)
        self.owners = {name: Owner(owner) for name, owner in self.manifest["owners"].items()}
        self._parts: dict[str, PartFile] = {}

    def part(self, name: str) -> PartFile:
        """Open a part."""
        if name not in self._parts:
            self._parts[name] = PartFile(self.place, name, self.manifest)
        return self._parts[name]

    @property
    def shared_parts(self) -> list[str]:
        """Parts that hold the state that is equal on all ranks."""
        return list(self.manifest["shared"])

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
        """Return the form of a state: `float32[3, 2]`."""
        file = self._files_with(key, parts)[0]
        return form_of(file.values[key]) if key in file.values else f"{file.arrays[key][0]}{file.arrays[key][1]}"

    def state(self, key: str, parts: Sequence[str]) -> Any:
        """Read a state; its pieces, if parts have them."""
        files = self._files_with(key, parts)
        if key in files[0].values:
            return files[0].values[key]
        name, shape, *_ = files[0].arrays[key]
        whole = np.empty(shape, dtype_named(name))
        for part, begin, end in self.pieces(key, parts):
            whole.reshape(-1)[begin:end] = self.part(part).array(key).reshape(-1)
        return whole

    def pieces(self, key: str, parts: Sequence[str]) -> list[tuple[str, int, int]]:
        """Return which parts have which elements of an array, in their order. No array is read."""
        size = math.prod(self._files_with(key, parts)[0].arrays[key][1])
        about = {part: self.part(part).arrays.get(key) for part in parts}
        found = [(part, *(one[3:] or (0, size))) for part, one in about.items() if one is not None]
        found.sort(key=lambda piece: piece[1:])
        if [begin for _, begin, _ in found] + [size] != [0] + [end for _, _, end in found]:
            raise DataLossError(f"{str(self.place)!r} is damaged: pieces of {key} are missing")
        return found

    def _files_with(self, key: str, parts: Sequence[str]) -> list[PartFile]:
        files = [file for file in map(self.part, parts) if key in file.arrays or key in file.values]
        if not files:
            raise DataLossError(f"{str(self.place)!r} is damaged: {key} is missing")
        return files

    def require_whole(self, reads: bool) -> None:
        """Require that all files are there, and none is cut; with `reads`, that every array has its checksum."""
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
