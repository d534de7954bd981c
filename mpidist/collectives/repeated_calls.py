"""A cache of calls of one NumPy array, or in place of a list, so that a call like an earlier one skips checks and plan.

A small call takes as long as Python takes to check its arguments. What an earlier call found out holds for every array
of the same shape and dtype, and for the same arrays in a list, so they are staged at once. The ranks agree on a cached
call as on any other: a rank that makes the call for the first time, or another call, waits in the same barrier, and all
ranks raise the same errors.
"""

from __future__ import annotations

import operator
import weakref
from typing import Any, Final, NamedTuple, TypeAlias, final

import numpy as np

from mpidist.collectives.arguments import CheckedOuts, Operands
from mpidist.collectives.plans import FusedExecution, ReductionCall, RepeatedReduction
from mpidist.options import Compression, ReduceOp
from mpidist.transport import Levels, Progress, SyncGroup, name_digest

__all__ = ["CallKey", "RepeatedCalls", "key_of_repeated"]

_MAX_CALLS: Final = 1024  # a program that makes more different calls hardly repeats one
_MAX_ARRAYS: Final = 256  # symmetric ones
_OP_TYPES: Final = {str, ReduceOp}

# What equal calls have in common: the name of the call, the reduction as the user wrote it, the shape and the dtype of
# the array (of a list the length, and none), and whether an array of the caller's takes the result. It has no names, as
# it is made in each call.
CallKey: TypeAlias = tuple[str, Any, tuple[int, ...], np.dtype[Any] | None, bool]

Array = np.ndarray[Any, Any]


def key_of_repeated(name: str, reduce_op: Any, value: Any, options: Any, out: Any, error: Any) -> CallKey | None:
    """Return the key of a call that can be cached; `None` for another call.

    These calls reduce one NumPy array, with the options of the algorithm: into a new array, in place, or into another
    array of the same kind, with which it shares no memory. Or they reduce a list of NumPy arrays in place.

    Args:
        name: The name of the call.
        reduce_op: As all further arguments, that of `CrossDeviceOps.all_reduce`.
        value: The value to reduce.
        options: Options of this call alone.
        out: The nest of arrays that takes the result.
        error: What the caller found wrong on this rank.
    """
    if options is not None or error is not None or type(reduce_op) not in _OP_TYPES:
        return None
    if type(value) is list:
        return (name, reduce_op, (len(value),), None, True) if _is_in_place(value, out) else None
    if type(value) is not np.ndarray:
        return None
    flags = value.flags
    if not (flags.c_contiguous and flags.aligned):
        return None
    if out is not None and not (flags.writeable if out is value else _takes_result(out, value)):
        return None
    return name, reduce_op, value.shape, value.dtype, out is not None


def _is_in_place(values: list[Any], outs: Any) -> bool:
    """Whether outs are the values, and may all be NumPy arrays."""
    if outs is not values and not (
        type(outs) is list and len(outs) == len(values) and all(map(operator.is_, outs, values))
    ):
        return False
    return bool(values) and type(values[0]) is np.ndarray


