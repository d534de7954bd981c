"""The position in a distributed data set: the pass, and how much of it the program has had."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, final

from mpidist.datasets.batches import BatchSource

__all__ = ["Position", "Progress"]

_UNITS: Final = ("samples", "steps", "batches")


@final
class Position:
    """Position of a program in one pass, in the unit of its source. Equal on all ranks, which step together.

    `is_begun` once ranks have made a step of the pass in this process, `is_over` at its end. `iterator` refers to the
    object that makes the steps. `outer` is the pass that was open when this one began, and had made the last step.
    """

    def __init__(self, epoch: int = 0, num_seen: int = 0) -> None:
        self.epoch, self.num_seen = epoch, num_seen
        self.is_begun = self.is_over = False
        self.outer: Position | None = None
        self.iterator: Callable[[], object] = lambda: None

    @property
    def is_open(self) -> bool:
        """Whether the pass can make another step in this process: the program has its iterator."""
        return self.iterator() is not None

    def close(self) -> None:
        """Note that the pass makes no step any more."""
        self.iterator = lambda: None


@final
class Progress:
    """The passes over a distributed data set: which one has made the last step, and how far it is."""

    def __init__(self, source: BatchSource) -> None:
        self.source = source
        self._last = Position()
        self._restored: Position | None = None  # until a pass makes a step

    @property
    def position(self) -> Position:
        """The position in the pass that has made the last step; after a pass inside another one, in that one."""
        position = self._last
        while not position.is_open and position.outer is not None and position.outer.is_open:
            position = position.outer
        return position

    @property
    def is_back(self) -> bool:
        """Whether the position is that of an open pass, because the last one, inside it, is not open any more."""
        return self.position is not self._last

    def next_pass(self) -> Position:
        """Return the start of the next pass: the restored position, or the pass after the last one. Begins nothing."""
        return Position(self._last.epoch + 1) if self._last.is_begun else self._last

    def note_step(self, position: Position, iterator: object) -> bool:
        """Note that all ranks make a step of a pass. Returns whether a position that was restored is not used so."""
        is_unused, self._restored = self._restored not in (None, position), None
        if not position.is_begun:
            position.is_begun, position.iterator = True, weakref.ref(iterator)
            position.outer = self._last if self._last.is_open else None
        self._last = position
        return is_unused

    def state_at(self, position: Position) -> dict[str, Any]:
        """Return a position as JSON can hold it. After the end of a pass it is the beginning of the next one."""
        epoch, num_seen = (position.epoch + 1, 0) if position.is_over else (position.epoch, position.num_seen)
        return {"epoch": epoch, self.source.unit: num_seen, **self.source.order_fields}

    def require_fitting(self, state: Mapping[str, Any]) -> None:
        """Refuse a state from which the rest of the pass would be another one."""
        unit = self.source.unit
        needed = f"a position in this data set has the fields epoch and {unit}, as whole numbers, and this is"
        if not isinstance(state, Mapping):
            raise TypeError(f"{needed} {state!r}")
        numbers = [state.get("epoch"), _num_seen(unit, state)]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"{needed} {dict(state)}")
        if not numbers[1]:
            return  # a whole pass is left, whatever its order
        own = self.source.order_fields
        for name in sorted((own.keys() | state.keys()) - {"epoch", *_UNITS}):
            if own.get(name) != state.get(name):
                raise ValueError(
                    f"the position is {numbers[1]} {unit} into epoch {numbers[0]} of a data set with {name} "
                    f"{state.get(name)}, and this one has {name} {own.get(name)}: samples would be skipped, and others "
                    f"seen twice. Use the same {name} until the epoch is over, or restore without the data set"
                )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Start the next pass at a state; refuse it, and change nothing, if it does not fit."""
        self.require_fitting(state)
        self._last = self._restored = Position(state["epoch"], _num_seen(self.source.unit, state))


def _num_seen(unit: str, state: Mapping[str, Any]) -> Any:
    """Return how much of the pass a state has left behind: nothing is nothing, also in another data set's unit."""
    is_at_start = unit not in state and any(state.get(other) == 0 for other in _UNITS)
    return 0 if is_at_start else state.get(unit)
