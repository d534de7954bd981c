"""Raw mpi4py, and mpidist, over whatever MPI their environment has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

import mpidist
from contest.mpi_versions import mpi_versions
from contest.way import Library, Way

if TYPE_CHECKING:
    from collections.abc import Callable

    from contest.work import Work

__all__ = ["Mpi"]

_CUT = 1 << 18  # elements: 1 MiB of float32
_MOST_BUCKET_BYTES = 128 << 20  # above, a bucket loses to a call a tensor, and takes as much memory again


class Mpi(Library):
    """What a user writes with mpi4py alone, and with mpidist. Collective."""

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self.versions = mpi_versions()
        self._strategy: mpidist.Strategy | None = None

    def ways(self, work: Work) -> dict[str, Way]:
        """List raw ways, and ours."""
        private = [work.empty() for _ in range(work.calls)]
        self._strategy = mpidist.MultiWorkerMirroredStrategy()
        return {**self._raw(work, private), **self._ours(self._strategy, work, private)}

    def _raw(self, work: Work, private: list[list[Any]]) -> dict[str, Way]:
        all_reduce, in_place = self._comm.Allreduce, MPI.IN_PLACE

        def fresh(array: Any) -> Any:
            result = np.empty_like(array)
            all_reduce(array, result)
            return result

        def call_in_place(at: int) -> Any:
            for array in private[at]:
                all_reduce(in_place, array)
            return private[at]

        ways = {
            "raw": Way(private, lambda at: [fresh(array) for array in private[at]]),
            "raw in place": Way(private, call_in_place),
        }
        if any(4 * np.prod(shape) > 4 * _CUT for shape in work.shapes):
            ways["raw 1 MiB"] = self._raw_cut(private)
        if work.kind == "list" and work.nbytes <= _MOST_BUCKET_BYTES:
            ways["raw bucket"] = self._raw_bucket(work, private)
        return ways

    def _raw_cut(self, private: list[list[Any]]) -> Way:
        all_reduce, in_place = self._comm.Allreduce, MPI.IN_PLACE
        flats = [[array.reshape(-1) for array in arrays] for arrays in private]
        parts = [[flat[at : at + _CUT] for flat in of for at in range(0, flat.size, _CUT)] for of in flats]

        def call(at: int) -> Any:
            for part in parts[at]:
                all_reduce(in_place, part)
            return private[at]

        return Way(private, call)

    def _raw_bucket(self, work: Work, private: list[list[Any]]) -> Way:
        flat = np.empty(work.nbytes // 4, np.float32)
        ends = np.cumsum([np.prod(shape, dtype=int) for shape in work.shapes])[:-1]
        parts = [part.reshape(shape) for part, shape in zip(np.split(flat, ends), work.shapes, strict=True)]

        def call(at: int) -> Any:
            np.concatenate([array.reshape(-1) for array in private[at]], out=flat)
            self._comm.Allreduce(MPI.IN_PLACE, flat)
            for array, part in zip(private[at], parts, strict=True):
                array[...] = part
            return private[at]

        return Way(private, call)

    def _ours(self, strategy: mpidist.Strategy, work: Work, private: list[list[Any]]) -> dict[str, Way]:
        like = private[0]
        own = [strategy.symmetric_empty_like(like) for _ in private]
        of_node = [strategy.symmetric_empty_like(like, per_node=True) for _ in private]
        single = work.kind == "size"  # a size is one array, a list stays one

        def way(values: list[list[Any]], outs: list[list[Any]] | None) -> Way:
            given = [value[0] if single else value for value in values]
            taken = [out[0] if single else out for out in outs] if outs else [None] * len(given)
            return Way(values, _reduce(given, taken), lambda result: [result] if single else result, within=within)

        def within(timed: Callable[[], Any]) -> Any:
            return strategy.run(timed)

        return {
            "mpidist": way(private, None),
            "mpidist in place": way(private, private),
            "mpidist per node": way(private, of_node),
            "mpidist symmetric": way(own, own),
            "mpidist symmetric per node": way(own, of_node),
        }

    def forget(self) -> None:
        """Close the strategy: symmetric arrays live as long as it does."""
        if self._strategy is not None:
            self._strategy.close()
            self._strategy = None


def _reduce(given: list[Any], taken: list[Any]) -> Callable[[int], Any]:
    def call(at: int) -> Any:
        context = mpidist.get_replica_context()
        assert context is not None  # inside strategy.run
        return context.all_reduce(mpidist.ReduceOp.SUM, given[at], out=taken[at])

    return call
