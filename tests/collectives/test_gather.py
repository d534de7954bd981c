"""`Strategy.gather` and `ReplicaContext.all_gather`: arrays of all ranks, one after the other."""

from itertools import product

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from support.everywhere import raises_everywhere, same_everywhere
from support.placements import one_and_two_nodes
from support.replicas import inside

from mpidist import CommunicationOptions, MultiWorkerMirroredStrategy, PerReplica
from mpidist.context_stack import parts_of
from mpidist.errors import InvalidArgumentError

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size


@pytest.fixture(params=["gather", "all_gather"])
def gather(request, strategy):
    """In cross-replica and in replica context, with the same results."""
    if request.param == "gather":
        return strategy.gather
    return lambda value, axis: inside(strategy, "all_gather", value, axis)


def part(rank, axis=0):
    """Give a rank's part [r, 2, 3]: as many rows as its number, so that rank 0 has none; the axis is moved."""
    return np.moveaxis(np.arange(6 * rank).reshape(rank, 2, 3) + 100 * rank, 0, axis)


DTYPES = [bool, np.int8, np.uint16, np.int64, np.float16, ml_dtypes.bfloat16, np.float32, np.complex128, ">i4", ">f8"]
PLAIN = np.arange(12, dtype=np.float64).reshape(3, 4)
LAID_OUT = [
    np.repeat(PLAIN, 2, axis=0)[::2], np.asfortranarray(PLAIN), PLAIN.astype(">f8"), PLAIN[:, ::-1].copy()[:, ::-1],
]  # fmt: skip
# Name -> what a rank gives along an axis, and the axes.
PARTS = {
    "vectors": (lambda rank, axis: np.arange(3) + rank, [0]),
    "even": (lambda rank, axis: np.full((1, 2, 2), rank), [0, 1, 2, -1]),
    "uneven": (lambda rank, axis: part(rank, axis), [0, 1, 2, -1, -3, np.int64(1)]),
    "no rows": (lambda rank, axis: np.empty((0, 3), np.float32), [0]),
    "no columns": (lambda rank, axis: np.empty((2, 0), np.float32), [0, 1]),
    "large": (lambda rank, axis: np.full((rank + 1, 30_000), rank, np.float32), [0]),
    **{
        f"layouts {turn}": (lambda rank, axis, turn=turn: LAID_OUT[(rank + turn) % 4], [0, 1]) for turn in range(4)
    },
    **{
        str(dtype): (lambda rank, axis, dtype=dtype: np.arange(3 * rank + 3).reshape(-1, 3).astype(dtype), [0])
        for dtype in DTYPES
    },
}  # fmt: skip


@pytest.mark.core
@pytest.mark.whole
def test_gather_of_any_parts_puts_them_in_rank_order(gather):
    """Layout and byte order are each rank's own affair; arguments are read alone, and results are the caller's."""
    for name, (give, axes) in PARTS.items():
        for axis, _ in product(axes, range(2)):
            own = give(RANK, axis)
            before = own.copy()
            own.flags.writeable = False
            result, wanted = gather(own, axis), np.concatenate([give(rank, axis) for rank in range(SIZE)], axis)
            assert np.array_equal(result, wanted), (name, axis)
            assert (result.dtype, result.shape) == (own.dtype.newbyteorder("="), wanted.shape), name
            assert result.flags.c_contiguous
            assert same_everywhere(WORLD, result)
            result[...] = 0  # the next one is another
            assert np.array_equal(own, before)


@pytest.mark.usefixtures("placement")
def test_gather_on_any_nodes_is_in_rank_order():
    with MultiWorkerMirroredStrategy() as strategy:
        result = strategy.gather(part(RANK), 0)
    assert np.array_equal(result, np.concatenate([part(rank) for rank in range(SIZE)]))


@pytest.mark.ranks(1, 3)
def test_nest_is_gathered_leaf_by_leaf(gather):
    """No leaf at all is a nest too."""
    value = [np.ones((1, RANK + 1)), {"b": np.array([[[1, 2], [1, 2]]]), "a": PerReplica((np.full((1, 1), RANK),))}]
    result = gather(value, 1)
    assert result[0].shape == (1, SIZE * (SIZE + 1) // 2)
    assert list(result[1]) == ["b", "a"]
    assert result[1]["b"].shape == (1, 2 * SIZE, 2)
    assert result[1]["a"].tolist() == [list(range(SIZE))]
    assert gather([], 0) == []


@pytest.mark.ranks(1, 3)
def test_gather_of_scalars_and_wrong_axes_raises_on_all_ranks(gather):
    for value in (1.0, 3, np.float32(1), np.ones(()), [np.ones(2), 1.0]):
        with raises_everywhere(WORLD, InvalidArgumentError, "gather: a scalar has no axis 0"):
            gather(value, 0)
    wrong = [
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
def test_options_are_options(strategy):
    options = CommunicationOptions(timeout_seconds=600)
    assert inside(strategy, "all_gather", np.ones(1), 0, options).shape == (SIZE,)
    with pytest.raises(TypeError, match="options must be"):
        inside(strategy, "all_gather", np.ones(1), 0, "fast")


@one_and_two_nodes
@pytest.mark.usefixtures("placement")
def test_gather_and_broadcast_of_many_small_arrays_make_few_messages():
    """Of any dtypes, so that numbers are not aligned; a large and an empty one alone, as all of unequal lengths."""

    def list_of(rank, extra=0):
        small = [np.full((3 + extra, 1 + at % 5), rank + at % 3, DTYPES[at % len(DTYPES)]) for at in range(100)]
        return [np.arange(50_000.0) + rank, *small, np.ones((0, 3)), np.asfortranarray(np.full((2, 4), rank))]

    with MultiWorkerMirroredStrategy() as strategy:
        traffic = parts_of(strategy).group.levels.world.traffic
        traffic.clear()
        sent = strategy.broadcast(list_of(RANK), SIZE - 1)
        assert all(map(np.array_equal, sent, list_of(SIZE - 1)))
        for step in (0, 1):
            gathered = inside(strategy, "all_gather", list_of(RANK, step * RANK), 0)
            everyone = [list_of(rank, step * rank) for rank in range(SIZE)]
            assert all(map(np.array_equal, gathered, map(np.concatenate, zip(*everyone, strict=True))))
            assert traffic.calls == {"broadcast": 4, "all_gather": 4 + step * (1 + 103)}
