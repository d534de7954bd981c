"""What each rank contributes in the tests of reductions, and what must come of it.

The numbers are small and whole, and powers of two where they are multiplied: every sum and product is exact in every
dtype and in any order of adding, so results are compared with `==`.
"""

from typing import Any

import ml_dtypes
import numpy as np

from mpidist.transport.communicator import shard_bounds
from mpidist.transport.tree import ReplicaTree

__all__ = [
    "COMPLEX", "DTYPES", "HALVES", "INTEGERS", "REALS", "UFUNCS", "bits", "cancelling", "contribution", "flat_trees",
    "have_equal_bits", "in_rank_order", "in_tree_order", "list_of_all", "list_of_rank", "reduction_of", "replica_tree",
    "rows_of_this_rank", "unlike_numbers",
]  # fmt: skip

Array = np.ndarray[Any, Any]

INTEGERS = [np.dtype(code) for code in "bBhHiIlLqQ"]
HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
REALS = [np.dtype(code) for code in "fdg"]
COMPLEX = [np.dtype(code) for code in "FDG"]
DTYPES = INTEGERS + HALVES + REALS + COMPLEX

UFUNCS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
_JOIN = {
    "sum": lambda rows: rows.sum(axis=0, dtype=rows.dtype),
    "prod": lambda rows: rows.prod(axis=0, dtype=rows.dtype),
    "min": lambda rows: rows.min(axis=0),
    "max": lambda rows: rows.max(axis=0),
}


def contribution(op, rank, count, dtype):
    """Return what a rank adds (1 to 7), multiplies (1 or 2), or compares (0 to 12), [count]."""
    where = np.arange(count)
    if op == "prod":
        numbers = 1 + (rank + where) % 2
        return (numbers * (1j ** (where % 4)) if dtype.kind == "c" else numbers).astype(dtype)
    if op == "sum":
        numbers = 1 + (3 * rank + where) % 7
        return (numbers + 1j * ((rank + where) % 3) if dtype.kind == "c" else numbers).astype(dtype)
    return ((5 * rank + 3 * where) % 13).astype(dtype)


def reduction_of(op, size, count, dtype):
    """Return what the contributions of all ranks make, [count]."""
    wide = np.dtype(np.float32) if dtype in HALVES else dtype
    rows = np.stack([contribution(op, rank, count, dtype).astype(wide) for rank in range(size)])
    return _JOIN[op](rows).astype(dtype)


def in_rank_order(ufunc, rows, dtype, divisor=1):
    """Join rows in order, half precision in float32, and round once."""
    wide = np.dtype(np.float32) if dtype in HALVES else dtype
    first, *others = (row.astype(wide) for row in rows)
    for other in others:
        first = ufunc(first, other)
    return (first / divisor if divisor != 1 else first).astype(dtype)


# Of lists


SCALES = {HALVES[0]: 2.0**-14}  # so that no sum of float16 overflows


def list_of_rank(rank, lengths, dtype, seed=0):
    """Return what a rank contributes: sums of it depend on their order, and wrap around."""
    made = np.random.default_rng([rank, seed]).integers(-(1 << 40), 1 << 40, sum(lengths))
    whole = made.astype(dtype) if dtype.kind in "iu" else (made / 7919.0 * SCALES.get(dtype, 1)).astype(dtype)
    return [part.copy() for part in np.split(whole, np.cumsum(lengths)[:-1])]


def list_of_all(size, lengths, dtype, divisor=1, ufunc=np.add, seed=0):
    every = zip(*(list_of_rank(rank, lengths, dtype, seed) for rank in range(size)), strict=True)
    return [in_rank_order(ufunc, parts, dtype, divisor) for parts in every]


def have_equal_bits(some, others):
    return all(bits(one) == bits(other) for one, other in zip(some, others, strict=True))


def bits(array):
    """Return an array's numbers as they are stored, without the bytes that pad a long double."""
    flat = np.ascontiguousarray(array)
    if flat.dtype.type not in (np.longdouble, np.clongdouble):
        return flat.tobytes()
    used = 10 if np.finfo(np.longdouble).nmant == 63 else 16  # x86: 80 bits in 16 bytes
    return np.frombuffer(flat.tobytes(), np.uint8).reshape(-1, 16)[:, :used].tobytes()


# Of replicas, several on a rank


def in_tree_order(ufunc, replicas):
    """Join the contributions of replicas in the order of `transport.tree`, by its definition."""
    if len(replicas) == 1:
        return replicas[0]
    middle = 1
    while 2 * middle < len(replicas):
        middle *= 2
    with np.errstate(all="ignore"):
        left, right = in_tree_order(ufunc, replicas[:middle]), in_tree_order(ufunc, replicas[middle:])
        return ufunc(left, right)


def unlike_numbers(total, count, dtype):
    """Return what each of `total` replicas contributes, [count], so that every order of adding rounds otherwise."""
    random = np.random.default_rng(1000 * total + count)
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return list(random.integers(limits.min, limits.max, (total, count), dtype, endpoint=True))
    numbers = random.standard_normal((total, count)) * 10.0 ** random.integers(-8, 9, (total, count))
    return list(numbers.astype(dtype))


def replica_tree(total, topology):
    return ReplicaTree(tuple(shard_bounds(total, topology.size)), topology)


def flat_trees(topology):
    """Yield trees of several replicas on a rank, and of one, that are flat; there may be none."""
    for total in dict.fromkeys([8, topology.size, 2 * topology.size, 4 * topology.size]):
        tree = replica_tree(total, topology)
        if tree.is_flat:
            yield tree


def rows_of_this_rank(tree, ufunc, numbers):
    """Add the numbers of this rank's replicas to its rows; `numbers` are those of all replicas."""
    start, stop = tree.bounds[tree.topology.rank :][:2]
    rows = [np.empty_like(numbers[0]) for _ in range(tree.local.num_rows)]
    tree.local.combine(ufunc, numbers[start:stop], rows)
    return rows


def cancelling(count):
    """What 8 replicas contribute whose sum is 4 in the order of the tree, and 5 in that of replicas."""
    return [np.full(count, number) for number in (1e16, 1.0, -1e16, 1.0, 1.0, 1.0, 1.0, 1.0)]
