"""Data sets of batches: every replica gets its part of each batch, and all ranks make the same number of steps."""

from mpidist.datasets.array_batches import Batches
from mpidist.datasets.distributed_dataset import DistributedDataset
from mpidist.datasets.distributed_iterator import DistributedIterator, OptionalBatch
from mpidist.datasets.files import Files
from mpidist.datasets.input_options import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode

__all__ = [
    "AutoShardPolicy",
    "Batches",
    "DistributedDataset",
    "DistributedIterator",
    "Files",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "OptionalBatch",
]
