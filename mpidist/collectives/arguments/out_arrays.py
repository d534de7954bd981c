"""The caller's arrays that take results: `out=`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any, Final, final

import numpy as np

from mpidist import nest
from mpidist.collectives.arguments.operands import Spec, native_dtype
from mpidist.errors import InvalidArgumentError
from mpidist.nest.text import form_text
from mpidist.replicas import Replicas
from mpidist.transport import arrays as native_arrays
from mpidist.transport.agreement.agreement import Call
from mpidist.transport.array_libraries.libraries import library_of
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.node_memory.symmetric import SharedArrays
from mpidist.values import Contributions

__all__ = [
    "LateOuts",
    "check_outs",
    "copy_overwritten",
    "flatten_out",
    "is_target",
    "native_outs",
    "owners_of",
    "owns_data",
    "result_outs",
    "target_arrays",
    "write_outs",
]

owns_data: Final = attrgetter("flags.owndata")


def flatten_out(structure: nest.Structure, has_mirrored: bool, out: Any) -> list[Any]:
    """List the arrays of the argument `out`, whose form must be that of the values, none of them mirrored. Local."""
    outs, form = nest.flatten(out)
    if has_mirrored:
        raise InvalidArgumentError(
            "out takes reduced values, and mirrored values are not reduced: leave them out of both nests"
        )
    if form != structure:
        raise InvalidArgumentError(
            f"out must be a nest of the same form as the value, {form_text(structure)}, and is {form_text(form)}"
        )
    return outs


def native_outs(outs: Sequence[Any], values: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """View outs of any library as native arrays of the same memory, or refuse them; `check_outs` refuses no arrays.

    An out that is its own value becomes that value's native array, unless that is a copy: of a value on another GPU, or
    of one that is not aligned.
    """
    return [
        _native(index, out, array if out is value else None)
        for index, (out, value, array) in enumerate(zip(outs, values, arrays, strict=True))
    ]


def _native(index: int, out: Any, same: Any) -> Any:
    if type(out) is np.ndarray:
        return out
    try:
        library = library_of(out)
    except TypeError:
        return out
    if same is not None and library.is_target(out, same):
        return same
    try:
        target = library.to_target(out)
    except TypeError as error:
        raise TypeError(f"out {index} cannot be written: {error}") from error
    if target is None and library.why_no_target:
        raise InvalidArgumentError(f"out {index} cannot be written: {library.why_no_target}")
    if target is None:
        return out
    if same is None or native_arrays.memory_bounds(target) != native_arrays.memory_bounds(same):
        return target
    return same


def check_outs(
    outs: Sequence[Any],
    arrays: Sequence[Any],
    specs: Sequence[Spec],
    dtypes: Sequence[np.dtype[Any]],
    gpu: int | None = None,
) -> None:
    """Check that arrays can take results.

    The shape of an out that is its own value is not checked. Outs in device memory must lie on a GPU, by default the
    current one.

    Raises:
        InvalidArgumentError: If an out is no array, has another shape or dtype, lies on another GPU, is read-only, or
            shares memory with another out, or if some of its elements share memory.
    """
    for index, (out, array, spec, dtype) in enumerate(zip(outs, arrays, specs, dtypes, strict=True)):
        if out is not array or spec.dtype != dtype:
            _check_spec(index, out, Spec(spec.shape, dtype, spec.device), spec.dtype)
            if spec.device:
                _check_gpu(index, out, native_arrays.current_gpu() if gpu is None else gpu)
        if not getattr(out.flags, "writeable", True):
            raise InvalidArgumentError(f"out {index} must be an array that can be written; this one is read-only")
        if not out.flags.c_contiguous and _overlaps_itself(out):
            raise InvalidArgumentError(
                f"out {index} has elements that share memory (shape {out.shape}, strides {out.strides}); needed an "
                "array of which every element has a place of its own"
            )
    if len(outs) > 1:
        _check_apart(outs)


def result_outs(
    out: Any, structure: nest.Structure, specs: Sequence[Spec], replicas: Replicas, has_mirrored: bool = False
) -> list[Any]:
    """Check `out` for results that are not made in place of the values; return the first replica's arrays. Local."""
    nothing: list[Any] = [None] * len(specs)
    dtypes = [spec.dtype for spec in specs]
    of_replicas = []
    for at, own in enumerate(out.nests if isinstance(out, Contributions) else [out]):
        try:
            outs = native_outs(flatten_out(structure, has_mirrored, own), nothing, nothing)
            device = replicas.devices[at] if at else None
            check_outs(outs, nothing, specs, dtypes, device.index if device is not None and device.is_gpu else None)
        except Exception as problem:
            if not at:
                raise
            raise InvalidArgumentError(f"replica {replicas.ids_here[at]}: {problem}") from problem
        of_replicas.append(outs)
    return of_replicas[0]


