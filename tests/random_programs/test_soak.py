"""A soak: many calls of random kinds, sizes, dtypes and options, every result compared with NumPy's, and no leak.

One seed decides on all ranks what is called; values come from it, the rank and the number of the call, so that every
rank knows what must come of them. `TEST_SOAK_CALLS` says how many calls, `TEST_SOAK_SEED` which. With 200,000,
add `--timeout 3600`.
"""

import ctypes
import gc
import os
import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from support.everywhere import same_everywhere
from support.random_calls import (
    BFLOAT16,
    FORMS,
    OPS,
    OPTIONS,
    REDUCED,
    Leaf,
    Numbers,
    draw_shape,
    near,
    precision_of,
    result_dtype,
)
from support.used import Used

import mpidist
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist import nest

NUM_CALLS = int(os.environ.get("TEST_SOAK_CALLS", "100"))
SEED = int(os.environ.get("TEST_SOAK_SEED", "20240229"))
NOISE_BYTES = 32 << 20  # what the allocator may keep of arrays of some MiB, and plans of a thousand shapes
SYMMETRIC = 20_000  # elements
F64 = np.dtype(np.float64)
Array = np.ndarray[Any, Any]


@dataclass
class Soak:
    """The state of a soak."""

    strategy: Strategy  # what is soaked
    numbers: Numbers  # what the ranks give
    draw: random.Random  # draws the calls, alike on all ranks
    own: random.Random  # draws what is this rank's own affair
    step: int = 0  # number of the call
    what: tuple[Any, ...] = ()  # the call, for errors
    bits: int = 0  # a checksum of results that must be the same on all ranks
    pending: list[Callable[[], None]] = field(default_factory=list)  # checks of reductions that were started
    # arrays that the ranks of a node reach: of a dtype, and whether there is one per node
    symmetric: dict[tuple[Any, bool], Array] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)  # by aggregation

    @property
    def rank(self):
        return self.strategy.topology.rank

    @property
    def size(self):
        return self.strategy.num_replicas_in_sync

    def inside(self, method, *args, **kwargs):
        """Call a method of the replica context."""
        return self.strategy.run(lambda: getattr(mpidist.get_replica_context(), method)(*args, **kwargs))

    def check(self, got, want, dtype, is_common=True, options=None):
        """See that a result is right; if all ranks have it, its bits are compared at the end."""
        if not near(got, want, dtype, 4 * self.size, precision_of(dtype, options)):
            raise AssertionError(f"got {got!r}, needed {want!r} of {dtype}")
        if is_common:
            self.bits = zlib.crc32(np.ascontiguousarray(got).reshape(-1).view(np.uint8).data, self.bits)

    def finish(self):
        """Wait for what was started, in an order of this rank's own."""
        self.own.shuffle(self.pending)
        while self.pending:
            self.pending.pop()()


def draw_leaves(soak, op, count, dtypes=REDUCED):
    """Draw arrays, now and then of a layout or byte order that is this rank's own affair."""
    leaves = []
    for index in range(count):
        dtype = soak.draw.choice(dtypes)
        shape = draw_shape(soak.draw, 0.01 if count == 1 else 0.002)
        mine = soak.numbers.of(soak.rank, soak.step, index, shape, dtype, op)
        layout = soak.own.randrange(20)
        if layout == 0 and shape:
            mine = np.repeat(mine, 2, axis=0)[::2]
        elif layout == 1 and dtype != BFLOAT16:
            mine = mine.astype(dtype.newbyteorder(">"))
        leaves.append(Leaf(index, shape, dtype, mine))
    return leaves


def check_leaves(soak, op, step, leaves, results, common, options=None):
    for leaf, result in zip(leaves, results, strict=True):
        want = soak.numbers.reduced(op, step, leaf.index, leaf.shape, leaf.dtype)
        soak.check(result, want, result_dtype(op, leaf.dtype), common, options)


def reduce(soak):
    op, options = soak.draw.choice(OPS), soak.draw.choice(OPTIONS)
    (leaf,) = leaves = draw_leaves(soak, op, 1)
    soak.what = "reduce", op, leaf.shape, leaf.dtype, options
    check_leaves(soak, op, soak.step, leaves, [soak.strategy.reduce(op, leaf.mine, options=options)], True, options)


def reduce_along_axis(soak):
    """Of shares that differ in length, and may be empty; of float64, where the order of adding matters least."""
    op, axis, rows, width = soak.draw.choice(OPS), soak.draw.choice([0, 1, -1]), soak.draw.randrange(4), 3
    shapes = [(rows + (rank == soak.size - 1), width) for rank in range(soak.size)]
    values = [soak.numbers.of(rank, soak.step, 0, shape, F64, op) for rank, shape in enumerate(shapes)]
    values = [value if axis == 0 else value.T for value in values]
    soak.what = "reduce", op, axis, rows
    whole = np.concatenate(values, axis).swapaxes(0, axis)
    soak.check(soak.strategy.reduce(op, values[soak.rank], axis), soak.numbers.joined(op, list(whole), len(whole)), F64)


