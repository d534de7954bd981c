"""Packs and messages of a call's arrays. Plans hold indices of elements, and no memory.

Packs are the user's grouping of arrays, messages what the transport sends at once. A message is *direct*, one large
piece of an array that is reduced in the memory of its result, or has small pieces that share a pack buffer. A reducer
of fused arrays takes whole lists instead of messages, one for each dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np

from mpidist.collectives.arguments.operands import Spec
from mpidist.collectives.plans.arithmetic import Arithmetic
from mpidist.transport.gpu.copy_table import PackLayout
from mpidist.transport.group.levels import Levels
from mpidist.transport.reduction import Reduction, is_low_precision
from mpidist.transport.shared_memory.fused_reducer import FusedReducer
from mpidist.transport.shared_memory.schedule import Schedule

__all__ = [
    "FusedList",
    "Message",
    "Piece",
    "make_fused_lists",
    "group_by_size",
    "make_messages",
]


@final
@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of the flattened array `index`."""

    index: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@final
@dataclass(frozen=True)
class Message:
    """The elements that a transport reduces at once.

    Attributes:
        pieces: One piece if `is_direct`, else pieces that share a pack buffer.
        wire: The dtype in which the pieces are sent.
        is_direct: Whether the piece is reduced in the memory of its result, without a pack buffer.
        divide_by: The divisor of the sums as they are copied out; 1 for none.
        is_compressed: Whether the numbers are float32 numbers that every rank rounds to `wire`.
        half: The half precision that float32 numbers are sent in between nodes; `None` for none.
    """

    pieces: tuple[Piece, ...]
    wire: np.dtype[Any]
    is_direct: bool
    device: bool
    reduction: Reduction
    divide_by: int
    is_compressed: bool = False
    half: np.dtype[Any] | None = None

    @cached_property
    def layout(self) -> PackLayout:
        """Places of the pieces in a pack buffer."""
        return PackLayout([piece.count for piece in self.pieces], self.wire, is_padded=self.device)

    @cached_property
    def count(self) -> int:
        """Number of elements that are sent, with the padding of a pack."""
        return self.pieces[0].count if self.is_direct else self.layout.size

    @property
    def nbytes(self) -> int:
        """Number of bytes that are sent."""
        return self.count * self.wire.itemsize


@final
@dataclass(frozen=True)
class FusedList:
    """Arrays of one dtype that are reduced as one.

    Attributes:
        indices: The arrays, in the order of sending, without empty ones.
        wire: The dtype in which the arrays are sent.
        divide_by: The divisor of the sums; 1 for none.
        half: The half precision that float32 numbers are sent in between nodes; `None` for none.
        is_uniform: Whether all arrays have one shape, of at least one dimension.
        keeps_dtype: Whether all arrays already have the dtype `wire`.
    """

    indices: tuple[int, ...]
    lengths: tuple[int, ...]
    wire: np.dtype[Any]
    result_dtype: np.dtype[Any]
    reduction: Reduction
    divide_by: int
    half: np.dtype[Any] | None
    schedule: Schedule
    is_uniform: bool
    keeps_dtype: bool

    @cached_property
    def count(self) -> int:
        """Number of elements."""
        return sum(self.lengths)

    @cached_property
    def nbytes(self) -> int:
        """Number of bytes in the dtype `wire`."""
        return self.count * self.wire.itemsize

    def flat(self, arrays: Sequence[Any]) -> list[Any]:
        """Take the arrays of the list from all arrays of the call, flat."""
        if self.schedule.is_fine:  # copied as they are, whatever their shape and layout
            return [arrays[index] for index in self.indices]
        return [arrays[index] if arrays[index].ndim == 1 else arrays[index].reshape(-1) for index in self.indices]

    def flat_results(self, results: Sequence[Any]) -> list[Any]:
        """Return the results of the list, or the one array that has all, flat."""
        if self.schedule.is_fine and len(results) == len(self.indices):
            return list(results)
        return [result if result.ndim == 1 else result.reshape(-1) for result in results]


@final
@dataclass(frozen=True)
class _Wire:
    """Common key of arrays that may be sent together, in `dtype`.

    `is_compressed`: the arrays are float32, and every rank rounds them to `dtype`.
    """

    dtype: np.dtype[Any]
    result: np.dtype[Any]
    device: bool
    is_compressed: bool


def _group_by_wire(specs: Sequence[Spec], dtypes: Sequence[tuple[np.dtype[Any], Any]]) -> dict[_Wire, list[int]]:
    """Group arrays that can be sent together, the last array first: the last layers' gradients are ready first."""
    groups: dict[_Wire, list[int]] = {}
    for index in reversed(range(len(specs))):
        spec, (wire, result) = specs[index], dtypes[index]
        is_compressed = is_low_precision(wire) and wire != spec.dtype
        groups.setdefault(_Wire(wire, result, spec.device, is_compressed), []).append(index)
    return groups


def make_fused_lists(
    arithmetic: Arithmetic, specs: Sequence[Spec], reducer: FusedReducer, least_bytes: int | None = None
) -> tuple[FusedList, ...] | None:
    """Make the lists of a call for a reducer; `None` if it cannot take some array, or messages are faster."""
    dtypes = [arithmetic.dtypes(spec.dtype) for spec in specs]
    lists = []
    for wire, indices in _group_by_wire(specs, dtypes).items():
        if wire.device or wire.is_compressed:
            return None
        if reducer.spans_nodes and arithmetic.in_rank_order and is_low_precision(wire.dtype):
            return None  # a partial sum must not be rounded between nodes
        full = tuple(index for index in indices if specs[index].num_elements)
        if full:
            lists.append(_fused_list(arithmetic, specs, full, wire.dtype, wire.result, reducer))
    least_bytes = reducer.least_bytes if least_bytes is None else least_bytes
    return tuple(lists) if sum(fused.nbytes for fused in lists) >= least_bytes else None


