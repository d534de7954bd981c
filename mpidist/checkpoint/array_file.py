"""Files of arrays in the safetensors format: the length of a header, the header in JSON, and the bytes of the arrays.

The bytes go from where they are straight into the file, and the interpreter's lock is free meanwhile: a thread that
writes neither needs memory nor stops the program. Reading maps the file: what is not looked at is not read, and the
processes of a node share the pages.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from mpidist.transport import bytes_of

__all__ = ["ArrayFile", "write_arrays"]

Array = np.ndarray[Any, Any]

_BUFFER_BYTES: Final = 1 << 20  # smaller arrays are gathered in it
_LENGTH_BYTES: Final = 8
_ALIGNMENT: Final = 8
_CODES: Final = {  # arrays of other dtypes are written as their bytes
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{sign.upper() or 'I'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
}


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> int:
    """Write a new file of contiguous arrays, and wait until it is on the disk.

    Returns:
        The checksum of the header.

    Raises:
        OSError: If it cannot be written. It names the file.
    """
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0]))  # so that all are aligned
    header, end = {}, 0
    for name, array in ordered:
        code, begin, end = _CODES.get(array.dtype.name), end, end + array.nbytes
        shape = [array.nbytes] if code is None else list(array.shape)
        header[name] = {"dtype": code or "U8", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    text = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    try:
        with path.open("xb", buffering=_BUFFER_BYTES) as file:
            file.write(text)
            for _, array in ordered:
                file.write(bytes_of(array).data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: {str(path)!r} cannot be written") from error
    return zlib.crc32(text)


@final
class ArrayFile:
    """A file of arrays that is read.

    Args:
        path: The file.
        header_checksum: What `write_arrays` has returned; `None` if it is unknown.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is no such file, a part of one, or has another header.
    """

    def __init__(self, path: Path, header_checksum: int | None) -> None:
        with path.open("rb") as file:
            begin = _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")
            size = os.fstat(file.fileno()).st_size
            if begin > size:
                raise ValueError("it ends within its header")
            file.seek(0)
            text = file.read(begin)
            if header_checksum is not None and zlib.crc32(text) != header_checksum:
                raise ValueError("another header was written")
            self._header: dict[str, Any] = json.loads(text[_LENGTH_BYTES:])
            self._bytes = np.memmap(file, np.uint8, "r", begin) if size > begin else np.empty(0, np.uint8)

    def array(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """View an array; it cannot be written.

        Raises:
            KeyError: If the file has no such array.
            ValueError: If the array is of another size.
        """
        begin, end = self._header[name]["data_offsets"]
        array: Array = np.asarray(self._bytes[begin:end]).view(dtype).reshape(shape)
        return array
