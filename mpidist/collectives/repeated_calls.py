"""A cache of calls of one NumPy array, or of a nest, so that a call like an earlier one skips the checks and the plan.

A small call takes as long as Python takes to check its arguments. What an earlier call found out holds for every array
of the same shape and dtype, and for nests of such, so they are staged at once. The ranks agree on a cached call as on
any other: a rank that makes the call for the first time, or another call, waits in the same barrier, and all ranks
raise the same errors.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, final

import numpy as np

from mpidist import nest
from mpidist.collectives.arguments.operands import Operands
from mpidist.collectives.arguments.out_arrays import write_outs
from mpidist.collectives.plans.call import ReductionCall
from mpidist.collectives.plans.fused_execution import FusedExecution
from mpidist.collectives.plans.places import NOWHERE
from mpidist.collectives.plans.repeated_reductions import Lists, RepeatedReduction
from mpidist.options import CommunicationOptions, Compression, ReduceOp
from mpidist.transport.agreement.agreement import Progress
from mpidist.transport.array_libraries.dlpack_arrays import CuPyArrays
from mpidist.transport.array_libraries.libraries import known_library_of, library_of
from mpidist.transport.group.levels import Levels
from mpidist.transport.group.started_calls import Pending, Steps
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.host_memory.result_memory import SumMemory
from mpidist.transport.native.loading import native
from mpidist.values import Contributions, PerReplica

__all__ = [
    "NO_OTHERS",
    "CallKey",
    "Described",
    "KnownCall",
    "RepeatedCalls",
    "key_of_array",
    "key_of_repeated",
    "of_first_replica",
]

_MAX_CALLS: Final = 1024  # a program that makes more different calls hardly repeats one
_MAX_ARRAYS: Final = 256  # symmetric ones, and lists
_MAX_ALIKE: Final = 8  # lists whose first arrays are alike
_OP_TYPES: Final[Set[type]] = {str, ReduceOp}
_NESTS: Final = {list, tuple, dict}
_NUMBERS: Final = {float, np.float16, np.float32, np.float64, np.int32, np.int64}
_SMALL_INTS: Final = range(-1 << 31, 1 << 31)  # so that no sum overflows, which is checked of others

_OF_NUMPY: Final = {np.ndarray, *_NUMBERS}

_OTHERS: Final = "other arrays"

# What equal calls have in common: the name of the call, the reduction as the user wrote it, the shape and the dtype of
# the array (of a nest the structure, and none), what options of the call override, with its destinations, and whether
# arrays of the caller's take the result: of a nest its own, or `_OTHERS`. It has no names, as it is made in each call.
CallKey: TypeAlias = tuple[str, Any, tuple[Any, ...], np.dtype[Any] | None, tuple[Any, ...], bool | str]
Described: TypeAlias = tuple[CallKey, Any, Any, list[Any] | None]  # the arguments of `RepeatedCalls.run`

Array = np.ndarray[Any, Any]
NO_OTHERS: Final[Sequence[Any]] = ()


def of_first_replica(value: Any, out: Any, num_here: int) -> tuple[Any, Sequence[Any], Any]:
    """Return the contributions of this rank's first replica and of the others, and the out of the first result.

    A contribution of another kind than `key_of_repeated` takes is `None`.
    """
    outs: Sequence[Any] = [out]
    components: Sequence[Any] = ()
    if type(value) is Contributions:
        components, outs = value.nests, out.nests if type(out) is Contributions else outs
    elif type(value) is PerReplica and type(value.values[0]) is np.ndarray:
        components = value.values
    if len(components) != num_here or (num_here > 1 and not _are_alike(components, outs)):
        return None, NO_OTHERS, out
    return components[0], components[1:], outs[0]


def _are_alike(components: Sequence[Any], outs: Sequence[Any]) -> bool:
    """Whether the replicas of this rank pass like arrays, and take the results in such arrays."""
    arrays = [*components, *(out for out in outs if out is not None)]
    if set(map(type, arrays)) != {np.ndarray} or not all(out is None or out.flags.writeable for out in outs):
        return False
    return len({(array.shape, array.dtype) for array in arrays}) == 1


def _key_of_array(
    op_types: Set[type], name: str, reduce_op: Any, value: Any, out: Any, overrides: tuple[Any, ...]
) -> Described | None:
    if type(value) is not np.ndarray or type(reduce_op) not in op_types or not value.dtype.isnative:
        return None
    if not (value.flags.c_contiguous and value.flags.aligned) or (out is not None and not _takes_result(out, value)):
        return None
    return (name, reduce_op, value.shape, value.dtype, overrides, out is not None), value, out, None


# Describes a call of one array as `key_of_repeated` does, which it is the first and most frequent part of.
key_of_array: Final = partial(_key_of_array if native is None else native.key_of_array, _OP_TYPES)


def key_of_repeated(
    name: str, reduce_op: Any, value: Any, options: Any, out: Any, error: Any, destinations: Any = None
) -> Described | None:
    """Return the arguments of `RepeatedCalls.run` for a call that can be cached; `None` for another call.

    These calls reduce one NumPy array: into a new array, in place, or into another array of the same kind, with which
    it shares no memory. A float is such an array without axes. Or they reduce a nest of NumPy arrays and numbers into
    new ones; of arrays alone, in place or into per-node arrays, too; or a nest of tensors, whose arrays are known, into
    new ones or in place. With `destinations`, as in `ReductionCall`, each of these is a nest.
    """
    if error is not None or type(reduce_op) not in _OP_TYPES:
        return None
    overrides: tuple[Any, ...] = ()
    if options is not None:
        if type(options) is not CommunicationOptions:
            return None
        overrides = options.overrides
    if destinations is not None:
        overrides = *overrides, destinations
    elif (type(value) in _NUMBERS or (type(value) is int and _is_small(value, reduce_op))) and out is None:
        found = key_of_array(name, reduce_op, library_of(value).to_native(value), None, overrides)
        return found and (*found[:3], [value])
    elif type(value) is np.ndarray:
        return key_of_array(name, reduce_op, value, out, overrides)
    elif not (type(value) in _NESTS or hasattr(type(value), "_fields")):
        return None
    if native is None:
        return None
    try:
        is_list = type(value) is list and type(value[0]) is not np.ndarray
        if is_list and isinstance(known_library_of(value[0]), CuPyArrays):  # of `DeviceCalls`
            return None
        leaves, structure = _flatten(value)
        outs, into = (leaves, True) if out is value else (None, False) if out is None else _outs(out, leaves, structure)
        key = (name, reduce_op, structure, None, overrides, into)
        types = {*map(type, leaves)}
        if types == {np.ndarray}:
            return (key, leaves, outs, None) if outs is None or type(outs[0]) is np.ndarray else None
        if types and outs is None and types <= _OF_NUMPY:
            return key, [*map(_native, leaves)], None, leaves
        library = known_library_of(leaves[0])
        if library is None or not library.knows_lists or into == _OTHERS:
            return None
        natives = library.known_natives(leaves)
    except Exception:  # of any kind: the call is made as others are, and the other ranks learn of it
        return None
    return (key, natives, None, leaves) if outs is None else (key, natives, natives, None)


def _is_small(value: int, reduce_op: str | ReduceOp) -> bool:
    """Whether no result of such ints overflows, on any number of replicas, so that an int needs no check."""
    return value in _SMALL_INTS and (-2 < value < 2 or str(reduce_op).upper() != "PROD")


def _native(leaf: Any) -> Any:
    return leaf if type(leaf) is np.ndarray else library_of(leaf).to_native(leaf)


def _flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """List the leaves of a nest: of one that looks like a list of arrays, as if it were that."""
    if type(value) is list and type(value[0]) is np.ndarray:
        return value, (list.__name__, len(value))
    return nest.flatten(value)


def _outs(out: Any, leaves: list[Any], structure: tuple[Any, ...]) -> tuple[list[Any], bool | str]:
    """List the leaves of a nest of outs, `leaves` itself if these are the same, with their entry in `CallKey`."""
    outs, form = _flatten(out)
    if form != structure:
        raise ValueError("another form, which the call reports to all ranks")
    return (leaves, True) if all(map(operator.is_, outs, leaves)) else (outs, _OTHERS)


def _takes_result(out: Any, value: Array) -> bool:
    """Whether an array takes the result of another one, or of itself, as that array would take it itself."""
    if type(out) is not np.ndarray or out.shape != value.shape or out.dtype != value.dtype or not out.flags.carray:
        return False
    return out is value or not np.may_share_memory(out, value)


@final
class _CachedCall(NamedTuple):
    """A call without its arrays, and what carries such calls out.

    Attributes:
        execution: Carries out the calls of the plan, wherever arguments of other ranks lie.
        reduction: Carries out the calls where arguments of all ranks lie as in the call that was cached.
    """

    call: ReductionCall
    execution: FusedExecution
    reduction: RepeatedReduction


# What carries a call out, and its `CallRecord.variant`. A tuple without names, as it is made in each call.
KnownCall: TypeAlias = tuple[_CachedCall, int]


@final
class _ListCall(NamedTuple):
    """A call that reduces the leaves of a nest, or a symmetric array in place.

    Attributes:
        holds_for: Returns whether nothing has to be checked of a list of the same length.
        outs_hold: The same of values that hold, and of other arrays that take their results.
        variants: `CallRecord.variant`, before the strategy allocates shared memory, and from then on.
        references: To arrays of the caller: this object goes with the first of them that goes.
    """

    holds_for: Callable[[list[Any]], bool]
    outs_hold: Callable[[list[Any], list[Any]], bool] | None
    cached: _CachedCall
    variants: tuple[int, int]
    references: Sequence[weakref.ref[Any]]


@final
class RepeatedCalls:
    """The cached calls of one group of ranks."""

    def __init__(self, group: SyncGroup, sum_memory: SumMemory) -> None:
        self._group, self._sum_memory = group, sum_memory
        # Of one array, where the strategy has allocated no shared memory. `None`: they have to be checked each time.
        self._cached: dict[CallKey, KnownCall | None] = {}
        self._lists: dict[Any, list[_ListCall]] = {}  # by `_place_of_list`, the newest first
        self._cached_for: Levels | None = None

    def run(
        self,
        timeout: float | None,
        key: CallKey,
        value: Any,
        out: Any,
        likes: list[Any] | None,
        others: Sequence[Any] = NO_OTHERS,
    ) -> Any:
        """Reduce as an earlier call did, if there was one. Collective, unless it returns `None`.

        `None` means that there was no such call, or this one has to be checked. The arguments are those that
        `key_of_repeated` returned: `value` is the array, or the list of a nest's leaves, and `None` for tensors
        whose arrays are not known; new results become like `likes`. `others` are what the other replicas of this rank
        pass.
        """
        group, known = self._group, None
        if self._cached_for is group.levels and not group.shared.num_windows:
            known = self._cached.get(key)
        if known is None:
            known = self.find(key, value, out)
        if known is None:
            return None
        cached = known[0]
        if others and (sums := cached.call.plan.local_sums) is not None:
            group.enter(cached.call.name)  # before the memory of sums is written
            try:
                value = sums.add([[value], *([other] for other in others)], self._sum_memory)[0]
            except Exception:  # of any kind: the call is made as others are, and the other ranks learn of it
                return None
        result = self.make(timeout, known, value, out)
        return result if likes is None else _restore(result, likes)

    def start(
        self, timeout: float | None, key: CallKey, value: Any, out: Any, likes: list[Any] | None
    ) -> tuple[Pending | None, bool]:
        """Start to reduce as an earlier call did, if there was one. Collective, if it returns a call.

        The arguments are those of `run`. Returns the call, whose result is a list, also of one array, or `None`; and
        whether there was an earlier one.
        """
        known, group = self.find(key, value, out), self._group
        if known is None or known[0].reduction.run is None or group.agreement.step_exit is not None:
            return None, known is not None
        if type(value) is list:  # the caller may change its own before the calls before this one are done
            value, out = list(value), None if out is None else list(out)
            likes = None if likes is None else list(likes)
        group.enter(known[0].call.name)

        def steps(pending: Pending) -> Steps:
            known[0].call.timeout_seconds = timeout
            try:
                result = yield from self._steps(known, value, out, pending)
            except GeneratorExit:  # a reset or the end has abandoned the call
                known[0].reduction.forget()
                raise
            except BaseException as error:
                self._break_off(known[0], error)
                raise
            result = result if likes is None else _restore(result, likes)
            return result if type(result) is list else [result]

        return group.calls.start(steps), True

    def find(self, key: CallKey, value: Any, out: Any) -> KnownCall | None:
        """Find an earlier call like one; `None` if the call has to be checked. Local.

        For the same arrays it is the same call until a reset, or until the strategy allocates shared memory.
        """
        if self._cached_for is not self._group.levels or value is None:  # a reset makes new levels
            return None
        if type(value) is list:
            for known in self._lists.get(_place_of_list(key, value if out is None else out), ()):
                if known.holds_for(value) and (known.outs_hold is None or known.outs_hold(value, out)):
                    has_windows = self._group.shared.num_windows > 0
                    return known.cached, known.variants[has_windows]
            return None
        alike = self._cached.get(key)
        if alike is None:
            return None
        variant = alike[0].execution.variant_of(value, out)
        if variant is not None:
            return alike[0], variant
        symmetric = self._lists.get((key, id(value))) if out is value else None
        return (symmetric[0].cached, symmetric[0].variants[True]) if symmetric else None

    def make(self, timeout: float | None, known: KnownCall, value: Any, out: Any) -> Any:
        """Make a call: in compiled code, as far as there is such code and no rank waits long. Collective."""
        (cached, variant), group, agreement = known, self._group, self._group.agreement
        reduction = cached.reduction
        cached.call.timeout_seconds = timeout
        group.enter(cached.call.name)
        if group.calls.queue or group.calls.launched:
            group.calls.finish()
        try:
            call, progress, begun, result = self._begin(cached, variant, value, out)
            if progress == Progress.DONE:
                return reduction.close(result, out is None)
            if progress == Progress.AGREED or agreement.conclude(call):
                reduction.finish(begun, result)
                result = reduction.close(result, out is None)
            else:
                unlike = _unlike_call(cached, value, out)
                result = self._close_unlike(cached.execution.finish(unlike, has_same_places=False), value, out)
            agreement.end()
            return result
        except BaseException as error:
            self._break_off(cached, error)
            raise

    def _break_off(self, cached: _CachedCall, error: BaseException) -> None:
        self._clear()
        cached.reduction.forget()
        self._group.break_off(error)

    def _steps(self, known: KnownCall, value: Any, out: Any, pending: Pending) -> Steps:
        """Reduce as `make` does, in the steps of a started call."""
        (cached, variant), agreement = known, self._group.agreement
        reduction = cached.reduction
        pending.sequence = agreement.sequence + 1
        call, progress, begun, result = self._begin(cached, variant, value, out)
        if progress == Progress.DONE:
            return reduction.close(result, out is None)
        if progress == Progress.AGREED or (yield from pending.conclude(agreement, call)):
            yield from reduction.steps(begun, result)
            result = reduction.close(result, out is None)
        else:
            unlike = _unlike_call(cached, value, out)
            results = yield from cached.execution.steps(unlike, pending, has_same_places=False)
            result = self._close_unlike(results, value, out)
        agreement.end()
        return result

    def _begin(self, cached: _CachedCall, variant: int, value: Any, out: Any) -> tuple[ReductionCall, int, Any, Any]:
        """Join a call. Returns it, how far it came, the argument of `RepeatedReduction.finish`, and the result."""
        call, reduction, agreement = cached.call, cached.reduction, self._group.agreement
        call.variant, progress, begun = variant, Progress.NOT_JOINED, None
        try:
            result, place = reduction.lend() if out is None else (out, 0)
        except Exception as problem:  # whatever it is, the other ranks must learn of it
            call, result, place = _call_with(call, problem), value, 0
        if reduction.run is not None and call.error is None:
            progress = agreement.join_at_once(call, reduction.run, value, result, place)
        if progress == Progress.NOT_JOINED:
            try:
                begun = reduction.begin(value, result, place) if call.error is None else None
            except Exception as problem:
                call = _call_with(call, problem)
            progress = agreement.arrive_at_once(call)
        elif progress != Progress.DONE:
            begun = reduction.resume(value, result, place, progress == Progress.AGREED)
        return call, progress, begun, result

    def _close_unlike(self, results: list[Any], value: Any, out: Any) -> Any:
        if type(out) is list:  # per-node arrays are written by one rank of the node
            return write_outs(out, results, self._group.shared)
        return results if type(value) is list else results[0]

    def add(self, key: CallKey, call: ReductionCall) -> None:
        """Add a call that was carried out to the cache. Local."""
        if self._cached_for is not self._group.levels:
            self._clear()
            self._cached_for = self._group.levels
        if key[3] is None:
            self._add_list(key, call)
            return
        if call.per_node_indices:  # of which the key says nothing
            return
        if key not in self._cached:
            if len(self._cached) >= _MAX_CALLS:
                self._cached.clear()
            self._cached[key] = self._cached_call(call)
        if self._cached[key] is not None and isinstance(execution := call.plan.execution, FusedExecution):
            self._add_in_place(key, call, execution)

    def _clear(self) -> None:
        self._cached.clear()
        self._lists.clear()

    def _add_list(self, key: CallKey, call: ReductionCall) -> None:
        """Add a call that has reduced the leaves of a nest. Local."""
        execution, arrays, checked = call.plan.execution, call.operands.arrays, call.checked_outs
        has_form = key[2] == call.structure and not call.mirrored
        is_plain = _is_plain(call) and call.plan.local_sums is None
        if not (isinstance(execution, FusedExecution) and is_plain and has_form):
            return
        if not _OF_NUMPY.issuperset(map(type, call.values)) and not _note_natives(list(call.values), arrays):
            return
        # Views of per-node arrays may be in none of these places.
        is_per_node = checked is not None and checked.places is not None and all(its.per_node for its in checked.places)
        outs = arrays if call.outs is None else list(call.outs)
        if checked is not None and not (checked.are_private or is_per_node):
            self._add_in_place(key, call, execution)
            return
        reduction = execution.of_list(call, self._group.agreement.flight)
        if reduction is None or not reduction.fits(arrays):
            return
        cached, fits_alone = _CachedCall(call.like(), execution, reduction), partial(reduction.fits, need_own_data=True)
        if checked is None:
            self._know(key, outs, cached, reduction.fits)
        elif is_per_node:
            unchanged = checked.are_unchanged
            self._know(key, outs, cached, fits_alone, lambda _, its: unchanged(its), call.variant, outs)
        elif all(map(operator.is_, outs, arrays)):
            self._know(key, outs, cached, checked.are_unchanged, kept=outs[:1])
        elif isinstance(reduction, Lists) and fits_alone(arrays) and reduction.can_write(arrays, outs):
            self._know(key, outs, cached, fits_alone, reduction.can_write)

    def _know(
        self,
        key: CallKey,
        outs: list[Any],
        cached: _CachedCall,
        holds_for: Callable[[list[Any]], bool],
        outs_hold: Callable[[list[Any], list[Any]], bool] | None = None,
        variant: int | None = None,
        kept: Sequence[Any] = (),
    ) -> None:
        """Cache a list until one of the arrays `kept` is gone: nothing here refers to memory that goes with them."""
        if len(self._lists) >= _MAX_ARRAYS:
            self._lists.clear()
        known, place = self._lists, _place_of_list(key, outs)
        references = [weakref.ref(its, lambda _: known.pop(place, None)) for its in kept]
        variants = cached.execution.private_variants if variant is None else (variant, variant)
        call = _ListCall(holds_for, outs_hold, cached, variants, references)
        known[place] = [call, *known.get(place, ())][:_MAX_ALIKE]

    def _cached_call(self, call: ReductionCall) -> KnownCall | None:
        """Return the cached entry of a call; `None` if such calls have to be checked each time."""
        execution = call.plan.execution
        if not (isinstance(execution, FusedExecution) and _is_plain(call)):
            return None
        reduction = execution.of_one_array(self._group.agreement.flight)
        if reduction is None:
            return None
        return _CachedCall(call.like(), execution, reduction), NOWHERE.digest

    def _add_in_place(self, key: CallKey, call: ReductionCall, execution: FusedExecution) -> None:
        """Add a call that has reduced symmetric arrays in place, if it has. Local."""
        reduction = execution.of_symmetric(call)
        if reduction is not None and call.outs is not None and call.checked_outs is not None:
            cached, outs = _CachedCall(call.like(), execution, reduction), list(call.outs)
            self._know(key, outs, cached, call.checked_outs.are_unchanged, variant=call.variant, kept=outs)


def _place_of_list(key: CallKey, arrays: list[Any]) -> Any:
    """Return the cache key of a list: with the identity of its first array in place, else with that array's form."""
    first = arrays[0]
    return (key, id(first)) if key[-1] is True else (key, first.shape, first.dtype)


