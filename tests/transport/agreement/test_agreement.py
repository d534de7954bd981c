"""All ranks make the same call, or all learn why not."""

import re
from collections import OrderedDict
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from support.agreements import make_agreement
from support.everywhere import raises_everywhere
from support.replicas import inside
from support.transports import TRANSPORTS

import mpidist
from mpidist import CommunicationOptions, HierarchicalCopyAllReduce, Mirrored, ReductionToOneDevice
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.errors import InvalidArgumentError, PeerFailedError
from mpidist.transport.agreement.agreement import Call, SoloAgreement
from mpidist.transport.agreement.fingerprint import fingerprint_of

pytestmark = pytest.mark.core


@pytest.fixture
def agreement(comm):
    made = make_agreement(comm)
    yield made
    made.free()


def options(**fields):
    return CommunicationOptions(**fields)


def scoped(strategy, ops):
    """Use an algorithm that the strategy knows nothing of."""
    with strategy.scope():
        return ops.reduce("SUM", np.ones(4), "all")


def scatter(strategy, value, axis=0):
    return inside(strategy, "reduce_scatter", "SUM", value, axis)


def lookup(key):
    yield {"y": 1.0}[key], "all"


class Lazy:
    """An array that cannot be read after all."""

    def __array__(self, dtype=None, copy=None):
        raise OSError("no file")


def lazy(fails):
    return Lazy() if fails else np.ones(1)


