"""A chief that hands functions to workers, on top of parameter servers: schedule, join, fetch.

cluster_coordinator   the public object: the chief's queue, and the workers' loop
functions             what may be scheduled: functions that all ranks have registered, and data sets of each worker
worker                what a worker does: it calls functions when the chief requests it
crew                  calls that were scheduled, and the chief's view of the workers: who is free, busy, or has left
"""

from mpidist.coordinator.cluster_coordinator import ClusterCoordinator
from mpidist.coordinator.crew import RemoteValue
from mpidist.coordinator.functions import PerWorkerDataset, PerWorkerIterator, register

__all__ = ["ClusterCoordinator", "PerWorkerDataset", "PerWorkerIterator", "RemoteValue", "register"]
