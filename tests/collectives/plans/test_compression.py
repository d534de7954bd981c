"""Numbers that travel in half precision: right within the stated error, the same everywhere, and half the bytes."""

import logging
from itertools import product

import numpy as np
import pytest
from host_cuda.gpus import memory
from support.everywhere import same_everywhere
from support.half_precision import HALF, NUMPY, ROUNDOFF, allowed, each_half, normal
from support.placements import PLACEMENTS
from support.transports import set_sizes

from mpidist import (
    CollectiveAllReduce,
    CommunicationOptions,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
    get_replica_context,
)
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.errors import InvalidArgumentError
from mpidist.transport.reduction import narrow, widen

__all__ = ["memory"]  # a fixture

pytestmark = pytest.mark.core

ALGORITHMS = {
    "hierarchical": HierarchicalCopyAllReduce,
    "collective": CollectiveAllReduce,
    "nccl": NcclAllReduce,
    "to one device": ReductionToOneDevice,
}
COUNTS = [0, 1, 7, 33, 3000, 70_000]  # to a leader, in packs, fused


@pytest.fixture(params=ALGORITHMS)
def ops(request, monkeypatch):
    set_sizes(monkeypatch, chunk_bytes=48 << 10, least_bytes=64 << 10)
    return ALGORITHMS[request.param]()


def context():
    return get_replica_context()


def all_reduce(strategy, op, value, **options):
    return strategy.reduce(op, value, options=CommunicationOptions(**options))


def all_reduce_by(way, strategy, op, values):
    """Reduce in one of the ways to ask for it."""
    out = [its.copy() for its in values] if way.endswith("out") else None
    if way.startswith("started"):
        return strategy.run(lambda: context().start_all_reduce(op, values, out=out).wait())
    return strategy.run(lambda: context().all_reduce(op, values, out=out))


@each_half
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("op", ["SUM", "MEAN", "MAX"])
def test_results_are_within_the_stated_error_and_equal_on_all_ranks(
    comm, placement, ops, memory, half, everywhere,
    op
):  # fmt: skip
    rows = [normal(comm.size, count, count) for count in COUNTS]
    options = CommunicationOptions(compression=half, compress_everywhere=everywhere)
    with Strategy(None, options, cross_device_ops=ops, comm=comm) as strategy:
        values = [memory.up(its[comm.rank]) for its in rows]
        for way in ("new", "out", "started", "started out"):
            results = list(map(memory.down, all_reduce_by(way, strategy, op, values)))
            for result, its in zip(results, rows, strict=True):
                exact = NUMPY[op](its.astype(np.float64), axis=0)
                assert result.dtype == np.float32
                assert (np.abs(result - exact) <= allowed(op, its, half, 1 + everywhere)).all()
                assert same_everywhere(comm, result.tobytes())
            is_rounded = comm.size > 1 and (everywhere or len(set(placement)) > 1)
            worst = float(np.max(np.abs(results[-1] - NUMPY[op](rows[-1].astype(np.float64), axis=0))))
            assert (worst > 1e-5) is is_rounded, "rounded where it should be, and nowhere else"


def test_half_the_bytes_go_between_nodes(comm, placement):
    sent = {}
    for name in ("none", *HALF):
        with Strategy(cross_device_ops=HierarchicalCopyAllReduce(), comm=comm) as strategy:
            levels = parts_of(strategy).group.levels
            for count in (2000, 60_000, 500_000):
                for level in (levels.across_nodes, levels.world):
                    level.traffic.clear()
                all_reduce(strategy, "SUM", normal(comm.size, count)[comm.rank], compression=name)
                across = [levels.across_nodes.traffic] + [levels.world.traffic] * (levels.within_node.size == 1)
                sent[name, count] = sum(sum(traffic.nbytes.values()) for traffic in across)
    for (name, count), nbytes in sent.items():
        assert name == "none" or nbytes == pytest.approx(sent["none", count] / 2, abs=8 * comm.size)
    for name in HALF:
        assert (comm.allreduce(sent[name, 500_000]) > 0) is (len(set(placement)) > 1)


def test_other_dtypes_travel_as_they_are(comm, placement, memory):
    with Strategy(comm=comm) as strategy:
        for dtype, everywhere in product(("f8", "i4", "f2", "c8"), (False, True)):
            value = memory.up((np.arange(500) % 257 + 2.0**-9 + comm.rank).astype(dtype))
            given = [value, memory.up(np.ones(9, np.float32)), 2.0**-40 + 1]
            options = {"compression": "fp16", "compress_everywhere": everywhere}
            result, ones, number = all_reduce(strategy, "SUM", given, **options)
            assert result.dtype == np.dtype(dtype)
            assert (result == all_reduce(strategy, "SUM", value)).all()
            assert (ones == comm.size).all()
            assert number == comm.size * (2.0**-40 + 1)