def _fused_list(
    arithmetic: Arithmetic,
    specs: Sequence[Spec],
    indices: tuple[int, ...],
    wire: np.dtype[Any],
    result: np.dtype[Any],
    reducer: FusedReducer,
) -> FusedList:
    lengths = tuple(specs[index].num_elements for index in indices)
    half = arithmetic.half_between_nodes if reducer.spans_nodes and wire == np.float32 else None
    first = specs[indices[0]].shape
    return FusedList(
        indices,
        lengths,
        wire,
        result,
        *arithmetic.reduction(wire),
        half,
        reducer.schedule(lengths, wire.itemsize),
        is_uniform=first != () and all(specs[index].shape == first for index in indices),
        keeps_dtype=all(specs[index].dtype == wire for index in indices),
    )


def make_messages(
    arithmetic: Arithmetic, specs: Sequence[Spec], bytes_per_pack: int, num_packs: int, levels: Levels
) -> tuple[tuple[Message, ...], int]:
    """Make the messages of a call, in the order of sending, and count its packs.

    If `bytes_per_pack` is not 0, every pack is one message, and is complete once it holds more bytes. Else `num_packs`
    is the number of packs per dtype, equal in size, which cut arrays; 0 makes every array a pack. Such packs are sent
    in messages of the size that is fastest for the transport.
    """
    dtypes = [arithmetic.dtypes(spec.dtype) for spec in specs]
    messages: list[Message] = []
    count = 0
    for wire, indices in _group_by_wire(specs, dtypes).items():
        reduction, divide_by = arithmetic.reduction(wire.dtype, wire.is_compressed)
        half = arithmetic.half_between_nodes if wire.dtype == np.float32 else None
        itemsize = wire.dtype.itemsize
        pieces = [Piece(index, 0, specs[index].num_elements) for index in indices]
        if bytes_per_pack:
            sizes = [piece.count * itemsize for piece in pieces]
            packs = [[pieces[at] for at in pack] for pack in group_by_size(sizes, bytes_per_pack)]
            direct_bytes = pack_bytes = sum(sizes) + 1
        else:
            packs = _pack_by_number(pieces, num_packs)
            direct_bytes, pack_bytes = levels.message_bytes(wire.device)
        count += len(packs)
        limits = direct_bytes // itemsize, pack_bytes // itemsize
        for pack in packs:
            can_be_direct = [_can_be_direct(specs[piece.index], *dtypes[piece.index]) for piece in pack]
            for is_direct, run in _cut_pack(pack, can_be_direct, *limits, wire.device):
                common = wire.dtype, is_direct, wire.device, reduction, divide_by, wire.is_compressed, half
                messages.append(Message(tuple(run), *common))
    return tuple(messages), count


def _can_be_direct(spec: Spec, wire: np.dtype[Any], result: np.dtype[Any]) -> bool:
    """Whether an array can be reduced in the memory of its result. On a GPU, the copy there converts nothing."""
    return result == wire and (spec.dtype == wire or not spec.device)


def group_by_size(sizes: Sequence[int], bytes_per_pack: int) -> list[list[int]]:
    """Group items, in order, into packs, as indices; a pack is complete once it is larger than a limit, not 0."""
    packs: list[list[int]] = []
    held = bytes_per_pack + 1  # the first item opens a pack
    for index, size in enumerate(sizes):
        if held > bytes_per_pack:
            packs.append([])
            held = 0
        packs[-1].append(index)
        held += size
    return packs


def _pack_by_number(pieces: list[Piece], num_packs: int) -> list[list[Piece]]:
    """Cut the concatenation of all pieces into packs of `total // num_packs`; the last takes the remainder."""
    if num_packs == 0:
        return [[piece] for piece in pieces]
    total = sum(piece.count for piece in pieces)
    size = total // num_packs
    if num_packs == 1 or size == 0:
        return [pieces]
    ends = [size * (pack + 1) for pack in range(num_packs - 1)] + [total]
    packs: list[list[Piece]] = [[] for _ in ends]
    at, pack = 0, 0
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            if at == ends[pack]:
                pack += 1
            step = min(piece.stop - start, ends[pack] - at)
            packs[pack].append(Piece(piece.index, start, start + step))
            start, at = start + step, at + step
    return packs


def _cut_pack(
    pack: list[Piece], can_be_direct: list[bool], direct_count: int, pack_count: int, device: bool
) -> Iterator[tuple[bool, list[Piece]]]:
    """Cut a pack into messages, direct or not: one for each large piece, one pack buffer for each run of small ones.

    On a device, small pieces on both sides of a large piece share a pack buffer, which saves launches. `direct_count`
    and `pack_count` are the least number of elements of a large piece, and that of a pack buffer.
    """
    run: list[Piece] = []
    held = 0
    for piece, may_be_direct in zip(pack, can_be_direct, strict=True):
        if may_be_direct and piece.count and (piece.count >= direct_count or len(pack) == 1):
            if run and not device:
                yield False, run
                run, held = [], 0
            yield True, [piece]
            continue
        start = piece.start
        while start < piece.stop:
            step = min(piece.stop - start, pack_count - held)
            run.append(Piece(piece.index, start, start + step))
            start, held = start + step, held + step
            if held == pack_count:
                yield False, run
                run, held = [], 0
    if run:
        yield False, run
