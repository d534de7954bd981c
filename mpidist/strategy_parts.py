"""The parts that a strategy consists of, assembled: what the rest of the library needs of a strategy."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar, final

from mpidist import context_stack
from mpidist.collectives.all_gather import all_gather
from mpidist.collectives.reduce_scatter import reduce_scatter
from mpidist.context_stack import CurrentStrategy
from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.cross_device_ops.cross_device_ops import CrossDeviceOps
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.replica_context.replica_context import ReplicaContext
from mpidist.replica_context.run import call_for_replicas
from mpidist.replicas import Replicas
from mpidist.transport.agreement.agreement import Call
from mpidist.transport.agreement.fingerprint import fingerprint_of
from mpidist.transport.devices import Device
from mpidist.transport.group.raise_together import ErrorReport, LocalWork, raise_reported
from mpidist.transport.group.service_group import Service
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.topology import Topology
from mpidist.values import local_components
from mpidist.variables.placement import OnEachRank, VariablePlacement
from mpidist.variables.variable import Variable

__all__ = ["StrategyParts"]

_T = TypeVar("_T")

MakePlacement = Callable[[CommunicationOptions], VariablePlacement]


@final
class StrategyParts:
    """The parts that a strategy consists of. Strategies differ in their parts alone, so this class is final.

    `assemble`, which is collective, makes one; the constructor only stores.

    Args:
        group: The ranks. Also an attribute.
        cross_device_ops: The algorithm that combines values, bound to the ranks. Also an attribute.
        worker_devices: The device of every replica, `"/rank:1/cpu:0"`. Also an attribute.
        local_devices: Those of this rank's replicas. Also an attribute.
        variable_placement: Where mirrored variables live. Also an attribute.
        uses_device_memory: Whether the user named GPUs as the devices of all replicas, so that new arrays lie there.
            Also an attribute.
        service: What ranks that are not in lock step have beside `group`; else `None`. Also an attribute.

    Attributes:
        replicas: Which replicas this rank carries.
        options: The defaults of all calls.
        at_close: Called on this rank when the strategy is closed, before other ranks go on.
        mirrored: The mirrored variables in the order of all ranks, if the environment asks to compare them.
    """

    def __init__(
        self,
        group: SyncGroup,
        cross_device_ops: BoundOps,
        worker_devices: Sequence[str],
        local_devices: Sequence[str],
        variable_placement: VariablePlacement,
        uses_device_memory: bool,
        service: Service | None,
    ) -> None:
        self.group, self.cross_device_ops = group, cross_device_ops
        self.replicas, self.options = cross_device_ops.replicas, cross_device_ops.options
        self.worker_devices, self.local_devices = tuple(worker_devices), tuple(local_devices)
        self.variable_placement, self.uses_device_memory = variable_placement, uses_device_memory
        self.service = service
        self._strategy: CurrentStrategy | None = None
        self._num_variables = 0
        self._num_datasets = 0
        self._num_runs = 0
        self.at_close: list[Callable[[], None]] = []
        self.mirrored: list[weakref.ref[Variable]] = []

    @classmethod
    def assemble(
        cls,
        name: str,
        group: SyncGroup,
        cross_device_ops: CrossDeviceOps,
        devices: Sequence[Device],
        options: CommunicationOptions | None = None,
        make_placement: MakePlacement | None = None,
        error: Exception | None = None,
        replicas: Replicas | None = None,
        service: Service | None = None,
    ) -> StrategyParts:
        """Check the parts of a strategy on all ranks, and assemble them. Collective.

        Args:
            name: The name of the strategy's class.
            group: The ranks. Closed if an error is raised.
            cross_device_ops: The algorithm.
            devices: The device of each replica of this rank; the first one becomes the current one.
            options: The defaults of all calls; they override those of the algorithm.
            make_placement: Makes, from the defaults of all calls, what says where mirrored variables live; by default
                on each rank, and in device memory if the user named GPUs as the devices of all replicas.
            error: What the caller found wrong with this rank's arguments; raised on all ranks.
            replicas: Which replicas this rank carries; by default one.
            service: What ranks that are not in lock step have beside `group`.

        Raises:
            InvalidArgumentError: If the ranks chose different parts. On every rank.
            TypeError: If `cross_device_ops` or `options` are of another type.
            UnavailableError: If `options` cannot be followed on this machine.
        """
        placement: VariablePlacement = OnEachRank()
        carried = Replicas.one_per_rank(group.topology) if replicas is None else replicas
        carried = replace(carried, devices=tuple(devices))
        fields = {"strategy": name, "replicas": str(carried), "on_rank_lost": group.on_rank_lost}
        try:
            _require_kinds(cross_device_ops, options)
            bound = BoundOps(cross_device_ops, group, options, carried)
            if make_placement is not None:
                placement = make_placement(bound.options)
            group.devices.work_on(devices[0])
            fields["variable placement"] = str(placement)
            fields["cross_device_ops and options"] = str(bound.configuration)
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = error or problem
        try:
            group.agree(Call(name, fingerprint_of(fields), lambda: fields, error=error))
            group.agreement.end()
        except Exception:  # on all ranks
            group.close()
            raise
        rank = group.topology.rank if service is None else service.rank
        own_devices = [(f"/rank:{rank}{one}", one.is_gpu and one.is_named) for one in devices]
        everyone = [one for of_rank in group.agreement.all_gather_object(own_devices) for one in of_rank]
        uses_device_memory = all(is_named_gpu for _, is_named_gpu in everyone)
        if make_placement is None and uses_device_memory:
            placement = OnEachRank(devices[0])
        computes = service is None or not service.why_idle
        workers, own = ([name for name, _ in some] for some in (everyone if computes else [], own_devices))
        return cls(group, bound, workers, own, placement, uses_device_memory, service)

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
    def topology(self) -> Topology:
        """The ranks that do the same as this one, and their nodes."""
        return self.group.topology if self.service is None else self.service.topology

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call a function in replica context: `Strategy.run`. Local."""
        self.require_cross_replica("run")
        if self.service is not None:
            self.require_computing("run")
        self._num_runs += 1
        try:
            if self.replicas.tree is not None:
                return call_for_replicas(self.strategy, fn, args, kwargs or {})
            strategy = self.strategy
            context = ReplicaContext(strategy, self.replicas.ids_here[0])
            entry = context_stack.Entry(strategy, context)
            given = local_components(list(args)) if args else ()
            return context_stack.call(entry, fn, *given, **(local_components(dict(kwargs)) if kwargs else {}))
        except BaseException as error:
            if self.service is None:  # workers of parameter servers are not in step
                self.group.record_step_exit(self._num_runs, error)
            raise

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

    def close(self, error: BaseException | None = None) -> None:
        """Close the group: `Strategy.close`. Collective, but local if `error` is given."""
        self.release()
        problem = None if self.service is None else self.service.close(error)
        self.group.close(self.options.timeout_seconds, error)
        if problem is not None:
            raise problem

    def release(self) -> None:
        """Give back what this rank holds for the strategy, such as locks. Local."""
        while self.at_close:
            self.at_close.pop()()

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
        self.group.enter(call)
        fingerprint, timeout_seconds = fingerprint_of((call, sorted(fields.items()))), self.options.timeout_seconds
        has_same_variant = self.group.agree(
            Call(call, fingerprint, lambda: fields, timeout_seconds=timeout_seconds, error=error, variant=variant)
        )
        self.group.agreement.end()
        return has_same_variant

    def raise_together(
        self, call: str, what: str = "", advice: str = "", timeout_seconds: float | None = None
    ) -> AbstractContextManager[None]:
        """Raise an exception of one rank on all ranks: `LocalWork`. Collective."""
        limit = self.options.timeout_seconds if timeout_seconds is None else timeout_seconds
        return LocalWork(self.group, call, limit, what, advice)

    def on_each_rank(
        self, call: str, advice: str, work: Callable[[], Any], error: Exception | None = None
    ) -> list[Any]:
        """Do local work on each rank, and return all results on all ranks. Collective: a small round, and two messages.

        Args:
            call: The name of the call.
            advice: Who makes the call, for the error of ranks that make another one.
            work: Returns what can be pickled.
            error: What is wrong on this rank, which then does no work.

        Raises:
            Exception: The error of the lowest rank that has one. On every rank.
        """
        group, limit, result = self.group, self.options.timeout_seconds, None
        try:
            result = work() if error is None else None
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = problem
        own = result, None if error is None else ErrorReport.of(error)
        with group.call(Call(call, fingerprint_of(call), lambda: {"advice": advice}, timeout_seconds=limit)):
            everyone = group.agreement.all_gather_object(own)
        raise_reported(error, [report for _, report in everyone], group)
        return [one for one, _ in everyone]

    def on_rank_0(self, call: str, advice: str, work: Callable[[], _T], error: Exception | None = None) -> _T:
        """Do local work on rank 0, and return its result on all ranks. Collective; see `on_each_rank`."""
        found: _T = self.on_each_rank(call, advice, lambda: None if self.group.topology.rank else work(), error)[0]
        return found

    def all_gather(
        self,
        call: str,
        value: Any,
        axis: int,
        options: CommunicationOptions | None,
        error: Exception | None = None,
        out: Any = None,
    ) -> Any:
        """Concatenate every rank's arrays along an axis: `Strategy.gather`, `ReplicaContext.all_gather`. Collective."""
        merged, problem = self._merge(options)
        return all_gather(self.group, call, value, axis, merged, self.replicas, error or problem, out)

    def reduce_scatter(
        self, reduce_op: ReduceOp | str, value: Any, axis: int, options: CommunicationOptions | None, out: Any
    ) -> Any:
        """Reduce, and return this rank's part of the result: `ReplicaContext.reduce_scatter`. Collective."""
        merged, error = self._merge(options)
        return reduce_scatter(self.group, "reduce_scatter", reduce_op, value, axis, merged, error, out)

    def _merge(self, options: Any) -> tuple[CommunicationOptions, Exception | None]:
        """Override the strategy's options by a call's. Returns an error, which the call raises on all ranks."""
        try:
            return self.options.merge(options), None
        except Exception as problem:  # of any kind: the other ranks must learn of it
            return self.options, problem

    def require_computing(self, call: str) -> None:
        """Refuse a call on a rank that has no replica, and where `require_cross_replica` refuses it.

        Raises:
            RuntimeError: In these places.
        """
        self.require_cross_replica(call)
        if self.service is not None and self.service.why_idle:
            raise RuntimeError(f"{call} on {self.service.why_idle}")

    def require_cross_replica(self, call: str) -> None:
        """Refuse a call inside `run`, inside another strategy's scope, or after `close`.

        Raises:
            RuntimeError: In these places.
        """
        self.group.require_open(call)
        entry = context_stack.innermost()
        if entry is None:
            return
        self.require_not_mixed(call)
        if entry.replica_context is not None:
            raise context_stack.cross_replica_error(call)

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


def _require_kinds(cross_device_ops: object, options: object) -> None:
    if not isinstance(cross_device_ops, CrossDeviceOps):
        raise TypeError(f"cross_device_ops must be an object such as NcclAllReduce(), got {cross_device_ops!r}")
    if options is not None and not isinstance(options, CommunicationOptions):
        raise TypeError(f"communication_options must be CommunicationOptions, got {type(options).__name__}")