def test_any_layout_and_byte_order(comm, placement):
    rows = normal(comm.size, 6000).reshape(comm.size, 60, 100)
    own = rows[comm.rank]
    exact = rows.astype(np.float64).sum(axis=0)
    bound = allowed("SUM", rows, "fp16", 2)
    with Strategy(comm=comm) as strategy:
        for everywhere in (False, True):
            options = {"compression": "fp16", "compress_everywhere": everywhere}
            given = [own.T, own[::2], own.astype(">f4")]
            turned, half, swapped = all_reduce(strategy, "SUM", given, **options)
            assert (np.abs(turned.T - exact) <= bound).all()
            assert (np.abs(half - exact[::2]) <= bound[::2]).all()
            assert (np.abs(swapped - exact) <= bound).all()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("placement", ["one node", "even"], indirect=True)
@pytest.mark.usefixtures("placement")
@each_half
def test_reduce_to_some_ranks(comm, ops, half):
    rows = normal(comm.size, 5000)
    options = CommunicationOptions(compression=half)
    with Strategy(None, options, cross_device_ops=ops, comm=comm) as strategy:
        last = comm.size - 1
        result = strategy.extended.reduce_to("SUM", rows[comm.rank], f"/rank:{last}")
        if comm.rank == last:
            assert (np.abs(result - rows.astype(np.float64).sum(axis=0)) <= allowed("SUM", rows, half, 2)).all()


@each_half
@pytest.mark.parametrize("everywhere", [False, True])
def test_reduce_scatter(comm, placement, memory, half, everywhere):
    rows = normal(comm.size, 31 * 40).reshape(comm.size, 31, 40)
    options = CommunicationOptions(compression=half, compress_everywhere=everywhere)
    with Strategy(None, options, comm=comm) as strategy:
        part = memory.down(strategy.run(lambda: context().reduce_scatter("SUM", memory.up(rows[comm.rank]))))
        exact = np.array_split(rows.astype(np.float64).sum(axis=0), comm.size)[comm.rank]
        bound = np.array_split(allowed("SUM", rows, half), comm.size)[comm.rank]
        assert part.dtype == np.float32
        assert (np.abs(part - exact) <= bound).all()
        is_rounded = comm.size > 1 and (everywhere or len(set(placement)) > 1)
        assert bool((np.abs(part - exact) > 1e-5).any()) is is_rounded


@each_half
def test_reproducible_results_do_not_depend_on_the_placement(comm, ops, memory, half, monkeypatch):
    """Contributions are rounded, added in float32 in the order of ranks, and the sum is rounded."""
    dtype = HALF[half]
    rows = normal(comm.size, 30_000)
    total = rows[0].astype(dtype).astype(np.float32)
    for row in rows[1:]:
        total = total + row.astype(dtype).astype(np.float32)
    expected = total.astype(dtype).astype(np.float32) if comm.size > 1 else rows[0]
    placements = {",".join(str(its(rank, comm.size)) for rank in range(comm.size)) for its in PLACEMENTS.values()}
    for nodes in sorted(placements):
        monkeypatch.setenv("MPIDIST_PRETEND_NODES", nodes)
        with Strategy(cross_device_ops=ops, comm=comm) as strategy:
            result = all_reduce(strategy, "SUM", memory.up(rows[comm.rank]), compression=half, reproducible=True)
            assert memory.down(result).tobytes() == expected.tobytes()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("placement", ["one node", "even"], indirect=True)
@pytest.mark.usefixtures("placement")
@pytest.mark.parametrize("over", ["mpi", "shared_memory"])
def test_sums_of_the_callers_own_halves_are_not_counted(comm, over, monkeypatch):
    """Nothing was compressed, and the transport makes no difference."""
    monkeypatch.setenv("MPIDIST_TRANSPORT", over)
    with Strategy(comm=comm) as strategy:
        for count in (8, 100_000):
            assert np.isinf(strategy.reduce("SUM", np.full(count, 60_000, np.float16))).all()
        assert strategy.num_overflowed == 0


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize(("way", "count"), [("new", 4), ("new", 50_000), ("out", 50_000), ("started out", 50_000)])
def test_compression_overflow_is_infinite_counted_and_logged(
    comm, placement, ops, memory, everywhere, way,
    count, caplog
):  # fmt: skip
    """At once, where the results are written to outs; and else at the next call at the latest."""
    numbers = np.ones(count, np.float32)
    numbers[1] = 40_000.0  # two of them are too large
    numbers[2] = 1e6 if comm.rank == 0 else 1.0
    numbers[3] = np.inf
    compresses, logged = everywhere or len(set(placement)) > 1, []
    options = CommunicationOptions(compression="fp16", compress_everywhere=everywhere)
    with Strategy(None, options, cross_device_ops=ops, comm=comm) as strategy:
        value = memory.up(numbers)
        with caplog.at_level(logging.WARNING, "mpidist"):
            for _ in range(3):
                result = memory.down(all_reduce_by(way, strategy, "SUM", [value])[0])
                logged.append(caplog.text.count("too large for float16"))
        assert np.flatnonzero(np.isinf(result)).tolist() == ([1, 2, 3] if compresses else [3])
        assert (np.delete(result, [1, 2, 3]) == comm.size).all()
        counted = comm.allgather(strategy.num_overflowed)
        assert (sum(counted) > 0) is compresses
        assert logged[-1] == (2 if strategy.num_overflowed else 0), "at the first and the second call, not the third"
        assert way == "new" or logged[0] == min(1, logged[-1])
        plain = all_reduce(strategy, "SUM", value, compression="bf16", compress_everywhere=everywhere)
        assert np.flatnonzero(np.isinf(memory.down(plain))).tolist() == [3]
        assert comm.allgather(strategy.num_overflowed) == counted


