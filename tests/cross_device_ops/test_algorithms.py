"""Every all-reduce algorithm on every placement of ranks: right, the same bits everywhere, and of the stated cost."""

import pkgutil
from importlib import import_module

import numpy as np
import pytest
from support.contributions import (
    COMPLEX,
    DTYPES,
    HALVES,
    INTEGERS,
    REALS,
    bits,
    contribution,
    in_rank_order,
    reduction_of,
)
from support.everywhere import same_everywhere
from support.placements import PLACEMENTS
from support.transports import TRANSPORTS, set_sizes

from mpidist import (
    CollectiveAllReduce,
    CommunicationOptions,
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    cross_device_ops,
)
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.transport.agreement.comparison_rounds import carried_bytes
from mpidist.transport.communicator import shard_bounds
from mpidist.transport.shared_memory.schedule import chunk_bounds

pytestmark = pytest.mark.core

LEADER_BYTES = 16 << 10  # up to here a leader speaks for its node
LEAST_BYTES = 64 << 10  # from here on fused arrays go across nodes, in these tests
CHUNK_BYTES = 48 << 10
OPS = ["SUM", "MEAN", "MIN", "MAX", "PROD"]

for _module in pkgutil.iter_modules(cross_device_ops.__path__, "mpidist.cross_device_ops."):
    import_module(_module.name)

# Name -> the algorithm and the options that make it run.
ALGORITHMS = {
    kind.__name__: (kind(), CommunicationOptions())
    for kind in CrossDeviceOps.__subclasses__()
    if kind.__module__.startswith("mpidist.")
} | {
    "RING": (CollectiveAllReduce(), CommunicationOptions(implementation="RING")),
    "in rank order": (HierarchicalCopyAllReduce(), CommunicationOptions(reproducible=True)),
}


@pytest.fixture(params=ALGORITHMS)
def algorithm(request):
    return request.param


@pytest.fixture
def strategy(comm, placement, algorithm, transport, monkeypatch):
    ops, options = ALGORITHMS[algorithm]
    set_sizes(monkeypatch, chunk_bytes=CHUNK_BYTES, least_bytes=LEAST_BYTES)
    with Strategy(None, options, cross_device_ops=ops, comm=comm) as made:
        yield made


def can(op, dtype):
    return dtype.kind != "c" or op not in ("MIN", "MAX")


def contributed(op, rank, size, count, dtype):
    if op != "MEAN":
        return contribution(op.lower(), rank, count, dtype)
    numbers = contribution("sum", rank, count, dtype)
    return numbers * dtype.type(size) if dtype in HALVES else numbers  # halves: a mean that rounds nowhere


def expected(op, size, count, dtype):
    if op != "MEAN":
        return reduction_of(op.lower(), size, count, dtype)
    if dtype in HALVES:
        return reduction_of("sum", size, count, dtype)
    if dtype in INTEGERS:
        mean = reduction_of("sum", size, count, np.dtype(np.int64)) / size
        return mean.astype(np.float32 if dtype.itemsize <= 2 else np.float64)
    return reduction_of("sum", size, count, dtype) / size


def complaints(strategy, op, dtypes, counts, **options):
    """All-reduce one nest of all dtypes and lengths, and say what is wrong with the result. Collective."""
    rank, size = strategy.topology.rank, strategy.topology.size
    dtypes = [dtype for dtype in dtypes if can(op, dtype)]
    value = {dtype.name: [contributed(op, rank, size, count, dtype) for count in counts] for dtype in dtypes}
    ops = parts_of(strategy).cross_device_ops
    result = ops.all_reduce(op, value, CommunicationOptions(**options))
    wrong = []
    for dtype in dtypes:
        for count, array in zip(counts, result[dtype.name], strict=True):
            right = expected(op, size, count, dtype)
            if array.dtype != right.dtype or array.shape != right.shape or not (array == right).all():
                wrong.append(f"{op} of {dtype}[{count}] on rank {rank}")
    return wrong


@pytest.mark.parametrize("op", OPS)
def test_algorithm_on_any_placement_is_exact_and_the_same_everywhere(strategy, comm, op):
    """TF's hierarchical copy leaves ranks out. Twice in a row, and below, at and above the leader limit."""
    counts = [0, 1, 5, comm.size, comm.size + 1]
    assert not complaints(strategy, op, DTYPES, counts)
    for dtype in (INTEGERS[1], REALS[0], COMPLEX[1], HALVES[0]):
        assert not complaints(strategy, op, [dtype], counts, bytes_per_pack=64)
        at = LEADER_BYTES // dtype.itemsize
        assert not complaints(strategy, op, [dtype], [at - 1, at, at + 1], bytes_per_pack=1)
    random = np.random.default_rng(comm.rank)  # every order of adding rounds otherwise
    value = [random.standard_normal(count).astype(dtype) for dtype in [*REALS, *HALVES] for count in (3, 700, 9000)]
    for result in strategy.reduce(op, value):
        assert same_everywhere(comm, result), (result.dtype, result.size)
    for dtype in HALVES:  # 65504 is the largest number of float16
        for count in (3, LEADER_BYTES):
            value = np.full(count, 60000, dtype)
            assert (strategy.reduce("MEAN", value) == value).all(), (dtype, count)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("placement", ["even"], indirect=True)
