"""The chunks of a call that lie in device memory: copied, packed and unpacked in one kernel launch each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mpidist.transport import Levels, Reduction

if TYPE_CHECKING:
    from mpidist.collectives.packs import Piece
    from mpidist.collectives.plan import Chunk

__all__ = ["run_on_device"]


def run_on_device(
    chunks: Sequence[Chunk],
    arrays: Sequence[Any],
    results: Sequence[Any],
    levels: Levels,
    reduce: Callable[[Levels, Any, Reduction], None],
) -> None:
    """Send the chunks of a plan that lie in device memory.

    Around the reductions it takes one launch to copy what is reduced where its result lies, two for each pack, and one
    to divide what was reduced in place. Nothing here waits.

    Args:
        chunks: They, in the order of sending.
        arrays: As in `Plan.run`.
        results: As in `Plan.run`.
        levels: Those for device memory.
        reduce: As in `Plan.run`.
    """
    kernels = levels.kernels
    direct = [(chunk, chunk.pieces[0]) for chunk in chunks if chunk.direct]
    moved = [piece for _, piece in direct if arrays[piece.index] is not results[piece.index]]
    if moved:
        kernels.copy(_parts(moved, arrays), _parts(moved, results))
    for chunk in chunks:
        if chunk.direct:
            reduce(levels, _part(chunk.pieces[0], results).reshape(-1), chunk.reduction)
            continue
        with levels.lane():
            buffer = levels.pack_buffer(chunk.count, chunk.wire)
            overflow = kernels.overflow_of(chunk.wire) if chunk.is_compressed else None
            kernels.pack(_parts(chunk.pieces, arrays), buffer, overflow)
            reduce(levels, buffer, chunk.reduction)
            kernels.unpack(buffer, _parts(chunk.pieces, results), chunk.divide_by)
    for divide_by in dict.fromkeys(chunk.divide_by for chunk, _ in direct if chunk.divide_by != 1):
        parts = _parts([piece for chunk, piece in direct if chunk.divide_by == divide_by], results)
        kernels.copy(parts, parts, divide_by)


def _parts(pieces: Sequence[Piece], arrays: Sequence[Any]) -> list[Any]:
    return [_part(piece, arrays) for piece in pieces]


def _part(piece: Piece, arrays: Sequence[Any]) -> Any:
    array = arrays[piece.index]
    if piece.count == array.size:  # the same object at every call, which is found fast
        return array
    return array.reshape(-1)[piece.start : piece.stop]
