"""Reductions of `IndexedSlices`: rows of all ranks, in rank order, those of one index added."""

import numpy as np
import pytest
from support.everywhere import raises_everywhere, same_everywhere

import mpidist
from mpidist import IndexedSlices
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.errors import InvalidArgumentError

pytestmark = pytest.mark.core

SHAPE = (9, 2)


def slices(rank, dtype=np.float64):
    """Make `rank` rows, of which rows 0 and 2 have one index: none for rank 0."""
    return IndexedSlices(np.full((rank, 2), rank + 0.5).astype(dtype), [5, 1, 5][:rank], SHAPE)


def dense(result):
    array = np.zeros(SHAPE)
    np.add.at(array, result.indices, np.asarray(result.values, np.float64))
    return array


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(
    ("op", "dtype"),
    [("sum", np.float64), ("mean", np.float32), ("mean", np.float16), ("sum", np.int32), ("mean", np.int32)],
)
def test_indexed_slices_have_the_dense_result_and_the_same_bits_on_every_rank(strategy, comm, op, dtype):
    wanted = sum(dense(slices(rank, dtype)) for rank in range(comm.size)) / (comm.size if op == "mean" else 1)
    result = strategy.reduce(op, slices(comm.rank, dtype))
    is_whole = dtype is np.int32 and op == "sum"
    assert result.dense_shape == SHAPE
    assert result.values.dtype == (np.int32 if is_whole else np.float64 if dtype is np.int32 else dtype)
    np.testing.assert_allclose(dense(result), wanted, rtol=1e-3 if dtype is np.float16 else 1e-6)
    assert len({*result.indices.tolist()}) == len(result.indices)  # an index occurs once
    assert same_everywhere(comm, result.values)


def test_indexed_slices_without_repeated_indices_are_in_rank_order(strategy):
    rank, size = strategy.rank, strategy.size
    result = strategy.reduce("sum", IndexedSlices(np.full((1, 1), rank), np.array([size - rank])))
    assert result.indices.tolist() == [size - one for one in range(size)]
    assert result.values.tolist() == [[one] for one in range(size)]
    empty = strategy.reduce("mean", IndexedSlices(np.zeros((0, 3)), []))
    assert (empty.values.shape, empty.indices.shape) == ((0, 3), (0,))


def test_indexed_slices_of_half_precision_are_rounded_once(strategy):
    values = np.full((3, 1), 2049, np.float16)  # float16 has 2048 and 2050
    result = strategy.reduce("mean", IndexedSlices(values, [0, 0, 0]))
    assert result.values.tolist() == [[np.float16(3 * float(values[0, 0]))]]


def test_indexed_slices_may_have_another_byte_order(strategy):
    """On one rank, too, as an array out of a file; results are in this machine's order."""
    order = ">" if strategy.rank == 0 else "<"
    for dtype, indices in (("f4", [1, 1]), ("f4", [0, 1]), ("i4", [1, 1]), ("f2", [1, 1])):
        own = IndexedSlices(np.ones((2, 1), order + dtype), np.array(indices, order + "i4"))
        result = strategy.reduce("sum", own)
        assert result.values.sum() == 2 * strategy.size, (dtype, indices)
        assert result.values.dtype.isnative, (dtype, indices)


def test_indexed_slices_and_dense_leaves_are_reduced_in_one_nest(strategy):
    rank, size = strategy.rank, strategy.size
    value = {"b": np.full(2, rank), "a": [slices(rank), 2.0], "c": slices(size - 1 - rank)}
    for result in (
        strategy.reduce("sum", value),
        strategy.run(lambda: mpidist.get_replica_context().all_reduce("sum", value)),
    ):
        assert result["b"].tolist() == [sum(range(size))] * 2
        assert result["a"][1] == 2.0 * size
        assert np.array_equal(dense(result["a"][0]), dense(result["c"]))
        assert np.array_equal(dense(result["c"]), sum(dense(slices(one)) for one in range(size)))


def test_indexed_slices_in_a_batch_go_to_their_destinations(strategy):
    last = strategy.size - 1
    pairs = ((value, to) for value, to in [(slices(1), last), (np.ones(2), "all"), (slices(1), 0)])
    to_last, ones, to_first = strategy.extended.batch_reduce_to("mean", pairs)
    assert (to_last is not None, to_first is not None) == (strategy.rank == last, strategy.rank == 0)
    assert ones.tolist() == [1, 1]
    for result in filter(None, (to_last, to_first)):
        assert (result.values.tolist(), result.indices.tolist()) == ([[1.5, 1.5]], [5])


