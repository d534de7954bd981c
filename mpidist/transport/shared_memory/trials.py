"""Which way larger private arrays are all-reduced within a node: through shared memory or by single copies, by trial.

It depends on the machine, on which cores share a cache, and on the pages of the arrays: single-copy takes 0.6 to 2.5
times as long as two-shot. So the calls of one size are made in both ways in turn for a while, and then in the faster
one. Both make the same numbers, bit by bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache, partial
from typing import Final, final

import numpy as np

from mpidist.transport.node_memory import PeerMemory, Slots
from mpidist.transport.reduction import Reduction
from mpidist.transport.shared_memory.schedule import Schedule, fused_schedule
from mpidist.transport.shared_memory.single_copy import SingleCopy
from mpidist.transport.shared_memory.transfer import FusedArrays, Transfer
from mpidist.transport.shared_memory.two_shot import TwoShot

__all__ = ["Trial", "Trials", "TriedTransfer"]

_LEAST_PIECE_BYTES: Final = 128 << 10  # of an average array: each costs single-copy a call of the system and more
_LEAST_CHUNK_BYTES: Final = 2 << 20
_LEAST_SHARD_BYTES: Final = 64 << 10
_SCHEDULES: Final = 64  # cached
_TOLD: Final = np.dtype(np.int64)
_FIRST_CALLS: Final = 2  # of a size, which find no page in its place
_CALLS_EACH: Final = 3
_CLEARLY: Final = 0.95  # of the first way's time: what another way has to take at most
_CALLS_BETWEEN: Final = 500  # two trials: what shares a cache may change, and a trial may meet a noisy moment


@final
class Trial:
    """Which of several ways is the fastest for calls of one size. Equal on all ranks, as they make the same calls.

    Args:
        num_ways: The number of ways. The first is taken before anything is known.

    Attributes:
        best: The fastest way in the last trial.
        times: The least time of each way in this trial, in nanoseconds.
    """

    def __init__(self, num_ways: int) -> None:
        self.best, self.times = 0, [0] * num_ways
        self._ahead, self._tried = _FIRST_CALLS, 0  # calls before the next trial, calls of the trial

    def next(self) -> tuple[int, bool]:
        """Return the way of the next call, and whether it is tried there."""
        if self._ahead:
            self._ahead -= 1
            return self.best, False
        return self._tried % len(self.times), True

    def add(self, nanoseconds: int) -> bool:
        """Add what the last call took. Returns whether that was the last call of the trial."""
        way = self._tried % len(self.times)
        is_first = self._tried < len(self.times)
        self.times[way] = nanoseconds if is_first else min(nanoseconds, self.times[way])
        self._tried += 1
        return self._tried == _CALLS_EACH * len(self.times)

    def end(self, times: Sequence[Sequence[int]]) -> None:
        """Choose by the times of all ranks [ranks][ways]: a call takes as long as its slowest rank."""
        slowest = [max(of_way) for of_way in zip(*times, strict=True)]
        fastest = slowest.index(min(slowest))
        self.best = fastest if slowest[fastest] <= _CLEARLY * slowest[0] else 0
        self._ahead, self._tried = _CALLS_BETWEEN, 0


@final
class TriedTransfer(Transfer):
    """All-reduces of the same arrays in one of several ways: the fastest, or the one to be tried next.

    Args:
        slots: The node's staging memory: ranks write there what their calls took.
        arrays: The arrays.
        ways: What makes the transfer of each way, of these arrays.
        trial: Says which way is next, for all calls of such a size.
    """

    def __init__(self, slots: Slots, arrays: FusedArrays, ways: Sequence[Callable[[], Transfer]], trial: Trial) -> None:
        self._slots, self._ways, self._trial = slots, ways, trial
        self.arrays, self.overflowed = arrays, 0
        self._made: dict[int, Transfer] = {}

    def begin(self) -> None:
        """See `Transfer.begin`. Nothing: until the ranks know that their calls are alike, they do not know the way."""

    def steps(self, has_passed_barrier: bool) -> Generator[int, None, None]:
        way, is_tried = (self._trial.best, False) if self.is_started else self._trial.next()
        transfer = self._made.get(way)
        if transfer is None:
            transfer = self._made[way] = self._ways[way]()
        if is_tried:
            yield from self._slots.synchronize()  # from then on no rank waits for one that comes late
        begun = time.perf_counter_ns()
        yield from transfer.steps(has_passed_barrier=False)
        self.overflowed = sum(one.overflowed for one in self._made.values())
        if is_tried and self._trial.add(time.perf_counter_ns() - begun):
            times, num_ways = self._slots.next_views(_TOLD), len(self._ways)
            times[self._slots.rank][:num_ways] = self._trial.times
            yield from self._slots.synchronize()
            self._trial.end([of_rank[:num_ways].tolist() for of_rank in times])

    def forget(self) -> None:
        super().forget()
        for transfer in self._made.values():
            transfer.forget()


@final
class Trials:
    """Makes the all-reduces of a node that may be by single copies.

    Args:
        slots: The node's staging memory.
        memory: The memory of the ranks.
        least_bytes: The smallest list that is tried, in bytes.
        is_always: Whether to try nothing: these are by single copies then.
    """

    def __init__(self, slots: Slots, memory: PeerMemory, least_bytes: int, is_always: bool = False) -> None:
        self._slots, self._memory = slots, memory
        self._least_bytes, self._is_always = least_bytes, is_always
        self._trials: dict[int, Trial] = {}  # by the size, in powers of two
        self._schedule = lru_cache(_SCHEDULES)(fused_schedule)

    def can_take(self, schedule: Schedule, arrays: FusedArrays) -> bool:
        """Whether arrays are private, of one dtype, large and few. Equal on all ranks."""
        nbytes = schedule.count * arrays.dtype.itemsize
        least = max(self._least_bytes, len(schedule.lengths) * _LEAST_PIECE_BYTES)
        is_private = arrays.peers is None and arrays.shared is None
        keeps_dtype = arrays.result_dtype is None or arrays.result_dtype == arrays.dtype
        return is_private and keeps_dtype and nbytes >= least and SingleCopy.has_room(self._slots, schedule)

    def transfer(
        self,
        two_shot: Callable[[], TwoShot],
        schedule: Schedule,
        arrays: FusedArrays,
        reduction: Reduction,
        divide_by: int,
    ) -> Transfer:
        """Make an all-reduce of arrays that `can_take` takes. Local.

        Args:
            two_shot: Makes the all-reduce through shared memory.
            schedule: As of `TwoShot`.
            arrays: As of `TwoShot`.
            reduction: As of `TwoShot`.
            divide_by: As of `TwoShot`.
        """
        size, itemsize = self._slots.size, arrays.dtype.itemsize
        longer = max(_LEAST_CHUNK_BYTES, _LEAST_SHARD_BYTES * size) // itemsize
        chunks = self._schedule(schedule.lengths, size, longer)
        single = partial(SingleCopy, self._slots, self._memory, chunks, arrays, reduction, divide_by, two_shot)
        if self._is_always:
            return single()
        trial = self._trials.setdefault((schedule.count * itemsize).bit_length(), Trial(2))
        return TriedTransfer(self._slots, arrays, [two_shot, single], trial)
