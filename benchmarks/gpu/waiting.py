"""How late does the host see that the GPU is done, and what does it pay for looking? (G13)"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

from gpu.measuring import NOT_READY, Bench, time_text
from gpu.part import run_part
from gpu.report import Report
from mpidist.transport.device_over_mpi.sizes import StagingSizes
from mpidist.transport.device_over_mpi.staging import Staging
from mpidist.transport.nccl.launch_queue import DeviceQueue

__all__ = ["measure"]

LENGTHS = (200e-6, 2e-3, 20e-3)
LONG = 1.0  # seconds of a wait whose share of a core is measured
Timed = Callable[[float], None]  # keeps the GPU busy for so long, and waits until it is done


def ways_to_wait(bench: Bench) -> dict[str, tuple[Timed, Timed]]:
    """Return the library's two ways to wait, each beside one that asks without a pause and takes a core for it."""
    staging, query = Staging(bench.cuda, StagingSizes()), bench.cupy.cuda.runtime.eventQuery
    queue, event = DeviceQueue(bench.cuda), bench.cupy.cuda.Event(disable_timing=True)

    def staged(length: float) -> None:
        bench.hold(length)
        event.record()
        staging.wait(event, "a measurement", lambda: None)

    def staged_asking(length: float) -> None:
        bench.hold(length)
        event.record()
        while query(event.ptr) == NOT_READY:
            continue

    def queued(length: float) -> None:
        queue.wait(queue.launch("a measurement", lambda: bench.hold(length)))

    def queued_asking(length: float) -> None:
        launched = queue.launch("a measurement", lambda: bench.hold(length))
        while not queue.is_complete(launched):
            continue

    return {"for staging": (staged, staged_asking), "for NCCL and packs": (queued, queued_asking)}


def measure_lateness(bench: Bench, report: Report, name: str, ways: tuple[Timed, Timed]) -> None:
    """Wait for kernels of known lengths both ways, in turns."""
    worst, notes = 0.0, []
    for length in (1e-4,) if bench.is_tiny else LENGTHS:
        calls = {way_name: [partial(way, length)] for way_name, way in zip(("ours", "asking"), ways, strict=True)}
        times = bench.host_times(calls, bench.turns(30))
        late = times["ours"].median - times["asking"].median
        worst = max(worst, late)
        notes.append(f"{time_text(max(late, 0.0))} after {time_text(length)}")
    question = f"the wait {name}: seen so much later than by asking without a pause, at worst"
    got, note = f"{worst * 1e6:.0f} us", ", ".join(notes)
    report.add("G13", question, got, target="<= 100 us", met=worst <= 100e-6, note=note, late_us=worst * 1e6)


def measure_share(bench: Bench, report: Report, name: str, ways: tuple[Timed, Timed]) -> None:
    """Wait long, and look at the time that the processor worked."""
    bench.synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    ways[0](0.01 if bench.is_tiny else LONG)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    question = f"the wait {name}: share of a core in {wall:.2g} s"
    report.add("G13", question, f"{cpu / wall:.1%}", target="< 5 %", met=cpu / wall < 0.05, share=cpu / wall)


def measure(bench: Bench, report: Report) -> None:
    """Answer all."""
    bench.hold(1e-6)
    with report.question("G13", "how late completion is seen, and the cost"):
        for name, ways in ways_to_wait(bench).items():
            for ask in (measure_lateness, measure_share):
                with report.question("G13", f"the wait {name}"):
                    ask(bench, report, name, ways)


if __name__ == "__main__":
    sys.exit(run_part(__doc__ or "", measure))