def _check_spec(index: int, out: Any, want: Spec, dtype: np.dtype[Any]) -> None:
    if isinstance(out, np.generic) or not hasattr(out, "dtype") or not hasattr(out, "strides"):
        raise InvalidArgumentError(f"out {index} must be an array {want}, got {type(out).__name__}")
    got = Spec(out.shape, native_dtype(out.dtype), native_arrays.is_device(out))
    if got != want:
        why = "" if want.dtype == dtype else f": the mean of {dtype.name} numbers is {want.dtype.name}"
        raise InvalidArgumentError(f"out {index} must be an array {want}, got {got}{why}")


def _check_gpu(index: int, out: Any, gpu: int) -> None:
    """Refuse an out on another GPU: kernels and NCCL of this GPU lose the CUDA context if they use that memory."""
    if out.device.id != gpu:
        raise InvalidArgumentError(
            f"out {index} must lie on GPU {gpu}, where its result is made, and lies on GPU {out.device.id}: make it "
            f"within `with cupy.cuda.Device({gpu}):`, or after the strategy, which makes its GPU the current one"
        )


def _check_apart(outs: Sequence[Any]) -> None:
    bounds = sorted((*native_arrays.memory_bounds(out), index) for index, out in enumerate(outs) if out.size)
    for at, (_, stop, one) in enumerate(bounds):
        for later in range(at + 1, len(bounds)):
            start, _, other = bounds[later]
            if start >= stop:
                break
            if native_arrays.share_memory(
                outs[one], outs[other]
            ):  # columns of a matrix share none, but their bounds overlap
                raise InvalidArgumentError(
                    f"out {min(one, other)} and out {max(one, other)} share memory, and each result needs its own: "
                    "leave one out, on all ranks; of weights that layers share, pass list(model.parameters()); where a "
                    "module is passed, let the layers share one Parameter"
                )


def _overlaps_itself(out: Any) -> bool:
    """Whether some elements of an array share bytes with others."""
    axes = sorted((abs(stride), length) for stride, length in zip(out.strides, out.shape, strict=True) if length != 1)
    if not out.size:
        return False
    end = out.itemsize  # how many bytes the elements along the axes so far span
    is_nested = True  # whether a step along each axis skips all elements along axes with shorter steps, as in slices
    for stride, length in axes:
        is_nested = is_nested and stride >= end
        end += stride * (length - 1)
    if is_nested:
        return False
    if out.nbytes > end:
        return True
    offsets = np.zeros(1, np.int64)
    for stride, length in axes:
        offsets = np.add.outer(offsets, stride * np.arange(length)).reshape(-1)
    return bool((np.diff(np.sort(offsets)) < out.itemsize).any())


def is_target(out: Any, shared: SharedArrays) -> bool:
    """Whether a result can be made in an out: see `target_arrays`."""
    is_plain = out.flags.c_contiguous and out.dtype.isnative and native_arrays.is_aligned(out)
    return bool(is_plain and not shared.is_per_node(out))


def target_arrays(
    outs: Sequence[Any], specs: Sequence[Spec], dtypes: Sequence[np.dtype[Any]], shared: SharedArrays
) -> list[Any]:
    """Return the arrays in which results are made: the outs, or new arrays, which `write_outs` copies to the outs.

    A new array replaces an out that cannot be viewed flat, or that all ranks of a node share: such an out must not be
    written while another rank of the node still reads it.
    """
    return [
        out if is_target(out, shared) else native_arrays.empty(spec.shape, dtype, spec.device)
        for out, spec, dtype in zip(outs, specs, dtypes, strict=True)
    ]


