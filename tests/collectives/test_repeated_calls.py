"""Calls of one array, again and again: what is known of the first one serves the others, and hides no mistake."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.everywhere import raises_everywhere
from support.reductions import LARGE, all_reduce, are_repeated

import mpidist
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.collectives.plans.repeated_reductions import LargeArray, SmallArray
from mpidist.cross_device_ops.collective_all_reduce import CollectiveAllReduce
from mpidist.transport.agreement.agreement import Progress
from mpidist.transport.agreement.mpi_agreement import MpiAgreement
from mpidist.transport.native.loading import native

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

pytestmark = pytest.mark.core

SHAPES = [(), (3,), (64, 65), LARGE, (1 << 20,)]
several = pytest.mark.ranks(min=2)


@pytest.fixture
def strategy(comm: Intracomm) -> Iterator[Strategy]:
    with Strategy(comm=comm) as made:
        yield made


def total(comm: Intracomm) -> int:
    return comm.size * (comm.size + 1) // 2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        *((op, dtype) for op in ("SUM", "MEAN", "MAX") for dtype in (np.float32, np.float64, np.int32, np.float16)),
        *((op, np.complex64) for op in ("SUM", "MEAN")),  # complex numbers have no order
    ],
)
def test_each_call_has_its_own_numbers(
    strategy: Strategy, comm: Intracomm, shape: tuple[int, ...], dtype: Any, op: str
) -> None:
    for step in range(1, 5):
        value = np.full(shape, step * (comm.rank + 1), dtype)
        want = step * {"SUM": total(comm), "MEAN": total(comm) / comm.size, "MAX": comm.size}[op]
        result = all_reduce(strategy, op, value)
        assert result.shape == shape
        assert (result == want).all()
        assert (value == step * (comm.rank + 1)).all()
        assert not np.shares_memory(result, value)
        if result.dtype == dtype:
            assert all_reduce(strategy, op, value, out=value) is value
            assert (value == want).all()


def test_calls_are_repeated(strategy: Strategy, comm: Intracomm, repeated: list[bool]) -> None:
    """Without this, the other tests would test something else."""
    for _ in range(3):
        all_reduce(strategy, "SUM", np.ones(5))
    value = np.ones(7)
    for _ in range(3):
        all_reduce(strategy, "SUM", value, out=value)
    assert repeated == [False, *[are_repeated(strategy)] * 2] * 2


@pytest.mark.parametrize("shape", [(4, 2), (64, 4096)])
def test_calls_of_private_arrays_are_repeated_beside_symmetric_ones(
    strategy: Strategy, comm: Intracomm, repeated: list[bool], shape: tuple[int, ...]
) -> None:
    """Arrays that own their memory, and views of such, are private. Small symmetric arrays are copied as these."""
    symmetric = strategy.symmetric_empty(shape, np.float64)
    whole = np.empty((2, *shape))
    for value in (np.empty(shape), whole[1], symmetric):
        for step in range(1, 4):
            value[...] = step
            all_reduce(strategy, "SUM", value, out=value)
            assert (value == step * comm.size).all()
    again = are_repeated(strategy)
    assert repeated == [False, *[again] * 5, again and symmetric.size < 100, again, again]


@pytest.mark.parametrize("op", ["SUM", "MEAN", "MAX"])
def test_symmetric_arrays_in_turn_are_repeated_and_let_go(
    strategy: Strategy, comm: Intracomm, repeated: list[bool], op: str
) -> None:
    arrays = [strategy.symmetric_empty((64, 4096), np.float32) for _ in range(2)]
    want = {"SUM": total(comm), "MEAN": total(comm) / comm.size, "MAX": comm.size}[op]
    for step in range(1, 4):
        for array in arrays:
            array[...] = step * (comm.rank + 1)
            assert all_reduce(strategy, op, array, out=array) is array
            assert (array == np.float32(step * want)).all()
    assert repeated == [False] * 2 + [are_repeated(strategy)] * 4
    for chosen in (comm.rank % 2, 0, 1 - comm.rank % 2, 1):  # another array on each rank, and the same on all
        arrays[chosen][...] = 7
        all_reduce(strategy, "MAX", arrays[chosen], out=arrays[chosen])
        assert (arrays[chosen] == 7).all()
        comm.Barrier()  # others may have written this array's twin
    references = [weakref.ref(array) for array in arrays]
    del array, arrays
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.parametrize("shape", SHAPES)
def test_calls_into_another_array_are_repeated(
    strategy: Strategy, comm: Intracomm, repeated: list[bool], shape: tuple[int, ...]
) -> None:
    """Into arrays that own their memory, and halves of one array; what a rank passes as `out` is its own affair."""
    strategy.symmetric_empty(2, np.float64)
    value, other, whole = np.empty(shape), np.empty(shape), np.empty((2, *shape))
    one, two = whole[0, ...], whole[1, ...]
    for step, (given, out) in enumerate([(value, other), (one, two), (other, two), (value, value)] * 2):
        given[...] = step + comm.rank
        out = [out, None, given][(step + comm.rank) % 3] if step > 3 else out
        result = all_reduce(strategy, "SUM", given, out=out)
        assert out is None or result is out
        assert (result == step * comm.size + total(comm) - comm.size).all()
        assert out is given or (given == step + comm.rank).all()
    assert repeated[:4] == [False, *[are_repeated(strategy)] * 3]


@pytest.mark.parametrize("shape", [(4, 2), (64, 4096)])
def test_symmetric_values_of_private_results_are_as_private_ones(
    strategy: Strategy, comm: Intracomm, repeated: list[bool], shape: tuple[int, ...]
) -> None:
    """Where compiled code copies them, which takes a third of the time that others take to read them."""
    symmetric, out = strategy.symmetric_empty(shape, np.float64), np.empty(shape)
    for step in range(3):
        for into in (None, out):
            symmetric[...] = step
            result = all_reduce(strategy, "SUM", symmetric, out=into)
            assert (result == step * comm.size).all()
            assert (symmetric == step).all()
    again = are_repeated(strategy) and (native is not None or symmetric.size < 100)
    assert repeated[2:] == [again] * 4


def test_an_out_that_is_not_apart_is_looked_at(strategy: Strategy, comm: Intracomm, repeated: list[bool]) -> None:
    whole, alone = np.empty(60_000), np.empty(50_000)
    of_node = strategy.symmetric_empty(50_000, np.float64, per_node=True)
    symmetric = strategy.symmetric_empty(50_000, np.float64)
    for value, out in [(alone, whole[:50_000]), (whole[:50_000], whole[10_000:]), (alone, of_node), (alone, symmetric)]:
        for step in range(2):
            value[...] = np.arange(50_000) + comm.rank + step
            all_reduce(strategy, "SUM", value, out=out)
            assert (out == comm.size * (np.arange(50_000) + step) + total(comm) - comm.size).all()
            comm.Barrier()
    assert repeated == [False, are_repeated(strategy), *[False] * 4]  # overlapping ones are not even asked for


@several
def test_a_view_of_an_array_per_node_is_refused_beside_repeated_calls(strategy: Strategy, comm: Intracomm) -> None:
    """In place of some ranks, after calls of equal arrays that were fine."""
    value, of_node = np.ones(5), strategy.symmetric_empty((2, 5), np.float64, per_node=True)[1]
    for _ in range(3):
        all_reduce(strategy, "SUM", value, out=value)
    value[...] = comm.rank
    last = comm.rank == comm.size - 1
    with pytest.raises(mpidist.errors.InvalidArgumentError):
        all_reduce(strategy, "SUM", of_node if last else value, out=of_node if last else value)
    assert (value == comm.rank).all()


def test_a_result_that_is_kept_stays_as_it_is(strategy: Strategy, comm: Intracomm) -> None:
    for shape in SHAPES:
        kept = [all_reduce(strategy, "SUM", np.full(shape, float(step))) for step in range(8)]
        for step, result in enumerate(kept):
            assert (result == step * comm.size).all()
            assert result.flags.writeable


@pytest.mark.parametrize("shape", [(4, 6), LARGE])
def test_ranks_whose_arrays_differ_in_layout_meet(strategy: Strategy, comm: Intracomm, shape: tuple[int, ...]) -> None:
    """Also those of another byte order; into new arrays, and in place."""
    layouts: list[Callable[[Any], Any]] = [
        np.ascontiguousarray,
        np.asfortranarray,
        lambda array: np.stack([array, array], -1)[..., 0],
        lambda array: array[::-1],
    ]
    for step in range(2 * len(layouts) + 2):
        value = layouts[(step + comm.rank) % len(layouts)](np.full(shape, comm.rank + 1.0 + step))
        want = total(comm) + step * comm.size
        assert (all_reduce(strategy, "SUM", value) == want).all()
        all_reduce(strategy, "SUM", value, out=value)
        assert (value == want).all()


def test_a_mistake_is_an_error_on_all_ranks_and_nothing_else(strategy: Strategy, comm: Intracomm) -> None:
    """Another shape, dtype, op, out or name of a call, after calls that were alike: every rank tells the difference."""
    last = comm.rank == comm.size - 1
    mistakes: list[Callable[[Any], Any]] = [
        lambda value: all_reduce(strategy, "SUM", np.ones(6) if last else value),
        lambda value: all_reduce(strategy, "SUM", np.ones(5, np.float32) if last else value),
        lambda value: all_reduce(strategy, "MAX" if last else "SUM", value),
        lambda value: all_reduce(strategy, "SUM", [value] if last else value),
        lambda value: strategy.reduce("SUM", value, axis=None) if last else all_reduce(strategy, "SUM", value),
    ]
    for mistake in mistakes if comm.size > 1 else []:
        value = np.ones(5)
        for _ in range(2):
            assert (all_reduce(strategy, "SUM", value) == comm.size).all()
        with pytest.raises((mpidist.errors.InvalidArgumentError, RuntimeError)):
            mistake(value)
        assert (value == 1).all()
        assert (all_reduce(strategy, "SUM", value, out=value) == comm.size).all()


def test_an_array_that_cannot_be_written_is_refused(strategy: Strategy, comm: Intracomm) -> None:
    value = np.ones(5)
    for _ in range(3):
        all_reduce(strategy, "SUM", value, out=value)
    value[:] = 1
    value.flags.writeable = comm.rank != comm.size - 1
    with raises_everywhere(comm, mpidist.errors.InvalidArgumentError, "read-only"):
        all_reduce(strategy, "SUM", value, out=value)
    assert (value == 1).all()


@several
@pytest.mark.parametrize("shape", [(5,), (1 << 18,)])
def test_symmetric_arrays_of_some_ranks_meet_private_ones_of_others(
    strategy: Strategy, comm: Intracomm, shape: tuple[int, ...]
) -> None:
    private = np.ones(shape)
    for _ in range(3):
        assert (all_reduce(strategy, "SUM", private) == comm.size).all()
        all_reduce(strategy, "SUM", private.copy(), out=private)
        private[...] = 1
    symmetric = strategy.symmetric_empty(shape, np.float64)
    for step in range(6):
        value = symmetric if (comm.rank + step) % 2 else private
        value[...] = comm.rank + 1
        assert (all_reduce(strategy, "SUM", value) == total(comm)).all()
        all_reduce(strategy, "SUM", value, out=value)
        assert (value == total(comm)).all()
    comm.Barrier()
    del symmetric, value
    for _ in range(3):
        private[...] = comm.rank + 1
        assert (all_reduce(strategy, "SUM", private, out=private) == total(comm)).all()


@pytest.mark.parametrize("shape", [(5,), (1 << 18,)])
def test_nothing_keeps_an_array(strategy: Strategy, comm: Intracomm, shape: tuple[int, ...]) -> None:
    """Neither what was passed nor what came back."""
    for _ in range(3):
        value = np.ones(shape)
        seen = [weakref.ref(value), weakref.ref(all_reduce(strategy, "SUM", value))]
        all_reduce(strategy, "SUM", value, out=value)
        del value
        gc.collect()
        assert [ref() for ref in seen] == [None, None]


@several
def test_a_call_that_others_make_with_symmetric_ones_keeps_no_private_array(
    strategy: Strategy, comm: Intracomm
) -> None:
    symmetric, value = strategy.symmetric_empty((1 << 18,), np.float64), np.ones(1 << 18)
    for _ in range(2):
        all_reduce(strategy, "SUM", value, out=value)
    array: Any = symmetric if comm.rank else value
    array[...] = 1
    assert (all_reduce(strategy, "SUM", array, out=array) == comm.size).all()
    seen = weakref.ref(value)
    del value, array
    assert seen() is None


@pytest.mark.parametrize("length", [100, 20_000])
def test_lists_of_one_plan_in_turn(strategy: Strategy, comm: Intracomm, length: int) -> None:
    """Into new arrays, themselves, others, of other layouts, started, and refused in between: nothing is kept."""
    gone: list[weakref.ref[Any]] = []

    def started(values: list[Any]) -> list[list[Any]]:
        pending = [mpidist.get_replica_context().start_all_reduce("SUM", values) for _ in range(2)]
        return [[result[0] for result in its.wait()] for its in pending]

    def call(number: int) -> None:
        values = [np.full(length, number * (comm.rank + 1) + at, np.float32) for at in range(6)]
        want = [number * total(comm) + at * comm.size for at in range(6)]
        gone.extend(map(weakref.ref, values))
        wide = [np.repeat(value, 2)[::2] for value in values]
        others, apart = np.empty((6, length), np.float32), np.empty((length, 6), np.float32).T
        for given, outs in (
            (values, None),
            (wide, None),
            (values, list(others)),
            (wide, list(apart)),
            (values, None),
            (values, values),
        ):
            results = all_reduce(strategy, "SUM", given, out=outs)
            assert [result.tolist() for result in results] == [[each] * length for each in want]
        assert strategy.run(started, args=(wide,)) == [want] * 2
        if comm.size > 1:
            with raises_everywhere(comm, mpidist.errors.InvalidArgumentError, "op"):
                all_reduce(strategy, "SUM" if comm.rank else "MAX", values)

    for number in range(1, 4):
        call(number)
    gc.collect()
    assert not any(reference() is not None for reference in gone)


@pytest.mark.parametrize("kind", [float, np.float16, np.float32, np.float64])
def test_repeated_number_is_reduced_as_an_array_and_stays_of_its_type(
    strategy: Strategy, comm: Intracomm, repeated: list[bool], kind: Any
) -> None:
    for step in range(3):
        total = all_reduce(strategy, "sum", kind(step + comm.rank))
        assert type(total) is kind
        assert total == step * comm.size + sum(range(comm.size))
    assert repeated == [False, *[are_repeated(strategy)] * 2]


def test_repeated_lists_whose_first_arrays_are_alike_do_not_displace_each_other(
    strategy: Strategy, comm: Intracomm, repeated: list[bool]
) -> None:
    lists = [[np.full(16, 1.0), np.full(size, 2.0)] for size in (32, 64, 48)]
    for _ in range(3):
        for arrays in lists:
            results = all_reduce(strategy, "sum", arrays)
            assert [int(result[-1]) for result in results] == [comm.size, 2 * comm.size]
    assert repeated == ([] if native is None else [False] * 3 + [are_repeated(strategy)] * 6)


def test_a_refusal_that_is_caught_keeps_nothing(strategy: Strategy, comm: Intracomm) -> None:
    """Its traceback has the frames of the program, and all that their variables hold."""

    def fails() -> weakref.ref[Any]:
        value = np.ones(5)
        with pytest.raises(mpidist.errors.InvalidArgumentError):
            all_reduce(strategy, "SUM", value, out=np.ones(6))
        return weakref.ref(value)

    seen = fails()
    all_reduce(strategy, "SUM", np.ones(5))
    gc.collect()
    assert seen() is None


@several
@pytest.mark.parametrize("shape", [(5,), (1 << 18,)])
@pytest.mark.parametrize("method", ["lend", "begin"])
def test_what_fails_on_one_rank_as_it_begins_a_repeated_call_is_the_error_of_all(
    comm: Intracomm, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], method: str
) -> None:
    """Before data moves, so that the next call goes well."""

    def no_memory(*_: Any) -> Any:
        raise MemoryError("Unable to allocate 9 TiB")

    if method == "begin":  # no call is compiled as a whole then
        monkeypatch.setattr(MpiAgreement, "join_at_once", lambda *_: Progress.NOT_JOINED)
    with Strategy(comm=comm) as strategy, monkeypatch.context() as patch:
        for _ in range(3):
            assert (all_reduce(strategy, "SUM", np.ones(shape)) == comm.size).all()
        for kind in (SmallArray, LargeArray) if comm.rank == 0 else ():
            patch.setattr(kind, method, no_memory)
        with raises_everywhere(comm, mpidist.errors.InvalidArgumentError, "rank 0: MemoryError: Unable to allocate 9"):
            all_reduce(strategy, "SUM", np.ones(shape))
        patch.undo()
        for step in range(3):
            assert (all_reduce(strategy, "SUM", np.full(shape, step)) == step * comm.size).all()


@several
def test_a_call_that_was_made_into_an_array_per_node_is_repeated_with_private_ones(
    strategy: Strategy, comm: Intracomm, repeated: list[bool]
) -> None:
    of_node, value = strategy.symmetric_empty((5,), np.float64, per_node=True), np.ones(5)
    for array in (of_node, value, value, value):
        array[...] = 1
        comm.Barrier()
        all_reduce(strategy, "SUM", array, out=array)
    assert repeated[2:] == [are_repeated(strategy)] * 2


def test_results_begin_where_other_libraries_take_them_without_a_copy(strategy: Strategy, comm: Intracomm) -> None:
    """From 128 KiB on: alone, and beside others."""
    for count in (1 << 15, (1 << 15) + 3, 3 << 14, 1 << 16, (1 << 16) + 1):
        for step in range(3):
            value = np.ones(count, np.float32)
            results = [all_reduce(strategy, "SUM", value), all_reduce(strategy, "SUM", [value, value[:9]])[0]]
            if step:  # the memory of calls that are made once is not kept
                assert [result.ctypes.data % 64 for result in results] == [0, 0]
            assert all((result == comm.size).all() for result in results)


def test_calls_after_a_reset_are_as_before(strategy: Strategy, comm: Intracomm, repeated: list[bool]) -> None:
    for _ in range(2):
        for _ in range(3):
            assert (all_reduce(strategy, "SUM", np.ones(5)) == comm.size).all()
        strategy.reset()
    assert repeated == [False, *[are_repeated(strategy)] * 2] * 2


def test_a_started_call_ends_before_a_repeated_one(strategy: Strategy, comm: Intracomm) -> None:
    def step() -> None:
        context = mpidist.get_replica_context()
        for _ in range(3):
            handle = context.start_all_reduce("SUM", np.full(LARGE, 2.0))
            assert (context.all_reduce("SUM", np.ones(5)) == comm.size).all()
            assert (handle.wait() == 2 * comm.size).all()

    strategy.run(step)


def test_a_second_strategy_and_other_names_are_apart(strategy: Strategy, comm: Intracomm) -> None:
    with Strategy(comm=comm) as second:
        for step in range(4):
            for one in (strategy, second):
                assert (all_reduce(one, "SUM", np.full(5, float(step))) == step * comm.size).all()
                assert (all_reduce(one, "sum", np.full(5, float(step))) == step * comm.size).all()
                assert (all_reduce(one, mpidist.ReduceOp.MEAN, np.full(5, float(step))) == step).all()


def test_a_closed_strategy_says_so(comm: Intracomm) -> None:
    with CollectiveAllReduce().bind(comm) as ops:
        for _ in range(3):
            assert (ops.reduce("SUM", np.ones(5), "all") == comm.size).all()
    with pytest.raises(RuntimeError, match="closed"):
        ops.reduce("SUM", np.ones(5), "all")


@several
def test_a_repeated_call_passes_through_few_functions(strategy: Strategy) -> None:
    """Their number is the time of a small call: each takes 0.1 us. What a rank does while it waits is not counted."""
    calls: set[str] = set()
    waits: list[Any] = []  # the frame of a wait, while it runs

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and not waits:
            if frame.f_code.co_name == "_wait":  # not in every call: most often where ranks are more than cores
                waits.append(frame)
            else:
                calls.add(frame.f_code.co_name)
        elif event == "return" and waits == [frame]:
            waits.clear()

    def step() -> list[str]:
        context, value, least = mpidist.get_replica_context(), np.ones(5), [str(count) for count in range(1000)]
        for turn in range(50):
            if turn % strategy.topology.size == strategy.topology.rank:
                time.sleep(0.002)  # the other ranks are there already, so this one need not wait
            calls.clear()
            sys.setprofile(note)
            try:
                context.all_reduce("SUM", value, out=value)
            finally:
                sys.setprofile(None)
            least = min(least, sorted(calls), key=len)
        return least

    names = strategy.run(step)
    assert len(names) <= (18 if native is not None else 34), names
