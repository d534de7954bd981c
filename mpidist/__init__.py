"""The programming model of tf.distribute on MPI.

One MPI rank is one replica. A strategy runs a step function on every rank and combines what the ranks computed:
within a node, across nodes, on NumPy or CuPy arrays.
"""

import os as _os

from mpidist import checkpoint as checkpoint
from mpidist import cluster_resolver as cluster_resolver
from mpidist import context_stack as _context_stack
from mpidist import coordinator as coordinator
from mpidist import errors as errors
from mpidist import experimental as experimental
from mpidist import partitioners as partitioners
from mpidist import server_rules as server_rules
from mpidist.absent_names import explain_absent_names as _explain_absent_names
from mpidist.contexts import experimental_set_strategy as experimental_set_strategy
from mpidist.contexts import get_loss_reduction as get_loss_reduction
from mpidist.contexts import get_replica_context as get_replica_context
from mpidist.contexts import get_strategy as get_strategy
from mpidist.contexts import has_strategy as has_strategy
from mpidist.contexts import in_cross_replica_context as in_cross_replica_context
from mpidist.cross_device_ops import CollectiveAllReduce as CollectiveAllReduce
from mpidist.cross_device_ops import CrossDeviceOps as CrossDeviceOps
from mpidist.cross_device_ops import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
from mpidist.cross_device_ops import NcclAllReduce as NcclAllReduce
from mpidist.cross_device_ops import ReductionToOneDevice as ReductionToOneDevice
from mpidist.datasets import AutoShardPolicy as AutoShardPolicy
from mpidist.datasets import Batches as Batches
from mpidist.datasets import DistributedDataset as DistributedDataset
from mpidist.datasets import DistributedIterator as DistributedIterator
from mpidist.datasets import Files as Files
from mpidist.datasets import InputContext as InputContext
from mpidist.datasets import InputOptions as InputOptions
from mpidist.datasets import InputReplicationMode as InputReplicationMode
from mpidist.options import CollectiveCommunication as CollectiveCommunication
from mpidist.options import CollectiveHints as CollectiveHints
from mpidist.options import CommunicationImplementation as CommunicationImplementation
from mpidist.options import CommunicationOptions as CommunicationOptions
from mpidist.options import Compression as Compression
from mpidist.options import ReduceOp as ReduceOp
from mpidist.parameter_server import ShardedVariable as ShardedVariable
from mpidist.replica_context import ReplicaContext as ReplicaContext
from mpidist.strategies import CentralStorageStrategy as CentralStorageStrategy
from mpidist.strategies import MirroredStrategy as MirroredStrategy
from mpidist.strategies import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from mpidist.strategies import OneDeviceStrategy as OneDeviceStrategy
from mpidist.strategies import ParameterServerStrategy as ParameterServerStrategy
from mpidist.strategies import Server as Server
from mpidist.strategies import make_default as _make_default
from mpidist.strategy import Strategy as Strategy
from mpidist.strategy import ValueContext as ValueContext
from mpidist.strategy_extended import StrategyExtended as StrategyExtended
from mpidist.transport import open_groups as _open_groups
from mpidist.values import DistributedValues as DistributedValues
from mpidist.values import IndexedSlices as IndexedSlices
from mpidist.values import Mirrored as Mirrored
from mpidist.values import PerReplica as PerReplica
from mpidist.variables import Variable as Variable
from mpidist.variables import VariableAggregation as VariableAggregation
from mpidist.variables import VariableSynchronization as VariableSynchronization

__all__ = [
    "AutoShardPolicy",
    "Batches",
    "CentralStorageStrategy",
    "CollectiveAllReduce",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "Compression",
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "Files",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Mirrored",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "Server",
    "ShardedVariable",
    "Strategy",
    "StrategyExtended",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "checkpoint",
    "cluster_resolver",
    "coordinator",
    "errors",
    "experimental",
    "experimental_set_strategy",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "partitioners",
    "server_rules",
]

__version__ = "0.1.0"

_context_stack.set_default_factory(_make_default)
_explain_absent_names(__name__)
_open_groups.explain_failures(_os.environ)
_open_groups.show_stack(_os.environ)
_open_groups.end_job_before_start(_os.environ)
