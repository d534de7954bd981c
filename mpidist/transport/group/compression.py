"""Reductions between nodes in half precision, of numbers that are float32 on both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mpidist.transport import arrays
from mpidist.transport import reduction as host
from mpidist.transport.communicator import Array, Communicator
from mpidist.transport.group.levels import Levels
from mpidist.transport.reduction import Reduction

__all__ = ["all_reduce_between_nodes", "narrow", "reduce_scatter_between_nodes", "widen"]


def all_reduce_between_nodes(
    levels: Levels,
    communicator: Communicator,
    buffer: Array,
    reduction: Reduction,
    all_reduce: Callable[[Array, Reduction], None] | None = None,
) -> None:
    """All-reduce over ranks of several nodes, in the precision that `reduction.between_nodes` names. Collective.

    Every rank's buffer is rounded, the rounded numbers are joined in float32, and the result is rounded once more: the
    same bits on all ranks. Half the bytes of `Communicator.all_reduce`.

    Args:
        levels: Those for the memory that `buffer` lies in.
        communicator: The ranks.
        buffer: [n], reduced in place.
        reduction: The elementwise operation.
        all_reduce: What does it; by default, the communicator.
    """
    all_reduce = communicator.all_reduce if all_reduce is None else all_reduce
    if reduction.between_nodes is None or communicator.size == 1:
        all_reduce(buffer, reduction)
        return
    half = _narrowed(levels, communicator, buffer, reduction)
    all_reduce(half, replace(reduction, between_nodes=None, counts_overflow=True))
    widen(levels, half, buffer)


def reduce_scatter_between_nodes(
    levels: Levels,
    communicator: Communicator,
    buffer: Array,
    reduction: Reduction,
    bounds: Sequence[int],
    into: Array,
) -> None:
    """Reduce-scatter over ranks of several nodes, in the precision that `reduction.between_nodes` names. Collective.

    As `all_reduce_between_nodes`. Half the bytes of `Communicator.reduce_scatter`.

    Args:
        levels: Those for the memory that `buffer` lies in.
        communicator: The ranks.
        buffer: [n], this rank's contribution; only read if it is compressed.
        reduction: The elementwise operation.
        bounds: As `shard_bounds` makes them.
        into: [s], where this rank's shard goes.
    """
    if reduction.between_nodes is None or communicator.size == 1:
        communicator.reduce_scatter(buffer, reduction, bounds, into)
        return
    half = _narrowed(levels, communicator, buffer, reduction)
    widen(
        levels,
        communicator.reduce_scatter(half, replace(reduction, between_nodes=None, counts_overflow=True), bounds),
        into,
    )


def narrow(levels: Levels, numbers: Array, out: Array) -> None:
    """Round float32 numbers [m] to half precision, into `out` [m], and count those that overflow."""
    if arrays.is_device(out):
        kernels = levels.kernels
        kernels.pack([numbers], out, kernels.overflow_of(out.dtype))
    else:
        native = numbers if numbers.dtype.isnative else numbers.astype(numbers.dtype.newbyteorder("="))
        levels.world.traffic.overflowed += host.narrow(native, out)


def widen(levels: Levels, numbers: Array, out: Array) -> None:
    """Convert numbers [m] of half precision to float32, into `out` [m]. Exact."""
    if arrays.is_device(out):
        levels.kernels.unpack(numbers, [out])
    else:
        host.widen(numbers, out)


def _narrowed(levels: Levels, communicator: Communicator, buffer: Array, reduction: Reduction) -> Array:
    wire = reduction.between_nodes
    assert wire is not None
    if arrays.is_device(buffer):  # of CuPy's pool, where it lies the next time: a communicator may share its packs
        half = arrays.empty(buffer.shape, wire, device=True)
    else:
        half = communicator.pack_buffer(buffer.size, wire)
    narrow(levels, buffer, half)
    return half
