"""The last calls of a rank, in memory that other ranks of its node can read when the rank does not answer."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

if TYPE_CHECKING:  # every rank imports this module with `import mpidist`
    from mpidist.transport.communicator import Array

__all__ = ["FLIGHT_BYTES", "MAX_CALLS", "FlightEntry", "FlightRecorder", "entries_in", "last_in"]

MAX_CALLS: Final = 2048
_NUM_TEXTS: Final = 256
_TEXT_BYTES: Final = 128

# Words of 8 bytes: the number of calls; at `_STARTED` the number of calls, if the last one is only started; then a ring
# buffer of calls; then a ring buffer of texts, each after its number.
_STARTED: Final = 4
_RING: Final = 16
_WORDS: Final = 5  # of a call: sequence, text, and when it began, was agreed on, and ended (< 0: with an error)
_TEXTS: Final = _RING + MAX_CALLS * _WORDS
FLIGHT_BYTES: Final = 8 * _TEXTS + _NUM_TEXTS * _TEXT_BYTES

_pack_call = struct.Struct("=5q").pack_into
_now = time.monotonic_ns


@final
class FlightEntry(NamedTuple):
    """One call of a rank. Times in nanoseconds of the node's monotonic clock; 0 for an event that has not happened.

    Attributes:
        sequence: The number of the call among those that all ranks make together; 0 for other calls.
        details: Operation, arrays, bytes, algorithm and packs, where there are any.
        begun: When the rank joined the call.
        agreed: When all ranks had joined, and had been found to make the same call.
        ended: When the call ended; negative if it ended with an error.
        is_started: Whether the rank has started the call, and does other work instead of waiting for it.
    """

    sequence: int
    call: str
    details: str
    begun: int
    agreed: int
    ended: int
    is_started: bool = False

    @property
    def state(self) -> str:
        """`waiting` for ranks that have not joined, `moving` data, `started` but not waited for, `done` or `failed`."""
        if self.ended:
            return "done" if self.ended > 0 else "failed"
        if self.is_started:
            return "started"
        return "moving" if self.agreed else "waiting"


@final
class FlightRecorder:
    """The last calls of one rank, newest over oldest. Recording one takes less than a microsecond.

    Attributes:
        memory: [`FLIGHT_BYTES`] bytes, zeros at first. Compiled code records the calls that it carries out by itself.
        texts: The numbers of the texts that the memory has, each of a call's name and details.
        after_begin: Called when a call has begun. A trace copies calls then, before newer ones overwrite them.
    """

    def __init__(self, memory: Array) -> None:
        self.memory = memory
        self._words = memory[: 8 * _TEXTS].data.cast("q")
        self.texts: dict[tuple[str, str], int] = {}
        self._num_texts = 0
        self.after_begin: Callable[[], None] | None = None

    def begin(self, sequence: int, call: str, details: str = "") -> int:
        """Record that a call begins. Returns its place, for `end`."""
        text, count = self.number_of(call, details), self.count
        at = _RING + count % MAX_CALLS * _WORDS
        _pack_call(self._words, 8 * at, sequence, text, _now(), 0, 0)
        self._words[0] = count + 1
        if self.after_begin is not None:
            self.after_begin()
        return at

    def number_of(self, call: str, details: str) -> int:
        """Return the number of the text of calls, which is in the memory from now on."""
        return self.texts.get((call, details)) or self._keep(call, details)

    @property
    def count(self) -> int:
        """Number of calls so far."""
        return int(self._words[0])

    def replace_details(self, details: str) -> None:
        """Replace the details of the last call, which is not over yet."""
        number = self._words[self._at + 1]
        last = self.last()
        if last is not None:
            self._write(number, last.call, details)

    def mark_started(self, is_started: bool = True) -> None:
        """Record whether the last call is only started: the rank does other work, and waits for it later."""
        self._words[_STARTED] = self.count if is_started else 0

    def agree(self) -> None:
        """Record that all ranks have joined the call."""
        self._words[self._at + 3] = _now()

    def end(self, place: int | None = None) -> None:
        """Record that a call has ended: the last one, or that of a place, if other calls have begun since."""
        self._words[(self._at if place is None else place) + 4] = _now()

    def fail(self) -> None:
        """Record that the call has ended with an error, unless an end is recorded already."""
        if not self._words[self._at + 4]:
            self._words[self._at + 4] = -_now()

    @property
    def begun(self) -> float:
        """Begin of the last call, in seconds of the monotonic clock."""
        return float(self._words[self._at + 2]) / 1e9

    @property
    def is_agreed(self) -> bool:
        """Whether all ranks have joined the last call."""
        return bool(self._words[self._at + 3])

    @property
    def _at(self) -> int:
        """Place of the last call."""
        return _RING + (self.count - 1) % MAX_CALLS * _WORDS

    def last(self) -> FlightEntry | None:
        """Return the last call."""
        return last_in(self.memory)

    @property
    def rows(self) -> Array:
        """[calls, 5], the calls that are kept, in no order: sequence, text, begun, agreed, ended; zeros for none."""
        return self.memory[8 * _RING : 8 * _TEXTS].view(np.int64).reshape(MAX_CALLS, _WORDS)

    def rows_since(self, number: int) -> list[list[int]]:
        """Return the calls from a number on, as far as they are kept: number, sequence, text, begun, agreed, ended."""
        numbers = range(max(number, self.count - MAX_CALLS), self.count)
        places = (_RING + number % MAX_CALLS * _WORDS for number in numbers)
        return [[number, *self._words[at : at + _WORDS]] for number, at in zip(numbers, places, strict=True)]

    def texts_since(self, number: int) -> dict[int, tuple[str, str]]:
        """Return the texts whose numbers are larger: each call's name and details."""
        return {text_number: text for text, text_number in self.texts.items() if text_number > number}

    def _keep(self, call: str, details: str) -> int:
        self._num_texts += 1
        number = self._num_texts
        if len(self.texts) >= _NUM_TEXTS:  # the oldest text is dropped, and its calls lose their names
            self.texts.pop(next(iter(self.texts)))
        self.texts[call, details] = number
        self._write(number, call, details)
        return number

    def _write(self, number: int, call: str, details: str) -> None:
        text = f"{call}\t{details}".encode()[: _TEXT_BYTES - 8].ljust(_TEXT_BYTES - 8, b"\0")
        at = 8 * _TEXTS + number % _NUM_TEXTS * _TEXT_BYTES
        self.memory[at : at + _TEXT_BYTES] = np.frombuffer(struct.pack("=q", number) + text, np.uint8)


