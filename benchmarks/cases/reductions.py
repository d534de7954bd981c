"""Other reductions than the sum, and other collectives, each compared with mpi4py alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from backends.mpi import Mpi, context, reduce
from harness.work import Way, Work
from mpi4py import MPI

import mpidist

# MPI's operation, and the expected result of the values of all ranks.
_OPS: dict[str, tuple[MPI.Op, Callable[[Sequence[Any]], Any]]] = {
    "sum": (MPI.SUM, sum),
    "max": (MPI.MAX, np.maximum.reduce),
    "min": (MPI.MIN, np.minimum.reduce),
    "prod": (MPI.PROD, np.multiply.reduce),
    "mean": (MPI.SUM, lambda its: sum(its) / len(its)),
}


def reductions(mpi: Mpi, work: Work) -> dict[str, Way]:
    """List pairs: mpi4py, and mpidist. Halves are compared with float32 of as many elements."""
    strategy, array = mpi.strategy(), work.empty()[0]

    def raw(op: str) -> Any:
        mpi.comm.Allreduce(MPI.IN_PLACE, array, _OPS[op][0])
        return [np.divide(array, np.float32(mpi.size), out=array) if op == "mean" else array]

    def ours(op: str, of: Any, baseline: str, options: Any = None, **more: Any) -> Way:
        return Way([[of]], lambda _: [strategy.run(reduce, (op, of, of, options))], baseline, **more)

    found = {}
    for op, (_, expect) in _OPS.items():
        found[f"raw {op}"] = Way([[array]], lambda _, op=op: raw(op), "", expect=expect)
        found[op] = ours(op, array, f"raw {op}", expect=expect)
    for dtype, tolerance in ((np.float16, 2.0**-10), (ml_dtypes.bfloat16, 2.0**-7)):
        half = np.empty(array.size, dtype)
        found[f"sum of {half.dtype}"] = ours("sum", half, "raw sum", tolerance=tolerance)
    found["sum, reproducible"] = ours("sum", array, "sum", mpidist.CommunicationOptions(reproducible=True))
    return found | _others(mpi, strategy, array)


def _others(mpi: Mpi, strategy: mpidist.Strategy, array: Any) -> dict[str, Way]:
    comm, rank, extended = mpi.comm, mpi.rank, strategy.extended
    counts = [len(its) for its in np.array_split(array, mpi.size)]  # as mpidist shares out what does not divide
    bounds = [0, *np.cumsum(counts).tolist()]
    part = slice(bounds[rank], bounds[rank + 1])
    shard, last = array[: counts[rank]], slice(bounds[-2], bounds[-1])

    def raw_reduce(_: int) -> Any:
        result = np.empty_like(array) if rank == 0 else None
        comm.Reduce(array, result)
        return [array[:0] if result is None else result]

    def raw_broadcast(_: int) -> Any:
        result = array.copy() if rank == 0 else np.empty_like(array)
        comm.Bcast(result)
        return [result]

    def raw_scatter(_: int) -> Any:
        result = np.empty_like(shard)
        comm.Reduce_scatter(array, result, counts)
        return [result]

    def raw_gather(_: int) -> Any:
        result = np.empty_like(array)
        comm.Allgatherv(shard, [result, counts])
        return [result]

    def reduced(_: int) -> Any:
        result = extended.reduce_to("sum", array, 0)
        return [array[:0] if result is None else result]

    pairs: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("reduce", raw_reduce, reduced, {"part": None if rank == 0 else slice(0)}),
        ("broadcast", raw_broadcast, lambda _: [extended.broadcast_to(array, "all")], {"expect": lambda its: its[0]}),
        ("reduce_scatter", raw_scatter, lambda _: [strategy.run(lambda: context().reduce_scatter("sum", array))],
         {"part": part}),
        # The start of the last rank's array is what comes last.
        ("all_gather", raw_gather, lambda _: [strategy.run(lambda: context().all_gather(shard, 0))],
         {"results": lambda its: [its[0][last]], "expect": lambda its: its[-1], "part": slice(counts[-1])}),
    ]  # fmt: skip
    found = {}
    for name, theirs, ours, more in pairs:
        found[f"raw {name}"] = Way([[array]], theirs, "", **more)
        found[name] = Way([[array]], ours, f"raw {name}", **more)
    return found
