"""The strategies, one in each file. A strategy only chooses parts."""

from mpidist.strategies.default import make_default as make_default
from mpidist.strategies.mirrored import MirroredStrategy as MirroredStrategy
from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from mpidist.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy

__all__ = [
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "make_default",
]
