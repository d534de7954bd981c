"""The compiled part of the library: the same bits as NumPy, on ranks with and without it, and refusals."""

from itertools import product

import numpy as np
import pytest
from support.contributions import HALVES, have_equal_bits, in_rank_order, list_of_all, list_of_rank
from support.reductions import all_reduce
from support.transports import WAYS_TO_WRITE, force_way_to_write, set_sizes

from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.transport import reduction
from mpidist.transport.group import levels
from mpidist.transport.native.loading import native
from mpidist.transport.node_memory import barrier
from mpidist.transport.reduction import UFUNCS, Reduction
from mpidist.transport.shared_memory import in_place, two_shot

pytestmark = pytest.mark.skipif(
    native is None, reason="the compiled part is left out: MPIDIST_NATIVE=0, or no compiler"
)
several = pytest.mark.ranks(min=2)

DTYPES = [np.dtype(code) for code in "bBhHiIlLqQfd"]
FLOAT32 = np.dtype(np.float32)
LENGTHS = [[1], [4096], [0, 5, 0, 64, 1, 1, 1, 130], [7] * 60, [3, 0, 2000, 3]]  # elements of each array
USERS = (barrier, reduction, two_shot, in_place, levels)  # modules that have a use for the compiled part


@pytest.fixture(params=["all", "some"])
def ranks_with_it(request, comm, monkeypatch):
    """Which ranks have the compiled part: all, or those of uneven numbers."""
    set_sizes(monkeypatch, chunk_bytes=1024, one_shot_bytes=256)
    if request.param == "some" and comm.rank % 2 == 0:
        for module in USERS:
            monkeypatch.setattr(module, "native", None)
    return str(request.param)


@pytest.mark.whole
@several
def test_same_bits_as_numpy(comm, ranks_with_it):
    """Half precision is rounded once."""
    ways = [*zip("bHld", WAYS_TO_WRITE * 2, strict=False), *product(["f", *HALVES], WAYS_TO_WRITE)]
    with Strategy(comm=comm) as strategy:
        for number, (dtype, way) in enumerate((np.dtype(code), way) for code, way in ways):
            force_way_to_write(strategy, way)
            others = ["PROD", "MIN", "MAX"] if dtype.char in "lf" else []  # whole numbers, and floats
            means = ["MEAN"] if dtype.kind == "f" or dtype in HALVES else []
            for op, lengths in product(["SUM", *means, *others], LENGTHS):
                if op != "SUM" and (LENGTHS.index(lengths) + number) % 3:
                    continue  # each operation meets each length, of some dtype
                ufunc = UFUNCS.get(op.lower(), np.add)
                wanted = list_of_all(comm.size, lengths, dtype, comm.size if op == "MEAN" else 1, ufunc)
                given = list_of_rank(comm.rank, lengths, dtype)
                elsewhere = [np.empty_like(part) for part in given]
                for _ in range(3):  # new results lie in shared memory from the second call on
                    assert have_equal_bits(all_reduce(strategy, op, given), wanted)
                assert have_equal_bits(all_reduce(strategy, op, given, out=elsewhere), wanted)
                shared = strategy.symmetric_empty_like(given)
                for array, part in zip(shared, given, strict=True):
                    array[...] = part
                for_all = strategy.symmetric_empty_like(given, per_node=True)
                assert have_equal_bits(all_reduce(strategy, op, given, out=for_all), wanted)
                for arrays in given, shared:
                    assert have_equal_bits(all_reduce(strategy, op, arrays, out=arrays), wanted)
                comm.Barrier()  # before the shared arrays go


