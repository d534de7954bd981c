"""The programming model of tf.distribute on MPI.

One MPI rank is one replica. A strategy runs a step function on every rank and combines what the ranks computed:
within a node, across nodes, on NumPy or CuPy arrays.
"""

import os as _os
from importlib import import_module as _import_module

from mpidist.context_stack import set_default_factory as _set_default_factory
from mpidist.package_names import define_names as _define_names
from mpidist.transport.failures import open_groups as _open_groups

__version__ = "0.1.0"

_MODULES = (
    "checkpoint",
    "cluster_resolver",
    "coordinator",
    "errors",
    "experimental",
    "partitioners",
    "server_rules",
)
# By each module its names. `__init__.pyi` has the same names.
_NAMES = {
    "mpidist.contexts": (
        "experimental_set_strategy",
        "get_loss_reduction",
        "get_replica_context",
        "get_strategy",
        "has_strategy",
        "in_cross_replica_context",
    ),
    "mpidist.cross_device_ops.collective_all_reduce": ("CollectiveAllReduce",),
    "mpidist.cross_device_ops.cross_device_ops": ("CrossDeviceOps",),
    "mpidist.cross_device_ops.hierarchical_copy_all_reduce": ("HierarchicalCopyAllReduce",),
    "mpidist.cross_device_ops.nccl_all_reduce": ("NcclAllReduce",),
    "mpidist.cross_device_ops.reduction_to_one_device": ("ReductionToOneDevice",),
    "mpidist.datasets.array_batches": ("Batches",),
    "mpidist.datasets.distributed_dataset": ("DistributedDataset",),
    "mpidist.datasets.distributed_iterator": ("DistributedIterator",),
    "mpidist.datasets.files": ("Files",),
    "mpidist.datasets.input_options": (
        "AutoShardPolicy",
        "InputContext",
        "InputOptions",
        "InputReplicationMode",
    ),
    "mpidist.options": (
        "CollectiveCommunication",
        "CollectiveHints",
        "CommunicationImplementation",
        "CommunicationOptions",
        "Compression",
        "ReduceOp",
    ),
    "mpidist.parameter_server.variable": ("ShardedVariable",),
    "mpidist.replica_context.replica_context": ("ReplicaContext",),
    "mpidist.strategies.central_storage": ("CentralStorageStrategy",),
    "mpidist.strategies.mirrored": ("MirroredStrategy",),
    "mpidist.strategies.multi_worker_mirrored": ("MultiWorkerMirroredStrategy",),
    "mpidist.strategies.one_device": ("OneDeviceStrategy",),
    "mpidist.strategies.parameter_server": (
        "ParameterServerStrategy",
        "Server",
    ),
    "mpidist.strategy": (
        "Strategy",
        "ValueContext",
    ),
    "mpidist.strategy_extended": ("StrategyExtended",),
    "mpidist.values": (
        "DistributedValues",
        "IndexedSlices",
        "Mirrored",
        "PerReplica",
    ),
    "mpidist.variables.rules": (
        "VariableAggregation",
        "VariableSynchronization",
    ),
    "mpidist.variables.variable": ("Variable",),
}
__all__ = sorted((*_MODULES, *(name for names in _NAMES.values() for name in names)))

_define_names(__name__, _NAMES)
_set_default_factory(lambda: _import_module("mpidist.strategies.default").make_default())
_open_groups.explain_failures(_os.environ)
_open_groups.show_stack(_os.environ)
_open_groups.end_job_before_start(_os.environ)
