"""Kernels that pack, unpack and join arrays of device memory."""

from __future__ import annotations

import configparser
import contextlib
import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from host_cuda import are_emulated
from host_cuda.emulated import Emulated, problems
from host_cuda.gpus import Compiler, allocations, compiler, down, emulated, gpus, up
from support.contributions import COMPLEX, HALVES, INTEGERS, bits, in_rank_order, in_tree_order, unlike_numbers

from mpidist.collectives import wire_and_result_dtypes
from mpidist.options import ReduceOp
from mpidist.transport import cuda
from mpidist.transport.gpu.array_lists import ArrayLists
from mpidist.transport.gpu.compiled import KERNEL_OPTIONS, KERNELS, compile_kernel, kernel_source
from mpidist.transport.gpu.copy_table import CASTS, QUOTIENTS, CopyTables
from mpidist.transport.gpu.kernels import DeviceKernels
from mpidist.transport.gpu.new_arrays import NewArrays
from mpidist.transport.gpu.pack_layout import PackLayout
from mpidist.transport.native import native
from mpidist.transport.reduction import Reduction
from mpidist.transport.tree import Fold

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["compiler", "emulated", "gpus"]  # a fixture

pytestmark = pytest.mark.ranks(1)

BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
ON_DEVICE = [*INTEGERS, *HALVES, F32, F64, *COMPLEX[:2]]
DTYPES = {"bf": BF16} | {f"{its.kind}{its.itemsize}": its for its in ON_DEVICE if its != BF16}
OPS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
ROW = 8192  # bytes
BEFORE_VOLTA = """
from host_cuda.emulated import Emulated
Emulated().wish("the compute capability", 60)
from mpidist.transport import cuda
from mpidist.transport.gpu.compiled import compile_kernel, longest_table
try:
    compile_kernel(cuda.current(), "copy_long").kernel
except cuda.current().cupy.cuda.compiler.CompileException as error:
    print(longest_table(cuda.current()), type(error).__name__)
"""
SIZES = [1, 0, 2, 3, 15, 16, 17, 31, 33, 511, 513, ROW // 4 - 1, ROW // 4, ROW // 4 + 1, ROW // 2, ROW, ROW + 1, 20_000]


@pytest.fixture
def kernels(gpus: cuda.Cuda) -> DeviceKernels:
    return DeviceKernels(gpus)


def empty(size: int, dtype: Any) -> Any:
    return cuda.current().cupy.empty(size, dtype)


def numbers_of(dtype: np.dtype[Any], size: int, seed: int = 0) -> Any:
    """Any numbers of a dtype, [size]."""
    rng = np.random.default_rng([seed, size])
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, size, dtype, endpoint=True)
    numbers = rng.standard_normal(size) * 2.0 ** rng.integers(-12, 12, size)
    return (numbers + 1j * rng.standard_normal(size) if dtype.kind == "c" else numbers).astype(dtype)


def odd_numbers_of(dtype: np.dtype[Any]) -> Any:
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


