"""How close is an all-reduce that MPI carries to the slowest of its stages, and how far from whole messages?

    mpiexec -n 2 python -m gpu.staged_all_reduce --out file.json

Two ranks share the GPU and pretend to be on two nodes, so that MPI carries between them, through shared memory.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
from mpi4py import MPI

import mpidist
from gpu.measuring import Bench, Sample
from gpu.part import run_part
from gpu.ranks import Ranks
from gpu.report import Report

__all__ = ["measure"]

BYTES = 100 << 20
CHUNKS = (256 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20)


def make_ways(bench: Bench, ranks: Ranks, array: Any, strategies: dict[str, Any]) -> dict[str, Any]:
    """Return an all-reduce by each strategy, whole-message staging, and the stages alone."""
    cuda, comm, nbytes = bench.cupy.cuda, ranks.comm, int(array.nbytes)
    runtime, stream = cuda.runtime, cuda.get_current_stream()
    memories = [cuda.alloc_pinned_memory(nbytes) for _ in range(2)]
    sent, received = (np.frombuffer(memory, np.uint8, nbytes) for memory in memories)
    sent[:], received[:] = 1, 2
    other = np.empty(nbytes, np.uint8)
    room = bench.up(other)
    at, to = int(sent.ctypes.data), int(room.data.ptr)
    to_host, to_device = int(runtime.memcpyDeviceToHost), int(runtime.memcpyHostToDevice)

    def ours(strategy: Any) -> Any:
        def reduce() -> None:
            mpidist.get_replica_context().all_reduce("sum", array, out=array)

        return lambda: strategy.run(reduce)

    def whole() -> None:
        host = np.empty(array.shape, array.dtype)  # made for each call and not pinned, as others do
        runtime.memcpyAsync(host.ctypes.data, int(array.data.ptr), nbytes, to_host, stream.ptr)
        stream.synchronize()
        comm.Allreduce(MPI.IN_PLACE, host)
        runtime.memcpyAsync(int(array.data.ptr), host.ctypes.data, nbytes, to_device, stream.ptr)
        stream.synchronize()

    def copy(target: int, source: int, kind: int) -> Any:
        return lambda: (runtime.memcpyAsync(target, source, nbytes, kind, stream.ptr), stream.synchronize())

    def exchange(_keep: Any = (memories, room)) -> None:
        peer, chunk = ranks.rank ^ 1, 4 << 20
        for start in range(0, nbytes, chunk):
            comm.Sendrecv(sent[start : start + chunk], peer, 7, received[start : start + chunk], peer, 7)

    ways: dict[str, Any] = {name: ours(strategy) for name, strategy in strategies.items()}
    ways["whole message, pageable"] = whole
    ways["stage: down"] = copy(at, to, to_host)
    ways["stage: up"] = copy(to, at, to_device)
    ways["stage: MPI"] = exchange
    return ways


def check(bench: Bench, ranks: Ranks, array: Any, name: str, way: Any) -> None:
    """See whether a way adds: numbers whose sums are exact."""
    count = array.size
    rows = [np.random.default_rng([3, at]).integers(-9, 9, count).astype(np.float32) for at in range(ranks.size)]
    array[...] = bench.up(rows[ranks.rank])
    way()
    bench.require_equal(name, array, sum(rows[1:], rows[0]))


def measure(bench: Bench, report: Report) -> None:
    """Answer. Collective."""
    ranks = Ranks(MPI.COMM_WORLD, bench.synchronize)
    with report.question("all-reduce of device memory that MPI carries"):
        if ranks.size < 2:
            raise RuntimeError("it takes 2 ranks: mpiexec -n 2")
        os.environ.update(MPIDIST_NCCL="0", MPIDIST_PRETEND_NODES=",".join(str(at) for at in range(ranks.size)))
        strategies = {}
        for chunk in (0,) if bench.is_tiny else (0, *CHUNKS):
            os.environ["MPIDIST_STAGING_BYTES"] = str(chunk) if chunk else ""
            name = f"chunks of {chunk >> 10} KiB" if chunk else "chunks as it comes"
            strategies[name] = mpidist.MultiWorkerMirroredStrategy()
        array = bench.up(bench.numbers(bench.nbytes(BYTES) // 4))  # on the device that the strategies chose
        ways = make_ways(bench, ranks, array, strategies)
        for name in (*strategies, "whole message, pageable"):
            check(bench, ranks, array, name, ways[name])
        times = ranks.times(ways, bench.turns(8))
        _note(report, int(array.nbytes), times, list(strategies))
        for strategy in strategies.values():
            strategy.close()


def _note(report: Report, nbytes: int, times: dict[str, Sample], ours: list[str]) -> None:
    stage = max((name for name in times if name.startswith("stage")), key=lambda name: times[name].median)
    best, default = min(ours, key=lambda name: times[name].median), times[ours[0]]
    note = ", ".join(f"{name} {times[name].median * 1e3:.2f} ms" for name in times)
    for name, what in ((stage, "its slowest stage alone"), ("whole message, pageable", "whole-message staging")):
        ratio = times[name].median / default.median
        got = f"{times[name]} ({name}) / {default} = {ratio:.2f}; best: {best}, {times[best]}"
        question = f"all-reduce of {nbytes / 1e6:.0f} MB, 2 ranks on one GPU over MPI: {what} / ours"
        report.add(question, got, note=note, ratio=ratio, **default.numbers)


if __name__ == "__main__":
    sys.exit(run_part(__doc__ or "", measure, MPI.COMM_WORLD.Get_rank()))
