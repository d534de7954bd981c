"""Arguments of all sorts, made by Hypothesis: every rank returns the right numbers, or every rank raises one error.

In a share of the examples one rank passes something else, or makes another call. Nothing may hang, or leave the
strategy unusable. `TEST_FUZZ_EXAMPLES` says how many examples.

All ranks draw the same examples: nothing is random, and they agree on the outcome of each.
"""

import os
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.random_calls import BFLOAT16, Numbers
from support.replicas import inside

import mpidist
from mpidist import CommunicationOptions, Mirrored, PerReplica, ReduceOp, nest
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.errors import DeadlineExceededError, PeerFailedError

Array = np.ndarray[Any, Any]

fuzzed = settings(
    max_examples=int(os.environ.get("TEST_FUZZ_EXAMPLES", "80")),
    derandomize=True,
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    # Not shrunk: where ranks wait for each other in vain, every step would take as long as the deadline.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
SECONDS = 600.0  # a deadline, for the day on which a call hangs
Both = namedtuple("Both", "first rest")


class Opaque:
    """What no array can be made of, under one name on all ranks."""

    def __repr__(self):
        return "Opaque"


class Unreadable:
    """An array that cannot be read after all."""

    def __array__(self, dtype=None, copy=None):
        raise OSError("no file")


def endless():
    """A list that holds itself."""
    items = []
    items.append(items)
    return items


ORDINARY = ["f4", "f8", "i4", "i8"]
NUMBERS = ["f2", BFLOAT16, "g", "F", "D", "b", "B", "h", "H", "I", "Q"]
OTHERS = ["?", "O", "U3", "S2", "M8[s]", "m8[s]", "V3", [("a", "i4")], [("b", "f4")]]
SHAPES = [(), (1,), (3,), (3,), (4,), (0,), (2, 3), (3, 2), (1, 0, 2), (5000,)]
LAYOUTS = {
    "fortran": np.asfortranarray,
    "strided": lambda array: np.stack([array, array], -1)[..., 0],
    "reversed": lambda array: array[::-1].copy()[::-1] if array.ndim else array,
    "big-endian": lambda array: array.astype(array.dtype.newbyteorder(">")) if array.dtype.char in "fdil" else array,
    "masked": lambda array: np.ma.masked_array(array),
    "matrix": lambda array: array.view(np.matrix) if array.ndim == 2 else array,
    "scalar": lambda array: array[()] if not array.ndim else array,
    "per replica": lambda array: PerReplica((array,)),
    "mirrored": lambda array: Mirrored((array,)),
}
ODDITIES = {
    "int": lambda: 2, "float": lambda: 1.5, "complex": lambda: 1j, "bool": lambda: True, "None": lambda: None,
    "str": lambda: "text", "bytes": lambda: b"text", "huge": lambda: 1 << 70, "nan": lambda: np.nan,
    "inf": lambda: -np.inf, "set": lambda: {1}, "opaque": Opaque, "iterator": lambda: iter([1.0]),
    "unreadable": Unreadable, "endless": endless, "key": lambda: {Opaque(): 1.0}, "range": lambda: range(3),
}  # fmt: skip
FORMS = {
    "leaf": lambda leaves: leaves[0],
    "list": list,
    "tuple": tuple,
    "dict": lambda leaves: {f"k{at}": leaf for at, leaf in enumerate(leaves)},
    "reversed dict": lambda leaves: {f"k{at}": leaf for at, leaf in reversed(list(enumerate(leaves)))},
    "ordered dict": lambda leaves: OrderedDict((f"k{at}", leaf) for at, leaf in enumerate(leaves)),
    "mixed keys": lambda leaves: {(at if at % 2 else f"k{at}"): leaf for at, leaf in enumerate(leaves)},
    "named tuple": lambda leaves: Both(leaves[0], leaves[1:]),
    "nested": lambda leaves: {"a": [leaves[0], (), {}], "b": ({"c": leaves[1:]},)},
    "empty": lambda leaves: [],
    "empty dict": lambda leaves: {},
}


@dataclass(frozen=True)
class Leaf:
    """A recipe for an array, or for something odd."""

    dtype: Any
    shape: tuple[int, ...] = ()
    layout: str = ""
    oddity: str = ""

    def make(self, rank):
        if self.oddity:
            return ODDITIES[self.oddity]()
        rank = 0 if self.layout == "mirrored" else rank
        numbers = 1 + (rank + np.arange(int(np.prod(self.shape)))) % 2
        dtype = np.dtype(self.dtype)
        has_numbers = dtype.kind not in "VM" or dtype == BFLOAT16
        array = numbers.astype(dtype) if has_numbers else np.zeros(numbers.size, dtype)
        array = array.reshape(self.shape)
        return LAYOUTS[self.layout](array) if self.layout else array


@dataclass(frozen=True)
class Call:
    """What a rank calls, with what. A rank that makes the call makes its arguments anew."""

    name: str
    op: Any
    form: str
    leaves: tuple[Leaf, ...]
    axis: Any
    to: Any
    options: Any
    out: str

    def value(self, rank):
        return FORMS[self.form]([leaf.make(rank) for leaf in self.leaves])


def mostly(good, others, share=4):
    """Draw one of the good, or once in `share` times one of the others."""
    return st.integers(1, share).flatmap(lambda at: st.sampled_from(others if at == share else good))


DESTINATIONS = [
    1, [0], (0, 1), [1, 0, 1], {0}, range(1), np.int64(0), "/rank:0", "/RANK:1/GPU:0", PerReplica((1.0,)), -1, 99,
    [0, -1], [0, 99], [], [[0]], "/rank:99", "nowhere", "", b"all", None, 1.5, np.nan, True, np.array([0]), Opaque(),
    {"a": 0}, "ALL",
]  # fmt: skip
AXES = [1, -1, None, -2, 2, -5, True, False, 1.0, "0", [0], np.int64(1), np.array(0), 1 << 70, Opaque()]
OPTIONS = [
    CommunicationOptions(timeout_seconds=600), CommunicationOptions(bytes_per_pack=1), CommunicationOptions(100),
    CommunicationOptions(reproducible=True), CommunicationOptions(implementation="RING"),
    CommunicationOptions(implementation="NCCL"), CommunicationOptions(compression="bf16"),
    {}, "AUTO", 5, CommunicationOptions, Opaque(),
]  # fmt: skip
OUTS = ["new", "value", "shape", "dtype", "read-only", "none at all", "strided", "form", "together", "endless"]
leaf_recipes = st.one_of(
    st.builds(Leaf, mostly(ORDINARY, [*NUMBERS, *OTHERS], 3), st.sampled_from(SHAPES), mostly([""], list(LAYOUTS))),
    st.integers(0, 3).flatmap(
        lambda at: st.builds(Leaf, st.none(), oddity=st.sampled_from(list(ODDITIES))) if not at
        else st.just(Leaf("f8", (3, 2)))
    ),
)  # fmt: skip


# What else matters to a call: the share of deviations that mean nothing shall be small.
FIELDS = {
    "reduce": "op options", "along an axis": "op axis options", "all_reduce": "op options out",
    "start_all_reduce": "op options out", "reduce_scatter": "op axis options", "gather": "axis",
    "all_gather": "axis options", "reduce_to": "op to options", "batch_reduce_to": "op to options out",
    "broadcast_to": "to", "merge_call": "op out", "symmetric_empty": "out", "symmetric_empty_like": "out",
    "Variable": "op axis out",
}  # fmt: skip


def calls():
    """Draw a call, mostly with arguments that most of the calls take."""
    return st.builds(
        Call,
        st.sampled_from(list(FIELDS)),
        mostly(
            ["SUM", "MEAN", "MIN", "MAX", "PROD", ReduceOp.SUM, "mean"], ["bogus", "", None, 3, [], b"SUM", Opaque()], 9
        ),
        mostly(["leaf", "leaf", "list"], list(FORMS), 2),
        st.lists(leaf_recipes, min_size=1, max_size=3).map(tuple),
        mostly([0], AXES, 3),
        mostly(["all", 0], DESTINATIONS, 2),
        mostly([None], OPTIONS),
        mostly([""], OUTS, 3),
    )


def examples():
    """Draw a call, the call of the rank that deviates, if one does, and which rank it is."""

    def deviating(usual):
        """Draw the same call with one field of another."""
        other = calls()
        fields = ["name", "form", "leaves", *2 * FIELDS[usual.name].split()]
        return st.tuples(other, st.sampled_from(fields)).map(
            lambda both: Call(**(vars(usual) | {both[1]: vars(both[0])[both[1]]}))
        )

    return calls().flatmap(
        lambda usual: st.tuples(st.just(usual), st.one_of(st.none(), deviating(usual)), st.integers(0, 11))
    )


def make_out(kind, value):
    """Make what is passed as `out`: a nest like the value, or almost."""
    try:
        leaves = [np.asarray(leaf) for leaf in nest.flatten(value)[0]]
        outs = [np.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
    except Exception:  # it has no such nest
        return endless()
    if kind in ("", "value"):
        return value if kind else None
    for out in outs:
        out.flags.writeable = kind != "read-only"
    changes = {
        "shape": [out[None] for out in outs],
        "dtype": [np.zeros(out.shape, np.int16) for out in outs],
        "none at all": [None for _ in outs],
        "strided": [np.stack([out, out], -1)[..., 0] for out in outs],
        "together": outs[:1] * len(outs),
    }
    outs = changes.get(kind, outs)
    return {"form": (value, value), "endless": endless()}.get(kind) or nest.rebuild(value, outs)


def reduce_there(strategy, op, *values):
    """What `merge_call` is given: values arrive as distributed ones."""
    return strategy.reduce(op, list(values), options=CommunicationOptions(timeout_seconds=SECONDS))


def merge(strategy, call, value):
    args = {"shape": 5, "none at all": None, "form": "text", "endless": endless()}
    if call.out in args:
        return inside(strategy, "merge_call", reduce_there, args[call.out])
    function = {"dtype": len, "value": 5, "read-only": None}.get(call.out, reduce_there)
    return inside(strategy, "merge_call", function, (call.op, *value) if type(value) is list else (call.op, value))


def shared(strategy, call, value):
    first = call.leaves[0]
    return strategy.symmetric_empty(value if first.oddity else first.shape, first.dtype, per_node=bool(call.out))


def made(strategy, call, value):
    """A variable. Its aggregation may be the name of what is none."""
    with strategy.scope():
        given = (lambda: value) if call.out else value
        return mpidist.Variable(given, aggregation=call.op, name=f"{call.axis}" if call.axis else None).local_value()


def batch(strategy, call, value):
    pairs = [(leaf, call.to) for leaf in value] if type(value) is list else ((value, call.to) for _ in range(2))
    changes = {"shape": [(value,)], "dtype": 5, "none at all": None, "form": [[value, 0]]}
    return strategy.extended.batch_reduce_to(call.op, changes.get(call.out, pairs), call.options)


Function = Callable[[Strategy, Call, Any], Any]
CALLS = {
    "reduce": lambda s, call, value: s.reduce(call.op, value, options=call.options),
    "along an axis": lambda s, call, value: s.reduce(call.op, value, call.axis, call.options),
    "all_reduce": lambda s, call, value: inside(
        s, "all_reduce", call.op, value, call.options, out=make_out(call.out, value)
    ),
    "start_all_reduce": lambda s, call, value: inside(
        s, "start_all_reduce", call.op, value, call.options, out=make_out(call.out, value)
    ).wait(),
    "reduce_scatter": lambda s, call, value: inside(s, "reduce_scatter", call.op, value, call.axis, call.options),
    "gather": lambda s, call, value: s.gather(value, call.axis),
    "all_gather": lambda s, call, value: inside(s, "all_gather", value, call.axis, call.options),
    "reduce_to": lambda s, call, value: s.extended.reduce_to(call.op, value, call.to, call.options),
    "batch_reduce_to": batch,
    "broadcast_to": lambda s, call, value: s.extended.broadcast_to(value, call.to),
    "merge_call": merge,
    "symmetric_empty": shared,
    "symmetric_empty_like": lambda s, call, value: s.symmetric_empty_like(value, per_node=bool(call.out)),
    "Variable": made,
}


def natives(value):
    """Return the leaves of a nest as arrays, of this machine's byte order."""
    leaves = [leaf.values[0] if isinstance(leaf, (PerReplica, Mirrored)) else leaf for leaf in nest.flatten(value)[0]]
    arrays = [np.asarray(leaf) for leaf in leaves]
    return [array.astype(array.dtype.newbyteorder("=")) for array in arrays]


def wanted(call, values, at, rank):
    """Say what array number `at` must be on this rank, which all ranks got without an error."""
    ours = [leaves[at] for leaves in values]
    if call.name == "broadcast_to":
        return ours[0]
    if call.name in ("gather", "all_gather"):
        return np.concatenate(ours, int(call.axis))
    if call.name == "along an axis" and call.axis is not None:
        whole = np.moveaxis(np.concatenate(ours, int(call.axis)), int(call.axis), 0)
        return Numbers.joined(str(call.op).upper(), list(whole), len(whole)) if len(whole) else None  # whatever it is
    total = Numbers.joined(str(call.op).upper(), ours, len(ours))
    return np.array_split(total, len(ours), int(call.axis))[rank] if call.name == "reduce_scatter" else total


def complaint(call, values, result, rank):
    """Say what is wrong with a result, if something is."""
    if call.name == "symmetric_empty":
        first = call.leaves[0]
        is_right = bool(first.oddity) or (result.dtype == first.dtype and result.shape == first.shape)
        return "" if is_right else f"got {result!r}"
    rows = [natives(value) * (1 + (call.name == "batch_reduce_to" and type(value) is not list)) for value in values]
    if call.name not in ("gather", "all_gather", "along an axis"):
        forms = {str([(array.shape, array.dtype) for array in row]) for row in rows}
        if len(forms) > 1:
            return f"ranks passed different arrays: {forms}"
    if call.name in ("symmetric_empty_like", "Variable"):
        return ""
    results, _ = nest.flatten(result)
    if result is None or (results and all(one is None for one in results)):  # no destination
        return "" if call.name in ("reduce_to", "batch_reduce_to", "broadcast_to") else f"got {result!r}"
    if len(results) != len(rows[0]):
        return f"got {len(results)} arrays for {len(rows[0])}"
    for at, one in enumerate(results):
        got, want = np.asarray(one), wanted(call, rows, at, rank)
        if want is not None and not (
            got.shape == want.shape and is_close(got, want, roundoff_of(call, got, [row[at] for row in rows]))
        ):
            return f"array {at} is {got!r}, not {want!r}"
    return ""


def roundoff_of(call, got, parts):
    """Say what a compressed result may be off."""
    is_compressed = isinstance(call.options, CommunicationOptions) and call.options.compression.name == "BF16"
    if not is_compressed or got.dtype != np.float32:
        return 0.0
    return 2.0**-6 * float(sum(np.max(np.abs(part[np.isfinite(part)]), initial=0.0) for part in parts))


def is_close(got, want, roundoff=0.0):
    if got.dtype.kind not in "fc" and got.dtype != BFLOAT16:
        return np.array_equal(got, want)
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    tolerance = 1e-2 if got.dtype.itemsize == 2 else 1e-5
    return np.allclose(got.astype(wide), want.astype(wide), rtol=tolerance, atol=max(1e-8, roundoff), equal_nan=True)


@np.errstate(all="ignore")
def try_out(comm, strategy, calls_of_all):
    """Make a call of each rank, and compare over ranks what came of it. Collective; fails on all ranks or on none."""
    call = calls_of_all[comm.rank]
    kind, text, problem = "returned", "", ""
    try:
        result = CALLS[call.name](strategy, call, call.value(comm.rank))
    except Exception as error:
        kind, text = type(error).__name__, str(error)
        if isinstance(error, (DeadlineExceededError, PeerFailedError)):
            problem = "nobody was missing"
    everyone = comm.allgather((kind, text))
    is_alike = len({str(one) for one in calls_of_all}) == 1 and "endless" not in str(call)  # its error's text varies
    # Where all ranks have an error of one kind of their own, each says it in its own words.
    has_own = kind != "returned" and all(kind == one and "so nothing was sent" not in said for one, said in everyone)
    if len(set(everyone)) > 1 and (is_alike or not has_own):
        problem = "ranks differ"
    elif is_alike and "did not pass the same arguments" in text:
        problem = "all ranks passed the same"
    elif kind == "returned":
        try:
            problem = complaint(call, [one.value(rank) for rank, one in enumerate(calls_of_all)], result, comm.rank)
        except Exception as error:
            problem = f"the numbers cannot be told: {type(error).__name__}: {error}"
    try:
        after = strategy.reduce("SUM", 1.0)
        problem = problem or ("" if after == comm.size else f"unusable afterwards: 1.0 of each rank is {after}")
    except Exception as error:
        problem = problem or f"unusable afterwards: {type(error).__name__}: {error}"
    problems = comm.allgather(problem)
    if any(problems):
        strategy.reset()
        ranks = zip(calls_of_all, everyone, problems, strict=True)
        raise AssertionError("\n".join(f"rank {rank}: {one}" for rank, one in enumerate(ranks)))


@pytest.mark.parametrize("placement", ["one node", "cyclic"], indirect=True)
def test_all_ranks_return_or_all_raise(comm, placement):
    strategy = Strategy(None, CommunicationOptions(timeout_seconds=SECONDS), comm=comm)

    @fuzzed
    @given(examples())
    def run(example):
        usual, odd, at = example
        calls_of_all = [usual] * comm.size
        if odd is not None:
            calls_of_all[at % comm.size] = odd
        try_out(comm, strategy, calls_of_all)

    run()
    strategy.close()
