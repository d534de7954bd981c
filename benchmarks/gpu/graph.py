"""Can pack, NCCL's all-reduce and unpack be captured in a CUDA graph, and what does it save? (G9)

With a communicator of one rank: NCCL then only copies, from one buffer to another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from gpu.measuring import Bench
from gpu.pack import Lists, shapes_of
from gpu.part import run_part
from gpu.report import Report
from mpidist.transport.gpu.kernels import DeviceKernels

__all__ = ["measure"]


def measure(bench: Bench, report: Report) -> None:
    """Capture, look at the numbers, and time the replay beside the eager way."""
    with report.question("G9", "CUDA graph of pack, all-reduce, unpack"):
        nccl = bench.cuda.nccl
        comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
        try:
            _measure(bench, report, comm)
        finally:  # when the graph is gone: NCCL waits for it
            bench.synchronize()
            comm.destroy()


def _measure(bench: Bench, report: Report, comm: object) -> None:
    kernels, lists = DeviceKernels(bench.cuda), Lists(bench, shapes_of(bench), 1)
    targets = [bench.empty(size, np.float32) for size in lists.sizes]
    reduced = bench.empty(lists.total, np.float32)
    stream = bench.cupy.cuda.Stream(non_blocking=True)
    bench.synchronize()
    with stream:
        step = _step(bench, kernels, lists, targets, reduced, comm)
        step()  # compiles
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for what, run in (("eager", step), ("replay", lambda: graph.launch(stream))):
            for array in (*targets, reduced, *lists.buffers):
                bench.poison(array)
            run()
            stream.synchronize()
            for target, (a, b) in zip(targets, pairwise(lists.bounds), strict=True):
                bench.require_equal(what, target, lists.host[0][a:b])
        report.add("G9", "capture of pack, 1-rank all-reduce, unpack", "works, right numbers", target="works", met=True)
        ways = {"eager": [step], "replay": [lambda: graph.launch(stream)]}
        gpu = bench.gpu_times(ways, bench.turns(50))
        host = bench.host_times(ways, bench.turns(100))
    is_met = gpu["replay"].median <= gpu["eager"].median
    got = f"{gpu['replay']} beside {gpu['eager']}"
    numbers = {**gpu["replay"].numbers, "eager_us": gpu["eager"].median * 1e6}
    report.add("G9", "replay on the GPU, beside eager", got, target="<= eager", met=is_met, **numbers)
    got = f"{host['replay']} beside {host['eager']}"
    is_met = host["replay"].median <= 10e-6
    numbers = {**host["replay"].numbers, "eager_us": host["eager"].median * 1e6}
    report.add("G9", "host's time of a replay, beside eager", got, target="<= 10 us", met=is_met, **numbers)


def _step(
    bench: Bench, kernels: DeviceKernels, lists: Lists, targets: list[object], reduced: object, comm: object
) -> Callable[[], object]:
    code, add = int(bench.cuda.nccl.NCCL_FLOAT32), int(bench.cuda.nccl.NCCL_SUM)
    buffer = lists.buffers[0]
    sent, received, count = int(buffer.data.ptr), int(reduced.data.ptr), lists.total  # type: ignore[attr-defined]
    current = bench.cupy.cuda.get_current_stream

    def step() -> None:
        kernels.pack(lists.tensors[0], buffer)
        comm.allReduce(sent, received, count, code, add, current().ptr)  # type: ignore[attr-defined]
        kernels.unpack(reduced, targets)

    return step


if __name__ == "__main__":
    sys.exit(run_part(__doc__ or "", measure, needs_nccl=True))
