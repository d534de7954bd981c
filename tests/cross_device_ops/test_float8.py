"""float8 of `ml_dtypes`: reduced in float32 over ranks and nodes, moved as it is."""

from itertools import product

import ml_dtypes
import numpy as np
from support.everywhere import same_everywhere
from support.reductions import all_reduce

from mpidist import MultiWorkerMirroredStrategy as Strategy

DTYPES = [np.dtype(getattr(ml_dtypes, name)) for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")]


def numbers(rank, count, dtype):
    """Return 0 or a half: all sums of 4 ranks are exact."""
    return (((np.arange(count) + rank) % 2) / 2).astype(dtype)


def test_float8_on_any_placement_is_reduced_and_moved(comm, placement):
    with Strategy(comm=comm) as strategy:
        for dtype, count in product(DTYPES, (3, 70_000)):
            own = numbers(comm.rank, count, dtype)
            everyone = np.stack([numbers(rank, count, np.float32) for rank in range(comm.size)])
            for op, want in (("sum", everyone.sum(0)), ("max", everyone.max(0)), ("mean", everyone.mean(0))):
                result = strategy.reduce(op, own)
                assert (result.dtype, result.shape) == (dtype, (count,))
                assert (result == want.astype(dtype)).all()
                assert same_everywhere(comm, result)
            assert strategy.broadcast(own).tolist() == numbers(0, count, dtype).tolist()
            gathered = strategy.gather(own, axis=0)
            assert (gathered.dtype, gathered.size) == (dtype, count * comm.size)
            assert strategy.gather_object(own)[-1].tolist() == numbers(comm.size - 1, count, dtype).tolist()
            assert all_reduce(strategy, "sum", own, out=own) is own
            assert (own == everyone.sum(0).astype(dtype)).all()


def test_float8_along_an_axis_leaves_out_ranks_without_rows(comm):
    """Some kinds of float8 have no infinity to begin with."""
    with Strategy(comm=comm) as strategy:
        for dtype, op in product(DTYPES, ("max", "min")):
            rows = np.full((1 - comm.rank % 2, 2), 0.5, dtype)
            assert strategy.reduce(op, rows, axis=0).tolist() == [0.5, 0.5], (op, dtype)
            assert not np.isnan(strategy.reduce(op, rows[:0], axis=0).astype(np.float32)).any()
