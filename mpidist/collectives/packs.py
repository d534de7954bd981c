"""How the arrays of a call are grouped into packs, and packs cut into messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

__all__ = ["Piece", "group_by_size", "messages", "packs_by_number", "packs_by_size", "require_num_packs"]


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


def require_num_packs(owner: str, num_packs: int) -> None:
    """Refuse what is no number of packs.

    Raises:
        TypeError: If it is no whole number.
        ValueError: If it is negative.
    """
    if isinstance(num_packs, bool) or not isinstance(num_packs, (int, np.integer)):
        raise TypeError(f"{owner} requires num_packs to be a whole number of packs, got {num_packs!r}")
    if num_packs < 0:
        raise ValueError(f"{owner} requires num_packs >= 0, got {num_packs}; 0 does not pack")


def group_by_size(sizes: Sequence[int], bytes_per_pack: int) -> list[list[int]]:
    """Group items, in order, into packs that close once they are larger than the limit.

    Args:
        sizes: Size of each item in bytes.
        bytes_per_pack: The limit in bytes; 0 for no limit.

    Returns:
        Lists of indices into `sizes`; concatenated, they count from 0.

    Raises:
        ValueError: If `bytes_per_pack` is negative.
    """
    if bytes_per_pack < 0:
        raise ValueError(f"bytes_per_pack must be >= 0, got {bytes_per_pack}")
    if bytes_per_pack == 0:
        return [list(range(len(sizes)))]
    packs: list[list[int]] = []
    held = bytes_per_pack + 1  # the first item opens a pack
    for index, size in enumerate(sizes):
        if held > bytes_per_pack:
            packs.append([])
            held = 0
        packs[-1].append(index)
        held += size
    return packs


def packs_by_size(pieces: list[Piece], wire: np.dtype[Any], bytes_per_pack: int) -> list[list[Piece]]:
    """Group pieces, in order, into packs that close once they are larger than the limit."""
    sizes = [piece.count * wire.itemsize for piece in pieces]
    return [[pieces[at] for at in pack] for pack in group_by_size(sizes, bytes_per_pack)]


def packs_by_number(pieces: list[Piece], num_packs: int) -> list[list[Piece]]:
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


def messages(
    pack: list[Piece], keeps: list[bool], direct_count: int, pack_count: int, device: bool
) -> Iterator[tuple[bool, list[Piece]]]:
    """Cut a pack into messages: large pieces directly, runs of small ones through a pack buffer.

    Args:
        pack: The pieces.
        keeps: Whether a piece's result has the dtype in which it travels, so that it can be reduced in place.
        direct_count: From how many elements on a piece is large.
        pack_count: How many elements a pack buffer holds.
        device: Whether small pieces on both sides of a large one share a buffer: there are launches to save.
    """
    run: list[Piece] = []
    held = 0
    for piece, keep in zip(pack, keeps, strict=True):
        if keep and piece.count and (piece.count >= direct_count or len(pack) == 1):
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