def owners_of(arrays: Sequence[Any]) -> set[int] | None:
    """Return what owns the memory of arrays, by `id`; `None` if something else may own some of it. Local."""
    if set(map(type, arrays)) == {np.ndarray} and all(map(owns_data, arrays)):
        return set(map(id, arrays))
    owners = set(map(_owner, arrays))
    return None if None in owners else {owner for owner in owners if owner is not None}


def _owner(array: Any) -> int | None:
    """Return the `id` of the array that owns the memory of an array; `None` if another object may own it."""
    if type(array) is not np.ndarray:
        return None
    owner = array if array.base is None else array.base
    return id(owner) if type(owner) is np.ndarray and owner.flags.owndata else None


def copy_overwritten(
    arrays: list[Any], targets: Sequence[Any], are_shared: bool = False, owners: set[int] | None = None
) -> list[Any]:
    """Return the values, with a copy of each value that the result of another value may overwrite too early.

    That is `arrays` itself if surely no value is overwritten. `are_shared`: all targets lie in shared memory. `owners`:
    those of the targets, if known, from `owners_of`.
    """
    if all(map(is_, arrays, targets)):
        return arrays
    # Owned memory overlaps neither shared memory nor what other arrays own.
    if are_shared and all(map(owns_data, arrays)):
        return arrays
    own = owners_of(arrays)
    if own is not None:
        others = set() if are_shared else owners or owners_of(targets)
        if others is not None and own.isdisjoint(others):
            return arrays
    bounds = sorted(native_arrays.memory_bounds(target) for target in targets if target.size)
    starts = [start for start, _ in bounds]
    apart = []
    for array, target in zip(arrays, targets, strict=True):
        if array is target:
            apart.append(array)
            continue
        start, stop = native_arrays.memory_bounds(array)
        at = bisect_right(starts, start)  # targets do not overlap, so two of them suffice: those around `start`
        near = bounds[max(0, at - 1) : at + 1]
        overlaps = stop > start and any(low < stop and start < high for low, high in near)
        apart.append(array.copy() if overlaps else array)
    return apart


def write_outs(outs: Sequence[Any], results: Sequence[Any], shared: SharedArrays) -> list[Any]:
    """Copy results that were not made in the outs to the outs, and return these.

    Collective over the node, if an out is per node.
    """
    if results is outs or all(map(is_, outs, results)):
        return list(outs)
    for out, result in zip(outs, results, strict=True):
        if out is result:
            continue
        if shared.is_per_node(out):
            shared.write(out, result)
        else:  # `out` is not contiguous, not aligned, or of another byte order
            native_arrays.write(out, result)
    return list(outs)


@final
class LateOuts:
    """The first replica's arrays of `out`, for results that a rank computes once a call is over: checked before it."""

    def __init__(
        self,
        group: SyncGroup,
        out: Any,
        structure: nest.Structure,
        specs: Sequence[Spec],
        replicas: Replicas,
        has_mirrored: bool = False,
    ) -> None:
        self._group, self._outs = group, result_outs(out, structure, specs, replicas, has_mirrored)

    def name(self, call: str) -> str:
        """Name a call so that ranks compare which of its outs are per-node arrays. Local."""
        shared = [at for at, out in enumerate(self._outs) if self._group.shared.is_per_node(out)]
        return f"{call}, with the per-node outs {shared}" if shared else call

    def write(self, call: str, results: Sequence[Any]) -> None:
        """Write results. Local; collective if an array is a per-node one, which one rank of the node writes."""
        if not any(map(self._group.shared.is_per_node, self._outs)):
            write_outs(self._outs, results, self._group.shared)
        else:
            what = f"writing of per-node arrays, of {call}"
            with self._group.call(Call(what, self._group.agreement.fingerprint(what, (), dict))):
                write_outs(self._outs, results, self._group.shared)
        native_arrays.wait_for_writes(self._outs)
