"""How late does the host see that the GPU is done, and what does it pay for looking? (G13)"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from mpidist.transport.staging import Staging
from mpidist.transport.staging_sizes import StagingSizes

from gpu.measuring import NOT_READY, Bench, Sample, time_text
from gpu.part import run_part
from gpu.report import Report

__all__ = ["measure"]

LENGTHS = (200e-6, 2e-3, 20e-3)
LONG = 1.0  # seconds of a wait whose share of a core is measured
Wait = Callable[[object], None]


def ways_to_wait(bench: Bench) -> dict[str, Wait]:
    """Return ours, and asking without a pause, which sees it at once and takes a core."""
    staging, query = Staging(bench.cuda, StagingSizes()), bench.cupy.cuda.runtime.eventQuery

    def ask(event: object) -> None:
        while query(event.ptr) == NOT_READY:  # type: ignore[attr-defined]
            continue

    return {"ours": lambda event: staging.wait(event, "a measurement", lambda: False), "asking": ask}


def measure_lateness(bench: Bench, report: Report, ways: dict[str, Wait]) -> None:
    """Wait for kernels of known lengths both ways, in turns."""
    worst, notes = 0.0, []
    for length in (1e-4,) if bench.is_tiny else LENGTHS:
        values: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(bench.turns(40)):
            for name, wait in ways.items():
                event = bench.cupy.cuda.Event(disable_timing=True)
                bench.synchronize()
                start = time.perf_counter()
                bench.hold(length)
                event.record()
                wait(event)
                values[name].append(time.perf_counter() - start)
        ours, asking = (Sample(tuple(values[name])).median for name in ("ours", "asking"))
        worst = max(worst, ours - asking)
        notes.append(f"{time_text(max(ours - asking, 0.0))} after {time_text(length)}")
    got = f"{worst * 1e6:.0f} us"
    question = "completion is seen so much later than by asking without a pause, at worst"
    report.add(
        "G13", question, got, target="<= 100 us", met=worst <= 100e-6, note=", ".join(notes), late_us=worst * 1e6
    )


def measure_share(bench: Bench, report: Report, ways: dict[str, Wait]) -> None:
    """Wait long, and look at the time that the processor worked."""
    length = 0.01 if bench.is_tiny else LONG
    event = bench.cupy.cuda.Event(disable_timing=True)
    bench.synchronize()
    for _ in range(10):
        bench.hold(length / 10)
    event.record()
    wall, cpu = time.perf_counter(), time.process_time()
    ways["ours"](event)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    share = cpu / wall
    question = f"share of a core in a wait of {wall:.2g} s"
    report.add("G13", question, f"{share:.1%}", target="< 5 %", met=share < 0.05, share=share)


def measure(bench: Bench, report: Report) -> None:
    """Answer all."""
    ways = ways_to_wait(bench)
    bench.hold(1e-6)
    for question, ask in (("how late completion is seen", measure_lateness), ("share of a core", measure_share)):
        with report.question("G13", question):
            ask(bench, report, ways)


if __name__ == "__main__":
    sys.exit(run_part(__doc__ or "", measure))
