"""One pass over a distributed data set: all ranks make the same steps."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, final

from mpidist import context_stack, nest
from mpidist.context_stack import CurrentStrategy
from mpidist.datasets.batches import Step, advice_for
from mpidist.datasets.input_options import InputOptions
from mpidist.datasets.parts import MISSING, empty_like, join_parts, put_on_devices
from mpidist.datasets.position import Position, Progress
from mpidist.datasets.read_ahead import ReadAhead
from mpidist.errors import OutOfRangeError
from mpidist.strategy_parts import StrategyParts
from mpidist.transport.agreement.fingerprint import fingerprint_of
from mpidist.transport.agreement.mismatch_report import mismatch_error
from mpidist.transport.group.raise_together import ErrorReport, raise_reported
from mpidist.transport.shared_errors import mark_shared

__all__ = ["DistributedIterator", "OptionalBatch"]

logger = logging.getLogger(__name__)

_END: Final = object()  # takes the place of a batch after the last one
_IN_STEP: Final = (
    "Let all ranks stop at the same step, by a value that is reduced over ranks, and load the same position"
)


@final
class OptionalBatch:
    """A batch, or nothing at the end of a data set: what `get_next_as_optional` returns."""

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
            raise OutOfRangeError("there is no batch: the data set is at its end; call has_value() first")
        return self._batches[0]


@final
class DistributedIterator(Iterator[Any]):
    """One pass over a distributed data set. Every step is collective: one small round over all ranks.

    In the round ranks compare the data set, the pass, where it begins, and the step; of global batches also whether
    there is one, its length, and at the first step a checksum. After an error the pass is over on all ranks.
    """

    def __init__(self, strategy_parts: StrategyParts, number: int, progress: Progress, options: InputOptions) -> None:
        self._strategy_parts, self._progress, self._source = strategy_parts, progress, progress.source
        self._replicas = strategy_parts.replicas
        self._call = f"next of data set {number}"
        self._num_ahead = options.experimental_per_replica_buffer_size - 1
        fetch, is_placed = options.experimental_fetch_to_device, options.experimental_place_dataset_on_device
        self._fetches_to_device = (
            fetch is not False
            and not is_placed
            and any(device.is_gpu and (fetch or device.is_named) for device in self._replicas.devices)
        )
        self._position: Position | None = None
        self._steps: Iterator[Step] | None = None
        self._first_call = 0  # the sequence number of the first step, which identifies the pass on all ranks
        self._num_steps = 0
        self._empty_batches: tuple[Any, ...] = ()  # one for one replica, once this rank has read a batch
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
        return put_on_devices(part, self._replicas.devices) if self._fetches_to_device else part

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
        return self._source.element_spec

    def state_dict(self) -> dict[str, Any]:
        """Return the position in this pass, as `DistributedDataset.state_dict` does. Local."""
        return self._progress.state_at(self._progress.next_pass() if self._position is None else self._position)

    def require_fitting(self, state: Mapping[str, Any]) -> None:
        """Refuse a state from which `load_state_dict` could not continue. Local.

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
        step, part, error = self._read(position)
        nanoseconds = time.monotonic_ns() - begun
        if self._num_steps:
            pass_ = f"that began with call {self._first_call}"
        else:  # from another position, which a program may have loaded, a rank would have other batches
            pass_ = f"begins at epoch {position.epoch}, {self._source.unit} {position.num_seen}"
        fields = {"pass": pass_, "step": str(self._num_steps), "advice": _IN_STEP}
        variant = fingerprint_of((part is not _END, step.common_fields, error is not None)) | 1  # never 0
        has_same_variant = self._strategy_parts.agree(self._call, fields, variant=variant)
        agreement = self._strategy_parts.group.agreement
        agreement.note_read(nanoseconds)
        if not self._num_steps:
            self._first_call = agreement.sequence
            self._position = position
        is_unused = self._progress.note_step(position, self)  # on all ranks, as the ranks have agreed
        if is_unused and self._strategy_parts.topology.rank == 0:
            logger.warning(
                "mpidist: a position was restored, and a pass that had begun before goes on from where it was: begin a "
                "pass after the restore, or save and restore its iterator"
            )
        self._num_steps += 1
        if not has_same_variant or error is not None:
            empty_batch = self._compare(step, error or self._empty_error)
            part = empty_batch if part is _END else part
        position.is_over = part is _END
        position.num_seen += 0 if position.is_over else step.num_seen
        return part

    def _read(self, position: Position) -> tuple[Step, Any, Exception | None]:
        """Read the next step, and join its parts: `_END` after the last one. Local; returns an error."""
        step, end = self._source.end, self._source.end
        try:
            if self._steps is None:
                steps = self._source.steps_from(position.epoch, position.num_seen)
                self._steps = ReadAhead(steps, self._num_ahead, self._source.left) if self._num_ahead else steps
            step = next(self._steps, end)
            return step, _END if step is end else self._joined(step.parts), None
        except Exception as problem:  # of any kind: the other ranks must learn of it
            return step, None, problem

    def _joined(self, parts: Sequence[Any]) -> Any:
        """Join the parts of this rank's replicas, with an empty batch in the place of each part that is missing."""
        if not self._empty_batches:
            try:
                like = next(part for part in parts if part is not MISSING)
                self._empty_batches = (nest.map_structure(empty_like, like),)
            except Exception as problem:  # of any array library; raised only if a replica needs the empty batch
                self._empty_error = problem
        if len(parts) > 1 and any(part is MISSING for part in parts):
            if not self._empty_batches and self._empty_error is not None:
                raise self._empty_error
            parts = [self._empty_batches[0] if part is MISSING else part for part in parts]
        return join_parts(parts, self._replicas)

    def _compare(self, step: Step, error: Exception | None) -> Any:
        """Exchange what differs between ranks at a step. Collective: an error of a rank is raised on all.

        Returns empty batches like those of this rank, else of another, for a rank whose own have ended; `_END` if those
        of all have.
        """
        group = self._strategy_parts.group
        own = step.common_fields, None if error is None else ErrorReport.of(error), self._pickled_empty_batch()
        everyone, errors, batches = zip(*group.agreement.all_gather_object(own), strict=True)
        raise_reported(error, errors, group)
        if any(fields != step.common_fields for fields in everyone):
            call = {"call": self._call, "advice": advice_for(everyone)}
            problem = mismatch_error([call | fields for fields in everyone], group.agreement.sequence)
            mark_shared(problem, group.agreement.ranks)
            raise problem
        pickled = [batch for batch in batches if isinstance(batch, bytes)]
        if None in batches and not pickled:
            raise_reported(None, batches, group)
            return _END
        empty_batches = self._empty_batches or (pickle.loads(pickled[0]),)
        return join_parts([*empty_batches] * self._replicas.num_here, self._replicas)

    def _pickled_empty_batch(self) -> bytes | ErrorReport | None:
        """Pickle the empty batch for a rank that has read no batch; `None` if this rank has not either."""
        try:
            return pickle.dumps(self._empty_batches[0]) if self._empty_batches else None
        except Exception as problem:  # of a class that is made in a function; raised only if a rank needs the batch
            return ErrorReport.of(problem)
