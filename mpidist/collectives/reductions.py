"""The reducing calls of a group: planned once for calls alike, agreed on by all ranks, carried out, or started."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, Final, final

import numpy as np

from mpidist import nest
from mpidist.collectives.arguments import Operands, Spec
from mpidist.collectives.arithmetic import Arithmetic, OverflowReport, wire_and_result_dtypes
from mpidist.collectives.call import Algorithm, Execution, Plan, ReductionCall
from mpidist.collectives.destinations import Kept, put_together
from mpidist.collectives.fused_execution import FusedExecution
from mpidist.collectives.out_arrays import CheckedOuts, native_outs
from mpidist.collectives.packed_execution import PackedExecution, PackedPart, reduce_to_ranks
from mpidist.collectives.plan import fused_lists, messages_of
from mpidist.collectives.signature import specs_text
from mpidist.options import Compression
from mpidist.transport import Levels, Pending, Steps, SyncGroup, count_text, fingerprint_of, name_ranks, size_text

__all__ = ["PendingResult", "Reductions"]

logger = logging.getLogger("mpidist.cross_device_ops")

_MAX_OUTS: Final = 16  # lists of outs remembered for a plan
_MAX_PLANS: Final = 1024  # a program that makes more has shapes that do not come back

Ranks = tuple[int, ...] | None  # `None`: all of them


@lru_cache(4096)
def _name_digest(call: str) -> int:
    """Return a number for a call's name, which ranks compare together with its plan."""
    return fingerprint_of(call)


