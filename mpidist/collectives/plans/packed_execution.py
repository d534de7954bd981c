"""Reductions message by message: packed, reduced by an algorithm, and unpacked, on the host or on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import is_not
from typing import Any, NamedTuple, final

import numpy as np

from mpidist.collectives.arguments.destinations import send_to
from mpidist.collectives.arguments.operands import NewResults, Spec
from mpidist.collectives.arguments.out_arrays import copy_overwritten, target_arrays, write_outs
from mpidist.collectives.plans.call import Execution, ReductionCall
from mpidist.collectives.plans.plan import Message, Piece
from mpidist.collectives.plans.reduce_algorithm import Reduce, ReduceToRoot
from mpidist.options import CommunicationImplementation
from mpidist.transport.arrays import wait_for_writes
from mpidist.transport.gpu.events import Launched, record_event
from mpidist.transport.group.compression import narrow, widen
from mpidist.transport.group.levels import Levels
from mpidist.transport.group.started_calls import Pending, Steps
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.nccl.launch_queue import DeviceQueue
from mpidist.transport.reduction import Reduction

__all__ = ["DeviceMessages", "PackedExecution", "PackedPart", "reduce_to_ranks"]


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

    parts: list[tuple[list[Any], list[Any]]]  # for each part of the call, the arrays of its values and of its results
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
        self._on_device = [DeviceMessages(part) for part in parts]
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
        """Allocate the results: if a rank has no memory for them, all ranks learn of it before data moves."""
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
        laid = []
        for part, new_results in zip(self._parts, self._new_results, strict=True):
            arrays = [call.operands.arrays[index] for index in part.indices]
            if call.outs is None:
                targets = new_results.take()
            else:
                outs = [call.outs[index] for index in part.indices]
                if call.checked_outs is not None and call.checked_outs.are_targets:
                    targets = outs
                else:
                    targets = target_arrays(outs, part.specs, part.result_dtypes, self._group.shared)
                arrays = copy_overwritten(arrays, targets)
            laid.append((arrays, targets))
        return _Layout(laid, record_event() if is_started else None)

    def _reduce(self, call: ReductionCall, layout: _Layout, queue: DeviceQueue | None) -> list[Any]:
        """Reduce every message. Fills outs in device memory here, on the stream of the reductions."""
        results: list[Any] = [None] * self._num_values
        for part, on_device, (arrays, targets) in zip(self._parts, self._on_device, layout.parts, strict=True):
            if on_device.messages:
                on_device.reduce(arrays, targets, self._levels_of(True), part.reduce)
            on_host = [message for message in part.messages if not message.device]
            if on_host:
                _run_on_host(on_host, arrays, targets, self._levels_of(False), part.reduce)
            if part.ranks is None or self._group.topology.rank in part.ranks:
                for index, target in zip(part.indices, targets, strict=True):
                    results[index] = target
        if self._uses_device and call.outs is not None:
            with nullcontext() if queue is None else queue.unpacking():
                return write_outs(call.outs, results, self._group.shared)
        return results

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


@final
class DeviceMessages:
    """The messages of device memory of one plan. What is the same in all calls is found out once."""

    def __init__(self, part: PackedPart) -> None:
        self.messages = [message for message in part.messages if message.device]
        self._specs, self._result_dtypes = part.specs, part.result_dtypes
        self._direct = [message for message in self.messages if message.is_direct]
        self._packed = [(its, _Pieces(its.pieces, part.specs)) for its in self.messages if not its.is_direct]
        self._pieces = _Pieces([message.pieces[0] for message in self._direct], part.specs)
        self._divisors = dict.fromkeys(message.divide_by for message in self._direct if message.divide_by != 1)

    def kernels(self, levels: Levels) -> set[str]:
        """Return the kernels that the messages may need on some rank. Local, equal on all ranks."""
        needed: set[str] = set()
        for message in self.messages:
            wire, divides = message.wire, message.divide_by != 1
            copies = [(wire, wire, False), (wire, wire, divides)]
            if not message.is_direct:
                copies = [(self._specs[piece.index].dtype, wire, False) for piece in message.pieces]
                copies += [(wire, self._result_dtypes[piece.index], divides) for piece in message.pieces]
            num = len(self._direct if message.is_direct else message.pieces)
            needed |= levels.kernels_for(wire, message.half, message.reduction, copies, num)
        return needed

    def reduce(self, arrays: Sequence[Any], results: Sequence[Any], levels: Levels, reduce: Reduce) -> None:
        """Reduce the messages. Launches work, and waits for nothing.

        Besides the reductions it launches one copy of all direct pieces of a dtype to their results, a pack and an
        unpack for each message with several pieces, and one division of all direct pieces of a dtype.
        """
        kernels, parts = levels.kernels, self._pieces.of(results)
        assert kernels is not None, "the levels for device memory have kernels"
        is_moved = list(map(is_not, self._pieces.whole(arrays), self._pieces.whole(results)))
        if any(is_moved):
            with levels.packing():  # a piece of an array that is not contiguous is copied here, too
                given = self._pieces.of(arrays)
                kernels.copy(list(compress(given, is_moved)), list(compress(parts, is_moved)))
        if levels.world.size > 1:
            for message, part in zip(self._direct, parts, strict=True):
                reduce(levels.compressed(message.half), part.reshape(-1), message.reduction)
        for message, pieces in self._packed:
            with levels.packing():
                buffer = levels.pack_buffer(message.count, message.wire)
                kernels.pack(pieces.of(arrays), buffer, message.is_compressed, message.layout)
            reduce(levels.compressed(message.half), buffer, message.reduction)
            with levels.unpacking():
                kernels.unpack(buffer, pieces.of(results), message.divide_by, message.layout)
        for divide_by in self._divisors:
            mine = [its for message, its in zip(self._direct, parts, strict=True) if message.divide_by == divide_by]
            with levels.unpacking():
                kernels.copy(mine, mine, divide_by)


@final
class _Pieces:
    """Pieces of arrays. Most are whole arrays, of which no view is made."""

    def __init__(self, pieces: Sequence[Piece], specs: Sequence[Spec]) -> None:
        self._indices = [piece.index for piece in pieces]
        is_cut = [piece.count != specs[piece.index].num_elements for piece in pieces]
        self._cuts = [(at, piece.start, piece.stop) for at, piece in enumerate(pieces) if is_cut[at]]

    def whole(self, arrays: Sequence[Any]) -> list[Any]:
        """Take the arrays of which these are pieces."""
        return [arrays[index] for index in self._indices]

    def of(self, arrays: Sequence[Any]) -> list[Any]:
        """Take the pieces. Those of an array that is not contiguous are copied on the current stream."""
        parts = self.whole(arrays)
        for at, start, stop in self._cuts:
            parts[at] = parts[at].reshape(-1)[start:stop]
        return parts
