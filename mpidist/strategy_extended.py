"""The assembled parts of a strategy, with the methods for authors of libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, final

from mpidist import context_stack
from mpidist.collectives import SymmetricSpec, all_gather, reduce_scatter, symmetric_empty
from mpidist.context_stack import CurrentStrategy
from mpidist.cross_device_ops import CrossDeviceOps
from mpidist.options import CommunicationOptions, ReduceOp, options_or_hints
from mpidist.replica_context import ReplicaContext, call_for_replicas
from mpidist.replicas import Replicas
from mpidist.transport import Call, Device, Service, SyncGroup, Topology, fingerprint_of, raise_together
from mpidist.values import local_component, local_components
from mpidist.variables import OnEachRank, Variable, VariablePlacement, update_copies

__all__ = ["StrategyExtended"]


@final
class StrategyExtended:
    """The parts that a strategy consists of. Strategies differ in their parts alone, so this class is final.

    `assemble`, which is collective, makes one; the constructor only stores.

    Args:
        group: The ranks.
        cross_device_ops: The algorithm, bound to the group.
        devices: The device of every replica.
        options: The defaults of all calls. Also an attribute.
        replicas: Which replicas this rank carries. Also an attribute.
        variable_placement: Where mirrored variables live. Also an attribute.

    Attributes:
        service: What ranks that are not in lock step have beside `group`.
        uses_device_memory: Whether the user named GPUs as the devices of all replicas, so that new arrays lie there.
    """

    def __init__(
        self,
        group: SyncGroup,
        cross_device_ops: CrossDeviceOps,
        devices: Sequence[str],
        options: CommunicationOptions | None,
        *,
        replicas: Replicas,
        variable_placement: VariablePlacement,
    ) -> None:
        self.service: Service | None = None
        self.uses_device_memory = False
        self.replicas, self.variable_placement = replicas, variable_placement
        self._group = group
        self._cross_device_ops = cross_device_ops
        self._devices = tuple(devices)
        self.options = options if options is not None else CommunicationOptions()
        self._strategy: CurrentStrategy | None = None
        self._num_variables = 0
        self._num_datasets = 0

    @classmethod
    def assemble(
        cls,
        name: str,
        group: SyncGroup,
        cross_device_ops: CrossDeviceOps,
        devices: Sequence[Device],
        options: CommunicationOptions | None = None,
        variable_placement: VariablePlacement | None = None,
        error: Exception | None = None,
        replicas: Replicas | None = None,
        service: Service | None = None,
    ) -> StrategyExtended:
        """Check the parts of a strategy on all ranks, and assemble them. Collective.

        Args:
            name: The name of the strategy's class.
            group: The ranks.
            cross_device_ops: The algorithm.
            devices: The device of each replica of this rank; the first one becomes the current one.
            options: The defaults of all calls.
            variable_placement: Where mirrored variables live; by default on each rank, and in device memory if the user
                named GPUs as the devices of all replicas.
            error: What the caller found wrong with this rank's arguments; raised on all ranks.
            replicas: Which replicas this rank carries; by default one.
            service: What ranks that are not in lock step have beside `group`.

        Raises:
            InvalidArgumentError: If the ranks chose different parts. On every rank.
            TypeError: If `cross_device_ops` is no `CrossDeviceOps`.
            UnavailableError: If `options` cannot be followed on this machine.
        """
        bound = cross_device_ops
        placement = OnEachRank() if variable_placement is None else variable_placement
        carried = Replicas.one_per_rank(group.topology) if replicas is None else replicas
        carried = replace(carried, devices=tuple(devices))
        fields = {"strategy": name, "variable placement": str(placement), "replicas": str(carried)}
        try:
            if not isinstance(cross_device_ops, CrossDeviceOps):
                raise TypeError(f"cross_device_ops must be an object such as NcclAllReduce(), got {cross_device_ops!r}")
            bound = cross_device_ops.bound_to(group, options, carried)
            group.devices.work_on(devices[0])
            fields["cross_device_ops and options"] = str(bound.configuration)
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = error or problem
        try:
            group.agree(Call(name, fingerprint_of(fields), lambda: fields, error=error))
            group.agreement.end()
        except Exception:  # on all ranks
            group.close()
            raise
        own_devices = [(f"/rank:{group.topology.rank}{one}", one.is_gpu and one.is_named) for one in devices]
        everyone = [one for of_rank in group.agreement.all_gather_object(own_devices) for one in of_rank]
        uses_device_memory = all(is_named_gpu for _, is_named_gpu in everyone)
        if variable_placement is None and uses_device_memory:
            placement = OnEachRank(devices[0])
        names = [name for name, _ in everyone]
        own = cls(group, bound, names, options, replicas=carried, variable_placement=placement)
        own.service, own.uses_device_memory = service, uses_device_memory
        return own

    def attach_to(self, strategy: CurrentStrategy) -> None:
        """Store the strategy that these parts belong to."""
        self._strategy = strategy

    @property
    def strategy(self) -> CurrentStrategy:
        """The strategy that these parts belong to."""
        if self._strategy is None:
            raise RuntimeError("these parts belong to no strategy yet")
        return self._strategy

    @property
    def group(self) -> SyncGroup:
        """The ranks, their topology and communicators."""
        return self._group

    @property
    def topology(self) -> Topology:
        """The ranks that do the same as this one, and their nodes."""
        return self._group.topology if self.service is None else self.service.topology

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """The algorithm that combines values, bound to this strategy's ranks."""
        return self._cross_device_ops

    @property
    def device(self) -> Device:
        """This rank's device: that of its first replica."""
        return self.replicas.devices[0]

    @property
    def devices_here(self) -> tuple[Device, ...]:
        """The devices of this rank's replicas, which `local_devices` names."""
        return self.replicas.devices

    @property
    def local_devices(self) -> tuple[str, ...]:
        """The devices of this rank's replicas."""
        return tuple(f"/rank:{self.topology.rank}{device}" for device in self.devices_here)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices that compute: one per replica, `"/rank:1/cpu:0"`."""
        return self._devices

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that hold variables: the worker devices, unless one device holds all variables."""
        device = self.variable_placement.device
        return self._devices if device is None else (device,)

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
        self.require_cross_replica("reduce_to")
        options = options_or_hints(options, experimental_hints)
        return self._cross_device_ops.reduce(reduce_op, value, destinations, options)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce many values at once: `CrossDeviceOps.batch_reduce`. Collective."""
        self.require_cross_replica("batch_reduce_to")
        options = options_or_hints(options, experimental_hints)
        return self._cross_device_ops.batch_reduce(reduce_op, value_destination_pairs, options)

    def broadcast_to(self, value: Any, destinations: Any) -> Any:
        """Send rank 0's value to the destinations: `CrossDeviceOps.broadcast`. Collective."""
        self.require_cross_replica("broadcast_to")
        return self._cross_device_ops.broadcast(value, destinations, call="broadcast_to")

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
        self._require_own("update", var)
        self.require_not_mixed("update")
        if self.replicas.tree is not None:
            self.require_cross_replica("update", "call it in the function of ReplicaContext.merge_call")
            is_one = self.service is not None or var.is_mirrored_over(self._group)
            result = update_copies(var, is_one, self.replicas, fn, args, kwargs or {})
            return result if group else (result,)
        entry = context_stack.Entry(self.strategy, is_update=True)
        given, named = (local_components(part) for part in (list(args), dict(kwargs or {})))
        result = context_stack.call(entry, fn, var, *given, **named)
        return result if group else (result,)

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function in replica context, as `Strategy.run` does. Local."""
        self.require_cross_replica("run")
        if self.replicas.tree is not None:
            return call_for_replicas(self.strategy, self._cross_device_ops, self.replicas, fn, args, kwargs or {})
        context = ReplicaContext(self.strategy, self.replicas.ids_here[0], self._cross_device_ops)
        entry = context_stack.Entry(self.strategy, context)
        given = local_components(list(args)) if args else ()
        return context_stack.call(entry, fn, *given, **(local_components(dict(kwargs)) if kwargs else {}))

    @contextmanager
    def colocate_vars_with(self, var: Variable) -> Iterator[None]:
        """Create variables beside another one. Of no effect where every variable is on all ranks. Local.

        Raises:
            ValueError: If the variable is not this strategy's.
            RuntimeError: Outside the strategy's scope.
        """
        self._require_own("colocate_vars_with", var)
        entry = context_stack.innermost()
        if entry is None or entry.strategy is not self._strategy:
            raise RuntimeError("colocate_vars_with: need to be inside `with strategy.scope():`")
        with self.variable_placement.colocated_with(var):
            yield

    def value_container(self, value: Any) -> Any:
        """Return the variable or distributed value that a component belongs to: the value itself."""
        return value

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Whether a variable was created in this strategy's scope. Local."""
        return getattr(v, "strategy", None) is self._strategy

    def default_variable_name(self) -> str:
        """Return the name of the next variable without a name, equal on all ranks, until `agree_on_variable`. Local."""
        return f"variable_{self._num_variables}" if self._num_variables else "variable"

    def agree_on_variable(self, fields: Mapping[str, str], uses_default_name: bool, error: Exception | None) -> None:
        """Agree on a new variable. Collective."""
        self.agree("Variable", fields, error)
        self._num_variables += uses_default_name  # not before: after an error on one rank names would differ for ever

    def next_dataset_number(self) -> int:
        """Count a new data set, and return its number, equal on ranks that make the same data sets. Local."""
        number, self._num_datasets = self._num_datasets, self._num_datasets + 1
        return number

    def symmetric_empty(
        self, specs: Sequence[SymmetricSpec], per_node: bool, error: Exception | None = None
    ) -> list[Any]:
        """Allocate a list of arrays, those in host memory in one window: `Strategy.symmetric_empty`. Collective."""
        if self.uses_device_memory:
            specs = [spec._replace(device=True) for spec in specs]
        return symmetric_empty(self._group, specs, per_node, self.agree, self.raise_together, error)

    def close(self, error: BaseException | None = None) -> None:
        """Close the group: `Strategy.close`. Collective, but local if `error` is given."""
        if self.service is not None:
            self.service.close(error)
        self._group.close(self.options.timeout_seconds, error)

    def agree(self, call: str, fields: Mapping[str, str], error: Exception | None = None, variant: int = 0) -> bool:
        """Wait until all ranks make this call, and compare what they pass. Collective: one small round.

        Args:
            call: The name of the call.
            fields: What must be equal on all ranks, by name.
            error: What is wrong with this rank's arguments.
            variant: A number that may differ between ranks, as in `CallRecord`: 0 on all ranks, or on none.

        Returns:
            Whether all ranks passed the same `variant`.

        Raises:
            InvalidArgumentError: If the fields differ, or another rank has an error. On every rank.
        """
        self._group.enter(call)
        fingerprint, timeout_seconds = fingerprint_of((call, sorted(fields.items()))), self.options.timeout_seconds
        has_same_variant = self._group.agree(
            Call(call, fingerprint, lambda: fields, timeout_seconds=timeout_seconds, error=error, variant=variant)
        )
        self._group.agreement.end()
        return has_same_variant

    def raise_together(self, what: str) -> AbstractContextManager[None]:
        """Raise an exception of one rank on all ranks: `Strategy.raise_together`. Collective."""
        return raise_together(self._group, what, self.options.timeout_seconds)

    def all_gather(
        self,
        call: str,
        value: Any,
        axis: int,
        options: CommunicationOptions | None,
        error: Exception | None = None,
    ) -> Any:
        """Concatenate every rank's arrays along an axis: `Strategy.gather`, `ReplicaContext.all_gather`. Collective."""
        merged, problem = self._merge(options)
        return all_gather(self._group, call, value, axis, merged, self.replicas, error or problem)

    def reduce_scatter(
        self, reduce_op: ReduceOp | str, value: Any, axis: int, options: CommunicationOptions | None
    ) -> Any:
        """Reduce, and return this rank's part of the result: `ReplicaContext.reduce_scatter`. Collective."""
        merged, error = self._merge(options)
        return reduce_scatter(self._group, "reduce_scatter", reduce_op, value, axis, merged, error)

    def _merge(self, options: Any) -> tuple[CommunicationOptions, Exception | None]:
        """Override the strategy's options by a call's. Returns an error, which the call raises on all ranks."""
        try:
            return self.options.merge(options), None
        except Exception as problem:  # of any kind: the other ranks must learn of it
            return self.options, problem

    def require_cross_replica(self, call: str, hint: str = "") -> None:
        """Refuse a call inside `run`, inside another strategy's scope, or after `close`.

        Raises:
            RuntimeError: In these places.
        """
        self._group.require_open(call)
        entry = context_stack.innermost()
        if entry is None:
            return
        self.require_not_mixed(call)
        if entry.replica_context is not None:
            raise RuntimeError(
                f"{call} requires being in cross-replica context, and was called inside the function of "
                f"strategy.run(){'; ' + hint if hint else ''}"
            )

    def require_not_mixed(self, call: str) -> None:
        """Refuse a call while another strategy is current.

        Raises:
            RuntimeError: If another strategy is current.
        """
        entry = context_stack.innermost()
        if entry is not None and entry.strategy is not self._strategy:
            raise RuntimeError(
                f"{call}: mixing different strategies; {entry.strategy} is current, and this call is of "
                f"{self._strategy}"
            )

    def _require_own(self, call: str, var: Any) -> None:
        if not self.variable_created_in_scope(var):
            raise ValueError(
                f"{call}: {local_component(var)!r} is not a variable that was created in this strategy's scope"
            )