@pytest.mark.parametrize("transport", ["mpi"], indirect=True)
def test_results_are_exact_on_both_sides_of_the_pack_limits(strategy):
    """Large arrays go by themselves, small ones through a pack buffer, of this machine's sizes."""
    direct, pack = (nbytes // 4 for nbytes in parts_of(strategy).group.levels.message_bytes(device=False))
    assert not complaints(strategy, "SUM", [REALS[0]], [direct - 1, 3, direct, 0, direct + 1, 7])
    assert not complaints(strategy, "MEAN", [np.dtype(np.int32)], [pack // 2 + 1])
    assert not complaints(strategy, "SUM", [np.dtype(np.int32)], [pack - 9, 5, 9])


def cost(algorithm, node_sizes, node, is_leader, total):
    """Say for each level which calls a rank makes, and how many bytes they move: (calls, bytes) by primitive."""
    num_ranks, num_nodes, on_node = sum(node_sizes), len(node_sizes), node_sizes[node]
    is_even = len(set(node_sizes)) == 1
    world = {}
    within = {}
    across = {}
    flat = num_nodes == 1 or num_nodes == num_ranks
    if num_ranks == 1:
        pass
    elif algorithm in ("ReductionToOneDevice", "NcclAllReduce"):
        world = {"reduce": (1, total), "broadcast": (1, total)}
    elif algorithm == "RING":
        world = {"exchange": (2 * (num_ranks - 1), 2 * total * (num_ranks - 1) // num_ranks)}
    elif algorithm in ("CollectiveAllReduce", "in rank order") or (algorithm == "HierarchicalCopyAllReduce" and flat):
        world = {"all_reduce": (1, 2 * total * (num_ranks - 1) // num_ranks)}
    elif algorithm == "HierarchicalCopyAllReduce" and is_even and total > LEADER_BYTES:
        others = total // on_node * (on_node - 1)
        within = {"reduce_scatter": (1, others), "all_gather": (1, others)}
        across = {"all_reduce": (1, 2 * (total // on_node) * (num_nodes - 1) // num_nodes)}
    elif algorithm == "HierarchicalCopyAllReduce":
        within = {"reduce": (1, total), "broadcast": (1, total)} if on_node > 1 else {}
        across = {"all_reduce": (1, 2 * total * (num_nodes - 1) // num_nodes)} if is_leader else {}
    else:
        raise KeyError(f"the cost of {algorithm} is not written down here")
    return {"world": world, "within_node": within, "across_nodes": across}


def fused_cost(algorithm, topology, total, chunk_bytes):
    """Say the same of float32 numbers that go through shared memory, and in chunks across nodes."""
    num_ranks, num_nodes, on_node = topology.size, topology.num_nodes, topology.local_size
    if num_nodes == 1:
        return {
            "world": {"all_reduce": (1, 2 * total * (num_ranks - 1) // num_ranks)},
            "within_node": {},
            "across_nodes": {},
        }
    lanes, lane, node = min(topology.node_sizes), topology.local_rank, topology.node
    sent = []
    for start in range(0, total // 4, chunk_bytes // 4):
        bounds = chunk_bounds(min(chunk_bytes // 4, total // 4 - start), lanes)
        shard = bounds[lane + 1] - bounds[lane] if lane < lanes else 0
        if algorithm == "in rank order":  # partial sums up, the result down
            sent.append(((node > 0) + (node < num_nodes - 1)) * shard * 4)
        else:
            parts = shard_bounds(shard, num_nodes)
            sent.append(2 * (shard - (parts[node + 1] - parts[node])) * 4)
    return {
        "world": {},
        "within_node": {"all_reduce": (1, 2 * total * (on_node - 1) // on_node)},
        "across_nodes": {"exchange": (len(sent), sum(sent))} if lane < lanes else {},
    }


def is_fused(strategy, algorithm, nbytes):
    fused, nodes = parts_of(strategy).group.levels.fused, strategy.topology.node_of_rank
    if fused is None or nbytes < LEAST_BYTES * (len(set(nodes)) > 1):
        return False
    in_blocks = list(nodes) == sorted(nodes)
    return algorithm in ("CollectiveAllReduce", "HierarchicalCopyAllReduce") or (
        algorithm == "in rank order" and in_blocks
    )


def is_carried(strategy, algorithm, nbytes):
    fused, nodes = parts_of(strategy).group.levels.fused, list(strategy.topology.node_of_rank)
    if fused is None or len(set(nodes)) == 1 or nbytes > carried_bytes(strategy.num_replicas_in_sync):
        return False
    return algorithm == "CollectiveAllReduce" or (algorithm == "in rank order" and nodes == sorted(nodes))


def moved(strategy, value, **options):
    """All-reduce a value, and return what moved, as `cost` says it."""
    levels = parts_of(strategy).group.levels
    traffics = {name: getattr(levels, name).traffic for name in ("world", "within_node", "across_nodes")}
    for traffic in traffics.values():
        traffic.clear()
    parts_of(strategy).cross_device_ops.all_reduce("SUM", value, CommunicationOptions(**options))
    return {
        name: {primitive: (calls, traffic.nbytes[primitive]) for primitive, calls in traffic.calls.items()}
        for name, traffic in traffics.items()
    }


@pytest.mark.parametrize("transport", TRANSPORTS, indirect=True)
def test_bytes_and_calls_are_those_of_the_docstring(strategy, algorithm, transport):
    """Byte counts: below, at and above the leader limit, of lengths that all numbers of ranks and nodes divide.

    In shared memory also of one chunk and of several.
    """
    topology, at_limit = strategy.topology, LEADER_BYTES // 4
    around = [] if at_limit % topology.size else [at_limit, at_limit + topology.size]
    fused = parts_of(strategy).group.levels.fused
    assert (fused is not None) == (transport == "shared_memory" and topology.size > 1)
    for count in [topology.size, *around, 5000 * topology.size, 15_000 * topology.size]:
        value = np.ones(count, np.float32)
        stated = cost(algorithm, topology.node_sizes, topology.node, topology.is_leader, value.nbytes)
        if is_carried(strategy, algorithm, value.nbytes):
            carried = {"compare": (1, value.nbytes * (topology.size - 1))}  # with the comparison of the call
            stated = {"world": carried, "within_node": {}, "across_nodes": {}}
        elif fused is not None and is_fused(strategy, algorithm, value.nbytes):
            stated = fused_cost(algorithm, topology, value.nbytes, fused.slots.slot_bytes)
        assert moved(strategy, value) == stated
        pieces = [value[:1], value[1:]]
        assert moved(strategy, pieces, bytes_per_pack=10**9) == stated, "two arrays in one pack cost what one costs"


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("placement", [name for name in PLACEMENTS if name != "one node"], indirect=True)
@pytest.mark.parametrize("algorithm", ["CollectiveAllReduce", "HierarchicalCopyAllReduce"], indirect=True)
@pytest.mark.parametrize("transport", ["shared_memory"], indirect=True)
def test_all_reduce_sends_the_least_bytes_between_nodes(strategy, comm):
    """2 (K - 1) / K of the message for K nodes, however many ranks they have, and in whatever order."""
    topology, num_nodes = strategy.topology, strategy.topology.num_nodes
    for count in (100_001, LEAST_BYTES // 4):
        what = moved(strategy, np.ones(count, np.float32))
        assert what["world"] == {}
        sent, chunks = [0] * num_nodes, 0
        for node, (calls, nbytes) in comm.allgather((topology.node, what["across_nodes"].get("exchange", (0, 0)))):
            sent[node] += nbytes
            chunks = max(chunks, calls)
        rest = 8 * min(topology.node_sizes) * chunks  # nodes do not divide a shard: a number more, there and back
        least = 8 * count * (num_nodes - 1) / num_nodes
        assert all(least - rest <= nbytes <= least + rest for nbytes in sent)


@pytest.mark.ranks(3, 4)
def test_reproducible_results_do_not_depend_on_the_placement(algorithm, comm, monkeypatch):
    """They are added in rank order: to the bit what NumPy makes of the contributions, one after the other."""
    rows = np.random.default_rng(3).standard_normal((comm.size, 90_000))
    ops, options = ALGORITHMS[algorithm]
    options = options.merge(CommunicationOptions(reproducible=True))
    placements = {",".join(str(its(rank, comm.size)) for rank in range(comm.size)) for its in PLACEMENTS.values()}
    for nodes in sorted(placements):
        monkeypatch.setenv("MPIDIST_PRETEND_NODES", nodes)
        with Strategy(cross_device_ops=ops, comm=comm) as strategy:
            for count in (5, 9000, 90_000):
                dtypes = [REALS[0], HALVES[1]] if count > 9000 else [*REALS, *HALVES, COMPLEX[0]]
                value = [rows[comm.rank, :count].astype(dtype) for dtype in dtypes]
                sums, means = (strategy.reduce(op, value, options=options) for op in ("SUM", "MEAN"))
                for dtype, total, mean in zip(dtypes, sums, means, strict=True):
                    parts = [row[:count].astype(dtype) for row in rows]
                    assert bits(total) == bits(in_rank_order(np.add, parts, dtype)), dtype
                    assert bits(mean) == bits(in_rank_order(np.add, parts, dtype, comm.size)), dtype


@pytest.mark.parametrize("algorithm", ["ReductionToOneDevice"], indirect=True)
@pytest.mark.parametrize("transport", ["shared_memory"], indirect=True)
@pytest.mark.parametrize("placement", ["uneven"], indirect=True)
def test_adding_at_one_rank_keeps_the_order_of_ranks(strategy):
    """Its docstring's promise, without an option."""
    rows = np.random.default_rng(5).standard_normal((strategy.topology.size, 900))
    own = rows[strategy.topology.rank]
    assert bits(strategy.reduce("SUM", own)) == bits(in_rank_order(np.add, rows, own.dtype))
