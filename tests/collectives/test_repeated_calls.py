"""Calls of one array, again and again: what is known of the first one serves the others, and hides no mistake."""

import sys
import time
import weakref
from collections import namedtuple
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.everywhere import raises_everywhere
from support.reductions import LARGE, all_reduce, are_repeated
from support.used import are_gone, functions_passed

import mpidist
from mpidist import CommunicationOptions as Options
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.collectives.plans.repeated_reductions import LargeArray, SmallArray
from mpidist.errors import DeadlineExceededError
from mpidist.transport.agreement.agreement import Progress
from mpidist.transport.agreement.mpi_agreement import MpiAgreement
from mpidist.transport.native.loading import native

pytestmark = pytest.mark.core


def total(comm):
    return comm.size * (comm.size + 1) // 2


@pytest.mark.parametrize("shape", [(3,), (1 << 18,)])
def test_repeated_calls_are_recognised_wherever_their_arrays_lie(strategy, comm, repeated, shape):
    """In place, into new arrays, halves of one array, another, a symmetric one; after one of the node.

    What a rank passes as `out` is its own affair.
    """
    again, copies_symmetric = are_repeated(strategy), shape == (3,) or native is not None
    value, other, whole = np.empty(shape), np.empty(shape), np.empty((2, *shape))
    symmetric = strategy.symmetric_empty(shape, np.float64)
    of_node = strategy.symmetric_empty(shape, np.float64, per_node=True)
    cases = [
        (value, None, again),
        (value, value, again),
        (value, other, again),
        (whole[0], whole[1], again),
        (other, whole[1], again),
        (symmetric, None, again and copies_symmetric),
        (symmetric, other, again and copies_symmetric),
        (value, [other, None, value][comm.rank % 3], None),
        (of_node, of_node, False),
        (value, value, again),
    ]
    for step, (given, out, is_repeated) in enumerate(cases * 2):
        comm.Barrier()
        given[...] = step + (0 if given is of_node else comm.rank)
        comm.Barrier()
        result = all_reduce(strategy, "SUM", given, out=out)
        assert out is None or result is out
        assert (result == step * comm.size + (0 if given is of_node else sum(range(comm.size)))).all(), step
        assert step < len(cases) or is_repeated is None or repeated[-1] is is_repeated, step
    value[...] = comm.rank
    last = comm.rank == comm.size - 1
    if comm.size > 1:  # in place of some ranks, a view of an array of the node
        view = strategy.symmetric_empty((2, *shape), np.float64, per_node=True)[1]
        with pytest.raises(mpidist.errors.InvalidArgumentError):
            all_reduce(strategy, "SUM", view if last else value, out=view if last else value)
        assert (value == comm.rank).all()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("shape", [(4, 6), LARGE])