def same(one: Any, other: Any) -> bool:
    """Whether the bits are the same; those of what is no number may be others."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype.kind in "iu":
        return bool((one == other).all())
    with np.errstate(invalid="ignore"):  # of those that signal
        nan, other_nan = np.isnan(one), np.isnan(other)
    return bool((nan == other_nan).all()) and bits(one[~nan]) == bits(other[~nan])


def every_float32(count: int = 1 << 16) -> Any:
    """Bit patterns at random, and those where roundings turn, [n]."""
    rng = np.random.default_rng(3)
    patterns = rng.integers(0, 1 << 32, count, np.uint32)
    halves = np.arange(1 << 16, dtype=np.uint16)
    edges = [halves.view(BF16).astype(F32), halves.view(F16).astype(F32)]
    near = [
        (edge.view(np.uint32) + np.uint32(step)).view(F32)
        for edge in edges
        for step in (0, 1, -1 % 2**32, 0x7FFF, 0x8000, 0x8001, 0xFFF, 0x1000, 0x1001)
    ]
    return np.concatenate([patterns.view(F32), *near])


# Packing.


@pytest.mark.parametrize("dtype", ON_DEVICE, ids=str)
def test_arrays_of_one_dtype_are_packed_and_unpacked_in_one_launch_each(kernels: DeviceKernels, dtype: Any) -> None:
    host = [numbers_of(dtype, size) for size in SIZES] + [numbers_of(dtype, 6).reshape(2, 3), numbers_of(dtype, 1)[0]]
    arrays = [up(np.asarray(its)) for its in host]
    buffer = empty(sum(its.size for its in arrays), dtype)
    kernels.pack(arrays, buffer)
    assert bits(down(buffer)) == b"".join(bits(its) for its in host)
    targets = [up(np.zeros(its.shape, dtype)) for its in arrays]
    kernels.unpack(buffer, targets)
    assert [bits(down(its)) for its in targets] == [bits(its) for its in host]
    assert kernels.num_launches == 2


@pytest.mark.parametrize("pair", CASTS)
def test_packs_have_other_dtypes(kernels: DeviceKernels, pair: str) -> None:
    read, written = (DTYPES[code] for code in pair.split())
    host = [numbers_of(read, size) for size in SIZES]
    expected = [its.astype(written) for its in host]
    sources = [up(its) for its in host]
    buffer = empty(sum(SIZES), written)
    kernels.pack(sources, buffer)
    assert same(down(buffer), np.concatenate(expected))
    flat, targets = up(np.concatenate(host)), [up(np.zeros(size, written)) for size in SIZES]
    kernels.unpack(flat, targets)
    assert all(same(down(its), wanted) for its, wanted in zip(targets, expected, strict=True))
    assert kernels.num_launches == 2


@pytest.mark.parametrize("divisor", [2, 3, 7, 1000])
@pytest.mark.parametrize("pair", QUOTIENTS)
def test_quotients_are_those_of_numpy(kernels: DeviceKernels, pair: str, divisor: int) -> None:
    read, written = (DTYPES[code] for code in pair.split())
    host = [odd_numbers_of(read), *(numbers_of(read, size) for size in SIZES)]
    wide = [its.astype(F32) if read in HALVES else its for its in host]
    with np.errstate(all="ignore"):
        expected = [(its / divisor).astype(written) for its in wide]
    targets = [up(np.zeros(its.size, written)) for its in host]
    kernels.unpack(up(np.concatenate(host)), targets, divisor)
    assert all(same(down(its), wanted) for its, wanted in zip(targets, expected, strict=True))
    assert kernels.num_launches == 1


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_of_means_are_those_of_numpy(kernels: DeviceKernels, dtype: Any) -> None:
    """They travel in another dtype and come back in a third, by CuPy's own operations."""
    wire, result = wire_and_result_dtypes(ReduceOp.MEAN, dtype)
    host = [odd_numbers_of(dtype), *(numbers_of(dtype, size) for size in SIZES)]
    buffer = empty(sum(its.size for its in host), wire)
    kernels.pack([up(its) for its in host], buffer)
    assert same(down(buffer), np.concatenate(host).astype(wire))
    for divisor in (1, 3, 1000):
        targets = [up(np.zeros(its.size, result)) for its in host]
        kernels.unpack(buffer, targets, divisor)
        for its, target in zip(host, targets, strict=True):
            assert same(down(target), (its.astype(wire) / divisor).astype(result)), divisor


def test_one_pack_may_hold_several_dtypes(kernels: DeviceKernels) -> None:
    """As those of means do: integers of up to 16 bits travel as int32."""
    host = [numbers_of(np.dtype(code), 5000 + at) for at, code in enumerate(["i1", "u1", "i2", "u2", "i4", "u1"])]
    buffer = empty(sum(its.size for its in host), np.int32)
    kernels.pack([up(its) for its in host], buffer)
    assert same(down(buffer), np.concatenate([its.astype(np.int32) for its in host]))
    assert kernels.num_launches == 1


