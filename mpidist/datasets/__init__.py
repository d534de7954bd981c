"""Data sets of batches: every rank its part of each, and all ranks the same number of steps."""

from mpidist.datasets.batches import require_batches as require_batches
from mpidist.datasets.distributed_dataset import DistributedDataset as DistributedDataset
from mpidist.datasets.distributed_iterator import DistributedIterator as DistributedIterator
from mpidist.datasets.distributed_iterator import OptionalBatch as OptionalBatch
from mpidist.datasets.input_options import InputContext as InputContext
from mpidist.datasets.input_options import InputOptions as InputOptions
from mpidist.datasets.input_options import InputReplicationMode as InputReplicationMode

__all__ = [
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "OptionalBatch",
    "require_batches",
]
