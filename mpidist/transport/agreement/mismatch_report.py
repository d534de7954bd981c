"""Writes the errors of ranks that did not make the same call."""

from __future__ import annotations

from typing import Final

from mpidist.errors import InvalidArgumentError, PeerFailedError
from mpidist.transport.agreement.agreement import CLOSE, END
from mpidist.transport.text import name_ranks

__all__ = ["mismatch_error", "have_same_kind_of_error", "peer_left_error"]

_MAX_LINES: Final = 8


def peer_left_error(everyone: list[dict[str, str]], leavers: list[int], sequence: int) -> PeerFailedError:
    """Make the error of ranks that call while other ranks leave the group."""
    others = [rank for rank in range(len(everyone)) if rank not in leavers]
    calls = sorted({everyone[rank]["call"] for rank in others})
    ways = {everyone[rank]["call"] for rank in leavers}
    how = {frozenset({CLOSE}): "closed the strategy", frozenset({END}): "ended the program"}
    why = dict.fromkeys(everyone[rank]["exception"] for rank in leavers if "exception" in everyone[rank])
    because = f", because of an exception: {'; '.join(why)}," if why else ""
    return PeerFailedError(
        f"{name_ranks(leavers)} {how.get(frozenset(ways), 'closed the strategy or ended the program')}"
        f"{because} while {name_ranks(others)} called "
        f"{' and '.join(calls)} (call {sequence}). Every rank must make the same calls; see what the program did "
        f"differently on {name_ranks(leavers)}"
    )


def have_same_kind_of_error(everyone: list[dict[str, str]]) -> bool:
    """Whether every rank has an error of its own in one call, and all these errors are of one type."""
    kinds = {fields.get("error", "").partition(":")[0] for fields in everyone}
    return len(kinds) == 1 and "" not in kinds and len({fields["call"] for fields in everyone}) == 1


def mismatch_error(everyone: list[dict[str, str]], sequence: int) -> InvalidArgumentError:
    """Make the error of ranks that did not pass the same arguments, to be raised on all of them.

    The text has only the fields that differ, each with the ranks that passed the same in one group.

    Args:
        everyone: Each rank's fields, by name. All have a "call". A field "advice" says what people can do about the
            difference; it is the last line, if all ranks have the same.
        sequence: The number of the call.
    """
    calls = {fields["call"] for fields in everyone}
    names = list(dict.fromkeys(name for fields in everyone for name in fields if name != "advice"))
    what = "the ranks did not pass the same arguments"
    if "error" in names:  # a rank that has an error describes nothing else, so other fields would only seem to differ
        names = ["call", "error"]
        what = f"an error on {name_ranks([rank for rank, fields in enumerate(everyone) if 'error' in fields])}"
    elif len(calls) > 1:  # arguments of different calls cannot be compared; "exception" says why a rank makes another
        names = ["call", "exception"]
    head = f"{calls.pop()} (call {sequence}): " if len(calls) == 1 else f"call {sequence}: "
    lines = [f"{head}{what}, so nothing was sent"]
    for name in names:
        groups: dict[str, list[int]] = {}
        for rank, fields in enumerate(everyone):
            groups.setdefault(fields.get(name, "-"), []).append(rank)
        if len(groups) > 1:
            if len(lines) > _MAX_LINES:
                lines.append("  ... and more")
                break
            lines.append(f"  {name}: " + "; ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in groups.items()))
    advice = {fields.get("advice", "") for fields in everyone}
    if len(advice) == 1:
        lines += [f"  {text}" for text in advice if text]
    return InvalidArgumentError("\n".join(lines))
