"""Reducing calls: each is checked, planned (once for equal calls), agreed on by all ranks, and carried out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, final

import numpy as np

from mpidist.collectives.arguments.destinations import group_by_destinations
from mpidist.collectives.arguments.operands import Operands, Spec, host_sizes, require_memory
from mpidist.collectives.arguments.out_arrays import check_outs, native_outs, write_outs
from mpidist.collectives.arguments.signature import name_call, specs_text
from mpidist.collectives.device_calls import DeviceCalls
from mpidist.collectives.plans.arithmetic import Arithmetic, OverflowReport, result_dtypes
from mpidist.collectives.plans.call import Execution, Plan, ReductionCall
from mpidist.collectives.plans.fused_execution import CarriedExecution, FusedExecution
from mpidist.collectives.plans.local_sums import LocalSums, open_all_replicas
from mpidist.collectives.plans.packed_execution import PackedExecution, PackedPart, reduce_to_ranks
from mpidist.collectives.plans.plan import make_fused_lists, make_messages
from mpidist.collectives.plans.reduce_algorithm import Reduce, ReduceAlgorithm
from mpidist.collectives.plans.rows_execution import RowList, RowsExecution
from mpidist.collectives.repeated_calls import CallKey, RepeatedCalls
from mpidist.errors import InvalidArgumentError
from mpidist.options import CommunicationImplementation, CommunicationOptions, Compression, ReduceOp
from mpidist.replicas import Replicas
from mpidist.transport.agreement.fingerprint import fingerprint_of, name_digest
from mpidist.transport.group.levels import Levels
from mpidist.transport.group.started_calls import Pending, Steps, Workplace
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.mpi.ring import ring_all_reduce
from mpidist.transport.shared_memory.fused_reducer import FusedReducer
from mpidist.transport.text import count_text, name_ranks, size_text, value_text
from mpidist.transport.tree import ReplicaTree

__all__ = ["Reductions"]

logger = logging.getLogger("mpidist.cross_device_ops")

_MAX_PLANS: Final = 1024  # a program with more plans hardly uses one twice

Ranks = tuple[int, ...] | None  # `None`: all ranks


@final
class Reductions:
    """The reducing calls of one group with one algorithm.

    `configuration`: the algorithm, its parameters and options, which must be equal on all ranks.
    """

    def __init__(
        self, group: SyncGroup, algorithm: ReduceAlgorithm, configuration: tuple[Any, ...], replicas: Replicas
    ) -> None:
        self.group = group
        self.replicas = replicas
        self._algorithm, self._configuration = algorithm, configuration
        self._overflows = OverflowReport()
        self._sum_memory = group.result_memory.sums
        self._plans: dict[Any, Plan] = {}
        # By fingerprint, equal on all ranks: plans that add replicas on GPUs and have not compiled their additions yet.
        self._uncompiled: dict[int, LocalSums | None] = {}
        self._planned_for: Levels | None = None
        self.repeated = RepeatedCalls(group, self._sum_memory)
        self.device_calls = DeviceCalls(group)

    def compare(self, call: ReductionCall) -> None:
        """Check the arguments of a call on all ranks, and reduce nothing. Collective."""
        try:
            if call.error is None:
                self._describe(call)
        except Exception as problem:  # whatever it is, the other ranks must learn of it
            call.error = name_call(problem, call.name)
        with self.group.call(call):
            pass

    def run(self, call: ReductionCall) -> list[Any]:
        """Reduce; return results of the values' kinds, `None` where this rank is no destination. Collective."""
        group = self.group
        group.enter(call.name)
        if group.calls.queue or group.calls.launched:
            group.calls.finish()
        if call.error is None:
            self._open(call)
        try:
            has_same_places = group.agreement.join(call)  # raises, if the call has no plan because of an error
            if self._uncompiled:
                self._compile_and_add(call, is_started=False)
            results = self._close(call, call.plan.execution.finish(call, has_same_places))
            group.agreement.end()
            return results
        except BaseException as error:
            group.break_off(error)
            raise

    def start(self, call: ReductionCall, key: CallKey | None = None) -> Pending:
        """Start to reduce, and return at once. Collective; all ranks start calls in the same order.

        Nobody may read the call's outs or write its values until the call is done. `key`: its key among the repeated
        calls, if it is to be one.
        """
        group = self.group
        group.enter(call.name)
        call.is_started, call.step_exit, call.run = True, group.agreement.take_step_exit(), group.agreement.run
        if call.error is None:
            self._open(call, is_started=True)

        def steps(pending: Pending) -> Steps:
            with group.breaking_off():  # an interrupt here would drop the call on this rank alone
                self._begin(call)
                if pending.is_ahead:
                    group.agreement.join_ahead(call)
                    pending.has_joined = True
                    while pending.is_ahead:
                        yield 0
            with group.data_phase():
                pending.sequence = group.agreement.sequence + 1
                group.agreement.arrive(call)
                pending.has_joined = True
                has_same_places = yield from pending.conclude(group.agreement, call)
                while call.plan.fingerprint in self._uncompiled and not pending.may_block:
                    yield 0
                self._compile_and_add(call, is_started=True)
                results = yield from call.plan.execution.steps(call, pending, has_same_places)
                results = self._close(call, results)
            if key is not None:
                self.repeated.add(key, call)
            return results

        outs = () if call.error is not None else call.outs or ()
        if call.error is not None or not call.plan.uses_device:
            values = call.operands.arrays if call.error is None and call.plan.execution.can_join_ahead else None
            return group.calls.start(steps, Workplace.HOST, values, outs)
        return group.calls.start(steps, Workplace.CALLER if call.state is None else Workplace.GPU, outs=outs)

    def _open(self, call: ReductionCall, is_started: bool = False) -> None:
        """Describe a call, and begin it. Local; stores an error in the call, and raises none.

        A call that `is_started` begins later: when the calls before it are done.
        """
        try:
            if call.programs is None:  # else an equal call was described
                self._describe(call)
            if call.plan.fingerprint in self._uncompiled:  # `_compile_and_add` does the rest
                self.group.devices.require_usable(call.name)
                call.is_left_out = True
                return
            self._add_replicas(call, is_started)
            if call.device_key is not None and self.replicas.tree is None:
                self.device_calls.add(call)
            if not is_started:
                call.plan.execution.begin(call)
        except Exception as problem:  # whatever it is, the other ranks must learn of it
            call.error = name_call(problem, call.name)

    def _describe(self, call: ReductionCall) -> None:
        """Check the arguments, and find or make the plan. Local; raises the error of the arguments."""
        call.operands = operands = Operands(call.values)
        if self.replicas.tree is not None:
            call.components = [own.arrays for own in open_all_replicas(operands, call.others, self.replicas)]
        call.plan = plan = self._plan_of(call)
        call.details = plan.details
        call.fingerprint = plan.fingerprint ^ name_digest(call.name)
        if call.outs is not None:
            self._check_outs(call, operands)

    def _add_replicas(self, call: ReductionCall, is_started: bool) -> None:
        """Add the arrays of this rank's replicas, and prepare the execution. Local."""
        plan = call.plan
        if plan.local_sums is not None:
            memory = None if is_started else self._sum_memory  # several started calls are under way at a time
            call.operands = call.operands.with_arrays(plan.local_sums.add(call.components, memory))
        if plan.uses_device:
            plan.execution.prepare(call, is_started)

    def _compile_and_add(self, call: ReductionCall, is_started: bool) -> None:
        """Before a plan adds replicas on GPUs for the first time: compile, then `_add_replicas`. Collective."""
        if call.plan.fingerprint in self._uncompiled:
            sums = self._uncompiled[call.plan.fingerprint]
            self.group.devices.compile_by((lambda: None) if sums is None else sums.compile)
            del self._uncompiled[call.plan.fingerprint]
        if call.is_left_out:  # by `_open`; a call that was started before this one may have compiled
            self._add_replicas(call, is_started)

    def _close(self, call: ReductionCall, results: list[Any]) -> list[Any]:
        """Write native results to the outs, or give them the kinds of the values; log numbers that overflowed."""
        if call.options.compression is not Compression.NONE:
            self._overflows.log_new(call.name, self.group.topology.rank, self.group.overflowed)
        if call.outs is None:
            return call.operands.restore(results)
        return write_outs(call.outs, results, self.group.shared)

    def _begin(self, call: ReductionCall) -> None:
        """Begin a started call, once the calls before it are done. Local; never raises, but stores the error."""
        if call.error is None:
            try:
                call.plan.execution.begin(call)
            except Exception as problem:  # whatever it is, the other ranks must learn of it
                call.error = name_call(problem, call.name)

    def _check_outs(self, call: ReductionCall, operands: Operands) -> None:
        """Check that outs can take the results; the outs of an earlier call of the plan are not checked again."""
        plan = call.plan
        known = plan.known_outs
        checked = known.find(call.outs or (), operands.arrays)
        if checked is None:
            call.outs = outs = native_outs(call.outs or (), call.values, operands.arrays)
            checked = known.find(outs, operands.arrays)  # the same tensors have the same native arrays each time
        if checked is None:
            checked = known.check(outs, operands.arrays, self.group.shared)
        call.checked_outs, call.per_node_indices = checked, checked.per_node_indices
        call.fingerprint ^= checked.per_node_digest
        for at, others in enumerate(call.other_outs, 1):
            device = self.replicas.devices[at]
            try:
                natives = native_outs(others, call.values, operands.arrays)
                gpu = device.index if device.is_gpu else None
                check_outs(natives, [None] * len(natives), operands.specs, plan.result_dtypes, gpu)
            except Exception as problem:
                raise InvalidArgumentError(f"replica {self.replicas.ids_here[at]}: {problem}") from problem

    def _plan_of(self, call: ReductionCall) -> Plan:
        # The call's name is not in the key, since there may be one for each variable: `name_digest` covers the name.
        key = (call.op, call.structure, call.mirrored, call.destinations, call.options.plan_key, call.operands.key)
        if self._planned_for is not self.group.levels:  # a reset makes new levels
            self._planned_for = self.group.levels
            self._plans.clear()
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            fingerprint = fingerprint_of((self._configuration, key[:-1], call.operands.specs))
            plan = self._plans[key] = self._make_plan(call, fingerprint)
        return plan

    def _make_plan(self, call: ReductionCall, fingerprint: int) -> Plan:
        """Choose the execution: in rows if a rank or a node has several; else fused if it can be; else packed."""
        specs = call.operands.specs
        results = result_dtypes(call.op, [spec.dtype for spec in specs], call.names)
        if call.outs is None:
            self._require_memory(call, host_sizes(specs, results))
        tree = self.replicas.tree
        parts = group_by_destinations(call.destinations, len(specs), self.group.topology.size)
        sums = None
        if tree is not None and not (tree.is_flat and self.replicas.num_here == 1):
            sums = self._local_sums(call.op, tree, specs)
        if tree is not None and self.group.topology.size > 1 and any(spec.device for spec in specs):
            self._uncompiled[fingerprint] = sums
        execution: Execution | None = None
        form, local_sums = "", sums
        if tree is not None and sums is not None and not tree.is_flat:
            execution, form, local_sums = self._rows(call, tree, specs, results, sums), "rows", None
        elif parts:
            execution, form = self._fused(call, specs, results, next(iter(parts)) if len(parts) == 1 else None)
        if execution is None:
            execution, form = self._packed(call, specs, parts)
        details = f"{call.op} of {specs_text(specs)}, {self._name_for(call.options)}, {form}"
        return Plan(fingerprint, self._configuration, specs, results, execution, details, local_sums)

    def _require_memory(self, call: ReductionCall, sizes: Sequence[int]) -> None:
        """Check that the results of this node's ranks can fit into the node; `sizes` is the bytes of each. Local."""
        here = self.group.topology.nodes[self.group.topology.node]
        of_ranks = [here] * len(sizes) if call.destinations is None else call.destinations
        nbytes = sum(size * len({*here} & {*ranks}) for size, ranks in zip(sizes, of_ranks, strict=True))
        require_memory(nbytes, len(here))

    def _rows(
        self,
        call: ReductionCall,
        tree: ReplicaTree,
        specs: tuple[Spec, ...],
        results: Sequence[np.dtype[Any]],
        sums: LocalSums,
    ) -> RowsExecution:
        """Make the execution of a tree in which a rank or a node has several rows."""
        arithmetic = Arithmetic(call.op, tree.total, fold=tree.world)
        groups: dict[tuple[np.dtype[Any], bool], list[int]] = {}
        for index, spec in enumerate(specs):
            groups.setdefault((arithmetic.dtypes(spec.dtype)[0], spec.device), []).append(index)
        lists = [
            RowList(tuple(indices), wire, device, *arithmetic.reduction(wire))
            for (wire, device), indices in groups.items()
        ]
        rank = self.group.topology.rank
        ranks = call.destinations
        is_wanted = [ranks is None or rank in ranks[index] for index in range(len(specs))]
        nbytes = sum(spec.num_elements * spec.dtype.itemsize for spec in specs)
        self._log(call, len(specs), "in rows", nbytes, None)
        return RowsExecution(self.group, tree, lists, sums, self._sum_memory, specs, results, is_wanted)

    def _local_sums(self, op: ReduceOp, tree: ReplicaTree, specs: tuple[Spec, ...]) -> LocalSums:
        """Make what adds the arrays of this rank's replicas."""
        arithmetic = Arithmetic(op, tree.total, fold=tree.local)
        wires = [arithmetic.dtypes(spec.dtype)[0] for spec in specs]
        indices = self.replicas.gpus_here if any(spec.device for spec in specs) else ()
        gpus = self.group.devices.gpus_of_process(indices) if indices else None
        return LocalSums(tree.local, arithmetic.reduction(np.dtype(np.float32))[0].ufunc, specs, wires, gpus)

    def _is_replaced(self, options: CommunicationOptions) -> bool:
        """Whether another algorithm is taken, because numbers are added in rank order."""
        return options.reproducible and self._algorithm._is_replaceable

    def _name_for(self, options: CommunicationOptions) -> str:
        """Name the algorithm that calls with these options use."""
        if self.replicas.tree is not None:
            return "in the order of replicas"
        name = "in rank order" if self._is_replaced(options) else type(self._algorithm).__name__
        if options.implementation is CommunicationImplementation.RING and not options.reproducible:
            name = "RING"
        if options.compression is Compression.NONE:
            return name
        return f"{name}, {options.compression} {'everywhere' if options.compress_everywhere else 'between nodes'}"

    def _fused_reducer(self, options: CommunicationOptions) -> FusedReducer | None:
        """Return the reducer of fused arrays that may replace the algorithm; `None` if none may."""
        levels = self.group.levels
        if options.implementation is CommunicationImplementation.RING:
            return None
        if self._is_replaced(options):
            return levels.fused if levels.fused is not None and levels.fused.keeps_rank_order else None
        return self._algorithm._fused_reducer_of(levels)

    def _all_reduce(self, options: CommunicationOptions) -> Reduce:
        """Return the function that leaves the reduction on every rank."""
        if self._is_replaced(options):
            return lambda levels, buffer, reduction: levels.world.all_reduce(buffer, reduction)
        if options.implementation is CommunicationImplementation.RING:
            return lambda levels, buffer, reduction: ring_all_reduce(levels.world, buffer, reduction)
        return self._hook(self._algorithm._all_reduce, "_all_reduce")

    def _hook(self, hook: Callable[..., Any], name: str) -> Callable[..., None]:
        """Return a function of the algorithm, refused if it returns its result, which would be lost."""

        def reduce(levels: Levels, buffer: Any, *given: Any) -> None:
            returned = hook(levels, buffer, *given)
            if returned is not None and returned is not buffer:
                raise TypeError(
                    f"{name} of {type(self._algorithm).__name__} returned {value_text(returned)}: it must leave the "
                    "reduction in its argument `buffer`, as by `buffer[:] = ...`, and return nothing"
                )

        return reduce

    def _arithmetic(self, call: ReductionCall, is_to_all: bool, is_fused: bool) -> Arithmetic:
        """Return how numbers are reduced: a fused execution adds node by node, the others add all ranks at once."""
        tree = self.replicas.tree
        if tree is not None:
            fold, fold_across = (tree.within_node, tree.across_nodes) if is_fused else (tree.world, None)
            return Arithmetic(call.op, tree.total, fold=fold, fold_across=fold_across)
        by_node = self._algorithm._compresses_between_nodes and is_to_all
        return Arithmetic.of(call.op, call.options, self.group.levels, by_node)

    def _fused(
        self, call: ReductionCall, specs: tuple[Spec, ...], results: Sequence[np.dtype[Any]], ranks: Ranks
    ) -> tuple[Execution | None, str]:
        """Make a fused or a carried execution, and name it for the log; `None` if transport or algorithm allow none."""
        group = self.group
        reducer, carrying = self._fused_reducer(call.options), group.agreement.carrying
        is_to_all = call.destinations is None
        if reducer is None or (not is_to_all and reducer.spans_nodes):
            return None, ""  # messages to the destinations alone send fewer bytes between nodes
        if reducer.spans_nodes and carrying is not None and call.options.compression is Compression.NONE:
            lists = make_fused_lists(self._arithmetic(call, is_to_all, is_fused=False), specs, reducer, 0)
            if lists is not None and CarriedExecution.can_carry(lists, group.topology.size):
                self._log(call, len(specs), "with the comparison", sum(fused.nbytes for fused in lists), ranks)
                memory, traffic = group.result_memory, group.levels.world.traffic
                return CarriedExecution(carrying, lists, specs, results, memory, traffic), "with the comparison"
        lists = make_fused_lists(self._arithmetic(call, is_to_all, is_fused=True), specs, reducer)
        if lists is None:
            return None, ""
        self._log(call, len(specs), "fused", sum(fused.nbytes for fused in lists), ranks)
        return FusedExecution(group, reducer, lists, specs, results, call.destinations), "fused"

    def _packed(
        self, call: ReductionCall, specs: tuple[Spec, ...], parts: dict[Ranks, list[int]]
    ) -> tuple[PackedExecution, str]:
        """Make a packed execution, and name it for the log."""
        options, algorithm = call.options, self._algorithm
        packed_parts, total = [], 0
        for ranks, indices in parts.items():
            part_specs = tuple(specs[index] for index in indices)
            arithmetic = self._arithmetic(call, ranks is None, is_fused=False)
            messages, num_packs = make_messages(
                arithmetic, part_specs, options.bytes_per_pack, algorithm._num_packs, self.group.levels
            )
            reduce = self._all_reduce(options)
            if ranks is not None:
                reduce = partial(reduce_to_ranks, self._hook(algorithm._reduce_to_root, "reduce_to_root"), ranks)
            results = tuple(arithmetic.dtypes(spec.dtype)[1] for spec in part_specs)
            packed_parts.append(PackedPart(ranks, tuple(indices), part_specs, results, messages, reduce))
            total += num_packs
            form = f"{count_text(num_packs, 'pack')} in {count_text(len(messages), 'message')}"
            self._log(call, len(part_specs), form, sum(message.nbytes for message in messages), ranks)
        return PackedExecution(self.group, packed_parts, options.implementation), count_text(total, "pack")

    def _log(self, call: ReductionCall, num_arrays: int, form: str, nbytes: int, ranks: Ranks) -> None:
        topology = self.group.topology
        logger.log(
            logging.DEBUG if topology.rank else logging.INFO,
            "r%d | %s: %s of %s, %s, %s, %s, %s%s",
            topology.rank,
            call.name,
            call.op,
            count_text(num_arrays, "array"),
            form,
            size_text(nbytes),
            count_text(topology.size, "rank"),
            self._name_for(call.options),
            "" if ranks is None else f", to {name_ranks(ranks)}",
        )
