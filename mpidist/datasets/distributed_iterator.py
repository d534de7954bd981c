"""One pass over a distributed data set, in step with all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist import context_stack, nest
from mpidist.datasets.batches import SharedBatches, empty_like
from mpidist.datasets.read_ahead import ReadAhead
from mpidist.errors import OutOfRangeError
from mpidist.strategy_extended import StrategyExtended
from mpidist.transport import ErrorReport, arrays, fingerprint_of, mark_shared, mismatch_error, raise_reported

__all__ = ["DistributedIterator", "OptionalBatch"]

_END: Final = object()  # in the place of a batch


@final
class OptionalBatch:
    """A batch, or nothing at the end of a data set: what `get_next_as_optional` returns.

    Args:
        batches: The batch in a tuple, or an empty tuple.
    """

    def __init__(self, batches: tuple[Any, ...]) -> None:
        self._batches = batches

    def has_value(self) -> bool:
        """Whether there is a batch: alike on all ranks."""
        return bool(self._batches)

    def get_value(self) -> Any:
        """Return the batch.

        Raises:
            OutOfRangeError: If there is none.
        """
        if not self._batches:
            raise OutOfRangeError("there is no batch: the data set is at its end; ask has_value() first")
        return self._batches[0]


@final
class _Step(NamedTuple):
    """What a rank has to go with at a step.

    Attributes:
        part: This rank's part of the batch; `_END` if there is none.
        common: What must be alike on all ranks, by name.
        error: What reading the batch ran into.
    """

    part: Any
    common: dict[str, str]
    error: Exception | None = None

    @property
    def has_part(self) -> bool:
        """Whether there is a batch."""
        return self.part is not _END

    @property
    def word(self) -> int:
        """A number that is equal, but for chance, on ranks that have the same to go with; never 0."""
        return fingerprint_of((self.has_part, self.common, self.error is not None)) | 1


@final
class _Told(NamedTuple):
    """What ranks tell each other where they have not the same to go with.

    Attributes:
        common: As in `_Step`.
        error: Of this rank.
        empties: An empty batch, in a tuple; an empty tuple if this rank has not seen a batch yet.
    """

    common: dict[str, str]
    error: ErrorReport | None
    empties: tuple[Any, ...]


@final
class DistributedIterator(Iterator[Any]):
    """One pass over a distributed data set: every step is collective, one small round over all ranks.

    In the round ranks compare the data set, the pass and the step; and of global batches whether there is one, its
    length, and at the first step a checksum. After an error the pass is over on all ranks.

    Args:
        extended: The ranks.
        number: Of the data set, among those of its strategy.
        shared: The batches.
        num_ahead: How many batches a thread may read ahead.
        fetches: Whether batches are copied to this rank's GPU.
    """

    def __init__(
        self, extended: StrategyExtended, number: int, shared: SharedBatches, num_ahead: int, fetches: bool
    ) -> None:
        self._extended = extended
        self._call = f"next of data set {number}"
        self._shared = shared
        self._num_ahead = num_ahead
        self._fetches = fetches
        self._source: Iterator[Any] | None = None
        self._began = 0  # the number of the call that was the first step: the same on all ranks in step
        self._num_steps = 0
        self._empties: tuple[Any, ...] = ()
        self._problem: Exception | None = None  # why there is no empty batch, for ranks that run out of batches
        self._is_over = False

    def __next__(self) -> Any:
        entry = context_stack.innermost()
        if entry is not None and entry.replica_context is not None:
            raise ValueError("next() of a distributed data set should be called from outside of strategy.run()")
        if self._is_over:
            raise StopIteration
        part = _END
        try:
            part = self._take_step()
        finally:
            self._is_over = part is _END
        if self._is_over:
            raise StopIteration
        return nest.map_structure(_to_device, part) if self._fetches else part

    def get_next(self) -> Any:
        """Return the next batch, as `next` does. Collective.

        Raises:
            OutOfRangeError: If there is none on any rank.
        """
        batch = next(self, _END)
        if batch is _END:
            raise OutOfRangeError("the data set is at its end")
        return batch

    def get_next_as_optional(self) -> OptionalBatch:
        """Return the next batch, if there is one on any rank. Collective."""
        batch = next(self, _END)
        return OptionalBatch(() if batch is _END else (batch,))

    def _take_step(self) -> Any:
        step = self._read()
        pass_ = f"that began with call {self._began}" if self._num_steps else "begins"
        fields = {"pass": pass_, "step": str(self._num_steps), "advice": self._shared.advice}
        is_alike = self._extended.agree(self._call, fields, variant=step.word)
        if not self._num_steps:
            self._began = self._extended.group.agreement.sequence
        self._num_steps += 1
        if step.has_part and step.error is None and not self._empties:
            self._make_empty(step.part)
        if is_alike and step.error is None:
            return step.part
        empty = self._compare(step)
        return step.part if step.has_part else empty

    def _make_empty(self, part: Any) -> None:
        try:
            self._empties = (nest.map_structure(empty_like, part),)
        except Exception as problem:  # whatever an array of somebody else's raises, nobody may need it
            self._problem = problem

    def _read(self) -> _Step:
        """Read the next batch. Local; never raises."""
        try:
            if self._source is None:
                source = self._shared.source
                self._source = ReadAhead(source, self._num_ahead) if self._num_ahead else iter(source)
            batch = next(self._source, _END)
            if batch is _END:
                return _Step(_END, self._shared.end)
            return _Step(self._shared.part_of(batch), self._shared.common(batch, not self._num_steps))
        except Exception as problem:  # whatever reading runs into, the other ranks must learn of it
            return _Step(None, {}, problem)

    def _compare(self, step: _Step) -> Any:
        """Find out in what ranks differ at a step. Collective.

        Returns:
            An empty batch, where some ranks have run out of batches.

        Raises:
            InvalidArgumentError: If the ranks have unlike global batches. On every rank.
            Exception: What the lowest rank with an error ran into. On every rank.
        """
        group, error = self._extended.group, step.error or self._problem
        told = _Told(step.common, None if error is None else ErrorReport.of(error), self._empties)
        everyone: list[_Told] = group.agreement.all_gather_object(told)
        raise_reported(error, [rank.error for rank in everyone], group)
        if any(rank.common != step.common for rank in everyone):
            about = {"call": self._call, "advice": self._shared.advice}
            problem = mismatch_error([about | rank.common for rank in everyone], group.agreement.sequence)
            mark_shared(problem, group.agreement.ranks)
            raise problem
        return next((empty for rank in everyone for empty in rank.empties), _END)


def _to_device(leaf: Any) -> Any:
    return arrays.to_device(leaf) if isinstance(leaf, np.ndarray) else leaf