@pytest.mark.ranks(2, 3)
def test_sums_that_overflow_within_a_node_are_counted(comm):
    """Also where compiled code would add them: it counts nothing."""
    options = {"compression": "fp16", "compress_everywhere": True}
    with Strategy(comm=comm) as strategy:
        least = 0
        for count in (4, 50_000, 600_000) * 2:
            result = all_reduce(strategy, "SUM", np.full(count, 40_000.0, np.float32), **options)
            assert np.isinf(result).all()
            least += count
            assert sum(comm.allgather(strategy.num_overflowed)) >= least


@pytest.mark.ranks(3)
def test_compression_unlike_on_ranks_raises(comm):
    value = np.ones(3, np.float32)
    with Strategy(comm=comm) as strategy:
        for call in (
            lambda name: all_reduce(strategy, "SUM", value, compression=name),
            lambda name: strategy.run(
                lambda: context().reduce_scatter("SUM", value, options=CommunicationOptions(compression=name))
            ),
        ):
            with pytest.raises(InvalidArgumentError, match=r"compression") as error:
                call("bf16" if comm.rank == 0 else "fp16")
            assert "BF16" in str(error.value)
            assert "FP16" in str(error.value)
        assert (all_reduce(strategy, "SUM", value, compression="bf16") == comm.size).all()


@pytest.mark.ranks(3)
@each_half
def test_compression_everywhere_mean_of_large_numbers_is_finite(comm, half):
    value = np.full(100, 60_000.0, np.float32)
    with Strategy(comm=comm) as strategy:
        mean = all_reduce(strategy, "MEAN", value, compression=half, compress_everywhere=True)
        assert (np.abs(mean - 60_000) <= 60_000 * ROUNDOFF[half]).all()


@pytest.mark.no_mpi
@each_half
def test_narrowing_has_the_bits_of_astype(half):
    dtype = HALF[half]
    rng = np.random.default_rng(5)
    patterns = rng.integers(0, 1 << 32, 300_000, dtype=np.uint32).view(np.float32)
    edges = np.float32([0, -0.0, 65504, 65519.996, 65520, 1e-8, 6e-8, 2**-14, 2**-24, np.inf, -np.inf, np.nan, 3.39e38])
    for numbers in (patterns, edges, rng.standard_normal(100_001).astype(np.float32), edges[:0]):
        out = np.empty(numbers.size, dtype)
        with np.errstate(all="ignore"):
            count = narrow(numbers, out)
            expected = numbers.astype(dtype)
            overflowed = int((np.isinf(expected.astype(np.float32)) & np.isfinite(numbers)).sum())
        both = np.isnan(numbers)
        assert (np.isnan(out.astype(np.float32)) == both).all()
        assert (out.view(np.uint16)[~both] == expected.view(np.uint16)[~both]).all()
        if half == "fp16":
            assert count == overflowed
        back = np.empty(numbers.size, np.float32)
        widen(out, back)
        assert back.tobytes() == out.astype(np.float32).tobytes()


@pytest.mark.no_mpi
def test_compression_options_are_merged_and_refused():
    options = CommunicationOptions(compression="bf16")
    assert options == CommunicationOptions(compression="BF16")
    assert CommunicationOptions(compression=None) == CommunicationOptions()
    with pytest.raises(ValueError, match="'int8' is not a valid Compression; it is one of NONE, BF16, FP16"):
        CommunicationOptions(compression="int8")
    with pytest.raises(ValueError, match="'bf16' cannot be combined with implementation='ring'"):
        options.merge(CommunicationOptions(implementation="RING"))
    merged = options.merge(CommunicationOptions(compress_everywhere=True))
    assert (merged.compression.name, merged.compress_everywhere) == ("BF16", True)
    assert merged.merge(CommunicationOptions(compression="fp16")).compression.name == "FP16"
