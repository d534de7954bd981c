"""Local work of rank 0, whose result or error all ranks get."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mpidist.strategy_parts import StrategyParts
from mpidist.transport.agreement.agreement import Call
from mpidist.transport.agreement.fingerprint import fingerprint_of
from mpidist.transport.group.raise_together import ErrorReport, raise_reported

__all__ = ["on_rank_0"]

_T = TypeVar("_T")


def on_rank_0(
    parts: StrategyParts, call: str, advice: str, work: Callable[[], _T], error: Exception | None = None
) -> _T:
    """Do work on rank 0, and return its result on all ranks. Collective: one small round, and two messages.

    Args:
        parts: The parts of the strategy.
        call: The name of the call.
        advice: Who makes the call, for the error of ranks that make another one.
        work: Returns what can be pickled.
        error: What is wrong on this rank, which then does no work.

    Raises:
        Exception: The error of the lowest rank that has one. On every rank.
    """
    group = parts.group
    result: _T | None = None
    try:
        if error is None and group.topology.rank == 0:
            result = work()
    except Exception as problem:  # of any kind: the other ranks must learn of it
        error = problem
    own = result, None if error is None else ErrorReport.of(error)
    timeout_seconds = parts.options.timeout_seconds
    with group.call(Call(call, fingerprint_of(call), lambda: {"advice": advice}, timeout_seconds=timeout_seconds)):
        everyone = group.agreement.all_gather_object(own)
    raise_reported(error, [report for _, report in everyone], group)
    found: _T = everyone[0][0]
    return found
