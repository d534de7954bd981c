"""Does anything grow in 10,000 calls: device memory, pinned memory, events and streams, files, host memory?

python -m gpu.leaks                  one rank: packs and an NCCL communicator of one rank
mpiexec -n 2 python -m gpu.leaks     two ranks through the host
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mpidist
from gpu.measuring import Bench
from gpu.part import run_part
from gpu.report import Report
from mpidist.transport.gpu.kernels import DeviceKernels

__all__ = ["Holdings", "measure"]

CALLS = 10_000
TRIAL = 200
SECONDS = 25.0  # for the calls of one question
LIMIT_BYTES = 4 << 20  # of growth, of device and of host memory
SLACK = {"free pinned blocks": 8}  # which come and go


class Holdings:
    """What the process holds now."""

    def __init__(self, bench: Bench) -> None:
        bench.synchronize()
        gc.collect()
        cupy = bench.cupy
        pool, pinned = cupy.get_default_memory_pool(), cupy.get_default_pinned_memory_pool()
        kinds = (cupy.cuda.Event, cupy.cuda.Stream)
        objects = [type(its) for its in gc.get_objects()]
        self.counts = {
            "device memory in use": int(pool.used_bytes()),
            "device memory of the pool": int(pool.total_bytes()),
            "device memory of the GPU": -int(cupy.cuda.runtime.memGetInfo()[0]),
            "host memory": _resident_bytes(),
            "free pinned blocks": int(pinned.n_free_blocks()),
            "events": objects.count(kinds[0]),
            "streams": objects.count(kinds[1]),
            "open files": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
        }

    def growth_since(self, before: Holdings) -> dict[str, int]:
        return {name: number - before.counts[name] for name, number in self.counts.items()}


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def call_often(bench: Bench, report: Report, question: str, call: Callable[[], object]) -> None:
    """Call, and look at what has grown since the first tenth of the calls."""
    number = 50 if bench.is_tiny else _affordable(call)
    for _ in range(number // 10):
        call()
    before = Holdings(bench)
    for _ in range(number):
        call()
    growth = Holdings(bench).growth_since(before)
    grown = {name: by for name, by in growth.items() if by > (LIMIT_BYTES if "memory" in name else SLACK.get(name, 0))}
    got = ", ".join(f"{name} +{by}" for name, by in grown.items()) or "nothing grew"
    target = f"no handle more, at most {LIMIT_BYTES >> 20} MiB of memory"
    report.add("leaks", f"{number} calls: {question}", got, target=target, met=not grown, **growth)


def _affordable(call: Callable[[], object]) -> int:
    """Say how many calls fit into the time, at most all; the same number on all ranks."""
    start = time.monotonic()
    for _ in range(TRIAL):
        call()
    number = min(CALLS, int(SECONDS * TRIAL / (time.monotonic() - start)))
    if _size() > 1:
        from mpi4py import MPI

        number = MPI.COMM_WORLD.bcast(number)
    return number


def kernels_call(bench: Bench) -> Callable[[], object]:
    """Pack and unpack, with arrays that are new at every call."""
    kernels = DeviceKernels(bench.cuda)
    host = [np.ones(size, np.float32) for size in (3, 1000, 17)]

    def call() -> None:
        arrays = [bench.empty(its.size, np.float32) for its in host]
        buffer = bench.empty(1020, np.float32)
        kernels.pack(arrays, buffer)
        kernels.unpack(buffer, arrays)

    return call


def reduce_call(bench: Bench, strategy: Any) -> Callable[[], object]:
    """All-reduce a small list."""
    arrays = [bench.up(np.ones(size, np.float32)) for size in (3, 1000, 17)]

    def call() -> None:
        strategy.run(lambda: mpidist.get_replica_context().all_reduce("sum", arrays))

    return call


def measure(bench: Bench, report: Report) -> None:
    """Answer. Collective."""
    with mpidist.MultiWorkerMirroredStrategy() if _size() > 1 else mpidist.OneDeviceStrategy() as strategy:
        if _size() == 1:
            with report.question("leaks", "pack and unpack, new arrays each time"):
                call_often(bench, report, "pack and unpack, new arrays each time", kernels_call(bench))
            if not bench.cuda.support.reason:
                with report.question("leaks", "NCCL of one rank"):
                    nccl_calls(bench, report)
        question = f"all_reduce of a list, {_size()} rank" + "s" * (_size() > 1)
        with report.question("leaks", question):
            call_often(bench, report, question, reduce_call(bench, strategy))


def nccl_calls(bench: Bench, report: Report) -> None:
    """Reduce by the library's NCCL communicator, of one rank."""
    from mpidist.transport.nccl.communicator import NcclCommunicator
    from mpidist.transport.nccl.handles import Handle
    from mpidist.transport.reduction import Reduction

    nccl = bench.cuda.nccl
    device = int(bench.cupy.cuda.runtime.getDevice())
    handle = Handle(bench.cuda, nccl.NcclCommunicator(1, nccl.get_unique_id(), 0), device)
    communicator, buffer = NcclCommunicator(handle, "one", 0, 1), bench.up(np.ones(1000, np.float32))
    call_often(bench, report, "NCCL of one rank", lambda: communicator.all_reduce(buffer, Reduction("sum")))
    communicator.free()


def _size() -> int:
    return int(os.environ.get("GPU_CHECK_RANKS", "1"))


def _rank() -> int:
    if _size() == 1:
        return 0
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.Get_rank())


if __name__ == "__main__":
    sys.exit(run_part(__doc__ or "", measure, _rank()))
