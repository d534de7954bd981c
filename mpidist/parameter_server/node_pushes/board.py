"""What each worker of a node writes in shared memory for the others, about the pushes that they make together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.errors import UnavailableError
from mpidist.transport import LINE_BYTES, ServiceGroup, fingerprint_of, mark_shared, name_ranks

__all__ = ["BOARD_BYTES", "Board", "Told", "boards_of"]

Array = np.ndarray[Any, Any]

_CALL_BYTES: Final = 16 << 10
_FAILURE_BYTES: Final = 2 << 10
BOARD_BYTES: Final = LINE_BYTES + _CALL_BYTES + _FAILURE_BYTES
# Places of the words, each of which its worker alone writes. The first ones are numbers of pushes.
_ARRIVED, _DONE, _MADE, _FAILED, _STATE, _FINGERPRINT, _PLACE, _LENGTHS = range(8)
_ACTIVE, _OUT = 0, -1  # or the number of the call of all workers that a worker waits in
_CALL, _FAILURE = range(2)  # texts


@final
class Told(NamedTuple):
    """What a worker tells of a push, so that the others can compare it. `of` makes one.

    Attributes:
        fingerprint: A digest of all fields.
        text: The fields.
    """

    fingerprint: int
    text: bytes

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> Told:
        """Tell some fields, by name."""
        lines = [f"{name}\t{value}".replace("\n", " ") for name, value in fields.items()]
        return cls(fingerprint_of(lines), "\n".join(lines).encode())


@final
class Board:
    """The board of one worker, as any worker of its node sees it.

    Args:
        rank: The worker's rank.
        part: The worker's part of the node's memory, which begins with the board: `BOARD_BYTES`, zero at first.
        fence: The function that orders loads and stores, if one is needed.

    Attributes:
        rank: As given.
        part: As given.
    """

    def __init__(self, rank: int, part: Array, fence: Callable[[], None] | None) -> None:
        self.rank, self.part = rank, part
        self._words = part[:LINE_BYTES].data.cast("q")
        end = LINE_BYTES + _CALL_BYTES
        self._texts = part[LINE_BYTES:end], part[end:BOARD_BYTES]
        self._fence = fence

    def has_arrived(self, number: int) -> bool:
        """Whether the worker takes part in a push."""
        return self._is_seen(self._words[_ARRIVED] == number)

    def has_done(self, number: int) -> bool:
        """Whether the worker reads and writes no memory of others for a push any more."""
        return self._is_seen(self._words[_DONE] >= number)

    def has_made(self, number: int) -> bool:
        """Whether the servers have made a push that this worker has sent, or have failed to."""
        return self._is_seen(self._words[_MADE] >= number)

    def is_absent(self, num_meetings: int) -> bool:
        """Whether the worker begins no push now: it has ended, or waits in a call of all workers.

        Args:
            num_meetings: How many such calls the asking worker has made. In those the worker waits no more.
        """
        state = self._words[_STATE]
        return self._is_seen(state == _OUT or state > num_meetings)

    @property
    def has_ended(self) -> bool:
        """Whether the worker begins no push any more."""
        return self._is_seen(self._words[_STATE] == _OUT)

    @property
    def place(self) -> int:
        """Where in the worker's part its data begins."""
        return self._words[_PLACE]

    @property
    def fingerprint(self) -> int:
        """A digest of the fields of the worker's last push."""
        return self._words[_FINGERPRINT]

    @property
    def fields(self) -> dict[str, str]:
        """What the worker told with its last push, by name; the first ones, if there are very many."""
        pairs = (line.partition("\t") for line in self._text(_CALL).split("\n"))
        return {name: value for name, _, value in pairs}

    def failure_of(self, number: int) -> str | None:
        """Return why a push that this worker has sent has failed; `None` if it has not."""
        return self._text(_FAILURE) if self._words[_FAILED] == number else None

    def arrive(self, number: int, told: Told, place: int) -> None:
        """Tell that this worker takes part in a push. Its data lies in `place`."""
        self._write_text(_CALL, told.text)
        self._words[_FINGERPRINT], self._words[_PLACE] = told.fingerprint, place
        self._write(_ARRIVED, number)

    def finish(self, number: int) -> None:
        """Tell that this worker needs no memory of others any more, for a push."""
        self._write(_DONE, number)

    def make(self, number: int, failure: str | None) -> None:
        """Tell that the servers have made a push which this worker has sent, or why not."""
        if failure is not None:
            self._write_text(_FAILURE, failure.encode())
            self._words[_FAILED] = number
        self._write(_MADE, number)

    def rest(self, meeting: int) -> None:
        """Tell that this worker waits in a call of all workers, the first, second, ... one, and pushes nothing."""
        self._write(_STATE, meeting)

    def go_on(self) -> None:
        """Tell that this worker has waited."""
        self._write(_STATE, _ACTIVE)

    def end(self) -> None:
        """Tell that this worker pushes nothing any more."""
        self._write(_STATE, _OUT)

    def _is_seen(self, is_so: bool) -> bool:
        """What its worker wrote before a word that is so, is seen after this call."""
        if is_so and self._fence is not None:
            self._fence()
        return is_so

    def _write(self, place: int, number: int) -> None:
        if self._fence is not None:
            self._fence()
        self._words[place] = number

    def _text(self, which: int) -> str:
        return self._texts[which][: self._words[_LENGTHS + which]].tobytes().decode(errors="replace")

    def _write_text(self, which: int, text: bytes) -> None:
        data = np.frombuffer(text[: self._texts[which].size], np.uint8)
        self._texts[which][: data.size] = data
        self._words[_LENGTHS + which] = data.size


def boards_of(group: ServiceGroup, workers: Sequence[int]) -> list[Board]:
    """Return the boards of the workers of this rank's node, in the order of the workers. Collective over the group.

    Args:
        group: The workers and servers.
        workers: Their ranks.

    Returns:
        The boards; none where the node has one worker, which pushes alone.

    Raises:
        UnavailableError: If the workers of some node share no memory. On every rank.
    """
    topology, arena = group.topology, group.arena
    node = topology.nodes[topology.node]
    here = [worker for worker in workers if worker in node]
    without = group.comm.allgather(arena is None and len(here) > 1)
    if any(without):
        group.free()
        at = name_ranks(rank for rank, is_without in enumerate(without) if is_without)
        error = UnavailableError(
            f"aggregate_in_node=True needs shared memory on each node, and {at} have none: MPIDIST_TRANSPORT=mpi is "
            "set, or there is too little (`python -m mpidist doctor` shows it). Provide some, or leave the argument out"
        )
        mark_shared(error, group.ranks)
        raise error
    if arena is None or len(here) < 2:
        return []
    return [Board(rank, arena.parts[node.index(rank)], arena.fence) for rank in here]
