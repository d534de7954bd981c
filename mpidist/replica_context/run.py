"""`Strategy.run` with a chosen number of replicas (`replicas=`): calls the function for each replica of the rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mpidist import context_stack
from mpidist.context_stack import CurrentStrategy, parts_of
from mpidist.replica_context.joint_calls import JointCalls
from mpidist.replica_context.pending_writes import PendingWrites
from mpidist.replica_context.replica_context import ReplicaContext
from mpidist.replica_context.turns import Turns
from mpidist.values import join_components, local_components

__all__ = ["call_for_replicas"]


def call_for_replicas(
    strategy: CurrentStrategy, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call a function for each replica of this rank, in the replica's context. As collective as the function is.

    Args:
        strategy: The strategy.
        fn: The function.
        args: The function's arguments. Each replica gets its component of every distributed value.
        kwargs: The function's keyword arguments, likewise.

    Returns:
        A nest of `PerReplica` values: see `join_components`.
    """
    replicas = parts_of(strategy).replicas
    # Ranks compare the number: a call that a replica left out shows in the next one.
    parts_of(strategy).group.agreement.run += 1
    turns = Turns(replicas.ids_here, replicas.devices, PendingWrites(replicas.ids_here))
    joint_calls = JointCalls(strategy, turns)
    bodies: list[Callable[[], Any]] = []
    for at, replica_id in enumerate(replicas.ids_here):
        own_args = local_components(list(args), at, replicas.num_here) if args else ()
        own_kwargs = local_components(dict(kwargs), at, replicas.num_here) if kwargs else {}
        context = ReplicaContext(strategy, replica_id, joint_calls, replicas.devices[at])
        bodies.append(partial(context_stack.call, context_stack.Entry(strategy, context), fn, *own_args, **own_kwargs))
    return join_components(turns.run(bodies))