# Name -> a call, what the last rank passes and what the others pass; what differs, and how the error shows both.
DIFFERENCES = {
    "reduction": (lambda s, x: s.reduce(x, 1.0), "SUM", "MEAN", "op", "SUM", "MEAN"),
    "length": (lambda s, x: s.reduce("SUM", np.ones(x)), 2, 3, "array 0", "f64[2]", "f64[3]"),
    "dtype": (lambda s, x: s.reduce("SUM", np.ones(2, x)), "f4", "f8", "array 0", "f32[2]", "f64[2]"),
    "batch": (
        lambda s, x: s.extended.batch_reduce_to("SUM", [(1.0, 0)] * x), 2, 3, "number of arrays", "2", "3",
    ),
    "destinations": (lambda s, x: s.extended.reduce_to("SUM", 1.0, x), 0, 1, "destinations", "rank 0", "rank 1"),
    "packs": (lambda s, x: s.reduce("SUM", 1.0, options=options(bytes_per_pack=x)), 1, 4, "bytes_per_pack", "1", "4"),
    "implementation": (
        lambda s, x: s.reduce("SUM", 1.0, options=options(implementation=x)), "RING", "AUTO", "implementation", "RING",
        "AUTO",
    ),
    "rank order": (
        lambda s, x: s.reduce("SUM", 1.0, options=options(reproducible=x)), True, False, "reproducible", "True", "F",
    ),
    "deadline": (
        lambda s, x: s.reduce("SUM", 1.0, options=options(timeout_seconds=x)), 9, 0, "timeout", "set", "none",
    ),
    "kind of nest": (lambda s, x: inside(s, "all_reduce", "SUM", x), [1.0], (1.0,), "form", "[*]", "(*)"),
    "keys": (lambda s, x: inside(s, "all_reduce", "SUM", {x: 1.0}), "w", "b", "array ['w']", "f64[]", "-"),
    "length in a pair": (
        lambda s, x: s.extended.batch_reduce_to("SUM", [(1.0, 0), ([np.ones(x)], 0)]), 2, 3, "array [1][0]",
        "f64[2]", "f64[3]",
    ),
    "emptiness": (lambda s, x: inside(s, "all_reduce", "SUM", x), [], [1.0], "number of arrays", "0", "1"),
    "mirrored": (lambda s, x: s.reduce("MEAN", x), Mirrored((1.0,)), 1.0, "mirrored", "array 0", "none"),
    "axis": (lambda s, x: s.reduce("SUM", np.ones((3, 3)), axis=x), 0, 1, "call", "reduce along axis 0", "reduce a"),
    "axis to gather": (lambda s, x: s.gather(np.ones((3, 3)), x), 0, 1, "axis", "0", "1"),
    "off the axis": (
        lambda s, x: s.gather(np.ones((1, x)), 0), 2, 3, r"array 0 (Shape mismatch off the axis)", "float64[*,2]",
        "float64[*,3]",
    ),
    "call": (
        lambda s, x: s.reduce("SUM", np.ones(1)) if x else s.gather(np.ones(1), 0), True, False, "call", "reduce",
        "gather",
    ),
    "name of the call": (
        lambda s, x: parts_of(s).cross_device_ops.all_reduce("SUM", 1.0, call=x), "assignment to 'a'",
        "assignment to 'b'", "call", "assignment to 'a'", "assignment to 'b'",
    ),
    "broadcast": (lambda s, x: s.extended.broadcast_to(np.ones(x), 0), 2, 3, "array 0", "f64[2]", "f64[3]"),
    "unit of dates": (
        lambda s, x: s.extended.broadcast_to(np.zeros(3, x), "all"), "M8[s]", "M8[ms]", "array 0", "datetime64[s][3]",
        "datetime64[ms][3]",
    ),
    "dtype of ml_dtypes": (
        lambda s, x: s.reduce("SUM", np.ones(2, x)), ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e4m3fn, "array 0",
        "float8_e4m3fnuz[2]", "float8_e4m3fn[2]",
    ),
    "merge function": (lambda s, x: inside(s, "merge_call", x), len, print, "function", "len", "print"),
    "allocation": (lambda s, x: s.symmetric_empty(x, "f4"), 3, 2, "array 0", "<f4[3]", "<f4[2]"),
    "algorithm": (scoped, ReductionToOneDevice(), HierarchicalCopyAllReduce(), "cross_device_ops", "('R", "('H"),
    "num_packs": (
        lambda s, x: scoped(s, HierarchicalCopyAllReduce(x)), 0, 3, "cross", "('HierarchicalCopyAllReduce', 0",
        "('HierarchicalCopyAllReduce', 3",
    ),
    # One rank's own mistake: the others passed nothing wrong.
    "bool": (lambda s, x: s.reduce("SUM", x), True, 1.0, "error", "InvalidArgumentError: SUM needs numbers", "-"),
    "None": (lambda s, x: s.reduce("SUM", x), None, 1.0, "error", "InvalidTypeError: cannot take None, which", "-"),
    "None in a nest": (
        lambda s, x: inside(s, "all_reduce", "SUM", [1.0, {"bias": x}]), None, 1.0, "error",
        "InvalidTypeError: [1]['bias'] is None, which is neither", "-",
    ),
    "no leaf": (lambda s, x: s.reduce("SUM", [1, x]), "a", 1, "error", "InvalidTypeError: [1]: cannot take a", "-"),
    "no leaf to gather": (lambda s, x: s.gather([x], 0), "a", np.ones(1), "error", "InvalidTypeError: [0]: ", "-"),
    "no leaf to broadcast": (
        lambda s, x: s.extended.broadcast_to({"a": x}, 0), "a", 1, "error", "InvalidTypeError: ['a']: cannot take", "-",
    ),
    "no leaf to scatter": (
        lambda s, x: inside(s, "reduce_scatter", "SUM", (x,)), "a", np.ones(3), "error", "InvalidTypeError: [0]:", "-",
    ),
    "no leaf along an axis": (
        lambda s, x: s.reduce("SUM", [x], axis=0), "a", np.ones(1), "error", "InvalidTypeError: [0]: cannot take", "-",
    ),
    "no reduction": (lambda s, x: s.reduce(x, 1.0), "bogus", "SUM", "error", "ValueError: 'bogus' is not a valid", "-"),
    "no destination": (lambda s, x: s.extended.broadcast_to(1.0, x), -1, 0, "error", "ValueError: destination ra", "-"),
    "no pairs": (lambda s, x: s.extended.batch_reduce_to("SUM", x), 5, [], "error", "InvalidTypeError: value_des", "-"),
    "no axis": (lambda s, x: s.reduce("SUM", np.ones(2), axis=x), 1, 0, "error", "InvalidArgumentError: an ", "-"),
    "scalar": (lambda s, x: s.gather(x, 0), 1.0, np.ones(1), "error", "InvalidArgumentError: a scalar", "-"),
    "failing pairs": (lambda s, x: s.extended.batch_reduce_to("SUM", lookup(x)), "n", "y", "error", "KeyError", "-"),
    "failing array": (lambda s, x: s.reduce("SUM", lazy(x)), True, False, "error", "OSError: no file", "-"),
    "failing broadcast": (lambda s, x: s.extended.broadcast_to(lazy(x), 0), True, False, "error", "OSError: no f", "-"),
    "failing gather": (lambda s, x: s.gather(lazy(x), 0), True, False, "error", "OSError: no file", "-"),
    "failing axis": (lambda s, x: s.reduce("SUM", lazy(x), axis=0), True, False, "error", "OSError: no file", "-"),
    # Calls that have their own rules.
    "axes off the axis": (
        lambda s, x: s.gather(np.ones(x), 0), (1, 2, 1), (1, 2), "array 0 (Shape mismatch off the axis)",
        "float64[*,2,1]", "float64[*,2]",
    ),
    "dtype to gather": (lambda s, x: s.gather(np.ones(2, x), 0), "f4", "f8", "array 0", "float32[*]", "float64[*]"),
    "nest to gather": (lambda s, x: s.gather(x, 0), (np.ones(2),), [np.ones(2)], "form of the nest", "(*)", "[*]"),
    "arrays to gather": (lambda s, x: s.gather([np.ones(2)] * x, 0), 2, 1, "form of the nest", "[*, *]", "[*]"),
    "op along an axis": (lambda s, x: s.reduce(x, np.ones(3), axis=0), "MEAN", "SUM", "number of arrays", "2", "1"),
    "type to allocate": (lambda s, x: s.symmetric_empty(2, x), "f8", "f4", "array 0", "<f8[2]", "<f4[2]"),
    "place to allocate": (lambda s, x: s.symmetric_empty(2, "f4", per_node=x), True, False, "per_node", "Tr", "False"),
    "no shape": (lambda s, x: s.symmetric_empty(x, "f4"), -1, 2, "error", "InvalidArgumentError: the lengths in", "-"),
    "length to scatter": (lambda s, x: scatter(s, np.ones(x)), 4, 3, "array 0", "f64[4]", "f64[3]"),
    "axis to scatter": (lambda s, x: scatter(s, np.ones((2, 2)), x), 1, 0, "axis", "1", "0"),
    "scalar to scatter": (lambda s, x: scatter(s, x), 1.0, np.ones(2), "error", "InvalidArgumentError: a scalar", "-"),
    "bool to scatter": (
        lambda s, x: scatter(s, np.ones(2, x)), bool, float, "error", "InvalidArgumentError: SUM needs numbers", "-",
    ),
    "root": (lambda s, x: s.broadcast(1.0, root=x), 1, 0, "root", "1", "0"),
    "no root": (lambda s, x: s.broadcast(1.0, root=x), 999, 0, "error", "ValueError: root 999 is not one of the", "-"),
    "length to broadcast": (lambda s, x: s.broadcast(np.ones(x)), 3, 2, "array 0", "f64[3]", "f64[2]"),
    "root of an object": (lambda s, x: s.broadcast_object(1, root=x), 1, 0, "root", "1", "0"),
    "pickle to broadcast": (
        lambda s, x: s.broadcast_object(1, pickle=x), True, False, "call", "broadcast_object with pickle", "broadcast_",
    ),
    "pickle to gather": (
        lambda s, x: s.gather_object(1, pickle=x), True, False, "call", "gather_object with pickle", "gather_object",
    ),
    "call of objects": (
        lambda s, x: s.gather_object(1) if x else s.broadcast_object(1), True, False, "call", "gather_o", "broadcast_o",
    ),
    **{
        f"{name} of a {op} along an axis": (
            lambda s, x, op=op: s.reduce(op, x[0], axis=x[1]), odd, usual, field, odd_text, usual_text
        )
        for op in ("SUM", "MEAN")
        for name, odd, usual, field, odd_text, usual_text in (
            ("shape", (np.ones((3, 2)), 0), (np.ones((3, 3)), 0), "array", "f64[2]", "f64[3]"),
            ("dtype", (np.ones(3, "f4"), 0), (np.ones(3), 0), "array", "f32[]", "f64[]"),
            ("nest", ({"a": np.ones(3)}, 0), ([np.ones(3)], 0), "form of the nest", "", ""),
            ("axis", (np.ones((3, 3)), 0), (np.ones((3, 3)), 1), "call", "reduce along axis 0", "reduce along axis 1"),
            ("lack", (np.ones(3), 0), (np.ones(3), None), "call", "reduce along axis 0", "reduce"),
            ("axes", (np.ones((3, 3)), (1, 0)), (np.ones((3, 3)), (0, 1)), "call", "reduce along axes (1", "reduce "),
            ("wrong", (np.ones(3), 5), (np.ones(3), 0), "error", "InvalidArgumentError: an array of shape", "-"),
        )
    },
}  # fmt: skip


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("transport", TRANSPORTS, indirect=True)
@pytest.mark.usefixtures("transport")
def test_agreement_difference_raises_on_all_ranks(comm):
    """At once, on all ranks, with both sides; and the next call works.

    The deadline is for the day on which one of them hangs instead.
    """
    last = comm.size - 1
    others = "rank 0" if last == 1 else f"ranks 0-{last - 1}"
    with Strategy(None, options(timeout_seconds=600), comm=comm) as patient, Strategy(comm=comm) as plain:
        for name, (call, odd, usual, field, odd_text, usual_text) in DIFFERENCES.items():
            strategy = plain if name == "deadline" else patient
            pattern = (
                rf"\n  {re.escape(field)}.*: {others}: {re.escape(usual_text)}.*; rank {last}: {re.escape(odd_text)}"
            )
            for _ in range(2):
                with raises_everywhere(comm, InvalidArgumentError, pattern):
                    call(strategy, odd if comm.rank == last else usual)
                assert strategy.reduce("SUM", 1.0) == comm.size, name


