"""`reduce(..., axis=k)`: along axes on every rank, and over ranks, where ranks may have unlike numbers of rows."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from support.everywhere import raises_everywhere

import mpidist
from mpidist import Mirrored, MultiWorkerMirroredStrategy, PerReplica
from mpidist.errors import InvalidArgumentError

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size


def rows(rank, count, dtype):
    """Give a rank's rows [count, 3]: small whole numbers, exact in every dtype."""
    rng = np.random.default_rng(rank)
    return rng.integers(1, 4, (count, 3)).astype(dtype)


@pytest.mark.core
def test_mean_weighs_uneven_ranks_by_their_rows(placement):
    """Rank r holds r + 1 copies of r."""
    total = sum(rank * (rank + 1) for rank in range(SIZE))
    count = sum(rank + 1 for rank in range(SIZE))
    with MultiWorkerMirroredStrategy() as strategy:
        for dtype in (np.float32, np.int32):
            mine = np.full(RANK + 1, RANK, dtype)
            for value in (mine, PerReplica((mine,))):
                assert strategy.reduce("SUM", value, axis=0) == total
                assert strategy.reduce("MEAN", value, axis=0) == pytest.approx(total / count, rel=1e-6)


DTYPES = [np.int8, np.uint16, np.int32, np.uint32, np.int64, np.float16, np.float32, np.float64]
MEANS = {1: np.float32, 2: np.float32, 4: np.float64, 8: np.float64}


@pytest.mark.parametrize("counts", ["even", "uneven", "some empty"])
def test_reduce_along_axis_equals_numpy_on_all_rows(strategy, counts):
    """Empty parts count 0."""
    count = {"even": lambda rank: 2, "uneven": lambda rank: 1 + rank % 3, "some empty": lambda rank: rank + 1 & 1}
    for dtype in map(np.dtype, [*DTYPES, np.complex64, ml_dtypes.bfloat16]):
        everything = np.concatenate([rows(rank, count[counts](rank), dtype) for rank in range(SIZE)])
        mine = rows(RANK, count[counts](RANK), dtype)
        wide = everything.astype({"c": np.complex128, "i": np.int64, "u": np.int64}.get(dtype.kind, np.float64))
        for op in mpidist.ReduceOp:
            if dtype.kind == "c" and op.name in ("MIN", "MAX"):
                continue
            result = strategy.reduce(op, mine, axis=0)
            assert type(result) is np.ndarray
            assert result.shape == (3,)
            is_int_mean = op.name == "MEAN" and dtype.kind in "iu"
            assert result.dtype == (MEANS[dtype.itemsize] if is_int_mean else dtype)
            expected = getattr(wide, op.name.lower())(axis=0).astype(result.dtype)  # wraps where integers do
            tolerance = 1e-2 if dtype.itemsize == 2 and dtype.kind not in "iu" else 1e-6
            assert np.allclose(result.astype(np.complex128), expected.astype(np.complex128), rtol=tolerance), op


@pytest.mark.core
@pytest.mark.ranks(1, 3)
def test_reduce_along_axis_counts_axes_as_numpy(strategy):
    """One axis, and several: ranks have unlike numbers of rows then, and a mean is the sum of all over their count."""
    for op in mpidist.ReduceOp:
        parts = [np.random.default_rng(rank).integers(1, 5, (2, 3, 4)) for rank in range(SIZE)]
        for axis in (0, 1, 2, -1, -2, -3, np.int64(1)):
            result = strategy.reduce(op, parts[RANK], axis=axis)
            expected = getattr(np.concatenate(parts, axis), op.name.lower())(axis=axis)
            assert result.shape == expected.shape
            assert np.array_equal(result, expected), (op, axis)
        parts = [part[: 1 + rank % 2, :2] for rank, part in enumerate(parts)]
        for axes in ((0,), (-1, 0), (np.int64(0), 1, 2)):
            result = strategy.reduce(op, {"a": parts[RANK]}, axis=axes)["a"]
            expected = getattr(np.concatenate(parts), op.name.lower())(axis=axes)
            assert (type(result), result.shape) == (np.ndarray, expected.shape)
            assert np.allclose(result, expected, rtol=1e-15 if op is mpidist.ReduceOp.MEAN else 0), (op, axes)
        # as in NumPy: an empty tuple leaves every number where it is
        assert np.array_equal(strategy.reduce(op, parts[0], axis=()), strategy.reduce(op, parts[0], axis=None))
        result = strategy.reduce(op, np.ones(3, np.float32), axis=0)
        assert (type(result), result.shape, result.dtype) == (np.ndarray, (), np.float32)