@pytest.mark.parametrize("dtype", [np.dtype(np.uint8), BF16, F32, F64, COMPLEX[1]], ids=str)
def test_starts_of_any_alignment(kernels: DeviceKernels, dtype: Any) -> None:
    """Of the arrays, of the buffer, and of both; what lies around is left alone."""
    size = 3 * ROW // dtype.itemsize + 5
    for array_at in (0, 1, 3, 4, 8):
        for buffer_at in (0, 1, 2, 5, 8):
            host = numbers_of(dtype, size)
            whole, around = up(numbers_of(dtype, size + 20)), up(np.full(size + 20, 9, dtype))
            source, buffer = whole[array_at : array_at + size], around[buffer_at : buffer_at + size]
            source[...] = up(host)
            kernels.pack([source[:7], source[7:]], buffer)
            assert bits(down(buffer)) == bits(host)
            target = whole[array_at : array_at + size]
            target[...] = up(np.full(size, 9, dtype))
            kernels.unpack(buffer, [target])
            assert bits(down(target)) == bits(host)
            assert (down(around)[:buffer_at] == 9).all()
            assert (down(around)[buffer_at + size :] == 9).all()


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_casts_of_any_alignment(kernels: DeviceKernels, half: Any) -> None:
    size = 3 * ROW // 4 + 5
    host = numbers_of(F32, size)
    for array_at in (0, 1, 2, 3, 4):
        for buffer_at in (0, 1, 2, 3, 4, 7):
            whole, around = up(np.zeros(size + 20, F32)), up(np.full(size + 20, 9, half))
            source, buffer = whole[array_at : array_at + size], around[buffer_at : buffer_at + size]
            source[...] = up(host)
            kernels.pack([source], buffer)
            assert same(down(buffer), host.astype(half))
            assert (down(around)[:buffer_at] == 9).all()
            assert (down(around)[buffer_at + size :] == 9).all()
            kernels.unpack(buffer, [source], 3)
            assert same(down(source), host.astype(half).astype(F32) / np.float32(3))


