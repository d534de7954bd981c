"""Half precision, widened and rounded by bits: what NumPy's `astype` makes, bit by bit."""

from itertools import product

import ml_dtypes
import numpy as np
import pytest
from support.contributions import HALVES, in_rank_order

from mpidist.transport.half import HalfAccumulator, dtype_named, is_of_numpy

pytestmark = pytest.mark.no_mpi

FLOAT16 = np.dtype(np.float16)
EVERY = np.arange(1 << 16, dtype=np.uint16).view(np.float16)  # numbers, infinities, and all that is none


def bits_of(array):
    """The bits of numbers; all that is no number is one."""
    return np.where(np.isnan(array), 0xFFFF, array.view(np.uint16))


def rounded(total, dtype):
    return total.astype(dtype)


@pytest.fixture(autouse=True)
def no_traps():
    """Overflows are meant."""
    with np.errstate(all="ignore"):
        yield


def combined(parts, dtype, ufunc=np.add, divisor=1):
    out = np.empty_like(parts[0])
    HalfAccumulator(dtype).combine(parts, out, ufunc, divisor)
    return out


def test_float16_bits_survive_widening_and_rounding():
    """Blocks with an infinity take another way than those without."""
    for numbers in (EVERY, EVERY[np.isfinite(EVERY)]):
        assert (bits_of(combined([numbers], FLOAT16)) == bits_of(numbers)).all()


def test_ties_and_their_neighbours_round_as_numpy_rounds():
    """What lies between two neighbours in float16: the middle, and one float32 to each side of it."""
    finite = EVERY[np.isfinite(EVERY) & (abs(EVERY) < 65504)]
    middle = (finite.astype(np.float32) + np.nextafter(finite, np.float16(np.inf)).astype(np.float32)) / 2
    totals = np.concatenate([middle, np.nextafter(middle, np.float32(-9e9)), np.nextafter(middle, np.float32(9e9))])
    out, accumulator = np.empty(totals.size, np.float16), HalfAccumulator(FLOAT16)
    for start in range(0, totals.size, 1 << 15):
        piece = slice(start, start + (1 << 15))
        accumulator._narrow(totals[piece].copy(), out[piece])
    assert (bits_of(out) == bits_of(totals.astype(np.float16))).all()


def test_parts_are_joined_in_order_and_rounded_once():
    """Two blocks and a rest; the result may be one of the parts."""
    for dtype, count in product(HALVES, (1, (1 << 15) - 1, (1 << 15) + 1, 100_000)):
        random = np.random.default_rng(count)
        parts = [
            (random.standard_normal(count) * 10.0 ** random.integers(-4, 4, count)).astype(dtype) for _ in range(3)
        ]
        for ufunc, divisor in ((np.add, 1), (np.add, 3), (np.multiply, 1), (np.minimum, 1), (np.maximum, 1)):
            want = in_rank_order(ufunc, parts, dtype, divisor)
            into = [part.copy() for part in parts]
            HalfAccumulator(dtype).combine(into, into[1], ufunc, divisor)
            assert (bits_of(into[1]) == bits_of(want)).all()
            assert (bits_of(into[0]) == bits_of(parts[0])).all()


def test_other_byte_order_is_left_to_numpy():
    swapped = EVERY[:0x7C00].astype(">f2")
    assert (combined([swapped, swapped], swapped.dtype) == rounded(EVERY[:0x7C00] * np.float32(2), FLOAT16)).all()


FLOAT8 = [np.dtype(getattr(ml_dtypes, name)) for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")]


def test_float8_is_rounded_once():
    """In float8 itself one step of 1/16 after the other would be lost: 1 has neighbours at 1 +- 1/8, or 1/4."""
    for dtype in FLOAT8:
        parts = [np.ones(5, dtype)] + [np.full(5, 2.0**-4, dtype)] * 4
        assert combined(parts, dtype).astype(np.float32).tolist() == [1.25] * 5
        assert combined(parts, dtype, divisor=5).astype(np.float32).tolist() == [0.25] * 5


def test_dtypes_of_other_packages_are_not_of_numpy():
    """Some have the characters of NumPy's: bfloat16 `E`, float8_e4m3fnuz `G`, the long complex number's."""
    made = [np.dtype(one) for one in vars(ml_dtypes).values() if isinstance(one, type) and issubclass(one, np.generic)]
    assert len(made) >= 8
    assert [dtype for dtype in made if is_of_numpy(dtype)] == []
    own = [np.dtype(code) for code in np.typecodes["All"]] + [np.dtype(">f4"), np.dtype("f4,i2")]
    assert [dtype for dtype in own if not is_of_numpy(dtype)] == []
    assert [dtype_named(dtype.name) for dtype in made] == made
