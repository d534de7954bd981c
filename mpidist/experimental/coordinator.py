"""An alias of `mpidist.coordinator`."""

from mpidist.coordinator import ClusterCoordinator as ClusterCoordinator
from mpidist.coordinator import PerWorkerDataset as PerWorkerDataset
from mpidist.coordinator import PerWorkerIterator as PerWorkerIterator
from mpidist.coordinator import RemoteValue as RemoteValue
from mpidist.coordinator import register as register

__all__ = ["ClusterCoordinator", "PerWorkerDataset", "PerWorkerIterator", "RemoteValue", "register"]