@final
class Reductions:
    """Makes reducing calls of one group with one algorithm.

    Args:
        group: The ranks.
        algorithm: How flat buffers are reduced.

    Attributes:
        group: The ranks.
    """

    def __init__(self, group: SyncGroup, algorithm: Algorithm) -> None:
        self.group = group
        self._algorithm = algorithm
        self._overflows = OverflowReport()
        self._plans: dict[Any, Plan] = {}
        self._planned_for: Levels | None = None

    def run(self, call: ReductionCall) -> list[Any]:
        """Reduce. Collective.

        Args:
            call: The call.

        Returns:
            A result for each value, of its kind; `None` where this rank is no destination.

        Raises:
            InvalidArgumentError: If the ranks differ, or the values cannot be reduced.
        """
        group = self.group
        group.enter(call.name)
        if group.calls:
            group.calls.finish()
        if call.error is None:
            self._open(call)
        try:
            group.agreement.arrive(call)
            has_same_placement = group.agreement.conclude(call)  # raises, if the call has no plan because of an error
            results = call.plan.execution.finish(call, has_same_placement)
            group.agreement.end()
            if call.options.compression is not Compression.NONE:
                self._overflows.look(call.name, group.topology.rank, group.overflowed)
            return results
        except BaseException as error:
            group.break_off(error)
            raise

    def start(self, call: ReductionCall) -> Pending:
        """Start to reduce, and return at once. Collective; ranks start calls in one order.

        Args:
            call: The call. Its values and outs must not be touched until it is done.
        """
        group = self.group
        group.enter(call.name)
        if call.error is None:
            self._open(call, is_later=True)

        def steps(pending: Pending) -> Steps:
            self._begin(call)
            with group.data_phase():
                group.agreement.arrive(call)
                while not (pending.is_waited_for or group.agreement.have_all_arrived()):
                    yield 0
                # Another rank may wait for this one elsewhere before it tells what it passed.
                while not (pending.may_wait or group.agreement.is_alike(call)):
                    yield 0
                has_same_placement = group.agreement.conclude(call)
                results = yield from call.plan.execution.steps(call, pending, has_same_placement)
                if call.options.compression is not Compression.NONE:
                    self._overflows.look(call.name, group.topology.rank, group.overflowed)
                return results

        return group.calls.start(steps, needs_caller=call.error is None and call.plan.uses_device)

    def _open(self, call: ReductionCall, is_later: bool = False) -> None:
        """Look at the arguments, and plan the call. Local; never raises.

        Args:
            call: The call.
            is_later: Whether other calls come before this one, which is not begun then.
        """
        try:
            call.operands = operands = Operands(call.values)
            call.plan = plan = self._plan_of(call)
            call.details = plan.details
            call.fingerprint = plan.fingerprint ^ _name_digest(call.name)
            if call.outs is not None:
                self._check_outs(call, operands)
            if plan.uses_device:
                plan.execution.prepare(call, is_later)
            if not is_later:
                plan.execution.begin(call)
        except Exception as problem:  # whatever it is, the other ranks must learn of it
            call.error = problem

    def _begin(self, call: ReductionCall) -> None:
        """Begin a call that was started, when no call is before it. Local; never raises."""
        if call.error is None:
            try:
                call.plan.execution.begin(call)
            except Exception as problem:  # whatever it is, the other ranks must learn of it
                call.error = problem

    def _check_outs(self, call: ReductionCall, operands: Operands) -> None:
        """Refuse outs that cannot take the results; those of an earlier call need no second look."""
        outs, plan = call.outs or (), call.plan
        key = id(outs[0]) if outs else 0
        checked = plan.checked_outs.get(key)
        if checked is None or not checked.matches(outs, operands.arrays):
            if len(plan.checked_outs) >= _MAX_OUTS:
                plan.checked_outs.clear()
            call.outs = outs = native_outs(outs, call.values, operands.arrays)
            checked = CheckedOuts(outs, operands.arrays, operands.specs, plan.results, self.group.shared)
            plan.checked_outs[key] = checked
        call.checked_outs = checked
        call.fingerprint ^= checked.per_node_digest

    def _plan_of(self, call: ReductionCall) -> Plan:
        # Without the call's name, of which there may be as many as variables: `_name_digest` stands for it.
        key = (call.op, call.structure, call.mirrored, call.destinations, call.options.plan_key, call.operands.key)
        if self._planned_for is not self.group.levels:  # another transport since a reset
            self._planned_for = self.group.levels
            self._plans.clear()
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            fingerprint = fingerprint_of((self._algorithm.configuration, key[:-1], call.operands.specs))
            plan = self._plans[key] = self._make_plan(call, fingerprint)
        return plan

    def _make_plan(self, call: ReductionCall, fingerprint: int) -> Plan:
        specs = call.operands.specs
        results = [wire_and_result_dtypes(call.op, spec.dtype)[1] for spec in specs]
        parts = _by_destinations(call.destinations, len(specs), self.group.topology.size)
        execution: Execution | None = None
        if len(parts) == 1:
            execution, form = self._fused(call, specs, results, next(iter(parts)))
        if execution is None:
            execution, form = self._packed(call, specs, parts)
        details = f"{call.op} of {specs_text(specs)}, {self._algorithm.name_for(call.options)}, {form}"
        return Plan(fingerprint, self._algorithm.configuration, specs, results, execution, details)

    def _arithmetic(self, call: ReductionCall, ranks: Ranks) -> Arithmetic:
        by_node = self._algorithm.compresses_between_nodes and ranks is None
        return Arithmetic.of(call.op, call.options, self.group.levels, by_node)

    def _fused(
        self, call: ReductionCall, specs: tuple[Spec, ...], results: Sequence[np.dtype[Any]], ranks: Ranks
    ) -> tuple[FusedExecution | None, str]:
        """Let a transport of fused arrays carry a call, if there is one that can and shall. Else nothing."""
        group = self.group
        reducer = self._algorithm.fused_reducer_for(call.options, group.levels)
        if reducer is None or (ranks is not None and reducer.spans_nodes):
            return None, ""  # fewer bytes between nodes than if all nodes had the result
        lists = fused_lists(self._arithmetic(call, ranks), specs, reducer)
        if lists is None:
            return None, ""
        wants_results = ranks is None or group.topology.rank in ranks
        self._log(call, len(specs), "fused", sum(fused.nbytes for fused in lists), ranks)
        is_barrier = group.agreement.is_node_barrier
        return FusedExecution(reducer, lists, specs, results, group.shared, is_barrier, wants_results), "fused"

    def _packed(
        self, call: ReductionCall, specs: tuple[Spec, ...], parts: dict[Ranks, list[int]]
    ) -> tuple[PackedExecution, str]:
        options, algorithm = call.options, self._algorithm
        made, total = [], 0
        for ranks, indices in parts.items():
            own, arithmetic = tuple(specs[index] for index in indices), self._arithmetic(call, ranks)
            messages, num_packs = messages_of(
                arithmetic, own, options.bytes_per_pack, algorithm.num_packs, self.group.levels
            )
            reduce = algorithm.all_reduce_for(options)
            if ranks is not None:
                reduce = partial(reduce_to_ranks, algorithm.reduce_to(ranks[0]), ranks)
            results = tuple(arithmetic.dtypes(spec.dtype)[1] for spec in own)
            made.append(PackedPart(ranks, tuple(indices), own, results, messages, reduce))
            total += num_packs
            form = f"{count_text(num_packs, 'pack')} in {count_text(len(messages), 'message')}"
            self._log(call, len(own), form, sum(message.nbytes for message in messages), ranks)
        return PackedExecution(self.group, made, options.implementation), count_text(total, "pack")

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
            self._algorithm.name_for(call.options),
            "" if ranks is None else f", to {name_ranks(ranks)}",
        )


