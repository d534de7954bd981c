"""Reduce, batch-reduce and broadcast: what goes where, and what is refused."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

pytestmark = pytest.mark.core


@pytest.fixture(params=["bound", "in scope", "extended"])
def ops(request: pytest.FixtureRequest, comm: Intracomm) -> Iterator[Any]:
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


def destinations(size: int) -> list[tuple[Any, Sequence[int]]]:
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
    ]  # type: ignore[list-item]


def test_reduce_reaches_every_kind_of_destination(ops: Any, comm: Intracomm) -> None:
    """T13, X3: a rank that is a destination gets the array, any other None."""
    value = np.full(70_000, comm.rank, np.float32)  # large enough that a message waits for its receiver
    for where, ranks in destinations(comm.size):
        for op, right in (("SUM", comm.size * (comm.size - 1) / 2), ("MEAN", (comm.size - 1) / 2)):
            result = ops.reduce(op, value, where)
            assert (result is not None) == (comm.rank in ranks), where
            assert result is None or (result == right).all(), where


def test_batch_reduce_keeps_the_order_of_pairs(ops: Any, comm: Intracomm) -> None:
    """T14: all pairs of destinations; rank r holds r and r + 1."""
    kinds = [(0, [0]), (f"/rank:{comm.size - 1}", [comm.size - 1]), ("all", range(comm.size))]
    size, rank = comm.size, comm.rank
    for (one, one_ranks), (two, two_ranks) in product(kinds, kinds):
        pairs = ((np.float32(rank + index), where) for index, where in enumerate([one, two]))
        results = ops.batch_reduce(ReduceOp.SUM, pairs)
        assert isinstance(results, list)
        rights = [size * (size - 1) / 2, size * (size + 1) / 2]
        for result, right, ranks in zip(results, rights, [one_ranks, two_ranks], strict=True):
            assert result == (right if rank in ranks else None), (one, two)


def test_broadcast_sends_what_rank_0_has(ops: Any, comm: Intracomm) -> None:
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


def test_the_value_itself_as_its_destination_means_all(ops: Any, comm: Intracomm) -> None:
    value = np.ones(2)
    assert (ops.reduce("SUM", value, value) == comm.size).all()


def test_a_variable_as_destination_is_not_written(comm: Intracomm) -> None:
    """It only names ranks."""
    with Strategy(comm=comm) as strategy, strategy.scope():
        variable = mpidist.Variable(7.0)
        assert strategy.extended.reduce_to("SUM", 1.0, variable) == comm.size
        assert float(np.asarray(variable)) == 7.0


VARIANTS: list[CrossDeviceOps] = [
    ReductionToOneDevice(),
    ReductionToOneDevice(0),
    ReductionToOneDevice("/rank:0"),
    ReductionToOneDevice(accumulation_fn=lambda parts: functools.reduce(np.add, parts)),
    NcclAllReduce(num_packs=1),
    NcclAllReduce(num_packs=0),
    HierarchicalCopyAllReduce(num_packs=8),
    CollectiveAllReduce(CommunicationOptions(bytes_per_pack=4)),
]


@pytest.mark.usefixtures("placement")
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: type(variant).__name__)
def test_every_class_reduces_alike(comm: Intracomm, variant: CrossDeviceOps) -> None:
    """T16, T22, T28, T31: rank r holds 2 r + 1 and 2 r + 2; to one rank, to all, single and batch."""
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


def test_accumulation_gets_one_array_of_each_rank_in_order(comm: Intracomm) -> None:
    """T16: any elementwise function; here the last rank wins."""
    seen: list[int] = []

    def take_last(parts: list[Any]) -> Any:
        seen.append(len(parts))
        return parts[-1]

    with ReductionToOneDevice(accumulation_fn=take_last).bind(comm) as ops:
        assert ops.reduce("SUM", np.float64(comm.rank + 10), "all") == comm.size + 9
    assert seen == ([comm.size] if comm.rank == 0 else [])


@pytest.mark.parametrize("over", ["mpi", "shared_memory"])
def test_accumulation_is_used_whatever_the_options_or_refused(
    comm: Intracomm, placement: tuple[int, ...], over: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("bytes_per_pack", [0, 1, 4])
def test_ranks_add_their_place_on_their_node(comm: Intracomm, placement: tuple[int, ...], bytes_per_pack: int) -> None:
    """T23: the rank with local index d holds [d] and [d + 1]; by the object and by the strategy, single and batch."""
    options = CommunicationOptions(bytes_per_pack)
    places = [placement[:rank].count(node) for rank, node in enumerate(placement)]
    values = [np.array([places[comm.rank] + more], np.float32) for more in (0, 1)]
    with Strategy(comm=comm) as strategy, HierarchicalCopyAllReduce().bind(comm) as bound:
        parts = strategy.extended
        assert strategy.topology.local_ranks == tuple(places)
        for single, batch in ((bound.reduce, bound.batch_reduce), (parts.reduce_to, parts.batch_reduce_to)):
            for where, ranks in destinations(comm.size)[-4:]:
                for op, divisor in (("SUM", 1), ("MEAN", comm.size)):
                    right = [np.float32(sum(places) / divisor), np.float32((sum(places) + comm.size) / divisor)]
                    results = [single(op, value, where, options) for value in values]
                    for found in (results, batch(op, [(value, where) for value in values], options)):
                        assert found == (right if comm.rank in ranks else [None, None]), (where, op)


@pytest.mark.usefixtures("placement")
def test_all_reduce_in_replica_context(comm: Intracomm) -> None:
    """T34, T38, T40, X17: numbers, a tuple, inside a conditional, and arrays that are arguments of the step."""
    size = comm.size

    def step(array: Any) -> None:
        context = mpidist.get_replica_context()
        assert context is not None
        assert context.all_reduce("SUM", 1.0) == size
        assert context.all_reduce("SUM", (1.0, 2.0)) == (size, 2 * size)
        assert context.all_reduce("MEAN", (1.0, 2.0)) == (1, 2)
        if context.num_replicas_in_sync == size:
            assert context.all_reduce(ReduceOp.MAX, context.replica_id_in_sync_group) == size - 1
        assert (context.all_reduce("SUM", array) == size * (size + 1) / 2).all()

    with Strategy(comm=comm) as strategy:
        strategy.run(step, (np.full(4, comm.rank + 1.0),))


def test_nothing_in_makes_nothing_out(ops: Any, comm: Intracomm) -> None:
    """X1."""
    assert ops.batch_reduce("SUM", []) == []
    assert ops.reduce("MEAN", {}, "all") == {}
    assert ops.reduce("SUM", [(), {"a": []}], 0) == ([(), {"a": []}] if comm.rank == 0 else None)
    assert ops.broadcast([], "all") == []


def test_all_reduce_of_nothing_is_nothing(comm: Intracomm) -> None:
    """X1."""
    with CollectiveAllReduce().bind(comm) as ops:
        assert ops.reduce("SUM", [], "all") == []
        assert ops.reduce("SUM", (), "all", out=()) == ()


def test_a_mirrored_value_is_its_own_mean(ops: Any, comm: Intracomm) -> None:
    """X18: it is no rank's contribution, so it has no sum."""
    mirrored = Mirrored((np.arange(3),))
    for op in ("MEAN", "MIN", "MAX"):
        assert ops.reduce(op, mirrored, "all").tolist() == [0, 1, 2]
    mean, kept = ops.batch_reduce("MEAN", [(np.float32(comm.rank), "all"), (mirrored, "all")])
    assert (mean, kept.tolist()) == ((comm.size - 1) / 2, [0, 1, 2])
    assert ops.reduce("MEAN", [mirrored, 1.0], 0) is None or comm.rank == 0
    if comm.size > 1:
        with raises_everywhere(comm, ValueError, "Mirrored value"):
            ops.reduce("SUM", mirrored, "all")


