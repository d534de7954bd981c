"""A cache of reducing calls of CuPy's arrays, by the arrays' addresses: an equal call skips the checks and the plan."""

from __future__ import annotations

from typing import Any, Final, final

from mpidist import nest
from mpidist.collectives.plans.call import ReductionCall
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.transport import cuda
from mpidist.transport.arrays import described_on_gpu
from mpidist.transport.group.levels import Levels
from mpidist.transport.group.sync_group import SyncGroup

__all__ = ["DeviceCalls"]

_MOST_ARRAYS: Final = 1 << 16  # of all calls: each takes some 300 bytes
_ARRAYS_OF_CALL: Final = 8  # whose bytes a call itself takes


@final
class DeviceCalls:
    """Cache of calls of one group of ranks. Keeps no array: another one of its dtype and shape may take an address."""

    def __init__(self, group: SyncGroup) -> None:
        self._group = group
        self._cached: dict[Any, ReductionCall] = {}
        self._num_arrays = 0
        self._cached_for: Levels | None = None

    def find(
        self, name: str, op: ReduceOp, value: Any, options: CommunicationOptions | None, out: Any
    ) -> tuple[Any, ReductionCall | None]:
        """Return a call's key, and the call if an equal one was made; a key `None` for what is not cached. Local."""
        if not cuda.current().is_loaded:
            return None, None
        leaves, structure = _flatten(value)
        outs, form = (None, structure) if out is None else (leaves, structure) if out is value else _flatten(out)
        places = described_on_gpu(leaves)
        into = described_on_gpu(outs) if outs is not None and outs is not leaves else outs is not None
        if not places or into is None or form != structure:
            return None, None
        gpu = leaves[0].data.device_id  # memory that one GPU has freed may be another one's
        key = name, op, structure, () if options is None else options.overrides, gpu, places, into
        cached = self._cached.get(key) if self._cached_for is self._group.levels else None
        return key, None if cached is None else _with_arrays(cached, list(leaves), None if outs is None else list(outs))

    def add(self, call: ReductionCall) -> None:
        """Add a call that was described and prepared, if it can be repeated. Local."""
        if not (call.operands.are_on_gpu and call.plan.execution.can_repeat(call)):
            return
        size = _ARRAYS_OF_CALL + len(call.values)
        is_full = self._num_arrays + size > _MOST_ARRAYS
        if is_full or self._cached_for is not self._group.levels:  # a reset makes new levels
            self._cached.clear()
            self._num_arrays, self._cached_for = 0, self._group.levels
        self._num_arrays += size
        cached = self._cached[call.device_key] = _with_arrays(call, [], None)
        cached.programs = {}


def _flatten(value: Any) -> tuple[list[Any], nest.Structure]:
    """List the leaves of a nest. A list that begins with an array of CuPy is not checked for nests in it."""
    if type(value) is list and value and type(value[0]) is cuda.cupy().ndarray:
        return value, (list.__name__, len(value))
    return nest.flatten(value)


def _with_arrays(call: ReductionCall, values: list[Any], outs: list[Any] | None) -> ReductionCall:
    """Return the same call of other arrays."""
    like = call.like()
    like.values, like.outs, like.is_started = values, outs, False
    like.operands, like.checked_outs, like.programs = (
        call.operands.with_arrays(values),
        call.checked_outs,
        call.programs,
    )
    return like
