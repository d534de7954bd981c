"""Reduce, batch-reduce and broadcast: what goes where, and what is refused."""

import functools
import math
import sys
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.everywhere import raises_everywhere

import mpidist
from mpidist import (
    CollectiveAllReduce,
    CommunicationOptions,
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    Mirrored,
    NcclAllReduce,
    PerReplica,
    ReduceOp,
    ReductionToOneDevice,
)
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.errors import InvalidArgumentError, UnavailableError
from mpidist.transport.group.sync_group import SyncGroup

pytestmark = pytest.mark.core


@pytest.fixture(params=["bound", "in scope", "extended"])
def ops(request, comm):
    """The three ways to the same calls."""
    if request.param == "bound":
        with HierarchicalCopyAllReduce().bind(comm) as bound:
            yield bound
        return
    with Strategy(comm=comm) as strategy:
        if request.param == "in scope":
            with strategy.scope():
                yield CollectiveAllReduce()
        else:
            parts = strategy.extended
            yield SimpleNamespace(
                reduce=parts.reduce_to, batch_reduce=parts.batch_reduce_to, broadcast=parts.broadcast_to
            )


def destinations(size):
    """Every kind of destination, and the ranks that it means."""
    last = size - 1
    return [
        (0, [0]),
        (last, [last]),
        (np.int32(last), [last]),
        ([last, 0, last], {0, last}),
        ([last, last // 2], {last // 2, last}),
        ((0,), [0]),
        ({last}, [last]),
        (range(size), range(size)),
        (frozenset([0]), [0]),
        ("all", range(size)),
        ("/rank:0", [0]),
        (f"/rank:{last}/GPU:0", [last]),
        (f"/RANK:{last}/cpu:0", [last]),
        (PerReplica((1.0,)), range(size)),
        (Mirrored((1.0,)), range(size)),
    ]


def test_reduce_reaches_every_kind_of_destination(ops, comm):
    """A rank that is a destination gets the array, any other None."""
    value = np.full(70_000, comm.rank, np.float32)  # large enough that a message waits for its receiver
    for where, ranks in destinations(comm.size):
        for op, right in (("SUM", comm.size * (comm.size - 1) / 2), ("MEAN", (comm.size - 1) / 2)):
            result = ops.reduce(op, value, where)
            assert (result is not None) == (comm.rank in ranks), where
            assert result is None or (result == right).all(), where


def test_batch_reduce_keeps_the_order_of_pairs(ops, comm):
    """All pairs of destinations; rank r holds r and r + 1."""
    kinds = [(0, [0]), (f"/rank:{comm.size - 1}", [comm.size - 1]), ("all", range(comm.size))]
    size, rank = comm.size, comm.rank
    for (one, one_ranks), (two, two_ranks) in product(kinds, kinds):
        pairs = ((np.float32(rank + index), where) for index, where in enumerate([one, two]))
        results = ops.batch_reduce(ReduceOp.SUM, pairs)
        assert isinstance(results, list)
        rights = [size * (size - 1) / 2, size * (size + 1) / 2]
        for result, right, ranks in zip(results, rights, [one_ranks, two_ranks], strict=True):
            assert result == (right if rank in ranks else None), (one, two)


def test_broadcast_sends_the_value_of_rank_0(ops, comm):
    """To every kind of destination, and of any dtype that memory can hold."""
    for where, ranks in destinations(comm.size):
        value = {
            "w": np.full((2, 2), comm.rank + 5, np.int16),
            "n": comm.rank + 0.5,
            "flags": np.array([comm.rank == 0]),
        }
        result = ops.broadcast(value, where)
        assert (result is not None) == (comm.rank in ranks), where
        if result is not None:
            assert (result["w"] == 5).all()
            assert (result["n"], type(result["n"])) == (0.5, float)
            assert result["flags"].tolist() == [True]


def test_reduce_to_a_variable_does_not_write_it(comm):
    with Strategy(comm=comm) as strategy, strategy.scope():
        variable = mpidist.Variable(7.0)
        assert strategy.extended.reduce_to("SUM", 1.0, variable) == comm.size
        assert float(np.asarray(variable)) == 7.0


VARIANTS = [
    ReductionToOneDevice("/rank:0"),
    ReductionToOneDevice(accumulation_fn=lambda parts: functools.reduce(np.add, parts)),
    NcclAllReduce(num_packs=0),
    HierarchicalCopyAllReduce(num_packs=8),
    CollectiveAllReduce(CommunicationOptions(bytes_per_pack=4)),
]


@pytest.mark.ranks(2, 3)
@pytest.mark.usefixtures("placement")
@pytest.mark.parametrize("placement", ["even"], indirect=True)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: type(variant).__name__)
def test_cross_device_ops_classes_reduce_alike(comm, variant):
    """Rank r holds 2 r + 1 and 2 r + 2; to one rank, to all, single and batch. See test_algorithms for placements."""
    rank, size = comm.rank, comm.size
    values = [np.full(3, 2.0 * rank + 1), np.full((2, 2), 2.0 * rank + 2)]
    with variant.bind(comm) as ops:
        for op, divisor in (("SUM", 1), ("mean", size)):
            rights = [size * size / divisor, size * (size + 1) / divisor]
            for where in (0, size - 1, "all"):
                results = [ops.reduce(op, value, where) for value in values]
                results += ops.batch_reduce(op, [(value, where) for value in values])
                assert [result is not None for result in results] == [where in ("all", rank)] * 4
                for result, right in zip(results, rights * 2, strict=True):
                    assert result is None or (result == right).all(), (op, where)
            assert [float(result.max()) for result in ops.reduce(op, values, "all")] == rights


@pytest.mark.ranks(1, 3)
def test_accumulation_gets_one_array_of_each_rank_in_order_and_sums_alone(comm):
    """Any elementwise function; here the last rank wins."""
    seen = []

    def take_last(parts):
        seen.append(len(parts))
        return parts[-1]

    with ReductionToOneDevice(accumulation_fn=take_last).bind(comm) as ops:
        assert ops.reduce("SUM", np.float64(comm.rank + 10), "all") == comm.size + 9
        for op, right in {"MAX": comm.size, "MIN": 1, "PROD": math.factorial(comm.size)}.items():
            assert ops.reduce(op, float(comm.rank + 1), "all") == right
    assert seen == ([comm.size] if comm.rank == 0 else [])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("accumulate", "got"),
    [
        (lambda parts: None, r"None \(is a `return` missing\?\)"),
        (lambda parts: np.mean(parts, axis=0), r"float64\[3\]; needed .* int64\[3\]"),
        (lambda parts: np.concatenate(parts), r"int64\[6\]"),
        (lambda parts: 7, "7;"),
    ],
)
def test_accumulation_fn_that_returns_no_such_array_is_refused(comm, accumulate, got):
    refused = pytest.raises((ValueError, mpidist.errors.PeerFailedError), match=f"accumulation_fn returned {got}")
    with ReductionToOneDevice(accumulation_fn=accumulate).bind(comm) as ops, refused:
        ops.reduce("SUM", np.arange(3), "all")