def _by_destinations(
    destinations: tuple[tuple[int, ...], ...] | None, num_values: int, num_ranks: int
) -> dict[Ranks, list[int]]:
    """Group values whose results go to the same ranks."""
    everywhere = tuple(range(num_ranks))
    parts: dict[Ranks, list[int]] = {}
    for index in range(num_values):
        ranks = everywhere if destinations is None else destinations[index]
        parts.setdefault(None if ranks == everywhere else ranks, []).append(index)
    return parts


@final
class PendingResult:
    """A reduction under way, of `ReplicaContext.start_all_reduce`.

    Reductions get on, in the order of their start, whenever this rank starts or waits for one, asks whether one is
    done, or makes any other collective call, which finishes them first. With several nodes, a thread looks after them
    between those calls, where MPI allows it (`MPI.THREAD_MULTIPLE`, mpi4py's default).

    A reduction of a GPU's arrays is launched on its streams as a whole, behind those before it, when this rank looks
    after it and all ranks have started it. It comes after what the current stream held when it was started. Where data
    goes through the host (between nodes, but for `implementation="NCCL"`) it is done in `wait` instead.
    """

    def __init__(self, group: SyncGroup, call: Pending, value: Any, out: Any, kept: Kept) -> None:
        self._group, self._call = group, call
        self._form = None
        with suppress(Exception):  # then the call was refused, which `wait` raises
            self._form = nest.map_structure(lambda _: None, value)  # the caller may fill its list anew meanwhile
        self._out, self._kept = out, kept

    def is_done(self) -> bool:
        """Whether the result is there, and let reductions under way get on.

        Does not wait, but where ranks send messages and MPI allows no thread: there it may, for ranks that started
        the same reductions. Never for a GPU's arrays.
        """
        if not self._call.is_done:
            self._group.require_mpi("is_done()")
            self._group.calls.advance(may_wait=True)
        return self._call.is_done

    def wait(self) -> Any:
        """Wait for the result, and return it: what `all_reduce` would. Collective. May be called again.

        A GPU is done with the reduction then: arguments and results can be used in any stream.

        Raises:
            Exception: What `all_reduce` would have raised.
        """
        if not self._call.is_done:
            self._group.require_mpi("wait()")
            self._group.calls.finish(self._call)
        results = self._call.result
        return self._out if self._out is not None else put_together(self._form, results, self._kept)