@pytest.mark.parametrize("old", [None, "the driver's version", "NVRTC's version"])
def test_ten_thousand_small_arrays(emulated: Emulated, kernels: DeviceKernels, old: str | None) -> None:
    """Of which a launch takes 1,363, and only 168 where the driver or NVRTC is older than CUDA 12.1."""
    if old is not None:
        emulated.wish(old, 12_000)
    host = numbers_of(F32, 10_000 * 17)
    whole = up(host)
    arrays = [whole[at : at + 17] for at in range(0, whole.size, 17)]
    buffer, back = empty(whole.size, F32), up(np.zeros(whole.size, F32))
    kernels.pack(arrays[::-1], buffer)
    assert bits(down(buffer)) == bits(host.reshape(-1, 17)[::-1])
    kernels.unpack(buffer, [back[at : at + 17] for at in range(0, whole.size, 17)][::-1])
    assert bits(down(back)) == bits(host)
    assert kernels.num_launches == 2 * -(-10_000 // (168 if old else 1363))


@pytest.mark.gpu
def test_gpus_before_volta_take_short_tables() -> None:
    """In a process of its own, as CuPy asks a GPU once. NVRTC refuses to compile long ones for it."""
    if not are_emulated():
        pytest.skip("needs a GPU that is emulated")
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", BEFORE_VOLTA],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("168 CompileException\n", 0), done.stderr


@pytest.mark.parametrize("pair", ["u1 u1", "f2 f2", "f4 f4", "c16 c16", "f4 bf", "bf f4"])
def test_arrays_begin_at_multiples_of_16_bytes_and_zeros_lie_between(kernels: DeviceKernels, pair: str) -> None:
    read, wire = (np.dtype(np.uint8) if code == "u1" else DTYPES[code] for code in pair.split())
    host = [numbers_of(read, size) for size in SIZES if size]
    layout = PackLayout([its.size for its in host], wire, is_padded=True)
    around = up(np.full(layout.size + 8, 9, wire))
    buffer = around[4 : 4 + layout.size] if wire.itemsize == 4 else around[: layout.size]
    kernels.pack([up(its) for its in host], buffer, layout=layout)
    expected = np.zeros(layout.size, wire)
    for its, offset in zip(host, layout.offsets.tolist(), strict=True):
        assert offset % 16 == 0
        expected[offset // wire.itemsize :][: its.size] = its.astype(wire)
    assert same(down(buffer), expected)
    assert (down(around)[layout.size + 4 * (wire.itemsize == 4) :] == 9).all()
    targets = [up(np.zeros(its.size, read)) for its in host]
    kernels.unpack(buffer, targets, layout=layout)
    assert all(same(down(its), was.astype(wire).astype(read)) for its, was in zip(targets, host, strict=True))
    assert layout.size <= sum(its.size for its in host) + len(host) * (16 // wire.itemsize - 1)


def test_arrays_that_are_not_contiguous_are_packed_and_not_unpacked_to(kernels: DeviceKernels) -> None:
    host = numbers_of(F32, 12).reshape(3, 4)
    arrays = [up(host).swapaxes(0, 1), up(host)[:, 1:3], up(host)]
    buffer = empty(12 + 6 + 12, F32)
    for _ in range(2):
        kernels.pack(arrays, buffer)
        assert bits(down(buffer)) == bits(host.T) + bits(host[:, 1:3]) + bits(host)
    with pytest.raises(ValueError, match=r"cannot write to float32\[4, 3\], which is not contiguous"):
        kernels.unpack(buffer, arrays)
    copies = [up(np.zeros(its.shape, F32)) for its in arrays]
    kernels.copy(arrays, copies)
    assert [bits(down(its)) for its in copies] == [bits(host.T), bits(host[:, 1:3]), bits(host)]


def test_nothing_is_launched_for_nothing(kernels: DeviceKernels) -> None:
    nothing = empty(0, F32)
    kernels.pack([], nothing)
    kernels.pack([nothing], nothing)
    kernels.unpack(nothing, [nothing])
    kernels.copy([nothing], [nothing], 2)
    kernels.combine([nothing], Reduction(), nothing)
    assert kernels.num_launches == 0


def test_copies_of_several_dtypes_and_divisions_in_place(kernels: DeviceKernels) -> None:
    host = [numbers_of(dtype, 5000) for dtype in ON_DEVICE]
    targets = [up(np.zeros(5000, dtype)) for dtype in ON_DEVICE]
    kernels.copy([up(its) for its in host], targets)
    assert [bits(down(its)) for its in targets] == [bits(its) for its in host]
    real = [its for its in host if its.dtype in (F32, F64) or its.dtype.kind == "c"]
    arrays = [up(its) for its in real]
    kernels.copy(arrays, arrays, 3)
    assert all(same(down(its), wanted / 3) for its, wanted in zip(arrays, real, strict=True))
    assert kernels.num_launches == 2


def test_what_does_not_fit_is_refused(kernels: DeviceKernels) -> None:
    ints, floats = up(np.arange(4)), up(np.ones(4, F32))
    with pytest.raises(TypeError, match="cannot divide int64: its quotients are no int64"):
        kernels.copy([ints], [ints], 2)
    with pytest.raises(ValueError, match=r"pack needs a contiguous buffer of 8 elements, got float32\[4\]"):
        kernels.pack([floats, floats], floats)
    with pytest.raises(ValueError, match=r"unpack needs a contiguous buffer of 4 elements, got float32\[2\]"):
        kernels.unpack(floats[::2], [floats])
    with pytest.raises(ValueError, match=r"cannot copy float32\[4\] to int64\[4\]"):
        kernels.copy([floats], [ints])
    with pytest.raises(TypeError, match="cannot combine int64 into float32 by sum"):
        kernels.combine([ints], Reduction(), floats)
    with pytest.raises(TypeError, match="cannot divide int64"):
        kernels.combine([ints], Reduction(divisor=2), ints)
    with pytest.raises(ValueError, match="needed the same sizes"):
        kernels.combine([floats, floats[:2]], Reduction(), floats)
    pairs = up(np.ones(4, COMPLEX[0]))
    with pytest.raises(TypeError, match="cannot combine complex64 into complex64 by min"):
        kernels.combine([pairs], Reduction("min"), pairs)
    assert kernels.num_launches == 0


# Half precision.


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_every_half_becomes_its_float32(kernels: DeviceKernels, half: Any) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16).view(half)
    target = empty(patterns.size, F32)
    kernels.unpack(up(patterns), [target])
    assert same(down(target), patterns.astype(F32))
    back = empty(patterns.size, half)
    kernels.pack([target], back)
    assert same(down(back), patterns)


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_float32_is_rounded_to_nearest_even(kernels: DeviceKernels, half: Any) -> None:
    """As NumPy and ml_dtypes do it, with subnormal numbers, infinities, and what is no number."""
    patterns = every_float32()
    buffer = empty(patterns.size, half)
    kernels.pack([up(patterns)], buffer, counts_overflow=True)
    with np.errstate(all="ignore"):
        expected = patterns.astype(half)
    assert same(down(buffer), expected)
    became = np.isfinite(patterns) & np.isinf(expected)
    assert became.any()
    assert kernels.overflowed == became.sum() * (half == F16)


def test_finite_numbers_that_became_infinities_are_counted(kernels: DeviceKernels) -> None:
    """Where they count: in float16."""
    least = 65520.0
    below = float(np.nextafter(np.float32(least), np.float32(0)))
    host = np.array([1, least, -least, below, -below, np.inf, -np.inf, np.nan, 0], F32)
    buffer = empty(host.size, F16)
    for counts_overflow in (True, False, True, True):
        kernels.pack([up(host)], buffer, counts_overflow)
    down(buffer)
    assert kernels.overflowed == 6
    for counts_overflow in (True, False):
        reduction = Reduction(counts_overflow=counts_overflow)
        kernels.combine([up(host / 2), up(host / 2)], reduction, buffer)
    down(buffer)
    assert kernels.overflowed == 8


# Joining.


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ON_DEVICE, ids=str)
def test_pieces_are_joined_as_on_the_host(kernels: DeviceKernels, dtype: Any, op: str) -> None:
    if dtype.kind == "c" and op in ("min", "max"):
        return
    for count in (1, 7, 64, 5003):
        for num_parts in (1, 2, 3, 8):
            rows = [numbers_of(dtype, count, seed) for seed in range(num_parts)]
            expected = np.empty(count, dtype)
            with np.errstate(all="ignore"):
                Reduction(op).combine(rows, expected)
            for parts in (up(np.stack(rows)), [up(row) for row in rows]):
                out = empty(count, dtype)
                kernels.combine(parts, Reduction(op), out)
                if dtype.kind == "c" and op == "prod":  # processors differ in whether they fuse its products
                    assert (abs(down(out) - expected) <= 8 * np.finfo(dtype).eps * abs(expected)).all()
                else:
                    assert same(down(out), expected), (count, num_parts)
    by_kernels = dtype.kind == "f" or dtype in HALVES or (dtype.kind == "c" and op == "sum")
    assert kernels.num_launches == 4 * 4 * 2 * by_kernels


@pytest.mark.parametrize("dtype", [F32, F64, np.dtype(np.int16)], ids=str)
def test_pieces_are_joined_in_the_order_of_a_fold(kernels: DeviceKernels, dtype: Any) -> None:
    for total in (1, 2, 7, 8):
        rows = unlike_numbers(total, 300, dtype)
        reduction = Reduction("sum", fold=Fold(total, [[replica] for replica in range(total)]))
        for parts in (up(np.stack(rows)), [up(row) for row in rows]):
            kernels.combine(parts, reduction, out := empty(300, dtype))
            assert bits(down(out)) == bits(in_tree_order(np.add, rows)), total
            kernels.combine(parts, reduction, parts[0])
            assert bits(down(parts[0])) == bits(in_tree_order(np.add, rows)), total


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ON_DEVICE, ids=str)
def test_odd_numbers_are_joined_as_on_the_host(kernels: DeviceKernels, dtype: Any, op: str) -> None:
    """Each with each. Which of two zeros is less is nobody's promise."""
    if dtype.kind == "c" and op != "sum":
        return
    odd = odd_numbers_of(dtype)
    rows = [np.repeat(odd, odd.size), np.tile(odd, odd.size)]
    expected, out = np.empty(odd.size**2, dtype), empty(odd.size**2, dtype)
    with np.errstate(all="ignore"):
        Reduction(op).combine(rows, expected)
        kernels.combine(up(np.stack(rows)), Reduction(op), out)
        result = down(out)
        if op in ("min", "max"):
            expected, result = expected + dtype.type(0), result + dtype.type(0)  # of -0, 0
    assert same(result, expected)