@pytest.mark.parametrize("placement", ["one node", "even"], indirect=True)
@pytest.mark.parametrize("over", ["mpi", "shared_memory"])
@pytest.mark.usefixtures("placement")
def test_accumulation_fn_is_used_with_any_options_or_refused(comm, over, monkeypatch):
    monkeypatch.setenv("MPIDIST_TRANSPORT", over)
    largest = ReductionToOneDevice(accumulation_fn=np.maximum.reduce)
    value = np.full(5, comm.rank + 1.0)
    with Strategy(cross_device_ops=largest, comm=comm) as strategy:
        for options in (CommunicationOptions(), CommunicationOptions(reproducible=True)):
            for where in (0, comm.size - 1, "all"):
                result = strategy.extended.reduce_to("SUM", value, where, options)
                assert result is None or result.tolist() == [comm.size] * 5
        with raises_everywhere(comm, ValueError, "adds by a function of its own, which a ring cannot"):
            strategy.reduce("SUM", value, options=CommunicationOptions(implementation="RING"))
    ring = CommunicationOptions(implementation="RING")
    with raises_everywhere(comm, ValueError, "adds by a function of its own"):
        Strategy(None, ring, cross_device_ops=largest, comm=comm)


def test_reduce_of_empty_nests_is_empty(ops, comm):
    assert ops.batch_reduce("SUM", []) == []
    assert ops.reduce("MEAN", {}, "all") == {}
    assert ops.reduce("SUM", [(), {"a": []}], 0) == ([(), {"a": []}] if comm.rank == 0 else None)
    assert ops.reduce("SUM", [], "all") == []
    assert ops.broadcast([], "all") == []


