"""Results in the caller's own arrays: `out=`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.everywhere import raises_everywhere
from support.reductions import DTYPES, LARGE, LAYOUTS, all_reduce, numbers, total
from tensors import Tensor

import mpidist
from mpidist import CommunicationOptions
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.errors import InvalidArgumentError
from mpidist.transport.half import bfloat16

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

pytestmark = pytest.mark.core


@pytest.fixture
def strategy(comm: Intracomm) -> Iterator[Strategy]:
    with Strategy(comm=comm) as made:
        yield made


@pytest.fixture
def placed(comm: Intracomm, placement: tuple[int, ...]) -> Iterator[Strategy]:
    """A strategy on pretended nodes."""
    with Strategy(comm=comm) as made:
        yield made


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(4, 6), LARGE])
def test_out_of_any_layout_takes_the_result(strategy: Strategy, layout: str, shape: tuple[int, ...]) -> None:
    """And nothing around it is written."""
    for dtype in DTYPES:
        value, out = numbers(strategy, shape, dtype), LAYOUTS[layout](shape, dtype)
        around = out if out.base is None else out.base
        sum_around, sum_out = around.astype(np.complex128).sum(), out.astype(np.complex128).sum()
        assert all_reduce(strategy, "SUM", value, out=out) is out
        assert (out == total(strategy, shape, dtype)).all(), dtype
        assert (value == numbers(strategy, shape, dtype)).all()
        if layout != "unaligned":  # whose base is bytes
            change = around.astype(np.complex128).sum() - sum_around
            assert change == out.astype(np.complex128).sum() - sum_out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(4, 6), LARGE])
def test_out_may_be_the_argument(strategy: Strategy, layout: str, shape: tuple[int, ...]) -> None:
    """In place, alone and beside others."""
    for dtype in DTYPES:
        for others in ([], [np.ones(3, dtype)]):
            value = LAYOUTS[layout](shape, dtype)
            value[...] = numbers(strategy, shape, dtype)
            out = [value, *others]
            assert all_reduce(strategy, "SUM", out, out=out) is out
            assert (value == total(strategy, shape, dtype)).all(), (dtype, len(others))


@pytest.mark.parametrize("shape", [(4, 6), LARGE])
def test_outs_may_be_the_arguments_in_another_order(strategy: Strategy, shape: tuple[int, ...]) -> None:
    size = strategy.topology.size
    one, two = np.full(shape, 1.0), np.full(shape, 2.0)
    all_reduce(strategy, "SUM", [one, two], out=[two, one])
    assert (one == 2 * size).all()
    assert (two == size).all()


@pytest.mark.parametrize("count", [50, 300_000])
@pytest.mark.parametrize("shift", [1, -1, 7])
def test_out_may_overlap_its_argument(strategy: Strategy, count: int, shift: int) -> None:
    memory = np.zeros(count + 20, np.float32)
    value, out = memory[10:-10], memory[10 + shift : count + 10 + shift]
    value[...] = numbers(strategy, (count,))
    all_reduce(strategy, "SUM", value, out=out)
    assert (out == total(strategy, (count,))).all()


def test_out_may_be_its_argument_backwards(strategy: Strategy) -> None:
    value = numbers(strategy, (100,))
    all_reduce(strategy, "SUM", value, out=value[::-1])
    assert (value[::-1] == total(strategy, (100,))).all()


@pytest.mark.parametrize("large", [0, 300_000])
def test_outs_may_overlap_the_arguments_of_others(strategy: Strategy, large: int) -> None:
    """Whichever is sent first."""
    size, count = strategy.topology.size, large + 10
    memory = np.repeat(np.float32([1, 2, 3, 4]), count)
    one, two, three, four = memory.reshape(4, count)
    middle = memory[count // 2 : count // 2 + count]
    all_reduce(strategy, "SUM", [one.copy(), middle, three, four], out=[four, one, two, three])
    expected = [np.repeat(np.float32([1, 2]), count // 2), [3], [4], [1]]
    for row, right in zip(memory.reshape(4, count), expected, strict=True):
        assert (row == np.asarray(right) * size).all()


def test_one_argument_may_be_given_twice(strategy: Strategy) -> None:
    value, other = np.ones(5), np.zeros(5)
    all_reduce(strategy, "SUM", [value, value], out=[value, other])
    assert (value == strategy.topology.size).all()
    assert (other == strategy.topology.size).all()


def test_outs_may_lie_between_each_other(strategy: Strategy) -> None:
    """The columns of a matrix share no memory, though their bounds overlap."""
    matrix = np.zeros((4, 3))
    all_reduce(strategy, "SUM", [np.full(4, column) for column in (1.0, 2.0, 3.0)], out=list(matrix.T))
    assert (matrix == [strategy.topology.size * column for column in (1, 2, 3)]).all()


def test_an_empty_out_shares_memory_with_nobody(strategy: Strategy) -> None:
    memory = np.ones(10)
    all_reduce(strategy, "SUM", [memory, memory[5:5]], out=[memory, memory[5:5]])
    assert (memory == strategy.topology.size).all()


@pytest.mark.parametrize("count", [4, 300_000])
def test_an_empty_out_hides_no_other(strategy: Strategy, count: int) -> None:
    """Out 1 overwrites the first half of argument 0, at whose start the empty out 2 lies."""
    memory, result = np.repeat([1.0, 2.0, 3.0], count), np.zeros(2 * count)
    values = [memory[count:], np.full(2 * count, 5.0), np.ones(0)]
    all_reduce(strategy, "SUM", values, out=[result, memory[: 2 * count], memory[count:][:0]])
    assert (result == strategy.topology.size * np.repeat([2.0, 3.0], count)).all()
    assert (memory[: 2 * count] == strategy.topology.size * 5).all()


def test_strides_that_interleave_rows_are_no_overlap(strategy: Strategy) -> None:
    """Rows begin 6 numbers apart and are 8 long, in steps of 4: 0, 4, 8 and 6, 10, 14."""
    memory = np.zeros(15)
    out = np.lib.stride_tricks.as_strided(memory, (2, 3), (48, 32))
    all_reduce(strategy, "SUM", np.arange(1.0, 7.0).reshape(2, 3), out=out)
    places = [0, 4, 8, 6, 10, 14]
    assert (memory[places] == strategy.topology.size * np.arange(1.0, 7.0)).all()
    assert np.delete(memory, places).tolist() == [0] * 9


def test_means_of_integers_go_into_floats(strategy: Strategy) -> None:
    value, out = np.full(3, 3, np.int64), np.zeros(3)
    assert (all_reduce(strategy, "MEAN", value, out=out) == 3).all()
    assert (all_reduce(strategy, "MEAN", 4, out=out[0:1].reshape(())) == 4).all()
    assert out.tolist() == [4, 3, 3]


@pytest.mark.parametrize("shape", [(4, 6), LARGE])
def test_arrays_of_other_libraries_take_the_result(strategy: Strategy, shape: tuple[int, ...]) -> None:
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


def test_an_array_of_a_subclass_takes_the_result(strategy: Strategy) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        out = np.asmatrix(np.zeros((2, 2)))
    assert all_reduce(strategy, "SUM", np.ones((2, 2)), out=out) is out
    assert (out == strategy.topology.size).all()


_SHARED = np.zeros(9)
_READ_ONLY = np.zeros(3)
_READ_ONLY.flags.writeable = False


class Readable:
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.zeros(3)


WRONG_OUTS: list[tuple[str, Any, Any, str]] = [
    ("another dtype", np.ones(3), np.zeros(3, np.float32), r"out 0 must be an array f64\[3\], got f32\[3\]"),
    ("another shape", np.ones(3), np.zeros(4), r"out 0 must be an array f64\[3\], got f64\[4\]"),
    ("another rank of array", np.ones(3), np.zeros((1, 3)), r"got f64\[1,3\]"),
    ("read-only", np.ones(3), _READ_ONLY, "out 0 .* read-only"),
    ("stride 0", np.ones(3), np.lib.stride_tricks.as_strided(_SHARED, (3,), (0,)), "elements that share memory"),
    ("windows", np.ones((4, 3)), np.lib.stride_tricks.as_strided(_SHARED, (4, 3), (8, 8)), "elements that share mem"),
    ("half a number", np.ones(3), np.lib.stride_tricks.as_strided(_SHARED, (3,), (4,)), "elements that share memory"),
    ("lattice", np.ones((3, 2)), np.lib.stride_tricks.as_strided(_SHARED, (3, 2), (16, 32)), "elements that share me"),
    ("a list of numbers", [1.0, 2.0], [0.0, 0.0], "out 0 must be an array f64.*got float"),
    ("a list for an array", np.ones(2), [0.0, 0.0], "the same form"),
    ("too few", [np.ones(1), np.ones(1)], [np.zeros(1)], "the same form"),
    ("other keys", {"a": np.ones(1)}, {"b": np.zeros(1)}, "the same form"),
    ("one array twice", [np.ones(9), np.ones(9)], [_SHARED, _SHARED], "out 0 and out 1 share memory, .* leave one out"),
    ("overlapping", [np.ones(5), np.ones(5)], [_SHARED[4:], _SHARED[:5]], "out 0 and out 1 share memory"),
    ("a number", np.ones(()), 0.0, "out 0 must be an array f64.*got float"),
    ("the number itself", *[[1.0]] * 2, "out 0 must be an array f64.*got float"),
    ("what can be read alone", np.ones(3), Readable(), r"out 0 must be an array f64\[3\], got Readable"),
    ("another library's of another dtype", np.ones(3), Tensor(np.zeros(3, np.int8)), r"f64\[3\], got i8\[3\]"),
    ("another library's, twice", [np.ones(9)] * 2, [Tensor(_SHARED), _SHARED], "out 0 and out 1 share memory"),
    ("another library's, read-only", np.ones(3), Tensor(_READ_ONLY), "read-only|readonly"),
]


@pytest.mark.parametrize(("value", "out", "text"), [row[1:] for row in WRONG_OUTS], ids=[row[0] for row in WRONG_OUTS])
def test_an_out_that_cannot_take_the_result_is_refused(
    strategy: Strategy, comm: Intracomm, value: Any, out: Any, text: str
) -> None:
    with raises_everywhere(comm, InvalidArgumentError, text):
        all_reduce(strategy, "SUM", value, out=out)
    assert all_reduce(strategy, "SUM", 1) == comm.size


def test_masked_arrays_take_no_results(strategy: Strategy, comm: Intracomm) -> None:
    with raises_everywhere(comm, TypeError, "masked array, whose mask would be lost"):
        all_reduce(strategy, "SUM", np.ones(2), out=np.ma.masked_array([0.0, 0.0], [0, 1]))


def test_integers_cannot_take_a_mean(strategy: Strategy, comm: Intracomm) -> None:
    value = np.ones(3, np.int64)
    with raises_everywhere(comm, InvalidArgumentError, r"out 0 must be an array f64\[3\], got i64\[3\]"):
        all_reduce(strategy, "MEAN", value, out=value)
    assert (value == 1).all()


@pytest.mark.ranks(min=2)
def test_one_ranks_wrong_out_is_everyones_error(strategy: Strategy, comm: Intracomm) -> None:
    out = np.zeros(3 if comm.rank else 4)
    with raises_everywhere(comm, InvalidArgumentError, r"rank 0: .*got f64\[4\]"):
        all_reduce(strategy, "SUM", np.ones(3), out=out)
    assert not out.any()


@pytest.mark.ranks(min=2)
def test_ranks_may_differ_in_whether_they_give_an_out(strategy: Strategy, comm: Intracomm) -> None:
    """Where a result lies is each rank's own affair."""
    out = np.zeros(3) if comm.rank == 0 else None
    assert (all_reduce(strategy, "SUM", np.ones(3), out=out) == comm.size).all()


