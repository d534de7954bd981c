"""How work on a GPU is timed, and when it may be: after its results were seen to be right.

Times of the GPU are those between two CUDA events. A kernel that only waits is launched first, so that everything is in
the queue when the first event comes, and no time of the host is in between; whether it was, is looked at, and the
kernel made longer until it is. What is compared is measured in turns: A B C A B C. Each turn takes the next set of
arrays, so that the caches hold none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np

__all__ = ["NOT_READY", "Bench", "Call", "Sample", "time_text"]

NOT_READY = 600  # of CUDA, for an event that has not come
FIRST_HOLD = 100e-6
LAST_HOLD = 25.6e-3
HOLD = r"""
extern "C" __global__ void hold(long long nanoseconds) {
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}
"""

Call = Callable[[], object]
Ways = Mapping[str, Sequence[Call]]  # of each way a call for each set of arrays


@dataclass(frozen=True)
class Sample:
    """Times of one way, in seconds.

    Attributes:
        values: All of them.
        is_pure: Whether all was in the GPU's queue before it began; else the host's time is in them.
    """

    values: tuple[float, ...]
    is_pure: bool = True

    @property
    def median(self) -> float:
        return float(np.median(self.values))

    @property
    def low(self) -> float:
        """Of the fastest 5 %, the slowest."""
        return float(np.percentile(self.values, 5))

    @property
    def high(self) -> float:
        """Of the slowest 5 %, the fastest."""
        return float(np.percentile(self.values, 95))

    def __str__(self) -> str:
        """As `47.5 us (47.1 to 48.9)`."""
        return f"{time_text(self.median)} ({time_text(self.low)} to {time_text(self.high)})"

    @property
    def numbers(self) -> dict[str, float]:
        """In microseconds."""
        return {"us": self.median * 1e6, "us_low": self.low * 1e6, "us_high": self.high * 1e6}


class Bench:
    """CuPy on the current device, and its clocks.

    Args:
        cuda: What mpidist found of CuPy, or a stand-in.
        is_tiny: Whether to take small arrays and few turns: it then shows that everything runs, not how fast.
    """

    def __init__(self, cuda: Any, is_tiny: bool = False) -> None:
        self.cuda = cuda
        self.cupy = cuda.cupy
        self.is_tiny = is_tiny
        self.random = np.random.default_rng()
        self._holds: dict[str, float] = {}
        self._roofs: dict[int, Sample] = {}

    def turns(self, number: int) -> int:
        """Say how many turns to take, of so many."""
        return 3 if self.is_tiny else number

    def nbytes(self, number: int) -> int:
        """Say how many bytes to take, of so many; a multiple of 256."""
        return max(4096, number >> 12) // 256 * 256 if self.is_tiny else number // 256 * 256

    # Arrays.

    def numbers(self, count: int) -> Any:
        """Return fresh random numbers of both signs on the host, float32 [count]."""
        return self.random.random(count, np.float32) - np.float32(0.5)

    def up(self, numbers: Any) -> Any:
        return self.cupy.asarray(numbers)

    def down(self, array: Any) -> Any:
        return self.cupy.asnumpy(array)

    def empty(self, count: int, dtype: Any) -> Any:
        return self.cupy.empty(count, dtype)

    def poison(self, array: Any) -> None:
        """Fill an array with what no result is: NaN, or the largest number."""
        array.view(np.uint8)[...] = 255

    def require_equal(self, what: str, array: Any, expected: Any) -> None:
        """Compare bit by bit.

        Raises:
            ArithmeticError: If anything differs.
        """
        got = self.down(array).reshape(-1).view(np.uint8)
        wanted = np.ascontiguousarray(expected).reshape(-1).view(np.uint8)
        if got.size != wanted.size:
            raise ArithmeticError(f"{what}: got {got.size} bytes, needed {wanted.size}")
        if not np.array_equal(got, wanted):
            wrong = np.flatnonzero(got != wanted)
            raise ArithmeticError(f"{what}: {wrong.size} of {got.size} bytes are wrong, the first at {wrong[0]}")

    # Clocks.

    def synchronize(self) -> None:
        self.cupy.cuda.runtime.deviceSynchronize()

    def gpu_times(self, ways: Ways, turns: int) -> dict[str, Sample]:
        """Time work of the current stream between two events."""
        for calls in ways.values():
            for call in calls:
                call()
        self.synchronize()
        values: dict[str, list[float]] = {name: [] for name in ways}
        is_pure = dict.fromkeys(ways, True)
        for turn in range(turns):
            for name, calls in ways.items():
                seconds, was_ahead = self._gpu_time(name, calls[turn % len(calls)])
                values[name].append(seconds)
                is_pure[name] &= was_ahead
        return {name: Sample(tuple(its), is_pure[name]) for name, its in values.items()}

    def _gpu_time(self, name: str, call: Call) -> tuple[float, bool]:
        while True:
            hold = self._holds.setdefault(name, FIRST_HOLD)
            begin, end = (self.cupy.cuda.Event() for _ in range(2))
            self.hold(hold)
            begin.record()
            call()
            end.record()
            was_ahead = self.cupy.cuda.runtime.eventQuery(begin.ptr) == NOT_READY
            self.synchronize()
            if was_ahead or hold >= LAST_HOLD:
                return self.cupy.cuda.get_elapsed_time(begin, end) / 1e3, was_ahead
            self._holds[name] = 4 * hold

    def host_times(self, ways: Ways, turns: int) -> dict[str, Sample]:
        """Time what the host spends on launching, the GPU being idle before."""
        return self._clock(ways, turns, lambda: None)

    def wall_times(self, ways: Ways, turns: int) -> dict[str, Sample]:
        """Time work from its launch to its end, as the host sees it."""
        return self._clock(ways, turns, self.synchronize)

    def _clock(self, ways: Ways, turns: int, finish: Call) -> dict[str, Sample]:
        for calls in ways.values():
            for call in calls:
                call()
        values: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(turns):
            for name, calls in ways.items():
                call = calls[turn % len(calls)]
                self.synchronize()
                start = perf_counter()
                call()
                finish()
                values[name].append(perf_counter() - start)
        self.synchronize()
        return {name: Sample(tuple(its)) for name, its in values.items()}

    def hold(self, seconds: float) -> None:
        """Keep the current stream busy for so long, with one thread."""
        self._hold((1,), (1,), (round(seconds * 1e9),))

    @cached_property
    def _hold(self) -> Any:
        return self.cupy.RawKernel(HOLD, "hold")

    def roof(self, nbytes: int) -> Sample:
        """Time the device's own copy that reads `nbytes` / 2 and writes as many."""
        half = nbytes // 2
        if half not in self._roofs:
            count = 2 if self.is_tiny or half >= 1 << 28 else max(3, -(-(192 << 20) // half))
            content = self.random.integers(0, 256, half, np.uint8)
            calls = [self.copying(self.up(content), self.empty(half, np.uint8)) for _ in range(count)]
            (self._roofs[half],) = self.gpu_times({f"roof {half}": calls}, self.turns(40)).values()
        return self._roofs[half]

    def copying(self, source: Any, target: Any) -> Call:
        """Return a call that copies device memory with the device's own copy."""
        runtime = self.cupy.cuda.runtime
        kind = int(runtime.memcpyDeviceToDevice)
        to, at, nbytes = int(target.data.ptr), int(source.data.ptr), int(source.nbytes)
        stream = self.cupy.cuda.get_current_stream

        def call(_keep: Any = (source, target)) -> None:
            runtime.memcpyAsync(to, at, nbytes, kind, stream().ptr)

        return call


def time_text(seconds: float) -> str:
    """Write a time with three digits and its unit."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"
