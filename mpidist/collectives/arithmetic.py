"""In which dtype numbers travel, are added and come back."""

from __future__ import annotations

import logging
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.errors import InvalidArgumentError
from mpidist.options import CommunicationOptions, Compression, ReduceOp
from mpidist.transport import Levels, Reduction, bfloat16, count_text, is_half

__all__ = ["Arithmetic", "OverflowReport", "wire_and_result_dtypes"]

logger = logging.getLogger("mpidist.cross_device_ops")

# By code, not by kind: float8_e5m2 of `ml_dtypes` says of itself that its kind is "f", and no transport adds it.
_NUMBERS: Final = np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
_FLOAT32: Final = np.dtype(np.float32)


def wire_and_result_dtypes(op: ReduceOp, dtype: np.dtype[Any]) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Say in which dtype numbers travel and in which the result comes.

    A mean of 8 and 16-bit integers is float32, of 32 and 64-bit integers float64. The sums of a mean travel in a dtype
    that holds them, so that they do not wrap: a wider integer, and float64 for 64 bits. Everything else keeps its
    dtype, and sums of integers wrap as NumPy's do. Booleans have a minimum and a maximum.

    Raises:
        InvalidArgumentError: If numbers of this dtype cannot be reduced with `op`.
    """
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        if dtype.kind == "b":
            return dtype, dtype
        if dtype.kind == "c":
            raise InvalidArgumentError(f"{op} needs numbers that have an order, got dtype {dtype.name}")
    if not (dtype.char in _NUMBERS or is_half(dtype)):
        raise InvalidArgumentError(f"{op} needs numbers, got dtype {dtype.name}")
    if op is not ReduceOp.MEAN or dtype.kind not in "iu":
        return dtype, dtype
    if dtype.itemsize <= 2:
        return np.dtype(np.int32), np.dtype(np.float32)
    return np.dtype(np.float64 if dtype.itemsize == 8 else f"{dtype.kind}8"), np.dtype(np.float64)


@final
class Arithmetic(NamedTuple):
    """How the numbers of one call are reduced, and to what they are rounded on their way.

    Attributes:
        op: The reduction.
        num_ranks: What a mean divides by.
        in_rank_order: Whether contributions are added in rank order.
        half: What float32 numbers are rounded to on their way; `None` leaves them as they are.
        rounds_everywhere: Whether every rank rounds what it contributes; else what leaves a node is rounded.
    """

    op: ReduceOp
    num_ranks: int
    in_rank_order: bool = False
    half: np.dtype[Any] | None = None
    rounds_everywhere: bool = False

    @classmethod
    def of(cls, op: ReduceOp, options: CommunicationOptions, levels: Levels, by_node: bool) -> Arithmetic:
        """Say what the options ask for.

        Args:
            op: The reduction.
            options: Those of the call.
            levels: Of the group.
            by_node: Whether the algorithm can round what leaves a node alone.
        """
        plain = cls(op, levels.world.size, options.reproducible)
        if options.compression is Compression.NONE or levels.world.size == 1:
            return plain
        everywhere = options.compress_everywhere or options.reproducible
        if levels.world.size == levels.within_node.size and not everywhere:
            return plain  # nothing leaves the node
        half = bfloat16() if options.compression is Compression.BF16 else np.dtype(np.float16)
        return plain._replace(half=half, rounds_everywhere=everywhere or not by_node)

    @property
    def half_between_nodes(self) -> np.dtype[Any] | None:
        """What float32 numbers are rounded to where they leave a node; `None` if every rank rounds, or nobody."""
        return None if self.rounds_everywhere else self.half

    def dtypes(self, dtype: np.dtype[Any]) -> tuple[np.dtype[Any], np.dtype[Any]]:
        """Say in which dtype a rank's numbers leave it, and in which the result comes: `wire_and_result_dtypes`."""
        wire, result = wire_and_result_dtypes(self.op, dtype)
        return (self.half if self.half and self.rounds_everywhere and wire == _FLOAT32 else wire), result

    def reduction(self, wire: np.dtype[Any], is_compressed: bool = False) -> tuple[Reduction, int]:
        """Say what the transport does, and what its results are then divided by.

        Args:
            wire: The dtype in which numbers travel.
            is_compressed: Whether they are float32 numbers that were rounded to `wire`.
        """
        name = "sum" if self.op is ReduceOp.MEAN else self.op.name.lower()
        divisor = self.num_ranks if self.op is ReduceOp.MEAN else 1
        if is_half(wire):  # its accumulator is divided before it is rounded, so that a mean cannot overflow
            return Reduction(name, divisor, self.in_rank_order, counts_overflow=is_compressed), 1
        return Reduction(name, 1, self.in_rank_order), divisor


@final
class OverflowReport:
    """Logs that numbers became infinite on the way: at the first call that saw some, the second, fourth, and so on."""

    def __init__(self) -> None:
        self._seen = self._calls = 0

    def look(self, call: str, rank: int, overflowed: int) -> None:
        """Log what is new, if there is something.

        Args:
            call: The name of the call.
            rank: This rank.
            overflowed: How many numbers have overflowed up to now.
        """
        new = overflowed - self._seen if overflowed >= self._seen else overflowed  # after a reset the count is new
        self._seen = overflowed
        if new <= 0:
            return
        self._calls += 1
        if self._calls & (self._calls - 1) == 0:
            logger.warning(
                "r%d | %s: %s too large for float16, which ends at 65504, and became infinite on the "
                "way; scale them down, or use compression='bf16'. Seen in %s up to now",
                rank,
                call,
                f"{new} number{' was' if new == 1 else 's were'}",
                count_text(self._calls, "call"),
            )
