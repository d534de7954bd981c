"""Calls of one NumPy array that were made before: what is known of such a call is not found out again.

A small call takes as long as Python takes to look at what was passed. What an earlier call found holds for every array
of the same shape and dtype, which is staged at once. The ranks agree on the call as ever: a rank that makes a call for
the first time, or passes something else, meets the others in the same barrier, and all raise the same errors.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.collectives.arguments import Operands
from mpidist.collectives.plans import FusedExecution, OneArray, ReductionCall
from mpidist.options import Compression, ReduceOp
from mpidist.transport import Levels, SyncGroup, name_digest

__all__ = ["CallKey", "RepeatedCalls", "key_of_one_array"]

_MAX_CALLS: Final = 1024  # a program with more hardly repeats one
_OPS: Final = {str, ReduceOp}


@final
class CallKey(NamedTuple):
    """What calls alike have in common.

    Attributes:
        name: The name of the call.
        reduce_op: The reduction, as the user writes it.
        shape: The shape of the array.
        dtype: The dtype of the array.
        is_in_place: Whether the array takes the result.
    """

    name: str
    reduce_op: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_in_place: bool


def key_of_one_array(name: str, reduce_op: Any, value: Any, options: Any, out: Any, error: Any) -> CallKey | None:
    """Return the key of a call of one NumPy array into a new one or in place, without options; `None` for others.

    Args:
        name: The name of the call.
        reduce_op: See `CrossDeviceOps.all_reduce`, as for the other arguments.
        value: What is reduced.
        options: Options of this call alone.
        out: What takes the result.
        error: What the caller found wrong.
    """
    if type(value) is not np.ndarray or options is not None or error is not None or type(reduce_op) not in _OPS:
        return None
    is_in_place, flags = out is value, value.flags
    if not (flags.c_contiguous and flags.aligned) or (is_in_place and not flags.writeable):
        return None
    return CallKey(name, reduce_op, value.shape, value.dtype, is_in_place) if is_in_place or out is None else None


@final
class _Known(NamedTuple):
    call: ReductionCall  # without arrays
    execution: FusedExecution
    one_array: OneArray


@final
class RepeatedCalls:
    """The calls of one array that a group of ranks has made.

    Args:
        group: The ranks.
    """

    def __init__(self, group: SyncGroup) -> None:
        self._group = group
        self._known: dict[CallKey, _Known | None] = {}
        self._known_for: Levels | None = None

    def run(self, key: CallKey, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
        """Reduce an array. Collective, and raises what `Reductions.run` does, unless it returns `None`.

        Returns:
            The result; `None` if there was no such call before, or this array has to be looked at.
        """
        known, group = self._known.get(key), self._group
        if known is None or self._known_for is not group.levels:  # another transport since a reset
            return None
        call, execution, one_array = known
        variant = execution.variant_of(array, key.is_in_place)
        if variant is None:
            return None
        group.enter(call.name)
        if group.calls:
            group.calls.finish()
        out, begun = array if key.is_in_place else None, None
        try:
            begun, call.variant = one_array.begin(array, out), variant
        except Exception as problem:  # whatever it is, the other ranks must learn of it
            call = _call_like(call)
            call.error = problem
        agreement = group.agreement
        try:
            agreement.arrive(call)
            has_same_places = agreement.conclude(call)
            result = one_array.finish(begun, out) if has_same_places else _finish_other(known, array, out)
            agreement.end()
            return result
        except BaseException as error:
            self._known.clear()  # also lets the array go
            group.break_off(error)
            raise

    def learn(self, key: CallKey, call: ReductionCall) -> None:
        """Remember a call that has been made. Local."""
        if self._known_for is not self._group.levels:
            self._known.clear()
            self._known_for = self._group.levels
        if key in self._known:
            return
        if len(self._known) >= _MAX_CALLS:
            self._known.clear()
        execution = call.plan.execution
        is_plain = call.plan.local_sums is None and call.options.compression is Compression.NONE
        if isinstance(execution, FusedExecution) and is_plain and key.dtype.isnative:
            one_array = execution.of_one_array()
            if one_array is not None:
                self._known[key] = _Known(_call_like(call), execution, one_array)
                return
        self._known[key] = None


def _call_like(call: ReductionCall) -> ReductionCall:
    """Return the same call, without arrays."""
    like = ReductionCall(call.name, call.op, call.options, (), call.structure, call.mirrored)
    like.plan, like.details = call.plan, call.plan.details
    like.fingerprint = call.plan.fingerprint ^ name_digest(call.name)
    return like


def _finish_other(known: _Known, array: np.ndarray[Any, Any], out: np.ndarray[Any, Any] | None) -> Any:
    """Reduce where another rank's array lies in shared memory, so that what was staged is of no use. Collective."""
    known.one_array.forget()
    call = _call_like(known.call)
    call.operands = Operands([array])
    call.outs = None if out is None else [out]
    return known.execution.finish(call, has_same_places=False)[0]