def test_a_per_replica_value_counts_with_its_component(ops: Any, comm: Intracomm) -> None:
    assert ops.reduce("SUM", PerReplica((2.0,)), "all") == 2 * comm.size
    assert ops.reduce("SUM", {"a": PerReplica((np.float32(1),))}, "all") == {"a": comm.size}


class Thing:
    def __repr__(self) -> str:
        return "a thing"


Call = Callable[[Any, int], Any]
MISTAKES: list[tuple[str, type[Exception], str, Call]] = [
    ("no such reduction", ValueError, "'bogus' is not a valid ReduceOp", lambda o, n: o.reduce("bogus", 1.0, "all")),
    ("no reduction", ValueError, "None is not a valid ReduceOp", lambda o, n: o.batch_reduce(None, [])),
    *(
        (f"destination {text}", ValueError, "destination", lambda o, n, make=make: o.reduce("SUM", 1.0, make(n)))
        for text, make in {
            "None": lambda n: None,
            "empty string": lambda n: "",
            "unknown object": lambda n: Thing(),
            "no rank in it": lambda n: "/cpu:0",
            "every": lambda n: "every",
            "negative": lambda n: -1,
            "too large": lambda n: n,
            "device too large": lambda n: f"/rank:{n}",
            "empty list": lambda n: [],
            "list of wrong": lambda n: [0, n],
            "fraction": lambda n: 0.5,
            "truth": lambda n: True,
            "array": lambda n: np.zeros(2),
        }.items()
    ),
    ("broadcast to nowhere", ValueError, "destination", lambda o, n: o.broadcast(1.0, None)),
    ("pair is a list", ValueError, "tuple of size 2", lambda o, n: o.batch_reduce("SUM", [[1.0, 0]])),
    ("pair of three", ValueError, "tuple of size 2", lambda o, n: o.batch_reduce("SUM", [(1.0, 0, 0)])),
    ("PerReplica first", ValueError, "tuple of size 2", lambda o, n: o.batch_reduce("SUM", [(PerReplica((1,)), 0, 0)])),
    ("pairs are a number", TypeError, "not iterable", lambda o, n: o.batch_reduce("SUM", 5)),
    ("options are a dict", TypeError, "CommunicationOptions", lambda o, n: o.reduce("SUM", 1.0, 0, {})),
    ("None", TypeError, "cannot take None", lambda o, n: o.reduce("SUM", None, 0)),
    ("text", TypeError, "builtins.str", lambda o, n: o.reduce("SUM", {"a": ["text"]}, "all")),
    ("broadcast of None", TypeError, "cannot take None", lambda o, n: o.broadcast(None, 0)),
    ("huge int", ValueError, "does not fit", lambda o, n: o.reduce("SUM", 2**63, 0)),
    ("bool", InvalidArgumentError, "SUM needs numbers, got dtype bool", lambda o, n: o.reduce("SUM", True, 0)),
    ("strings", InvalidArgumentError, "got dtype str", lambda o, n: o.reduce("MEAN", np.array(["a"]), 0)),
    ("objects", InvalidArgumentError, "got dtype object", lambda o, n: o.reduce("SUM", np.array([1, None]), 0)),
    ("dates", InvalidArgumentError, "got dtype datetime", lambda o, n: o.reduce("MAX", np.array(["2000"], "M8[s]"), 0)),
    ("records", InvalidArgumentError, "got dtype", lambda o, n: o.reduce("SUM", np.zeros(2, "f4,i4"), 0)),
    ("order of complex", InvalidArgumentError, "order", lambda o, n: o.reduce("MIN", 1j, 0)),
    ("NCCL", UnavailableError, "NCCL", lambda o, n: o.reduce("SUM", 1.0, 0, CommunicationOptions(0, None, "nccl"))),
]


