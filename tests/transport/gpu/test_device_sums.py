"""Kernels that join pieces of device memory, bit by bit as the host does it."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from host_cuda.gpus import down, gpus, up
from support.contributions import HALVES, UFUNCS, bits, in_rank_order, in_tree_order, unlike_numbers
from transport.gpu.device_numbers import (
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    ON_DEVICE,
    empty,
    kernels,
    numbers_of,
    odd_numbers_of,
    same,
)

from mpidist.transport.gpu.compiled import COMBINED
from mpidist.transport.gpu.kernels import DeviceKernels
from mpidist.transport.reduction import Reduction
from mpidist.transport.tree import Fold

__all__ = ["gpus", "kernels"]  # fixtures

pytestmark = pytest.mark.ranks(1)

WITH_KERNELS = [DTYPES[code] for code in COMBINED]


def dtypes_of(op: str) -> list[Any]:
    return [dtype for dtype in ON_DEVICE if dtype.kind != "c" or op in ("sum", "prod")]


def check_joined(kernels: DeviceKernels, rows: list[Any], op: str, divisor: int = 1) -> None:
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
def test_pieces_are_joined_as_on_the_host(kernels: DeviceKernels, op: str) -> None:
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


@pytest.mark.parametrize("op", UFUNCS)
def test_odd_numbers_are_joined_as_on_the_host(kernels: DeviceKernels, op: str) -> None:
    """Each with each, as the first, second or third piece: one that is no number wins."""
    for dtype in dtypes_of("sum" if op == "sum" else "max"):  # of complex products processors differ
        odd = odd_numbers_of(dtype)
        rows = [np.repeat(odd, odd.size), np.tile(odd, odd.size)]
        for pieces in (rows, [np.ones_like(rows[0]), *rows], [*rows, np.ones_like(rows[0])]):
            check_joined(kernels, pieces, op)


def test_more_pieces_than_a_launch_takes(kernels: DeviceKernels) -> None:
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


def test_pieces_are_joined_in_the_order_of_a_fold(kernels: DeviceKernels) -> None:
    for dtype, total in product((F32, F64, np.dtype(np.int16)), (1, 2, 7, 8)):
        rows = unlike_numbers(total, 300, dtype)
        reduction = Reduction("sum", fold=Fold(total, [[replica] for replica in range(total)]))
        for parts in (up(np.stack(rows)), [up(row) for row in rows]):
            for out in (empty(300, dtype), parts[0]):
                kernels.combine(parts, reduction, out)
                assert bits(down(out)) == bits(in_tree_order(np.add, rows)), total


def test_pieces_of_any_alignment_distance_and_order(kernels: DeviceKernels) -> None:
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
