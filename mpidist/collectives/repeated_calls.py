"""A cache of calls of one NumPy array, so that a call like an earlier one skips the checks and the plan.

A small call takes as long as Python takes to check its arguments. What an earlier call found out holds for every array
of the same shape and dtype, so the array is staged at once. The ranks agree on a cached call as on any other: a rank
that makes the call for the first time, or another call, waits in the same barrier, and all ranks raise the same errors.
"""

from __future__ import annotations

import weakref
from typing import Any, Final, NamedTuple, TypeAlias, final

import numpy as np

from mpidist.collectives.arguments import Operands
from mpidist.collectives.plans import FusedExecution, ReductionCall, RepeatedReduction
from mpidist.options import Compression, ReduceOp
from mpidist.transport import Levels, Progress, SyncGroup, name_digest

__all__ = ["CallKey", "RepeatedCalls", "key_of_one_array"]

_MAX_CALLS: Final = 1024  # a program that makes more different calls hardly repeats one
_MAX_ARRAYS: Final = 256  # symmetric ones
_OP_TYPES: Final = {str, ReduceOp}

# What equal calls have in common: the name of the call, the reduction as the user wrote it, the shape and the dtype of
# the array, and whether an array of the caller's takes the result. It has no names, as it is made in each call.
CallKey: TypeAlias = tuple[str, Any, tuple[int, ...], np.dtype[Any], bool]


def key_of_one_array(name: str, reduce_op: Any, value: Any, options: Any, out: Any, error: Any) -> CallKey | None:
    """Return the key of a call that can be cached; `None` for another call.

    These calls reduce one NumPy array, with the options of the algorithm: into a new array, in place, or into another
    array of the same kind, with which it shares no memory.

    Args:
        name: The name of the call.
        reduce_op: As all further arguments, that of `CrossDeviceOps.all_reduce`.
        value: The value to reduce.
        options: Options of this call alone.
        out: The nest of arrays that takes the result.
        error: What the caller found wrong on this rank.
    """
    if type(value) is not np.ndarray or options is not None or error is not None or type(reduce_op) not in _OP_TYPES:
        return None
    flags = value.flags
    if not (flags.c_contiguous and flags.aligned):
        return None
    if out is not None and not (flags.writeable if out is value else _takes_result(out, value)):
        return None
    return name, reduce_op, value.shape, value.dtype, out is not None


def _takes_result(out: Any, value: np.ndarray[Any, Any]) -> bool:
    """Whether another array takes the result of an array as that array would take it itself."""
    if type(out) is not np.ndarray or out.shape != value.shape or out.dtype != value.dtype:
        return False
    flags = out.flags
    return flags.writeable and flags.c_contiguous and flags.aligned and not np.may_share_memory(out, value)


@final
class _CachedCall(NamedTuple):
    """A call without its arrays, and what carries such calls out.

    Attributes:
        call: The call.
        execution: Carries out the calls of the plan, also where arguments of some ranks lie in shared memory.
        one_array: Carries out the calls where arguments of all ranks are private.
    """

    call: ReductionCall
    execution: FusedExecution
    one_array: RepeatedReduction


@final
class _SymmetricCall(NamedTuple):
    """A call that reduces a symmetric array in place.

    Attributes:
        key: Its key.
        array: The array.
        one_array: Carries out such calls where the arguments of all ranks lie in the same places.
        variant: `CallRecord.variant` of such calls.
    """

    key: CallKey
    array: weakref.ref[np.ndarray[Any, Any]]
    one_array: RepeatedReduction
    variant: int