@pytest.mark.ranks(1, 3)
def test_reduce_along_axis_of_no_rows_is_the_neutral_element(strategy):
    nothing = np.ones((0, 2), np.float32)
    assert strategy.reduce("SUM", nothing, axis=0).tolist() == [0, 0]
    assert strategy.reduce("PROD", nothing, axis=0).tolist() == [1, 1]
    assert strategy.reduce("MIN", nothing, axis=0).tolist() == [np.inf, np.inf]
    assert strategy.reduce("MAX", nothing.astype(np.int8), axis=0).tolist() == [-128, -128]
    assert strategy.reduce("MAX", nothing.astype(bool), axis=0).tolist() == [False, False]
    assert strategy.reduce("MIN", nothing.astype(bool), axis=0).tolist() == [True, True]
    with np.errstate(all="raise"):
        assert np.isnan(strategy.reduce("MEAN", nothing, axis=0)).all()


@pytest.mark.ranks(1, 3)
def test_means_do_not_wrap_or_overflow_on_their_way(strategy):
    assert strategy.reduce("MEAN", np.full(100, 100, np.int8), axis=0) == 100
    assert strategy.reduce("MEAN", np.full(3, 2**63, np.uint64), axis=0) == 2.0**63
    assert strategy.reduce("MEAN", np.full(100, 2**31 - 1, np.int32), axis=0) == 2**31 - 1
    assert strategy.reduce("MEAN", np.full(100, 60000, np.float16), axis=0) == 60000 // 32 * 32


@pytest.mark.ranks(3)
def test_layout_and_byte_order_are_each_ranks_own_affair(strategy):
    value = np.arange(24, dtype=np.float64).reshape(4, 6)
    views = [value, np.asfortranarray(value), value.astype(">f8"), np.repeat(value, 2, axis=1)[:, ::2]]
    expected = {"SUM": SIZE * value.sum(axis=1), "MEAN": value.mean(axis=1), "MAX": value.max(axis=1)}
    for turn in range(len(views)):
        mine = views[(RANK + turn) % len(views)]
        mine.flags.writeable = False
        for op in expected:
            result = strategy.reduce(op, mine, axis=1)
            assert np.array_equal(result, expected[op])
            assert result.dtype.isnative
        assert np.array_equal(mine, value)


@pytest.mark.ranks(3)
def test_nest_is_reduced_leaf_by_leaf(strategy):
    value = {"b": PerReplica((np.full((2, 2), RANK),)), "a": [np.ones(3, np.float32)]}
    result = strategy.reduce("MEAN", value, axis=0)
    assert list(result) == ["b", "a"]
    assert result["b"].tolist() == [(SIZE - 1) / 2] * 2
    assert result["a"][0] == 1.0
    assert strategy.reduce("MEAN", [], axis=0) == []


@pytest.mark.ranks(1, 3)
def test_mirrored_value_has_a_mean_and_no_sum(strategy):
    mirrored = Mirrored((np.array([1.0, 2.0, 6.0]),))
    assert strategy.reduce("MEAN", mirrored, axis=0) == 3.0
    assert strategy.reduce("MAX", mirrored, axis=0) == 6.0
    if SIZE == 1:
        assert strategy.reduce("SUM", mirrored, axis=0) == 9.0
        return
    for op in ("SUM", "PROD"):
        with pytest.raises(ValueError, match="Mirrored"):
            strategy.reduce(op, mirrored, axis=0)


@pytest.mark.ranks(1, 3)
def test_axis_or_value_that_cannot_be_is_refused(strategy):
    """The text names no address, so that all ranks have the same one."""
    wrong = [
        (np.ones((2, 3)), 2, InvalidArgumentError),
        (np.ones((2, 3)), -3, InvalidArgumentError),
        (1.0, 0, InvalidArgumentError),
        (np.ones(2, bool), 0, InvalidArgumentError),
        (np.array(["a"]), 0, InvalidArgumentError),
        *((np.ones(2), axis, TypeError) for axis in ("0", True, [0], (True,), 0.0, object())),
        *((np.ones((2, 2)), axes, InvalidArgumentError) for axes in ((0, 2), (0, 0), (1, -1))),
        (object(), 0, TypeError),
    ]
    for op in ("SUM", "MEAN"):
        for value, axis, kind in wrong:
            with raises_everywhere(WORLD, kind):
                strategy.reduce(op, value, axis=axis)
            assert strategy.reduce("SUM", 1) == SIZE


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16])
def test_means_of_small_integers_do_not_wrap_however_long_the_axis(strategy, dtype):
    largest = np.iinfo(dtype).max
    value = np.broadcast_to(np.array(largest, dtype), (2**31 // int(largest) + 10,))
    assert strategy.reduce("MEAN", value, axis=0) == largest