class Thing:
    def __repr__(self):
        return "a thing"


Call = Callable[[Any, int], Any]
MISTAKES = [
    (ValueError, "'bogus' is not a valid ReduceOp", lambda o, n: o.reduce("bogus", 1.0, "all")),
    (ValueError, "None is not a valid ReduceOp", lambda o, n: o.batch_reduce(None, [])),
    *(
        (ValueError, "destination", lambda o, n, where=where: o.reduce("SUM", 1.0, where))
        for where in (None, "", Thing(), "/cpu:0", "every", -1, [], 0.5, True, np.zeros(2))
    ),
    (ValueError, "destination", lambda o, n: o.reduce("SUM", 1.0, n)),
    (ValueError, "destination", lambda o, n: o.reduce("SUM", 1.0, f"/rank:{n}")),
    (ValueError, "destination", lambda o, n: o.reduce("SUM", 1.0, [0, n])),
    (ValueError, "destination", lambda o, n: o.broadcast(1.0, None)),
    (ValueError, "tuple of size 2", lambda o, n: o.batch_reduce("SUM", [[1.0, 0]])),
    (ValueError, "tuple of size 2", lambda o, n: o.batch_reduce("SUM", [(1.0, 0, 0)])),
    (ValueError, "tuple of size 2", lambda o, n: o.batch_reduce("SUM", [(PerReplica((1,)), 0, 0)])),
    (TypeError, "not iterable", lambda o, n: o.batch_reduce("SUM", 5)),
    (TypeError, "CommunicationOptions", lambda o, n: o.reduce("SUM", 1.0, 0, {})),
    (TypeError, "cannot take None", lambda o, n: o.reduce("SUM", None, 0)),
    (TypeError, "builtins.str", lambda o, n: o.reduce("SUM", {"a": ["text"]}, "all")),
    (TypeError, "cannot take None", lambda o, n: o.broadcast(None, 0)),
    (ValueError, "does not fit", lambda o, n: o.reduce("SUM", 2**63, 0)),
    (InvalidArgumentError, "SUM needs numbers, got dtype bool", lambda o, n: o.reduce("SUM", True, 0)),
    (InvalidArgumentError, "got dtype str", lambda o, n: o.reduce("MEAN", np.array(["a"]), 0)),
    (InvalidArgumentError, "got dtype object", lambda o, n: o.reduce("SUM", np.array([1, None]), 0)),
    (InvalidArgumentError, "got dtype datetime", lambda o, n: o.reduce("MAX", np.array(["2000"], "M8[s]"), 0)),
    (InvalidArgumentError, "got dtype", lambda o, n: o.reduce("SUM", np.zeros(2, "f4,i4"), 0)),
    (InvalidArgumentError, "order", lambda o, n: o.reduce("MIN", 1j, 0)),
    (UnavailableError, "NCCL", lambda o, n: o.reduce("SUM", 1.0, 0, CommunicationOptions(0, None, "nccl"))),
]


def test_mistake_on_all_ranks_is_refused_and_forgotten(ops, comm):
    """With one text, and the next call works."""
    for kind, text, call in MISTAKES:
        with raises_everywhere(comm, kind, text):
            call(ops, comm.size)
        assert ops.reduce("SUM", 1.0, "all") == comm.size
    for call in (lambda ops, size: ops.batch_reduce("sum", 5), lambda ops, size: ops.reduce("sum", object(), 0)):
        for kind in (ValueError, TypeError):  # a value of no kind is both
            with raises_everywhere(comm, kind):
                call(ops, comm.size)


@pytest.mark.no_mpi
def test_outside_a_scope_an_unbound_object_is_refused():
    ops = CollectiveAllReduce()
    for call in (
        lambda: ops.reduce("SUM", 1.0, "all"),
        lambda: ops.batch_reduce("SUM", []),
        lambda: ops.broadcast(1, 0),
    ):
        with pytest.raises(RuntimeError, match=r"bound to no ranks: call it inside `with strategy\.scope\(\):`"):
            call()
    with pytest.raises(RuntimeError, match="not made by bind"):
        ops.close()


