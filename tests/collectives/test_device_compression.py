"""Device memory that travels in half precision: cast by the kernels that pack it, and counted where it overflows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from host_cuda.gpus import anywhere, down, gpus, up
from support.everywhere import same_everywhere
from support.half_precision import HALF, allowed, each_half, normal

from mpidist import CollectiveAllReduce, CommunicationOptions, HierarchicalCopyAllReduce, NcclAllReduce
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.cross_device_ops import CrossDeviceOps
from mpidist.transport import cuda
from mpidist.transport.group import SyncGroup

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["anywhere", "gpus"]  # fixtures

ALGORITHMS = {"nccl": NcclAllReduce, "hierarchical": HierarchicalCopyAllReduce, "collective": CollectiveAllReduce}
COUNTS = [0, 1, 33, 5000, 70_000]


@pytest.fixture(params=ALGORITHMS)
def ops(request: pytest.FixtureRequest, anywhere: SyncGroup) -> CrossDeviceOps:
    its: CrossDeviceOps = ALGORITHMS[request.param]().bound_to(anywhere)
    return its


@pytest.fixture
def strategy(gpus: cuda.Cuda, comm: Intracomm, placement: tuple[int, ...]) -> Iterator[Strategy]:
    with Strategy(comm=comm) as made:
        yield made


@each_half
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_results_are_within_the_stated_error_and_equal_on_all_ranks(
    comm: Intracomm, placement: tuple[int, ...], ops: CrossDeviceOps, half: str, everywhere: bool, op: str
) -> None:
    rows = [normal(comm.size, count, count) for count in COUNTS]
    options = CommunicationOptions(compression=half, compress_everywhere=everywhere)
    results = ops.all_reduce(op, [up(its[comm.rank]) for its in rows], options)
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
def test_device_and_host_memory_give_the_same_bits(
    comm: Intracomm, placement: tuple[int, ...], strategy: Strategy, half: str
) -> None:
    """With every rank's number rounded, added in rank order, and rounded again."""
    rows = normal(comm.size, 3001)
    options = CommunicationOptions(compression=half, reproducible=True)
    on_host = strategy.reduce("SUM", rows[comm.rank], options=options)
    on_device = strategy.reduce("SUM", up(rows[comm.rank]), options=options)
    assert down(on_device).tobytes() == on_host.tobytes()
    assert (on_host.astype(HALF[half]).astype(np.float32) == on_host).all()


def test_other_dtypes_travel_as_they_are(comm: Intracomm, strategy: Strategy) -> None:
    values = [up((np.arange(400) % 50 + comm.rank).astype(dtype)) for dtype in ("f8", "i4", "f2", "c8")]
    plain = strategy.reduce("SUM", values)
    for everywhere in (False, True):
        options = CommunicationOptions(compression="bf16", compress_everywhere=everywhere)
        results = strategy.reduce("SUM", values, options=options)
        assert all((down(one) == down(other)).all() for one, other in zip(results, plain, strict=True))


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("everywhere", [False, True])
def test_an_overflow_is_infinite_everywhere_counted_and_logged(
    comm: Intracomm,
    placement: tuple[int, ...],
    strategy: Strategy,
    everywhere: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    numbers = np.ones(50_000, np.float32)
    numbers[1] = 40_000.0  # two of them are too large
    numbers[2] = 1e6 if comm.rank == 0 else 1.0
    numbers[3] = np.inf
    value, compresses = up(numbers), everywhere or len(set(placement)) > 1
    options = CommunicationOptions(compression="fp16", compress_everywhere=everywhere)
    with caplog.at_level(logging.WARNING, "mpidist.cross_device_ops"):
        for _ in range(3):
            result = down(strategy.reduce("SUM", value, options=options))
    assert np.flatnonzero(np.isinf(result)).tolist() == ([1, 2, 3] if compresses else [3])
    assert (np.delete(result, [1, 2, 3]) == comm.size).all()
    assert (sum(comm.allgather(strategy.num_overflowed)) > 0) is compresses
    texts = [text for text in caplog.messages if "too large for float16" in text]
    assert len(texts) == (2 if strategy.num_overflowed else 0), "at the first and the second call, not the third"


def test_started_calls_and_outs(comm: Intracomm, strategy: Strategy) -> None:
    rows = normal(comm.size, 20_000)
    options = CommunicationOptions(compression="bf16", compress_everywhere=True)
    value, out = up(rows[comm.rank]), up(np.zeros(20_000, np.float32))

    def step() -> Any:
        import mpidist

        context = mpidist.get_replica_context()
        assert context is not None
        started = [context.start_all_reduce("SUM", value, options) for _ in range(3)]
        context.all_reduce("SUM", value, options, out=out)
        return [down(one.wait()) for one in started]

    results = strategy.run(step)
    assert all((result == down(out)).all() for result in results)
    assert (np.abs(down(out) - rows.astype(np.float64).sum(axis=0)) <= allowed("SUM", rows, "bf16", 2)).all()


def test_reduce_scatter(comm: Intracomm, placement: tuple[int, ...], strategy: Strategy) -> None:
    rows = normal(comm.size, 31 * 40).reshape(comm.size, 31, 40)
    options = CommunicationOptions(compression="bf16")

    def step() -> Any:
        import mpidist

        context = mpidist.get_replica_context()
        assert context is not None
        return context.reduce_scatter("SUM", up(rows[comm.rank]), options=options)

    part = down(strategy.run(step))
    exact = np.array_split(rows.astype(np.float64).sum(axis=0), comm.size)[comm.rank]
    assert (np.abs(part - exact) <= np.array_split(allowed("SUM", rows, "bf16"), comm.size)[comm.rank]).all()
    assert bool((np.abs(part - exact) > 1e-5).any()) is (len(set(placement)) > 1)