@pytest.mark.parametrize("shape", [(4, 6), LARGE, (0,), ()])
def test_symmetric_arrays_are_reduced_and_take_results(placed: Strategy, shape: tuple[int, ...]) -> None:
    value, out = (placed.symmetric_empty(shape, np.float32) for _ in range(2))
    value[...] = numbers(placed, shape)
    for _ in range(2):
        all_reduce(placed, "SUM", value, out=out)
        assert (out == total(placed, shape)).all()
        assert (value == numbers(placed, shape)).all()
    all_reduce(placed, "SUM", value, out=value)
    assert (value == out).all()


@pytest.mark.parametrize("shape", [(4, 6), LARGE, ()])
def test_an_array_of_the_node_takes_the_result_once(placed: Strategy, comm: Intracomm, shape: tuple[int, ...]) -> None:
    """All ranks of a node read it; whole, and in part."""
    out = placed.symmetric_empty(shape, np.float32, per_node=True)
    for step in range(3):
        value = numbers(placed, shape) + np.float32(step)
        all_reduce(placed, "SUM", [value, np.float32(1)], out=[out, np.zeros((), np.float32)])
        assert (out == total(placed, shape) + np.float32(step * comm.size)).all()
    if shape:
        comm.Barrier()
        out[...] = 1  # every rank of the node writes the same
        comm.Barrier()
        all_reduce(placed, "SUM", numbers(placed, shape)[0], out=out[0])
        assert (out[0] == total(placed, shape)[0]).all()
        assert (out[1:] == 1).all()
        comm.Barrier()
        all_reduce(placed, "MEAN", out, out=out)  # the argument too
        assert (out[1:] == 1).all()


