"""A data set over all ranks, which can be iterated again and again."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any, NamedTuple, final

import numpy as np

from mpidist import nest
from mpidist.datasets.batches import GlobalBatches, OwnBatches, SharedBatches, require_batches
from mpidist.datasets.distributed_iterator import DistributedIterator
from mpidist.datasets.input_options import InputOptions, InputReplicationMode
from mpidist.strategy_extended import StrategyExtended

__all__ = ["ArraySpec", "DistributedDataset"]


@final
class ArraySpec(NamedTuple):
    """The form of one array of a batch: `None` in its shape is a length that may be another in each batch."""

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]


@final
class DistributedDataset:
    """This rank's batches. Iterating is collective: one small round over all ranks at each step.

    All ranks make the same number of steps. Where each rank makes its own batches, one that has run out gets empty
    batches, of length 0 on axis 0, until all ranks have. `strategy.reduce("MEAN", x, axis=0)` weighs them right.

    Args:
        extended: The ranks.
        shared: The batches, and how ranks share them.
        options: Where the batches are put.

    Raises:
        TypeError: If the source is no re-iterable of batches.
    """

    def __init__(self, extended: StrategyExtended, shared: SharedBatches, options: InputOptions) -> None:
        require_batches(shared.source)
        self._extended = extended
        self._shared = shared
        self._fetches = options.experimental_fetch_to_device and extended.device.is_gpu
        self._num_ahead = options.experimental_per_replica_buffer_size - 1
        self._number = extended.next_dataset_number()

    @classmethod
    def from_global_batches(
        cls, extended: StrategyExtended, dataset: Iterable[Any], options: InputOptions | None
    ) -> DistributedDataset:
        """Cut every batch in contiguous parts, one per rank, that differ by one row at most. Local.

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
        """Take every rank's batches as they are. Local."""
        return cls(extended, OwnBatches(dataset), _options(options))

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self._extended, self._number, self._shared, self._num_ahead, self._fetches)

    def __len__(self) -> int:
        """Count the batches of this rank's source, where it can be told: the steps of a pass over global batches.

        Raises:
            TypeError: If the source has no length.
        """
        source = self._shared.source
        if not isinstance(source, Sized):
            raise TypeError(f"the source of this data set, a {type(source).__name__}, has no len()")
        return len(source)

    def __bool__(self) -> bool:
        return True  # also where the source has no length

    @property
    def element_spec(self) -> Any:
        """The form of a batch: a nest with an `ArraySpec` for each array. Local.

        What the source says of itself as `element_spec`; else that of its first batch, which is read for it in a pass
        of its own: a source that counts its passes must be asked on all ranks.

        Raises:
            ValueError: If there is no batch.
        """
        told = getattr(self._shared.source, "element_spec", None)
        if told is not None:
            return told
        for batch in self._shared.source:
            return nest.map_structure(_spec_of, self._shared.part_of(batch))
        raise ValueError("an empty data set has no element_spec")


def _spec_of(leaf: Any) -> ArraySpec:
    shape = tuple(getattr(leaf, "shape", ()))
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    return ArraySpec((None, *shape[1:]) if shape else (), dtype)


def _options(options: InputOptions | None) -> InputOptions:
    if options is not None and not isinstance(options, InputOptions):
        raise TypeError(f"options must be an InputOptions or None, got {type(options).__name__}")
    return options if options is not None else InputOptions()
