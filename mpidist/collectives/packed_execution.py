"""Reducing calls in chunks, one message after the other: on the host, or launched on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from mpidist.collectives.arguments import Operands, result_arrays
from mpidist.collectives.destinations import send_to
from mpidist.collectives.out_arrays import keep_apart, target_arrays
from mpidist.collectives.plan import Plan
from mpidist.options import CommunicationImplementation, CommunicationOptions
from mpidist.transport import Arrival, DeviceQueue, Launched, Levels, NcclReach, Pending, Reduction, Steps, SyncGroup

__all__ = ["ChunkCalls", "Layout", "Parts"]

Parts = tuple[tuple[tuple[int, ...] | None, tuple[int, ...], Plan], ...]  # destinations, indices, plan
ReduceBuffer = Callable[[CommunicationOptions, Levels, Any, Reduction, int | None], None]


@final
@dataclass(frozen=True)
class Layout:
    """Where the numbers of one call come from and go.

    Attributes:
        call: Its name.
        options: How it shall travel.
        parts: For each part of it, the arrays and the places of their results.
        num_values: Number of values.
        deliver: Puts the results where the caller wants them.
        after: An event that what works on a GPU comes after; `None` for what the current stream holds.
    """

    call: str
    options: CommunicationOptions
    parts: tuple[tuple[tuple[int, ...] | None, tuple[int, ...], Plan, list[Any], list[Any]], ...]
    num_values: int
    deliver: Callable[[list[Any]], list[Any]] | None
    after: Any = None


@final
class ChunkCalls:
    """Runs the calls of one group that do not go in streams.

    Args:
        group: The ranks.
        reduce_buffer: Reduces a flat buffer over all ranks, to a root if one is given, as the options say.
    """

    def __init__(self, group: SyncGroup, reduce_buffer: ReduceBuffer) -> None:
        self._group = group
        self._reduce_buffer = reduce_buffer

    def lay_out(
        self,
        call: str,
        options: CommunicationOptions,
        parts: Parts,
        operands: Operands,
        outs: Sequence[Any] | None,
        deliver: Callable[[list[Any]], list[Any]] | None = None,
        marks: bool = False,
    ) -> Layout:
        """Find the places of a call's results. Local.

        Args:
            call: Its name.
            options: How it shall travel.
            parts: What it sends.
            operands: The values.
            outs: Arrays that take the results.
            deliver: As in `Layout`.
            marks: Whether the call goes to the GPU later, and after what the current stream holds now.
        """
        laid = []
        for destinations, indices, plan in parts:
            arrays = [operands.arrays[index] for index in indices]
            if outs is None:
                targets = result_arrays(plan.specs, plan.results)
            else:
                targets = target_arrays(plan, [outs[index] for index in indices], self._group.shared)
                arrays = keep_apart(arrays, targets)
            laid.append((destinations, indices, plan, arrays, targets))
        after = self._group.devices.events.record() if marks else None
        return Layout(call, options, tuple(laid), len(operands.specs), deliver, after)

    def run(self, layout: Layout, uses_device: bool) -> list[Any]:
        """Reduce, and wait until it is done. Collective.

        Args:
            layout: The call.
            uses_device: Whether some of its arrays are a GPU's.
        """
        queue = self._levels_for(layout.options)(True).queue if uses_device else None
        if queue is None:
            return self._work(layout, None)
        launched = queue.launch(layout.call, partial(self._work, layout, queue), layout)
        queue.wait(launched)
        result: list[Any] = launched.result
        return result

    def steps(self, layout: Layout, pending: Pending, arrival: Arrival) -> Steps:
        """Reduce arrays of a GPU: launch all of it, and look whether it is done. The ranks have agreed on the call."""
        group, size = self._group, self._group.topology.size
        while not (pending.is_waited_for or size == 1 or self._can_be_launched(layout)):
            yield 0
        if not self._can_be_launched(layout):
            group.devices.settle(layout.call)  # device memory that MPI takes is not in flight together with NCCL
            group.devices.events.follow(layout.after)
            results = self.run(layout, uses_device=True)
            group.devices.settle(layout.call)  # so that the results can be used in any stream
            return results
        queue = self._levels_for(layout.options)(True).queue
        assert queue is not None
        launched = queue.launch(layout.call, partial(self._work, layout, queue), layout, layout.after)
        pending.is_launched = True
        yield 0  # who waits for a later call launches that, too, before it waits for this one
        while not queue.has_come(launched):
            if pending.is_waited_for:
                self._wait(queue, launched, pending, arrival)
            else:
                yield 1
        return launched.result

    def _wait(self, queue: DeviceQueue, launched: Launched, pending: Pending, arrival: Arrival) -> None:
        since = time.monotonic()

        def meanwhile() -> None:
            pending.meanwhile()
            self._group.agreement.restart_clock(since, arrival)  # calls that were joined meanwhile have begun their own

        self._group.agreement.restart_clock(since, arrival)
        queue.wait(launched, meanwhile)

    def _can_be_launched(self, layout: Layout) -> bool:
        """Whether nothing of a call needs the host, so that it can be launched whatever the other ranks do.

        Alike on all ranks. The first call of a group makes NCCL's communicators, which takes all ranks.
        """
        options = layout.options
        if options.implementation is CommunicationImplementation.RING:
            return False
        everywhere = options.implementation is CommunicationImplementation.NCCL
        levels = self._group.devices.made(everywhere)
        if levels is None or levels.queue is None or levels.nccl is not NcclReach.WORLD:
            return False
        return all(spec.device for _, _, plan, _, _ in layout.parts for spec in plan.specs)

    def _work(self, layout: Layout, queue: DeviceQueue | None) -> list[Any]:
        results: list[Any] = [None] * layout.num_values
        levels_of = self._levels_for(layout.options)
        for destinations, indices, plan, arrays, targets in layout.parts:
            reduce = partial(self._reduce_all, layout.options)
            if destinations is not None:
                reduce = partial(self._reduce_to_some, layout.options, destinations)
            plan.run(arrays, targets, levels_of, reduce)
            if destinations is None or self._group.topology.rank in destinations:
                for index, target in zip(indices, targets, strict=True):
                    results[index] = target
        if layout.deliver is None:
            return results
        if queue is not None:
            queue.join()
        return layout.deliver(results)

    def _reduce_all(self, options: CommunicationOptions, levels: Levels, buffer: Any, reduction: Reduction) -> None:
        self._reduce_buffer(options, levels, buffer, reduction, None)

    def _reduce_to_some(
        self,
        options: CommunicationOptions,
        destinations: tuple[int, ...],
        levels: Levels,
        buffer: Any,
        reduction: Reduction,
    ) -> None:
        root = destinations[0]
        self._reduce_buffer(options, levels, buffer, reduction, root)
        send_to(levels.world, buffer, root, destinations)

    def _levels_for(self, options: CommunicationOptions) -> Callable[[bool], Levels]:
        implementation, group = options.implementation, self._group
        if implementation is CommunicationImplementation.RING:  # over MPI, whatever there is
            return group.host_levels_of
        return partial(group.levels_of, nccl_everywhere=implementation is CommunicationImplementation.NCCL)
