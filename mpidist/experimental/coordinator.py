"""An alias of `mpidist.coordinator`."""

from mpidist.coordinator.cluster_coordinator import ClusterCoordinator as ClusterCoordinator
from mpidist.coordinator.crew import RemoteValue as RemoteValue
from mpidist.coordinator.functions import PerWorkerDataset as PerWorkerDataset
from mpidist.coordinator.functions import PerWorkerIterator as PerWorkerIterator
from mpidist.coordinator.functions import register as register

__all__ = ["ClusterCoordinator", "PerWorkerDataset", "PerWorkerIterator", "RemoteValue", "register"]
