"""One suite for every communicator: alone, over MPI, and in shared memory; in one piece, and in many chunks."""

from itertools import pairwise, product

import numpy as np
import pytest
from support.contributions import (
    COMPLEX,
    DTYPES,
    HALVES,
    REALS,
    UFUNCS,
    bits,
    flat_trees,
    in_rank_order,
    in_tree_order,
    rows_of_this_rank,
    unlike_numbers,
)
from support.everywhere import same_everywhere
from transport.communicator_checks import CheckedMemory, checks_of

from mpidist.transport.communicator import SoloCommunicator, shard_bounds
from mpidist.transport.mpi.communicator import MAX_CHUNK_BYTES, MpiCommunicator
from mpidist.transport.node_memory.staging_slots import Slots
from mpidist.transport.node_memory.window import LINE_BYTES
from mpidist.transport.reduction import Reduction
from mpidist.transport.shared_memory.communicator import SharedMemoryCommunicator
from mpidist.transport.shared_memory.fused_reducer import FusedReducer
from mpidist.transport.topology import Topology

pytestmark = pytest.mark.core

CHUNK_BYTES = 28  # 7 numbers of float32, and less than one of complex longdouble
SLOT_BYTES = 4096
KINDS = ["solo", "mpi", "mpi in chunks", "shared", "shared in chunks"]
A_FEW = [np.dtype(np.int32), np.dtype(np.float64), HALVES[1]]
OPS = ["sum", "prod", "min", "max"]


@pytest.fixture(params=[pytest.param("solo", marks=pytest.mark.ranks(1)), *KINDS[1:]])
def communicator(request, comm):
    limit = CHUNK_BYTES if "chunks" in request.param else MAX_CHUNK_BYTES
    host = SoloCommunicator("alone")
    if request.param != "solo":
        host = MpiCommunicator(comm.Dup(), "all", limit)
    if "shared" not in request.param:
        yield host
        host.free()
        return
    assert isinstance(host, MpiCommunicator)
    slots = Slots(comm, LINE_BYTES if "chunks" in request.param else SLOT_BYTES)
    shared = SharedMemoryCommunicator(host, FusedReducer(slots, comm.size, 64, host.traffic))
    yield shared
    shared.free()


@pytest.fixture
def counts(communicator, request):
    """Lengths of buffers: around the number of ranks, and large."""
    size = communicator.size
    large = 50 if "chunks" in request.node.name else 1000
    return sorted({0, 1, 7, size - 1, size, size + 1, large})


def can(op, dtype):
    return dtype.kind != "c" or op in ("sum", "prod")


@pytest.mark.whole
def test_communicator_of_host_memory_passes_all_checks(communicator, request):
    chunk_bytes = CHUNK_BYTES if "chunks" in request.node.name else SLOT_BYTES
    for check in checks_of(CheckedMemory(np.array, np.asarray, DTYPES, DTYPES, chunk_bytes)).values():
        check(communicator)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_nan_and_infinity_propagate(communicator, comm):
    """NumPy's rules, and the same bits on all ranks; MPI may lose a NaN in a minimum, on some ranks only."""
    specials = np.array([np.nan, np.inf, -np.inf, 1.0, 0.0, -0.0, 2.0])
    rows = [np.repeat(np.roll(specials, shift), 2) for shift in range(communicator.size)]
    for op, dtype in product(OPS, [*REALS, *HALVES]):
        buffer = rows[communicator.rank].astype(dtype)
        communicator.all_reduce(buffer, Reduction(op))
        expected = in_rank_order(UFUNCS[op], [row.astype(dtype) for row in rows], dtype)
        assert np.array_equal(buffer.astype(np.float64), expected.astype(np.float64), equal_nan=True), (op, dtype)
        if op in ("sum", "prod") and dtype in REALS:
            buffer[np.isnan(buffer)] = np.nan  # MPI's own: of two NaNs a processor keeps the first, with its sign
        assert same_everywhere(comm, buffer) or communicator.size == 1, (op, dtype)
    for op, dtype, owner in product(OPS, [*REALS, *HALVES, COMPLEX[0]], range(communicator.size)):
        if can(op, dtype):
            buffer = np.ones(3, dtype)
            buffer[1] = np.nan if owner == communicator.rank else 1
            communicator.all_reduce(buffer, Reduction(op))
            assert np.isnan(buffer).tolist() == [False, True, False], (op, dtype, owner)


def test_sums_have_the_same_bits_on_all_ranks_and_of_rank_order(communicator, comm):
    """Half precision is added in float32 and rounded once; its order is always that of the ranks."""
    rows = np.random.default_rng(7).standard_normal((communicator.size, 300))
    for dtype in [*REALS, *HALVES, *COMPLEX]:
        parts = [(row + 1j * row[::-1] if dtype.kind == "c" else row).astype(dtype) for row in rows]
        for op in ("sum", "prod"):
            communicator.all_reduce(buffer := parts[communicator.rank].copy(), Reduction(op))
            assert communicator.size == 1 or same_everywhere(comm, buffer), (op, dtype)
        reduction = Reduction("sum", in_rank_order=dtype not in HALVES)
        expected = in_rank_order(np.add, parts, dtype)
        communicator.all_reduce(buffer := parts[communicator.rank].copy(), reduction)
        assert (buffer == expected).all(), dtype
        communicator.reduce(buffer := parts[communicator.rank].copy(), reduction, 0)
        assert communicator.rank or (buffer == expected).all(), dtype


