"""The names that tf.distribute has under `experimental`: aliases of those of `mpidist` and `mpidist.checkpoint`."""

from mpidist.checkpoint import PreemptionCheckpointHandler as PreemptionCheckpointHandler
from mpidist.datasets.input_options import AutoShardPolicy as AutoShardPolicy
from mpidist.experimental import coordinator as coordinator
from mpidist.experimental import partitioners as partitioners
from mpidist.experimental import server_rules as server_rules
from mpidist.options import CollectiveCommunication as CollectiveCommunication
from mpidist.options import CollectiveHints as CollectiveHints
from mpidist.options import CommunicationImplementation as CommunicationImplementation
from mpidist.options import CommunicationOptions as CommunicationOptions
from mpidist.package_names import define_names as _define_names
from mpidist.parameter_server.variable import ShardedVariable as ShardedVariable
from mpidist.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy
from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from mpidist.strategies.parameter_server import ParameterServerStrategy as ParameterServerStrategy
from mpidist.strategies.parameter_server import Server as Server
from mpidist.values import ValueContext as ValueContext

__all__ = [
    "AutoShardPolicy",
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "Server",
    "ShardedVariable",
    "ValueContext",
    "coordinator",
    "partitioners",
    "server_rules",
]

_define_names(__name__)
