"""Kernels of device memory, bit by bit as the host does it.

They pack arrays into one and bring them back, as they are, cast and divided; and they join pieces.
"""

import gc
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from host_cuda.gpus import allocations, down, emulated, gpus, up
from support.contributions import COMPLEX, HALVES, INTEGERS, UFUNCS, bits, in_rank_order, in_tree_order, unlike_numbers

from mpidist.transport import cuda
from mpidist.transport.gpu.compiled import CASTS, COMBINED, QUOTIENTS, compile_kernel
from mpidist.transport.gpu.copy_table import CopyTables, PackLayout
from mpidist.transport.gpu.kernels import DeviceKernels
from mpidist.transport.gpu.new_arrays import NewArrays, _Kept
from mpidist.transport.reduction import Reduction
from mpidist.transport.tree import Fold

__all__ = ["emulated", "gpus"]  # fixtures

pytestmark = pytest.mark.ranks(1)

BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
ON_DEVICE = [*INTEGERS, *HALVES, F32, F64, *COMPLEX[:2]]
DTYPES = {"bf": BF16} | {f"{its.kind}{its.itemsize}": its for its in ON_DEVICE if its != BF16}
ROW = 8192  # bytes
SIZES = [1, 0, 2, 3, 15, 16, 17, 31, 33, 511, 513, ROW // 4 - 1, ROW // 4, ROW // 4 + 1, ROW // 2, ROW, ROW + 1, 20_000]


@pytest.fixture
def kernels(gpus):
    return DeviceKernels()


def empty(size, dtype):
    return cuda.current().cupy.empty(size, dtype)


def numbers_of(dtype, size, seed=0):
    """Any numbers of a dtype, [size]."""
    rng = np.random.default_rng([seed, size])
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, size, dtype, endpoint=True)
    numbers = rng.standard_normal(size) * 2.0 ** rng.integers(-12, 12, size)
    return (numbers + 1j * rng.standard_normal(size) if dtype.kind == "c" else numbers).astype(dtype)


def odd_numbers_of(dtype):
    """Zeros, subnormal numbers, infinities and no numbers, [n]."""
    if dtype.kind in "iu":
        return np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, 0, 1], dtype)
    least = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    odd = np.array([0.0, -0.0, least, -least, 5 * least, np.inf, -np.inf, np.nan, 1])
    if dtype.kind != "c":
        return odd.astype(dtype)
    pairs = np.empty((odd.size, odd.size), dtype)
    pairs.real, pairs.imag = odd, odd[:, None]
    return pairs.reshape(-1)


def every_pattern(dtype):
    """All numbers of half precision; of float32, patterns at random, and those where roundings turn, [n]."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    if dtype in HALVES:
        return halves.view(dtype)
    patterns = np.random.default_rng(3).integers(0, 1 << 32, 1 << 16, np.uint32)
    edges = [halves.view(half).astype(F32).view(np.uint32) for half in HALVES]
    steps = (0, 1, -1 % 2**32, 0x7FFF, 0x8000, 0x8001, 0xFFF, 0x1000, 0x1001)
    return np.concatenate([patterns, *(edge + np.uint32(step) for edge in edges for step in steps)]).view(F32)


def same(one, other):
    """Whether the bits are the same; those of what is no number may be others."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype.kind in "iu":
        return bool((one == other).all())
    with np.errstate(invalid="ignore"):  # of those that signal
        nan, other_nan = np.isnan(one), np.isnan(other)
    return bool((nan == other_nan).all()) and bits(one[~nan]) == bits(other[~nan])


# Packing.


CAST_PAIRS = [tuple(DTYPES[code] for code in pair.split()) for pair in CASTS]
QUOTIENT_PAIRS = [tuple(DTYPES[code] for code in pair.split()) for pair in QUOTIENTS]


def lists_of(dtype):
    """Arrays of many sizes and shapes, with odd numbers among theirs."""
    return [odd_numbers_of(dtype), *(numbers_of(dtype, size) for size in SIZES)]


def flat(arrays):
    return np.concatenate([its.reshape(-1) for its in arrays])


def packed(kernels, host, wire, **how):
    """Pack arrays into a new one of this dtype; return it on the host."""
    buffer = empty(sum(its.size for its in host), wire)
    kernels.pack([up(its) for its in host], buffer, **how)
    return down(buffer)


def unpacked(kernels, numbers, like, dtype, divisor=1):
    """Unpack numbers to new arrays of these shapes and this dtype; return them on the host."""
    targets = [up(np.zeros(its.shape, dtype)) for its in like]
    kernels.unpack(up(numbers), targets, divisor)
    return [down(its) for its in targets]


