"""How `StrategyExtended.update` changes a variable where the number of replicas was chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpidist import context_stack, nest
from mpidist.context_stack import parts_of
from mpidist.transport.devices import on_device
from mpidist.values import PerReplica, join_components, local_components
from mpidist.variables.variable import Variable

__all__ = ["update_copies"]


def update_copies(var: Variable, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function for each copy of a variable on this rank: `StrategyExtended.update`. Local.

    Args:
        var: The variable.
        fn: The function.
        args: The function's arguments after the variable. Of a distributed value the component of the copy's replica.
        kwargs: The function's keyword arguments, likewise.

    Returns:
        What the function returned: of the one copy, or joined to `PerReplica` values.

    Raises:
        ValueError: If the one copy is to be updated by a `PerReplica`.
    """
    parts, given = parts_of(var.strategy), (list(args), dict(kwargs))
    is_one = parts.service is not None or var.is_mirrored_over(parts.group)  # else each replica has its own copy
    if is_one and any(isinstance(leaf, PerReplica) for leaf in nest.flatten(given)[0]):
        raise ValueError(
            f"update: variable {var.name!r} has one value for all replicas, and a PerReplica was passed: reduce the "
            "PerReplica first, as with strategy.extended.reduce_to('mean', value, var)"
        )
    num_copies = 1 if is_one else parts.replicas.num_here
    results = []
    for at in range(num_copies):
        entry = context_stack.Entry(var.strategy, is_update=True, copy_number=at)
        own_args, own_kwargs = local_components(given, at, num_copies)
        with on_device(parts.replicas.devices, at):
            results.append(context_stack.call(entry, fn, var, *own_args, **own_kwargs))
    return results[0] if is_one else join_components(results)
