"""What ranks are told when they did not make the same call."""

from __future__ import annotations

from mpidist.errors import PeerFailedError
from mpidist.transport.ranks import name_ranks

__all__ = ["peer_left", "table_of"]


def peer_left(everyone: list[dict[str, str]], leavers: list[int], sequence: int) -> PeerFailedError:
    """Make the error of those who call while others leave."""
    others = [rank for rank in range(len(everyone)) if rank not in leavers]
    calls = sorted({everyone[rank]["call"] for rank in others})
    return PeerFailedError(
        f"{name_ranks(leavers)} closed the strategy or ended the program while {name_ranks(others)} called "
        f"{' and '.join(calls)} (call {sequence}). Every rank must make the same calls; see what the program did "
        f"differently on {name_ranks(leavers)}"
    )


def table_of(everyone: list[dict[str, str]], sequence: int) -> str:
    """Lay out what the ranks passed: only the fields that differ, ranks that agree in one group."""
    calls = {fields["call"] for fields in everyone}
    names = list(dict.fromkeys(name for fields in everyone for name in fields))
    if "error" in names:  # then that is what differs; a rank that has one says nothing else
        names = ["call", "error"]
    elif len(calls) > 1:  # what different calls pass says nothing; but a rank may say why it makes another one
        names = ["call", "exception"]
    head = f"{calls.pop()} (call {sequence}): " if len(calls) == 1 else f"call {sequence}: "
    lines = [head + "the ranks did not pass the same arguments, so nothing was sent"]
    for name in names:
        groups: dict[str, list[int]] = {}
        for rank, fields in enumerate(everyone):
            groups.setdefault(fields.get(name, "-"), []).append(rank)
        if len(groups) > 1:
            lines.append(f"  {name}: " + "; ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in groups.items()))
        if len(lines) > 8:
            lines.append("  ... and more")
            break
    return "\n".join(lines)