@pytest.mark.parametrize("is_list", [False, True])
def test_repeated_calls_meet_with_unlike_placements_of_arrays(strategy, comm, shape, is_list):
    """Only some of these calls are repeated ones. Also those of another byte order; into new arrays, and in place."""
    symmetric = [strategy.symmetric_empty(shape, np.float64) for _ in range(3)]
    places = np.arange(np.prod(shape), dtype=float).reshape(shape)
    kinds = [
        lambda at: np.empty(shape),
        lambda at: np.empty(shape),  # most often, as only equal calls are repeated
        lambda at: np.empty(shape, order="F"),
        lambda at: np.empty((*shape, 2))[..., 0],
        lambda at: np.empty(shape)[::-1],
        lambda at: np.empty(shape, ">f8"),
        lambda at: symmetric[at],
    ]
    for step in range(4 * len(kinds)):
        kind = kinds[(step // 4 + comm.rank * (step % 4)) % len(kinds)]
        values = [kind(at) for at in range(3 if is_list else 1)]
        comm.Barrier()  # others may have written the twin of a symmetric array
        for at, value in enumerate(values):
            value[...] = comm.rank + 1.0 + step + at + places
        wanted = [total(comm) + (step + at + places) * comm.size for at in range(len(values))]
        for out in (None, [np.empty(shape, order="F") for _ in values], values):
            given, into = (values, out) if is_list else (values[0], out and out[0])
            results = all_reduce(strategy, "SUM", given, out=into)
            for result, want in zip(results if is_list else [results], wanted, strict=True):
                assert (result == want).all(), step
    comm.Barrier()


# A text of the error, and a call, which one rank makes otherwise.
MISTAKES = [
    ("array 0", lambda s, value, is_odd: all_reduce(s, "SUM", np.ones(6) if is_odd else value)),
    ("array 0", lambda s, value, is_odd: all_reduce(s, "SUM", value.astype("f4") if is_odd else value)),
    ("op", lambda s, value, is_odd: all_reduce(s, "MAX" if is_odd else "SUM", value, out=value)),
    ("form", lambda s, value, is_odd: all_reduce(s, "SUM", [value] if is_odd else value)),
    ("call", lambda s, value, is_odd: s.reduce("SUM", value) if is_odd else all_reduce(s, "SUM", value)),
    (r"\[1\] is None", lambda s, value, is_odd: all_reduce(s, "SUM", [value, None if is_odd else value])),
    ("builtins.str", lambda s, value, is_odd: all_reduce(s, "SUM", [value, "text" if is_odd else value])),
    ("share memory", lambda s, value, is_odd: all_reduce(s, "SUM", [value] * 2, out=[value] * 2 if is_odd else None)),
]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("shape", [(5,), (1 << 16,)])
def test_mistake_after_equal_calls_is_an_error_of_all_and_nothing_else(strategy, comm, shape):
    """Every rank tells the difference, whichever rank makes it."""
    value = np.ones(shape)
    for step, (text, mistake) in enumerate(MISTAKES):
        for given in (value, [value, value]):
            for _ in range(2):
                assert (np.asarray(all_reduce(strategy, "SUM", given)) == comm.size).all()
        all_reduce(strategy, "MAX", value, out=value)
        with pytest.raises((mpidist.errors.InvalidArgumentError, RuntimeError), match=text):
            mistake(strategy, value, comm.rank == step % comm.size)
        assert (value == 1).all()
        assert (all_reduce(strategy, "SUM", value, out=value) == comm.size).all()
        value[...] = 1
    value.flags.writeable = comm.rank != comm.size - 1
    with raises_everywhere(comm, mpidist.errors.InvalidArgumentError, "read-only"):
        all_reduce(strategy, "SUM", value, out=value)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("op", ["SUM", "MEAN", "MAX"])
@pytest.mark.parametrize("shapes", [[(64, 4096)], [(5000,), (3, 4)]], ids=["array", "list"])
def test_symmetric_arrays_in_turn_are_repeated_and_let_go(strategy, comm, repeated, op, shapes):
    lists = [strategy.symmetric_empty_like([np.empty(shape, np.float32) for shape in shapes]) for _ in range(2)]
    values = [arrays[0] if len(arrays) == 1 else arrays for arrays in lists]
    want = {"SUM": total(comm), "MEAN": total(comm) / comm.size, "MAX": comm.size}[op]
    for step in range(1, 4):
        for arrays, value in zip(lists, values, strict=True):
            for array in arrays:
                array[...] = step * (comm.rank + 1)
            assert all_reduce(strategy, op, value, out=value) is value
            assert all((array == np.float32(step * want)).all() for array in arrays)
            comm.Barrier()
    assert len(shapes) > 1 or repeated == [False] * 2 + [are_repeated(strategy)] * 4
    for chosen in (comm.rank % 2, 0, 1 - comm.rank % 2, 1):  # others on each rank, and the same on all
        for array in lists[chosen]:
            array[...] = 7
        all_reduce(strategy, "MAX", values[chosen], out=values[chosen])
        assert all((array == 7).all() for array in lists[chosen])
        comm.Barrier()  # others may have written this array's twin
    references = [weakref.ref(array) for arrays in lists for array in arrays]
    del array, arrays, value, values, lists
    assert are_gone(references)


@pytest.mark.ranks(2, 3)
def test_repeated_calls_with_shared_outs_are_right(strategy, comm, repeated):
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


@pytest.mark.ranks(1, 2)
def test_mean_of_integers_is_never_cut_into_an_integer_out(strategy, comm):
    """Also of an array in another layout, whose call into a new array is a cached one."""
    value = np.arange(12).reshape(6, 2)[:, 0] + comm.rank
    for _ in range(3):
        with raises_everywhere(comm, mpidist.errors.InvalidArgumentError, r"out 0 must be an array f64\[6\]"):
            all_reduce(strategy, "mean", value, out=np.empty(6, np.int64))
        assert all_reduce(strategy, "mean", value)[1] == 2 + (comm.size - 1) / 2


@pytest.mark.ranks(2, 3)
def test_private_out_after_a_per_node_one_of_the_same_form_is_private(strategy, comm):
    value, of_node = np.ones((4, 5)), strategy.symmetric_empty((4, 5), np.float64, per_node=True)
    for _ in range(2):
        all_reduce(strategy, "sum", value, out=of_node)
    for out in (np.empty((4, 5)), value.copy()):
        assert (all_reduce(strategy, "sum", value, out=out if comm.rank else None) == comm.size).all()
    with raises_everywhere(comm, mpidist.errors.InvalidArgumentError, "outs that are per-node arrays"):
        all_reduce(strategy, "sum", value, out=np.empty((4, 5)) if comm.rank else of_node)
    assert (all_reduce(strategy, "sum", value) == comm.size).all()


@pytest.mark.ranks(1, 3)
def test_repeated_calls_keep_no_array(strategy, comm):
    """Neither what was passed nor what came back; nor the frames of a refusal that is caught."""
    for shape in [(5,), (1 << 18,)] * 3:
        value = np.ones(shape)
        seen = [weakref.ref(value), weakref.ref(all_reduce(strategy, "SUM", value))]
        all_reduce(strategy, "SUM", value, out=value)
        del value
        assert are_gone(seen)

    def fails():
        value = np.ones(5)
        with pytest.raises(mpidist.errors.InvalidArgumentError):
            all_reduce(strategy, "SUM", value, out=np.ones(6))
        return weakref.ref(value)

    seen = [fails()]
    all_reduce(strategy, "SUM", np.ones(5))
    assert are_gone(seen)


@pytest.mark.ranks(2, 3)
def test_repeated_calls_mixed_with_symmetric_keep_no_private_array(strategy, comm):
    symmetric, value = strategy.symmetric_empty((1 << 18,), np.float64), np.ones(1 << 18)
    for _ in range(2):
        all_reduce(strategy, "SUM", value, out=value)
    array = symmetric if comm.rank else value
    array[...] = 1
    assert (all_reduce(strategy, "SUM", array, out=array) == comm.size).all()
    seen = weakref.ref(value)
    del value, array
    assert seen() is None


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("length", [100, 20_000])
def test_lists_of_one_plan_in_turn(strategy, comm, length):
    """Into new arrays, themselves, others, of other layouts, started, and refused in between: nothing is kept."""
    gone = []

    def started(values):
        pending = [mpidist.get_replica_context().start_all_reduce("SUM", values) for _ in range(2)]
        return [[result[0] for result in its.wait()] for its in pending]

    def call(number):
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
    assert are_gone(gone)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("length", [9, 20_000])
def test_repeated_lists_of_several_dtypes_in_turn_are_recognised(strategy, comm, repeated, length):
    """Into new arrays and in place, with numbers; where a rank's are symmetric, or refused; and nothing is kept."""
    again = are_repeated(strategy)
    first = [np.empty(length), np.empty((2, length), np.float32), np.empty((), np.float32), np.empty(length)]
    second = {"a": np.empty(length, np.float32), "b": np.empty(3)}
    symmetric = strategy.symmetric_empty_like(first)
    calls = [(first, False), (second, False), (first, True), (second, True)]
    for step in range(1, 6):
        if step == 4 and comm.size > 1:
            with raises_everywhere(comm, mpidist.errors.InvalidArgumentError, "op"):
                all_reduce(strategy, "sum" if comm.rank else "max", first)
        for value, is_in_place in calls:
            given = symmetric if step == 5 and is_in_place and value is first and comm.rank == 0 else value
            arrays = mpidist.nest.flatten(given)[0]
            comm.Barrier()
            for at, array in enumerate(arrays):
                array[...] = step * (comm.rank + 1) + at
            result = all_reduce(strategy, "mean", given, out=given if is_in_place else None)
            assert not is_in_place or result is given
            for at, (one, array) in enumerate(zip(mpidist.nest.flatten(result)[0], arrays, strict=True)):
                assert (one == np.float32(step * (comm.size + 1) / 2 + at)).all(), (step, at)
                assert (one.shape, one.dtype, is_in_place) == (array.shape, array.dtype, one is array)
        loss, array = all_reduce(strategy, "sum", (0.5 * step, second["a"]))
        assert (loss, type(loss)) == (0.5 * step * comm.size, float)
        assert (array == second["a"] * comm.size).all()
    if native is not None:
        assert repeated[:15] == [False] * 5 + [again] * 10
    gone = [*map(weakref.ref, (*first, *second.values()))]
    del first, second, symmetric, calls, value, given, arrays, array, result, one
    assert are_gone(gone)


@pytest.mark.ranks(1, 3)
def test_repeated_number_is_reduced_as_an_array_and_stays_of_its_type(strategy, comm, repeated):
    kinds = float, np.float16, np.float32, np.int64
    for kind in kinds:
        for step in range(3):
            result = all_reduce(strategy, "sum", kind(step + comm.rank))
            assert type(result) is kind
            assert result == step * comm.size + sum(range(comm.size))
    assert repeated == [False, *[are_repeated(strategy)] * 2] * len(kinds)


@pytest.mark.ranks(1, 3)
def test_repeated_calls_are_matched_by_overridden_options(strategy, comm, repeated):
    unlike = {"reproducible": False}
    kinds = [None, Options(timeout_seconds=600.0), Options(**unlike), Options(timeout_seconds=500.0, **unlike)]
    for step in range(3):
        for options in kinds:
            assert (all_reduce(strategy, "sum", np.full(5, step), options=options) == step * comm.size).all()
    again = are_repeated(strategy)
    assert repeated == [False, again, False, *[again] * 9]
    with raises_everywhere(comm, TypeError):
        all_reduce(strategy, "sum", np.zeros(5, int), options={"timeout_seconds": 3})


@pytest.mark.ranks(2)
def test_deadline_of_a_repeated_call_is_that_of_its_own_options(strategy, comm):
    def call(seconds):
        return all_reduce(strategy, "sum", np.ones(5), options=Options(timeout_seconds=seconds))

    for _ in range(3):
        call(600.0)
    if comm.rank == 0:
        with pytest.raises(DeadlineExceededError, match="waited 1 s"):
            call(1.0)
        comm.send(None, 1)
    else:
        comm.recv(source=0)
        with pytest.raises(DeadlineExceededError):
            call(600.0)


@pytest.mark.ranks(1, 3)
def test_repeated_lists_with_equal_first_arrays_are_all_cached(strategy, comm, repeated):
    pair = namedtuple("pair", "one two")
    lists = [[np.full(16, 1.0), np.full(size, 2.0)] for size in (32, 64)]
    lists.append(pair(np.full(16, 1.0), np.full(48, 2.0)))
    for _ in range(3):
        for arrays in lists:
            results = all_reduce(strategy, "sum", arrays)
            assert type(results) is type(arrays)
            assert [int(result[-1]) for result in results] == [comm.size, 2 * comm.size]
    assert repeated == ([] if native is None else [False] * 3 + [are_repeated(strategy)] * 6)


@pytest.mark.ranks(2)
def test_nests_without_leaves_are_reduced_or_refused_on_all_ranks(strategy, comm):
    for _ in range(3):
        assert (all_reduce(strategy, "sum", np.ones(5)) == comm.size).all()
        assert all_reduce(strategy, "sum", [[]]) == [[]]
        assert all_reduce(strategy, "sum", {"a": {}, "b": ()}) == {"a": {}, "b": ()}
        with raises_everywhere(comm, mpidist.errors.InvalidArgumentError, "all_reduce"):
            all_reduce(strategy, "sum", [[]] if comm.rank else np.ones(5))


@pytest.mark.ranks(2)
def test_list_with_a_number_that_changes_after_its_start_is_reduced_as_it_was(strategy, comm):
    def start(values):
        return mpidist.get_replica_context().start_all_reduce("sum", values)

    for _ in range(3):
        values = [np.ones(20_000), 2.5]
        started = strategy.run(start, args=(values,))
        values.clear()
        array, number = started.wait()
        assert (array == comm.size).all()
        assert (number, type(number)) == (2.5 * comm.size, float)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("length", [16, 20_000])
def test_lists_into_new_outs_each_time_are_repeated_unless_memory_is_shared(strategy, comm, repeated, length):
    def call(values, outs):
        for at, value in enumerate(values):
            value[...] = at + comm.rank
        assert all_reduce(strategy, "sum", values, out=outs) is outs
        for at, out in enumerate(outs):
            assert (out == comm.size * at + sum(range(comm.size))).all()

    values, whole = [np.empty(length) for _ in range(3)], np.empty((3, length))
    for _ in range(3):
        call(values, [np.empty(length) for _ in range(3)])
    assert repeated == ([] if native is None else [False, *[are_repeated(strategy)] * 2])
    repeated.clear()
    call(values, list(whole))
    call(list(whole), [whole[1].copy(), whole[2], whole[0]])  # each value is the memory of another result
    call(values, [values[1], np.empty(length), np.empty(length)])
    call(values, [values[0], np.empty(length), np.empty(length)])
    same, fixed = np.empty(length), np.empty(length)
    fixed.flags.writeable = False
    for wrong in ([same, same, np.empty(length)], [fixed, *values[1:]], [np.empty(length + 1), *values[1:]]):
        with raises_everywhere(comm, mpidist.errors.InvalidArgumentError, "out"):
            all_reduce(strategy, "sum", values, out=wrong if comm.rank == 0 else [np.empty(length) for _ in range(3)])
    assert not any(repeated) or comm.rank


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("shape", [(5,), (1 << 18,)])
@pytest.mark.parametrize("method", ["lend", "begin"])
def test_repeated_call_failed_at_its_start_raises_on_all(comm, monkeypatch, shape, method):
    """Before data moves, so that the next call goes well."""

    def no_memory(*_):
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


@pytest.mark.ranks(1, 3)
def test_results_begin_where_other_libraries_take_them_without_a_copy(strategy, comm):
    """From 128 KiB on: alone, and beside others."""
    for count in (1 << 15, (1 << 15) + 3, 3 << 14, 1 << 16, (1 << 16) + 1):
        for step in range(3):
            value = np.ones(count, np.float32)
            results = [all_reduce(strategy, "SUM", value), all_reduce(strategy, "SUM", [value, value[:9]])[0]]
            if step:  # the memory of calls that are made once is not kept
                assert [result.ctypes.data % 64 for result in results] == [0, 0]
            assert all((result == comm.size).all() for result in results)


@pytest.mark.ranks(1, 3)
def test_calls_after_a_reset_are_as_before(strategy, comm, repeated):
    for _ in range(2):
        for _ in range(3):
            assert (all_reduce(strategy, "SUM", np.ones(5)) == comm.size).all()
        strategy.reset()
    assert repeated == [False, *[are_repeated(strategy)] * 2] * 2


@pytest.mark.ranks(1, 3)
def test_repeated_calls_of_two_strategies_and_ops_are_separate(strategy, comm):
    with Strategy(comm=comm) as second:
        for step in range(4):
            for one in (strategy, second):
                assert (all_reduce(one, "SUM", np.full(5, float(step))) == step * comm.size).all()
                assert (all_reduce(one, "sum", np.full(5, float(step))) == step * comm.size).all()
                assert (all_reduce(one, mpidist.ReduceOp.MEAN, np.full(5, float(step))) == step).all()


@pytest.mark.ranks(3)
def test_repeated_int_is_refused_where_a_sum_may_overflow(strategy, comm, repeated):
    for value in (1, 5, -7, 2**31, 2**61):
        assert all_reduce(strategy, "SUM", value) == comm.size * value
    assert repeated == [False, *[are_repeated(strategy)] * 2]  # larger ones are checked
    with raises_everywhere(comm, ValueError, "in which the sum of 3 numbers like .* may not fit"):
        all_reduce(strategy, "SUM", 2**62 if comm.rank == 1 else 5)
    assert all_reduce(strategy, "SUM", 5) == 5 * comm.size


@pytest.mark.ranks(3)
def test_repeated_int_is_refused_where_a_product_may_overflow(strategy, comm, repeated):
    for value in (1, 0, -1, 2, -5, 2**21 - 1, -(2**21)):
        assert all_reduce(strategy, "prod", value) == value**comm.size
    assert repeated == [False, *[are_repeated(strategy)] * 2]  # larger ones are checked
    for value in (2**21, 10**10, -(2**40)):
        with raises_everywhere(comm, ValueError, "the product of 3 numbers like .* is safe is 2097151"):
            all_reduce(strategy, "prod", value if comm.rank == 1 else 1)
    assert all_reduce(strategy, "prod", 7) == 7**comm.size


@pytest.mark.ranks(2)
def test_repeated_call_passes_through_few_functions(strategy, comm):
    """Their number is the time of a small call: each takes 0.1 us. What a rank does while it waits is not counted."""
    calls = set()
    waits = []  # the frame of a wait, while it runs

    def note(frame, event, _):
        if event == "call" and not waits:
            if frame.f_code.co_name == "_wait":  # not in every call: most often where ranks are more than cores
                waits.append(frame)
            else:
                calls.add(f"{frame.f_code.co_name} of {Path(frame.f_code.co_filename).name}")
        elif event == "return" and waits == [frame]:
            waits.clear()

    def names_of(value, out, most):
        context, least = mpidist.get_replica_context(), [str(count) for count in range(1000)]
        for turn in range(1000):
            if turn % 10 == 0 and max(comm.allgather(len(least))) <= most:
                break  # else the ranks wait for each other in each turn, where others take their cores
            if turn % strategy.topology.size == strategy.topology.rank:
                time.sleep(0.002)  # the other ranks are there already, so this one need not wait
            calls.clear()
            sys.setprofile(note)
            try:
                context.all_reduce("SUM", value, out=out)
            finally:
                sys.setprofile(None)
            least = min(least, sorted(calls), key=len)
        return least

    value = np.ones(5)
    most = 10 if native is not None else 50
    for given, out in ((value, value), (value, None), (1.5, None), (2, None)):
        most_of_kind = most + 8 * (out is None)  # what makes a new result, of the kind of the value
        names = strategy.run(names_of, args=(given, out, most_of_kind))
        assert len(names) <= most_of_kind, names
    symmetric, other = (strategy.symmetric_empty(5, np.float64) for _ in range(2))
    for given, out in ((value, value), (symmetric, symmetric), (symmetric, other), (value, other)):
        names = strategy.run(names_of, args=(given, out, 20 if native is not None else 1000))
        assert native is None or len(names) <= 20, names


COPIES = {
    "broadcast": lambda strategy, value, *_: strategy.broadcast(value),
    "broadcast in place": lambda strategy, value, *_: strategy.broadcast(value, out=value),
    "gather": lambda strategy, value, *_: strategy.gather(value, 0),
}
COPIES_IN_RUN = {
    "all_gather": lambda context, value, *_: context.all_gather(value, 0),
    "all_gather out": lambda context, value, whole, _: context.all_gather(value, 0, out=whole),
    "reduce_scatter": lambda context, value, *_: context.reduce_scatter("SUM", value),
    "reduce_scatter out": lambda context, value, _, part: context.reduce_scatter("SUM", value, out=part),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [np.ones, lambda count: [np.ones(count), np.ones(2 * count)]], ids=["array", "list"])
def test_repeated_copies_pass_through_few_functions(strategy, make):
    """As above, besides the comparison of the call, which is the same for all, and what a rank does while it waits."""

    def check(copies, caller):
        arrays = make(6), make(12), make(3)
        most = 35 if isinstance(arrays[0], np.ndarray) else 40  # several small arrays go in one message
        for name, copy in copies.items():
            for _ in range(3):
                passed = functions_passed(partial(copy, caller, *arrays))
            assert native is None or (len(passed) <= most and len(dict(passed)) <= 14), (name, sorted(passed))

    check(COPIES, strategy)
    strategy.run(lambda: check(COPIES_IN_RUN, mpidist.get_replica_context()))


ONES, TWO_DTYPES = np.ones(6), {"loss": np.ones(6, np.float32), "rows": np.ones((), np.int64)}
# The most functions and files that a repeated reduction passes, with those where a rank goes on after a wait.
REDUCTIONS = {
    "to some ranks": (46, 15, lambda strategy: strategy.extended.batch_reduce_to("SUM", [(ONES, 0), (ONES, 1)])),
    "of two dtypes": (38, 14, lambda strategy: strategy.reduce("SUM", TWO_DTYPES)),
    "along an axis": (36, 15, lambda strategy: strategy.reduce("SUM", ONES, axis=0)),
    "with weights": (55, 21, lambda strategy: strategy.reduce("MEAN", ONES, weight=2.0)),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", REDUCTIONS)
def test_repeated_reductions_of_each_kind_pass_through_few_functions(strategy, kind):
    most_functions, most_files, reduce = REDUCTIONS[kind]
    for _ in range(4):
        passed = functions_passed(partial(reduce, strategy))
    fits = len(passed) <= most_functions and len(dict(passed)) <= most_files
    assert fits or native is None, (len(passed), len(dict(passed)), sorted(passed))
