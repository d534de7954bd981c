"""What one shape of call sends: which arrays, in which packs, and how the results come back.

A plan is made once for a list of shapes and dtypes, and run for every call with that list. It speaks of elements of
arrays, never of their memory. Packs are the user's grouping; chunks are what really moves: a large piece of one
array is reduced where its result will lie, small pieces share a pack buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.collectives.compression_policy import Compressing
from mpidist.collectives.device_chunks import run_on_device
from mpidist.collectives.packs import Piece, messages, packs_by_number, packs_by_size
from mpidist.errors import InvalidArgumentError
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.transport import Levels, Reduction, Schedule, StreamReducer, compression, is_half

__all__ = ["Chunk", "Plan", "Spec", "StreamPlan", "make_plan", "reduction_of", "wire_and_result_dtypes"]

# By code, not by kind: float8_e5m2 of `ml_dtypes` says of itself that its kind is "f", and no transport adds it.
_NUMBERS: Final = np.typecodes["AllInteger"] + np.typecodes["AllFloat"]

_UNCOMPRESSED: Final = Compressing()

LevelsOf = Callable[[bool], Levels]
Reduce = Callable[[Levels, Any, Reduction], None]  # a flat buffer [n] in place, over all ranks


@final
class Spec(NamedTuple):  # a tuple, because every call hashes the specs of its arrays
    """What all ranks must agree on about one array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device: bool

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def __repr__(self) -> str:
        name = "bf16" if self.dtype.name == "bfloat16" else f"{self.dtype.kind}{8 * self.dtype.itemsize}"
        return f"{name}[{','.join(map(str, self.shape))}]{' on a GPU' * self.device}"


