"""The all-reduce algorithms, one per file."""

from mpidist.cross_device_ops.axis_reduction import reduce_along_axis
from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.cross_device_ops.collective_all_reduce import CollectiveAllReduce
from mpidist.cross_device_ops.cross_device_ops import CrossDeviceOps
from mpidist.cross_device_ops.hierarchical_copy_all_reduce import HierarchicalCopyAllReduce
from mpidist.cross_device_ops.late_outs import LateOuts
from mpidist.cross_device_ops.nccl_all_reduce import NcclAllReduce
from mpidist.cross_device_ops.reduction_to_one_device import ReductionToOneDevice
from mpidist.cross_device_ops.weighted_mean import weighted_mean

__all__ = [
    "BoundOps",
    "CollectiveAllReduce",
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "LateOuts",
    "NcclAllReduce",
    "ReductionToOneDevice",
    "reduce_along_axis",
    "weighted_mean",
]
