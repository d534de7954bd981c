"""The context of code inside `Strategy.run`, and the calls that replicas of one rank make together."""

from mpidist.replica_context.replica_context import ReplicaContext
from mpidist.replica_context.run import call_for_replicas

__all__ = ["ReplicaContext", "call_for_replicas"]