@final
@dataclass(frozen=True)
class Chunk:
    """What one message carries.

    Attributes:
        pieces: One piece that is reduced where its result lies (`direct`), or pieces that share a pack buffer.
        wire: The dtype in which they travel.
        direct: Which of the two.
        device: Whether the arrays lie in device memory.
        reduction: What the transport does.
        divide_by: What the sums are divided by as they are copied out; 1 for none.
        is_compressed: Whether float32 numbers travel in half precision.
    """

    pieces: tuple[Piece, ...]
    wire: np.dtype[Any]
    direct: bool
    device: bool
    reduction: Reduction
    divide_by: int
    is_compressed: bool = False

    @cached_property
    def count(self) -> int:
        """Number of elements."""
        return sum(piece.count for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.count * self.wire.itemsize


@final
@dataclass(frozen=True)
class StreamPlan:
    """Arrays of one dtype that go through shared memory together, in the place of chunks.

    Attributes:
        indices: The arrays, in the order of sending. None is empty.
        lengths: Number of elements of each.
        wire: The dtype in which they travel.
        result: The dtype of the results.
        reduction: What the transport does.
        divide_by: What the sums are divided by; 1 for none.
        schedule: How they are cut into chunks.
        is_uniform: Whether all have one shape, of at least one dimension.
    """

    indices: tuple[int, ...]
    lengths: tuple[int, ...]
    wire: np.dtype[Any]
    result: np.dtype[Any]
    reduction: Reduction
    divide_by: int
    schedule: Schedule
    is_uniform: bool

    @cached_property
    def count(self) -> int:
        """Number of elements."""
        return sum(self.lengths)

    @cached_property
    def nbytes(self) -> int:
        """Number of bytes on the way."""
        return self.count * self.wire.itemsize


@final
@dataclass(frozen=True)
class Plan:
    """One shape of call.

    Attributes:
        specs: The arrays, in the caller's order.
        results: The dtype of each result.
        chunks: The messages, in the order of sending.
        num_packs: Number of packs.
        streams: The same, for a transport of streams; `None` if there are arrays that it does not take.
    """

    specs: tuple[Spec, ...]
    results: tuple[np.dtype[Any], ...]
    chunks: tuple[Chunk, ...]
    num_packs: int
    streams: tuple[StreamPlan, ...] | None = None

    def run(self, arrays: Sequence[Any], results: Sequence[Any], levels_of: LevelsOf, reduce: Reduce) -> None:
        """Send every chunk, those of device memory first.

        Args:
            arrays: Native arrays as in `specs`; any layout and byte order. They are only read.
            results: Where the results go: C-contiguous native arrays of the result dtypes. A result may be its
                own argument.
            levels_of: The levels for host (`False`) or device memory (`True`).
            reduce: Reduces a flat buffer in place.
        """
        on_device = [chunk for chunk in self.chunks if chunk.device]
        if on_device:
            run_on_device(on_device, arrays, results, levels_of(True), reduce)
        for chunk in self.chunks:
            if chunk.device:
                continue
            levels = levels_of(False)
            if chunk.direct:
                _run_direct(chunk, arrays, results, levels, reduce)
            else:
                _run_packed(chunk, arrays, results, levels, reduce)


def _run_direct(chunk: Chunk, arrays: Sequence[Any], results: Sequence[Any], levels: Levels, reduce: Reduce) -> None:
    (piece,) = chunk.pieces
    array, result = arrays[piece.index], results[piece.index]
    flat = result.reshape(-1)
    if piece.count == flat.size:
        if array is not result:
            result[...] = array
    else:
        flat = flat[piece.start : piece.stop]
        if array is not result:
            flat[...] = array.reshape(-1)[piece.start : piece.stop]
    reduce(levels, flat, chunk.reduction)
    if chunk.divide_by != 1:
        flat /= chunk.divide_by


def _run_packed(chunk: Chunk, arrays: Sequence[Any], results: Sequence[Any], levels: Levels, reduce: Reduce) -> None:
    buffer = levels.pack_buffer(chunk.count, chunk.wire)
    at = 0
    for piece in chunk.pieces:
        part = arrays[piece.index].reshape(-1)[piece.start : piece.stop]
        if chunk.is_compressed:
            compression.narrow(levels, part, buffer[at : at + piece.count])
        else:
            buffer[at : at + piece.count] = part
        at += piece.count
    reduce(levels, buffer, chunk.reduction)
    at = 0
    for piece in chunk.pieces:
        part = buffer[at : at + piece.count]
        into = results[piece.index].reshape(-1)[piece.start : piece.stop]
        if chunk.is_compressed:
            compression.widen(levels, part, into)
        else:
            into[...] = part if chunk.divide_by == 1 else part / chunk.divide_by
        at += piece.count


def wire_and_result_dtypes(op: ReduceOp, dtype: np.dtype[Any]) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Say in which dtype numbers travel and in which the result comes.

    A mean of 8 and 16-bit integers is float32, of 32 and 64-bit integers float64. The sums of a mean travel in a dtype
    that holds them, so that they do not wrap: a wider integer, and float64 for 64 bits. Everything else keeps its
    dtype, and sums of integers wrap as NumPy's do. Booleans have a minimum and a maximum.

    Raises:
        InvalidArgumentError: If numbers of this dtype cannot be reduced with `op`.
    """
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        if dtype.kind == "b":
            return dtype, dtype
        if dtype.kind == "c":
            raise InvalidArgumentError(f"{op} needs numbers that have an order, got dtype {dtype.name}")
    if not (dtype.char in _NUMBERS or is_half(dtype)):
        raise InvalidArgumentError(f"{op} needs numbers, got dtype {dtype.name}")
    if op is not ReduceOp.MEAN or dtype.kind not in "iu":
        return dtype, dtype
    if dtype.itemsize <= 2:
        return np.dtype(np.int32), np.dtype(np.float32)
    return np.dtype(np.float64 if dtype.itemsize == 8 else f"{dtype.kind}8"), np.dtype(np.float64)


def make_plan(
    op: ReduceOp,
    specs: Sequence[Spec],
    options: CommunicationOptions,
    num_packs: int,
    num_ranks: int,
    sizes: Levels,
    compressing: Compressing = _UNCOMPRESSED,
) -> Plan:
    """Decide what a call sends.

    Args:
        op: The reduction.
        specs: The arrays.
        options: With `bytes_per_pack` every pack is one message; `reproducible` fixes the order of adding.
        num_packs: Where `bytes_per_pack` is 0: that many packs of equal size per dtype, which cut arrays; 0 makes
            every array a pack. The transport moves such packs in messages of the size that suits it.
        num_ranks: What a mean divides by.
        sizes: The levels, which say how large a message should be.
        compressing: What becomes of float32 numbers on their way.

    Raises:
        InvalidArgumentError: If arrays of these dtypes cannot be reduced with `op`.
    """
    dtypes = [wire_and_result_dtypes(op, spec.dtype) for spec in specs]
    dtypes = [(compressing.wire(wire), result) for wire, result in dtypes]
    # Reversed: the last layers' gradients are ready first, and all ranks have them sooner.
    groups: dict[tuple[bool, np.dtype[Any], bool], list[Piece]] = {}
    for index in reversed(range(len(specs))):
        wire = dtypes[index][0]
        group = groups.setdefault((specs[index].device, wire, is_half(wire) and wire != specs[index].dtype), [])
        group.append(Piece(index, 0, specs[index].num_elements))
    chunks: list[Chunk] = []
    streams: list[StreamPlan] = []
    count = 0
    for (device, wire, is_compressed), pieces in groups.items():
        reduction, divide_by = reduction_of(
            op, wire, options, num_ranks, compressing.between_nodes(wire), counts_overflow=is_compressed
        )
        if sizes.streams is not None:
            result = dtypes[pieces[0].index][1]
            streams += _stream_of(pieces, wire, result, reduction, divide_by, sizes.streams, specs)
        if options.bytes_per_pack:
            packs = packs_by_size(pieces, wire, options.bytes_per_pack)
            direct_bytes = pack_bytes = sum(piece.count for piece in pieces) * wire.itemsize + 1
        else:
            packs = packs_by_number(pieces, num_packs)
            direct_bytes, pack_bytes = sizes.message_bytes(device)
        count += len(packs)
        for pack in packs:
            keeps = [_is_reduced_in_place(specs[piece.index], *dtypes[piece.index]) for piece in pack]
            limits = direct_bytes // wire.itemsize, pack_bytes // wire.itemsize
            for direct, run in messages(pack, keeps, *limits, device):
                chunks.append(Chunk(tuple(run), wire, direct, device, reduction, divide_by, is_compressed))
    can_stream = sizes.streams is not None and not any(device or is_compressed for device, _, is_compressed in groups)
    results = tuple(result for _, result in dtypes)
    return Plan(tuple(specs), results, tuple(chunks), count, tuple(streams) if can_stream else None)


def _is_reduced_in_place(spec: Spec, wire: np.dtype[Any], result: np.dtype[Any]) -> bool:
    """Whether an array can be reduced where its result will lie. A GPU copies there what has the dtype already."""
    return result == wire and (spec.dtype == wire or not spec.device)


def _stream_of(
    pieces: list[Piece],
    wire: np.dtype[Any],
    result: np.dtype[Any],
    reduction: Reduction,
    divide_by: int,
    streams: StreamReducer,
    specs: Sequence[Spec],
) -> list[StreamPlan]:
    full = [piece for piece in pieces if piece.count]
    if not full:
        return []
    indices, lengths = zip(*((piece.index, piece.count) for piece in full), strict=True)
    schedule = streams.schedule(lengths, wire.itemsize)
    is_uniform = len({specs[index].shape for index in indices}) == 1 and specs[indices[0]].shape != ()
    return [StreamPlan(indices, lengths, wire, result, reduction, divide_by, schedule, is_uniform)]


def reduction_of(
    op: ReduceOp,
    wire: np.dtype[Any],
    options: CommunicationOptions,
    num_ranks: int,
    between_nodes: np.dtype[Any] | None = None,
    counts_overflow: bool = False,
) -> tuple[Reduction, int]:
    """Say what the transport does, and what its results are then divided by."""
    name = "sum" if op is ReduceOp.MEAN else op.name.lower()
    divisor = num_ranks if op is ReduceOp.MEAN else 1
    if is_half(wire):  # its accumulator is divided before it is rounded, so that a mean cannot overflow
        return Reduction(name, divisor, options.reproducible, counts_overflow=counts_overflow), 1
    return Reduction(name, 1, options.reproducible, between_nodes), divisor
