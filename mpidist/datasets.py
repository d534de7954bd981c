"""Data sets of batches: every rank its part of each, and all ranks the same number of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from mpidist import contexts, nest
from mpidist.errors import InvalidArgumentError
from mpidist.transport import arrays
from mpidist.transport.communicator import shard_bounds

if TYPE_CHECKING:
    from mpidist.extended import StrategyExtended

__all__ = ["DistributedDataset", "InputContext", "InputOptions", "InputReplicationMode"]

_HAS_BATCH: Final = 1
_LACKS_SPEC: Final = 2
_HAS_ERROR: Final = 4


@final
class InputReplicationMode(Enum):
    """How many input pipelines there are. With one replica per rank, both mean one on every rank."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@final
@dataclass(frozen=True)
class InputOptions:
    """How a distributed data set hands out batches.

    Args:
        experimental_fetch_to_device: Copy batches to this rank's GPU, where its device is one.
        experimental_replication_mode: `PER_REPLICA` is for `distribute_datasets_from_function` alone.
    """

    experimental_fetch_to_device: bool = True
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER


@final
@dataclass(frozen=True)
class InputContext:
    """What the function of `distribute_datasets_from_function` is told.

    Args:
        num_input_pipelines: Number of input pipelines: one on every rank.
        input_pipeline_id: This rank's.
        num_replicas_in_sync: Number of replicas.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Divide a global batch size by the number of replicas.

        Raises:
            ValueError: If it does not divide evenly.
        """
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                f"the global batch size {global_batch_size} is not divisible by the {self.num_replicas_in_sync} "
                "replicas; choose a multiple, or let experimental_distribute_dataset split uneven batches"
            )
        return size

    def __str__(self) -> str:
        return f"InputContext(input pipeline id {self.input_pipeline_id}, total: {self.num_input_pipelines})"


@final
class DistributedDataset:
    """This rank's batches. Iterating is collective: one message of a few bytes per step.

    All ranks make the same number of steps: a rank that has run out gets empty batches, of length 0 on axis 0,
    until all ranks have. `strategy.reduce("MEAN", x, axis=0)` weighs them right.

    Args:
        extended: The ranks.
        batches: A re-iterable of batches.
        part: Cuts this rank's part out of a batch.
        options: Where the batches are put.
    """

    def __init__(
        self, extended: StrategyExtended, batches: Iterable[Any], part: Callable[[Any], Any], options: InputOptions
    ) -> None:
        if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
            raise TypeError(f"a data set is an iterable of batches, got {type(batches).__name__}")
        if hasattr(batches, "__next__"):
            raise TypeError(
                f"a data set must be one that can be iterated again, and a {type(batches).__name__} is used up after "
                "one pass; pass a list, or an object whose __iter__ starts anew"
            )
        self._extended = extended
        self._batches = batches
        self._part = part
        self._fetch = options.experimental_fetch_to_device and extended.device.is_gpu

    @classmethod
    def from_global_batches(
        cls, extended: StrategyExtended, dataset: Iterable[Any], options: InputOptions | None
    ) -> DistributedDataset:
        """Cut every batch in contiguous parts, one per rank, that differ by one row at most.

        Raises:
            NotImplementedError: With `InputReplicationMode.PER_REPLICA`.
        """
        options = _options(options)
        if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            raise NotImplementedError(
                "InputReplicationMode.PER_REPLICA is for distribute_datasets_from_function; a data set of global "
                "batches is cut for the replicas anyway"
            )
        topology = extended.group.topology
        return cls(extended, dataset, lambda batch: _part(batch, topology.rank, topology.size), options)

    @classmethod
    def from_own_batches(
        cls, extended: StrategyExtended, dataset: Iterable[Any], options: InputOptions | None
    ) -> DistributedDataset:
        """Take every rank's batches as they are."""
        return cls(extended, dataset, lambda batch: batch, _options(options))

    def __iter__(self) -> Iterator[Any]:
        return _DistributedIterator(self._extended, self._batches, self._part, self._fetch)


