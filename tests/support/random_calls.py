"""Numbers that every rank can compute for every other, and how near a reduction must come to them.

Making a value is cutting it out of an array that was filled once, so that a soak spends its time in the library.
"""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from mpidist import CommunicationOptions

__all__ = [
    "BFLOAT16", "FORMS", "OPS", "OPTIONS", "REDUCED", "Leaf", "Numbers", "draw_shape", "near", "result_dtype",
]  # fmt: skip

Array = np.ndarray[Any, Any]
DType = np.dtype[Any]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
REDUCED = [*map(np.dtype, ("f4", "f8", "f2", "i1", "u1", "i2", "i4", "u4", "i8", "u8")), BFLOAT16]
OPS = ["SUM", "MEAN", "MIN", "MAX", "PROD"]
MOST = 1 << 19  # elements of a value; 4 MiB of float64
_SPAN = 8191  # values begin at so many places of the array that they are cut out of
_SMALL = [0, 1, 1, 1, 2, 3, 5, 8, 17, 64, 100, 255, 1000, 1025, 3001]
_LARGE = [4097, 16_384, 65_537, 131_071, 300_001, MOST]
_MAGNITUDE = 4.0  # of the numbers of floats
_JOIN = {
    "SUM": np.add, "MEAN": np.add, "MIN": np.minimum, "MAX": np.maximum, "PROD": np.multiply,
}  # fmt: skip

Both = namedtuple("Both", "first rest")


OPTIONS = [
    None,
    CommunicationOptions(timeout_seconds=600),
    CommunicationOptions(bytes_per_pack=1),
    CommunicationOptions(bytes_per_pack=5000),
    CommunicationOptions(reproducible=True),
    CommunicationOptions(bytes_per_pack=300, timeout_seconds=600, reproducible=True),
    CommunicationOptions(implementation="RING"),
    CommunicationOptions(compression="bf16"),
    CommunicationOptions(compression="fp16", compress_everywhere=True),
]

# How a list of at least one leaf becomes a nest.
FORMS = [
    lambda leaves: leaves,
    tuple,
    lambda leaves: {f"w{index}": leaf for index, leaf in enumerate(reversed(leaves))},
    lambda leaves: Both(leaves[0], leaves[1:]),
    lambda leaves: {"b": [leaves[0], {}], "a": (tuple(leaves[1:]), [])},
]


@dataclass
class Leaf:
    """One array of a call: what it is, and what this rank gives."""

    index: int
    shape: tuple[int, ...]
    dtype: Any
    mine: Any


def draw_shape(draw, large=0.01):
    """Draw a shape: small, but for a share of `large`; a scalar, a vector, or a matrix."""
    count = draw.choice(_LARGE if draw.random() < large else _SMALL)
    form = draw.randrange(5)
    if form == 0 and count == 1:
        return ()
    return (count // 3, 3) if form == 1 and count > 3 else (count,)


def result_dtype(op, dtype):
    if op != "MEAN" or dtype.kind not in "iu":
        return dtype
    return np.dtype(np.float32 if dtype.itemsize <= 2 else np.float64)


class Numbers:
    """What each rank gives in each call. All may be read only: the library must not write its arguments."""

    def __init__(self, seed, size):  # the seed is the same on every rank; size: how many they are
        self.size = size
        fill = np.random.default_rng(seed)
        whole = fill.integers(1, 8, MOST + _SPAN)
        real = fill.uniform(-_MAGNITUDE, _MAGNITUDE, MOST + _SPAN)
        factors = fill.uniform(0.5, 2, MOST + _SPAN)
        self._cuts: dict[tuple[bool, DType], Array] = {}
        for dtype in [*REDUCED, np.dtype(bool)]:
            for is_product in (False, True):
                source = whole if dtype.kind in "iu" else whole % 2 if dtype.kind == "b" else real
                array = (factors if is_product and dtype.kind not in "iub" else source).astype(dtype)
                array.flags.writeable = False
                self._cuts[is_product, dtype] = array

    def of(self, rank, step, index, shape, dtype, op="SUM"):
        """Return what a rank gives as array number `index` of call number `step`."""
        start = (rank * 1009 + step * 2003 + index * 31) % _SPAN
        count = 1
        for length in shape:
            count *= length
        return self._cuts[op == "PROD", dtype][start : start + count].reshape(shape)

    def reduced(self, op, step, index, shape, dtype):
        """Return the reduction over ranks, in float64 or int64."""
        rows = [self.of(rank, step, index, shape, dtype, op) for rank in range(self.size)]
        return self.joined(op, rows, self.size)

    @staticmethod
    def joined(op, rows, count):
        """Reduce rows, in int64, float64 or complex128: whole numbers wrap once they are cast to their dtype."""
        wide = {"i": np.int64, "u": np.int64, "c": np.complex128}.get(rows[0].dtype.kind, np.float64)
        total = rows[0].astype(wide)
        for row in rows[1:]:
            total = _JOIN[op](total, row.astype(wide))
        return total / count if op == "MEAN" else np.asarray(total)


def precision_of(dtype, options):
    """Say in which dtype arrays of `dtype` may be rounded on their way."""
    if dtype != np.float32 or options is None:
        return dtype
    return {"NONE": dtype, "FP16": np.dtype(np.float16), "BF16": BFLOAT16}[options.compression.name]


def near(got, want, dtype, scale, precision=None):
    """Whether a result has this dtype and shape, and is the reference but for the rounding of `scale` contributions."""
    got = np.asarray(got)
    if got.dtype != dtype or got.shape != want.shape:
        return False
    if dtype.kind in "iub":
        return bool((got == want.astype(dtype)).all())
    if not got.size:
        return True
    slack = 8 * float(ml_dtypes.finfo(precision or dtype).eps) * max(_MAGNITUDE * scale, 2.0 ** min(scale, 60))
    return bool(np.abs(got.astype(np.float64) - want).max() <= slack)
