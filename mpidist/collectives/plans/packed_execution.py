"""Reductions message by message: packed, reduced by an algorithm, and unpacked, on the host or on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, Final, NamedTuple, cast, final

import numpy as np

from mpidist.collectives.arguments.destinations import send_to
from mpidist.collectives.arguments.operands import NewResults, Spec
from mpidist.collectives.arguments.out_arrays import copy_overwritten, target_arrays, write_outs
from mpidist.collectives.plans.call import Execution, ReductionCall
from mpidist.collectives.plans.device_program import DeviceMessages, DeviceProgram
from mpidist.collectives.plans.plan import Message
from mpidist.collectives.plans.reduce_algorithm import Reduce, ReduceToRoot
from mpidist.options import CommunicationImplementation
from mpidist.transport.arrays import described_on_gpu, wait_for_writes
from mpidist.transport.gpu.events import Launched, record_event
from mpidist.transport.group.levels import Levels
from mpidist.transport.group.started_calls import Pending, Steps
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.nccl.launch_queue import DeviceQueue
from mpidist.transport.reduction import Reduction, narrow, widen

__all__ = ["PackedExecution", "PackedPart", "reduce_to_ranks"]

_MOST_PROGRAMS: Final = 4  # of a call with new results, which lie in few places in turn


@final
@dataclass(frozen=True)
class PackedPart:
    """The values of a call that have the same destinations."""

    ranks: tuple[int, ...] | None  # the destinations; `None` for all ranks
    indices: tuple[int, ...]  # the values
    specs: tuple[Spec, ...]  # their arrays
    result_dtypes: tuple[np.dtype[Any], ...]
    messages: tuple[Message, ...]
    reduce: Reduce  # reduces a flat buffer over all ranks


@final
class _Layout(NamedTuple):
    """The arrays of one call."""

    parts: list[tuple[Any, Any, DeviceProgram]]  # for each part of the call: its values, and its results
    are_apart: bool  # no value had to be copied because the result of another one overwrites it
    after: Any  # the event after which a GPU may start; `None` for the work that the current stream holds


@final
class PackedExecution(Execution):
    """Carries out the calls of one plan: an algorithm reduces one message after the other."""

    def __init__(
        self, group: SyncGroup, parts: Sequence[PackedPart], implementation: CommunicationImplementation
    ) -> None:
        self._group, self._parts = group, parts
        self._uses_device = any(spec.device for part in parts for spec in part.specs)
        self._is_all_device = all(spec.device for part in parts for spec in part.specs)
        self._new_results = [NewResults(part.specs, part.result_dtypes, group.result_memory) for part in parts]
        self._on_device = [DeviceMessages(part.messages, part.specs, part.result_dtypes, part.reduce) for part in parts]
        self._on_host = [[message for message in part.messages if not message.device] for part in parts]
        self._num_values = sum(len(part.indices) for part in parts)
        self._needs_nccl = implementation is CommunicationImplementation.NCCL
        self._is_ring = implementation is CommunicationImplementation.RING
        self._needed: set[str] | None = None
        self._levels_of: Callable[[bool], Levels] = partial(group.levels_of, nccl_everywhere=self._needs_nccl)
        if self._is_ring:  # always over MPI
            self._levels_of = group.host_levels_of

    def prepare(self, call: ReductionCall, is_started: bool) -> None:
        """Allocate results of calls with device memory, and record the event that a started call comes after."""
        if self._uses_device:
            self._group.devices.require_usable(call.name)
            call.state = self._lay_out(call, is_started)

    def begin(self, call: ReductionCall) -> None:
        """Allocate the results: if a rank has no memory for them, all ranks raise before data moves."""
        if not self._uses_device:  # else `prepare` has done so
            call.state = self._lay_out(call, is_started=False)

    def finish(self, call: ReductionCall, has_same_places: bool) -> list[Any]:
        layout: _Layout = call.state
        queue = self._ready_levels().queue if self._uses_device else None
        if queue is None:
            reduced = self._reduce(call, layout, None)
            wait_for_writes(call.outs or ())
            return reduced
        launched = queue.launch(call.name, partial(self._reduce, call, layout, queue), layout)
        queue.wait(launched)
        results: list[Any] = launched.result
        return results

    def steps(self, call: ReductionCall, pending: Pending, has_same_places: bool) -> Steps:
        group, size = self._group, self._group.topology.size
        if not self._uses_device:  # a rank that sends messages blocks in the algorithm
            while not pending.may_block and size > 1:
                yield 0
            return self.finish(call, has_same_places)
        while not (pending.may_block or size == 1 or self._can_be_launched()):
            yield 0
        layout: _Layout = call.state
        if not self._can_be_launched():
            if not pending.is_waited_for:
                group.agreement.restart_clock(record=call)
            with group.devices.private_stream(layout.after):  # the caller's goes on with what comes later
                group.devices.wait_for_launches(call.name)  # MPI and NCCL are not at work on device memory at once
                results = self.finish(call, has_same_places)
                group.devices.wait_for_launches(call.name)  # so that the results can be used in any stream
            return results
        queue = self._levels_of(True).queue
        assert queue is not None
        launched = queue.launch(call.name, partial(self._reduce, call, layout, queue), layout, layout.after)
        pending.is_launched = True
        yield 0  # a rank that waits for a later call launches that call, too, before it waits for this one
        while not queue.is_complete(launched):
            if pending.is_waited_for:
                self._wait(queue, launched, pending, call)
            else:
                yield 1
        return launched.result

    def _lay_out(self, call: ReductionCall, is_started: bool) -> _Layout:
        """Find or allocate the arrays of a call's results. Local."""
        laid: list[tuple[Any, Any, DeviceProgram]] = []
        are_apart = True
        for part, new_results in zip(self._parts, self._new_results, strict=True):
            arrays = self._of_part(part, call.operands.arrays)
            if call.outs is None:
                targets = new_results.take()
            else:
                outs = self._of_part(part, call.outs)
                if call.checked_outs is not None and call.checked_outs.are_targets:
                    targets = outs
                else:
                    targets = target_arrays(outs, part.specs, part.result_dtypes, self._group.shared)
                if call.programs is None:
                    given = arrays
                    arrays = copy_overwritten(arrays, targets)
                    are_apart = are_apart and all(map(is_, arrays, given))
            laid.append((arrays, targets, self._program(call, targets)))
        return _Layout(laid, are_apart, record_event() if is_started else None)

    def _of_part(self, part: PackedPart, arrays: Any) -> Any:
        return arrays if len(self._parts) == 1 else [arrays[index] for index in part.indices]

    def _program(self, call: ReductionCall, targets: list[Any]) -> DeviceProgram:
        """Return the program of a repeated call for these results, or a new one."""
        programs = call.programs
        if programs is None:
            return DeviceProgram()
        key = described_on_gpu(targets) if call.outs is None else None  # else the call's own key has the outs
        if key not in programs:
            if len(programs) >= _MOST_PROGRAMS:
                programs.clear()
            programs[key] = DeviceProgram(is_repeated=True)
        return programs[key]

    def can_repeat(self, call: ReductionCall) -> bool:
        outs = call.checked_outs
        return self._is_all_device and call.state.are_apart and (outs is None or outs.are_targets)

    def _reduce(self, call: ReductionCall, layout: _Layout, queue: DeviceQueue | None) -> list[Any]:
        """Reduce every message. Fills outs in device memory here, on the stream of the reductions."""
        results: Any = [None] * self._num_values
        messages = zip(self._on_device, self._on_host, strict=True)
        for part, (on_device, on_host), laid in zip(self._parts, messages, layout.parts, strict=True):
            arrays, targets, program = laid
            if on_device.messages:
                on_device.reduce(arrays, targets, self._levels_of(True), program)
            if on_host:
                _run_on_host(on_host, arrays, targets, self._levels_of(False), part.reduce)
            if part.ranks is not None and self._group.topology.rank not in part.ranks:
                continue
            if len(self._parts) == 1:
                results = targets
                continue
            for index, target in zip(part.indices, targets, strict=True):
                results[index] = target
        if self._uses_device and call.outs is not None and results is not call.outs:
            with nullcontext() if queue is None else queue.unpacking():
                return write_outs(call.outs, results, self._group.shared)
        return cast("list[Any]", results)

    def _kernels(self, levels: Levels) -> set[str]:
        if self._needed is None:
            self._needed = set().union(*(messages.kernels(levels) for messages in self._on_device))
        return self._needed

    def _ready_levels(self) -> Levels:
        """Return the levels for device memory, with the kernels of this plan compiled. Collective at the first use."""
        levels = self._levels_of(True)
        self._group.devices.compile(self._kernels(levels))
        return levels

    def _wait(self, queue: DeviceQueue, launched: Launched, pending: Pending, call: ReductionCall) -> None:
        since = time.monotonic()

        def advance_others() -> None:
            pending.advance_others()
            self._group.agreement.restart_clock(since, call)  # the calls advanced here have restarted the clock

        self._group.agreement.restart_clock(since, call)
        queue.wait(launched, advance_others)

    def _can_be_launched(self) -> bool:
        """Whether no step of a call needs the host, so that the call can be launched before other ranks arrive.

        Equal on all ranks. False for the first call of a group, which makes NCCL's communicators with all ranks, and
        for that of a plan whose kernels are to be compiled.
        """
        if self._is_ring or not self._is_all_device:
            return False
        levels = self._group.devices.made(self._needs_nccl)
        if levels is None or levels.queue is None or not levels.is_all_nccl:
            return False
        return self._group.devices.has_compiled(self._kernels(levels))


