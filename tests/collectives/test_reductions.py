"""Reductions as one table: each pair of values of two axes, on each placement, compared with NumPy."""

import random
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from support.contributions import HALVES, UFUNCS, bits, contribution, in_rank_order
from support.reductions import LARGE, LAYOUTS
from support.transports import TRANSPORTS, set_sizes

import mpidist
from mpidist import CommunicationOptions
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.errors import InvalidArgumentError

pytestmark = pytest.mark.core

OPTIONS = {
    "default": None,
    "one array a pack": CommunicationOptions(bytes_per_pack=1),
    "deadline": CommunicationOptions(timeout_seconds=600),
    "rank order": CommunicationOptions(reproducible=True),
    "ring": CommunicationOptions(implementation="RING"),
}


class Row(NamedTuple):
    """A call, and where its arrays lie. What does not exist (a minimum of complex numbers) has a value that does."""

    call: str
    op: str
    dtype: Any
    shape: tuple[int, ...]
    value: str
    out: str
    options: str
    history: str


AXES = {
    "call": ["all_reduce", "reduce", "start_all_reduce", "list", "batch_reduce", "reduce_scatter"],
    "op": ["SUM", "MEAN", "MIN", "MAX", "PROD"],
    "dtype": ["i1", "u2", "i4", "f2", ml_dtypes.bfloat16, "f4", "f8", "g", "c16"],
    "shape": [(4, 6), LARGE, (), (0, 3), (1, 1), (3, 0, 2)],
    "value": [*LAYOUTS, "repeated rows", "symmetric"],
    "out": ["new", "in place", *LAYOUTS, "symmetric", "per node"],
    "options": [*OPTIONS],
    "history": ["same arrays", "new arrays", "after an error", "beside a started call"],
}


@cache
def table():
    """Choose rows that have every pair of values of two axes; the same rows on every rank."""
    draw, axes = random.Random(0), list(enumerate(AXES.values()))
    pairs = [((i, a), (j, b)) for (i, ones), (j, others) in combinations(axes, 2) for a in ones for b in others]
    seen = set()
    rows = []
    for pair in pairs:
        if pair not in seen:
            drawn = [{at: draw.choice(axis) for at, axis in axes} | dict(pair) for _ in range(20)]
            best = max(drawn, key=lambda values: len({*combinations(values.items(), 2)} - seen))
            seen.update(combinations(best.items(), 2))
            rows.append(Row(*best.values()))
    return rows


def possible(row):
    dtype = np.dtype(row.dtype)
    row = row._replace(dtype=dtype)
    if dtype.kind == "c" and row.op in ("MIN", "MAX"):
        row = row._replace(op="SUM")
    if row.call == "reduce_scatter" and row.shape == ():
        row = row._replace(call="all_reduce")
    if row.call == "batch_reduce":
        row = row._replace(out="new")
    changes_dtype = row.op == "MEAN" and dtype.kind in "iu"
    if row.out == "in place" and (changes_dtype or row.value == "repeated rows" or row.call == "reduce_scatter"):
        row = row._replace(out="new")
    is_shared = row.out in ("symmetric", "per node")  # of one shape on all ranks, and parts are not
    return row._replace(out="new") if row.call == "reduce_scatter" and is_shared else row


def laid_out(strategy, layout, shape, dtype):
    if layout in ("symmetric", "per node"):
        return strategy.symmetric_empty(shape, dtype, per_node=layout == "per node")
    return LAYOUTS[layout](shape, dtype) if len(shape) == 2 and layout in LAYOUTS else np.zeros(shape, dtype)


def given(row, rank, size):
    numbers = contribution("sum" if row.op == "MEAN" else row.op.lower(), rank, int(np.prod(row.shape)), row.dtype)
    if row.op == "MEAN" and row.dtype in HALVES:
        numbers = numbers * row.dtype.type(size)  # a mean of halves that rounds nowhere, in any order
    numbers = numbers.reshape(row.shape)
    return np.broadcast_to(numbers[:1], row.shape) if row.value == "repeated rows" and row.shape else numbers


def expected(row, step, size):
    parts = [given(row, rank + step, size) for rank in range(size)]
    if row.op != "MEAN":
        return in_rank_order(UFUNCS[row.op.lower()], parts, row.dtype)
    if row.dtype.kind not in "iu":
        return in_rank_order(np.add, parts, row.dtype, size)
    return (in_rank_order(np.add, parts, np.dtype(np.int64)) / size).astype("f4" if row.dtype.itemsize <= 2 else "f8")


