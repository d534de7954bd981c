"""A value and its destinations, as callers pair them: opened for sending, and put together again."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any, final

from mpidist import nest
from mpidist.cross_device_ops.destinations import ranks_of
from mpidist.options import ReduceOp
from mpidist.values import Mirrored, local

__all__ = ["Pair", "as_pair"]


@final
@dataclass(frozen=True)
class Pair:
    """One value of a reducing call.

    Attributes:
        value: The nest that the caller gave.
        ranks: Where its result goes.
        leaves: What has to travel: its leaves, but for mirrored ones, which every rank has already.
        structure: Its form, which says of each leaf whether it is mirrored.
    """

    value: Any
    ranks: tuple[int, ...]
    leaves: tuple[Any, ...]
    structure: tuple[Any, ...]

    @classmethod
    def open(cls, op: ReduceOp, value: Any, destinations: Any, size: int) -> Pair:
        """Open a value.

        Raises:
            ValueError: If the destinations mean nothing, or a mirrored value of several ranks is to be summed.
        """
        leaves, structure = nest.flatten(value)
        mirrored = tuple(isinstance(leaf, Mirrored) for leaf in leaves)
        if any(mirrored) and size > 1 and op in (ReduceOp.SUM, ReduceOp.PROD):
            raise ValueError(
                f"a Mirrored value is the same on all {size} ranks and is no rank's contribution, so its {op} has no "
                "meaning; take the MEAN, or pass the array that this rank contributes"
            )
        travelling = tuple(leaf for leaf, is_here in zip(leaves, mirrored, strict=True) if not is_here)
        return cls(value, ranks_of(destinations, size, value), travelling, (structure, mirrored))

    def close(self, results: Iterator[Any], rank: int) -> Any:
        """Build the result from those of the leaves; `None` where `rank` is no destination."""
        leaves, _ = nest.flatten(self.value)
        filled = [local(leaf) if isinstance(leaf, Mirrored) else next(results) for leaf in leaves]
        return nest.rebuild(self.value, filled) if rank in self.ranks else None


def as_pair(pair: Any) -> tuple[Any, Any]:
    """Take a value and its destinations apart.

    Raises:
        ValueError: If it is no tuple of two.
    """
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise ValueError(
            f"value_destination_pairs: each should be a tuple of size 2, (value, destinations); got a {_form(pair)}"
        )
    return pair


def _form(pair: object) -> str:
    """Name what is no pair by what is equal on all ranks that make the same mistake: its values may differ."""
    return f"{type(pair).__name__} of size {len(pair)}" if isinstance(pair, Sized) else type(pair).__name__
