"""Sums in every way that mpi4py and mpidist have: new results, in place, and with arrays in shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI
from ranks.over_mpi import reduce
from ranks.way import Way

from mpidist import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Callable

    from ranks.over_mpi import Mpi
    from ranks.work import Work

    from mpidist import Strategy

__all__ = ["raw_ways", "way_of", "ways"]

_CUT = 1 << 18  # elements: 1 MiB of float32
_MOST_BUCKET_BYTES = 128 << 20  # above, a bucket loses to a call a tensor, and takes as much memory again


def raw_ways(mpi: Mpi, private: list[list[Any]], op: Any = MPI.SUM) -> dict[str, Way]:
    """List what a user writes with mpi4py alone: a call a tensor."""
    all_reduce, in_place = mpi.comm.Allreduce, MPI.IN_PLACE

    def fresh(array: Any) -> Any:
        result = np.empty_like(array)
        all_reduce(array, result, op)
        return result

    def call_in_place(at: int) -> Any:
        for array in private[at]:
            all_reduce(in_place, array, op)
        return private[at]

    return {
        "raw": Way(private, lambda at: [fresh(array) for array in private[at]], ""),
        "raw in place": Way(private, call_in_place, ""),
    }


def _raw_cut(mpi: Mpi, private: list[list[Any]]) -> Way:
    all_reduce, in_place = mpi.comm.Allreduce, MPI.IN_PLACE
    flats = [[array.reshape(-1) for array in arrays] for arrays in private]
    parts = [[flat[at : at + _CUT] for flat in of for at in range(0, flat.size, _CUT)] for of in flats]

    def call(at: int) -> Any:
        for part in parts[at]:
            all_reduce(in_place, part)
        return private[at]

    return Way(private, call)


def _raw_bucket(mpi: Mpi, work: Work, private: list[list[Any]]) -> Way:
    flat = np.empty(work.nbytes // 4, np.float32)
    ends = np.cumsum([np.prod(shape, dtype=int) for shape in work.shapes])[:-1]
    parts = [part.reshape(shape) for part, shape in zip(np.split(flat, ends), work.shapes, strict=True)]

    def call(at: int) -> Any:
        np.concatenate([array.reshape(-1) for array in private[at]], out=flat)
        mpi.comm.Allreduce(MPI.IN_PLACE, flat)
        for array, part in zip(private[at], parts, strict=True):
            array[...] = part
        return private[at]

    return Way(private, call)


def way_of(
    strategy: Strategy,
    work: Work,
    values: list[list[Any]],
    outs: list[list[Any]] | None = None,
    options: Any = None,
    **more: Any,
) -> Way:
    """Make a sum by mpidist.

    Args:
        strategy: In whose `run` it is called.
        work: A size is one array, a list stays one.
        values: [calls], arrays.
        outs: [calls], where the results go; `None` for new arrays.
        options: Of the call.
        **more: Fields of the way.
    """
    single = work.kind == "size"
    given = [value[0] if single else value for value in values]
    taken = [out[0] if single else out for out in outs] if outs else [None] * len(given)

    def call(at: int) -> Any:
        return reduce(ReduceOp.SUM, given[at], taken[at], options)

    def within(timed: Callable[[], Any]) -> Any:
        return strategy.run(timed)

    fields = {"baseline": "raw in place" if outs else "raw", "within": within, **more}
    return Way(values, call, results=lambda result: [result] if single else result, **fields)


def ways(mpi: Mpi, work: Work) -> dict[str, Way]:
    """List raw ways, and those of mpidist."""
    private, strategy = [work.empty() for _ in range(work.calls)], mpi.strategy()
    found = raw_ways(mpi, private)
    if any(np.prod(shape) > _CUT for shape in work.shapes):
        found["raw 1 MiB"] = _raw_cut(mpi, private)
    if work.kind == "list" and work.nbytes <= _MOST_BUCKET_BYTES:
        found["raw bucket"] = _raw_bucket(mpi, work, private)
    own = [strategy.symmetric_empty_like(private[0]) for _ in private]
    of_node = [strategy.symmetric_empty_like(private[0], per_node=True) for _ in private]
    return {
        **found,
        "mpidist": way_of(strategy, work, private),
        "mpidist in place": way_of(strategy, work, private, private),
        "mpidist per node": way_of(strategy, work, private, of_node),
        "mpidist symmetric": way_of(strategy, work, own, own),
        "mpidist symmetric per node": way_of(strategy, work, own, of_node),
    }
