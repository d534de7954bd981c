"""Makes all ranks raise an exception that one rank raised in its local work, between two calls."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, final

from mpidist.errors import PeerFailedError
from mpidist.transport.agreement.agreement import Call
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.shared_errors import mark_shared
from mpidist.transport.text import name_ranks, text_of
from mpidist.transport.tracebacks import traceback_text

__all__ = ["ErrorReport", "LocalWork", "raise_reported"]


@final
class ErrorReport(NamedTuple):
    """A rank's exception, as the rank reports it: pickled, if unpickling restores its type and text, and as texts."""

    error: bytes | None
    text: str
    trace: str

    @classmethod
    def of(cls, error: Exception) -> ErrorReport:
        """Report an exception of this rank."""
        return cls(_pickled(error), text_of(error), traceback_text(error))


@final
class LocalWork(AbstractContextManager[None]):
    """A block whose end raises an exception of one rank on all ranks: `Strategy.raise_together`. Collective.

    Not made by a generator, as none can raise the `StopIteration` of another rank.

    Args:
        call: The name of the user's call that the block is a part of, for errors; equal on all ranks.
        what: What the block does, if `call` does not name it; equal on all ranks.
        advice: What to do if rank 0 alone makes the call.
    """

    def __init__(
        self, group: SyncGroup, call: str, timeout_seconds: float | None, what: str = "", advice: str = ""
    ) -> None:
        self._group, self._call, self._timeout_seconds = group, call, timeout_seconds
        self._what, self._advice = what, advice

    def __enter__(self) -> None:
        self._group.enter(self._call)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        group, what = self._group, self._what
        if error is not None and (not isinstance(error, Exception) or group.agreement.has_raised(error)):
            return
        own = None if error is None else ErrorReport.of(error)
        try:
            group.enter(self._call)
        except RuntimeError as closed:  # the block closed the strategy
            raise closed from error
        if own is not None:  # the other ranks learn here of an exception that has left a step in the block
            group.agreement.take_step_exit()

        def describe() -> dict[str, str]:
            return {"what": what, "advice": self._advice} | ({} if own is None else {"exception": own.text})

        fingerprint = group.agreement.fingerprint(self._call, what, lambda: {"what": what})
        call = Call(self._call, fingerprint, describe, timeout_seconds=self._timeout_seconds, details=what)
        reports: list[ErrorReport | None] = []
        with group.call(call):
            if group.agreement.all_reduce_or(own is not None):
                reports = group.agreement.all_gather_object(own)
        raise_reported(error, reports, group)


def raise_reported(own: Exception | None, reports: Sequence[ErrorReport | None], group: SyncGroup) -> None:
    """Raise the exception of the lowest rank that has one, on all ranks. Local.

    It has the type and text of that rank's, and that rank's traceback as the cause; it is a `PeerFailedError` with the
    text if the exception cannot be pickled.
    """
    failed = [(rank, report) for rank, report in enumerate(reports) if report is not None]
    if not failed:
        return
    rank, first = failed[0]
    if own is not None and rank == group.topology.rank:
        error = own
    else:
        others = f"; also {name_ranks(rank for rank, _ in failed[1:])} failed" if len(failed) > 1 else ""
        error = _unpickled(first.error) or PeerFailedError(f"rank {rank}: {first.text}")
        error.__cause__ = PeerFailedError(f"on rank {rank} ({group.topology.hostnames[rank]}){others}:\n{first.trace}")
    mark_shared(error, group.agreement.ranks)
    raise error


def _pickled(error: Exception) -> bytes | None:
    try:
        pickled = pickle.dumps(error)
        again: Any = pickle.loads(pickled)
        return pickled if type(again) is type(error) and str(again) == str(error) else None
    except Exception:  # whatever a user's class raises when pickled
        return None


def _unpickled(error: bytes | None) -> Exception | None:
    if error is None:
        return None
    try:
        again: Exception = pickle.loads(error)
    except Exception:  # for example, this rank does not have the class
        return None
    return again
