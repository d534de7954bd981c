"""Device memory that travels in half precision: cast by the kernels that pack it, and counted where it overflows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from host_cuda.gpus import down, gpus, up
from support.everywhere import same_everywhere
from support.half_precision import HALF, allowed, each_half, normal

from mpidist import (
    CollectiveAllReduce,
    CommunicationOptions,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    get_replica_context,
)
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.transport import cuda

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["gpus"]

ALGORITHMS = {"nccl": NcclAllReduce, "hierarchical": HierarchicalCopyAllReduce, "collective": CollectiveAllReduce}
COUNTS = [0, 1, 33, 5000, 70_000]


@pytest.fixture(params=ALGORITHMS)
def strategy(
    request: pytest.FixtureRequest, gpus: cuda.Cuda, comm: Intracomm, placement: tuple[int, ...]
) -> Iterator[Strategy]:
    with Strategy(cross_device_ops=ALGORITHMS[request.param](), comm=comm) as made:
        yield made


def all_reduced(way: str, op: str, value: Any, options: CommunicationOptions) -> Any:
    """Reduce in one of the ways to ask for it."""
    context: Any = get_replica_context()
    out = [0 * its for its in value] if way.endswith("out") else None
    if way.startswith("started"):
        return context.start_all_reduce(op, value, options, out=out).wait()
    return context.all_reduce(op, value, options, out=out)


@each_half
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_results_are_within_the_stated_error_and_equal_on_all_ranks(
    comm: Intracomm, placement: tuple[int, ...], strategy: Strategy, half: str, everywhere: bool, op: str
) -> None:
    rows = [normal(comm.size, count, count) for count in COUNTS]
    options = CommunicationOptions(compression=half, compress_everywhere=everywhere)
    values = [up(its[comm.rank]) for its in rows]
    for way in ("new", "out", "started", "started out"):
        results = strategy.run(all_reduced, args=(way, op, values, options))
        for result, its in zip(map(down, results), rows, strict=True):
            exact = (np.sum if op == "SUM" else np.mean)(its.astype(np.float64), axis=0)
            assert result.dtype == np.float32
            assert (np.abs(result - exact) <= allowed(op, its, half, 1 + everywhere)).all()
            assert same_everywhere(comm, result.tobytes())
        is_rounded = comm.size > 1 and (everywhere or len(set(placement)) > 1)
        worst = float(np.max(np.abs(result - exact)))
        assert (worst > 1e-5) is is_rounded, "rounded where it should be, and nowhere else"


@each_half
@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_device_and_host_memory_give_the_same_bits(comm: Intracomm, strategy: Strategy, half: str, op: str) -> None:
    """With every rank's number rounded, added in rank order, and rounded again."""
    rows = normal(comm.size, 3001)
    options = CommunicationOptions(compression=half, reproducible=True)
    on_host = strategy.reduce(op, rows[comm.rank], options=options)
    on_device = strategy.reduce(op, up(rows[comm.rank]), options=options)
    assert down(on_device).tobytes() == on_host.tobytes()
    assert op == "MEAN" or (on_host.astype(HALF[half]).astype(np.float32) == on_host).all()


def test_other_dtypes_travel_as_they_are(comm: Intracomm, strategy: Strategy) -> None:
    values = [up(np.full(400, 2.0**-9 + comm.rank).astype(dtype)) for dtype in ("f8", "f2", "c8")]
    values.append(up(np.full(400, 257 + comm.rank)))
    plain = strategy.reduce("SUM", values)
    for everywhere in (False, True):
        options = CommunicationOptions(compression="bf16", compress_everywhere=everywhere)
        results = strategy.reduce("SUM", values, options=options)
        assert all((down(one) == down(other)).all() for one, other in zip(results, plain, strict=True))


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("way", ["new", "out", "started out"])
def test_an_overflow_is_infinite_everywhere_counted_and_logged(
    comm: Intracomm, placement: tuple[int, ...], strategy: Strategy, everywhere: bool, way: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """At once, where the results are written to outs; and else at the next call."""
    numbers = np.ones(50_000, np.float32)
    numbers[1] = 40_000.0  # two of them are too large
    numbers[2] = 1e6 if comm.rank == 0 else 1.0
    numbers[3] = np.inf
    value, compresses = [up(numbers)], everywhere or len(set(placement)) > 1
    options = CommunicationOptions(compression="fp16", compress_everywhere=everywhere)
    logged = []
    with caplog.at_level(logging.WARNING, "mpidist.cross_device_ops"):
        for _ in range(3):
            result = down(strategy.run(all_reduced, args=(way, "SUM", value, options))[0])
            logged.append(caplog.text.count("too large for float16"))
    assert np.flatnonzero(np.isinf(result)).tolist() == ([1, 2, 3] if compresses else [3])
    assert (np.delete(result, [1, 2, 3]) == comm.size).all()
    assert (sum(comm.allgather(strategy.num_overflowed)) > 0) is compresses
    assert logged[-1] == (2 if strategy.num_overflowed else 0), "at the first and the second call, not the third"
    assert way == "new" or logged[0] == min(1, logged[-1])


def test_reduce_scatter(comm: Intracomm, placement: tuple[int, ...], strategy: Strategy) -> None:
    rows = normal(comm.size, 31 * 40).reshape(comm.size, 31, 40)
    options, context = CommunicationOptions(compression="bf16"), get_replica_context
    part = down(strategy.run(lambda: context().reduce_scatter("SUM", up(rows[comm.rank]), options=options)))
    exact = np.array_split(rows.astype(np.float64).sum(axis=0), comm.size)[comm.rank]
    assert (np.abs(part - exact) <= np.array_split(allowed("SUM", rows, "bf16"), comm.size)[comm.rank]).all()
    assert bool((np.abs(part - exact) > 1e-5).any()) is (len(set(placement)) > 1)