def test_indexed_slices_of_replicas_have_the_same_bits_on_any_number_of_ranks(comm):
    def contribution():
        replica = mpidist.get_replica_context().replica_id_in_sync_group
        own = IndexedSlices(np.full((2, 1), 0.1 * replica, np.float32), [0, replica % 2])
        return mpidist.get_replica_context().all_reduce("sum", [own, np.ones(1)])

    with Strategy(comm=comm, replicas=12) as strategy:
        rows, ones = strategy.run(contribution)
        own = strategy.experimental_distribute_values_from_function(
            lambda context: IndexedSlices(np.ones((1, 1)), [context.replica_id_in_sync_group])
        )
        counts = strategy.reduce("sum", own)
    first = rows.values[0]
    wanted = np.zeros((2, 1), np.float32)
    for replica in range(12):
        np.add.at(wanted, [0, replica % 2], np.float32(0.1 * replica))
    assert (first.indices.tolist(), ones.values[0].tolist()) == ([0, 1], [12])
    np.testing.assert_allclose(first.values, wanted, rtol=1e-6)
    assert first.values.tobytes().hex() == "9a99194166666640"
    assert counts.indices.tolist() == [*range(12)]


@pytest.mark.ranks(2, 3)
def test_indexed_slices_that_differ_raise_on_every_rank(comm, strategy):
    rank = int(comm.rank > 0)
    for value, text in (
        (IndexedSlices(np.ones((1, 2 + rank)), [0]), r"float64\[\*,3\]"),
        (slices(1, "f4" if rank else "f8"), r"float32\[\*,2\]"),
        (slices(1) if rank else np.ones(SHAPE), "SUM of IndexedSlices"),
        ([slices(1), slices(1) if rank else 1.0], "form of the nest"),
        (IndexedSlices(np.ones((1, 2)), [0], (9 + rank, 2)), r"dense shape \(10, 2\)"),
        (IndexedSlices(np.ones((1, 2)), [9 if rank else 8], SHAPE), "ranks? 1.*must be in 0 to 8, got 9"),
        (IndexedSlices(np.ones((1, 2)), np.array([2**63 + 1], np.uint64), SHAPE), "got 9223372036854775809"),
        (IndexedSlices(np.ones((2, 2)), [3, -2 if rank else 1]), "ranks? 1.*must be 0 or more, got -2"),
        (IndexedSlices(np.ones((1 + rank, 2)), [0]), r"got indices \[1\] and values \[2, 2\]"),
    ):
        with raises_everywhere(comm, InvalidArgumentError, text):
            strategy.reduce("sum", value)
    strategy.barrier()


def test_indexed_slices_refuse_undefined_calls(comm, strategy):
    def start():
        return mpidist.get_replica_context().start_all_reduce("sum", slices(1)).wait()

    for kind, text, call in (
        (ValueError, "they have SUM and MEAN", lambda: strategy.reduce("max", slices(1))),
        (ValueError, "out takes no IndexedSlices", lambda: strategy.reduce("sum", slices(1), out=slices(1))),
        (TypeError, "must be integers", lambda: strategy.reduce("sum", IndexedSlices([[1.0]], [0.5]))),
        (TypeError, "mask would be", lambda: strategy.reduce("sum", IndexedSlices([[1.0]], np.ma.array([1], mask=1)))),
        (ValueError, "dtype bool", lambda: strategy.reduce("sum", IndexedSlices([[True]], [0]))),
        (TypeError, "sum values times weights", lambda: strategy.reduce("mean", slices(1), weight=2)),
        (TypeError, "without axis", lambda: strategy.reduce("sum", slices(1), axis=0)),
        (TypeError, "pass the arrays", lambda: strategy.gather({"rows": slices(1)}, 0)),
        (TypeError, "pass the arrays", lambda: strategy.broadcast(slices(1))),
        (TypeError, "call one of them", lambda: strategy.run(start)),
    ):
        with raises_everywhere(comm, kind, text):
            call()
    strategy.barrier()
