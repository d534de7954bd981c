"""One pass over a distributed data set: all ranks make the same steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

from mpidist import context_stack, nest
from mpidist.context_stack import CurrentStrategy
from mpidist.datasets.batches import IN_STEP, BatchSource
from mpidist.datasets.parts import MISSING, element_spec_of, empty_like, join_parts, put_on_devices
from mpidist.datasets.position import Position, Progress
from mpidist.datasets.read_ahead import ReadAhead
from mpidist.errors import OutOfRangeError
from mpidist.strategy_parts import StrategyParts
from mpidist.transport.agreement.fingerprint import fingerprint_of
from mpidist.transport.agreement.mismatch_report import mismatch_error
from mpidist.transport.group.raise_together import ErrorReport, raise_reported
from mpidist.transport.shared_errors import mark_shared

__all__ = ["DistributedIterator", "OptionalBatch"]

_END: Final = object()  # takes the place of a batch after the last one


@final
class OptionalBatch:
    """A batch, or nothing at the end of a data set: what `get_next_as_optional` returns.

    Args:
        batches: The batch in a tuple, or an empty tuple.
    """

    def __init__(self, batches: tuple[Any, ...]) -> None:
        self._batches = batches

    def has_value(self) -> bool:
        """Whether there is a batch: the same on all ranks."""
        return bool(self._batches)

    def get_value(self) -> Any:
        """Return the batch.

        Raises:
            OutOfRangeError: If there is no batch.
        """
        if not self._batches:
            raise OutOfRangeError("there is no batch: the data set is at its end; ask has_value() first")
        return self._batches[0]


@final
class _Step(NamedTuple):
    """What a rank read at a step.

    Attributes:
        part: What this rank's replicas get of the batch; `_END` after the last batch.
        common_fields: What must be equal on all ranks, by name.
        error: What reading the batch raised.
        num_seen: How much of the pass the step is, on all ranks.
    """

    part: Any
    common_fields: dict[str, str]
    error: Exception | None = None
    num_seen: int = 1

    @property
    def has_part(self) -> bool:
        """Whether there is a batch."""
        return self.part is not _END

    @property
    def digest(self) -> int:
        """A digest of what ranks compare, never 0: whether there is a batch or an error, and the common fields."""
        return fingerprint_of((self.has_part, self.common_fields, self.error is not None)) | 1


@final
class _StepReport(NamedTuple):
    """What a rank sends to all ranks if the digests of a step differ.

    Attributes:
        common_fields: As in `_Step`.
        error: The rank's error.
        empty_batches: An empty batch for one replica, in a tuple; an empty tuple if the rank has not read a batch yet.
    """

    common_fields: dict[str, str]
    error: ErrorReport | None
    empty_batches: tuple[Any, ...]


@final
class DistributedIterator(Iterator[Any]):
    """One pass over a distributed data set. Every step is collective: one small round over all ranks.

    In the round ranks compare the data set, the pass and the step; of global batches also whether there is one, its
    length, and at the first step a checksum. After an error the pass is over on all ranks.

    Args:
        strategy_parts: The strategy's ranks.
        number: The number of the data set among those of the strategy.
        source: The batches.
        progress: Which pass of the data set is the last one, and how far it is.
        num_ahead: How many batches a thread may read ahead.
        fetches_to_device: Whether batches are copied to the GPUs of this rank's replicas.
    """

    def __init__(
        self,
        strategy_parts: StrategyParts,
        number: int,
        source: BatchSource,
        progress: Progress,
        num_ahead: int,
        fetches_to_device: bool,
    ) -> None:
        self._strategy_parts = strategy_parts
        self._replicas = strategy_parts.replicas
        self._call = f"next of data set {number}"
        self._source = source
        self._num_ahead = num_ahead
        self._fetches_to_device = fetches_to_device
        self._progress = progress
        self._position: Position | None = None
        self._steps: Iterator[Any] | None = None
        self._first_call = 0  # the sequence number of the first step, which identifies the pass on all ranks
        self._num_steps = 0
        self._empty_batches: tuple[Any, ...] = ()
        self._empty_error: Exception | None = None  # why this rank could not make an empty batch
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
            if part is _END:
                self._is_over, self._steps = True, None  # which ends the thread that reads ahead, and closes files
                if self._position is not None:
                    self._position.close()
        if self._is_over:
            raise StopIteration
        return put_on_devices(part, self._strategy_parts.replicas.devices) if self._fetches_to_device else part

    def get_next(self) -> Any:
        """Return the next batch, as `next` does. Collective.

        Raises:
            OutOfRangeError: If no rank has another batch.
        """
        batch = next(self, _END)
        if batch is _END:
            raise OutOfRangeError("the data set is at its end")
        return batch

    def get_next_as_optional(self) -> OptionalBatch:
        """Return the next batch, or none if no rank has another one. Collective."""
        batch = next(self, _END)
        return OptionalBatch(() if batch is _END else (batch,))

    @property
    def strategy(self) -> CurrentStrategy:
        """The strategy whose ranks step together."""
        return self._strategy_parts.strategy

    @property
    def element_spec(self) -> Any:
        """The form of a batch: `DistributedDataset.element_spec`. Local."""
        return element_spec_of(self._source.batches, self._source.parts_of)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in this pass, as `DistributedDataset.state_dict` does. Local."""
        return self._progress.state_at(self._progress.next_pass() if self._position is None else self._position)

    def require_fitting(self, state: Mapping[str, Any]) -> None:
        """Refuse a state from which `load_state_dict` could not go on. Local.

        Raises:
            ValueError: As `DistributedDataset.require_fitting` does.
        """
        self._progress.require_fitting(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position that `state_dict` returned, in place of the pass so far. Local.

        Raises:
            ValueError: As `DistributedDataset.load_state_dict` does.
        """
        self._progress.restore(state)
        self._position = self._steps = None
        self._num_steps, self._is_over = 0, False

    def _take_step(self) -> Any:
        position = self._progress.next_pass() if self._position is None else self._position
        begun = time.monotonic_ns()
        step = self._read(position)
        nanoseconds = time.monotonic_ns() - begun
        pass_ = f"that began with call {self._first_call}" if self._num_steps else "begins"
        fields = {"pass": pass_, "step": str(self._num_steps), "advice": IN_STEP}
        has_same_variant = self._strategy_parts.agree(self._call, fields, variant=step.digest)
        agreement = self._strategy_parts.group.agreement
        agreement.note_read(nanoseconds)
        if not self._num_steps:
            self._first_call = agreement.sequence
            self._position = position
        self._progress.note_step(position, self)  # on all ranks, as the ranks have agreed
        self._num_steps += 1
        part = step.part
        if not has_same_variant or step.error is not None:
            empty_batch = self._compare(step)
            part = step.part if step.has_part else empty_batch
        position.is_over = part is _END
        position.num_seen += 0 if position.is_over else step.num_seen
        return part

    def _read(self, position: Position) -> _Step:
        """Read the next batch. Local; never raises."""
        source = self._source
        try:
            if self._steps is None:
                steps = source.steps_from(position.epoch, position.num_seen)
                self._steps = ReadAhead(steps, self._num_ahead) if self._num_ahead else steps
            batch, num_seen, parts = next(self._steps, (_END, 0, ()))
            if batch is _END:
                return _Step(_END, source.end_fields, num_seen=source.num_at_end)
            part = self._joined(parts)
            return _Step(part, source.common_fields(batch, num_seen, not self._num_steps), num_seen=num_seen)
        except Exception as problem:  # of any kind: the other ranks must learn of it
            return _Step(None, {}, problem)

    def _joined(self, parts: Sequence[Any]) -> Any:
        """Join the parts of this rank's replicas, with an empty batch in the place of each part that is missing."""
        if not self._empty_batches:
            self._make_empty_batch(next(part for part in parts if part is not MISSING))
        if len(parts) > 1 and any(part is MISSING for part in parts):
            if not self._empty_batches and self._empty_error is not None:
                raise self._empty_error
            parts = [self._empty_batches[0] if part is MISSING else part for part in parts]
        return join_parts(parts, self._replicas)

    def _make_empty_batch(self, part: Any) -> None:
        try:
            self._empty_batches = (nest.map_structure(empty_like, part),)
        except Exception as problem:  # of any array library; raised only if a replica needs the empty batch
            self._empty_error = problem

    def _compare(self, step: _Step) -> Any:
        """Exchange what differs between ranks at a step. Collective.

        Returns:
            Empty batches like those of some rank, for a rank whose own batches have ended; `_END` if those of all ranks
            have.

        Raises:
            InvalidArgumentError: If the ranks have different global batches. On every rank.
            Exception: The error of the lowest rank that has one. On every rank.
        """
        group, error = self._strategy_parts.group, step.error or self._empty_error
        own = _StepReport(step.common_fields, None if error is None else ErrorReport.of(error), self._empty_batches)
        reports: list[_StepReport] = group.agreement.all_gather_object(own)
        raise_reported(error, [report.error for report in reports], group)
        everyone = [report.common_fields for report in reports]
        if any(fields != step.common_fields for fields in everyone):
            call = {"call": self._call, "advice": self._source.advice_for(everyone)}
            problem = mismatch_error([call | fields for fields in everyone], group.agreement.sequence)
            mark_shared(problem, group.agreement.ranks)
            raise problem
        empty_batches = [batch for report in reports for batch in report.empty_batches]
        return join_parts(empty_batches[:1] * self._replicas.num_here, self._replicas) if empty_batches else _END
