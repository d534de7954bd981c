"""A value and its destinations, as callers pair them: opened for sending, and put together again."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, final

from mpidist.collectives.destinations import ranks_of
from mpidist.collectives.mirrored import Kept, put_together, take_apart
from mpidist.options import ReduceOp
from mpidist.transport import SyncGroup

__all__ = ["Pair", "as_pair"]


@final
@dataclass(frozen=True)
class Pair:
    """One value of a reducing call.

    Attributes:
        value: The nest that the caller gave.
        ranks: Where its result goes.
        leaves: What has to travel: its leaves, but for mirrored ones, which every rank has already.
        structure: Its form.
        kept: The mirrored ones.
    """

    value: Any
    ranks: tuple[int, ...]
    leaves: list[Any]
    structure: tuple[Any, ...]
    kept: Kept

    @classmethod
    def open(cls, op: ReduceOp, value: Any, destinations: Any, group: SyncGroup) -> Pair:
        """Open a value.

        Raises:
            ValueError: If the destinations mean nothing, or a mirrored value of several ranks is to be summed.
        """
        return cls(value, ranks_of(destinations, group.topology.size, value), *take_apart(op, value, group))

    def close(self, results: Iterator[Any], rank: int) -> Any:
        """Build the result from those of the leaves; `None` where `rank` is no destination."""
        own = list(islice(results, len(self.leaves)))
        return put_together(self.value, own, self.kept) if rank in self.ranks else None


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