def _note_natives(values: list[Any], natives: list[Any]) -> bool:
    try:
        return library_of(values[0]).note_natives(values, natives)
    except Exception:  # of a class of the user's: the call is done, on this rank as on the others
        return False


def _call_with(call: ReductionCall, error: Exception) -> ReductionCall:
    """Return the same call, with the error of this rank."""
    like = call.like()
    like.timeout_seconds, like.error = call.timeout_seconds, error
    return like


def _is_plain(call: ReductionCall) -> bool:
    return call.options.compression is Compression.NONE


def _unlike_call(cached: _CachedCall, value: Any, out: Any) -> ReductionCall:
    """Return a call with its arrays, where another rank's lie in shared memory: nobody reads what this one staged."""
    cached.reduction.forget()
    call = cached.call.like()
    is_list = type(value) is list
    call.operands = Operands(value if is_list else [value])
    call.outs = None if out is None else out if is_list else [out]
    return call


def _restore(result: Any, likes: list[Any]) -> Any:
    """Give new results the kinds of `likes`."""
    if type(result) is list and result[0] is None:  # this rank is no destination
        return result
    library = library_of(likes[0])
    if type(result) is not list:
        return library.from_native(result, likes[0])
    if library.knows_lists:
        return library.from_natives(result, likes)
    return [
        one if type(like) is np.ndarray else library_of(like).from_native(one, like)
        for one, like in zip(result, likes, strict=True)
    ]