def around(out):
    """Add up what lies around an array in the memory of a larger one."""
    base = getattr(out, "base", None)
    if not isinstance(base, np.ndarray) or base.dtype != out.dtype:
        return 0
    return base.astype(np.complex128).sum() - out.astype(np.complex128).sum()


def carry_out(strategy, row, value, out):
    options = OPTIONS[row.options]
    if row.call == "reduce":
        return strategy.reduce(row.op, value, options=options, out=out)
    if row.call == "batch_reduce":
        return strategy.extended.batch_reduce_to(row.op, [(value, "all")], options)[0]
    context, ones = mpidist.get_replica_context, np.ones(3, np.int64)
    if row.call == "list":
        others, outs = [value, ones], None if out is None else [out, np.empty(3, "f8" if row.op == "MEAN" else "i8")]
        results = strategy.run(lambda: context().all_reduce(row.op, others, options=options, out=outs))
        assert (results[1] == (strategy.size if row.op == "SUM" else 1)).all()
        return results[0]
    result = strategy.run(lambda: getattr(context(), row.call)(row.op, value, options=options, out=out))
    return result.wait() if row.call == "start_all_reduce" else result


def disturb(strategy, row):
    """Make what precedes a call by its row; return what is still under way."""
    if row.history == "beside a started call":
        return strategy.run(lambda: mpidist.get_replica_context().start_all_reduce("SUM", np.ones(20_000)))
    if row.history == "after an error" and strategy.size > 1:
        with pytest.raises(InvalidArgumentError):
            strategy.reduce("MAX" if strategy.rank else "SUM", np.ones(3))
    return None


def complaint(strategy, row):
    """Make the call of a row three times, and say what is wrong with it. Collective."""
    size, rank, kept, wrong = strategy.size, strategy.rank, [], []
    for step in range(3):
        right = expected(row, step, size)
        if row.call == "reduce_scatter":
            right = np.array_split(right, size)[rank]
        if step == 0 or row.history == "new arrays":
            value = laid_out(strategy, row.value, row.shape, row.dtype)
            out = None if row.out == "new" else value
            if row.out not in ("new", "in place"):
                out = laid_out(strategy, row.out, right.shape, right.dtype)
        numbers = given(row, rank + step, size)
        if row.value == "repeated rows":
            value = numbers
        else:
            value.flags.writeable = True
            value[...] = numbers
            value.flags.writeable = out is value
        rest, started = around(out), disturb(strategy, row)
        result = carry_out(strategy, row, value, out)
        checks = {
            "another number": bits(result.astype(right.dtype)) == bits(right),
            "another dtype": result.dtype == (right.dtype if out is None else out.dtype),
            "another shape": result.shape == right.shape,
            "not the out": out is None or result is out,
            "not contiguous": out is not None or (result.flags.c_contiguous and result.flags.writeable),
            "shares memory": out is not None or not np.shares_memory(result, value),
            "value changed": out is value or (value == numbers).all(),
            "wrote around the out": around(out) == rest,
            "started call": started is None or (started.wait() == size).all(),
        }
        wrong += [f"step {step}: {text}" for text, is_right in checks.items() if not is_right]
        if out is None:
            kept.append((result, right))
        if row.out == "per node":
            strategy.barrier()  # all ranks of the node have read it
    wrong += ["an earlier result changed" for result, right in kept if bits(result) != bits(right)]
    return f"{row}: {wrong}" if wrong else ""


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("transport", TRANSPORTS, indirect=True)
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.usefixtures("transport", "placement")
def test_reduction_of_any_row_is_that_of_numpy(comm, monkeypatch, half):
    set_sizes(monkeypatch, chunk_bytes=48 << 10, least_bytes=64 << 10)
    with Strategy(comm=comm) as strategy:
        assert [wrong for wrong in (complaint(strategy, possible(row)) for row in table()[half::2]) if wrong] == []


@pytest.mark.ranks(1)
def test_reduction_on_one_rank_is_that_of_numpy(strategy):
    assert [wrong for wrong in (complaint(strategy, possible(row)) for row in table()) if wrong] == []