def test_more_pieces_than_a_launch_takes(kernels: DeviceKernels) -> None:
    """In any order: their addresses are no row of even steps."""
    rows = [numbers_of(F16, 5, seed) for seed in range(500)]
    parts = [up(row) for row in rows]
    out, expected = empty(5, F16), in_rank_order(np.add, rows, F16, 500)
    kernels.combine(parts, Reduction("sum", 500), out)
    assert same(down(out), expected)


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_halves_are_joined_in_float32_and_rounded_once(kernels: DeviceKernels, half: Any, op: str) -> None:
    rows = [numbers_of(half, 3001, seed) for seed in range(8)]
    for divisor in (1, 8, 3):
        with np.errstate(all="ignore"):
            expected = in_rank_order(OPS[op], rows, half, divisor)
            wide = in_rank_order(OPS[op], [row.astype(F32) for row in rows], F32, divisor)
        for dtype, wanted in ((half, expected), (F32, wide)):
            out = empty(3001, dtype)
            kernels.combine(up(np.stack(rows)), Reduction(op, divisor), out)
            assert same(down(out), wanted), (dtype, divisor)
        out = empty(3001, half)
        kernels.combine([up(row.astype(F32)) for row in rows], Reduction(op, divisor), out)
        assert same(down(out), expected), divisor