@pytest.mark.parametrize(
    ("kind", "text", "call"), [row[1:] for row in MISTAKES], ids=[row[0].replace(" ", "-") for row in MISTAKES]
)
def test_a_mistake_is_refused_on_every_rank_and_forgotten(
    ops: Any, comm: Intracomm, kind: type[Exception], text: str, call: Call
) -> None:
    """X2, X3, X7: with one text, and the next call works."""
    with raises_everywhere(comm, kind, text):
        call(ops, comm.size)
    assert ops.reduce("SUM", 1.0, "all") == comm.size


@pytest.mark.parametrize(
    "call", [lambda o: o.reduce("SUM", 1.0, "all"), lambda o: o.batch_reduce("SUM", []), lambda o: o.broadcast(1, 0)]
)
def test_outside_a_scope_an_unbound_object_is_refused(call: Callable[[CrossDeviceOps], Any]) -> None:
    for ops in (CollectiveAllReduce(), ReductionToOneDevice()):
        with pytest.raises(RuntimeError, match=r"bound to no ranks: call it inside `with strategy\.scope\(\):`"):
            call(ops)
        with pytest.raises(RuntimeError, match="not made by bind"):
            ops.close()


def test_bind_makes_another_object_of_the_same_class(comm: Intracomm) -> None:
    ops = HierarchicalCopyAllReduce(num_packs=2)
    bound = ops.bind(comm)
    assert type(bound) is type(ops) is HierarchicalCopyAllReduce
    again = bound.bind(comm)
    assert bound.reduce("SUM", 1, "all") == again.reduce("SUM", 1, "all") == comm.size
    again.close()
    bound.close()
    bound.close()
    with pytest.raises(RuntimeError, match="on a closed HierarchicalCopyAllReduce: it was closed, make a new one"):
        bound.reduce("SUM", 1, "all")