def are_same(arrays, others):
    return all(same(one, other) for one, other in zip(arrays, others, strict=True))


def test_pack_and_unpack_take_one_launch_of_a_list(gpus):
    """Rounded to nearest even where it is cast; and finite numbers that become infinite float16 are counted."""
    for read, written in (*zip(ON_DEVICE, ON_DEVICE, strict=True), *CAST_PAIRS):
        kernels = DeviceKernels()
        host = [*lists_of(read), numbers_of(read, 6).reshape(2, 3), np.asarray(numbers_of(read, 1)[0])]
        if written != read:
            host.append(every_pattern(read))
        with np.errstate(all="ignore"):
            expected = [its.astype(written) for its in host]
        buffer = packed(kernels, host, written, counts_overflow=True)
        results = unpacked(kernels, flat(host), host, written)
        assert kernels.num_launches == 2, (read, written)
        if written == read:
            assert bits(buffer) == bits(flat(results)) == bits(flat(host)), read
        assert same(buffer, flat(expected)), (read, written)
        assert are_same(results, expected), (read, written)
        became = np.isfinite(flat(host)) & ~np.isfinite(flat(expected)) if written == F16 else np.zeros(0)
        assert became.any() == ((read, written) == (F32, F16))
        assert kernels.overflowed == became.sum()


def test_quotients_are_those_of_numpy(kernels):
    for launches, ((read, written), divisor) in enumerate(product(QUOTIENT_PAIRS, (2, 3, 7, 1000)), 1):
        host = lists_of(read)
        with np.errstate(all="ignore"):
            expected = [its / divisor for its in host]
        assert are_same(unpacked(kernels, flat(host), host, written, divisor), expected), (read, written, divisor)
        assert kernels.num_launches == launches


UNALIGNED = [(dtype, dtype) for dtype in (np.dtype(np.uint8), BF16, F32, F64, COMPLEX[1])]


def test_starts_of_any_alignment(kernels):
    """Of the arrays, of the buffer, and of both; what lies around is left alone."""
    starts = product((0, 1, 2, 3, 4, 8), (0, 1, 2, 3, 4, 5, 7, 8))
    for (read, written), (array_at, buffer_at) in product([*UNALIGNED, *((F32, half) for half in HALVES)], starts):
        size = 3 * ROW // read.itemsize + 5
        host = numbers_of(read, size)
        there = host.astype(written)
        back = there.astype(read)
        whole, around = up(np.full(size + 20, 9, read)), up(np.full(size + 20, 9, written))
        array, buffer = whole[array_at : array_at + size], around[buffer_at : buffer_at + size]
        array[...] = up(host)
        kernels.pack([array[:7], array[7:]], buffer)
        assert same(down(buffer), there), (read, written, array_at, buffer_at)
        array[...] = 9
        kernels.unpack(buffer, [array])
        assert same(down(array), back), (read, written, array_at, buffer_at)
        for its, at in ((down(whole), array_at), (down(around), buffer_at)):
            assert (its[:at] == 9).all()
            assert (its[at + size :] == 9).all()


