"""The context of code inside `Strategy.run`, and the calls that replicas of one rank make together."""

from mpidist.replica_context.replica_context import ReplicaContext

__all__ = ["ReplicaContext"]
