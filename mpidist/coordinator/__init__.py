"""A chief that hands functions to workers, on top of parameter servers: schedule, join, fetch.

cluster_coordinator   what a program holds: the chief's queue, and the workers' loop
functions             what may be scheduled: functions that all ranks have registered, and data sets of each worker
remote_value          one call that was scheduled, and its result
worker                what a worker does: it calls functions; and messages, without code and pickled objects
crew                  the chief's view of the workers: which of them are free, what they do, and which have left
"""

from mpidist.coordinator.cluster_coordinator import ClusterCoordinator
from mpidist.coordinator.functions import PerWorkerDataset, PerWorkerIterator, register
from mpidist.coordinator.remote_value import RemoteValue

__all__ = ["ClusterCoordinator", "PerWorkerDataset", "PerWorkerIterator", "RemoteValue", "register"]
