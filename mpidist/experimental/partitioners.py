"""An alias of `mpidist.partitioners`."""

from mpidist.partitioners import FixedShardsPartitioner as FixedShardsPartitioner
from mpidist.partitioners import MaxSizePartitioner as MaxSizePartitioner
from mpidist.partitioners import MinSizePartitioner as MinSizePartitioner
from mpidist.partitioners import Partitioner as Partitioner

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]
