"""Into how many shards a variable on parameter servers is cut."""

from mpidist.parameter_server import partitioners as _partitioners

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]

FixedShardsPartitioner = _partitioners.FixedShardsPartitioner
MaxSizePartitioner = _partitioners.MaxSizePartitioner
MinSizePartitioner = _partitioners.MinSizePartitioner
Partitioner = _partitioners.Partitioner
