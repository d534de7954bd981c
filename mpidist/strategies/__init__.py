"""The strategies, one per file. A strategy only chooses parts."""

from mpidist.strategies.central_storage import CentralStorageStrategy
from mpidist.strategies.default import make_default
from mpidist.strategies.mirrored import MirroredStrategy
from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpidist.strategies.one_device import OneDeviceStrategy
from mpidist.strategies.parameter_server import ParameterServerStrategy, Server

__all__ = [
    "CentralStorageStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "Server",
    "make_default",
]
