"""One reducing call, from the ranks' values to the results at their destinations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, Final, final

import numpy as np

from mpidist.collectives.arguments import Operands
from mpidist.collectives.compression_policy import Compressing, OverflowReport
from mpidist.collectives.describing import describe, packs_text, specs_text
from mpidist.collectives.fused_execution import NOWHERE, Placement, StreamCalls
from mpidist.collectives.out_arrays import KnownOuts, native_outs
from mpidist.collectives.packed_execution import ChunkCalls, Layout, Parts
from mpidist.collectives.plan import Plan, Spec, make_plan
from mpidist.collectives.signature import Request
from mpidist.options import CommunicationOptions, Compression
from mpidist.transport import (
    Joining,
    Levels,
    Pending,
    Reduction,
    SharedArrays,
    Steps,
    StreamReducer,
    SyncGroup,
    count_text,
    fingerprint_of,
    is_half,
    name_ranks,
    size_text,
)

__all__ = ["BatchReducer", "Request"]

logger = logging.getLogger("mpidist.cross_device_ops")

_MAX_OUTS: Final = 16  # lists of outs remembered for a shape
_MAX_SHAPES: Final = 1024  # of calls remembered; a program that makes more has shapes that do not come back


@final
@dataclass
class _Shape:
    """A request with the shapes of its values: what is planned once."""

    fingerprint: int
    parts: Parts
    streams: StreamCalls | None = None  # who runs such calls, if they go in streams
    details: str = ""  # for the flight recorder
    uses_device: bool = False
    known_outs: dict[int, KnownOuts] = field(default_factory=dict)

    def know(
        self, outs: Sequence[Any], values: Sequence[Any], operands: Operands, shared: SharedArrays
    ) -> tuple[KnownOuts, Sequence[Any]]:
        """Look at outs, and refuse those that cannot take the results. Returns them as native arrays, too."""
        key = id(outs[0]) if outs else 0
        known = self.known_outs.get(key)
        if known is None or not known.are(outs, operands.arrays):
            if len(self.known_outs) >= _MAX_OUTS:
                self.known_outs.clear()
            outs = native_outs(outs, values, operands.arrays)
            known = KnownOuts(outs, operands.arrays, operands.specs, self._result_dtypes, shared)
            self.known_outs[key] = known
        return known, outs

    @cached_property
    def _result_dtypes(self) -> list[np.dtype[Any]]:
        dtypes = {at: dtype for _, all_at, plan in self.parts for at, dtype in zip(all_at, plan.results, strict=True)}
        return [dtypes[at] for at in range(len(dtypes))]


_NO_VALUES: Final = Operands([])
_UNPLANNED: Final = _Shape(0, ())


@final
class _Call:
    """What is known of one call before the ranks agree on it."""

    __slots__ = ("begun", "error", "known", "layout", "operands", "outs", "placement", "request", "shape", "together")

    def __init__(self, request: Request, outs: Sequence[Any] | None) -> None:
        self.request = request
        self.outs = outs
        self.operands = _NO_VALUES
        self.shape = _UNPLANNED
        self.known: KnownOuts | None = None
        self.together = 0  # tells which outs are one for all ranks of a node
        self.placement = NOWHERE
        self.begun: Any = None
        self.layout: Layout | None = None
        self.error: Exception | None = None


@lru_cache(4096)
def _word_of(call: str) -> int:
    """Return a number for a call's name, which ranks compare together with its shape."""
    return fingerprint_of(call)