@final
class _DistributedIterator:
    """One pass over a distributed data set."""

    def __init__(
        self, extended: StrategyExtended, batches: Iterable[Any], part: Callable[[Any], Any], fetch: bool
    ) -> None:
        self._extended = extended
        self._batches = batches
        self._source: Iterator[Any] | None = None
        self._part = part
        self._fetch = fetch
        self._empty: Any = None
        self._knows_empty = False
        self._is_over = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        entry = contexts.innermost()
        if entry is not None and entry.replica_context is not None:
            raise ValueError("next() of a distributed data set should be called from outside of strategy.run()")
        if self._is_over:
            raise StopIteration
        part, error = None, None
        flags = 0
        try:
            if self._source is None:
                self._source = iter(self._batches)
            part = self._part(next(self._source))
            flags = _HAS_BATCH
        except StopIteration:
            flags = 0 if self._knows_empty else _LACKS_SPEC
        except Exception as problem:  # whatever reading runs into, the other ranks must learn of it
            flags, error = _HAS_ERROR, problem
        return self._step(part, flags, error)

    def _step(self, part: Any, flags: int, error: Exception | None) -> Any:
        group = self._extended.group
        self._extended.agree("next of a distributed data set", {})
        united = group.any_of(flags)
        if united & _HAS_ERROR:
            _raise_everybodys(group.exchange(error and f"{type(error).__name__}: {error}"), error)
        if not united & _HAS_BATCH:
            self._is_over = True
            raise StopIteration
        if flags & _HAS_BATCH:
            self._empty, self._knows_empty = nest.map_structure(_empty_like, part), True
        if united & _LACKS_SPEC:
            known = group.exchange((self._knows_empty, self._empty))
            self._empty, self._knows_empty = next(empty for knows, empty in known if knows), True
        result = part if flags & _HAS_BATCH else self._empty
        return nest.map_structure(_to_device, result) if self._fetch else result


def _options(options: InputOptions | None) -> InputOptions:
    if options is not None and not isinstance(options, InputOptions):
        raise TypeError(f"options must be an InputOptions or None, got {type(options).__name__}")
    return options if options is not None else InputOptions()


def _part(batch: Any, rank: int, size: int) -> Any:
    """Cut a rank's contiguous part out of a global batch."""
    leaves, _ = nest.flatten(batch)
    rows = [np.asarray(leaf) if isinstance(leaf, (int, float, np.generic)) else leaf for leaf in leaves]
    shapes = [tuple(getattr(leaf, "shape", ())) for leaf in rows]
    lengths = {shape[0] if shape else -1 for shape in shapes}
    if len(lengths) != 1 or -1 in lengths:
        raise InvalidArgumentError(
            f"a global batch must be arrays that are equally long on axis 0, got shapes {[list(s) for s in shapes]}; "
            "a data set is an iterable of batches, so one array alone is taken row by row: put batches in a list"
        )
    bounds = shard_bounds(lengths.pop(), size)
    return nest.rebuild(batch, [leaf[bounds[rank] : bounds[rank + 1]] for leaf in leaves])


def _empty_like(leaf: Any) -> Any:
    """Return an array like a batch, of length 0 on axis 0; a number counts as a row of its own."""
    if not hasattr(leaf, "shape") or leaf.shape == ():
        return np.empty(0, np.asarray(leaf).dtype)
    return leaf[:0]


def _to_device(leaf: Any) -> Any:
    return arrays.to_device(leaf) if isinstance(leaf, np.ndarray) else leaf


def _raise_everybodys(errors: list[str | None], own: Exception | None) -> None:
    if own is not None:
        raise own
    rank, first = next((rank, text) for rank, text in enumerate(errors) if text is not None)
    raise InvalidArgumentError(f"rank {rank} could not read its batch: {first}")
