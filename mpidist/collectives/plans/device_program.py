"""Messages of device memory of one plan, and lists of a repeated call's arrays for kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from operator import is_not
from typing import Any, final

import numpy as np

from mpidist.collectives.arguments.operands import Spec
from mpidist.collectives.plans.plan import Message, Piece
from mpidist.collectives.plans.reduce_algorithm import Reduce
from mpidist.transport.gpu.compiled import copier
from mpidist.transport.gpu.copy_table import ArrayList
from mpidist.transport.group.levels import Levels

__all__ = ["DeviceMessages", "DeviceProgram"]


@final
class DeviceMessages:
    """The messages of device memory of one part of a plan, all with the same `reduce`."""

    def __init__(
        self,
        messages: Sequence[Message],
        specs: Sequence[Spec],
        result_dtypes: Sequence[np.dtype[Any]],
        reduce: Reduce,
    ) -> None:
        self.messages = [message for message in messages if message.device]
        self._specs, self._result_dtypes, self._reduce = specs, result_dtypes, reduce
        self._direct = [message for message in self.messages if message.is_direct]
        self._packed = [(its, _Pieces(its.pieces, specs)) for its in self.messages if not its.is_direct]
        self._pieces = self._pieces_of(self._direct)
        divisors = dict.fromkeys(message.divide_by for message in self._direct if message.divide_by != 1)
        self._divided = {by: self._pieces_of(its for its in self._direct if its.divide_by == by) for by in divisors}
        # Without a kernel for some dtypes, CuPy copies array by array.
        self._have_kernels = all(copier(*copy) for message, _ in self._packed for copy in self._copies(message))

    def kernels(self, levels: Levels) -> set[str]:
        """Return the kernels that the messages may need on some rank. Local, equal on all ranks."""
        needed: set[str] = set()
        for message in self.messages:
            num = len(self._direct if message.is_direct else message.pieces)
            needed |= levels.kernels_for(message.wire, message.half, message.reduction, self._copies(message), num)
        return needed

    def reduce(self, arrays: Sequence[Any], results: Sequence[Any], levels: Levels, program: DeviceProgram) -> None:
        """Reduce the messages. Launches work, and waits for nothing.

        Besides the reductions it launches one copy of all direct pieces of a dtype to their results, a pack and an
        unpack for each message with several pieces, and one division of all direct pieces of a dtype.
        """
        kernels, reduce = levels.kernels, self._reduce
        assert kernels is not None, "the levels for device memory have kernels"
        if not self._have_kernels:
            program = DeviceProgram()
        moved = program.moved(self._pieces, arrays, results)
        if moved is not None:
            with levels.packing():  # a piece of an array that is not contiguous is copied here, too
                kernels.copy(program.of(moved, arrays), program.of(moved, results, True))
        if levels.world.size > 1:
            for message, part in zip(self._direct, self._pieces.of(results), strict=True):
                reduce(levels.compressed(message.half), part.reshape(-1), message.reduction)
        for message, pieces in self._packed:
            with levels.packing():
                buffer = levels.pack_buffer(message.count, message.wire)
                kernels.pack(program.of(pieces, arrays), buffer, message.is_compressed, message.layout)
            reduce(levels.compressed(message.half), buffer, message.reduction)
            with levels.unpacking():
                kernels.unpack(buffer, program.of(pieces, results, True), message.divide_by, message.layout)
        for divide_by, pieces in self._divided.items():
            mine = program.of(pieces, results, True)
            with levels.unpacking():
                kernels.copy(mine, mine, divide_by)

    def _copies(self, message: Message) -> list[tuple[np.dtype[Any], np.dtype[Any], bool]]:
        wire, divides = message.wire, message.divide_by != 1
        if message.is_direct:
            return [(wire, wire, False), (wire, wire, divides)]
        copies = [(self._specs[piece.index].dtype, wire, False) for piece in message.pieces]
        return copies + [(wire, self._result_dtypes[piece.index], divides) for piece in message.pieces]

    def _pieces_of(self, direct: Iterable[Message]) -> _Pieces:
        return _Pieces([message.pieces[0] for message in direct], self._specs)


@final
class DeviceProgram:
    """Lists of a call's arrays for kernels; a repeated call makes them once. Keeps no array.

    `is_repeated`: the call's arrays are contiguous and aligned, and have the same addresses each time.
    """

    def __init__(self, is_repeated: bool = False) -> None:
        self._is_repeated = is_repeated
        self._found: dict[Any, Any] = {}

    def of(self, pieces: _Pieces, arrays: Sequence[Any], are_results: bool = False) -> list[Any] | ArrayList:
        """Return pieces of the call's values, or results, as kernels take them; what is copied is on the stream."""
        if not self._is_repeated:
            return pieces.of(arrays)
        key = pieces, are_results
        if key not in self._found:
            self._found[key] = ArrayList.of(pieces.of(arrays))
        found: ArrayList = self._found[key]
        return found

    def moved(self, pieces: _Pieces, arrays: Sequence[Any], results: Sequence[Any]) -> _Pieces | None:
        """Return those of the pieces that lie elsewhere than their results; `None` for none."""
        if pieces not in self._found:
            self._found[pieces] = pieces.moved(arrays, results)
        moved: _Pieces | None = self._found[pieces]
        return moved


@final
class _Pieces:
    """Pieces of arrays. Most are whole arrays, of which no view is made."""

    def __init__(self, pieces: Sequence[Piece], specs: Sequence[Spec]) -> None:
        self._all, self._specs = pieces, specs
        self._indices = [piece.index for piece in pieces]
        is_cut = [piece.count != specs[piece.index].num_elements for piece in pieces]
        self._cuts = [(at, piece.start, piece.stop) for at, piece in enumerate(pieces) if is_cut[at]]

    def moved(self, arrays: Sequence[Any], results: Sequence[Any]) -> _Pieces | None:
        """Return the pieces of arrays that are not their own results; `None` for none."""
        are_moved = list(map(is_not, self._whole(arrays), self._whole(results)))
        if all(are_moved):
            return self if are_moved else None
        return _Pieces(list(compress(self._all, are_moved)), self._specs) if any(are_moved) else None

    def of(self, arrays: Sequence[Any]) -> list[Any]:
        """Take the pieces. Those of an array that is not contiguous are copied on the current stream."""
        parts = self._whole(arrays)
        for at, start, stop in self._cuts:
            parts[at] = parts[at].reshape(-1)[start:stop]
        return parts

    def _whole(self, arrays: Sequence[Any]) -> list[Any]:
        return [arrays[index] for index in self._indices]
