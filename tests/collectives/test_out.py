"""Results in the caller's own arrays: `out=`. Layouts and dtypes of outs are rows of test_reductions."""

import warnings
from itertools import product

import numpy as np
import pytest
from support.everywhere import raises_everywhere
from support.reductions import LARGE, LAYOUTS, all_reduce, numbers, total
from tensors import Tensor

import mpidist
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.errors import InvalidArgumentError
from mpidist.transport.half import bfloat16

pytestmark = pytest.mark.core


@pytest.fixture
def placed(comm, placement):
    with Strategy(comm=comm) as made:
        yield made


@pytest.mark.parametrize("count", [50, 300_000])
def test_outs_that_overlap_arguments_take_results(strategy, count):
    size = strategy.size
    value, other = np.ones(count), np.zeros(count)
    all_reduce(strategy, "SUM", [value, value], out=[value, other])
    assert (value == size).all()
    assert (other == size).all()
    one, two = np.full(count, 1.0), np.full(count, 2.0)
    all_reduce(strategy, "SUM", [one, two], out=[two, one])
    assert (one == 2 * size).all()
    assert (two == size).all()
    for make, shift in product((np.zeros, strategy.symmetric_empty), (1, -1, 7)):
        memory = make(count + 20, np.float32)
        value, out = memory[10:-10], memory[10 + shift : count + 10 + shift]
        value[...] = numbers(strategy, (count,))
        all_reduce(strategy, "SUM", value, out=out)
        assert (out == total(strategy, (count,))).all()
    value = numbers(strategy, (count,))
    all_reduce(strategy, "SUM", value, out=value[::-1])
    assert (value[::-1] == total(strategy, (count,))).all()
    # those of others, whichever is sent first
    memory = np.repeat(np.float32([1, 2, 3, 4]), count)
    one, two, three, four = memory.reshape(4, count)
    middle = memory[count // 2 : count // 2 + count]
    all_reduce(strategy, "SUM", [one.copy(), middle, three, four], out=[four, one, two, three])
    expected = [np.repeat(np.float32([1, 2]), count // 2), [3], [4], [1]]
    for row, right in zip(memory.reshape(4, count), expected, strict=True):
        assert (row == np.asarray(right) * size).all()
    # out 1 overwrites the first half of argument 0, at whose start the empty out 2 lies
    memory, result = np.repeat([1.0, 2.0, 3.0], count), np.zeros(2 * count)
    values = [memory[count:], np.full(2 * count, 5.0), np.ones(0)]
    all_reduce(strategy, "SUM", values, out=[result, memory[: 2 * count], memory[count:][:0]])
    assert (result == size * np.repeat([2.0, 3.0], count)).all()
    assert (memory[: 2 * count] == size * 5).all()


def test_outs_that_share_bounds_and_no_memory_are_no_overlap(strategy):
    matrix = np.zeros((4, 3))
    all_reduce(strategy, "SUM", [np.full(4, column) for column in (1.0, 2.0, 3.0)], out=list(matrix.T))
    assert (matrix == [strategy.size * column for column in (1, 2, 3)]).all()
    memory = np.ones(10)
    all_reduce(strategy, "SUM", [memory, memory[5:5]], out=[memory, memory[5:5]])
    assert (memory == strategy.size).all()
    # rows begin 6 numbers apart and are 8 long, in steps of 4: 0, 4, 8 and 6, 10, 14
    memory, places = np.zeros(15), [0, 4, 8, 6, 10, 14]
    out = np.lib.stride_tricks.as_strided(memory, (2, 3), (48, 32))
    all_reduce(strategy, "SUM", np.arange(1.0, 7.0).reshape(2, 3), out=out)
    assert (memory[places] == strategy.size * np.arange(1.0, 7.0)).all()
    assert np.delete(memory, places).tolist() == [0] * 9


@pytest.mark.parametrize("shape", [(4, 6), LARGE])
def test_arrays_of_other_libraries_take_the_result(strategy, shape):
    """Those that can be written through DLPack: new ones, arguments themselves, and beside others."""
    size = strategy.topology.size
    value, out, other = Tensor(numbers(strategy, shape)), Tensor(np.zeros(shape, np.float32)), np.zeros(3)
    if not np.from_dlpack(out).flags.writeable:  # in older versions of NumPy
        with pytest.raises(InvalidArgumentError, match="out 0 must be an array that can be written"):
            all_reduce(strategy, "SUM", value, out=out)
        return
    for _ in range(2):
        assert all_reduce(strategy, "SUM", value, out=out) is out
        assert (out.array == total(strategy, shape)).all()
        assert (value.array == numbers(strategy, shape)).all()
    nest = {"a": value, "b": [np.ones(3)]}
    assert all_reduce(strategy, "SUM", nest, out={"a": value, "b": [other]})["a"] is value
    assert (value.array == out.array).all()
    assert (other == size).all()
    started = strategy.run(lambda: mpidist.get_replica_context().start_all_reduce("SUM", other, out=Tensor(other)))
    assert (started.wait().array == size * size).all()
    all_reduce(strategy, "MEAN", np.full(shape, 3, np.int8), out=value)
    assert (value.array == 3).all()


@pytest.mark.ranks(3)
def test_out_of_a_subclass_takes_the_result(strategy):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        out = np.asmatrix(np.zeros((2, 2)))
    assert all_reduce(strategy, "SUM", np.ones((2, 2)), out=out) is out
    assert (out == strategy.topology.size).all()


_SHARED = np.zeros(9)
_READ_ONLY = np.zeros(3)
_READ_ONLY.flags.writeable = False


class Readable:
    def __array__(self, dtype=None, copy=None):
        return np.zeros(3)


WRONG_OUTS = [
    (np.ones(3), np.zeros(3, np.float32), r"out 0 must be an array f64\[3\], got f32\[3\]"),
    (np.ones(3), np.zeros(4), r"out 0 must be an array f64\[3\], got f64\[4\]"),
    (np.ones(3), np.zeros((1, 3)), r"got f64\[1,3\]"),
    (np.ones(3), _READ_ONLY, "out 0 .* read-only"),
    (np.ones(3), np.lib.stride_tricks.as_strided(_SHARED, (3,), (0,)), "elements that share memory"),
    (np.ones((4, 3)), np.lib.stride_tricks.as_strided(_SHARED, (4, 3), (8, 8)), "elements that share mem"),
    (np.ones(3), np.lib.stride_tricks.as_strided(_SHARED, (3,), (4,)), "elements that share memory"),
    (np.ones((3, 2)), np.lib.stride_tricks.as_strided(_SHARED, (3, 2), (16, 32)), "elements that share me"),
    ([1.0, 2.0], [0.0, 0.0], "out 0 must be an array f64.*got float"),
    (np.ones(2), [0.0, 0.0], "the same form"),
    ([np.ones(1), np.ones(1)], [np.zeros(1)], "the same form"),
    ({"a": np.ones(1)}, {"b": np.zeros(1)}, "the same form"),
    ([np.ones(9), np.ones(9)], [_SHARED, _SHARED], "out 0 and out 1 share memory, .* leave one out"),
    ([np.ones(5), np.ones(5)], [_SHARED[4:], _SHARED[:5]], "out 0 and out 1 share memory"),
    (np.ones(()), 0.0, "out 0 must be an array f64.*got float"),
    (np.float32(1), np.float32(0), r"out 0 must be an array f32\[\], got float32"),
    (*[[1.0]] * 2, "out 0 must be an array f64.*got float"),
    (np.ones(3), Readable(), r"out 0 must be an array f64\[3\], got Readable"),
    (np.ones(3), Tensor(np.zeros(3, np.int8)), r"f64\[3\], got i8\[3\]"),
    ([np.ones(9)] * 2, [Tensor(_SHARED), _SHARED], "out 0 and out 1 share memory"),
    (np.ones(3), Tensor(_READ_ONLY), "read-only|readonly"),
]


@pytest.mark.ranks(1, 3)
def test_out_of_wrong_shape_dtype_or_kind_is_refused(strategy, comm):
    for value, out, text in WRONG_OUTS:
        with raises_everywhere(comm, InvalidArgumentError, text):
            all_reduce(strategy, "SUM", value, out=out)
        assert all_reduce(strategy, "SUM", 1) == comm.size
    with raises_everywhere(comm, TypeError, "masked array, whose mask would be lost"):
        all_reduce(strategy, "SUM", np.ones(2), out=np.ma.masked_array([0.0, 0.0], [0, 1]))
    value = np.ones(3, np.int64)
    with raises_everywhere(comm, InvalidArgumentError, r"out 0 must be an array f64\[3\], got i64\[3\]"):
        all_reduce(strategy, "MEAN", value, out=value)
    assert (value == 1).all()
    for op in ("sum", "mean"):
        with raises_everywhere(comm, InvalidArgumentError, r"out 0 must be an array f64\[3\], got f64\[2\]"):
            strategy.reduce(op, np.ones((2, 3)), axis=0, out=np.zeros(2))


@pytest.mark.ranks(2, 3)
def test_outs_of_ranks_may_differ_in_place_and_not_in_kind(strategy, comm):
    """An array of the node is written together: the others would take the next message for it."""
    out = np.zeros(3 if comm.rank else 4)
    with raises_everywhere(comm, InvalidArgumentError, r"rank 0: .*got f64\[4\]"):
        all_reduce(strategy, "SUM", np.ones(3), out=out)
    assert not out.any()
    given = np.zeros(3) if comm.rank == 0 else None
    assert (all_reduce(strategy, "SUM", np.ones(3), out=given) == comm.size).all()
    of_node = strategy.symmetric_empty(3, np.float64, per_node=True)
    with raises_everywhere(comm, InvalidArgumentError, "out"):
        all_reduce(strategy, "SUM", np.ones(3), out=np.zeros(3) if comm.rank == comm.size - 1 else of_node)


def test_out_per_node_takes_the_result_once(placed, comm):
    """All ranks of a node read it; whole, and in part."""
    size, context = comm.size, mpidist.get_replica_context
    for shape in ((4, 6), LARGE):
        out = placed.symmetric_empty(shape, np.float32, per_node=True)
        for step in range(2):
            value = numbers(placed, shape) + np.float32(step)
            all_reduce(placed, "SUM", [value, np.float32(1)], out=[out, np.zeros((), np.float32)])
            assert (out == total(placed, shape) + np.float32(step * size)).all()
        comm.Barrier()
        out[...] = 1  # every rank of the node writes the same
        comm.Barrier()
        all_reduce(placed, "SUM", numbers(placed, shape)[0], out=out[0])
        assert (out[0] == total(placed, shape)[0]).all()
        assert (out[1:] == 1).all()
        comm.Barrier()
        all_reduce(placed, "MEAN", out, out=out)  # the argument too
        assert (out[1:] == 1).all()
    whole, mean = (placed.symmetric_empty(count, "f8", per_node=True) for count in (2 * size, 3))
    gathered(placed, np.full(2, float(placed.rank)), 0, whole)
    assert (whole == np.repeat(np.arange(size), 2)).all()
    placed.barrier()
    placed.reduce("mean", np.full(3, float(placed.rank)), weight=1, out=mean)
    assert np.allclose(mean, (size - 1) / 2)
    with raises_everywhere(comm, InvalidArgumentError, "out is a per-node array"):
        placed.run(lambda: context().reduce_scatter("sum", np.ones(3 * size), out=mean))


def test_out_with_changed_layout_takes_the_result(strategy, comm):
    """`transpose` makes another array; this one stays the same."""
    for length in (4, 300):
        value = np.empty((length, length))
        other = np.empty_like(value)
        for given in value, [value, other]:
            for _ in range(2):
                value[...] = other[...] = 1
                all_reduce(strategy, "SUM", given, out=given)
                assert (value == comm.size).all()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # NumPy 2.4 deprecates it
                    value.strides = value.strides[::-1]


def test_reduce_of_both_infinities_is_nan(strategy, comm):
    """Gradients of a scaled loss: infinities of both signs. Although one rank lets NumPy raise."""
    infinities = np.full(comm.size, np.inf if comm.rank % 2 else -np.inf)
    for dtype, count in product((np.dtype(np.float16), bfloat16(), np.dtype(np.float32)), (1, 3)):
        values = [infinities.astype(dtype) for _ in range(count)]
        with np.errstate(all="raise" if comm.rank == 0 else "warn"), warnings.catch_warnings():
            warnings.simplefilter("error")
            sums = strategy.reduce("SUM", values)
            part = strategy.run(lambda value=values[0]: mpidist.get_replica_context().reduce_scatter("SUM", value))
            largest = np.full((2, 1), np.finfo(np.float32).max, np.float32)
            for overflowed in (
                strategy.reduce("SUM", largest, axis=0),
                strategy.reduce("MEAN", largest, weight=2),
                strategy.reduce("SUM", mpidist.IndexedSlices(largest, [0, 0])).values,
            ):
                assert np.isinf(overflowed).all()
        for result in (*sums, part):
            assert np.isnan(result.astype(np.float32)).all() == (comm.size > 1)


@pytest.mark.ranks(2, 3)
def test_out_changed_between_calls_is_checked_again(strategy, comm):
    """Of a list that was checked, one is replaced, made read-only, or reshaped: all ranks hear of it."""

    def into(outs):
        return all_reduce(strategy, "SUM", [np.ones(6), np.ones(4)], out=outs)

    changes = [
        (r"out 1 must be an array .*\[4\], got .*\[5\]", lambda outs: outs.__setitem__(1, np.empty(5))),
        ("share memory", lambda outs: outs.__setitem__(1, outs[0][:4])),
        ("read-only", lambda outs: outs[1].setflags(write=False)),
        (r"\[2,2\]", lambda outs: outs.__setitem__(1, outs[1].reshape(2, 2))),
        (r"got f32\[4\]", lambda outs: outs.__setitem__(1, np.empty(4, np.float32))),
        ("same form", lambda outs: outs.__setitem__(1, [0.0] * 4)),
    ]
    for text, change in changes:
        outs = [np.empty(6), np.empty(4)]
        for _ in range(3):
            assert all((out == comm.size).all() for out in into(outs))
        change(outs)
        with raises_everywhere(comm, Exception, text):
            into(outs)


@pytest.mark.ranks(1, 3)
def test_out_of_reduce_along_an_axis_takes_the_result(strategy):
    value = np.arange(6.0).reshape(2, 3) + strategy.rank
    total = strategy.size * np.arange(6.0).reshape(2, 3) + sum(range(strategy.size))
    for op, right in (("sum", total.sum(axis=0)), ("mean", total.mean(axis=0) / strategy.size)):
        row = np.zeros(3)
        assert strategy.reduce(op, value, axis=0, out=row) is row
        assert np.allclose(row, right, rtol=1e-15)


def gathered(strategy, value, axis, out):
    return strategy.run(lambda: mpidist.get_replica_context().all_gather(value, axis, out=out))


def test_outs_of_all_gather_and_reduce_scatter_take_results(placed):
    """Of each layout and axis; the whole may hold the part that is sent, or is taken, and other parts."""
    size, rank, context = placed.size, placed.rank, mpidist.get_replica_context

    def scatter(op, value, axis, out):
        return placed.run(lambda: context().reduce_scatter(op, value, axis, out=out))

    for layout, axis in product(LAYOUTS, (0, 1, -1)):
        out = LAYOUTS[layout]((2 * size, 3) if axis == 0 else (2, 3 * size), np.dtype(np.int32))
        assert gathered(placed, [np.full((2, 3), rank, np.int32)], axis, [out])[0] is out
        assert (out == np.concatenate([np.full((2, 3), other) for other in range(size)], axis)).all()
        value = np.arange(6.0 * size).reshape((2 * size, 3) if axis == 0 else (3, 2 * size))
        part = LAYOUTS[layout]((2, 3) if axis == 0 else (3, 2), np.dtype(np.float64))
        for op in ("sum", "mean"):
            assert scatter(op, value, axis, part) is part
            assert np.allclose(part, np.split(value * (size if op == "sum" else 1), size, axis)[rank], rtol=1e-15)
    unlike = np.zeros(size * (size + 1) // 2)
    assert gathered(placed, np.full(rank + 1, float(rank)), 0, unlike) is unlike
    assert (unlike == np.repeat(np.arange(size), np.arange(size) + 1)).all()
    for shift in (0, 1):
        whole, own = np.zeros(3 * size), (rank + shift) % size
        whole[3 * own : 3 * own + 3] = rank
        gathered(placed, whole[3 * own : 3 * own + 3], 0, whole)
        assert (whole == np.repeat(np.arange(size), 3)).all()
    value = np.arange(4.0 * size)
    scatter("sum", value, 0, value[4 * rank : 4 * rank + 4])
    assert (value[4 * rank : 4 * rank + 4] == size * np.arange(4.0 * rank, 4 * rank + 4)).all()


@pytest.mark.ranks(2, 3)
def test_out_of_all_gather_that_does_not_fit_on_one_rank_is_refused_on_all(comm, strategy):
    for own, length in ((2, 2 * comm.size), (comm.rank + 1, comm.size * (comm.size + 1) // 2)):
        out = np.zeros(length + (comm.rank == 1))
        text = f"out 0 of rank 1 has length {length + 1} along axis 0, .* {length}"
        with raises_everywhere(comm, InvalidArgumentError, text):
            gathered(strategy, np.ones(own), 0, out)
        assert strategy.reduce("sum", 1.0) == comm.size


def test_outs_of_replicas_take_gathers_and_parts(comm):
    replicas = 5

    def step():
        context = mpidist.get_replica_context()
        assert context is not None
        own = context.replica_id_in_sync_group
        whole, part = np.zeros(2 * replicas), np.zeros(1)
        assert context.all_gather(np.full(2, float(own)), 0, out=whole) is whole
        assert context.reduce_scatter("sum", np.arange(float(replicas)), out=part) is part
        return whole, part, np.float64(own)

    with Strategy(comm=comm, replicas=replicas) as strategy:
        for whole, part, own in strategy.experimental_local_results(strategy.run(step)):
            assert (whole == np.repeat(np.arange(replicas), 2)).all()
            assert part.tolist() == [replicas * own]
