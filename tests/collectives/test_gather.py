"""`Strategy.gather` and `ReplicaContext.all_gather`: arrays of all ranks, one after the other."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from support.everywhere import raises_everywhere, same_everywhere
from support.replicas import inside

from mpidist import CommunicationOptions, MultiWorkerMirroredStrategy, PerReplica, Strategy
from mpidist.errors import InvalidArgumentError

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size

Gather = Callable[..., Any]


@pytest.fixture(params=["gather", "all_gather"])
def gather(request: pytest.FixtureRequest, strategy: Strategy) -> Gather:
    """In cross-replica and in replica context, with the same results."""
    if request.param == "gather":
        return strategy.gather
    return lambda value, axis: inside(strategy, "all_gather", value, axis)


def part(rank: int, axis: int = 0) -> Any:
    """Give a rank's part [r, 2, 3]: as many rows as its number, so that rank 0 has none; the axis is moved."""
    return np.moveaxis(np.arange(6 * rank).reshape(rank, 2, 3) + 100 * rank, 0, axis)


@pytest.mark.core
def test_parts_come_in_rank_order(gather: Gather) -> None:
    """Even ones, and uneven ones."""
    for value, axes in (
        (np.arange(3), (0,)),
        (np.array([[1, 2, 3]]), (0, 1)),
        (np.ones((1, 2, 2), int), (0, 1, 2, -1)),
    ):
        for axis in axes:
            assert np.array_equal(gather(value, axis), np.concatenate([value] * SIZE, axis))
    for axis in (0, 1, 2, -1, -3, np.int64(1)):
        result = gather(part(RANK, axis), axis)
        assert np.array_equal(result, np.concatenate([part(rank, axis) for rank in range(SIZE)], axis))
        assert result.flags.c_contiguous
        assert same_everywhere(WORLD, result)


def test_placement_does_not_matter(placement: tuple[int, ...]) -> None:
    with MultiWorkerMirroredStrategy() as strategy:
        result = strategy.gather(part(RANK), 0)
    assert np.array_equal(result, np.concatenate([part(rank) for rank in range(SIZE)]))


@pytest.mark.ranks(1, 3)
def test_nothing_from_any_rank_is_an_empty_array(gather: Gather) -> None:
    for shape, axis in (((0, 3), 0), ((2, 0), 0), ((2, 0), 1)):
        result = gather(np.empty(shape, np.float32), axis)
        assert result.dtype == np.float32
        assert result.shape == np.concatenate([np.empty(shape)] * SIZE, axis).shape


DTYPES = [bool, np.int8, np.uint16, np.int64, np.float16, ml_dtypes.bfloat16, np.float32, np.complex128, ">i4", ">f8"]


@pytest.mark.ranks(1, 3)
def test_every_dtype_may_be_gathered(gather: Gather) -> None:
    for dtype in DTYPES:
        values = [np.arange(3 * (rank + 1)).reshape(-1, 3).astype(dtype) for rank in range(SIZE)]
        result = gather(values[RANK], 0)
        assert result.dtype == np.dtype(dtype).newbyteorder("=")
        assert result.dtype.isnative
        assert np.array_equal(result, np.concatenate(values))


@pytest.mark.ranks(1, 3)
def test_layout_and_byte_order_are_each_ranks_own_affair(gather: Gather) -> None:
    """Strided, Fortran-ordered, read-only and foreign arrays, side by side and unchanged."""
    plain = np.arange(12, dtype=np.float64).reshape(3, 4)
    kinds = [
        np.repeat(plain, 2, axis=0)[::2],
        np.asfortranarray(plain),
        plain.astype(">f8"),
        plain[:, ::-1].copy()[:, ::-1],
    ]
    for turn in range(len(kinds)):
        mine = kinds[(RANK + turn) % len(kinds)]
        mine.flags.writeable = False
        for axis in (0, 1):
            assert np.array_equal(gather(mine, axis), np.concatenate([plain] * SIZE, axis))
        assert np.array_equal(mine, plain)


@pytest.mark.ranks(1, 3)
def test_nest_is_gathered_leaf_by_leaf(gather: Gather) -> None:
    """No leaf at all is a nest too."""
    value = [np.ones((1, RANK + 1)), {"b": np.array([[[1, 2], [1, 2]]]), "a": PerReplica((np.full((1, 1), RANK),))}]
    result = gather(value, 1)
    assert result[0].shape == (1, SIZE * (SIZE + 1) // 2)
    assert list(result[1]) == ["b", "a"]
    assert result[1]["b"].shape == (1, 2 * SIZE, 2)
    assert result[1]["a"].tolist() == [list(range(SIZE))]
    assert gather([], 0) == []


@pytest.mark.ranks(1, 3)
def test_result_belongs_to_the_caller(gather: Gather) -> None:
    value = np.ones(2)
    result = gather(value, 0)
    result[...] = 7
    assert value.tolist() == [1, 1]
    assert gather(value, 0).tolist() == [1] * 2 * SIZE


def test_large_parts_are_gathered(gather: Gather) -> None:
    value = np.full((RANK + 1, 30_000), RANK, np.float32)
    result = gather(value, 0)
    assert np.array_equal(result[:, 0], np.repeat(np.arange(SIZE), np.arange(SIZE) + 1))
    assert (result == result[:, :1]).all()


@pytest.mark.ranks(1, 3)
def test_what_cannot_be_gathered_is_refused_on_all_ranks(gather: Gather) -> None:
    for value in (1.0, 3, np.float32(1), np.ones(()), [np.ones(2), 1.0]):
        with raises_everywhere(WORLD, InvalidArgumentError, "gather: a scalar has no axis 0"):
            gather(value, 0)
    wrong: list[tuple[Any, Any, type[Exception]]] = [
        *((np.ones((2, 3)), axis, InvalidArgumentError) for axis in (2, -3)),
        *((np.ones((2, 3)), axis, TypeError) for axis in ("0", None, 1.0, True, object())),
        *((np.array([item]), 0, InvalidArgumentError) for item in ("a", object())),
        *((item, 0, TypeError) for item in (object(), "text")),
    ]
    for value, axis, kind in wrong:
        with raises_everywhere(WORLD, kind):
            gather(value, axis)
        assert gather(np.ones(1), 0).shape == (SIZE,)


@pytest.mark.ranks(1, 3)
def test_options_are_options(strategy: Strategy) -> None:
    options = CommunicationOptions(timeout_seconds=600)
    assert inside(strategy, "all_gather", np.ones(1), 0, options).shape == (SIZE,)
    with pytest.raises(TypeError, match="options must be"):
        inside(strategy, "all_gather", np.ones(1), 0, "fast")
