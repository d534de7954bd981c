"""The pushes that the workers of a node make together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import numpy as np

from mpidist.errors import InvalidArgumentError, PeerFailedError, UnavailableError
from mpidist.parameter_server.attendance import differences_of
from mpidist.parameter_server.messages import GRACE_SECONDS, Location, Push
from mpidist.parameter_server.node_pushes.board import Board, Told
from mpidist.parameter_server.node_pushes.layout import Layout
from mpidist.transport import AwaitedPeers, ServiceGroup, poll, repeat_of, size_text, text_of

__all__ = ["NodePushes"]

logger = logging.getLogger("mpidist.parameter_server")

Array = np.ndarray[Any, Any]

_MAX_LAYOUTS: Final = 64
_MAX_LINES: Final = 8
_CALL: Final = "push()"
_MEETING: Final = 1 << 32  # pushes between two calls of all workers have fewer numbers


@final
class NodePushes:
    """One worker's part in the pushes of its node.

    Each worker copies what it pushes into shared memory, whole, and says so on its board. From then on its part counts:
    a worker that is lost later leaves nothing out. All add one shard each, into the memory of the first one, the leader
    of this push, which sends the sum. The others go on meanwhile, and wait for the leader before their next request.

    A worker that waits in a call of all workers, or has ended, takes no part. The others count their pushes from such a
    call on, and so all of them agree on the number of a push.

    Args:
        group: The workers and servers.
        awaited: What the watchdog of `group` asks.
        boards: Those of all workers of the node, in order.
        goes_on: Whether the others go on without a worker that is lost.

    Attributes:
        broken: Why this worker can push no more, or `None`.
    """

    def __init__(self, group: ServiceGroup, awaited: AwaitedPeers, boards: Sequence[Board], goes_on: bool) -> None:
        self.broken: Exception | None = None
        self._group, self._awaited, self._boards, self._goes_on = group, awaited, boards, goes_on
        self._own = next(board for board in boards if board.rank == group.topology.rank)
        self._others = [board for board in boards if board is not self._own]
        self._number = 0  # that the next push is one more than
        self._last = 0  # the number of the last push
        self._taking_part: list[Board] = []  # in the last push
        self._is_settled = True  # whether this worker has waited for the leader of the last push
        self._failure: Exception | None = None  # of what this worker has sent
        self._memory, self._place = np.empty(0, np.uint8), 0
        self._layouts: dict[tuple[tuple[int, ...], tuple[int, ...], str], tuple[Layout, Told]] = {}

    def push(self, make: Callable[[], Push], send: Callable[[Push], None]) -> None:
        """Push with the other workers of the node. Collective over those that neither wait nor have ended.

        Args:
            make: Returns what this worker pushes. What it raises, all of them raise.
            send: Makes a push on the servers, and waits for its end. Called on one worker.
        """
        make = self._settled(make)
        if self.broken is not None:
            raise repeat_of(self.broken)
        self._group.enter(_CALL)
        entry = self._group.recorder.begin(0, _CALL, "with the workers of this node")
        try:
            self._wait("the memory of the last push", self._readers)
            refusal = self._push(make, send)
        except BaseException as error:
            self._group.recorder.fail()
            self._break(error)
            raise
        self._group.recorder.end(entry)
        if refusal is not None:  # all have learnt of it, and may push again
            raise refusal

    def settle(self) -> None:
        """Wait until the last push of the node is made.

        Raises:
            RuntimeError: If the servers have failed to.
        """
        if self._is_settled:
            return
        leader, number = self._taking_part[0], self._last
        if leader is self._own:
            self._is_settled = True
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            return
        self._wait(
            f"{_CALL} of the node",
            lambda: [] if self._is_lost(leader) or leader.has_made(number) else [leader],
            GRACE_SECONDS,
        )
        self._is_settled = True
        why = leader.failure_of(number)
        if why is not None:
            kind = UnavailableError if why.startswith(UnavailableError.__name__) else RuntimeError
            raise kind(f"{_CALL} of the node, which rank {leader.rank} sent, has failed: {why}")
        if not leader.has_made(number):
            text = f"rank {leader.rank} was lost while it pushed for its node: the push may be made, or not"
            if not self._goes_on:
                raise PeerFailedError(text)
            logger.warning("mpidist: %s", text)

    def rest(self) -> None:
        """Begin a call of all workers: nobody waits for this one meanwhile. Local."""
        if self.broken is None:  # else nobody waits for this one any more
            self._own.rest(self._num_meetings + 1)

    def go_on(self, failure: BaseException | None) -> None:
        """End a call of all workers. Local.

        Args:
            failure: Why not all workers came; `None` if they did. If not, nobody knows which pushes the others made
                meanwhile, and this worker can push no more.
        """
        if self.broken is not None:
            return
        if failure is not None:
            self._break(failure)
            return
        self._number = (self._num_meetings + 1) * _MEETING
        self._own.go_on()

    def end(self) -> None:
        """Push nothing any more. Local."""
        self._own.end()

    def _settled(self, make: Callable[[], Push]) -> Callable[[], Push]:
        """Settle, and return what to make. If the last push has failed, this one fails, too: all count it alike."""
        try:
            self.settle()
        except Exception as error:  # of any kind, as a server has failed
            if not self._is_settled:
                raise
            failure = error
        else:
            return make

        def fail() -> Push:
            raise failure

        return fail

    def _push(self, make: Callable[[], Push], send: Callable[[Push], None]) -> Exception | None:
        """Push with the others, or return why not."""
        error: Exception | None = None
        try:
            push = make()
            layout, told = self._known(push)
            self._take_memory(layout.nbytes(push))
            layout.write(push, self._memory)
        except Exception as problem:  # of any kind: the other workers must learn of it
            error, told = problem, Told.of({"error": text_of(problem)})
        self._last = self._number = self._number + 1
        self._own.arrive(self._last, told, self._place)
        self._wait(_CALL, self._others_to_come)
        self._taking_part = [board for board in self._boards if board.has_arrived(self._last)]
        if len({board.fingerprint for board in self._taking_part}) > 1:
            error = error or self._difference()
        if error is not None:
            self._own.finish(self._last)
            self._is_settled = True
            return error
        self._is_settled = False
        self._add_and_send(layout, push, send)
        return None

    def _add_and_send(self, layout: Layout, push: Push, send: Callable[[Push], None]) -> None:
        number, parts = self._last, [board.part[board.place :] for board in self._taking_part]
        layout.add(parts, self._taking_part.index(self._own), parts[0])
        if self._taking_part[0] is not self._own:
            self._own.finish(number)
            return
        self._wait(_CALL, self._readers)
        lost = [shard for shard, board in enumerate(self._taking_part) if shard and not board.has_done(number)]
        if lost:  # and nobody knows how much of their shards they have added
            own = np.empty(layout.nbytes(push), np.uint8)
            layout.write(push, own)
            for shard in lost:
                layout.add([own, *parts[1:]], shard, parts[0])
        rows = layout.join_rows(parts)
        self._own.finish(number)
        try:
            send(push._replace(values=layout.sums(parts[0]), rows=rows))
        except Exception as error:  # of any kind: every worker of the node raises it at its next request
            self._failure = error
        self._own.make(number, None if self._failure is None else text_of(self._failure))

    def _others_to_come(self) -> list[Board]:
        return [board for board in self._others if not self._is_absent(board) and not board.has_arrived(self._last)]

    def _readers(self) -> list[Board]:
        """List those that still read or write memory of others for the last push."""
        return [
            board
            for board in self._taking_part
            if board is not self._own and not self._is_lost(board) and not board.has_done(self._last)
        ]

    def _is_absent(self, board: Board) -> bool:
        return board.is_absent(self._num_meetings) or board.rank in self._awaited.lost

    @property
    def _num_meetings(self) -> int:
        return self._number // _MEETING

    def _is_lost(self, board: Board) -> bool:
        return board.has_ended or board.rank in self._awaited.lost

    def _difference(self) -> InvalidArgumentError:
        lines = differences_of({board.rank: board.fields for board in self._taking_part})[:_MAX_LINES]
        is_error = any("error" in board.fields for board in self._taking_part)
        what = "an error on a worker" if is_error else "the workers of a node did not push the same"
        return InvalidArgumentError("\n".join([f"{_CALL}: {what}, so nothing was sent", *lines]))

    def _known(self, push: Push) -> tuple[Layout, Told]:
        """Return how a push lies in memory, and what to tell of it."""
        rows = [change.location for change in push.rows]
        key = tuple(at.key for at in push.locations), tuple(at.key for at in rows), push.update
        known = self._layouts.get(key)
        if known is None:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            fields = {"update": push.update}
            fields |= {f"array {number}": _text_of(at) for number, at in enumerate(push.locations)}
            fields |= {f"rows {number}": _text_of(at) for number, at in enumerate(rows)}
            known = self._layouts[key] = Layout(push.locations, rows), Told.of(fields)
        return known

    def _take_memory(self, nbytes: int) -> None:
        """Take shared memory for a push, where that of the last one is too small."""
        if self._memory.size >= nbytes:
            return
        arena, more = self._group.arena, self._memory.size // 2  # rows may grow, and what was taken is not given back
        for size in (nbytes + more, nbytes):
            place = None if arena is None else arena.take(size)
            if place is not None:
                self._memory, self._place = self._own.part[place : place + size], place
                return
        raise UnavailableError(f"{_CALL} needs {size_text(nbytes)} of shared memory, and there is too little")

    def _wait(self, what: str, late: Callable[[], list[Board]], more_seconds: float = 0.0) -> None:
        """Wait until no worker is late any more."""
        awaited, group = self._awaited, self._group

        def is_over() -> bool:
            awaited.ranks = [board.rank for board in late()]
            return not awaited.ranks

        awaited.what, awaited.serving, awaited.is_ended_by_program = what, None, False
        awaited.timeout = group.timeout_seconds + more_seconds if group.timeout_seconds else None
        group.watchdog.begin()
        poll(is_over, group.watchdog.check_peers)

    def _break(self, error: BaseException) -> None:
        """Push nothing any more, because of an error in the middle of a push, and let nobody wait for this worker."""
        self.broken = error if isinstance(error, Exception) else RuntimeError(f"{_CALL} was interrupted")
        self._is_settled = True
        self._own.make(self._last, text_of(error))
        self._own.end()


def _text_of(location: Location) -> str:
    return f"{location.name!r} {location.dtype.name}{list(location.shape)}, variable {location.key}"