@pytest.mark.ranks(2)
def test_bind_makes_another_object_of_the_same_class(comm):
    ops = HierarchicalCopyAllReduce(num_packs=2)
    bound = ops.bind(comm)
    assert type(bound) is type(ops) is HierarchicalCopyAllReduce
    again = bound.bind(comm)
    assert bound.reduce("SUM", 1, "all") == again.reduce("SUM", 1, "all") == comm.size
    again.close()
    try:
        raise KeyError
    except KeyError:
        if comm.rank == 0:
            with bound:  # whose end is an ordinary close, as below that of rank 1
                pass
    bound.close()
    bound.close()
    with pytest.raises(RuntimeError, match="on a closed HierarchicalCopyAllReduce: it was closed, make a new one"):
        bound.reduce("SUM", 1, "all")
    for wrong in ("world", 3, object):
        with pytest.raises(TypeError, match="intra-communicator of mpi4py"):
            ops.bind(wrong)


@pytest.mark.ranks(3)
def test_parts_of_the_ranks_reduce_by_themselves(comm):
    """And the user's own messages on the same communicator are not disturbed."""
    part = comm.Split(comm.rank % 2, -comm.rank)
    with CollectiveAllReduce().bind(part) as ops:
        comm.isend("mine", (comm.rank + 1) % comm.size).Free()
        assert ops.reduce("SUM", 1, "all") == part.size
        assert comm.recv() == "mine"
    part.Free()


@pytest.mark.no_mpi
def test_algorithms_refuse_wrong_arguments():
    for kind in (NcclAllReduce, HierarchicalCopyAllReduce):
        with pytest.raises(ValueError, match=f"num_packs of {kind.__name__} must be a whole number >= 0, got -1"):
            kind(num_packs=-1)
        for wrong in (1.5, 2.0, True, "2", None, [1]):
            with pytest.raises(TypeError, match=f"num_packs of {kind.__name__} must be a whole number"):
                kind(wrong)
        assert type(BoundOps(kind(np.int64(2)), SyncGroup.solo()).configuration[1]) is int
    with pytest.raises(TypeError, match="accumulation_fn must be a function"):
        ReductionToOneDevice(accumulation_fn=3)
    with pytest.raises(TypeError, match="CommunicationOptions"):
        CollectiveAllReduce({})
    with pytest.raises(UnavailableError, match="NCCL"):
        CollectiveAllReduce(CommunicationOptions(implementation="NCCL"))
    with pytest.raises(TypeError, match="abstract"):
        CrossDeviceOps()


def test_cross_device_ops_default_depends_on_nodes(comm, placement):
    """One node leaves it to the transport; several need a hierarchy."""
    with Strategy(comm=comm) as strategy:
        chosen = type(parts_of(strategy).cross_device_ops.algorithm)
        assert chosen is (CollectiveAllReduce if len(set(placement)) == 1 else HierarchicalCopyAllReduce)
    with raises_everywhere(comm, UnavailableError, "NCCL"):
        Strategy(None, CommunicationOptions(implementation="NCCL"), comm=comm)


@pytest.mark.ranks(2)
def test_reduce_to_device_without_a_rank_is_refused_by_the_strategy(comm):
    for device in (7, -1, "nonsense", "/rank:9"):
        with raises_everywhere(comm, ValueError, "rank|destinations must be"):
            Strategy(comm=comm, cross_device_ops=ReductionToOneDevice(device))


@pytest.mark.ranks(3)
def test_long_texts_are_broadcast(comm):
    """Longer than what goes through shared memory at once."""
    with Strategy(comm=comm) as strategy:
        mine = np.array(["a" * 300_000, "b"] if comm.rank == 0 else ["c" * 300_000, "d"])
        assert strategy.extended.broadcast_to(mine, "all").tolist() == ["a" * 300_000, "b"]
        strategy.extended.broadcast_to(np.array("", "U0"), "all")