@pytest.mark.ranks(3)
def test_calls_in_several_lines_show_the_line_of_each_rank(strategy, comm):
    def other():
        strategy.gather(np.ones(1), 0)

    here = r"\S*test_agreement.py:\d+ in"
    with raises_everywhere(comm, InvalidArgumentError, f"\n  line: ranks 0, 2: {here} test_.*; rank 1: {here} other"):
        other() if comm.rank == 1 else strategy.reduce("SUM", 1.0)


@pytest.mark.ranks(2)
def test_calls_of_started_functions_show_the_line_of_the_caller(strategy, comm):
    """As those of torch.distributed, which have stacks of their own."""
    parts = parts_of(strategy)

    def wait():
        started = parts.group.calls.start_function(partial(parts.cross_device_ops.all_reduce, "SUM", 1.0))
        parts.group.calls.finish(started)
        assert started.result

    here = r"\S*test_agreement.py:\d+ in"
    with raises_everywhere(comm, InvalidArgumentError, f"\n  line: rank 0: {here} wait; rank 1: {here} test_.*"):
        strategy.barrier() if comm.rank == 1 else wait()


@pytest.mark.ranks(2)
def test_calls_of_replicas_show_the_line_in_the_step(comm):
    def step():
        context = mpidist.get_replica_context()
        context.all_reduce("SUM", 1.0) if comm.rank else other(context)

    def other(context):
        context.all_gather(np.ones(1), 0)

    def merged(strategy):
        strategy.barrier() if comm.rank else send(strategy)

    def send(strategy):
        strategy.broadcast(1.0)

    here = r"\S*test_agreement.py:\d+ in"
    with Strategy(replicas=4, comm=comm) as strategy:
        with raises_everywhere(comm, InvalidArgumentError, f"\n  line: rank 0: {here} other; rank 1: {here} step"):
            strategy.run(step)
        with raises_everywhere(comm, InvalidArgumentError, f"\n  line: rank 0: {here} send; rank 1: {here} merged"):
            strategy.run(lambda: mpidist.get_replica_context().merge_call(merged))