def _takes_result(out: Any, value: Array) -> bool:
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
        reduction: Carries out the calls where arguments of all ranks are private.
    """

    call: ReductionCall
    execution: FusedExecution
    reduction: RepeatedReduction


@final
class _SymmetricCall(NamedTuple):
    """A call that reduces a symmetric array in place.

    Attributes:
        key: Its key.
        array: The array.
        reduction: Carries out such calls where the arguments of all ranks lie in the same places.
        variant: `CallRecord.variant` of such calls.
    """

    key: CallKey
    array: weakref.ref[Array]
    reduction: RepeatedReduction
    variant: int


@final
class _ListCall(NamedTuple):
    """A call that reduces a list of private arrays in place.

    Attributes:
        key: Its key.
        outs: The arrays, which were checked.
        cached: Calls alike.
    """

    key: CallKey
    outs: CheckedOuts
    cached: _CachedCall


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
        self._lists: dict[int, _ListCall] = {}  # by the id of the first array, which may be gone
        self._cached_for: Levels | None = None

    def run(self, key: CallKey, value: Any, out: Any) -> Any:
        """Reduce what an earlier call has reduced, if there was one. Collective, unless it returns `None`.

        Args:
            key: The key of the call.
            value: The array, or the list of arrays.
            out: The array that takes the result, `None` for a new one; or the same arrays.

        Returns:
            The result; `None` if there was no such call before, or if these arrays have to be checked.

        Raises:
            Exception: What `Reductions.run` raises.
        """
        if self._cached_for is not self._group.levels:  # a reset makes new levels
            return None
        if type(value) is list:
            known = self._lists.get(id(value[0]))
            if known is None or known.key != key or not known.outs.are_unchanged(value):
                return None
            cached = known.cached
            return self._make(cached, cached.reduction, cached.execution.variant_of_private(), value, out)
        alike = self._cached.get(key)
        if alike is None:
            return None
        reduction, variant = alike.reduction, alike.execution.variant_of(value, out)
        if variant is None:
            symmetric = self._symmetric.get(id(value))
            if symmetric is None or out is not value or symmetric.array() is not value or symmetric.key != key:
                return None
            reduction, variant = symmetric.reduction, symmetric.variant
        return self._make(alike, reduction, variant, value, out)

    def _make(self, cached: _CachedCall, reduction: RepeatedReduction, variant: int, value: Any, out: Any) -> Any:
        """Make a call. Collective."""
        group = self._group
        group.enter(cached.call.name)
        if group.calls:
            group.calls.finish()
        try:
            return self._reduce(cached, reduction, variant, value, out)
        except BaseException as error:
            self._clear()  # also drops the reference to the array
            group.break_off(error)
            raise

    def _reduce(self, cached: _CachedCall, reduction: RepeatedReduction, variant: int, value: Any, out: Any) -> Any:
        """Reduce: in compiled code, as far as there is such code and no rank waits long. Collective."""
        call, agreement = cached.call, self._group.agreement
        call.variant, progress, begun = variant, Progress.NOT_JOINED, None
        try:
            result, place = reduction.lend() if out is None else (out, 0)
        except Exception as problem:  # whatever it is, the other ranks must learn of it
            call, result, place = _call_with(call, problem), value, 0
        if reduction.run is not None and call.error is None:
            progress = agreement.join_at_once(call, reduction.run, value, result, place)
            if progress == Progress.DONE:
                reduction.count(out is None)
                return result
        if progress == Progress.NOT_JOINED:
            try:
                begun = reduction.begin(value, result, place)
            except Exception as problem:
                call = _call_with(call, problem)
            agreement.arrive(call)
        else:
            begun = reduction.resume(value, result, place, progress == Progress.AGREED)
        if progress == Progress.AGREED or agreement.conclude(call):
            reduction.finish(begun, result, out is None)
        else:
            result = _finish_unlike(cached, value, out)
        agreement.end()
        return result

    def add(self, key: CallKey, call: ReductionCall) -> None:
        """Add a call that was carried out to the cache. Local."""
        if self._cached_for is not self._group.levels:
            self._clear()
            self._cached_for = self._group.levels
        if key[3] is None:
            self._add_list(key, call)
            return
        if key not in self._cached:
            if len(self._cached) >= _MAX_CALLS:
                self._cached.clear()
            self._cached[key] = self._cached_call(key, call)
        if self._cached[key] is not None:
            self._add_symmetric(key, call)

    def _clear(self) -> None:
        self._cached.clear()
        self._symmetric.clear()
        self._lists.clear()

    def _add_list(self, key: CallKey, call: ReductionCall) -> None:
        """Add a call that has reduced a list in place. Local."""
        execution, arrays = call.plan.execution, call.operands.arrays
        if not (isinstance(execution, FusedExecution) and _is_plain(call) and key[2] == (len(arrays),)):
            return
        reduction = execution.of_list_in_place(call, self._group.agreement.flight)
        if reduction is None or call.checked_outs is None:
            return
        if len(self._lists) >= _MAX_ARRAYS:
            self._lists.clear()
        cached = _CachedCall(_call_like(call), execution, reduction)
        self._lists[id(arrays[0])] = _ListCall(key, call.checked_outs, cached)

    def _cached_call(self, key: CallKey, call: ReductionCall) -> _CachedCall | None:
        """Return what carries out calls like one; `None` if they have to be checked each time."""
        execution = call.plan.execution
        is_native = call.operands.arrays[0].dtype.isnative
        if not (isinstance(execution, FusedExecution) and _is_plain(call) and is_native):
            return None
        reduction = execution.of_one_array(self._group.agreement.flight)
        return None if reduction is None else _CachedCall(_call_like(call), execution, reduction)

    def _add_symmetric(self, key: CallKey, call: ReductionCall) -> None:
        """Add a call of an array that lies in shared memory. Local."""
        execution, array = call.plan.execution, call.operands.arrays[0]
        reduction = execution.of_symmetric_array(call) if isinstance(execution, FusedExecution) else None
        if reduction is None:
            return
        if len(self._symmetric) >= _MAX_ARRAYS:
            self._symmetric.clear()
        # The array's memory goes with the array, so this does not keep what refers to the memory.
        known, place = self._symmetric, id(array)
        reference = weakref.ref(array, lambda _: known.pop(place, None))
        known[place] = _SymmetricCall(key, reference, reduction, call.variant)


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


def _is_plain(call: ReductionCall) -> bool:
    return call.plan.local_sums is None and call.options.compression is Compression.NONE


def _finish_unlike(cached: _CachedCall, value: Any, out: Any) -> Any:
    """Reduce where another rank's array lies in shared memory: nobody reads what this rank has staged. Collective."""
    cached.reduction.forget()
    call = _call_like(cached.call)
    is_list = type(value) is list
    call.operands = Operands(value if is_list else [value])
    call.outs = None if out is None else out if is_list else [out]
    results = cached.execution.finish(call, has_same_places=False)
    return results if is_list else results[0]