def test_products_of_complex_numbers_in_rank_order_depend_on_no_length(communicator):
    """NumPy rounds a single product otherwise, where it is written in place."""
    size, reduction = communicator.size, Reduction("prod", in_rank_order=True)
    real, imaginary = np.random.default_rng(7).standard_normal((2, size, 300))
    for dtype in COMPLEX:
        own = (real + 1j * imaginary)[communicator.rank].astype(dtype)
        communicator.all_reduce(whole := own.copy(), reduction)
        for at in range(60):
            communicator.all_reduce(alone := own[at : at + size].copy(), reduction)  # a shard is one number
            assert (alone == whole[at : at + size]).all(), (dtype, at)


def test_fold_order_is_kept_to_the_bit(communicator):
    """Where every rank has one row of the replica tree. By each method that reduces."""
    size, rank = communicator.size, communicator.rank
    for tree in flat_trees(Topology.from_labels(rank, [0] * size, ["host"] * size)):
        for op, dtype in [("sum", "f"), ("sum", "D"), ("prod", "f"), ("max", "d"), ("sum", "i")]:
            numbers = unlike_numbers(tree.total, 2 * size + 5, dtype)
            expected = in_tree_order(UFUNCS[op], numbers)
            (row,) = rows_of_this_rank(tree, UFUNCS[op], numbers)
            reduction = Reduction(op, fold=tree.world)
            communicator.all_reduce(buffer := row.copy(), reduction)
            assert bits(buffer) == bits(expected), (tree, op, dtype)
            communicator.reduce(buffer := row.copy(), reduction, size - 1)
            assert rank < size - 1 or bits(buffer) == bits(expected), (tree, op, dtype)
            start, stop = shard_bounds(row.size, size)[rank:][:2]
            shard = communicator.reduce_scatter(row.copy(), reduction)
            assert bits(shard) == bits(expected[start:stop]), (tree, op, dtype)


def test_divided_sum_does_not_overflow(communicator):
    """The mean of the largest numbers is divided before it is rounded. By each method that reduces."""
    large, reduction = np.finfo(np.float16).max, Reduction("sum", divisor=communicator.size)
    buffer = np.full(11, large)
    communicator.all_reduce(buffer, reduction)
    assert (buffer == large).all()
    communicator.reduce(buffer, reduction, 0)
    assert communicator.rank or (buffer == large).all()
    assert (communicator.reduce_scatter(np.full(11, large), reduction) == large).all()


def test_sums_of_short_integers_wrap(communicator):
    """Those of Open MPI saturate, where a processor adds many at once. By each method that reduces."""
    for dtype in map(np.dtype, ("b", "B", "h", "H")):
        limits, rank = np.iinfo(dtype), communicator.rank
        rows = [np.full(700, limits.max - row, dtype) for row in range(communicator.size)]
        rows[0][::2] = limits.min
        expected = in_rank_order(np.add, rows, dtype)
        communicator.all_reduce(buffer := rows[rank].copy(), Reduction())
        assert (buffer == expected).all(), dtype
        communicator.reduce(buffer := rows[rank].copy(), Reduction(), 0)
        assert rank or (buffer == expected).all(), dtype
        start, stop = shard_bounds(700, communicator.size)[rank:][:2]
        assert (communicator.reduce_scatter(rows[rank].copy(), Reduction()) == expected[start:stop]).all(), dtype


@pytest.mark.parametrize("communicator", ["solo", "mpi"], indirect=True)
def test_pack_buffer_has_given_length_and_dtype(communicator):
    for count, dtype in [(0, "f4"), (100, "f8"), (7, "i1"), (3, "G"), (100, "f8"), (1000, HALVES[1])]:
        buffer = communicator.pack_buffer(count, np.dtype(dtype))
        assert (buffer.shape, buffer.dtype) == ((count,), np.dtype(dtype))
        assert buffer.flags.c_contiguous
        assert buffer.flags.aligned
        buffer[...] = 1
        communicator.all_reduce(buffer, Reduction())
        assert (buffer == communicator.size).all()


@pytest.mark.parametrize("communicator", KINDS[1:], indirect=True)
def test_traffic_has_the_bytes_of_the_docstrings(communicator, counts):
    """Counted for the busier direction of this rank's link; one call however many chunks."""
    for dtype in A_FEW:
        rank, size = communicator.rank, communicator.size
        for count in counts:
            buffer = np.ones(count, dtype)
            start, stop = [count // size * at + min(at, count % size) for at in (rank, rank + 1)]
            total, own = count * dtype.itemsize, (stop - start) * dtype.itemsize
            communicator.traffic.clear()
            communicator.all_reduce(buffer, Reduction())
            communicator.reduce(buffer, Reduction(), size - 1)
            communicator.reduce_scatter(buffer, Reduction())
            communicator.all_gather(buffer)
            communicator.broadcast(buffer, 0)
            communicator.send_receive(buffer.copy(), (rank + 1) % size, buffer, (rank - 1) % size)
            expected = {
                "all_reduce": 2 * total * (size - 1) // size,
                "reduce": total,
                "reduce_scatter": total - own,
                "all_gather": total - own,
                "broadcast": total,
                "exchange": total,
            }
            assert dict(communicator.traffic.nbytes) == expected
            assert dict(communicator.traffic.calls) == dict.fromkeys(expected, 1)
        communicator.traffic.clear()
        assert not communicator.traffic.calls
        assert not communicator.traffic.nbytes


@pytest.mark.no_mpi
def test_shards_differ_by_at_most_one_and_longer_ones_come_first():
    for count, size in product((0, 1, 6, 7, 8, 1000, 2**31 + 1), (1, 2, 3, 7)):
        bounds = shard_bounds(count, size)
        lengths = [stop - start for start, stop in pairwise(bounds)]
        assert (bounds[0], bounds[-1], len(lengths)) == (0, count, size)
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] - lengths[-1] <= 1