@pytest.mark.ranks(3)
def test_agreement_ignores_layout_dict_order_and_deadline(strategy, comm):
    """Byte order, memory layout, order and class of dicts, kinds of number, and how long they would wait."""
    odd, size = comm.rank == 0, comm.size
    matrix = np.ones((2, 3))
    pairs = [
        (matrix.astype(">f8"), matrix),
        (np.asfortranarray(matrix), matrix),
        ({"a": 1.0, "b": 1.0}, {"b": 1.0, "a": 1.0}),
        (OrderedDict(a=1.0), {"a": 1.0}),
        (1, np.int64(1)),
        (1.0, np.ones(())),
    ]
    for one, other in pairs:
        leaves, _ = mpidist.nest.flatten(strategy.reduce("SUM", one if odd else other))
        assert all((np.asarray(leaf) == size).all() for leaf in leaves)
    assert strategy.reduce("SUM", 1.0, options=options(timeout_seconds=600 + comm.rank)) == size


@pytest.mark.ranks(3)
def test_agreement_error_groups_equal_ranks(agreement, comm):
    odd = comm.rank == 1
    fields = {"op": "MEAN" if odd else "SUM", "array 0": "f32[2]"} | ({"axis": "1"} if odd else {})
    text = (
        "reduce (call 2): the ranks did not pass the same arguments, so nothing was sent\n"
        "  op: ranks 0, 2: SUM; rank 1: MEAN\n"
        "  axis: ranks 0, 2: -; rank 1: 1"
    )
    agreement.join(Call("reduce", 5, dict))
    with pytest.raises(InvalidArgumentError) as caught:
        agreement.join(Call("reduce", int(odd), lambda: fields))
    assert str(caught.value) == text
    assert caught.value.raised_on_all_ranks