@pytest.mark.ranks(min=2)
def test_ranks_may_not_differ_in_whether_an_out_is_one_for_the_node(strategy: Strategy, comm: Intracomm) -> None:
    """It is written together: the others would take the next message for it."""
    out = strategy.symmetric_empty(3, np.float64, per_node=True)
    with raises_everywhere(comm, InvalidArgumentError, "out"):
        all_reduce(strategy, "SUM", np.ones(3), out=np.zeros(3) if comm.rank == comm.size - 1 else out)


def test_outs_that_changed_since_are_looked_at_again(strategy: Strategy, comm: Intracomm) -> None:
    value, out = np.ones(6), np.empty(6)
    all_reduce(strategy, "SUM", value, out=out)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        out.shape = (2, 3)
    with raises_everywhere(comm, InvalidArgumentError, r"out 0 must be an array .*\[6\], got .*\[2,3\]"):
        all_reduce(strategy, "SUM", value, out=out)


@pytest.mark.parametrize("length", [4, 300])
def test_an_out_whose_layout_changed_takes_the_result(strategy: Strategy, comm: Intracomm, length: int) -> None:
    """`transpose` makes another array; this one stays the same."""
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


def test_an_overflow_on_a_ring_is_a_result(strategy: Strategy, comm: Intracomm) -> None:
    """Although one rank lets NumPy raise."""
    options = CommunicationOptions(implementation="RING")
    with np.errstate(all="raise" if comm.rank == 0 else "ignore"):
        for dtype in (np.float32, np.float16):
            value = np.full(50, np.finfo(dtype).max, dtype)
            result = strategy.reduce("SUM", value, options=options)
            assert np.isinf(result).all() == (comm.size > 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("count", [1, 3])
def test_what_is_no_number_is_a_result_however_small_the_arrays(
    strategy: Strategy, comm: Intracomm, dtype: str, count: int
) -> None:
    """Gradients of a scaled loss: infinities of both signs. Although one rank lets NumPy raise."""
    native = bfloat16() if dtype == "bfloat16" else np.dtype(dtype)
    values = [np.full(comm.size, np.inf if comm.rank % 2 else -np.inf).astype(native) for _ in range(count)]
    with np.errstate(all="raise" if comm.rank == 0 else "warn"), warnings.catch_warnings():
        warnings.simplefilter("error")
        sums = strategy.reduce("SUM", values)
        part = strategy.run(lambda: mpidist.get_replica_context().reduce_scatter("SUM", values[0]))
    for result in (*sums, part):
        assert np.isnan(result.astype(np.float32)).all() == (comm.size > 1)


def test_only_the_very_outs_of_an_earlier_call_are_known(strategy: Strategy, comm: Intracomm) -> None:
    """Of a list that was checked, one is replaced, made read-only, or reshaped: all ranks hear of it."""

    def into(outs: list[Any]) -> Any:
        return all_reduce(strategy, "SUM", [np.ones(6), np.ones(4)], out=outs)

    changes: list[tuple[str, Callable[[list[Any]], Any]]] = [
        (r"out 1 must be an array .*\[4\], got .*\[5\]", lambda outs: outs.__setitem__(1, np.empty(5))),
        ("share memory", lambda outs: outs.__setitem__(1, outs[0][:4])),
        ("read-only", lambda outs: outs[1].setflags(write=False)),
        (r"\[2,2\]", lambda outs: outs.__setitem__(1, outs[1].reshape(2, 2))),
        (r"got f32\[4\]", lambda outs: outs.__setitem__(1, np.empty(4, np.float32))),
        ("same form", lambda outs: outs.__setitem__(1, [0.0] * 4)),
    ]
    for text, change in changes:
        outs: list[Any] = [np.empty(6), np.empty(4)]
        for _ in range(3):
            assert all((out == comm.size).all() for out in into(outs))
        change(outs)
        with raises_everywhere(comm, Exception, text):
            into(outs)


def test_out_of_reduce_takes_the_result(placed: Strategy) -> None:
    """Of each kind: without axis, along an axis, as a mean along an axis, in place."""
    size, rank = placed.size, placed.rank
    value, out = np.arange(6.0).reshape(2, 3) + rank, np.zeros((2, 3))
    total = size * np.arange(6.0).reshape(2, 3) + sum(range(size))
    assert placed.reduce("sum", value, out=out) is out
    assert (out == total).all()
    for op, right in (("sum", total.sum(axis=0)), ("mean", total.mean(axis=0) / size)):
        row = np.zeros(3)
        assert placed.reduce(op, value, axis=0, out=row) is row
        assert np.allclose(row, right, rtol=1e-15)
    assert placed.reduce("sum", value, out=value) is value
    assert (value == total).all()


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_out_of_reduce_along_an_axis_that_does_not_fit_is_refused(comm: Intracomm, strategy: Strategy, op: str) -> None:
    with raises_everywhere(comm, InvalidArgumentError, r"out 0 must be an array f64\[3\], got f64\[2\]"):
        strategy.reduce(op, np.ones((2, 3)), axis=0, out=np.zeros(2))
    assert strategy.reduce(op, 1.0) == (strategy.size if op == "sum" else 1)


def gathered(strategy: Strategy, value: Any, axis: int, out: Any) -> Any:
    return strategy.run(lambda: mpidist.get_replica_context().all_gather(value, axis, out=out))  # type: ignore[union-attr]


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_of_all_gather_takes_the_result(placed: Strategy, layout: str, axis: int) -> None:
    size, rank = placed.size, placed.rank
    shape = (2 * size, 3) if axis == 0 else (2, 3 * size)
    out, value = LAYOUTS[layout](shape, np.dtype(np.int32)), np.full((2, 3), rank, np.int32)
    assert gathered(placed, [value], axis, [out])[0] is out
    assert (out == np.concatenate([np.full((2, 3), other) for other in range(size)], axis)).all()


def test_out_of_all_gather_takes_parts_of_unlike_lengths(placed: Strategy) -> None:
    size, rank = placed.size, placed.rank
    out = np.zeros(size * (size + 1) // 2)
    assert gathered(placed, np.full(rank + 1, float(rank)), 0, out) is out
    assert (out == np.repeat(np.arange(size), np.arange(size) + 1)).all()


@pytest.mark.parametrize("shift", [0, 1])
def test_out_of_all_gather_may_hold_the_value(placed: Strategy, shift: int) -> None:
    """This rank's own part of it, or another part."""
    size, rank = placed.size, placed.rank
    out = np.zeros(3 * size)
    own = (rank + shift) % size
    value = out[3 * own : 3 * own + 3]
    value[:] = rank
    gathered(placed, value, 0, out)
    assert (out == np.repeat(np.arange(size), 3)).all()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("lengths", ["like", "unlike"])
def test_out_of_all_gather_that_does_not_fit_on_one_rank_is_refused_on_all(
    comm: Intracomm, strategy: Strategy, lengths: str
) -> None:
    own = 2 if lengths == "like" else comm.rank + 1
    total = 2 * comm.size if lengths == "like" else comm.size * (comm.size + 1) // 2
    out = np.zeros(total + (comm.rank == 1))
    with raises_everywhere(
        comm, InvalidArgumentError, f"out 0 of rank 1 has length {total + 1} along axis 0, .* {total}"
    ):
        gathered(strategy, np.ones(own), 0, out)
    assert strategy.reduce("sum", 1.0) == comm.size


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_of_reduce_scatter_takes_the_part(placed: Strategy, layout: str, axis: int) -> None:
    size, rank = placed.size, placed.rank
    shape, part = ((2 * size, 3), (2, 3)) if axis == 0 else ((3, 2 * size), (3, 2))
    value = np.arange(6.0 * size).reshape(shape)
    out, context = LAYOUTS[layout](part, np.dtype(np.float64)), mpidist.get_replica_context
    for op in ("sum", "mean"):
        assert placed.run(lambda op=op: context().reduce_scatter(op, value, axis, out=out)) is out  # type: ignore[union-attr]
        right = np.split(value * (size if op == "sum" else 1), size, axis)[rank]
        assert np.allclose(out, right, rtol=1e-15)


def test_out_of_reduce_scatter_may_be_a_part_of_the_value(placed: Strategy) -> None:
    size, rank = placed.size, placed.rank
    value = np.arange(4.0 * size)
    out = value[4 * rank : 4 * rank + 4]
    placed.run(lambda: mpidist.get_replica_context().reduce_scatter("sum", value, out=out))  # type: ignore[union-attr]
    assert (out == size * np.arange(4.0 * rank, 4 * rank + 4)).all()


@pytest.mark.parametrize("replicas", [3, 5])
def test_outs_of_replicas_take_gathers_and_parts(comm: Intracomm, replicas: int) -> None:
    if comm.size > replicas:
        replicas = comm.size

    def step() -> Any:
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


def test_per_node_outs_take_gathers_and_means(comm: Intracomm, placed: Strategy) -> None:
    size = placed.size
    out, mean = (placed.symmetric_empty(count, "f8", per_node=True) for count in (2 * size, 3))
    gathered(placed, np.full(2, float(placed.rank)), 0, out)
    assert (out == np.repeat(np.arange(size), 2)).all()
    placed.barrier()
    placed.reduce("mean", np.full(3, float(placed.rank)), weight=1, out=mean)
    assert np.allclose(mean, (size - 1) / 2)
    with raises_everywhere(comm, InvalidArgumentError, "out is a per-node array"):
        placed.run(lambda: mpidist.get_replica_context().reduce_scatter("sum", np.ones(3 * size), out=mean))  # type: ignore[union-attr]
