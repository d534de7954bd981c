"""How much of the reductions hides behind the backward pass that makes the gradients?

    mpiexec -n 2 python -m gpu.overlap --out file.json

A kernel for each of ResNet-50's 161 tensors, the last first; whenever 25 MB are there, their all-reduce is started.
Ranks that share one GPU take turns on it, which real ranks do not: the hidden part is what is looked at, not the times.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
from mpi4py import MPI

import mpidist
from gpu.measuring import Bench, Sample
from gpu.pack import shapes_of
from gpu.part import run_part
from gpu.ranks import Ranks
from gpu.report import Report

__all__ = ["measure", "packs_of"]

PACK_BYTES = 25_000_000


def packs_of(arrays: list[Any], nbytes: int) -> list[list[Any]]:
    """Cut a list of gradients, the last first, into packs of at least so many bytes, but for the last pack."""
    packs: list[list[Any]] = [[]]
    for array in reversed(arrays):
        if sum(int(its.nbytes) for its in packs[-1]) >= nbytes:
            packs.append([])
        packs[-1].append(array)
    return packs


class Step:
    """A synthetic training step.

    Args:
        bench: Where.
        ranks: Who.
        strategy: Reduces.
        seconds: What the backward pass takes.
    """

    def __init__(self, bench: Bench, ranks: Ranks, strategy: Any, seconds: float) -> None:
        self.seconds = seconds
        self._bench, self._ranks, self._strategy = bench, ranks, strategy
        self.gradients = [bench.empty(shape, np.float32) for shape in shapes_of(bench)]
        self.packs = packs_of(self.gradients, bench.nbytes(PACK_BYTES))
        self._elements = sum(int(its.size) for its in self.gradients)

    def _compute(self, pack: list[Any]) -> None:
        for array in pack:
            self._bench.hold(self.seconds * int(array.size) / self._elements)
            array[...] = self._ranks.rank + 1

    def compute(self) -> None:
        for pack in self.packs:
            self._compute(pack)

    def after(self) -> None:
        self.compute()
        self._run(lambda its: its.all_reduce("sum", self.gradients, out=self.gradients))

    def early(self) -> None:
        def step(its: Any) -> None:
            handles = []
            for pack in self.packs:
                self._compute(pack)
                handles.append(its.start_all_reduce("sum", pack, out=pack))
            for handle in handles:
                handle.wait()

        self._run(step)

    def check(self) -> None:
        """See whether the sums are right, everywhere."""
        total = np.float32(self._ranks.size * (self._ranks.size + 1) // 2)
        for array in self.gradients:
            if not (self._bench.down(array) == total).all():
                raise ArithmeticError(f"a gradient of shape {array.shape} is no sum")

    def _run(self, step: Any) -> None:
        self._strategy.run(lambda: step(mpidist.get_replica_context()))


def measure(bench: Bench, report: Report) -> None:
    """Answer. Collective."""
    ranks = Ranks(MPI.COMM_WORLD, bench.synchronize)
    os.environ.update(MPIDIST_NCCL="0", MPIDIST_PRETEND_NODES=",".join(str(at) for at in range(ranks.size)))
    with report.question("reductions that hide behind the backward pass"):
        strategy = mpidist.MultiWorkerMirroredStrategy()
        reducing = Step(bench, ranks, strategy, 0.0)
        for way in (reducing.after, reducing.early):
            way()
            reducing.check()
        alone = ranks.times({"reduce": reducing.after}, bench.turns(5))["reduce"].median
        step = Step(bench, ranks, strategy, 2 * max(ranks.comm.allgather(alone)) / ranks.size)
        ways = {"compute": step.compute, "after": step.after, "early": step.early}
        times = ranks.times(ways, bench.turns(8))
        step.early()
        step.check()
        _note(report, ranks.size, len(step.gradients), times, bench.is_tiny)
        strategy.close()


def _note(report: Report, size: int, number: int, times: dict[str, Sample], is_tiny: bool) -> None:
    compute, after, early = (times[name].median for name in ("compute", "after", "early"))
    exposed, reducing = early - compute, after - compute
    question = f"backward of {number} kernels, {size} ranks over MPI: part of the reductions that is hidden"
    if reducing <= 0 and is_tiny:
        report.add(question, "too small to tell")
        return
    if reducing <= 0:
        raise ArithmeticError(f"nothing to hide: {after * 1e3:.2f} ms with reductions, {compute * 1e3:.2f} ms without")
    hidden = 1 - exposed / reducing
    note = ", ".join(f"{name} {its}" for name, its in times.items())
    got = f"{hidden:.0%}: {exposed * 1e3:.2f} of {reducing * 1e3:.2f} ms can be seen"
    report.add(question, got, note=note, hidden=hidden, exposed=exposed)


if __name__ == "__main__":
    sys.exit(run_part(__doc__ or "", measure, MPI.COMM_WORLD.Get_rank()))