@pytest.mark.ranks(2)
def test_pieces_of_an_array_that_is_not_contiguous_are_copied_once(comm, monkeypatch):
    """A mean of integers travels in many messages."""
    monkeypatch.setenv("MPIDIST_TRANSPORT", "mpi")
    value, copies = np.arange(1 << 20, dtype=np.int32).reshape(1024, 1024).T, list[str]()

    def note(_, event, function):
        its = getattr(function, "__self__", None)
        if event == "c_call" and isinstance(its, np.ndarray) and its.size == value.size and not its.flags.c_contiguous:
            copies.append(function.__name__)

    with Strategy(comm=comm) as strategy:
        sys.setprofile(note)
        try:
            result = strategy.reduce("mean", value)
        finally:
            sys.setprofile(None)
    assert (result == value).all()
    assert len(copies) <= 1, copies


@pytest.mark.ranks(2)
def test_calls_of_an_unbound_object_in_run_are_refused(comm):
    calls = {"reduce": ("sum", 1.0, "all"), "batch_reduce": ("sum", [(1.0, "all")]), "broadcast": (1.0, "all")}
    ops = NcclAllReduce()
    with Strategy(comm=comm, cross_device_ops=ops) as strategy, ops.bind(comm) as bound:
        for call, arguments in calls.items():
            text = rf"^{call} of NcclAllReduce\(\) requires .*; call .*get_replica_context"
            with pytest.raises(RuntimeError, match=text):
                strategy.run(getattr(ops, call), args=arguments)
            strategy.run(getattr(bound, call), args=arguments)  # of another group, whatever the strategy does


def test_reduce_to_the_value_itself_reaches_all_ranks(comm, ops):
    for value in (np.int64(0), np.array(0), np.ones(2), 2.5, [0]):
        result = ops.reduce("sum", value, value)
        assert np.all(np.asarray(result) == comm.size * np.asarray(value))
        (result,) = ops.batch_reduce("sum", [(value, value)])
        assert result is not None
    assert (ops.reduce("sum", 0, 0) is not None) == (comm.rank == 0)  # an int is a rank


def test_reduce_of_python_ints_with_too_large_sums_is_refused(comm, ops):
    largest = (2**63 - 1) // comm.size
    for sign, beyond in ((1, largest + 1), (-1, -(2**63))):
        assert ops.reduce("max", sign * largest, "all") == sign * largest
        assert ops.reduce("sum", sign * largest, "all") == comm.size * sign * largest
        too_large = beyond if comm.rank == comm.size - 1 else 0
        for value in (too_large, {"a": [too_large, 1.5]}) if comm.size > 1 else ():
            with raises_everywhere(
                comm, ValueError, f"the sum of {comm.size} numbers like .* the largest that is safe"
            ):
                ops.reduce("sum", value, "all")
    assert ops.reduce("sum", np.int64(2**62), "all") == (np.full(1, 2**62) * comm.size)[0]  # which wraps


class Returning(CrossDeviceOps):
    """An algorithm of a user's, which returns the sum in place of leaving it in the buffer."""

    def _all_reduce(self, levels, buffer, reduction):
        return buffer * levels.world.size


class Unprepared(CrossDeviceOps):
    """An algorithm of a user's, whose `__init__` does not call the one of its base class."""

    def __init__(self):
        pass

    def _all_reduce(self, levels, buffer, reduction):
        levels.world.all_reduce(buffer, reduction)


@pytest.mark.ranks(2)
def test_algorithm_may_have_an_init_that_calls_no_other(comm):
    with Strategy(cross_device_ops=Unprepared(), comm=comm) as strategy:
        assert strategy.reduce("sum", 1) == comm.size
    with Unprepared().bind(comm) as bound:
        assert bound.reduce("sum", 1, 0) == (comm.size if comm.rank == 0 else None)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("destinations", "hook"), [("all", "_all_reduce"), (0, "reduce_to_root")])
def test_algorithm_that_returns_its_result_is_refused(comm, destinations, hook):
    ops = Returning(reduce_to_root=lambda levels, buffer, reduction, root: buffer * levels.world.size)
    with ops.bind(comm) as bound, pytest.raises(TypeError, match=f"{hook} of Returning returned .*must leave"):
        bound.reduce("sum", np.ones(3), destinations)