def entries_in(memory: Array) -> list[FlightEntry]:
    """Read the calls that the recorder of a rank of the node holds, oldest first."""
    memory = memory.copy()  # the owner of the memory may write on
    count = _word(memory, 0)
    return [_entry(memory, number) for number in range(max(0, count - MAX_CALLS), count)]


def last_in(memory: Array) -> FlightEntry | None:
    """Read the last call; `None` if there was none."""
    count = _word(memory, 0)
    return _entry(memory, count - 1) if count else None


def _entry(memory: Array, number: int) -> FlightEntry:
    at = 8 * (_RING + number % MAX_CALLS * _WORDS)
    sequence, text, begun, agreed, ended = struct.unpack_from("=5q", memory, at)
    at = 8 * _TEXTS + text % _NUM_TEXTS * _TEXT_BYTES
    call, details = "a call", ""
    if _word(memory, at // 8) == text:
        raw: bytes = memory[at + 8 : at + _TEXT_BYTES].tobytes()
        call, _, details = raw.rstrip(b"\0").decode(errors="replace").partition("\t")
    return FlightEntry(sequence, call, details, begun, agreed, ended, _word(memory, _STARTED) == number + 1)


def _word(memory: Array, index: int) -> int:
    (word,) = struct.unpack_from("=q", memory, 8 * index)
    return int(word)
