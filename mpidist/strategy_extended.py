"""The methods of a strategy for authors of libraries: what tf.distribute has under `strategy.extended`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

from mpidist import context_stack, nest
from mpidist.options import CommunicationOptions, ReduceOp, options_or_hints
from mpidist.package_names import explain_absent_members
from mpidist.strategy_parts import StrategyParts
from mpidist.transport.devices import on_device
from mpidist.values import PerReplica, join_components, local_component, local_components
from mpidist.variables.variable import Variable

__all__ = ["StrategyExtended"]


@final
@explain_absent_members
class StrategyExtended:
    """The methods of a strategy for authors of libraries. Get it with `strategy.extended`."""

    def __init__(self, parts: StrategyParts) -> None:
        self._parts = parts

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices that compute: one per replica, `"/rank:1/cpu:0"`.

        With parameter servers, where workers wait for no other, those of this worker; none on a server.
        """
        return self._parts.worker_devices

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that hold variables: the worker devices, unless one device or servers hold all variables."""
        return self._parts.variable_placement.devices or self._parts.worker_devices

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce one value of every rank to the destinations: `CrossDeviceOps.reduce`. Collective."""
        self._parts.require_computing("reduce_to")
        options = options_or_hints(options, experimental_hints)
        return self._parts.cross_device_ops.reduce(reduce_op, value, destinations, options)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce many values at once: `CrossDeviceOps.batch_reduce`. Collective."""
        self._parts.require_computing("batch_reduce_to")
        options = options_or_hints(options, experimental_hints)
        return self._parts.cross_device_ops.batch_reduce(reduce_op, value_destination_pairs, options)

    def broadcast_to(self, value: Any, destinations: Any) -> Any:
        """Send rank 0's value to the destinations: `CrossDeviceOps.broadcast`. Collective."""
        self._parts.require_computing("broadcast_to")
        return self._parts.cross_device_ops.broadcast(value, destinations, call="broadcast_to")

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call `fn(var, *args, **kwargs)` on every rank, to change the rank's copy of a variable. Local.

        Inside the function, assignments to the variable change this rank's copy alone. Of an `ON_READ` variable a rank
        has a copy for each of its replicas, and the function is called for each copy.

        Args:
            var: A variable of this strategy.
            fn: The function.
            args: The function's arguments after the variable. This rank's component takes the place of each distributed
                value.
            kwargs: The function's keyword arguments, likewise.
            group: `False` returns a tuple of this rank's results.

        Returns:
            What the function returned on this rank; of several copies `PerReplica` values.

        Raises:
            ValueError: If the variable is not this strategy's; or, if the number of replicas was chosen, if a
                `PerReplica` is passed for a mirrored variable.
            RuntimeError: If another strategy is current; inside `run`, if the number of replicas was chosen.
        """
        parts = self._parts
        self._require_own("update", var)
        parts.require_not_mixed("update")
        if parts.replicas.tree is not None:
            parts.require_cross_replica("update")
            result = self._update_copies(var, fn, (list(args), dict(kwargs or {})))
        else:
            entry = context_stack.Entry(parts.strategy, is_update=True)
            given, named = (local_components(part) for part in (list(args), dict(kwargs or {})))
            result = context_stack.call(entry, fn, var, *given, **named)
        return result if group else (result,)

    def _update_copies(self, var: Variable, fn: Callable[..., Any], given: tuple[list[Any], dict[str, Any]]) -> Any:
        """Call a function for each copy of a variable on this rank, where the number of replicas was chosen."""
        parts = self._parts
        is_one = not parts.peers.is_in_lock_step or var.is_mirrored_over(parts.group)  # else a copy for each
        if is_one and any(isinstance(leaf, PerReplica) for leaf in nest.flatten(given)[0]):
            raise ValueError(
                f"update: variable {var.name!r} has one value for all replicas, and a PerReplica was passed: reduce "
                "the PerReplica first, as with strategy.extended.reduce_to('mean', value, var)"
            )
        num_copies = 1 if is_one else parts.replicas.num_here
        results = []
        for at in range(num_copies):
            entry = context_stack.Entry(var.strategy, is_update=True, copy_number=at)
            own_args, own_kwargs = local_components(given, at, num_copies)
            with on_device(parts.replicas.devices, at):
                results.append(context_stack.call(entry, fn, var, *own_args, **own_kwargs))
        return results[0] if is_one else join_components(results)

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function in replica context, as `Strategy.run` does. Local."""
        return self._parts.run(fn, args, kwargs)

    @contextmanager
    def colocate_vars_with(self, var: Variable) -> Iterator[None]:
        """Create variables beside another one. Of no effect where every variable is on all ranks. Local.

        Raises:
            ValueError: If the variable is not this strategy's.
            RuntimeError: Outside the strategy's scope.
        """
        self._require_own("colocate_vars_with", var)
        entry = context_stack.innermost()
        if entry is None or entry.strategy is not self._parts.strategy:
            raise RuntimeError("colocate_vars_with: need to be inside `with strategy.scope():`")
        with self._parts.variable_placement.colocated_with(var):
            yield

    def value_container(self, value: Any) -> Any:
        """Return the variable or distributed value that a component belongs to: the value itself."""
        return value

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Whether a variable was created in this strategy's scope. Local."""
        return getattr(v, "strategy", None) is self._parts.strategy

    def _require_own(self, call: str, var: Any) -> None:
        if not self.variable_created_in_scope(var):
            raise ValueError(
                f"{call}: {local_component(var)!r} is not a variable that was created in this strategy's scope"
            )
