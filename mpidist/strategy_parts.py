"""The parts that a strategy consists of, assembled: what the rest of the library needs of a strategy."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count
from typing import Any, TypeVar, final

from mpidist import context_stack
from mpidist.collectives.all_gather import all_gather
from mpidist.collectives.arguments.operands import symmetric_spec
from mpidist.collectives.arguments.signature import merge
from mpidist.context_stack import CurrentStrategy
from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.cross_device_ops.cross_device_ops import CrossDeviceOps
from mpidist.options import CommunicationOptions
from mpidist.replica_context.joint_calls import JointCalls, JointWork
from mpidist.replica_context.solo_calls import SoloCalls
from mpidist.replicas import Replicas
from mpidist.transport import arrays
from mpidist.transport.agreement.agreement import Call
from mpidist.transport.devices import Device
from mpidist.transport.group.peers import LockStep, Peers
from mpidist.transport.group.raise_together import ErrorReport, LocalWork, raise_reported
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.text import value_text
from mpidist.variables.placement import OnEachRank, VariablePlacement
from mpidist.variables.variable import Variable

__all__ = ["StrategyParts"]

_T = TypeVar("_T")

MakePlacement = Callable[[CommunicationOptions], VariablePlacement]


@final
@dataclass(eq=False, repr=False)
class StrategyParts:
    """The parts that a strategy consists of. Strategies differ in their parts alone, so this class is final.

    `assemble`, which is collective, makes one; the constructor only stores. `worker_devices` are those of every
    replica, `"/rank:1/cpu:0"`, and `local_devices` those of this rank's. New arrays lie on the GPUs that the user named
    for all replicas, if `uses_device_memory`. `peers` are the ranks that do the same as this one. Called on this rank
    when the strategy is closed, before other ranks go on, is what `at_close` has. `mirrored` are the mirrored variables
    in the order of all ranks, if the environment asks to compare them.
    """

    group: SyncGroup
    cross_device_ops: BoundOps
    worker_devices: tuple[str, ...]
    local_devices: tuple[str, ...]
    variable_placement: VariablePlacement
    uses_device_memory: bool
    peers: Peers
    strategy: CurrentStrategy = field(init=False)  # which sets it
    dataset_numbers: Iterator[int] = field(default_factory=count)  # equal on ranks that make the same data sets
    at_close: list[Callable[[], None]] = field(default_factory=list)
    mirrored: list[weakref.ref[Variable]] = field(default_factory=list)
    _num_variables: int = 0
    num_of_name: Counter[str] = field(default_factory=Counter)  # variables since the last reset
    _num_runs: int = 0

    def __post_init__(self) -> None:
        self.replicas, self.options = self.cross_device_ops.replicas, self.cross_device_ops.options
        self.topology = self.peers.topology

    @cached_property
    def _calls(self) -> SoloCalls | JointCalls:
        return SoloCalls(self.strategy) if self.replicas.tree is None else JointCalls(self.strategy)

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
        peers: Peers | None = None,
    ) -> StrategyParts:
        """Check the parts of a strategy on all ranks, and assemble them; close `group` if ranks differ. Collective.

        Each replica of this rank has one of `devices`, the first of which becomes the current one. `options` override
        those of the algorithm, and are the defaults of all calls; from them `make_placement` makes what says where
        mirrored variables live: by default on each rank, and in device memory if the user named GPUs as the devices of
        all replicas. `error` is wrong with this rank's arguments, and is raised on all ranks. By default a rank carries
        one of the `replicas`.
        """
        placement: VariablePlacement = OnEachRank()
        if not isinstance(group, SyncGroup):
            raise TypeError(f"{name}: group must be a SyncGroup, as SyncGroup.from_mpi(comm), got {value_text(group)}")
        carried = Replicas.one_per_rank(group.topology) if replicas is None else replicas
        fields = {"strategy": name, "replicas": str(carried), "on_rank_lost": group.on_rank_lost}
        try:
            _require_kinds(cross_device_ops, options, devices)
            carried = replace(carried, devices=tuple(devices))
            bound = BoundOps(cross_device_ops, group, options, carried)
            if make_placement is not None:
                placement = make_placement(bound.options)
            group.devices.work_on(devices[0])
            fields["variable placement"] = str(placement)
            fields["cross_device_ops and options"] = str(bound.configuration)
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = error or problem
        try:
            group.agree(Call.of_fields(name, fields, error=error))
            group.agreement.end()
        except Exception:  # on all ranks
            group.close()
            raise
        peers = peers or LockStep(group, bound.options.timeout_seconds)
        own_devices = [(f"/rank:{peers.rank}{one}", one.is_gpu and one.is_named) for one in devices]
        everyone = [one for of_rank in group.agreement.all_gather_object(own_devices) for one in of_rank]
        uses_device_memory = all(is_named_gpu for _, is_named_gpu in everyone)
        if make_placement is None and uses_device_memory:
            placement = OnEachRank(devices[0])
        workers, own = ([name for name, _ in some] for some in ([] if peers.why_idle else everyone, own_devices))
        return cls(group, bound, tuple(workers), tuple(own), placement, uses_device_memory, peers)

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call a function in replica context: `Strategy.run`. Local."""
        self.require_cross_replica("run")
        if self.peers.why_idle:
            self.require_computing("run")
        self._num_runs += 1
        try:
            return self._calls.run(fn, args, kwargs)
        except BaseException as error:
            if self.peers.is_in_lock_step:  # workers of parameter servers are not in step
                self.group.record_step_exit(self._num_runs, error)
            raise

    def default_variable_name(self) -> str:
        """Return the name of the next variable without a name, equal on all ranks, until `agree_on_variable`. Local."""
        return f"variable_{self._num_variables}" if self._num_variables else "variable"

    def agree_on_variable(self, fields: Mapping[str, str], uses_default_name: bool, error: Exception | None) -> None:
        """Agree on a new variable. Collective."""
        self.agree("Variable", fields, error)
        self._num_variables += uses_default_name  # not before: after an error on one rank names would differ for ever

    def variable_suffix(self, name: str) -> str:
        """Return what tells a new variable from earlier ones of its name: nothing for the first. Local.

        Ranks make the variables of all replicas in one order, but each its own of a strategy of one replica.
        """
        if self.replicas.total == 1:
            return ""
        self.num_of_name[name] += 1
        return f" ({self.num_of_name[name]})" if self.num_of_name[name] > 1 else ""

    def close(self, error: BaseException | None = None) -> None:
        """Close the group: `Strategy.close`. Collective, but local if `error` is given.

        The default strategy stays open: other code of the program uses it, too, and no other can be made.
        """
        if context_stack.is_default(self.strategy):
            return
        self.release()
        problem = self.peers.close(error)
        self.group.close(self.options.timeout_seconds, error)
        if problem is not None:
            raise problem

    def release(self) -> None:
        """Give back what this rank holds for the strategy, such as locks. Local."""
        while self.at_close:
            self.at_close.pop()()

    def agree(self, call: str, fields: Mapping[str, str], error: Exception | None = None, variant: int = 0) -> bool:
        """Wait until all ranks make this call, with equal fields and no error. Collective: one small round.

        Returns whether all ranks passed the same `variant`, a number as in `CallRecord`: 0 on all ranks, or on none.
        """
        self.group.enter(call)
        record = Call.of_fields(call, fields, self.options.timeout_seconds, error, variant)
        has_same_variant = self.group.agree(record)
        self.group.agreement.end()
        return has_same_variant

    def raise_together(
        self, call: str, what: str = "", advice: str = "", timeout_seconds: float | None = None
    ) -> AbstractContextManager[None]:
        """Raise an exception of one rank on all ranks: `LocalWork`. Collective."""
        limit = self.options.timeout_seconds if timeout_seconds is None else timeout_seconds
        return LocalWork(self.group, call, limit, what, advice)

    def raise_together_in_turns(self, call: str, what: str) -> AbstractContextManager[None]:
        """Raise an exception of one replica on all, if ranks carry several: `Strategy.raise_together`. Collective."""
        entry = context_stack.innermost()
        if not self.replicas.share_ranks or entry is None or entry.replica_context is None:
            return self.raise_together(call, what)
        if entry.strategy is not self.strategy:  # whose replicas take no turns here
            return self.raise_together(call, what)
        return JointWork(entry.replica_context.calls, partial(self.raise_together, call, what))

    def on_each_rank(
        self, call: str, advice: str, work: Callable[[], Any], error: Exception | None = None
    ) -> list[Any]:
        """Do local work on each rank, and return all results on all ranks. Collective: a small round, and two messages.

        Results are pickled. A rank with an `error` does no work; that of the lowest rank is raised on all. `advice`:
        who makes the call, for the error of ranks that make another one.
        """
        group, limit, result = self.group, self.options.timeout_seconds, None
        try:
            result = work() if error is None else None
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = problem
        own = result, None if error is None else ErrorReport.of(error)
        with group.call(Call.of_fields(call, {"advice": advice}, limit)):
            everyone = group.agreement.all_gather_object(own)
        raise_reported(error, [report for _, report in everyone], group)
        return [one for one, _ in everyone]

    def on_rank_0(self, call: str, advice: str, work: Callable[[], _T]) -> _T:
        """Do local work on rank 0, and return its result on all ranks. Collective; see `on_each_rank`."""
        found: _T = self.on_each_rank(call, advice, lambda: None if self.group.topology.rank else work())[0]
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
        merged, problem = merge(self.options, options)
        return all_gather(self.group, call, value, axis, merged, self.replicas, error or problem, out)

    def symmetric_empty(
        self, specs: Sequence[tuple[Any, Any, bool]], per_node: bool, error: Exception | None = None
    ) -> list[Any]:
        """Allocate arrays, those in host memory in one window: `Strategy.symmetric_empty`. Collective.

        `specs`: shape and dtype of each array, and whether it shall lie in device memory. If a node has too little, all
        ranks raise `UnavailableError`, and no rank keeps any of the arrays.
        """
        if self.replicas.share_ranks:
            self.require_cross_replica("symmetric_empty")
        group, fields, on_host = self.group, {}, []
        made: list[Any] = []  # arrays on a GPU; `None` in the place of each array in `on_host`
        try:
            for index, (shape, dtype, device) in enumerate(specs):
                native = symmetric_spec(shape, dtype)
                on_gpu = (device or self.uses_device_memory) and not per_node
                fields[f"array {index}"] = f"{native[1].str}{list(native[0])}{' on a GPU' * on_gpu}"
                if on_gpu:  # allocated before the ranks agree, so that all of them learn if one lacks memory
                    group.devices.require_usable("symmetric_empty")
                    made.append(arrays.empty(*native, device=True))
                else:
                    on_host.append(native)
                    made.append(None)
        except Exception as problem:  # of any kind: the other ranks must learn of it
            error = error or problem
        self.agree("symmetric_empty", {"per_node": str(per_node)} | fields, error)
        shared: Iterator[Any] = iter(())
        if on_host:
            # The ranks of a node fail together already; the ranks of other nodes must learn of the failure.
            with (
                self.raise_together("symmetric_empty", "allocation") if len(group.topology.nodes) > 1 else nullcontext()
            ):
                shared = iter(group.shared.empty(on_host, per_node, f"symmetric_empty on {group.topology.node_name}"))
        return [next(shared) if array is None else array for array in made]

    def require_computing(self, call: str) -> None:
        """Refuse a call on a rank that has no replica, and where `require_cross_replica` refuses it."""
        self.require_cross_replica(call)
        if self.peers.why_idle:
            raise RuntimeError(f"{call} on {self.peers.why_idle}")

    def require_cross_replica(self, call: str) -> None:
        """Refuse a call inside `run`, inside another strategy's scope, or after `close`."""
        self.group.require_open(call)
        entry = context_stack.innermost()
        if entry is None:
            return
        self.require_not_mixed(call)
        if entry.replica_context is not None:
            raise context_stack.cross_replica_error(call)

    def require_not_mixed(self, call: str) -> None:
        """Refuse a call while another strategy is current."""
        entry = context_stack.innermost()
        if entry is not None and entry.strategy is not self.strategy:
            raise RuntimeError(
                f"{call}: mixing different strategies; {entry.strategy} is current, and this call is of another one, "
                f"{self.strategy}: use one strategy, or make the call outside of the other one's scope() and run()"
            )


def _require_kinds(cross_device_ops: object, options: object, devices: object) -> None:
    if not isinstance(cross_device_ops, CrossDeviceOps):
        raise TypeError(f"cross_device_ops must be an object such as CollectiveAllReduce(), got {cross_device_ops!r}")
    if options is not None and not isinstance(options, CommunicationOptions):
        raise TypeError(f"communication_options must be CommunicationOptions, got {type(options).__name__}")
    if not (isinstance(devices, Sequence) and devices and all(isinstance(one, Device) for one in devices)):
        raise TypeError(
            "devices must be a list with a Device for each replica of this rank, as [choose_device(group.topology)], "
            f"got {value_text(devices)}"
        )