def draw_out(soak, op, leaves):
    """Draw arrays that take the results: new ones, the arguments, or such as the node shares."""
    kind = soak.draw.choice(["none", "none", "none", "new", "arguments", "symmetric", "one per node"])
    if kind == "none":
        return None
    dtypes = [result_dtype(op, leaf.dtype) for leaf in leaves]
    if kind == "arguments" and all(leaf.dtype == dtype for leaf, dtype in zip(leaves, dtypes, strict=True)):
        for leaf in leaves:
            leaf.mine = leaf.mine.astype(leaf.dtype)
        return [leaf.mine for leaf in leaves]
    count = int(np.prod(leaves[0].shape))
    places = [soak.symmetric.get((dtypes[0], is_shared)) for is_shared in (False, True)]
    own, shared = places
    if len(leaves) == 1 and kind in ("symmetric", "one per node") and count <= SYMMETRIC and own is not None:
        if soak.draw.random() < 0.5 and leaves[0].dtype == dtypes[0]:
            own[:count].reshape(leaves[0].shape)[...] = leaves[0].mine
            leaves[0].mine = own[:count].reshape(leaves[0].shape)
        place = own if kind == "symmetric" else shared
        assert place is not None
        return [place[:count].reshape(leaves[0].shape)]
    return [np.empty(leaf.shape, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]


def all_reduce(soak):
    """Of a nest; at once, or started and waited for after other calls."""
    op, options, form = soak.draw.choice(OPS), soak.draw.choice(OPTIONS), soak.draw.randrange(len(FORMS))
    leaves = draw_leaves(soak, op, soak.draw.choice([1, 1, 1, 2, 3, 9]))
    outs = draw_out(soak, op, leaves)
    value = FORMS[form]([leaf.mine for leaf in leaves])
    out = None if outs is None else FORMS[form](outs)
    method = soak.draw.choice(["all_reduce", "start_all_reduce"])
    soak.what = method, op, form, [(leaf.shape, str(leaf.dtype)) for leaf in leaves], outs is not None, options
    got = soak.inside(method, op, value, options, out=out)
    step = soak.step
    order, _ = nest.flatten(FORMS[form](list(range(len(leaves)))))

    def check(result, common):
        assert out is None or result is out
        flat, _ = nest.flatten(result)
        check_leaves(soak, op, step, [leaves[at] for at in order], flat, common, options)

    if method == "all_reduce":
        check(got, True)
    else:
        soak.pending.append(lambda: check(got.wait(), False))
        if outs is not None or len(soak.pending) > 3 or soak.draw.random() < 0.5:  # the outs may be used again
            soak.finish()


def gather(soak):
    """Of shares that differ in length, along either axis, bool as well."""
    dtype, axis = soak.draw.choice([*REDUCED, np.dtype(bool)]), soak.draw.choice([0, 1, -2])
    most = soak.draw.choice([1, 2, 5, 5, 40, 40 if soak.draw.random() < 0.9 else 50_000])
    lengths = [soak.draw.randrange(most + 1) for _ in range(soak.size)]
    method = soak.draw.choice(["gather", "all_gather"])
    soak.what = method, dtype, axis, lengths
    shapes = [(length, 3) if axis != 1 else (3, length) for length in lengths]
    values = [soak.numbers.of(rank, soak.step, 0, shape, dtype) for rank, shape in enumerate(shapes)]
    call = soak.strategy.gather if method == "gather" else lambda *args: soak.inside("all_gather", *args)
    got = call({"a": values[soak.rank]}, axis)["a"]
    want = np.concatenate(values, axis)
    assert got.dtype == dtype
    assert np.array_equal(got, want)


def reduce_to(soak):
    """One value or many, to some ranks."""
    op, options = soak.draw.choice(OPS), soak.draw.choice(OPTIONS)
    leaves = draw_leaves(soak, op, soak.draw.choice([1, 1, 2, 4]))
    ranks = [soak.draw.sample(range(soak.size), soak.draw.randint(1, soak.size)) for _ in leaves]
    given = [soak.draw.choice([those, tuple(those), f"/rank:{those[0]}", those[0], "all"]) for those in ranks]
    soak.what = "reduce_to", op, given, [(leaf.shape, str(leaf.dtype)) for leaf in leaves], options
    extended = soak.strategy.extended
    if len(leaves) == 1 and soak.draw.random() < 0.5:
        results = [extended.reduce_to(op, leaves[0].mine, given[0], options)]
    else:
        results = extended.batch_reduce_to(
            op, [(leaf.mine, to) for leaf, to in zip(leaves, given, strict=True)], options
        )
    for leaf, to, result in zip(leaves, given, results, strict=True):
        meant = range(soak.size) if to == "all" else [int(to[6:])] if isinstance(to, str) else to
        if soak.rank in ([meant] if isinstance(meant, int) else meant):
            check_leaves(soak, op, soak.step, [leaf], [result], False, options)
        else:
            assert result is None


def broadcast_to(soak):
    leaves = draw_leaves(soak, "SUM", soak.draw.choice([1, 3]), [*REDUCED, np.dtype(bool)])
    to = soak.draw.choice(["all", "all", soak.draw.randrange(soak.size), [0, soak.size - 1]])
    soak.what = "broadcast_to", to, [(leaf.shape, str(leaf.dtype)) for leaf in leaves]
    results = soak.strategy.extended.broadcast_to([leaf.mine for leaf in leaves], to)
    if to != "all" and soak.rank not in ([to] if isinstance(to, int) else to):
        assert results is None
        return
    for leaf, result in zip(leaves, results, strict=True):
        assert result.dtype == leaf.dtype
        assert np.array_equal(result, soak.numbers.of(0, soak.step, leaf.index, leaf.shape, leaf.dtype))


def reduce_scatter(soak):
    op, dtype, axis = soak.draw.choice(OPS), soak.draw.choice(REDUCED), soak.draw.choice([0, 0, 1, -1])
    options = soak.draw.choice(OPTIONS)
    shape = draw_shape(soak.draw)
    shape = (int(np.prod(shape)) // 2, 2) if axis else shape or (1,)
    soak.what = "reduce_scatter", op, dtype, axis, shape, options
    got = soak.inside("reduce_scatter", op, soak.numbers.of(soak.rank, soak.step, 0, shape, dtype, op), axis, options)
    want = np.array_split(soak.numbers.reduced(op, soak.step, 0, shape, dtype), soak.size, axis)[soak.rank]
    soak.check(got, want, result_dtype(op, dtype), False, options)


def merge_call(soak):
    """A function across replicas, which reduces there."""
    op = soak.draw.choice(OPS)
    (leaf,) = leaves = draw_leaves(soak, op, 1)
    soak.what = "merge_call", op, leaf.shape, leaf.dtype
    got = soak.inside("merge_call", _reduce_there, (op, leaf.mine))
    check_leaves(soak, op, soak.step, leaves, [got], True)


def _reduce_there(strategy, op, value):
    return strategy.reduce(op, value)


def assign(soak):
    """Variables of every aggregation, written in `run`."""
    name = soak.draw.choice(list(soak.variables))
    variable = soak.variables[name]
    soak.what = "assign", name
    shape = variable.shape
    soak.strategy.run(lambda: variable.assign(soak.numbers.of(soak.rank, soak.step, 0, shape, F64)))
    if name == "ONLY_FIRST_REPLICA":
        want = soak.numbers.of(0, soak.step, 0, shape, F64)
    else:
        want = soak.numbers.reduced(name.removeprefix("read "), soak.step, 0, shape, F64)
    soak.check(variable.read_value(), want, F64)


def reset(soak):
    soak.what = ("reset",)
    soak.finish()
    soak.strategy.reset()


# What is wrong on all ranks, or differs between them where there are several.
REFUSED = [
    lambda soak, odd: soak.strategy.reduce("bogus", 1.0),
    lambda soak, odd: soak.strategy.reduce("SUM", np.ones(3, bool)),
    lambda soak, odd: soak.strategy.reduce("SUM", "text"),
    lambda soak, odd: soak.strategy.reduce("SUM", np.ones(3), axis=1),
    lambda soak, odd: soak.strategy.gather(np.float32(1), 0),
    lambda soak, odd: soak.strategy.extended.reduce_to("SUM", 1.0, soak.size),
    lambda soak, odd: soak.strategy.extended.broadcast_to(1.0, "nowhere"),
    lambda soak, odd: soak.inside("all_reduce", "SUM", np.ones(3), out=np.ones(4)),
    lambda soak, odd: soak.inside("start_all_reduce", "SUM", [np.ones(3), np.array(["a"])]).wait(),
    lambda soak, odd: soak.inside("reduce_scatter", "MEAN", np.float64(1)),
    lambda soak, odd: soak.strategy.reduce("MAX" if odd else "SUM", 1.0),
    lambda soak, odd: soak.strategy.reduce("SUM", np.ones(soak.step % 9 + odd)),
    lambda soak, odd: soak.strategy.reduce("SUM", np.ones(3, np.float32 if odd else np.float64)),
    lambda soak, odd: soak.inside("all_reduce", "SUM", [np.ones(2)] * (1 + odd)),
    lambda soak, odd: soak.inside("start_all_reduce", "SUM", np.ones(40_000 + odd)).wait(),
    lambda soak, odd: soak.strategy.gather(np.ones((2, 2)), int(odd)),
    lambda soak, odd: soak.strategy.extended.broadcast_to(np.ones(3), 0 if odd else "all"),
    lambda soak, odd: soak.inside("merge_call", len if odd else repr),
    lambda soak, odd: soak.strategy.symmetric_empty(-1, F64),
]
NUM_OF_ALL = 10  # the first ones are wrong on every rank


def refused(soak):
    """A mistake: every rank raises, the same kind and the same text."""
    at = soak.draw.randrange(len(REFUSED) if soak.size > 1 else NUM_OF_ALL)
    soak.what = "refused", at
    odd = soak.rank == soak.draw.randrange(soak.size)
    try:
        got = REFUSED[at](soak, odd)
    except (ValueError, TypeError) as error:
        soak.bits = zlib.crc32(f"{type(error).__name__}: {error}".encode(), soak.bits)
    else:
        raise AssertionError(f"not refused: {got!r}")


# How often a call is drawn.
KINDS = {
    reduce: 20, reduce_along_axis: 5, all_reduce: 30, gather: 8, reduce_to: 8, broadcast_to: 8, reduce_scatter: 8,
    merge_call: 4, assign: 4, refused: 3, reset: 0.5,
}  # fmt: skip


def make(comm, strategy):
    """Make a soak with its variables and shared arrays. Collective."""
    draw, own = random.Random(SEED), random.Random(f"{SEED} {comm.rank}")
    soak = Soak(strategy, Numbers(SEED, comm.size), draw, own)
    for dtype in (F64, np.dtype(np.float32), BFLOAT16):
        for per_node in (False, True):
            soak.symmetric[dtype, per_node] = strategy.symmetric_empty(SYMMETRIC, dtype, per_node=per_node)
    with strategy.scope():
        for aggregation in ("SUM", "MEAN", "ONLY_FIRST_REPLICA"):
            soak.variables[aggregation] = mpidist.Variable(np.zeros((5, 3)), aggregation=aggregation)
        soak.variables["read SUM"] = mpidist.Variable(np.zeros(3), aggregation="SUM", synchronization="ON_READ")
    return soak


def make_calls(soak, number):
    kinds, weights = list(KINDS), list(KINDS.values())
    for _ in range(number):
        soak.step += 1
        call = soak.draw.choices(kinds, weights)[0]
        if soak.own.random() < 0.003:
            time.sleep(soak.own.random() * 0.004)
        try:
            call(soak)
        except Exception as error:
            what = f"TEST_SOAK_SEED={SEED}, call {soak.step} on rank {soak.rank} of {soak.size}: {soak.what}"
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    soak.finish()


def highest_communicator(comm):
    """Return the highest of the numbers that MPI gives to some new communicators: it grows with those never freed."""
    new = [comm.Dup() for _ in range(24)]
    highest = max(one.py2f() for one in new)
    for one in new:
        one.Free()
    return highest


def used(comm):
    """Return what this process has, its number of mappings, and the highest number of a communicator."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what was garbage before counts as used
    with open("/proc/self/maps", encoding="utf-8") as maps:
        num_maps = len(maps.readlines())
    return Used.now(), num_maps, highest_communicator(comm)


@pytest.mark.usefixtures("placement")
@pytest.mark.parametrize("transport", ["auto", pytest.param("mpi", marks=pytest.mark.ranks(3))], indirect=True)
def test_soak(comm, transport):
    """On every placement, over shared memory where there is some, and over messages alone."""
    with Strategy(comm=comm) as strategy:
        soak = make(comm, strategy)
        make_calls(soak, max(50, NUM_CALLS // 4))
        before, maps_before, highest_before = used(comm)
        make_calls(soak, NUM_CALLS)
        after, maps_after, highest_after = used(comm)
        what = f"TEST_SOAK_SEED={SEED}, {NUM_CALLS} calls"
        print(what)
        assert same_everywhere(comm, np.array(soak.bits)), f"{what}: ranks have other bits, or other errors"
        text = f"{what}: {before} became {after}, {maps_before} mappings {maps_after}"
        assert after.files <= before.files, text
        assert after.mapped <= before.mapped, text  # fewer, if an array was let go meanwhile
        assert after.resident - before.resident < NOISE_BYTES, text
        assert maps_after - maps_before < 100, text
        assert highest_after - highest_before < 8, f"{what}: communicators {highest_before} to {highest_after}"