@pytest.mark.parametrize("op", OPS)
def test_one_nan_wins(kernels: DeviceKernels, op: str) -> None:
    for dtype in (*HALVES, F32, F64):
        rows = np.ones((3, 9), dtype)
        rows[[0, 1, 2], [1, 3, 5]] = np.nan
        out = empty(9, dtype)
        kernels.combine(up(rows), Reduction(op), out)
        assert np.isnan(down(out)).tolist() == [at in (1, 3, 5) for at in range(9)], dtype


def test_pieces_of_any_alignment_distance_and_order(kernels: DeviceKernels) -> None:
    for dtype in (np.dtype(np.int8), BF16, F32, F64):
        rows = [numbers_of(dtype, 1003, seed) for seed in range(3)]
        expected = np.empty(1003, dtype)
        with np.errstate(all="ignore"):
            Reduction().combine(rows, expected)
            swapped = np.empty(1003, dtype)
            Reduction().combine(rows[::-1], swapped)
        for width in (1003, 1008, 1010):
            for at in (0, 1, 4):
                whole = up(np.zeros((3, width + 4), dtype))[:, at : at + 1003]
                for to, row in zip(whole, rows, strict=True):
                    to[...] = up(row)
                around = up(np.full(1100, 9, dtype))
                out = around[at : at + 1003]
                kernels.combine(whole, Reduction(), out)
                assert same(down(out), expected), (dtype, width, at)
                assert (down(around)[at + 1003 :] == 9).all()
                kernels.combine([whole[2], whole[1], whole[0]], Reduction(), out)
                assert same(down(out), swapped)
                kernels.combine([whole[0], whole[2], whole[1]], Reduction("max"), whole[1])
                assert same(down(whole[1]), np.maximum(np.maximum(rows[0], rows[2]), rows[1]))


# 64-bit arithmetic, without the memory that needs it.


