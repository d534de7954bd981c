"""The variables of a server, and how they change: arrays and arithmetic alone, no messages."""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from typing import Any, Final, final

import numpy as np

from mpidist.parameter_server.messages.protocol import NO_PLACE, SCATTERS, Change
from mpidist.parameter_server.rules import Memory, Rule, rule_named
from mpidist.transport.arrays import bytes_of
from mpidist.transport.float_errors import without_float_errors
from mpidist.transport.reduction import Reduction, accumulator_dtype, is_low_precision
from mpidist.variables.sparse_updates import change_rows

__all__ = ["Store", "Stored", "Turn"]

Array = np.ndarray[Any, Any]

_SUM: Final = Reduction("sum")
_SCATTER: Final[dict[int, str]] = {change: name for name, change in SCATTERS.items()}


@final
class Stored:
    """A variable on its server, or a shard of one.

    Requests that take several messages wait in a queue for their turn: a read that is under way lets other reads in,
    and no write; a write lets nothing in. So a read is a snapshot, and a write is whole.

    Attributes:
        value, flat, bytes: The numbers; the same memory in one dimension, and as bytes.
        is_half: Whether the numbers are of half precision, or of a float8.
        memories: What each rule keeps, by the rule's name.
        place: Where the memory lies in this server's part of the node's shared memory; below 0 if elsewhere.
        queue: The requests that are under way or wait, in their order.
    """

    __slots__ = ("bytes", "flat", "is_half", "memories", "place", "queue", "value")

    def __init__(self, value: Array, place: int = NO_PLACE) -> None:
        self.value = value
        self.flat = value.reshape(-1)
        self.bytes = bytes_of(value)
        self.place, self.is_half = place, is_low_precision(value.dtype)
        self.memories: dict[str, Memory] = {}
        self.queue: deque[Turn] = deque()

    def enter(self, writes: bool) -> Turn:
        """Queue for a turn. `leave` ends it."""
        turn = Turn(self, writes)
        self.queue.append(turn)
        return turn

    def may_go(self, turn: Turn) -> bool:
        """Whether a turn has come."""
        if turn.writes:
            return self.queue[0] is turn
        return not any(other.writes for other in takewhile(lambda other: other is not turn, self.queue))

    def leave(self, turn: Turn) -> None:
        """End a turn, or leave the queue."""
        self.queue.remove(turn)


@final
class Turn:
    """A request's place in the queue of a variable, which it may write."""

    __slots__ = ("number", "stored", "writes")

    def __init__(self, stored: Stored, writes: bool) -> None:
        self.stored, self.writes = stored, writes
        self.number: int | None = None  # that a lane counts once a worker has copied the variable from where it lies


@final
class Store:
    """Variables by key, and the rules that workers have named.

    Attributes:
        made: The changes of each call of a coordinator's that were made, by their places: an error, or `None`.
        under_way: The calls of which a change is being made.
        oldest: Calls with lower numbers are over. What a lost worker still sends of one is dropped: another worker has
            made its changes.
    """

    def __init__(self) -> None:
        self.variables: dict[int, Stored] = {}
        self.made: dict[int, dict[int, Exception | None]] = {}
        self.under_way: set[int] = set()
        self.oldest = 0
        self._rules: list[Rule] = []

    def allocate(self, key: int, value: Array, memory: Array | None = None, place: int = NO_PLACE) -> None:
        """Make a variable with a copy of an initial value: into `memory`, at `place` of the node's shared memory."""
        if memory is None:
            self.variables[key] = Stored(np.array(value, order="C"))
            return
        own = memory.view(value.dtype).reshape(value.shape)
        own[...] = value
        self.variables[key] = Stored(own, place)

    def end_calls(self, oldest: int) -> None:
        """Note that the calls with lower numbers than `oldest` are over."""
        self.oldest = max(self.oldest, oldest)
        self.made = {call: made for call, made in self.made.items() if call >= self.oldest}

    def number_of_rule(self, name: str) -> int:
        """Return the number of a rule. Raises `ValueError` if there is no such rule here."""
        for number, rule in enumerate(self._rules):
            if rule.name == name:
                return number
        self._rules.append(rule_named(name))
        return len(self._rules) - 1

    def is_elementwise(self, change: int) -> bool:
        """Whether parts of an array can be changed one by one."""
        return change < Change.RULE or self._rule_of(change)[0].is_elementwise

    def _rule_of(self, change: int) -> tuple[Rule, int]:
        """Return the rule of a change, and how many numbers it gets."""
        number, count = divmod(change - Change.RULE, 8)
        return self._rules[number], count

    def begin(self, stored: Stored, change: int) -> None:
        """Note that a change begins, which may come in parts."""
        if change >= Change.RULE:
            rule, _ = self._rule_of(change)
            rule.begin(stored.memories.setdefault(rule.name, {}))

    def change(self, stored: Stored, change: int, start: int, delta: Array, numbers: tuple[float, ...]) -> None:
        """Change some elements of a variable, from element `start` on. `delta` may be overwritten."""
        part = stored.flat[start : start + delta.size]
        if stored.is_half and change in (Change.ADD, Change.SUB):  # the same as below, up to 28 times as fast
            if change == Change.SUB:
                np.negative(delta, delta)
            _SUM.combine([part, delta], part)
        elif change == Change.ADD:
            without_float_errors(np.add, part, delta, out=part)
        elif change == Change.SUB:
            without_float_errors(np.subtract, part, delta, out=part)
        elif change == Change.ASSIGN:
            part[...] = delta
        else:
            rule, count = self._rule_of(change)
            memory = stored.memories[rule.name]
            if not rule.is_elementwise:
                part, delta = stored.value, delta.reshape(stored.value.shape)
            arrays = _slots_of(rule, memory, stored.value)
            slots = tuple(array.reshape(-1)[start : start + delta.size] for array in arrays)
            _apply(rule, part, delta, memory, slots, *numbers[:count])

    def change_rows(
        self, stored: Stored, change: int, indices: Array, values: Array, numbers: tuple[float, ...]
    ) -> None:
        """Change some rows of a variable, in the order of `indices`; with a rule, each row once, by the sum."""
        if change < Change.RULE:
            with np.errstate(all="ignore"):  # an overflow is a result: see `transport.float_errors`
                change_rows(_SCATTER[change], stored.value, indices, values)
            return
        rule, count = self._rule_of(change)
        memory = stored.memories[rule.name]
        rows, places = np.unique(indices, return_inverse=True)
        if not rule.is_elementwise:
            rows, places = np.arange(len(stored.value)), indices
        sums = np.zeros((rows.size, *stored.value.shape[1:]), values.dtype)
        with np.errstate(all="ignore"):
            np.add.at(sums, places.reshape(-1), values)
        arrays = _slots_of(rule, memory, stored.value)
        value, slots = stored.value[rows], tuple(array[rows] for array in arrays)
        _apply(rule, value, sums, memory, slots, *numbers[:count])
        for array, changed in zip([stored.value, *arrays], [value, *slots], strict=True):
            array[rows] = changed


def _apply(rule: Rule, *given: Any) -> None:
    if not rule.is_elementwise:  # a function of the program, with the program's error state, which gets a copy
        rule.apply(*given)
        return
    with np.errstate(all="ignore"):  # an error would leave a part changed
        rule.apply(*given)


def _slots_of(rule: Rule, memory: Memory, value: Array) -> list[Array]:
    for name in rule.slots:
        if name not in memory:
            memory[name] = np.zeros_like(value, accumulator_dtype(value.dtype))
    return [memory[name] for name in rule.slots]
