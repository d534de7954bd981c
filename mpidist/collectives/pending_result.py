"""The handle of a reduction that was started: `wait` for it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, final

from mpidist import nest
from mpidist.collectives.mirrored import Kept, put_together
from mpidist.transport import Pending, SyncGroup

__all__ = ["PendingResult"]


@final
class PendingResult:
    """A reduction under way, of `ReplicaContext.start_all_reduce`.

    Reductions get on, in the order of their start, whenever this rank starts or waits for one, asks whether one is
    done, or makes any other collective call, which finishes them first. With several nodes, a thread looks after them
    between those calls, where MPI allows it (`MPI.THREAD_MULTIPLE`, mpi4py's default).

    A reduction of a GPU's arrays is launched on its streams as a whole, behind those before it, when this rank looks
    after it and all ranks have started it. It comes after what the current stream held when it was started. Where data
    goes through the host (between nodes, but for `implementation="NCCL"`) it is done in `wait` instead.
    """

    def __init__(self, group: SyncGroup, call: Pending, value: Any, out: Any, kept: Kept) -> None:
        self._group, self._call = group, call
        self._form = None
        with suppress(Exception):  # then the call was refused, which `wait` raises
            self._form = nest.map_structure(lambda _: None, value)  # the caller may fill its list anew meanwhile
        self._out, self._kept = out, kept

    def is_done(self) -> bool:
        """Whether the result is there, and let reductions under way get on.

        Does not wait, but where ranks send messages and MPI allows no thread: there it may, for ranks that started
        the same reductions. Never for a GPU's arrays.
        """
        if not self._call.is_done:
            self._group.require_mpi("is_done()")
            self._group.calls.advance(may_wait=True)
        return self._call.is_done

    def wait(self) -> Any:
        """Wait for the result, and return it: what `all_reduce` would. Collective. May be called again.

        A GPU is done with the reduction then: arguments and results can be used in any stream.

        Raises:
            Exception: What `all_reduce` would have raised.
        """
        if not self._call.is_done:
            self._group.require_mpi("wait()")
            self._group.calls.finish(self._call)
        results = self._call.result
        return self._out if self._out is not None else put_together(self._form, results, self._kept)