@final
class BatchReducer:
    """Runs reducing calls of one group with one algorithm.

    Args:
        group: The ranks.
        configuration: What must be equal on all ranks, of the algorithm.
        algorithm: For logs.
        num_packs: As in `make_plan`.
        reduce_buffer: Reduces a flat buffer over all ranks, to a root if one is given, as the options say.
        streams: Says who carries streams over all ranks, with these options, if anybody does.
        by_node: Whether the algorithm compresses what leaves a node, if it is asked to.
    """

    def __init__(
        self,
        group: SyncGroup,
        configuration: tuple[Any, ...],
        algorithm: Callable[[CommunicationOptions], str],
        num_packs: int,
        reduce_buffer: Callable[[CommunicationOptions, Levels, Any, Reduction, int | None], None],
        streams: Callable[[CommunicationOptions, Levels], StreamReducer | None],
        by_node: bool,
    ) -> None:
        self._group = group
        self._configuration = configuration
        self._algorithm = algorithm
        self._num_packs = num_packs
        self._chunks = ChunkCalls(group, reduce_buffer)
        self._streams = streams
        self._by_node = by_node
        self._overflows = OverflowReport()
        self._shapes: dict[Any, _Shape] = {}
        self._planned_for: Levels | None = None

    def run(
        self, request: Request, values: Sequence[Any], outs: Sequence[Any] | None = None, error: Exception | None = None
    ) -> list[Any]:
        """Reduce values. Collective.

        Args:
            request: The call.
            values: This rank's contributions.
            outs: Arrays that take the results.
            error: What is known to be wrong with this rank's arguments: it is raised on all ranks.

        Returns:
            A result for each value, of its kind; `None` where this rank is no destination.

        Raises:
            InvalidArgumentError: If the ranks differ, or the values cannot be reduced.
        """
        self._group.enter(request.call)
        if self._group.calls:
            self._group.calls.finish()
        call = self._prepare(request, values, outs, error)
        self._begin(call)
        try:
            results = self._finish(call, self._group.agree(self._joining(call)))
            self._group.agreement.end()
            return self._watched(call, results)
        except BaseException as error:
            self._group.break_off(error)
            raise

    def start(
        self, request: Request, values: Sequence[Any], outs: Sequence[Any] | None = None, error: Exception | None = None
    ) -> Pending:
        """Start to reduce values, as `run` does, and return at once. Collective; ranks start calls in one order.

        Returns:
            The call. Its values and outs must not be touched until it is done.
        """
        self._group.enter(request.call)
        call = self._prepare(request, values, outs, error, is_later=True)

        def steps(pending: Pending) -> Steps:
            self._begin(call)
            with self._group.moving():
                arrival = self._group.arrive(self._joining(call))
                while not (pending.is_waited_for or self._group.agreement.have_all_arrived()):
                    yield 0
                # Another rank may wait for this one elsewhere before it tells what it passed.
                while not (pending.may_wait or self._group.agreement.is_alike(arrival)):
                    yield 0
                is_same = self._group.agreement.conclude(arrival)
                if call.layout is not None:
                    results = self._restored(call, (yield from self._chunks.steps(call.layout, pending, arrival)))
                elif call.shape.streams is None:  # messages that this rank cannot leave alone
                    while not pending.may_wait and self._group.topology.size > 1:
                        yield 0
                    results = self._finish(call, is_same)
                else:
                    results = yield from self._steps(call, call.shape.streams, is_same)
                return self._watched(call, results)

        return self._group.calls.start(steps, needs_caller=call.layout is not None)

    def _prepare(
        self,
        request: Request,
        values: Sequence[Any],
        outs: Sequence[Any] | None,
        error: Exception | None,
        is_later: bool = False,
    ) -> _Call:
        """Look at the arguments. Local; never raises. `is_later`: whether other calls come before this one."""
        call = _Call(request, outs)
        if error is None:
            try:
                self._look(call, values)
                if call.shape.uses_device:
                    self._group.devices.require_usable(request.call)
                    call.layout = self._lay_out(call, is_later)
            except Exception as problem:  # whatever it is, the other ranks must learn of it
                error = problem
        call.error = error
        return call

    def _look(self, call: _Call, values: Sequence[Any]) -> None:
        group = self._group
        call.operands = operands = Operands(values)
        call.shape = shape = self._shape(call.request, operands)
        if call.outs is not None:
            call.known, call.outs = shape.know(call.outs, values, operands, group.shared)
            call.together = call.known.together

    def _begin(self, call: _Call) -> None:
        """Stage the first chunk of a call that goes in streams, when no call is before it. Local; never raises."""
        group, shape, operands = self._group, call.shape, call.operands
        if call.error is not None or shape.streams is None:
            return
        try:
            if call.together or not shape.streams.is_small:
                call.placement = Placement.of(group.shared, operands.arrays, call.outs, call.known)
            if call.placement.is_private and group.agreement.is_node_barrier:
                call.begun = shape.streams.begin(operands.arrays)
        except Exception as problem:  # whatever it is, the other ranks must learn of it
            call.error = problem

    def _joining(self, call: _Call) -> Joining:
        return Joining(
            call.request.call,
            call.shape.fingerprint ^ call.together ^ _word_of(call.request.call),
            partial(describe, call.request, call.operands.specs, call.together, self._configuration),
            call.request.options.timeout_seconds,
            call.error,
            call.placement.word,
            call.shape.details,
        )

    def _finish(self, call: _Call, is_same: bool) -> list[Any]:
        streams, operands = call.shape.streams, call.operands
        if streams is None:
            layout = self._lay_out(call, is_later=False) if call.layout is None else call.layout
            return self._restored(call, self._chunks.run(layout, call.shape.uses_device))
        if not is_same:  # some ranks staged and some did not: all begin again, from private arrays
            call.begun, call.placement = None, NOWHERE
        results = streams.finish(
            call.begun, operands.arrays, call.outs, call.placement, call.known, self._group.agreement.require_peers
        )
        return self._deliver(call, results)

    def _lay_out(self, call: _Call, is_later: bool) -> Layout:
        deliver = None if call.outs is None else partial(self._deliver, call)
        request, operands, outs = call.request, call.operands, call.outs
        return self._chunks.lay_out(
            request.call, request.options, call.shape.parts, operands, outs, deliver, marks=is_later
        )

    def _restored(self, call: _Call, results: list[Any]) -> list[Any]:
        return self._deliver(call, results) if call.outs is None else results

    def _steps(self, call: _Call, streams: StreamCalls, is_same: bool) -> Steps:
        if not is_same:
            call.begun, call.placement = None, NOWHERE
        arrays = call.operands.arrays
        results = yield from streams.steps(call.begun, arrays, call.outs, call.placement, call.known)
        return self._deliver(call, results)

    def _watched(self, call: _Call, results: list[Any]) -> list[Any]:
        """Log what has overflowed. When the call is done: a GPU counts late."""
        if call.request.options.compression is not Compression.NONE:
            self._overflows.look(call.request.call, self._group.topology.rank, self._group.overflowed)
        return results

    def _deliver(self, call: _Call, results: list[Any]) -> list[Any]:
        if call.outs is None:
            return call.operands.restore(results)
        for out, result in zip(call.outs, results, strict=True):
            if out is result:
                continue
            if self._group.shared.is_per_node(out):
                self._group.shared.write(out, result)
            else:  # it was not contiguous, or of another byte order
                out[...] = result
        return list(call.outs)

    def _shape(self, request: Request, operands: Operands) -> _Shape:
        options = request.options
        key = (  # without the call's name, of which there may be as many as variables: `_word_of` stands for it
            request.op,
            request.structure,
            request.mirrored,
            request.destinations,
            options.bytes_per_pack,
            options.implementation,
            options.reproducible,
            options.compression,
            options.compress_everywhere,
            operands.key,
        )
        if self._planned_for is not self._group.levels:  # another transport since a reset
            self._planned_for = self._group.levels
            self._shapes.clear()
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            specs = operands.specs
            fingerprint = fingerprint_of((self._configuration, key[:-1], specs))
            shape = self._shapes[key] = self._plan(request, specs, fingerprint)
        return shape

    def _plan(self, request: Request, specs: tuple[Spec, ...], fingerprint: int) -> _Shape:
        everywhere = tuple(range(self._group.topology.size))
        groups: dict[tuple[int, ...] | None, list[int]] = {}
        for index in range(len(specs)):
            wanted = everywhere if request.destinations is None else request.destinations[index]
            groups.setdefault(None if wanted == everywhere else wanted, []).append(index)
        parts = []
        for ranks, indices in groups.items():
            part = [specs[index] for index in indices]
            compressing = Compressing.of(request.options, self._group.levels, self._by_node and ranks is None)
            sizes = self._group.levels
            plan = make_plan(request.op, part, request.options, self._num_packs, len(everywhere), sizes, compressing)
            parts.append((ranks, tuple(indices), plan))
            self._log(request, ranks, plan)
        calls = None
        if len(parts) == 1:
            calls = self._stream_calls(request.options, *parts[0])
        packs = packs_text(sum(plan.num_packs for _, _, plan in parts), calls is not None)
        details = f"{request.op} of {specs_text(specs)}, {self._algorithm(request.options)}{packs}"
        return _Shape(fingerprint, tuple(parts), calls, details, any(spec.device for spec in specs))

    def _stream_calls(
        self, options: CommunicationOptions, ranks: tuple[int, ...] | None, _: tuple[int, ...], plan: Plan
    ) -> StreamCalls | None:
        reducer = self._streams(options, self._group.levels)
        if reducer is None or plan.streams is None:
            return None
        if ranks is not None and reducer.spans_nodes:
            return None  # fewer bytes between nodes than if all nodes had the result
        if reducer.spans_nodes and options.reproducible and any(is_half(its.wire) for its in plan.streams):
            return None  # a partial sum must not be rounded between nodes
        if sum(its.nbytes for its in plan.streams) < reducer.least_bytes:
            return None
        wants_results = ranks is None or self._group.topology.rank in ranks
        return StreamCalls(reducer, plan, self._group.shared, self._group.agreement.is_node_barrier, wants_results)

    def _log(self, request: Request, ranks: tuple[int, ...] | None, plan: Plan) -> None:
        topology = self._group.topology
        logger.log(
            logging.DEBUG if topology.rank else logging.INFO,
            "r%d | %s: %s of %s, %s in %s, %s, %s, %s%s",
            topology.rank,
            request.call,
            request.op,
            count_text(len(plan.specs), "array"),
            count_text(plan.num_packs, "pack"),
            count_text(len(plan.chunks), "message"),
            size_text(sum(chunk.nbytes for chunk in plan.chunks)),
            count_text(topology.size, "rank"),
            self._algorithm(request.options),
            "" if ranks is None else f", to {name_ranks(ranks)}",
        )
