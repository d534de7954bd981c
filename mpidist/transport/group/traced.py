"""Traces the calls of a part of a program: `Strategy.trace`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from mpidist.transport.agreement.agreement import Call, SoloAgreement
from mpidist.transport.agreement.fingerprint import fingerprint_of
from mpidist.transport.failures.flight_recorder import FLIGHT_BYTES, FlightRecorder
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.trace.trace import Trace, begin_trace, end_trace

__all__ = ["traced"]

_BEGIN: Final = "trace()"
_END: Final = "the end of trace()"
_ALL_OR_NONE: Final = "all ranks leave `with strategy.trace():` by an exception, or none"


@contextmanager
def traced(
    group: SyncGroup, folder: str | os.PathLike[str], timeout_seconds: float | None, is_in_lock_step: bool
) -> Iterator[None]:
    """See `Strategy.trace`. `is_in_lock_step`: whether these are all ranks of the strategy."""
    text, error = "", None
    try:
        text = os.fspath(folder)
        if not is_in_lock_step:
            advice = "set MPIDIST_TRACE, for several ranks"
            raise RuntimeError(f"trace() with parameter servers, whose ranks make no calls together: {advice}")
        if group.trace is not None:
            advice = "leave this trace() out, or unset MPIDIST_TRACE if it is set"
            raise RuntimeError(f"trace(): the strategy is traced already, to {group.trace.path.parent}; {advice}")
    except Exception as problem:  # of any kind: the other ranks must learn of it
        error = problem
    with group.call(_call(_BEGIN, text, timeout_seconds, error)):
        trace = group.trace = _begin(group, Path(text))
    try:
        yield
        try:
            group.require_open(_END)
        except RuntimeError:  # the block closed the strategy
            return
        with group.call(_call(_END, text, timeout_seconds)):
            if group.membership is not None:
                group.membership.end_trace()
            else:
                end_trace(None, trace)
    finally:
        _stop(group, trace)


def _call(name: str, folder: str, timeout_seconds: float | None, error: Exception | None = None) -> Call:
    fields = {"folder": folder} | ({"advice": _ALL_OR_NONE} if name == _END else {})
    fingerprint = fingerprint_of((name, folder))
    return Call(name, fingerprint, lambda: fields, timeout_seconds=timeout_seconds, error=error, details=folder)


def _begin(group: SyncGroup, folder: Path) -> Trace:
    gather = group.agreement.all_gather_object
    if group.membership is not None:
        trace = group.membership.begin_trace(folder, gather)
    else:
        recorder = FlightRecorder(np.zeros(FLIGHT_BYTES, np.uint8))
        trace = begin_trace(None, folder, "alone", recorder, gather)
    if isinstance(group.agreement, SoloAgreement):
        group.agreement.recorder = trace.recorder
    return trace


def _stop(group: SyncGroup, trace: Trace) -> None:
    trace.end()
    group.trace = None  # but not that of the membership, which all ranks end together, at the latest in `close`
    if isinstance(group.agreement, SoloAgreement):
        group.agreement.recorder = None