@pytest.mark.no_mpi
def test_copies_of_arrays_side_by_side():
    """Whatever they are, and whichever object their dtype is; NumPy copies the others."""
    barrier = native.Barrier([np.zeros(256, np.uint8)], 0, 1)
    source = np.arange(6000, dtype=np.float32)
    into = np.zeros(6000, np.dtype("<f4").newbyteorder("="))
    assert into.dtype is not source.dtype
    for barrier.forced_way, *is_far in ((0,), (1,), (-1, True)):
        into[...] = 0
        assert barrier.copy(into[1:], source[:-1], *is_far)
        assert (into[1:] == source[:-1]).all()
        assert into[0] == 0
        for start in range(20):  # parts of lines of the cache at both ends
            for stop in range(start, start + 60):
                into[...] = -1
                assert barrier.copy(into[start:stop], source[start + 3 : stop + 3], *is_far)
                assert (into[start:stop] == source[start + 3 : stop + 3]).all()
                assert (into[:start] == -1).all()
                assert (into[stop:] == -1).all()
    assert not barrier.copy(into, source[:-1])
    assert not barrier.copy(into, source.astype(">f4"))
    assert not barrier.copy(into, source.astype(np.int32))
    assert not barrier.copy(into[::2], source[::2])
    assert not barrier.copy(np.empty(2, object), np.array([1, "one"], object))
    with pytest.raises(TypeError, match="two arrays"):
        barrier.copy([], source)


@pytest.mark.ranks(2, 3)
def test_native_copies_write_results_of_numpy_in_both_modes(comm, ranks_with_it):
    with Strategy(comm=comm) as strategy:
        for way, dtype in product(WAYS_TO_WRITE, ("f", "e", "D", "i")):
            force_way_to_write(strategy, way)
            mine = (np.arange(5000) % 17 + comm.rank).astype(dtype)
            if dtype != "D":
                assert (all_reduce(strategy, "MAX", mine) == mine - comm.rank + comm.size - 1).all()
            assert (all_reduce(strategy, "SUM", mine) == comm.size * (mine - comm.rank) + sum(range(comm.size))).all()
            gathered = strategy.gather(mine, axis=0).reshape(comm.size, -1)
            assert (gathered - gathered[0] == np.arange(comm.size)[:, None]).all()
            assert (strategy.broadcast(mine) == mine - comm.rank).all()


@pytest.mark.ranks(2, 3)
def test_outs_and_numbers_that_are_left_to_numpy(comm, ranks_with_it):
    """Many small arrays that compiled code has begun to stage, and whose outs it does not take; infinite sums."""
    size, lengths, raw = comm.size, [100] * 60, np.zeros(60 * 401 + 1, np.uint8)
    with Strategy(comm=comm) as strategy:
        outs_of = {
            "gaps": [np.zeros(200, np.float32)[::2] for _ in lengths],
            "swapped": [np.zeros(100, ">f4") for _ in lengths],
            "misaligned": [raw[1 + 401 * at : 401 * (at + 1)].view(np.float32) for at in range(60)],
        }
        for (name, outs), op in product(outs_of.items(), ("SUM", "MEAN")):
            wanted = list_of_all(size, lengths, FLOAT32, size if op == "MEAN" else 1)
            all_reduce(strategy, op, list_of_rank(comm.rank, lengths, FLOAT32), out=outs)
            assert have_equal_bits([out.astype(np.float32) for out in outs], wanted), (name, op)
        # Overflows are results, whatever the program has set: one rank alone would raise.
        with np.errstate(all="raise"):
            assert np.isinf(all_reduce(strategy, "SUM", np.full(5000, 3e38, np.float32))).all()
            assert Reduction().combine([np.full(9, 1e308)] * 2, np.empty(9)) == 0


@pytest.mark.no_mpi
@pytest.mark.parametrize("op", UFUNCS)
def test_any_number_of_parts(op):
    for dtype, num_parts in product(DTYPES, (2, 3, 7)):
        every = [list_of_rank(rank, [5000], dtype)[0] for rank in range(num_parts)]
        total, second = np.empty_like(every[0]), np.empty_like(every[0])
        if not native.combines(op, dtype):
            assert op != "sum"
            assert not native.combine(op, every, total, 1, second)
            continue
        with np.errstate(over="ignore"):
            wanted = in_rank_order(UFUNCS[op], every, dtype)
        assert native.combine(op, every, total, 1, second)
        assert have_equal_bits([total, second], [wanted, wanted])
        assert native.combine(op, every, every[-1], 1, every[0])  # into the parts themselves
        assert have_equal_bits([every[-1], every[0]], [wanted, wanted])


