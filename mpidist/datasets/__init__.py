"""Data sets of batches: every replica gets its part of each batch, and all ranks make the same number of steps."""

from mpidist.datasets.array_batches import Batches
from mpidist.datasets.distributed_dataset import DistributedDataset
from mpidist.datasets.distributed_iterator import DistributedIterator, OptionalBatch
from mpidist.datasets.input_options import InputContext, InputOptions, InputReplicationMode

__all__ = [
    "Batches",
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "OptionalBatch",
]
