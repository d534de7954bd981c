"""What workers and servers write in their messages: headers, small data beside them, large data in chunks.

A request is a header with up to `INLINE_BYTES` of data behind it, in one message. More data follows in messages of at
most `CHUNK_BYTES`: `plan_messages` says which, from the sizes of the items alone, so that both sides find the same.
The answer to a request has the same form. No message holds code or pickled objects.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, Final, NamedTuple, final

import numpy as np

__all__ = [
    "ANSWER",
    "CHUNK_BYTES",
    "DATA",
    "HEADER",
    "HEADER_BYTES",
    "INLINE_BYTES",
    "MAX_NUMBERS",
    "MESSAGE_BYTES",
    "REQUEST",
    "Change",
    "Header",
    "Op",
    "Piece",
    "Outcome",
    "bytes_of",
    "from_json",
    "plan_messages",
    "to_json",
]

MESSAGE_BYTES: Final = 4096
CHUNK_BYTES: Final = 1 << 20  # fits into a core's cache: it is added from there
MAX_NUMBERS: Final = 6
HEADER: Final = struct.Struct(f"=6q{MAX_NUMBERS}d")
HEADER_BYTES: Final = HEADER.size
INLINE_BYTES: Final = MESSAGE_BYTES - HEADER_BYTES
REQUEST, ANSWER, DATA = 1, 2, 3  # tags

_MAX_PLANS: Final = 256  # remembered

Bytes = np.ndarray[Any, Any]


@final
class Op(IntEnum):
    """What a worker asks for."""

    READ = 0  # the values of a list of variables
    CHANGE = 1  # add to a list of variables, assign them, ...
    READ_ROWS = 2  # some rows of a variable
    CHANGE_ROWS = 3  # the same of some rows of one variable
    ALLOCATE = 4  # make a variable
    NAME_LIST = 5  # number a list of variables
    NAME_RULE = 6  # number a rule
    MEET = 7  # wait until all workers make the same call
    STEP = 8  # this worker has done a step
    DONE = 9  # this worker makes no request any more
    LEAVE = 10  # the same, because of an error


@final
class Outcome(IntEnum):
    """How an answer begins."""

    OK = 0
    FAILED = 1  # the data is the text of an error
    REFUSED = 2  # workers differ; the data is the text of an error
    TOO_LATE = 3  # other workers did not come in time; the data is the text of an error


@final
class Change(IntEnum):
    """How numbers change a variable. Larger numbers are those of rules."""

    ASSIGN = 0
    ADD = 1
    SUB = 2
    SCATTER_MUL = 3
    SCATTER_DIV = 4
    SCATTER_MAX = 5
    SCATTER_MIN = 6
    RULE = 16


@final
class Header(NamedTuple):
    """The header of a request, or of an answer.

    Attributes:
        op: An `Op`; of an answer an `Outcome`.
        sequence: The number of the worker's request at this server.
        variables: The key of a variable, or the number of a list of them, below 0.
        rows: How many rows; of an answer to DONE, whether all workers have ended well.
        change: A `Change`, or `Change.RULE` plus 8 times the number of a rule plus how many numbers it gets.
        nbytes: How many bytes of data belong to the request.
        numbers: What a rule needs: a learning rate, say.
    """

    op: int
    sequence: int
    variables: int
    rows: int
    change: int
    nbytes: int
    numbers: tuple[float, ...]

    @classmethod
    def read(cls, message: Any) -> Header:
        """Read the header of a message."""
        op, sequence, variables, rows, change, nbytes, *numbers = HEADER.unpack_from(message)
        return cls(op, sequence, variables, rows, change, nbytes, tuple(numbers))


@final
class Piece(NamedTuple):
    """Bytes of one item in a message: all of the item's, or some of those of a large one."""

    item: int
    start: int
    stop: int


@lru_cache(_MAX_PLANS)
def plan_messages(sizes: tuple[int, ...]) -> tuple[tuple[Piece, ...], ...]:
    """Lay items over messages: small ones together, and large ones in chunks of their own.

    Args:
        sizes: The bytes of each item.

    Returns:
        The pieces of each message. Empty items are left out.
    """
    messages: list[tuple[Piece, ...]] = []
    together: list[Piece] = []
    space = CHUNK_BYTES
    for item, size in enumerate(sizes):
        if size > CHUNK_BYTES:
            messages += [(Piece(item, start, min(start + CHUNK_BYTES, size)),) for start in range(0, size, CHUNK_BYTES)]
        elif size:
            if size > space:
                messages.append(tuple(together))
                together, space = [], CHUNK_BYTES
            together.append(Piece(item, 0, size))
            space -= size
    if together:
        messages.append(tuple(together))
    return tuple(messages)


def bytes_of(array: Any) -> Bytes:
    """Return the bytes of a contiguous array, without a copy."""
    flat: Bytes = array.reshape(-1).view(np.uint8)
    return flat


def to_json(item: Any) -> Bytes:
    """Write texts, numbers, lists and dicts of them as bytes."""
    return np.frombuffer(json.dumps(item).encode(), np.uint8)


def from_json(data: Sequence[int] | Bytes) -> Any:
    """Read what `to_json` has written."""
    return json.loads(bytes(data))