def test_offsets_go_far_beyond_32_bits(gpus: cuda.Cuda, emulated: Emulated) -> None:
    """Of a huge array and a small one: the end of the huge one is really there, and pretends to begin far below."""
    held, below = 3 * ROW // 4 + 5, 4 * 2**33
    numbers, result = up(np.arange(held + 3, dtype=F32)), up(np.zeros(held + 3, F32))
    sources = [numbers.data.ptr - below, numbers[held:].data.ptr]
    targets = [result.data.ptr - below, result[held:].data.ptr]
    tables = CopyTables([2**33 + held, 3], [2], [4])
    (table,) = tables.fill(sources, targets)
    rows_there = 4 + 1
    assert table.num_blocks == -(-(2**33 * 4 // ROW + rows_there) // 8)
    gpus.cupy.cuda.Device().synchronize()
    emulated.wish("the first block of kernels", 2**33 * 4 // ROW * 32 // 256)
    compile_kernel(gpus, "copy")((table.num_blocks,), (256,), table.arguments)
    gpus.cupy.cuda.Device().synchronize()
    emulated.be_normal()
    assert (down(result) == down(numbers)).all()


# New arrays.


def test_new_arrays_lie_apart_and_small_ones_share_allocations(gpus: cuda.Cuda) -> None:
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


def test_small_arrays_share_an_allocation_of_at_most_a_mebibyte(gpus: cuda.Cuda) -> None:
    with allocations() as made:
        arrays = NewArrays([(100, 100)] * 60 + [(65, 256), (9,), (1, 100)], [F32] * 63).take()
    assert len(arrays) == 63
    assert sorted(made) == [36, 65 * 1024, 8 * 40_000 + 400, 26 * 40_000, 26 * 40_000]
    with allocations() as made:
        NewArrays([(4,)] * 161, [F32] * 161).take()
    assert made == [161 * 16], "nothing is cut off between arrays that begin at multiples of 16 bytes"


def test_numbers_that_overflow_are_counted_without_pinned_memory(emulated: Emulated) -> None:
    kernels, buffer, array = DeviceKernels(cuda.current()), empty(3, F16), up(np.array([1e6, 1, -1e6], F32))
    emulated.wish("cudaHostAlloc", 2)  # CUDA's "out of memory"
    for _ in range(2):
        kernels.pack([array], buffer, counts_overflow=True)
    assert kernels.overflowed == 4


# Calls that come again.


def test_a_call_that_comes_again_allocates_nothing(emulated: Emulated) -> None:
    """Nor if its arrays are others of the same sizes, as gradients are in each step."""
    kernels, turns = DeviceKernels(cuda.current()), 20
    host = [numbers_of(F32, size) for size in SIZES]
    arrays = [[up(its) for its in host] for _ in range(1 + turns)]
    buffers = [empty(sum(SIZES), BF16) for _ in range(1 + turns)]
    parts = [[up(numbers_of(F32, 40, at)) for at in (2, 0, 1)] for _ in range(1 + turns)]
    outs = [empty(40, F32) for _ in range(1 + turns)]

    def step(turn: int) -> None:
        kernels.pack(arrays[turn], buffers[turn])
        kernels.unpack(buffers[turn], arrays[turn], 2)
        kernels.combine(parts[turn], Reduction(), outs[turn])

    step(0)
    before = emulated.held()
    emulated.forget()
    with allocations() as made:
        for turn in range(1, 1 + turns):
            step(turn)
    assert made == []
    assert emulated.held() == before
    assert len(emulated.calls("a kernel")) == 3 * turns
    assert emulated.calls("copy up", "copy down", "copy", "cudaHostAlloc") == []


def test_a_kernel_is_compiled_when_it_is_needed(gpus: cuda.Cuda, compiler: Compiler) -> None:
    """All of them take NVRTC seconds. The mean of float32 takes the two that are compiled soonest."""
    kernels = DeviceKernels(cuda.current())
    arrays, buffer = [up(np.ones(5, np.float32)) for _ in range(3)], empty(15, F32)
    assert compiler.compiled == set()
    kernels.pack(arrays, buffer)
    assert compiler.compiled == {"copy"}
    kernels.unpack(buffer, arrays, 2)
    assert compiler.compiled == {"copy", "divide_f4"}


def test_another_array_in_the_place_of_one_that_is_gone_is_told_from_it(gpus: cuda.Cuda) -> None:
    """Even where it has the same id and address."""
    kernels = DeviceKernels(cuda.current())
    memory = up(np.arange(100, dtype=F32))
    for size in (10, 20, 30, 10) * 5:
        arrays = [memory[:size], memory[50 : 50 + size]]
        buffer = empty(2 * size, F32)
        kernels.pack(arrays, buffer)
        assert (down(buffer) == np.concatenate([np.arange(size), 50 + np.arange(size)])).all()
        del arrays
    whole = [memory[:8], memory[8:16]]
    parts = [memory[:8].view(np.int32), memory[8:16].view(np.int32)]
    for arrays in (whole, parts, whole):
        buffer = empty(16, arrays[0].dtype)
        kernels.pack(arrays, buffer)
        assert bits(down(buffer)) == bits(down(memory)[:16])


def test_arrays_that_come_again_are_known_and_not_kept(kernels: DeviceKernels) -> None:
    """Until one of them is another one. Without the compiled part of the library they are asked each time."""
    memory, buffer, lists = up(numbers_of(F32, 300)), empty(30, F32), ArrayLists()
    arrays = [memory[at : at + 10] for at in (0, 50, 100)]
    for _ in range(3):
        kernels.pack(arrays, buffer)
        answered = lists.of(arrays)
    assert (answered is lists.of(list(arrays))) == (native is not None)
    assert bits(down(buffer)) == b"".join(bits(down(its)) for its in arrays)
    memory += 1
    kernels.pack(arrays, buffer)
    assert bits(down(buffer)) == b"".join(bits(down(its)) for its in arrays)
    arrays[1] = memory[200:210]
    for _ in range(3):
        kernels.pack(arrays, buffer)
        assert bits(down(buffer)) == b"".join(bits(down(its)) for its in arrays)
    gone = weakref.ref(arrays[2])
    del arrays
    assert gone() is None


# Graphs.


@pytest.mark.gpu
def test_a_graph_of_pack_nccl_and_unpack(comm: Intracomm) -> None:
    """On a GPU: captured, and run three times on new numbers."""
    found = cuda.current()
    if found.support.reason:
        pytest.skip(f"needs a GPU: {found.support.reason}")
    cupy, nccl = found.cupy, found.nccl
    kernels = DeviceKernels(found)
    arrays, buffer = [up(numbers_of(F32, size)) for size in SIZES], empty(sum(SIZES), F32)
    communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    stream = cupy.cuda.Stream(non_blocking=True)

    def step() -> None:
        kernels.pack(arrays, buffer)
        at = buffer.data.ptr
        communicator.allReduce(at, at, buffer.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)
        kernels.unpack(buffer, arrays, 2)

    are_right = []
    cupy.cuda.Device().synchronize()
    with stream:
        step()
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for _ in range(3):
            before = [down(its) for its in arrays]
            graph.launch(stream)
            are_right += [same(down(its), was / np.float32(2)) for its, was in zip(arrays, before, strict=True)]
    stream.synchronize()
    del graph  # `destroy` waits until no graph holds the communicator: no failed comparison may keep it
    communicator.destroy()
    assert problems() == ""
    assert all(are_right)


# The compilers.


CUPY_OPTIONS = ["-ftz=true", "--device-as-default-execution-space"]  # which CuPy 14 puts after ours


def require_exact(ptx: str) -> None:
    """No product and sum in one, and no subnormal number made a zero."""
    for word in ("fma.", "mad.f", ".ftz"):
        assert word not in ptx, word


@pytest.mark.long
@pytest.mark.no_mpi
@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_nvcc_compiles_the_kernels(arch: str, tmp_path: Path) -> None:
    """To PTX, which has no fused sums, and moves 16 bytes at a time."""
    if shutil.which("nvcc") is None:
        pytest.skip("needs a GPU's toolkit: nvcc")
    source, made = tmp_path / "kernels.cu", tmp_path / "kernels.ptx"
    source.write_text(kernel_source())
    command = [
        "nvcc",
        *KERNEL_OPTIONS,
        CUPY_OPTIONS[0],
        f"-arch={arch}",
        "-Werror",
        "all-warnings",
        "-ptx",
        str(source),
        "-o",
        str(made),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ptx = made.read_text()
    require_exact(ptx)
    entries = {entry.split("(")[0].strip(): entry for entry in ptx.split(".visible .entry")[1:]}
    assert set(entries) == {f"mpidist_{kernel}" for kernel in KERNELS}
    assert ".local" not in ptx, "tables are read where they come, and copied by no thread"
    for name in ("mpidist_copy", "mpidist_cast", "mpidist_combine_bf_bf", "mpidist_combine_f4_f4"):
        assert re.search(r"ld(\.global)?\.v4\.[uf]32", entries[name]), name
    require_reads_ahead(ptx)


def require_reads_ahead(ptx: str) -> None:
    """Four reads of 16 bytes are under way before the first part is joined: one does not fill the memory's roof."""
    for kernel in ("combine_f4_f4", "combine_bf_bf"):
        entry = ptx.split(f".visible .entry mpidist_{kernel}(")[1].split(".visible .entry")[0]
        words = re.findall(r"\b(ld(?:\.global)?\.v4|ld(?:\.global)?\.[fu]\d+|add\.rn|st(?:\.global)?\.)", entry)
        kinds = "".join("R" if ".v4" in word else "+" if word == "add.rn" else "" for word in words)
        assert "RRRR" in kinds, kernel


def find_nvrtc() -> Any:
    """The compiler that CuPy uses, if it is here: with CUDA's toolkit, or from its wheel."""
    places = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"]
    wheels = importlib.util.find_spec("nvidia")
    for folder in (wheels.submodule_search_locations or []) if wheels else []:
        places += map(str, sorted(Path(folder).rglob("libnvrtc.so.*")))
    for place in places:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(place)
    return None


@pytest.mark.no_mpi
@pytest.mark.parametrize("arch", ["compute_75", "sm_90"])
def test_nvrtc_takes_the_kernels_and_the_options(arch: str) -> None:
    """As CuPy gives them to it, without one folder of headers."""
    nvrtc = find_nvrtc()
    if nvrtc is None:
        pytest.skip("needs a GPU's toolkit, or its wheel: NVRTC")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    source = ctypes.c_char_p(kernel_source().encode())
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None) == 0
    options = [its.encode() for its in (*KERNEL_OPTIONS, *CUPY_OPTIONS, f"-arch={arch}")]
    status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()
    assert b"warning" not in log.value
    if arch.startswith("compute"):
        assert nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)) == 0
        ptx = ctypes.create_string_buffer(size.value)
        assert nvrtc.nvrtcGetPTX(program, ptx) == 0
        require_exact(ptx.value.decode())
        require_reads_ahead(ptx.value.decode())
    else:
        assert nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
        assert size.value > 10_000


@pytest.mark.no_mpi
def test_the_kernels_are_in_the_package() -> None:
    """What setup.cfg leaves out is missed by those who install alone."""
    settings = configparser.ConfigParser()
    settings.read(Path(__file__).parents[3] / "setup.cfg")
    assert settings["options.package_data"]["mpidist.transport.gpu"] == "*.cu"
    assert kernel_source().startswith("// Moves and sums")