@pytest.mark.ranks(3)
def test_agreement_error_cuts_a_long_table(agreement, comm):
    with raises_everywhere(comm, InvalidArgumentError, r"array 6: .*\n  \.\.\. and more$"):
        agreement.join(Call("reduce", comm.rank, lambda: {f"array {index}": str(comm.rank) for index in range(50)}))


@pytest.mark.ranks(3)
def test_fingerprints_are_the_same_on_all_ranks(comm):
    signature = ("all_reduce", mpidist.ReduceOp.SUM, {"a": (1, 2.5)}, CommunicationOptions(3))
    prints = comm.allgather(fingerprint_of(signature))
    assert len(set(prints)) == 1
    assert 0 <= prints[0] < 2**63
    assert fingerprint_of((*signature, 0)) != prints[0]


@pytest.mark.ranks(2, 3)
def test_flags_are_united_and_items_are_shown(agreement, comm):
    agreement.join(Call("flags", 0, dict))
    assert agreement.all_reduce_or(1 << comm.rank) == 2**comm.size - 1
    items = agreement.all_gather_object({"rank": comm.rank, "text": "x" * 1000 * comm.rank})
    assert [(item["rank"], len(item["text"])) for item in items] == [(r, 1000 * r) for r in range(comm.size)]


@pytest.mark.no_mpi
def test_one_rank_agrees_with_itself():
    alone = SoloAgreement()
    alone.join(Call("reduce", 0, dict))
    with pytest.raises(KeyError):
        alone.join(Call("reduce", 0, dict, error=KeyError()))
    assert (alone.all_reduce_or(5), alone.all_gather_object("item"), alone.broken) == (5, ["item"], None)


@pytest.mark.ranks(3)
def test_without_checks_ranks_of_one_node_still_see_that_calls_differ(comm, monkeypatch):
    """`MPIDIST_CHECK=0`: the barrier of a node shows it for nothing."""
    monkeypatch.setenv("MPIDIST_CHECK", "0")
    with Strategy(comm=comm) as strategy:
        with raises_everywhere(comm, InvalidArgumentError, "op: rank 0: MEAN; rank"):
            strategy.reduce("SUM" if comm.rank else "MEAN", np.float32(2))
        assert strategy.reduce("MAX", comm.rank) == comm.size - 1


@pytest.mark.ranks(3)
def test_without_checks_a_refused_argument_is_an_error_and_no_wrong_number(comm, placement, monkeypatch):
    """Of one rank alone: its next call must not be taken for this one."""
    monkeypatch.setenv("MPIDIST_CHECK", "0")
    with Strategy(comm=comm) as strategy:
        strategy.reduce("SUM", np.ones(3))
        refused = comm.rank == comm.size - 1
        with pytest.raises((InvalidArgumentError, PeerFailedError), match="got dtype bool"):
            strategy.reduce("SUM", np.ones(3, bool) if refused else np.ones(3))
        comm.Barrier()
        if len(set(placement)) > 1:  # there a note had to tell it, in the middle of a call
            strategy.reset()
        assert strategy.reduce("SUM", 1) == comm.size


@pytest.mark.ranks(3)
def test_errors_of_all_ranks_are_raised_as_they_are_if_of_one_kind_and_else_named_in_one(comm):
    """Of one kind in each rank's own words."""
    several = ValueError("no value") if comm.rank else KeyError("no key")
    with Strategy(comm=comm) as strategy:
        with pytest.raises(ValueError, match=f"error {comm.rank}"):
            parts_of(strategy).agree("call", {}, ValueError(f"error {comm.rank}"))
        with raises_everywhere(comm, InvalidArgumentError, "error: rank 0: KeyError: .*; ranks? .*: ValueError: no v"):
            parts_of(strategy).agree("call", {}, several)
        assert strategy.reduce("SUM", 1) == comm.size