@pytest.mark.no_mpi
def test_least_and_greatest_are_nan_where_a_part_is():
    for dtype, op in product((np.float32, np.float64), ("min", "max")):
        special = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1.0], dtype)
        one, other = np.repeat(special, len(special)), np.tile(special, len(special))
        total = np.empty_like(one)
        assert native.combine(op, [one, other], total, 1, None)
        assert np.array_equal(total, UFUNCS[op](one, other), equal_nan=True)
        assert np.isnan(total).sum() == 2 * len(special) - 1


@pytest.mark.no_mpi
def test_native_sum_of_any_halves_has_the_bits_of_numpy():
    """Infinities and NaN among them; all float16 with ties, subnormals, and the least sums that become infinite."""
    random = np.random.default_rng(1)
    edges = np.array([0x0001, 0x03FF, 0x0400, 0x3C00, 0x4C00, 0x4BFF, 0x7BFF, 0x7C00, 0x7E00], np.uint16)
    every_float16 = np.arange(1 << 16, dtype=np.uint16)
    for other in (*random.integers(0, 1 << 16, 10).astype(np.uint16), *edges, *(edges | 0x8000)):
        check_halves([every_float16.view(np.float16), np.full_like(every_float16, other).view(np.float16)], (1, 3))
    for half, num_parts in product(HALVES, (2, 3, 7)):
        parts = [random.integers(0, 1 << 16, 100_003).astype(np.uint16).view(half) for _ in range(num_parts)]
        check_halves(parts, (1, 3, 4))


def check_halves(parts, divisors):
    """Of a NaN that comes of several, no bits are promised."""
    for divisor in divisors:
        with np.errstate(all="ignore"):
            wanted = in_rank_order(np.add, parts, parts[0].dtype, divisor)
        total, second, is_nan = np.empty_like(wanted), np.empty_like(wanted), np.isnan(wanted)
        assert native.combine("sum", parts, total, divisor, second)
        for result in total, second:
            assert (np.isnan(result) == is_nan).all()
            assert have_equal_bits([result[~is_nan]], [wanted[~is_nan]])


@pytest.mark.no_mpi
def test_sums_of_compressed_float16_that_overflow_are_counted():
    """Compiled code counts none, so NumPy adds these."""
    given, out = np.array([6e4, 1, 6e4, np.inf], np.float16), np.empty(4, np.float16)
    counting = Reduction(counts_overflow=True)
    assert counting.combine([given] * 2, out) == counting.combine_and_divide([given] * 2, out, 1) == 2
    assert Reduction().combine([given] * 2, out) == 0
    assert (out == [np.inf, 2, np.inf, np.inf]).all()


@pytest.mark.no_mpi
def test_sums_that_are_refused():
    """NumPy adds what overlaps in part, what is not alike, and what cannot be written."""
    whole = np.arange(100.0)
    one, other = whole[:50], whole[50:]
    read_only = np.empty(50)
    read_only.flags.writeable = False
    assert not native.combine("sum", [one, other], whole[25:75], 1, None)
    assert not native.combine("sum", [one, other], np.empty(50), 1, whole[25:75])
    assert not native.combine("sum", [one, other[:40]], np.empty(50), 1, None)
    assert not native.combine("sum", [one, other.astype(np.float32)], np.empty(50), 1, None)
    assert not native.combine("sum", [one, other], read_only, 1, None)
    assert not native.combine("sum", [one], np.empty(50), 1, None)
    assert not native.combine("sum", [np.arange(3), np.arange(3)], np.empty(3, int), 2, None)
    with pytest.raises(TypeError, match="needed are an operation, a list of arrays"):
        native.combine("sum", (one, other), np.empty(50), 1, None)
