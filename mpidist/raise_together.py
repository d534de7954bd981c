"""One rank's exception becomes everybody's, where ranks do work of their own between two calls."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

from mpidist.errors import PeerFailedError
from mpidist.transport.agreement import Joining
from mpidist.transport.ranks import name_ranks
from mpidist.transport.sync_group import SyncGroup
from mpidist.transport.texts import text_of

__all__ = ["raise_together"]


@final
class _Report(NamedTuple):
    """What a rank tells of its exception."""

    error: bytes | None  # pickled, if it comes out of that as it went in
    text: str
    trace: str


@contextmanager
def raise_together(group: SyncGroup, what: str, timeout_seconds: float | None) -> Iterator[None]:
    """See `Strategy.raise_together`."""
    group.enter("raise_together")
    error, own = None, None
    try:
        yield
    except Exception as problem:
        if group.has_raised(problem):
            raise
        error, own = problem, _report(problem)
    try:
        group.enter("raise_together")
    except RuntimeError as closed:  # in the block
        raise closed from error

    def describe() -> dict[str, str]:
        return {"what": what, "exception": "none" if own is None else own.text}

    fingerprint = group.fingerprint("raise_together", what, lambda: {"what": what})
    reports: list[_Report | None] = []
    with group.moving():
        group.agree(Joining("raise_together", fingerprint, describe, timeout_seconds, details=what))
        if group.any_of(own is not None):
            reports = group.exchange(own)
    failed = [rank for rank, its in enumerate(reports) if its is not None]
    if failed:
        first = reports[failed[0]]
        assert first is not None
        _raise(error if failed[0] == group.topology.rank else None, first, failed, group.topology.hostnames)


def _raise(own: Exception | None, first: _Report, failed: list[int], hostnames: tuple[str, ...]) -> None:
    error, rank = own, failed[0]
    if error is None:
        others = f"; also {name_ranks(failed[1:])} failed" if len(failed) > 1 else ""
        cause = PeerFailedError(f"on rank {rank} ({hostnames[rank]}){others}:\n{first.trace}")
        error = _unpickled(first.error) or PeerFailedError(f"rank {rank}: {first.text}")
        error.__cause__ = cause
    vars(error)["raised_on_all_ranks"] = True  # printing it once will do
    raise error


def _report(error: Exception) -> _Report:
    return _Report(_pickled(error), text_of(error), "".join(traceback.format_exception(error)))


def _pickled(error: Exception) -> bytes | None:
    try:
        pickled = pickle.dumps(error)
        again: Any = pickle.loads(pickled)
        return pickled if type(again) is type(error) and str(again) == str(error) else None
    except Exception:  # whatever a class of somebody else's raises when it is copied, or read
        return None


def _unpickled(error: bytes | None) -> Exception | None:
    if error is None:
        return None
    try:
        again: Exception = pickle.loads(error)
    except Exception:  # of a class that this rank does not have, for example
        return None
    return again