def reduce_to_ranks(
    reduce_to_root: ReduceToRoot, ranks: tuple[int, ...], levels: Levels, buffer: Any, reduction: Reduction
) -> None:
    """Reduce to the first of `ranks`, and send the result to the other `ranks`. Collective."""
    reduce_to_root(levels, buffer, reduction, ranks[0])
    send_to(levels.world, buffer, ranks[0], ranks)


def _run_on_host(
    messages: Sequence[Message], arrays: Sequence[Any], results: Sequence[Any], levels: Levels, reduce: Reduce
) -> None:
    """Reduce the messages of host memory."""
    arrays = list(arrays)
    for index in {piece.index for message in messages for piece in message.pieces}:
        if not arrays[index].flags.c_contiguous:  # copied once, and not for each message that carries a piece of it
            arrays[index] = arrays[index].copy()
    with np.errstate(all="ignore"):  # an overflow is a result: see `transport.float_errors`
        for message in messages:
            (_run_direct if message.is_direct else _run_packed)(message, arrays, results, levels, reduce)


def _run_direct(
    message: Message, arrays: Sequence[Any], results: Sequence[Any], levels: Levels, reduce: Reduce
) -> None:
    """Reduce one piece in the memory of its result."""
    (piece,) = message.pieces
    array, result = arrays[piece.index], results[piece.index]
    flat = result.reshape(-1)
    if piece.count == flat.size:
        if array is not result:
            result[...] = array
    else:
        flat = flat[piece.start : piece.stop]
        if array is not result:
            flat[...] = array.reshape(-1)[piece.start : piece.stop]
    reduce(levels.compressed(message.half), flat, message.reduction)
    if message.divide_by != 1:
        flat /= message.divide_by


def _run_packed(
    message: Message, arrays: Sequence[Any], results: Sequence[Any], levels: Levels, reduce: Reduce
) -> None:
    """Reduce pieces in a pack buffer."""
    buffer = levels.pack_buffer(message.count, message.wire)
    at = 0
    for piece in message.pieces:
        part = arrays[piece.index].reshape(-1)[piece.start : piece.stop]
        if message.is_compressed:
            levels.world.traffic.overflowed += narrow(part, buffer[at : at + piece.count])
        else:
            buffer[at : at + piece.count] = part
        at += piece.count
    reduce(levels.compressed(message.half), buffer, message.reduction)
    at = 0
    for piece in message.pieces:
        part = buffer[at : at + piece.count]
        into = results[piece.index].reshape(-1)[piece.start : piece.stop]
        if message.is_compressed:
            widen(part, into)
        else:
            into[...] = part if message.divide_by == 1 else part / message.divide_by
        at += piece.count
