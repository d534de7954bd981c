"""How work on a GPU is timed: between events, behind a kernel that waits until all is in the queue, or by the host.

What is compared takes turns, A B C A B C, each on the next set of arrays, so that the caches hold none of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from time import perf_counter
from typing import Any

import numpy as np

from gpu.report import Report, text_of
from mpidist.transport import cuda

NOT_READY, LAST_HOLD = 600, 20e-3  # CUDA's status of an event that has not come; seconds
HOLD = r"""extern "C" __global__ void hold(long long nanoseconds) {
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
}"""
Call = Callable[[], object]
Times = dict[str, np.ndarray]  # seconds, of each way


class Bench:
    """CuPy on a device of this rank's, and its clocks; `is_tiny` takes small arrays and few turns."""

    def __init__(self, is_tiny: bool = False, comm: Any = None) -> None:
        self.cuda, self.is_tiny, self.comm = cuda.current(), is_tiny, comm
        self.rank, self.size = (0, 1) if comm is None else (comm.Get_rank(), comm.Get_size())
        self.random = np.random.default_rng()
        self._hold_seconds, self.roof = 100e-6, cache(self._roof)

    @cached_property
    def cupy(self) -> Any:
        """The module `cupy`, which has a GPU: `gpu_check.py` looks first."""
        self.cuda.cupy.cuda.Device(self.rank % self.cuda.support.num_devices).use()
        self._hold = self.cuda.cupy.RawKernel(HOLD, "hold")
        return self.cuda.cupy

    def nbytes(self, number: int) -> int:
        """Say how many bytes to take, of so many; a multiple of 256."""
        return max(4096, number >> 12 if self.is_tiny else number) // 256 * 256

    def numbers(self, shape: Any) -> Any:
        """Return fresh random numbers of both signs on the host, float32 of a shape."""
        return self.random.random(shape, np.float32) - np.float32(0.5)

    def poison(self, array: Any) -> None:
        """Fill an array with what no result is: NaN, or the largest number."""
        array.view(np.uint8)[...] = 255

    def require_equal(self, what: str, array: Any, expected: Any) -> None:
        """Raise `ArithmeticError` if any bit differs."""
        if self.cupy.asnumpy(array).tobytes() != np.ascontiguousarray(expected).tobytes():
            raise ArithmeticError(f"{what}: numbers are wrong")

    def synchronize(self) -> None:
        self.cupy.cuda.runtime.deviceSynchronize()

    def hold(self, seconds: float) -> None:
        """Keep the current stream busy for so long, with one thread."""
        self._hold((1,), (1,), (round(seconds * 1e9),))

    def idle(self, seconds: float) -> None:
        """Keep the current stream waiting for so long, for a function of the host: the GPU is free for other ranks."""
        stream, usleep = self.cupy.cuda.get_current_stream().ptr, ctypes.CDLL(None).usleep
        status = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(
            ctypes.c_void_p(stream), usleep, ctypes.c_void_p(round(seconds * 1e6))
        )
        if status:
            raise RuntimeError(f"cuLaunchHostFunc returns {status}")

    def times(self, ways: Mapping[str, Call | Sequence[Call]], turns: int, clock: str = "end") -> Times:
        """Time ways in turns; some have a call for each set of arrays. Of ranks the slowest one counts.

        Clocks: `GPU`, what the work of the current stream takes; `host`, what launching it takes, the GPU being idle
        before; `end`, from launch to end.
        """
        calls_of = [[calls] if callable(calls) else calls for calls in ways.values()]
        for call in chain(*calls_of):
            call()
        clocks = {"GPU": self._on_gpu, "host": partial(self._on_host, waits=False), "end": self._on_host}
        turns = 3 if self.is_tiny else turns
        rows = [[clocks[clock](calls[turn % len(calls)]) for calls in calls_of] for turn in range(turns)]
        self.synchronize()
        return dict(zip(ways, np.array(rows).T, strict=True))

    def _on_gpu(self, call: Call) -> float:
        while True:
            begin, end = (self.cupy.cuda.Event() for _ in range(2))
            self.hold(self._hold_seconds)
            begin.record()
            call()
            end.record()
            was_ahead = self.cupy.cuda.runtime.eventQuery(begin.ptr) == NOT_READY
            self.synchronize()
            if was_ahead or (self.is_tiny and self._hold_seconds > LAST_HOLD):
                return float(self.cupy.cuda.get_elapsed_time(begin, end)) / 1e3
            if self._hold_seconds > LAST_HOLD:
                raise RuntimeError(f"launching it takes more than {LAST_HOLD:g} s")
            self._hold_seconds *= 4

    def _on_host(self, call: Call, waits: bool = True) -> float:
        self.synchronize()
        if self.comm is not None:
            self.comm.Barrier()
        start = perf_counter()
        call()
        if waits:
            self.synchronize()
        return self.since(start)

    def since(self, start: float) -> float:
        """Say how many seconds that is ago, on the slowest rank. Collective."""
        took = perf_counter() - start
        return took if self.comm is None else max(self.comm.allgather(took))

    def _roof(self, nbytes: int) -> float:
        """Return the median seconds of the device's own copy that reads `nbytes` / 2 and writes as many."""
        half = nbytes // 2
        count = 2 if self.is_tiny or half >= 1 << 28 else max(3, -(-(192 << 20) // half))
        content = self.random.integers(0, 256, half, np.uint8)
        pairs = [(self.cupy.asarray(content), self.cupy.empty(half, np.uint8)) for _ in range(count)]
        calls = [lambda pair=pair: pair[1].data.copy_from_device_async(pair[0].data, half) for pair in pairs]
        return float(np.median(self.times({"roof": calls}, 40, "GPU")["roof"]))


def compare(report: Report, question: str, times: Times, least: float | None, note: str = "") -> None:
    """Say how long each other way takes beside `ours`: at least so many times as long, or just how long."""
    ours = times["ours"]
    for name, its in times.items():
        if its is not ours:
            ratio = float(np.median(its) / np.median(ours))
            goal = None if least is None else (f"at least {least:g}", ratio >= least)
            report.add(f"{question}: {name} / ours", f"{text_of(its)} / {text_of(ours)} = {ratio:.2f}", goal, note)


def torch_of_gpus(report: Report, what: str) -> Any:
    """Return torch; `None`, with an answer that says so, where it is not installed, or has no CUDA."""
    torch: Any = None if find_spec("torch") is None else import_module("torch")
    if torch is not None and torch.cuda.is_available():
        return torch
    report.add(f"{what} beside torch", "torch is not installed, or has no CUDA")
    return None