@pytest.mark.parametrize("wrong", ["world", 3, object])
def test_bind_takes_communicators_only(wrong: Any) -> None:
    with pytest.raises(TypeError, match="intra-communicator of mpi4py"):
        CollectiveAllReduce().bind(wrong)


def test_parts_of_the_ranks_reduce_by_themselves(comm: Intracomm) -> None:
    """And the user's own messages on the same communicator are not disturbed."""
    part = comm.Split(comm.rank % 2, -comm.rank)
    with CollectiveAllReduce().bind(part) as ops:
        comm.isend("mine", (comm.rank + 1) % comm.size).Free()
        assert ops.reduce("SUM", 1, "all") == part.size
        assert comm.recv() == "mine"
    part.Free()


@pytest.mark.no_mpi
@pytest.mark.parametrize("kind", [NcclAllReduce, HierarchicalCopyAllReduce])
def test_negative_num_packs_are_refused(kind: Any) -> None:
    """X22."""
    with pytest.raises(ValueError, match=f"num_packs of {kind.__name__} must be a whole number >= 0, got -1"):
        kind(num_packs=-1)


@pytest.mark.no_mpi
@pytest.mark.parametrize("kind", [NcclAllReduce, HierarchicalCopyAllReduce])
@pytest.mark.parametrize("wrong", [1.5, 2.0, True, "2", None, [1]])
def test_num_packs_that_are_no_number_are_refused(kind: Any, wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"num_packs of {kind.__name__} must be a whole number"):
        kind(wrong)
    assert type(BoundOps(kind(np.int64(2)), SyncGroup.solo()).num_packs) is int


@pytest.mark.no_mpi
def test_what_an_algorithm_cannot_be_made_of_is_refused() -> None:
    with pytest.raises(TypeError, match="accumulation_fn must be a function"):
        ReductionToOneDevice(accumulation_fn=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="CommunicationOptions"):
        CollectiveAllReduce({})  # type: ignore[arg-type]
    with pytest.raises(UnavailableError, match="NCCL"):
        CollectiveAllReduce(CommunicationOptions(implementation="NCCL"))
    with pytest.raises(TypeError, match="abstract"):
        CrossDeviceOps()  # type: ignore[abstract]


def test_the_strategy_chooses_by_nodes(comm: Intracomm, placement: tuple[int, ...]) -> None:
    """T17: one node leaves it to the transport; several need a hierarchy."""
    with Strategy(comm=comm) as strategy:
        chosen = type(parts_of(strategy).cross_device_ops.algorithm)
        assert chosen is (CollectiveAllReduce if len(set(placement)) == 1 else HierarchicalCopyAllReduce)
    with raises_everywhere(comm, UnavailableError, "NCCL"):
        Strategy(None, CommunicationOptions(implementation="NCCL"), comm=comm)


@pytest.mark.parametrize("op", ["MAX", "MIN", "PROD"])
def test_function_that_adds_is_not_asked_for_other_operations(comm: Intracomm, op: str) -> None:
    with ReductionToOneDevice(accumulation_fn=lambda parts: 10 * sum(parts)).bind(comm) as ops:
        assert ops.reduce("SUM", 1.0, "all") == 10 * comm.size
        right = {"MAX": comm.size, "MIN": 1, "PROD": math.factorial(comm.size)}[op]
        assert ops.reduce(op, float(comm.rank + 1), "all") == right


