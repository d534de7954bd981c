"""Are the numbers right? Every operation, dtype and algorithm, nests of device arrays, against NumPy in float64.

    python -m gpu.sums                  one rank
    mpiexec -n 4 python -m gpu.sums     four, which may share the GPU

Contributions are small whole numbers, so that sums are exact in every dtype and order, also compressed; means are
compared within a rounding.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

import mpidist
from gpu.measuring import Bench
from gpu.part import run_part
from gpu.report import Report
from mpidist import CommunicationOptions as Options
from mpidist.options import Compression
from mpidist.transport.half import bfloat16

__all__ = ["contribution", "expected", "measure"]

OPS = ("SUM", "MEAN", "MIN", "MAX", "PROD")
SHAPES: tuple[tuple[int, ...], ...] = ((), (0, 3), (7,), (129, 33), (100_003,))
DTYPES = [*map(np.dtype, "bBhHiIqQefdFD"), np.dtype(bfloat16())]
HALF_UNITS = {np.dtype(np.float16): 2.0**-11, np.dtype(bfloat16()): 2.0**-8}
ROUNDING = 2.0  # units in the last place


def contribution(op: str, rank: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return what a rank adds (1 to 7), multiplies (1 or 2) or compares, in the dtype."""
    where = np.arange(int(np.prod(shape))).reshape(shape)
    if op == "PROD":
        return (1 + (rank + where) % 2).astype(dtype)
    if op in ("MIN", "MAX"):
        return ((5 * rank + 3 * where) % 13).astype(dtype)
    return (1 + (3 * rank + where) % 7).astype(dtype)


def expected(op: str, size: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return what must come of it, in double precision."""
    wide = np.complex128 if dtype.kind == "c" else np.float64
    rows = np.stack([contribution(op, rank, shape, dtype).astype(wide) for rank in range(size)])
    if op == "PROD":
        return rows.prod(axis=0)
    if op in ("MIN", "MAX"):
        return rows.min(axis=0) if op == "MIN" else rows.max(axis=0)
    return rows.sum(axis=0) / (size if op == "MEAN" else 1)


def is_right(op: str, got: Any, wanted: Any, dtype: np.dtype[Any], options: Options | None = None) -> bool:
    """Compare: exactly, but for means that are not whole, and may have been compressed."""
    if got.shape != wanted.shape or got.dtype != dtype:
        return False
    wide = got.astype(wanted.dtype)
    if op != "MEAN":
        return bool((wide == wanted).all())
    unit = HALF_UNITS.get(dtype, 2.0**-24)
    if dtype == np.float32 and options is not None and options.compression is not Compression.NONE:
        unit = 2.0**-8 if options.compression is Compression.BF16 else 2.0**-11
    return bool((np.abs(wide - wanted) <= ROUNDING * unit * np.abs(wanted)).all())


def can(op: str, dtype: np.dtype[Any]) -> bool:
    """Say whether the operation is defined for the dtype."""
    if dtype.kind == "c":
        return op in ("SUM", "MEAN", "PROD")
    return op != "MEAN" or dtype.kind not in "iu"


def algorithms() -> dict[str, tuple[Any, Options | None]]:
    """Return cross-device operations and options, by name."""
    ways: dict[str, tuple[Any, Options | None]] = {
        "collective": (mpidist.CollectiveAllReduce(), None),
        "hierarchical": (mpidist.HierarchicalCopyAllReduce(), None),
        "3 packs": (mpidist.NcclAllReduce(3), None),
        "to one device": (mpidist.ReductionToOneDevice(), None),
        "reproducible": (mpidist.CollectiveAllReduce(), Options(reproducible=True)),
        "small packs": (mpidist.CollectiveAllReduce(), Options(bytes_per_pack=1000)),
        "bfloat16 between nodes": (mpidist.HierarchicalCopyAllReduce(), Options(compression="bf16")),
        "float16 everywhere": (mpidist.CollectiveAllReduce(), Options(compression="fp16", compress_everywhere=True)),
    }
    if _is_slow():
        ways = {name: ways[name] for name in ("collective", "hierarchical", "bfloat16 between nodes")}
        ways["NCCL alone"] = (mpidist.CollectiveAllReduce(), Options(implementation="NCCL"))
    return ways


def _is_slow() -> bool:
    """Say whether NCCL works between ranks that share a GPU, where each call takes long."""
    return os.environ.get("MPIDIST_TEST_HOSTIDS") == "1"


def wrong_leaves(bench: Bench, rank: int, size: int, op: str, options: Options | None) -> Iterator[tuple[str, bool]]:
    """Reduce a nest of all dtypes and shapes in three ways; yield each leaf's name and whether it is right."""
    shapes = SHAPES[:3] if bench.is_tiny else SHAPES
    leaves = [its for its in product(DTYPES, shapes) if can(op, its[0])]
    its = mpidist.get_replica_context()

    def nest() -> dict[str, list[Any]]:
        arrays = [bench.up(contribution(op, rank, shape, dtype)) for dtype, shape in leaves]
        return {"first": arrays[:9], "rest": arrays[9:]}

    value, in_place = nest(), nest()
    before = bench.down(value["first"][2]).copy()
    results = {
        "all_reduce": its.all_reduce(op, value, options),
        "out=": its.all_reduce(op, in_place, options, out=in_place),
        "start_all_reduce": its.start_all_reduce(op, value, options).wait(),
    }
    for way, result in results.items():
        for got, (dtype, shape) in zip([*result["first"], *result["rest"]], leaves, strict=True):
            wanted = expected(op, size, shape, dtype)
            yield f"{way} {dtype}{list(shape)}", is_right(op, bench.down(got), wanted, dtype, options)
    yield f"{way}: the value was written", bool((bench.down(value["first"][2]) == before).all())


def measure(bench: Bench, report: Report) -> None:
    """Answer for each algorithm. Collective."""
    size, rank, comm = _who()
    for name, (ops, options) in algorithms().items():
        question = f"{name}, {size} rank" + "s" * (size > 1) + f", {os.environ.get('GPU_CHECK_WAY', 'as they meet')}"
        with report.question("numbers", question):
            strategy = (
                mpidist.MultiWorkerMirroredStrategy(cross_device_ops=ops) if size > 1 else mpidist.OneDeviceStrategy()
            )
            seen: list[tuple[str, bool]] = []
            for op in ("SUM", "MAX") if _is_slow() or bench.is_tiny else OPS:
                found = strategy.run(lambda op=op: list(wrong_leaves(bench, rank, size, op, options)))  # noqa: B023
                seen += [(f"{op} {leaf}", is_good) for leaf, is_good in found]
            strategy.close()
            mine = [leaf for leaf, is_good in seen if not is_good]
            wrong = mine if comm is None else sorted({leaf for its in comm.allgather(mine) for leaf in its})
            got = f"{len(seen) - len(wrong)} of {len(seen)} results right"
            report.add("numbers", question, got, target="all", met=not wrong, note="; ".join(wrong[:5]))


def _who() -> tuple[int, int, Any]:
    size = int(os.environ.get("GPU_CHECK_RANKS", "1"))
    if size == 1:
        return 1, 0, None
    from mpi4py import MPI

    return size, int(MPI.COMM_WORLD.Get_rank()), MPI.COMM_WORLD


def _rank() -> int:
    rank = _who()[1]
    if os.environ.get("MPIDIST_TEST_HOSTIDS") == "1":  # before NCCL's first call: it reads it once
        os.environ["NCCL_HOSTID"] = f"rank{rank}"
    return rank


if __name__ == "__main__":
    sys.exit(run_part(__doc__ or "", measure, _rank()))
