"""Writes the errors of ranks that did not make the same call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, final

from mpidist.errors import InvalidArgumentError, PeerFailedError
from mpidist.transport.agreement.agreement import CLOSE, END
from mpidist.transport.agreement.fingerprint import StepExit
from mpidist.transport.agreement.slow_ranks import WaitReport
from mpidist.transport.text import group_ranks, name_ranks

__all__ = [
    "CallReport",
    "have_same_kind_of_error",
    "is_step_left_by_some",
    "mismatch_error",
    "peer_left_error",
    "step_exit_error",
]

_MAX_LINES: Final = 8
_ALL_OR_NONE: Final = """\
  all ranks leave a step by an exception, or none: put what may fail on one rank into `with strategy.raise_together():`
  in the step, or catch the exception there and skip the batch on all ranks. The strategy is unusable until
  strategy.reset() is called on all ranks, each before the same step"""


@final
class CallReport(NamedTuple):
    """Report of a rank on its call where calls differ.

    Attributes:
        fields: The call's arguments, as name and text. All have a "call"; "advice" is what to do about a difference.
        posted: The fingerprint.
        notice: `StopNotice.own`.
    """

    fields: Mapping[str, str]
    is_last: bool
    posted: int
    notice: tuple[int, str]
    step_exit: StepExit | None
    waits: WaitReport

    @property
    def call(self) -> str:
        """The name of the call."""
        return self.fields["call"]


def is_step_left_by_some(reports: Sequence[CallReport]) -> bool:
    """Whether some ranks left more steps than others, one of them by an exception of its own, and all continue."""
    exits = [report.step_exit for report in reports]
    has_own = any(one is not None and one.is_own for one in exits)
    numbers = {0 if one is None else one.num_left for one in exits}
    return has_own and len(numbers) > 1 and not any(report.is_last for report in reports)


def step_exit_error(reports: Sequence[CallReport], sequence: int) -> InvalidArgumentError:
    """Make the error of ranks of which some left a step by an exception, to be raised on all of them."""
    groups: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        if report.step_exit is not None:
            groups.setdefault(f"left {report.step_exit}, and then called {report.call}", []).append(rank)
    for rank, report in enumerate(reports):
        if report.step_exit is None:
            groups.setdefault(f"left none, and called {report.call}", []).append(rank)
    who = "; ".join(f"{name_ranks(ranks)} {text}" for text, ranks in groups.items())
    return InvalidArgumentError(f"call {sequence}: {who}, so nothing was sent\n{_ALL_OR_NONE}")


def peer_left_error(reports: Sequence[CallReport], sequence: int) -> PeerFailedError:
    """Make the error of ranks that call while other ranks leave the group."""
    leavers = [rank for rank, report in enumerate(reports) if report.is_last]
    others = [rank for rank, report in enumerate(reports) if not report.is_last]
    ways = frozenset(reports[rank].call for rank in leavers)
    how = {frozenset({CLOSE}): "closed the strategy", frozenset({END}): "ended the program"}
    why = dict.fromkeys(reports[rank].fields.get("exception", "") for rank in leavers)
    causes = [f"because of an exception: {'; '.join(filter(None, why))}"] if any(why) else []
    exits = dict.fromkeys(str(one) for rank in leavers if (one := reports[rank].step_exit) is not None)
    causes += [f"after an exception was caught that had left {'; '.join(exits)}"] if exits else []
    calls = sorted({reports[rank].call for rank in others})
    advice = _advice_if_chief_alone([report.fields for report in reports])
    return PeerFailedError(
        f"{name_ranks(leavers)} {how.get(ways, 'closed the strategy or ended the program')}"
        f"{''.join(f', {cause},' for cause in causes)} while {name_ranks(others)} called "
        f"{' and '.join(calls)} (call {sequence}). Every rank must make the same calls; "
        f"{advice or f'see what the program did differently on {name_ranks(leavers)}'}"
    )


def have_same_kind_of_error(reports: Sequence[CallReport]) -> bool:
    """Whether every rank has an error of its own in one call, and all these errors are of one type."""
    kinds = {report.fields.get("error", "").partition(":")[0] for report in reports}
    return len(kinds) == 1 and "" not in kinds and len({report.call for report in reports}) == 1


def mismatch_error(everyone: Sequence[Mapping[str, str]], sequence: int) -> InvalidArgumentError:
    """Make the error of ranks that did not pass the same `CallReport.fields`, to be raised on all of them.

    The text has only the fields that differ, each with the ranks that passed the same in one group. The last line is
    the advice that all ranks have, if they have one.
    """
    calls = {fields["call"] for fields in everyone}
    names = list(dict.fromkeys(name for fields in everyone for name in fields if name != "advice"))
    what = "the ranks did not pass the same arguments"
    advice = {fields.get("advice", "") for fields in everyone}
    if "error" in names:  # a rank that has an error describes nothing else, so other fields would only seem to differ
        names = ["call", "error", "line"]
        what = f"an error on {name_ranks([rank for rank, fields in enumerate(everyone) if 'error' in fields])}"
    elif len(calls) > 1:  # arguments of different calls cannot be compared; "exception" says why a rank makes another
        names = ["call", "exception", "line"]
        advice = {_advice_if_chief_alone(everyone)}
    head = f"{calls.pop()} (call {sequence}): " if len(calls) == 1 else f"call {sequence}: "
    lines = [f"{head}{what}, so nothing was sent"]
    for name in names:
        groups = group_ranks({rank: fields.get(name, "-") for rank, fields in enumerate(everyone)})
        if len(groups) > 1:
            if len(lines) > _MAX_LINES:
                lines.append("  ... and more")
                break
            lines.append(f"  {name}: " + "; ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in groups.items()))
    if len(advice) == 1:
        lines += [f"  {text}" for text in advice if text]
    return InvalidArgumentError("\n".join(lines))


def _advice_if_chief_alone(everyone: Sequence[Mapping[str, str]]) -> str:
    """Return advice on a call that rank 0 alone makes; "" if another rank makes it, too, such as along another axis."""
    chief = everyone[0]
    method, *of_others = (fields["call"].partition(" ")[0] for fields in everyone)
    if method in of_others or chief["call"] in (CLOSE, END):
        return ""
    return chief.get("advice") or "all ranks make the call of rank 0, or none: is it below `if strategy.is_chief:`?"
