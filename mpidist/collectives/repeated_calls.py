"""A cache of calls of one NumPy array, or of a nest, so that a call like an earlier one skips the checks and the plan.

A small call takes as long as Python takes to check its arguments. What an earlier call found out holds for every array
of the same shape and dtype, and for nests of such, so they are staged at once. The ranks agree on a cached call as on
any other: a rank that makes the call for the first time, or another call, waits in the same barrier, and all ranks
raise the same errors.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, final

import numpy as np

from mpidist import nest
from mpidist.collectives.arguments.checked_outs import CheckedOuts
from mpidist.collectives.arguments.operands import Operands
from mpidist.collectives.arguments.out_arrays import write_outs
from mpidist.collectives.plans.call import ReductionCall
from mpidist.collectives.plans.fused_execution import FusedExecution
from mpidist.collectives.plans.repeated_reductions import RepeatedReduction
from mpidist.options import CommunicationOptions, Compression, ReduceOp
from mpidist.transport.agreement.agreement import Progress
from mpidist.transport.agreement.fingerprint import name_digest
from mpidist.transport.array_libraries.libraries import known_library_of, library_of
from mpidist.transport.group.levels import Levels
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.native.loading import native

__all__ = ["CallKey", "RepeatedCalls", "key_of_repeated"]

_MAX_CALLS: Final = 1024  # a program that makes more different calls hardly repeats one
_MAX_ARRAYS: Final = 256  # symmetric ones, and lists
_MAX_ALIKE: Final = 8  # lists whose first arrays are alike
_OP_TYPES: Final = {str, ReduceOp}
_NESTS: Final = {list, tuple, dict}
_NUMBERS: Final = {float, np.float16, np.float32, np.float64}  # such as a loss

_OTHERS: Final = "other arrays"

# What equal calls have in common: the name of the call, the reduction as the user wrote it, the shape and the dtype of
# the array (of a nest the structure, and none), what options of the call override, and whether arrays of the caller's
# take the result: of a nest its own, or `_OTHERS`. It has no names, as it is made in each call.
CallKey: TypeAlias = tuple[str, Any, tuple[Any, ...], np.dtype[Any] | None, tuple[Any, ...], bool | str]

Array = np.ndarray[Any, Any]


def key_of_repeated(
    name: str, reduce_op: Any, value: Any, options: Any, out: Any, error: Any
) -> tuple[CallKey, Any, Any, list[Any] | None] | None:
    """Return the arguments of `RepeatedCalls.run` for a call that can be cached; `None` for another call.

    These calls reduce one NumPy array: into a new array, in place, or into another array of the same kind, with which
    it shares no memory. A float is such an array without axes. Or they reduce a nest of NumPy arrays, into new ones, in
    place, or into per-node arrays; or a nest of tensors, whose arrays are known, into new ones or in place.

    Args:
        name: The name of the call.
        reduce_op: As all further arguments, that of `CrossDeviceOps.all_reduce`.
        value: The value to reduce.
        options: Options of this call alone.
        out: The nest of arrays that takes the result.
        error: What the caller found wrong on this rank.
    """
    if error is not None or type(reduce_op) not in _OP_TYPES:
        return None
    overrides: tuple[Any, ...] = ()
    if options is not None:
        if type(options) is not CommunicationOptions:
            return None
        overrides = options.overrides
    likes = None
    if type(value) is not np.ndarray and type(value) in _NUMBERS and out is None:
        value, likes = library_of(value).to_native(value), [value]
    if type(value) is np.ndarray:
        flags = value.flags
        if not (flags.c_contiguous and flags.aligned):
            return None
        if out is not None and not (flags.writeable if out is value else _takes_result(out, value)):
            return None
        return (name, reduce_op, value.shape, value.dtype, overrides, out is not None), value, out, likes
    if native is None or not (type(value) in _NESTS or hasattr(type(value), "_fields")) or not value:
        return None
    try:
        leaves, structure = _flatten(value)
        outs, into = (leaves, True) if out is value else (None, False) if out is None else _outs(out, leaves, structure)
        key = (name, reduce_op, structure, None, overrides, into)
        if type(leaves[0]) is np.ndarray:
            return (key, leaves, outs, None) if outs is None or type(outs[0]) is np.ndarray else None
        library = known_library_of(leaves[0])
        if library is None or not library.knows_lists or into == _OTHERS:
            return None
        natives = library.known_natives(leaves)
    except Exception:  # of any kind: the call is made as others are, and the other ranks learn of it
        return None
    return (key, natives, None, leaves) if outs is None else (key, natives, natives, None)


def _flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """List the leaves of a nest: of one that looks like a list of arrays, as if it were that."""
    if type(value) is list and type(value[0]) is np.ndarray:
        return value, (list.__name__, len(value))
    return nest.flatten(value)


def _outs(out: Any, leaves: list[Any], structure: tuple[Any, ...]) -> tuple[list[Any], bool | str]:
    """List the leaves of a nest of outs, `leaves` itself if these are the same; and say what `CallKey` has of that."""
    outs, form = _flatten(out)
    if form != structure:
        raise ValueError("another form, of which the call tells all ranks")
    return (leaves, True) if all(map(operator.is_, outs, leaves)) else (outs, _OTHERS)


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
    """A call that reduces the leaves of a nest.

    Attributes:
        holds_for: Returns whether nothing has to be checked of a list of the same length.
        outs_hold: The same of other arrays that take the results.
        cached: The call.
        variant: `CallRecord.variant` of a list of symmetric arrays, or with per-node outs; `None` for private ones.
        references: To arrays of the caller: this object goes with the first of them that goes.
    """

    holds_for: Callable[[list[Any]], bool]
    outs_hold: Callable[[list[Any]], bool] | None
    cached: _CachedCall
    variant: int | None
    references: Sequence[weakref.ref[Any]]


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
        self._lists: dict[Any, list[_ListCall]] = {}  # by `_place_of_list`, the newest first
        self._cached_for: Levels | None = None

    def run(self, timeout: float | None, key: CallKey, value: Any, out: Any, likes: list[Any] | None) -> Any:
        """Reduce as an earlier call did, if there was one. Collective, unless it returns `None`.

        Args:
            timeout: The deadline of this call, in seconds, as `CommunicationOptions.timeout_seconds`.
            key: As all further arguments, what `key_of_repeated` has returned: the key of the call.
            value: The array, or the list of a nest's leaves; `None` for tensors whose arrays are not known.
            out: What takes the result; `None` for new arrays.
            likes: Values like the new results, if these are not NumPy's.

        Returns:
            The result: an array, a number or a list; `None` if there was no such call, or this one has to be checked.

        Raises:
            Exception: What `Reductions.run` raises.
        """
        if self._cached_for is not self._group.levels or value is None:  # a reset makes new levels
            return None
        if type(value) is list:
            for known in self._lists.get(_place_of_list(key, value if out is None else out), ()):
                if known.holds_for(value) and (known.outs_hold is None or known.outs_hold(out)):
                    break
            else:
                return None
            cached, variant = known.cached, known.variant
            if variant is None:
                variant = cached.execution.variant_of_private()
            cached.call.timeout_seconds = timeout
            results = self._make(cached, cached.reduction, variant, value, out)
            return results if likes is None else library_of(likes[0]).from_natives(results, likes)
        alike = self._cached.get(key)
        if alike is None:
            return None
        reduction, of_array = alike.reduction, alike.execution.variant_of(value, out)
        if of_array is None:
            symmetric = self._symmetric.get(id(value))
            if symmetric is None or out is not value or symmetric.array() is not value or symmetric.key != key:
                return None
            reduction, of_array = symmetric.reduction, symmetric.variant
        alike.call.timeout_seconds = timeout
        result = self._make(alike, reduction, of_array, value, out)
        return result if likes is None else library_of(likes[0]).from_native(result, likes[0])

    def _make(self, cached: _CachedCall, reduction: RepeatedReduction, variant: int, value: Any, out: Any) -> Any:
        """Make a call. Collective."""
        group = self._group
        group.enter(cached.call.name)
        if group.calls:
            group.calls.finish()
        try:
            return self._reduce(cached, reduction, variant, value, out)
        except BaseException as error:
            self._clear()
            reduction.forget()
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
                return reduction.close(result, out is None)
        if progress == Progress.NOT_JOINED:
            try:
                begun = reduction.begin(value, result, place) if call.error is None else None
            except Exception as problem:
                call = _call_with(call, problem)
            agreement.arrive(call)
        else:
            begun = reduction.resume(value, result, place, progress == Progress.AGREED)
        if progress == Progress.AGREED or agreement.conclude(call):
            reduction.finish(begun, result)
            result = reduction.close(result, out is None)
        else:
            result = _finish_unlike(cached, value, out)
            if type(out) is list:  # per-node arrays are written by one rank of the node
                result = write_outs(out, result, self._group.shared)
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
            self._cached[key] = self._cached_call(call)
        if self._cached[key] is not None:
            self._add_symmetric(key, call)

    def _clear(self) -> None:
        self._cached.clear()
        self._symmetric.clear()
        self._lists.clear()

    def _add_list(self, key: CallKey, call: ReductionCall) -> None:
        """Add a call that has reduced the leaves of a nest, into new arrays or in place. Local."""
        execution, arrays, checked = call.plan.execution, call.operands.arrays, call.checked_outs
        has_form = key[2] == call.structure and not call.mirrored
        if not (isinstance(execution, FusedExecution) and _is_plain(call) and has_form):
            return
        if type(call.values[0]) is not np.ndarray and not _note_natives(list(call.values), arrays):
            return
        # Views of per-node arrays may be in none of these places.
        is_per_node = checked is not None and checked.places is not None and all(its.per_node for its in checked.places)
        if key[-1] == _OTHERS and not is_per_node:
            return
        if len(self._lists) >= _MAX_ARRAYS:
            self._lists.clear()
        if checked is not None and not (checked.are_private or is_per_node):
            self._add_symmetric_list(key, call, execution, checked)
            return
        reduction = execution.of_list(call, self._group.agreement.flight)
        if reduction is None or not reduction.fits(arrays):
            return
        cached = _CachedCall(_call_like(call), execution, reduction)
        holds_for, known, outs = reduction.fits, self._lists, arrays if call.outs is None else list(call.outs)
        place = _place_of_list(key, outs)
        if checked is None:
            self._know(place, _ListCall(holds_for, None, cached, None, []))
            return
        # The memory of per-node arrays goes with them, so this keeps nothing that refers to the memory.
        kept = outs if is_per_node else outs[:1]
        references = [weakref.ref(its, lambda _: known.pop(place, None)) for its in kept]
        if is_per_node:
            self._know(place, _ListCall(holds_for, checked.are_unchanged, cached, call.variant, references))
        else:
            self._know(place, _ListCall(checked.are_unchanged, None, cached, None, references))

    def _know(self, place: Any, call: _ListCall) -> None:
        self._lists[place] = [call, *self._lists.get(place, ())][:_MAX_ALIKE]

    def _add_symmetric_list(
        self, key: CallKey, call: ReductionCall, execution: FusedExecution, checked: CheckedOuts
    ) -> None:
        """Add a call that has reduced symmetric arrays in place. Local."""
        arrays, reduction = call.operands.arrays, execution.of_symmetric(call)
        if reduction is None:
            return
        # The memory of the arrays goes with them, so this keeps nothing that refers to the memory.
        known, place = self._lists, _place_of_list(key, arrays)
        references = [weakref.ref(array, lambda _: known.pop(place, None)) for array in arrays]
        cached = _CachedCall(_call_like(call), execution, reduction)
        self._know(place, _ListCall(checked.are_unchanged, None, cached, call.variant, references))

    def _cached_call(self, call: ReductionCall) -> _CachedCall | None:
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
        reduction = execution.of_symmetric(call) if isinstance(execution, FusedExecution) else None
        if reduction is None:
            return
        if len(self._symmetric) >= _MAX_ARRAYS:
            self._symmetric.clear()
        # The array's memory goes with the array, so this does not keep what refers to the memory.
        known, place = self._symmetric, id(array)
        reference = weakref.ref(array, lambda _: known.pop(place, None))
        known[place] = _SymmetricCall(key, reference, reduction, call.variant)


def _place_of_list(key: CallKey, arrays: list[Any]) -> Any:
    """Return the key of a list in the cache: outs have been checked by themselves, and of others the forms."""
    first = arrays[0]
    return (key, id(first)) if key[-1] else (key, first.shape, first.dtype)


def _note_natives(values: list[Any], natives: list[Any]) -> bool:
    try:
        return library_of(values[0]).note_natives(values, natives)
    except Exception:  # of a class of the user's: the call is done, on this rank as on the others
        return False


def _call_like(call: ReductionCall) -> ReductionCall:
    """Return the same call, without arrays."""
    like = ReductionCall(call.name, call.op, call.options, (), call.structure, call.mirrored)
    like.plan, like.details = call.plan, call.plan.details
    like.fingerprint = call.plan.fingerprint ^ name_digest(call.name)
    if call.checked_outs is not None:
        like.fingerprint ^= call.checked_outs.per_node_digest
    like.per_node_indices = call.per_node_indices
    return like


def _call_with(call: ReductionCall, error: Exception) -> ReductionCall:
    """Return the same call, with what is wrong on this rank."""
    like = _call_like(call)
    like.fingerprint, like.timeout_seconds = call.fingerprint, call.timeout_seconds
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
