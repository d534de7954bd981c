"""Does device memory go through pinned slots, chunk by chunk, as fast as in one large pinned copy? (G6)

Beside it, the way of a buffer that is allocated for each call, and is not pinned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from gpu.measuring import Bench, Sample
from gpu.part import run_part
from gpu.report import Report
from mpidist.transport.device_over_mpi.sizes import StagingSizes
from mpidist.transport.device_over_mpi.staging import Phase, Staging

__all__ = ["CHUNKS", "measure"]

BYTES = 100 << 20
CHUNKS = (256 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20)
Call = Callable[[], object]


class Chunked:
    """Device memory through slots.

    Args:
        bench: Where.
        chunk: Size of a chunk in bytes.
        source: Goes down, uint8; `None` for nothing.
        target: Comes up; `None` for nothing. With both, what went down comes up.
    """

    def __init__(self, bench: Bench, chunk: int, source: Any = None, target: Any = None) -> None:
        self._staging = Staging(bench.cuda, StagingSizes(chunk_bytes=chunk))
        self._source, self._target, self._chunk = source, target, chunk
        self._nbytes = int((source if source is not None else target).nbytes)
        self.result = np.empty(self._nbytes, np.uint8)
        self._looks = False

    def __call__(self) -> None:
        """Move it all; returns when it is done."""
        count = -(-self._nbytes // self._chunk)
        self._staging.reserve(count, min(self._chunk, self._nbytes))
        slots = [self._staging.slot(at) for at in range(min(count, self._staging.sizes.depth))]
        if self._source is None and self._looks:
            for slot in slots:
                slot[:] = 170
        places = [int(slot.ctypes.data) for slot in slots]

        def phases(at: int, slot: int) -> tuple[Phase, ...]:
            start = at * self._chunk
            nbytes = min(self._chunk, self._nbytes - start)

            def look() -> None:
                if self._looks and self._source is not None:
                    self.result[start : start + nbytes] = slots[slot][:nbytes]

            down = () if self._source is None else ((places[slot], int(self._source.data.ptr) + start, nbytes),)
            up = () if self._target is None else ((places[slot], int(self._target.data.ptr) + start, nbytes),)
            return (Phase(look, down=down, up=up),)

        self._staging.run("a measurement", count, phases, lambda: None, (self._source, self._target))

    def check(self, bench: Bench) -> None:
        """See whether the bytes are right."""
        if self._target is not None:
            bench.poison(self._target)
        self._looks = True
        self()
        self._looks = False
        expected = bench.down(self._source) if self._source is not None else np.full(self._nbytes, 170, np.uint8)
        if self._source is not None and not np.array_equal(self.result, expected):
            raise ArithmeticError("wrong bytes came down")
        if self._target is not None:
            bench.require_equal("what came up", self._target, expected)


def whole(bench: Bench, source: Any, target: Any) -> dict[str, list[Call]]:
    """Return the ways in one copy: pinned each way and both at once, and pageable."""
    cuda = bench.cupy.cuda
    runtime, nbytes = cuda.runtime, int(source.nbytes)
    memories = [cuda.alloc_pinned_memory(nbytes) for _ in range(2)]
    pinned = [int(memory.ptr) for memory in memories]
    streams = [cuda.Stream(non_blocking=True) for _ in range(2)]
    to_host, to_device = int(runtime.memcpyDeviceToHost), int(runtime.memcpyHostToDevice)
    for memory in memories:
        np.frombuffer(memory, np.uint8, nbytes)[:] = 1

    def down() -> None:
        runtime.memcpyAsync(pinned[0], int(source.data.ptr), nbytes, to_host, streams[0].ptr)

    def up(_keep: Any = memories) -> None:
        runtime.memcpyAsync(int(target.data.ptr), pinned[1], nbytes, to_device, streams[1].ptr)

    def finish() -> None:
        for stream in streams:
            stream.synchronize()

    def pageable_down() -> None:
        fresh = np.empty(nbytes, np.uint8)
        runtime.memcpyAsync(fresh.ctypes.data, int(source.data.ptr), nbytes, to_host, streams[0].ptr)
        streams[0].synchronize()

    touched = np.ones(nbytes, np.uint8)

    def pageable_up() -> None:
        runtime.memcpyAsync(int(target.data.ptr), touched.ctypes.data, nbytes, to_device, streams[1].ptr)
        streams[1].synchronize()

    return {
        "one pinned copy down": [lambda: (down(), finish())],
        "one pinned copy up": [lambda: (up(), finish())],
        "one pinned copy each way at once": [lambda: (down(), up(), finish())],
        "pageable down": [pageable_down],
        "pageable up": [pageable_up],
    }


def measure(bench: Bench, report: Report) -> None:
    """Answer all."""
    with report.question("G6", "pinned staging in chunks"):
        nbytes = bench.nbytes(BYTES)
        chunks = (nbytes // 3, nbytes) if bench.is_tiny else CHUNKS
        source = bench.up(bench.random.integers(0, 256, nbytes, np.uint8))
        target = bench.empty(nbytes, np.uint8)
        ways = whole(bench, source, target)
        for chunk in chunks:
            size = f"{chunk >> 10} KiB"
            for way, ends in (("down", (source, None)), ("up", (None, target)), ("both", (source, target))):
                moving = Chunked(bench, chunk, *ends)
                moving.check(bench)
                ways[f"chunks of {size} {way}"] = [moving]
        times = bench.wall_times(ways, bench.turns(8))
        _judge(report, nbytes, times, [f"{chunk >> 10} KiB" for chunk in chunks])


def _judge(report: Report, nbytes: int, times: dict[str, Sample], sizes: list[str]) -> None:
    def rate(name: str) -> str:
        return f"{nbytes / times[name].median / 1e9:.1f} GB/s"

    for way in ("down", "up"):
        best = min(sizes, key=lambda size: times[f"chunks of {size} {way}"].median)
        one = f"one pinned copy {way}"
        share = times[one].median / times[f"chunks of {best} {way}"].median
        got = f"{share:.0%}: {rate(f'chunks of {best} {way}')} in chunks of {best}, {rate(one)} in one"
        note = ", ".join(f"{size} {rate(f'chunks of {size} {way}')}" for size in sizes)
        question = f"{nbytes / 1e6:.0f} MB {way} through pinned slots, beside one pinned copy"
        numbers = times[f"chunks of {best} {way}"].numbers
        report.add("G6", question, got, target=">= 90 %", met=share >= 0.9, note=note, share=share, **numbers)
        pageable = f"pageable {way}"
        ratio = times[pageable].median / times[f"chunks of {best} {way}"].median
        got = f"{rate(pageable)}: {ratio:.1f} times as long as in chunks"
        report.add(
            "G6",
            f"the same {way} in one pageable copy" + ", into a buffer made for it" * (way == "down"),
            got,
            ratio=ratio,
        )
    best = min(sizes, key=lambda size: times[f"chunks of {size} both"].median)
    both = times[f"chunks of {best} both"].median
    alone = min(times[f"chunks of {size} down"].median for size in sizes)
    gain = 2 * alone / both
    got = f"{gain:.2f} times one way: {2 * nbytes / both / 1e9:.1f} GB/s in chunks of {best}"
    one = f"one copy each way: {2 * nbytes / times['one pinned copy each way at once'].median / 1e9:.1f} GB/s"
    report.add("G6", "down and up at once", got, target=">= 1.6 times one way", met=gain >= 1.6, note=one, gain=gain)


if __name__ == "__main__":
    sys.exit(run_part(__doc__ or "", measure))
