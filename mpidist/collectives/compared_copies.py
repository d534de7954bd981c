"""Copies of bytes in host memory between ranks. Each call is compared on all ranks before data moves, and watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar, final

from mpidist.collectives.arguments.out_arrays import copy_overwritten
from mpidist.transport.agreement.agreement import Call
from mpidist.transport.agreement.fingerprint import name_digest
from mpidist.transport.arrays import memory_bounds
from mpidist.transport.communicator import Array
from mpidist.transport.group.messages import Messages
from mpidist.transport.group.sync_group import SyncGroup

__all__ = ["GIVEN", "ComparedCopies"]

GIVEN: Final = "given"  # of splits

_T = TypeVar("_T")


@final
class ComparedCopies:
    """Copies between the ranks of a group. Making it is collective.

    `messages`: messages from one rank to another, which are no calls of all ranks.
    """

    def __init__(self, group: SyncGroup) -> None:
        self._group, self.messages = group, Messages(group)

    def call(
        self, name: str, timeout_seconds: float, error: Exception | None = None, variant: int = 0, **fields: Any
    ) -> AbstractContextManager[bool]:
        """Compare a call and its fields on all ranks, as `SyncGroup.call`. Collective."""

        def describe() -> dict[str, str]:
            return {key: str(value) for key, value in fields.items()}

        fingerprint = self._group.agreement.fingerprint(name, tuple(fields.items()), describe)
        call = Call(name, fingerprint, describe, timeout_seconds=timeout_seconds, error=error, variant=variant)
        return self._group.call(call)

    def tell(self, name: str, timeout_seconds: float, run: Callable[[], _T]) -> _T:
        """Run a call; all ranks raise an error found on this rank before the comparison, as that call's error."""
        group = self._group
        group.enter(name)
        before = group.agreement.sequence
        try:
            return run()
        except Exception as error:  # of any kind: the other ranks must learn of it
            if group.agreement.sequence == before and not group.agreement.has_raised(error):
                with self.call(name, timeout_seconds, error):
                    pass
            raise

    def broadcast(self, call: str, flat: Array, root: int, timeout_seconds: float, **fields: Any) -> None:
        """Copy one rank's bytes [n] to all ranks. Collective."""
        with self.call(call, timeout_seconds, src=root, **fields):
            self._group.levels.world.broadcast(flat, root)

    def all_gather(
        self, call: str, own: Array, flat: Array, bounds: Sequence[int], timeout_seconds: float, **fields: Any
    ) -> None:
        """Copy the bytes of all ranks to all ranks, in rank order: to `flat`, between `bounds`. Collective.

        `fields` must be equal on all ranks.
        """
        with self.call(call, timeout_seconds, **fields):
            flat[slice(*bounds[self._group.topology.rank :][:2])] = own
            self._group.levels.world.all_gather(flat, bounds)

    def exchange(
        self,
        call: str,
        outgoing: list[Array],
        incoming: list[Array],
        timeout_seconds: float,
        splits: str,
        **fields: Any,
    ) -> None:
        """Send bytes [n] to each rank, and receive some from each. Collective; raises on every rank if calls differ.

        `incoming` may overlap with `outgoing`. Equal `splits` and `fields` mean that all sizes fit; where splits are
        `GIVEN`, or differ, ranks compare the sizes, too.
        """
        rank = self._group.topology.rank
        with self.call(call, timeout_seconds, variant=name_digest(splits) | 1, **fields) as are_alike:
            if splits == GIVEN or not are_alike:
                self.messages.compare_sizes(call, outgoing, incoming)
            if memory_bounds(outgoing[rank]) == memory_bounds(incoming[rank]):  # in place: nothing is copied
                outgoing[rank] = incoming[rank]
            self.messages.all_to_all(copy_overwritten(outgoing, incoming), incoming)