@pytest.mark.parametrize("old", [None, "the driver's version", "NVRTC's version"])
def test_ten_thousand_small_arrays(emulated, kernels, old):
    """Of which a launch takes 1,363, and only 168 where the driver or NVRTC is older than CUDA 12.1."""
    if old is not None:
        emulated.wish(old, 12_000)
    host = numbers_of(F32, 10_000 * 17).reshape(-1, 17)
    assert bits(packed(kernels, list(up(host))[::-1], F32)) == bits(host[::-1])
    back = up(np.zeros_like(host))
    kernels.unpack(up(host.reshape(-1)), list(back)[::-1])
    assert bits(down(back)[::-1]) == bits(host)
    assert kernels.num_launches == 2 * -(-10_000 // (168 if old else 1363))


@pytest.mark.parametrize("pair", ["u1 u1", "f2 f2", "f4 f4", "c16 c16", "f4 bf", "bf f4"])
def test_arrays_begin_at_multiples_of_16_bytes_and_zeros_lie_between(kernels, pair):
    read, wire = (DTYPES[code] for code in pair.split())
    host = [numbers_of(read, size) for size in SIZES if size]
    layout = PackLayout([its.size for its in host], wire, is_padded=True)
    start = 4 if wire.itemsize == 4 else 0
    around = up(np.full(layout.size + 8, 9, wire))
    buffer = around[start : start + layout.size]
    kernels.pack([up(its) for its in host], buffer, layout=layout)
    expected = np.full(around.size, 9, wire)
    expected[start : start + layout.size] = 0
    for its, offset in zip(host, layout.offsets.tolist(), strict=True):
        assert offset % 16 == 0
        expected[start + offset // wire.itemsize :][: its.size] = its.astype(wire)
    assert same(down(around), expected)
    targets = [up(np.zeros(its.size, read)) for its in host]
    kernels.unpack(buffer, targets, layout=layout)
    assert are_same([down(its) for its in targets], [its.astype(wire).astype(read) for its in host])
    assert layout.size <= sum(its.size for its in host) + len(host) * (16 // wire.itemsize - 1)


def test_arrays_that_are_not_contiguous_are_packed_and_not_unpacked_to(kernels):
    host = numbers_of(F32, 12).reshape(3, 4)
    arrays, expected = [up(host).T, up(host)[:, 1:3], up(host)], [host.T, host[:, 1:3], host]
    buffer = empty(12 + 6 + 12, F32)
    for _ in range(2):
        kernels.pack(arrays, buffer)
        assert bits(down(buffer)) == b"".join(map(bits, expected))
    with pytest.raises(ValueError, match=r"cannot write to float32\[4, 3\], which is not contiguous"):
        kernels.unpack(buffer, arrays)
    copies = [up(np.zeros(its.shape, F32)) for its in arrays]
    kernels.copy(arrays, copies)
    assert [bits(down(its)) for its in copies] == list(map(bits, expected))


def test_copies_of_several_dtypes_and_divisions_in_place(kernels):
    for dtypes in (ON_DEVICE[-2:], ON_DEVICE):
        host = [numbers_of(dtype, 5000) for dtype in dtypes]
        targets = [up(np.zeros(5000, dtype)) for dtype in dtypes]
        kernels.copy([up(its) for its in host], targets)
        assert [bits(down(its)) for its in targets] == [bits(its) for its in host]
    real = [its for its in host if its.dtype in (F32, F64) or its.dtype.kind == "c"]
    arrays = [up(its) for its in real]
    kernels.copy(arrays, arrays, 3)
    assert are_same([down(its) for its in arrays], [its / 3 for its in real])
    assert kernels.num_launches == 2 + 5 + 4, (
        "one for the arrays of each width, and one for the quotients of each dtype"
    )


def test_kernels_refuse_wrong_arrays_and_skip_empty_ones(kernels):
    ints, floats, nothing = up(np.arange(4)), up(np.ones(4, F32)), empty(0, F32)
    unaligned = up(np.zeros(17, np.uint8))[1:].view(F32)  # which would end CUDA's context
    pack, unpack, copy, combine = kernels.pack, kernels.unpack, kernels.copy, kernels.combine
    refused = [
        (pack, ([floats, floats], floats), ValueError, r"pack needs a .* buffer of 8 elements, got float32\[4\]"),
        (unpack, (floats[::2], [floats]), ValueError, r"unpack needs a contiguous .* 4 elements, got float32\[2\]"),
        (copy, ([floats], [ints]), ValueError, r"cannot copy float32\[4\] to int64\[4\]"),
        (combine, ([ints], Reduction(), floats), ValueError, "needed the same sizes and dtype"),
        (combine, ([floats, floats[:2]], Reduction(), floats), ValueError, "needed the same sizes"),
        (combine, ([floats[::2]], Reduction(), floats[:2]), ValueError, "not contiguous and aligned"),
        (combine, ([unaligned], Reduction(), floats), ValueError, "not contiguous and aligned"),
        (unpack, (floats, [unaligned]), ValueError, r"cannot write to float32\[4\], which is .* not aligned"),
    ]
    for call, arguments, kind, text in refused:
        with pytest.raises(kind, match=text):
            call(*arguments)
    for call, arguments in (
        (pack, ([], nothing)), (pack, ([nothing], nothing)), (unpack, (nothing, [nothing])),
        (combine, ([nothing], Reduction(), nothing)),
    ):  # fmt: skip
        call(*arguments)
    assert kernels.num_launches == 0


@pytest.mark.parametrize("lacks_pinned_memory", [False, True])
def test_finite_numbers_that_became_infinities_are_counted(emulated, kernels, lacks_pinned_memory):
    """Where they count: in float16."""
    emulated.wish("cudaHostAlloc", 2 * lacks_pinned_memory)  # CUDA's "out of memory"
    least = 65520.0
    below = float(np.nextafter(np.float32(least), np.float32(0)))
    host = np.array([1, least, -least, below, -below, np.inf, -np.inf, np.nan, 0], F32)
    for counts_overflow in (True, False, True, True):
        packed(kernels, [host], F16, counts_overflow=counts_overflow)
    assert kernels.overflowed == 6
    halves = up(np.array([1, 4e4, -4e4, 3e4, -3e4, np.inf, -np.inf, np.nan, 0], F16))
    for counts_overflow in (True, False):
        kernels.combine([halves] * 2, Reduction(counts_overflow=counts_overflow), buffer := empty(halves.size, F16))
        down(buffer)
    assert kernels.overflowed == 8
    packed(kernels, [np.array(least, F32)] * 1500, F16, counts_overflow=True)  # in two launches
    assert kernels.overflowed == 1508


# 64-bit arithmetic, without the memory that needs it.


def test_offsets_go_far_beyond_32_bits(gpus, emulated):
    """Of a huge array and a small one: the end of the huge one is really there, and pretends to begin far below."""
    held, below = 3 * ROW // 4 + 5, 4 * 2**33
    numbers, result = up(np.arange(held + 3, dtype=F32)), up(np.zeros(held + 3, F32))
    sources = [numbers.data.ptr - below, numbers[held:].data.ptr]
    targets = [result.data.ptr - below, result[held:].data.ptr]
    tables = CopyTables([2**33 + held, 3], ["copy_4"], [4])
    (table,) = tables.fill(sources, targets)
    rows_there = 4 + 1
    assert table.num_blocks == -(-(2**33 * 4 // ROW + rows_there) // 8)
    gpus.cupy.cuda.Device().synchronize()
    emulated.wish("the first block of kernels", 2**33 * 4 // ROW * 32 // 256)
    compile_kernel("copy_4")((table.num_blocks,), (256,), table.arguments)
    gpus.cupy.cuda.Device().synchronize()
    emulated.be_normal()
    assert (down(result) == down(numbers)).all()


# New arrays.


def test_new_arrays_lie_apart_and_small_ones_share_allocations(gpus):
    shapes = [(3,), (), (0, 4), (5, 7), (64, 1024), (16,), (64, 257), (1, 7), (13,), (4, 7)] * 3 + [(100, 100)] * 60
    dtypes = [[F32, F64, np.dtype(np.uint8), BF16][at // 10 % 4] for at in range(len(shapes))]
    made = NewArrays(shapes, dtypes)
    for _ in range(2):
        arrays = made.take()
        assert [(its.shape, its.dtype) for its in arrays] == list(zip(shapes, dtypes, strict=True))
        assert all(its.flags.c_contiguous and its.data.ptr % 16 == 0 for its in arrays if its.size)
        for at, its in enumerate(arrays):
            its[...] = at
        assert all((down(its) == at).all() for at, its in enumerate(arrays))
    with allocations() as nbytes:
        NewArrays([(100, 100)] * 60 + [(65, 256), (9,), (1, 100)], [F32] * 63).take()
    assert sorted(nbytes) == [65 * 1024, 8 * 40_000 + 48 + 400, 26 * 40_000, 26 * 40_000], "of at most a mebibyte"
    with allocations() as nbytes:
        NewArrays([(4,)] * 161, [F32] * 161).take()
    assert nbytes == [161 * 16], "nothing is cut off between arrays that begin at multiples of 16 bytes"


@pytest.mark.parametrize(
    "keeps", ["nothing", "an array", "a view", "a pointer", "memory", "memory of its own", "a capsule", "a shape"]
)
def test_arrays_serve_again_when_a_program_has_let_go_of_all(gpus, keeps):
    """Also of what CuPy and other libraries make of them. Whoever changes a shape has changed it for no later call."""
    shapes = [(3,), (2, 5), (1 << 15,)] * 8
    made, kept = NewArrays(shapes, [F32] * 24), []
    arrays = made.take()
    arrays[4][...] = 7
    places = [its.data.ptr for its in arrays]
    if keeps == "a shape":
        arrays[4].shape = (10,)
    else:
        kept = {
            "an array": arrays[4:5], "a view": [arrays[4][1:]], "a pointer": [arrays[4].data],
            "memory": [arrays[4].data.mem], "memory of its own": [arrays[5].data.mem],
            "a capsule": [arrays[4].__dlpack__()],
        }.get(keeps, [])  # fmt: skip
    with gpus.cupy.cuda.Stream(non_blocking=True):
        assert {its.data.ptr for its in made.take()}.isdisjoint(places), "another stream's work is not waited for"
    arrays.clear()
    again = made.take()
    assert ([its.data.ptr for its in again] == places) == (keeps == "nothing")
    assert [its.shape for its in again] == shapes
    assert {its.data.ptr for its in made.take()}.isdisjoint(its.data.ptr for its in again)
    if keeps in ("an array", "a view"):
        assert (down(kept[0]) == 7).all()


def test_new_arrays_reused_memory_is_bounded_and_of_the_allocator(gpus):
    pool, own = gpus.cupy.get_default_memory_pool(), gpus.cupy.cuda.MemoryPool()
    gc.collect()
    before = pool.used_bytes()  # perhaps some of it kept by other lists, which go first
    most = gpus.cupy.cuda.runtime.memGetInfo()[1] // 128
    many = [NewArrays([(most // 160,)] * 16 + [(at + 1,)], [F32] * 17) for at in range(10)]
    for made in (*many, NewArrays([(most // 16,)] * 8, [F32] * 8)):
        made.take()
    assert most / 4 < pool.used_bytes() - before <= most
    with gpus.cupy.cuda.using_allocator(own.malloc):
        arrays = many[-1].take()
        assert own.used_bytes() >= most // 10
    del arrays, many, made
    assert pool.used_bytes() <= before


def test_new_arrays_release_memory_to_a_full_pool(gpus):
    """And is a part of what CuPy's pool may take."""
    pool = gpus.cupy.get_default_memory_pool()
    gc.collect()
    pool.free_all_blocks()
    before = pool.used_bytes()
    try:
        pool.set_limit(size=pool.total_bytes() + (32 << 20))  # arrays of other tests may hold a part of a block
        made = [NewArrays([(size,)] * 8, [F32] * 8) for size in (1000, 2000, 60_000)]
        for its in made:
            its.take()
        assert 96_000 <= pool.used_bytes() - before < 100_000, "the last one is longer than a 128th"
        pool.free_all_blocks()
        large = NewArrays([(32 << 18,)], [F32]).take()
        assert pool.used_bytes() - before <= large[0].nbytes
    finally:
        pool.set_limit(size=0)


def test_new_arrays_do_not_reuse_memory_held_by_a_thread(gpus, monkeypatch):
    """As a monitor does that goes through all objects, while they are counted: nothing tells these references later."""
    held = []
    really = _Kept.of.__func__
    monkeypatch.setattr(_Kept, "of", classmethod(lambda cls, place, its: held.extend(its) or really(cls, place, its)))
    made = NewArrays([(5,)] * 9, [F32] * 9)
    arrays = made.take()
    held.clear()
    assert {its.data.ptr for its in made.take()}.isdisjoint(its.data.ptr for its in arrays)


# Calls that come again.


def test_pack_distinguishes_arrays_at_a_reused_address(kernels):
    """Even where it has the same id and address."""
    memory, numbers = up(np.arange(100, dtype=F32)), np.arange(100, dtype=F32)
    for size in (10, 20, 30, 10) * 5:
        arrays = [memory[:size], memory[50 : 50 + size]]
        kernels.pack(arrays, buffer := empty(2 * size, F32))
        assert (down(buffer) == np.concatenate([numbers[:size], numbers[50 : 50 + size]])).all()
        del arrays
    for dtype in (F32, np.int32, F32):
        kernels.pack([memory[:8].view(dtype), memory[8:16].view(dtype)], buffer := empty(16, dtype))
        assert bits(down(buffer)) == bits(numbers[:16])


# Sums.


WITH_KERNELS = [DTYPES[code] for code in COMBINED]


def dtypes_of(op):
    return [dtype for dtype in ON_DEVICE if dtype.kind != "c" or op in ("sum", "prod")]


def check_joined(kernels, rows, op, divisor=1):
    """Join the rows of an array, and arrays that lie anywhere; compare with NumPy's numbers, and the host's."""
    reduction, dtype = Reduction(op, divisor), rows[0].dtype
    with np.errstate(all="ignore"):
        expected = in_rank_order(UFUNCS[op], rows, dtype, divisor)
        results = []
        if divisor == 1 or dtype in HALVES:
            reduction.combine(rows, on_host := np.empty(expected.size, dtype))
            results.append(on_host)
        for parts in (up(np.stack(rows)), [up(row) for row in rows]):
            kernels.combine(parts, reduction, out := empty(expected.size, dtype))
            results.append(down(out))
        if op in ("min", "max"):  # which of two zeros is less is nobody's promise
            expected, *results = (its + dtype.type(0) for its in (expected, *results))
        for result in results:
            if dtype.kind == "c" and op == "prod":  # processors differ in whether they fuse its products
                limit = 8 * len(rows) * np.finfo(dtype).eps * abs(expected)
                assert (abs(result - expected) <= limit).all()
            else:
                assert same(result, expected), (dtype, len(rows), expected.size, divisor)


@pytest.mark.parametrize("op", UFUNCS)
def test_pieces_are_joined_as_on_the_host(kernels, op):
    """In one launch if there is a kernel: half precision in float32, divided, and rounded once."""
    sizes, launches = [*product((1, 7, 64, 5003), (1, 2, 3, 8))], 0
    for dtype in dtypes_of(op):
        divisors = (1, 8, 3) if dtype in WITH_KERNELS else (1,)
        for at, (count, num_parts) in enumerate(sizes):  # each divisor with each count, and with each number of parts
            rows = [numbers_of(dtype, count, seed) for seed in range(num_parts)]
            check_joined(kernels, rows, op, divisors[at % len(divisors)])
        is_kernels = len(divisors) > 1 or (dtype.kind == "c" and op == "sum")
        launches += 2 * len(sizes) * is_kernels
        assert kernels.num_launches == launches, dtype
    # Odd ones each with each, as the first, second or third piece: one that is no number wins.
    for dtype in dtypes_of("sum" if op == "sum" else "max"):  # of complex products processors differ
        odd = odd_numbers_of(dtype)
        rows = [np.repeat(odd, odd.size), np.tile(odd, odd.size)]
        for pieces in (rows, [np.ones_like(rows[0]), *rows], [*rows, np.ones_like(rows[0])]):
            check_joined(kernels, pieces, op)


def test_more_pieces_than_a_launch_takes(kernels):
    """In any order: their addresses are no row of even steps. Numbers that become infinite are counted, too."""
    for dtype in (BF16, F64, F16):
        rows = [numbers_of(dtype, 5, seed) for seed in range(500)]
        for divisor in (1, 500):
            check_joined(kernels, rows, "sum", divisor)
        assert kernels.overflowed == 0
        large = [up(np.full(5, 1000, dtype))] * 500
        kernels.combine(large, Reduction(counts_overflow=True), out := empty(5, dtype))
        down(out)
        assert kernels.overflowed == (5 if dtype == F16 else 0)


def test_pieces_are_joined_in_the_order_of_a_fold(kernels):
    for dtype, total in product((F32, F64, np.dtype(np.int16)), (1, 2, 7, 8)):
        rows = unlike_numbers(total, 300, dtype)
        reduction = Reduction("sum", fold=Fold(total, [[replica] for replica in range(total)]))
        for parts in (up(np.stack(rows)), [up(row) for row in rows]):
            for out in (empty(300, dtype), parts[0]):
                kernels.combine(parts, reduction, out)
                assert bits(down(out)) == bits(in_tree_order(np.add, rows)), total


def test_pieces_of_any_alignment_distance_and_order(kernels):
    """Also into one of them; what lies behind the result is left alone."""
    for dtype in (np.dtype(np.int8), BF16, F32, F64):
        rows = [numbers_of(dtype, 1003, seed) for seed in range(3)]
        with np.errstate(all="ignore"):
            expected, swapped = (in_rank_order(np.add, its, dtype) for its in (rows, rows[::-1]))
        for width, at in product((1003, 1008, 1010), (0, 1, 4)):
            whole = up(np.zeros((3, width + 4), dtype))[:, at : at + 1003]
            for to, row in zip(whole, rows, strict=True):
                to[...] = up(row)
            around = up(np.full(1100, 9, dtype))
            out = around[at : at + 1003]
            kernels.combine(whole, Reduction(), out)
            assert same(down(out), expected), (dtype, width, at)
            out = around[at + 1 : at + 1004]  # where the parts are aligned, this is not
            kernels.combine([whole[2], whole[1], whole[0]], Reduction(), out)
            assert same(down(out), swapped)
            assert (down(around)[:at] == 9).all()
            assert (down(around)[at + 1004 :] == 9).all()
            kernels.combine([whole[0], whole[2], whole[1]], Reduction("max"), whole[1])
            assert same(down(whole[1]), np.maximum(np.maximum(rows[0], rows[2]), rows[1]))
