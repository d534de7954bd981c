"""Reductions of `IndexedSlices`: the rows of all replicas are gathered, and rows with the same index are added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, final

import numpy as np

from mpidist import nest
from mpidist.collectives.all_gather import all_gather
from mpidist.collectives.arguments.operands import native_dtype, replica_components
from mpidist.collectives.arguments.signature import name_call
from mpidist.collectives.plans.arithmetic import wire_and_result_dtypes
from mpidist.errors import InvalidArgumentError
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.replicas import Replicas
from mpidist.transport import arrays
from mpidist.transport.array_libraries.libraries import library_of
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.reduction import accumulator_dtype, is_low_precision
from mpidist.values import Contributions, DistributedValues, IndexedSlices, contributions, require_contributions

__all__ = ["all_reduce_slices", "has_slices"]

Array = np.ndarray[Any, Any]

_NOTHING: Final = ()  # a nest without leaves, in place of a dense leaf among rows, and of rows among dense leaves


def has_slices(value: Any) -> bool:
    """Whether a leaf of a nest, or of the nests of replicas, is an `IndexedSlices`, or a distributed value of them."""
    try:
        leaves, _ = nest.flatten(value.nests[0] if isinstance(value, Contributions) else value)
        own = (leaf.values[0] if isinstance(leaf, DistributedValues) else leaf for leaf in leaves)
        return any(isinstance(leaf, IndexedSlices) for leaf in own)
    except Exception:  # no nest: the call is refused for that
        return False


def all_reduce_slices(
    group: SyncGroup,
    call: str,
    reduce_op: Any,
    value: Any,
    options: CommunicationOptions,
    replicas: Replicas,
    error: Exception | None,
    reduce_dense: Callable[[Any], Any],
) -> Any:
    """Reduce a nest in which some leaves are `IndexedSlices`. Collective: an all-gather, and a call for other leaves.

    Rows are in the order of replicas. If an index occurs more than once, the rows are in the order of indices, of which
    each occurs once; each rank adds its own rows before it sends them, unless replicas were chosen or numbers are of
    half precision, which are rounded once. All ranks add alike, so the bits are the same on all of them.

    `reduce_dense` reduces the nest, or the nests of all replicas of this rank, of the other leaves alone.
    """
    rows: list[_Rows | None] = []
    sent: list[Any] = []
    nests: Sequence[Any] = []
    op = reduce_op
    try:
        op = ReduceOp.of(reduce_op)
        if op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise ValueError(f"{op} of IndexedSlices: they have SUM and MEAN")
        nests = _nests_of(op, value, group, replicas)
        for own in nests:
            rows = [_Rows(op, leaf) if isinstance(leaf, IndexedSlices) else None for leaf in nest.flatten(own)[0]]
            sent.append(nest.rebuild(own, [one.sent(replicas.tree is None) if one else _NOTHING for one in rows]))
    except Exception as problem:  # of any kind: the other ranks must learn of it
        error = error or name_call(problem, call)
    name = f"{call} {op} of IndexedSlices"
    to_send = next(iter(sent), None) if replicas.are_bare else Contributions(sent)
    gathered = iter(nest.flatten(all_gather(group, name, to_send, 0, options, replicas, error))[0])
    results: list[Any] = [one and one.close(next(gathered), next(gathered), replicas.total) for one in rows]
    if None in rows:
        rest = [nest.rebuild(own, _without(rows, nest.flatten(own)[0])) for own in nests]
        dense = iter(nest.flatten(reduce_dense(rest[0] if replicas.are_bare else Contributions(rest)))[0])
        results = [next(dense) if one is None else one for one in results]
    return nest.rebuild(nests[0], results)


def _nests_of(op: ReduceOp, value: Any, group: SyncGroup, replicas: Replicas) -> Sequence[Any]:
    """Return the nest of each replica of this rank."""
    if isinstance(value, Contributions):
        value.flatten(replicas.ids_here)  # raises if they have different forms
        return value.nests
    leaves, _ = nest.flatten(value)
    require_contributions(op, leaves, group, replicas.total)
    if replicas.are_bare:
        return [contributions(value)]
    components = [replica_components(str(op), leaf, replicas) for leaf in leaves]
    return [nest.rebuild(value, list(own)) for own in zip(*components, strict=True)]


def _without(rows: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    return [_NOTHING if one is not None else leaf for one, leaf in zip(rows, leaves, strict=True)]


@final
class _Rows:
    """The rows of one `IndexedSlices` as native arrays; refuses what does not belong together, or cannot be reduced."""

    def __init__(self, op: ReduceOp, slices: IndexedSlices) -> None:
        self._op, self._slices = op, slices
        self._like = slices.values if hasattr(slices.values, "dtype") else np.asarray(slices.values)
        self.values = library_of(self._like).to_native(self._like)
        if arrays.is_device(self.values):
            raise TypeError("IndexedSlices in device memory are not reduced: copy values and indices to host memory")
        self.values = self.values.astype(native_dtype(self.values.dtype), copy=False)
        if isinstance(slices.indices, np.ma.MaskedArray):
            raise TypeError(
                "the indices of IndexedSlices are a masked array, whose mask would be lost: leave the masked rows out"
            )
        self.indices = np.asarray(slices.indices)
        if self.indices.size and self.indices.dtype.kind not in "iu":
            raise TypeError(f"the indices of IndexedSlices must be integers, got dtype {self.indices.dtype.name}")
        shape = slices.dense_shape or (np.iinfo(np.int64).max, *self.values.shape[1:])
        if self.indices.ndim != 1 or self.values.shape != (self.indices.size, *shape[1:]):
            raise ValueError(
                f"IndexedSlices of dense shape {slices.dense_shape}: needed indices [k] and values [k, ...], got "
                f"indices {list(self.indices.shape)} and values {list(self.values.shape)}"
            )
        for index in (self.indices.min(), self.indices.max()) if self.indices.size else ():
            if not 0 <= index < shape[0]:
                needed = f"in 0 to {shape[0] - 1}" if slices.dense_shape else "0 or more"
                raise InvalidArgumentError(f"the indices of IndexedSlices must be {needed}, got {index}")
        self.indices = self.indices.astype(np.int64)
        self._wire, self._dtype = wire_and_result_dtypes(op, self.values.dtype)

    def sent(self, adds: bool) -> dict[str, Any]:
        """Return the rows that this replica sends. `adds`: whether it may add rows with the same index before."""
        indices, values = self.indices, self.values.astype(self._wire, copy=False)
        if adds and not is_low_precision(self._wire):
            with np.errstate(all="ignore"):  # an overflow is a result: see `transport.float_errors`
                indices, values = _added(indices, values)
        return {"indices": indices, f"values, dense shape {self._slices.dense_shape}": values}

    def close(self, indices: Array, values: Array, num_replicas: int) -> IndexedSlices:
        """Make the result of the rows of all replicas."""
        with np.errstate(all="ignore"):
            indices, values = _added(indices, values)
            if self._op is ReduceOp.MEAN:
                values = np.divide(values, num_replicas, dtype=np.result_type(values, np.float32))
            values = values.astype(self._dtype, copy=False)
        own = self._slices.indices
        if hasattr(own, "dtype"):
            indices = library_of(own).from_native(indices, own)
        return IndexedSlices(library_of(self._like).from_native(values, self._like), indices, self._slices.dense_shape)


def _added(indices: Array, values: Array) -> tuple[Array, Array]:
    """Add rows with the same index in their order; of half precision in float32. Without such rows, return both."""
    order = np.argsort(indices, kind="stable")
    in_order = indices[order]
    is_first = np.ones(in_order.size, bool)
    is_first[1:] = in_order[1:] != in_order[:-1]
    if is_first.all():
        return indices, values
    rows = values[order].astype(accumulator_dtype(values.dtype), copy=False)
    return in_order[is_first], np.add.reduceat(rows, np.flatnonzero(is_first), axis=0, dtype=rows.dtype)