@final
class RepeatedCalls:
    """The cached calls of one group of ranks.

    Args:
        group: The ranks.
    """

    def __init__(self, group: SyncGroup) -> None:
        self._group = group
        self._cached: dict[CallKey, _CachedCall | None] = {}  # `None`: such calls have to be checked each time
        self._symmetric: dict[int, _SymmetricCall] = {}  # by the id of the array, until the array is gone
        self._cached_for: Levels | None = None

    def run(
        self, key: CallKey, array: np.ndarray[Any, Any], out: np.ndarray[Any, Any] | None
    ) -> np.ndarray[Any, Any] | None:
        """Reduce an array as an earlier call did, if there was one. Collective, unless it returns `None`.

        Args:
            key: The key of the call.
            array: The array.
            out: The array that takes the result; `None` for a new one.

        Returns:
            The result; `None` if there was no such call before, or if this array has to be checked.

        Raises:
            Exception: What `Reductions.run` raises.
        """
        cached, group = self._cached.get(key), self._group
        if cached is None or self._cached_for is not group.levels:  # a reset makes new levels
            return None
        call, execution, one_array = cached
        variant = execution.variant_of(array, out)
        if variant is None:
            symmetric = self._symmetric.get(id(array))
            if symmetric is None or out is not array or symmetric.array() is not array or symmetric.key != key:
                return None
            one_array, variant = symmetric.one_array, symmetric.variant
        group.enter(call.name)
        if group.calls:
            group.calls.finish()
        try:
            return self._reduce(cached, one_array, variant, array, out)
        except BaseException as error:
            self._cached.clear()  # also drops the reference to the array
            self._symmetric.clear()
            group.break_off(error)
            raise

    def _reduce(
        self,
        cached: _CachedCall,
        one_array: RepeatedReduction,
        variant: int,
        array: np.ndarray[Any, Any],
        out: np.ndarray[Any, Any] | None,
    ) -> np.ndarray[Any, Any]:
        """Reduce an array: in compiled code, as far as there is such code and no rank waits long. Collective."""
        call, agreement = cached.call, self._group.agreement
        call.variant, progress, begun = variant, Progress.NOT_JOINED, None
        try:
            result, place = one_array.lend() if out is None else (out, 0)
        except Exception as problem:  # whatever it is, the other ranks must learn of it
            call, result, place = _call_with(call, problem), array, 0
        if one_array.run is not None and call.error is None:
            progress = agreement.join_at_once(call, one_array.run, array, result, place)
            if progress == Progress.DONE:
                one_array.count(out is None)
                return result
        if progress == Progress.NOT_JOINED:
            try:
                begun = one_array.begin(array, result, place)
            except Exception as problem:
                call = _call_with(call, problem)
            agreement.arrive(call)
        else:
            begun = one_array.resume(array, result, place, progress == Progress.AGREED)
        if progress == Progress.AGREED or agreement.conclude(call):
            one_array.finish(begun, result, out is None)
        else:
            result = _finish_unlike(cached, array, out)
        agreement.end()
        return result

    def add(self, key: CallKey, call: ReductionCall) -> None:
        """Add a call that was carried out to the cache. Local."""
        if self._cached_for is not self._group.levels:
            self._cached.clear()
            self._symmetric.clear()
            self._cached_for = self._group.levels
        if key not in self._cached:
            if len(self._cached) >= _MAX_CALLS:
                self._cached.clear()
            self._cached[key] = self._cached_call(key, call)
        if self._cached[key] is not None:
            self._add_symmetric(key, call)

    def _cached_call(self, key: CallKey, call: ReductionCall) -> _CachedCall | None:
        """Return what carries out calls like one; `None` if they have to be checked each time."""
        execution = call.plan.execution
        is_plain = call.plan.local_sums is None and call.options.compression is Compression.NONE
        if not (isinstance(execution, FusedExecution) and is_plain and call.operands.arrays[0].dtype.isnative):
            return None
        one_array = execution.of_one_array(self._group.agreement.flight)
        return None if one_array is None else _CachedCall(_call_like(call), execution, one_array)

    def _add_symmetric(self, key: CallKey, call: ReductionCall) -> None:
        """Add a call of an array that lies in shared memory. Local."""
        execution, array = call.plan.execution, call.operands.arrays[0]
        one_array = execution.of_symmetric_array(call) if isinstance(execution, FusedExecution) else None
        if one_array is None:
            return
        if len(self._symmetric) >= _MAX_ARRAYS:
            self._symmetric.clear()
        # The array's memory goes with the array, so this does not keep what refers to the memory.
        known, place = self._symmetric, id(array)
        reference = weakref.ref(array, lambda _: known.pop(place, None))
        known[place] = _SymmetricCall(key, reference, one_array, call.variant)


def _call_like(call: ReductionCall) -> ReductionCall:
    """Return the same call, without arrays."""
    like = ReductionCall(call.name, call.op, call.options, (), call.structure, call.mirrored)
    like.plan, like.details = call.plan, call.plan.details
    like.fingerprint = call.plan.fingerprint ^ name_digest(call.name)
    return like


def _call_with(call: ReductionCall, error: Exception) -> ReductionCall:
    """Return the same call, with what is wrong on this rank."""
    like = _call_like(call)
    like.error = error
    return like


def _finish_unlike(cached: _CachedCall, array: np.ndarray[Any, Any], out: np.ndarray[Any, Any] | None) -> Any:
    """Reduce where another rank's array lies in shared memory: nobody reads what this rank has staged. Collective."""
    cached.one_array.forget()
    call = _call_like(cached.call)
    call.operands = Operands([array])
    call.outs = None if out is None else [out]
    return cached.execution.finish(call, has_same_places=False)[0]
