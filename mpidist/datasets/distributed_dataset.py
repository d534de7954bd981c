"""A data set over all ranks, which can be iterated repeatedly."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any, NamedTuple, final

import numpy as np

from mpidist import nest
from mpidist.datasets.batches import BatchSource, GlobalBatches, OwnBatches, require_batches
from mpidist.datasets.distributed_iterator import DistributedIterator
from mpidist.datasets.input_options import InputOptions, InputReplicationMode
from mpidist.strategy_extended import StrategyExtended

__all__ = ["ArraySpec", "DistributedDataset"]


@final
class ArraySpec(NamedTuple):
    """Shape and dtype of one array of the batches. `None` in the shape is a length that may differ between batches."""

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]


@final
class DistributedDataset:
    """This rank's batches. Iterating is collective: one small round over all ranks at each step.

    All ranks make the same number of steps. If ranks make their own batches, a rank whose batches have ended gets empty
    ones, of length 0 on axis 0, until those of all ranks have. `strategy.reduce("MEAN", x, axis=0)` weighs them right.

    Args:
        extended: The strategy's ranks and device.
        source: The batches, and which part of each is this rank's.
        options: The memory that batches are put into, and how far to read ahead.

    Raises:
        TypeError: If the source's batches are no re-iterable of batches.
    """

    def __init__(self, extended: StrategyExtended, source: BatchSource, options: InputOptions) -> None:
        require_batches(source.batches)
        self._extended = extended
        self._source = source
        self._fetches_to_device = options.experimental_fetch_to_device and extended.device.is_gpu
        self._num_ahead = options.experimental_per_replica_buffer_size - 1
        self._number = extended.next_dataset_number()

    @classmethod
    def from_global_batches(
        cls, extended: StrategyExtended, dataset: Iterable[Any], options: InputOptions | None
    ) -> DistributedDataset:
        """Cut every batch into contiguous parts, one per rank. Their lengths differ by at most one row. Local.

        Raises:
            NotImplementedError: With `InputReplicationMode.PER_REPLICA`.
            TypeError: If the data set is no re-iterable of batches.
        """
        options = _options(options)
        if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            raise NotImplementedError(
                "InputReplicationMode.PER_REPLICA is for distribute_datasets_from_function; a data set of global "
                "batches is cut for the replicas anyway"
            )
        replica, check = extended.replicas.ids_here[0], extended.group.settings.check
        return cls(extended, GlobalBatches(dataset, replica, extended.replicas.total, check), options)

    @classmethod
    def from_own_batches(
        cls, extended: StrategyExtended, dataset: Iterable[Any], options: InputOptions | None
    ) -> DistributedDataset:
        """Let every rank iterate its own batches. Local."""
        return cls(extended, OwnBatches(dataset), _options(options))

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self._extended, self._number, self._source, self._num_ahead, self._fetches_to_device)

    def __len__(self) -> int:
        """Return the number of this rank's batches: of global batches, the steps of a pass. Local.

        Raises:
            TypeError: If the iterable of batches has no length.
        """
        batches = self._source.batches
        if not isinstance(batches, Sized):
            raise TypeError(f"the source of this data set, a {type(batches).__name__}, has no len()")
        return len(batches)

    def __bool__(self) -> bool:
        return True  # else Python would call `__len__`, which may raise

    @property
    def element_spec(self) -> Any:
        """The form of a batch: a nest with an `ArraySpec` for each array. Local.

        The `element_spec` of the iterable of batches, if it has that attribute; else the form of the first batch, for
        which a pass is begun: if the iterable counts passes, read this property on all ranks.

        Raises:
            ValueError: If there is no batch.
        """
        spec = getattr(self._source.batches, "element_spec", None)
        if spec is not None:
            return spec
        for batch in self._source.batches:
            return nest.map_structure(_spec_of, self._source.part_of(batch))
        raise ValueError("an empty data set has no element_spec")


def _spec_of(leaf: Any) -> ArraySpec:
    shape = tuple(getattr(leaf, "shape", ()))
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    return ArraySpec((None, *shape[1:]) if shape else (), dtype)


def _options(options: InputOptions | None) -> InputOptions:
    if options is not None and not isinstance(options, InputOptions):
        raise TypeError(f"options must be an InputOptions or None, got {type(options).__name__}")
    return options if options is not None else InputOptions()
