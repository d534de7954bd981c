"""An all-reduce inside a replica, which calls are repeated ones, and what to reduce: numbers of each rank."""

import numpy as np
import pytest

import mpidist
from mpidist.collectives.repeated_calls import RepeatedCalls

F32 = np.dtype(np.float32)
LARGE = (200, 120)  # is sent by itself on one node; 4 x 6 goes through a pack


def all_reduce(strategy, op, value, **more):
    return strategy.run(lambda: mpidist.get_replica_context().all_reduce(op, value, **more))


def numbers(strategy, shape, dtype=F32):
    """Give every rank other numbers."""
    return ((np.arange(np.prod(shape, dtype=int)) + strategy.topology.rank) % 5).astype(dtype).reshape(shape)


def total(strategy, shape, dtype=F32):
    """Add up what all ranks have from `numbers`."""
    where = np.arange(np.prod(shape, dtype=int))
    return sum((where + rank) % 5 for rank in range(strategy.topology.size)).astype(dtype).reshape(shape)  # type: ignore


def within(shape, dtype, where=..., order="C"):
    """Make an array inside a larger one that is full of 9."""
    around = np.full(shape, 9, dtype, order)
    return around[where]


def unaligned(shape, dtype):
    count = int(np.prod(shape))
    return np.zeros(count * dtype.itemsize + 1, np.uint8)[1:].view(dtype).reshape(shape)


# Name -> an array of a shape [m, n] and dtype, laid out in memory so that it can be written.
LAYOUTS = {
    "C": lambda shape, dtype: np.zeros(shape, dtype),
    "Fortran": lambda shape, dtype: np.zeros(shape, dtype, "F"),
    "transposed": lambda shape, dtype: np.zeros(shape[::-1], dtype).T,
    "negative strides": lambda shape, dtype: within(shape, dtype, np.s_[::-1, ::-1]),
    "every second column": lambda shape, dtype: within((shape[0], 2 * shape[1]), dtype, np.s_[:, ::2]),
    "inner block": lambda shape, dtype: within((shape[0] + 2, shape[1] + 2), dtype, np.s_[1:-1, 1:-1]),
    "big-endian": lambda shape, dtype: np.zeros(shape, dtype if dtype.kind == "V" else dtype.newbyteorder(">")),
    "unaligned": unaligned,
}


@pytest.fixture
def repeated(monkeypatch):
    """For each call that may be one, whether it was a repeated one."""
    really = RepeatedCalls.run
    said = []

    def run(*arguments):
        result = really(*arguments)
        said.append(result is not None)
        return result

    monkeypatch.setattr(RepeatedCalls, "run", run)
    return said


def are_repeated(strategy):
    """Whether the ranks are several on one node, so that calls are repeated at all."""
    return strategy.topology.size > 1 and strategy.topology.num_nodes == 1