@pytest.mark.parametrize("device", [7, -1, "nonsense", "/rank:9"])
def test_device_that_is_no_rank_is_refused_when_the_ranks_are_known(comm: Intracomm, device: Any) -> None:
    with raises_everywhere(comm, ValueError, "rank|destinations must be"):
        Strategy(comm=comm, cross_device_ops=ReductionToOneDevice(device))


def test_long_texts_are_broadcast(comm: Intracomm) -> None:
    """Longer than what goes through shared memory at once."""
    with Strategy(comm=comm) as strategy:
        mine = np.array(["a" * 300_000, "b"] if comm.rank == 0 else ["c" * 300_000, "d"])
        assert strategy.extended.broadcast_to(mine, "all").tolist() == ["a" * 300_000, "b"]
        strategy.extended.broadcast_to(np.array("", "U0"), "all")


@pytest.mark.ranks(min=2)
def test_dates_of_other_units_are_no_equal_arguments(comm: Intracomm) -> None:
    with Strategy(comm=comm) as strategy:
        dates = np.zeros(3, "M8[s]" if comm.rank else "M8[ms]")
        with raises_everywhere(comm, InvalidArgumentError, r"datetime64\[ms\]\[3\]; .*datetime64\[s\]\[3\]"):
            strategy.extended.broadcast_to(dates, "all")


def test_pieces_of_an_array_that_is_not_contiguous_are_copied_once(
    comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean of integers travels in many messages."""
    monkeypatch.setenv("MPIDIST_TRANSPORT", "mpi")
    value, copies = np.arange(1 << 20, dtype=np.int32).reshape(1024, 1024).T, list[str]()

    def note(_: FrameType, event: str, function: Any) -> None:
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


@pytest.mark.parametrize("call", ["reduce", "batch_reduce", "broadcast"])
def test_calls_of_an_unbound_object_in_run_are_refused(comm: Intracomm, call: str) -> None:
    arguments = {"reduce": ("sum", 1.0, "all"), "batch_reduce": ("sum", [(1.0, "all")]), "broadcast": (1.0, "all")}
    ops = NcclAllReduce()
    with Strategy(comm=comm, cross_device_ops=ops) as strategy, ops.bind(comm) as bound:
        text = rf"^{call} of NcclAllReduce\(\) requires .*; call .*get_replica_context"
        with pytest.raises(RuntimeError, match=text):
            strategy.run(getattr(ops, call), args=arguments[call])
        strategy.run(getattr(bound, call), args=arguments[call])  # of another group, whatever the strategy does


@pytest.mark.parametrize("wrong", [lambda ops: ops.batch_reduce("sum", 5), lambda ops: ops.reduce("sum", object(), 0)])
def test_values_of_no_kind_are_value_errors_and_type_errors(comm: Intracomm, ops: Any, wrong: Any) -> None:
    for kind in (ValueError, TypeError):
        with raises_everywhere(comm, kind):
            wrong(ops)


@pytest.mark.parametrize("value", [np.int64(0), np.array(0), np.ones(2), 2.5, [0]], ids=repr)
def test_a_value_as_its_own_destination_goes_to_all_ranks(comm: Intracomm, ops: Any, value: Any) -> None:
    result = ops.reduce("sum", value, value)
    assert np.all(np.asarray(result) == comm.size * np.asarray(value))
    (result,) = ops.batch_reduce("sum", [(value, value)])
    assert result is not None
    assert (ops.reduce("sum", 0, 0) is not None) == (comm.rank == 0)  # an int is a rank


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("form", [lambda number: number, lambda number: {"a": [number, 1.5]}])
def test_python_ints_whose_sum_may_not_fit_are_refused(comm: Intracomm, ops: Any, sign: int, form: Any) -> None:
    largest = (2**63 - 1) // comm.size
    assert ops.reduce("max", sign * largest, "all") == sign * largest
    assert ops.reduce("sum", sign * largest, "all") == comm.size * sign * largest
    if comm.size > 1:
        with raises_everywhere(comm, ValueError, f"the sum of {comm.size} numbers like .* the largest that is safe"):
            ops.reduce("sum", form(sign * (largest + 1) if comm.rank == comm.size - 1 else 0), "all")
    assert ops.reduce("sum", np.int64(2**62), "all") == (np.full(1, 2**62) * comm.size)[0]  # which wraps
