"""Nests as bytes, to be sent: of arrays, numbers and texts. No code, and no pickled objects.

The bytes are the length of a description, the description in JSON, and the arrays, one after the other.
"""

from __future__ import annotations

import json
import struct
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from mpidist.transport.arrays import bytes_of
from mpidist.transport.half import dtype_named, is_of_numpy

__all__ = ["MAX_BYTES", "Handle", "decode", "encode"]

MAX_BYTES: Final = (1 << 31) - 1  # of a message of MPI
_LENGTH: Final = struct.Struct("=q")

Array = np.ndarray[Any, Any]
Handle = tuple[int, int]  # a data set of each worker, and which of its iterators; -1 for the data set


def encode(
    item: Any, what: str, handle_of: Callable[[Any], Handle | None] = lambda item: None, advice: str = ""
) -> Array:
    """Write a nest of arrays, numbers, texts and `None` as bytes.

    `handle_of` returns the handle of a per-worker object; `None` for anything else, which is refused, with
    an advice. `what` is the item's name in errors.
    """
    arrays: list[Array] = []
    otherwise = advice and f"; {advice}"
    try:
        tree = _tree_of(item, what, arrays, handle_of)
        about = [[array.dtype.str if is_of_numpy(array.dtype) else array.dtype.name, array.shape] for array in arrays]
        head = json.dumps([tree, about]).encode()
    except TypeError as problem:
        raise TypeError(f"{problem}{otherwise}") from None
    except RecursionError:
        raise ValueError(f"{what} contains itself, or too many nests in each other{otherwise}") from None
    except ValueError as problem:  # a whole number of more digits than Python writes
        raise ValueError(f"{what} cannot be written: {problem}{otherwise}") from None
    parts = [np.frombuffer(_LENGTH.pack(len(head)) + head, np.uint8)]
    parts += [bytes_of(array) for array in arrays]
    nbytes = sum(part.size for part in parts)
    if nbytes > MAX_BYTES:
        raise ValueError(
            f"{what} takes {nbytes} bytes, and at most {MAX_BYTES} can be sent so: cut arrays, or keep them on servers"
        )
    return np.concatenate(parts)


def decode(data: Array, value_of: Callable[[Handle], Any] = lambda handle: None) -> Any:
    """Decode bytes of `encode`. `value_of` returns the object of a handle."""
    start = _LENGTH.size
    (length,) = _LENGTH.unpack_from(data.data)
    tree, about = json.loads(data[start : start + length].tobytes())
    at, arrays = start + length, []
    for name, shape in about:
        dtype = dtype_named(name)
        nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        arrays.append(data[at : at + nbytes].copy().view(dtype).reshape(shape))
        at += nbytes
    return _item_of(tree, arrays, value_of)


def _tree_of(item: Any, what: str, arrays: list[Array], handle_of: Callable[[Any], Handle | None]) -> Any:
    """Describe an item, and collect its arrays."""
    if item is None or type(item) in (bool, int, float, str):
        return item
    if type(item) is complex:
        return {"complex": [item.real, item.imag]}
    if isinstance(item, np.ma.MaskedArray):
        raise TypeError(f"{what} has a masked array, whose mask would be lost: pass filled(0) of it, for example")
    if isinstance(item, (np.ndarray, np.generic)):
        array = np.asarray(item)
        if array.dtype.kind in "OVT" and is_of_numpy(array.dtype):
            raise TypeError(f"{what} has an array of dtype {array.dtype}, and arrays of numbers or texts are needed")
        arrays.append(np.ascontiguousarray(array).reshape(array.shape))
        return {"array" if isinstance(item, np.ndarray) else "number": len(arrays) - 1}
    if type(item) in (list, tuple):
        return {type(item).__name__: [_tree_of(one, what, arrays, handle_of) for one in item]}
    if type(item) is dict:
        pairs = [[_tree_of(one, what, arrays, handle_of) for one in pair] for pair in item.items()]
        return {"dict": pairs}
    handle = handle_of(item)
    if handle is not None:
        return {"handle": handle}
    hint = ": vars(...) makes a dict of it" if isinstance(item, (Namespace, SimpleNamespace)) else ""
    raise TypeError(
        f"{what} has an item of type {type(item).__name__}, and needs arrays of NumPy, numbers, texts, and lists, "
        f"tuples and dicts of them{hint}"
    )


def _item_of(tree: Any, arrays: list[Array], value_of: Callable[[Handle], Any]) -> Any:
    """Make an item from its description."""
    if type(tree) is not dict:
        return tree
    ((kind, inner),) = tree.items()
    if kind == "complex":
        return complex(*inner)
    if kind == "array":
        return arrays[inner]
    if kind == "number":
        return arrays[inner][()]
    if kind == "handle":
        return value_of((inner[0], inner[1]))
    if kind == "dict":
        return {_item_of(key, arrays, value_of): _item_of(value, arrays, value_of) for key, value in inner}
    items = [_item_of(one, arrays, value_of) for one in inner]
    return items if kind == "list" else tuple(items)
