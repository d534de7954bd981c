"""In which dtype numbers are sent and reduced, and which dtype results have."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.errors import InvalidArgumentError
from mpidist.options import CommunicationOptions, Compression, ReduceOp
from mpidist.transport.group.levels import Levels
from mpidist.transport.half import bfloat16, is_of_numpy
from mpidist.transport.reduction import Reduction, accumulator_dtype, is_low_precision
from mpidist.transport.text import count_text
from mpidist.transport.tree import Fold

__all__ = ["Arithmetic", "OverflowReport", "result_dtypes", "wire_and_result_dtypes"]

logger = logging.getLogger("mpidist.cross_device_ops")

_NUMBERS: Final = np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
_FLOAT32: Final = np.dtype(np.float32)


def wire_and_result_dtypes(op: ReduceOp, dtype: np.dtype[Any]) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Return the dtype in which numbers are sent, and that of the result; refuse numbers that `op` cannot reduce.

    A mean of 8 and 16-bit integers is float32, of 32 and 64-bit integers float64. For a mean, integers are sent in a
    dtype that holds the sum without wrapping: a wider integer, and float64 for 64 bits. All other numbers keep their
    dtype, and sums of integers wrap as NumPy's do. Booleans have a minimum and a maximum.
    """
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        if dtype.kind == "b":
            return dtype, dtype
        if dtype.kind == "c":
            raise InvalidArgumentError(f"{op} needs numbers that have an order, got dtype {dtype.name}")
    if not ((dtype.char in _NUMBERS and is_of_numpy(dtype)) or is_low_precision(dtype)):
        other = "" if is_of_numpy(dtype) else ", which is sent, but not added"
        raise InvalidArgumentError(f"{op} needs numbers, got dtype {dtype.name}{other}: cast it, or leave it out")
    if op is not ReduceOp.MEAN or dtype.kind not in "iu":
        return dtype, dtype
    if dtype.itemsize <= 2:
        return np.dtype(np.int32), np.dtype(np.float32)
    return np.dtype(np.float64 if dtype.itemsize == 8 else f"{dtype.kind}8"), np.dtype(np.float64)


def result_dtypes(
    op: ReduceOp, dtypes: Sequence[np.dtype[Any]], names: Callable[[], Sequence[str]]
) -> list[np.dtype[Any]]:
    """Return the dtype of each result; refuse a value that cannot be reduced with `op`, by its name."""
    results: list[np.dtype[Any]] = []
    try:
        for dtype in dtypes:
            results.append(wire_and_result_dtypes(op, dtype)[1])
    except InvalidArgumentError as problem:
        name = names()[len(results)]
        raise problem if name == "array 0" else InvalidArgumentError(f"{name}: {problem}") from None
    return results


@final
class Arithmetic(NamedTuple):
    """Reduction and compression of the numbers of one call.

    Attributes:
        num_replicas: Divisor of a mean.
        in_rank_order: Whether contributions are added in rank order.
        half: The half precision that float32 numbers are sent in; `None` for no compression.
        rounds_everywhere: Whether every rank rounds its contribution; else only numbers that leave a node are rounded.
        fold: The order of the first additions, in a tree of replicas; `None` for no tree. With a tree, numbers of half
            precision are sent and added as float32.
        fold_across: The order of the additions across nodes that follow, if the first ones are within nodes.
    """

    op: ReduceOp
    num_replicas: int
    in_rank_order: bool = False
    half: np.dtype[Any] | None = None
    rounds_everywhere: bool = False
    fold: Fold | None = None
    fold_across: Fold | None = None

    @classmethod
    def of(cls, op: ReduceOp, options: CommunicationOptions, levels: Levels, by_node: bool) -> Arithmetic:
        """Make the arithmetic of a call.

        `by_node`: `ReduceAlgorithm._compresses_between_nodes`, for a call whose destinations are all ranks.
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
        """The half precision of float32 numbers that leave a node; `None` if every rank rounds, or none does."""
        return None if self.rounds_everywhere else self.half

    def dtypes(self, dtype: np.dtype[Any]) -> tuple[np.dtype[Any], np.dtype[Any]]:
        """Return `wire_and_result_dtypes`, where the first is half precision if every rank rounds its contribution."""
        wire, result = wire_and_result_dtypes(self.op, dtype)
        if self.fold is not None:
            return accumulator_dtype(wire), result
        return (self.half if self.half and self.rounds_everywhere and wire == _FLOAT32 else wire), result

    def reduction(self, wire: np.dtype[Any], is_compressed: bool = False) -> tuple[Reduction, int]:
        """Return the transport's reduction, and the divisor of the transport's result (1 for none).

        `is_compressed`: the numbers are float32 numbers that were rounded to `wire`.
        """
        name = "sum" if self.op is ReduceOp.MEAN else self.op.name.lower()
        divisor = self.num_replicas if self.op is ReduceOp.MEAN else 1
        if is_low_precision(wire):  # the float32 accumulator is divided before rounding, so that a mean cannot overflow
            return Reduction(name, divisor, self.in_rank_order, counts_overflow=is_compressed), 1
        return Reduction(name, 1, self.in_rank_order, fold=self.fold, fold_across=self.fold_across), divisor


@final
class OverflowReport:
    """Logs that compression made numbers infinite: at the first call that did, the second, the fourth, and so on."""

    def __init__(self) -> None:
        self._seen = self._calls = 0

    def log_new(self, call: str, rank: int, overflowed: int) -> None:
        """Log the numbers that have overflowed since the last call of this method, of `overflowed` in all."""
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
