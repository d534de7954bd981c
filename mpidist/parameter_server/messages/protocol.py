"""Message format of workers and servers: headers, small data beside them, large data in chunks.

A request is a header with up to `INLINE_BYTES` of data behind it, in one message. More data follows in messages of at
most `CHUNK_BYTES`: `plan_messages` computes them from the sizes of the items alone, so that both sides find the same.
The answer to a request has the same form. No message holds code or pickled objects.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.transport.arrays import bytes_of

__all__ = [
    "Change",
    "Header",
    "Op",
    "Piece",
    "Step",
    "Outcome",
    "from_json",
    "is_read_in_place",
    "join_bytes",
    "plan_messages",
    "plan_stream",
    "to_json",
]

MESSAGE_BYTES: Final = 4096
CHUNK_BYTES: Final = 1 << 20  # fits into a core's cache: it is added from there
IN_PLACE_BYTES: Final = 64 << 10  # what a worker reads where it lies; less takes longer to ask for than to copy
NO_PLACE: Final = -1
MAX_NUMBERS: Final = 6
HEADER: Final = struct.Struct(f"=6q{MAX_NUMBERS}d")
WHOLE_NUMBERS: Final = struct.Struct("=6q")  # the first part of a header: a rule alone needs the second
HEADER_BYTES: Final = HEADER.size
INLINE_BYTES: Final = MESSAGE_BYTES - HEADER_BYTES
REQUEST, ANSWER, DATA = 1, 2, 3  # tags
WINDOW: Final = 32  # requests of a worker that a server has not answered
SERVE_CALL: Final = "serve()"  # what the flight recorder of a server says while it answers workers

_MAX_PLANS: Final = 256  # remembered

Bytes = np.ndarray[Any, Any]


@final
class Op:
    """Operations of requests. Numbers, and no enumeration, which is slow to look up."""

    READ: Final = 0  # the values of a list of variables
    CHANGE: Final = 1  # add to a list of variables, assign them, ...
    READ_ROWS: Final = 2  # some rows of a variable
    CHANGE_ROWS: Final = 3  # the same of some rows of one variable
    ALLOCATE: Final = 4  # make a variable
    NAME_LIST: Final = 5  # number a list of variables
    NAME_RULE: Final = 6  # number a rule
    MEET: Final = 7  # wait until all workers make the same call
    STEP: Final = 8  # this worker has done a step
    DONE: Final = 9  # this worker makes no request any more
    LEAVE: Final = 10  # the same, because of an error
    # Of a worker: call a function. Of a server: the changes that follow belong to that call, which may be made again.
    CALL: Final = 20


@final
class Step:
    """Step reports of a worker, in `rows` of a header."""

    DONE: Final = 0  # it has done one
    WAITS: Final = 1  # it waits in a call of all workers, and does none
    GOES_ON: Final = 2  # it waits no longer
    ALL_GO_ON: Final = 3  # the call of all workers is over, so none of them waits there any longer


@final
class Outcome:
    """Outcomes, at the beginning of a reply."""

    OK: Final = 0
    FAILED: Final = 1  # the data is the text of an error
    REFUSED: Final = 2  # workers differ; the data is the text of an error
    TOO_LATE: Final = 3  # other workers did not come in time; the data is the text of an error


@final
class Change:
    """Kinds of changes of a variable. Larger numbers are those of rules."""

    ASSIGN: Final = 0
    ADD: Final = 1
    SUB: Final = 2
    SCATTER_MUL: Final = 3
    SCATTER_DIV: Final = 4
    SCATTER_MAX: Final = 5
    SCATTER_MIN: Final = 6
    RULE: Final = 16


SCATTERS: Final = {
    "scatter_update": Change.ASSIGN,
    "scatter_add": Change.ADD,
    "scatter_sub": Change.SUB,
    "scatter_mul": Change.SCATTER_MUL,
    "scatter_div": Change.SCATTER_DIV,
    "scatter_max": Change.SCATTER_MAX,
    "scatter_min": Change.SCATTER_MIN,
}


@final
class Header(NamedTuple):
    """The header of a request, or of an answer."""

    op: int  # an `Op`; of an answer an `Outcome`
    sequence: int  # the number of the worker's request at this server; of an answer, of the last one it is for
    variables: int  # the key of a variable, or the number of a list of them, below 0
    # How many rows, or of how many variables; of an answer to DONE, whether all workers have ended well;
    # of an answer to READ, where the first variable lies in shared memory.
    rows: int
    change: int  # a `Change`, or `Change.RULE` plus 8 times the number of a rule plus how many numbers it gets
    nbytes: int  # of data that belongs to the request
    numbers: tuple[float, ...]  # what a rule needs: a learning rate, say

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
def plan_messages(sizes: tuple[int, ...], places: tuple[int, ...] = ()) -> tuple[tuple[Piece, ...], ...]:
    """Lay items of some bytes over messages: small ones together, and large ones in chunks of their own.

    Items that lie at `places` in shared memory are read there, if they are large, and are each a message of its own.
    Returns the pieces of each message. Empty items are left out.
    """
    messages: list[tuple[Piece, ...]] = []
    together: list[Piece] = []
    space = CHUNK_BYTES
    for item, size in enumerate(sizes):
        if places and is_read_in_place(size, places[item]):
            messages.append((Piece(item, 0, size),))
        elif size > CHUNK_BYTES:
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


def is_read_in_place(size: int, place: int) -> bool:
    """Whether a worker of the node reads a variable where it lies."""
    return size >= IN_PLACE_BYTES and place >= 0


def plan_stream(sizes: tuple[int, ...]) -> Iterator[tuple[Piece, ...]]:
    """Lay items over messages one behind the other, as if they were one. Yields the pieces of each message."""
    bounds = [*enumerate(pairwise(accumulate(sizes, initial=0)))]
    for begin in range(0, sum(sizes), CHUNK_BYTES):
        end = begin + CHUNK_BYTES
        cuts = [(item, first, max(first, begin), min(last, end)) for item, (first, last) in bounds]
        yield tuple(Piece(item, start - first, stop - first) for item, first, start, stop in cuts if start < stop)


def join_bytes(arrays: Sequence[Any], memory: Bytes) -> Bytes:
    """Copy contiguous arrays one behind the other into memory, and return as much of it as they fill."""
    joined = memory[: sum([array.nbytes for array in arrays])]
    if len(arrays) == 1:  # as most: faster than to concatenate
        joined[...] = bytes_of(arrays[0])
    elif len({array.dtype for array in arrays}) == 1:  # as most: a view of each takes longer than its copy
        np.concatenate(arrays, axis=None, out=joined.view(arrays[0].dtype))
    else:
        np.concatenate([bytes_of(array) for array in arrays], out=joined)
    return joined


def to_json(item: Any) -> Bytes:
    """Write texts, numbers, lists and dicts of them as bytes."""
    return np.frombuffer(json.dumps(item).encode(), np.uint8)


def from_json(data: Sequence[int] | Bytes) -> Any:
    """Read what `to_json` has written."""
    return json.loads(bytes(data))
