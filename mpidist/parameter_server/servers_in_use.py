"""Whose servers this worker uses: a server serves one strategy at a time, until all of its workers have closed it."""

from __future__ import annotations

from collections.abc import Iterable
from threading import get_ident
from typing import Final, NamedTuple, final

from mpidist.transport.group.service_group import ServiceGroup
from mpidist.transport.text import name_ranks

__all__ = ["begin_use", "require_unused"]


@final
class _Use(NamedTuple):
    group: ServiceGroup
    servers: frozenset[int]  # as they are numbered in the whole job
    thread: int


_uses: Final[list[_Use]] = []


def begin_use(call: str, group: ServiceGroup, servers: Iterable[int]) -> None:
    """Require that the servers of a group serve no other strategy that this thread uses, and remember the group. Local.

    Args:
        call: The name of the call, for people.
        group: The workers and servers.
        servers: The ranks of the servers in the group.

    Raises:
        RuntimeError: If this thread uses another strategy with one of the servers, and has not closed it: the server is
            in `serve()` of that strategy, and this worker would wait for it for ever.
    """
    _uses[:] = [use for use in _uses if use.group.is_open]
    if not any(use.group is group for use in _uses):
        own = group.in_world(servers)
        require_unused(call, own)
        _uses.append(_Use(group, own, get_ident()))


def require_unused(call: str, ranks: frozenset[int]) -> None:
    """Require that no rank serves a strategy that this thread uses. `ranks`: as numbered in the whole job. Local."""
    for use in _uses:
        busy = ranks & use.servers
        if busy and use.group.is_open and use.thread == get_ident():
            raise RuntimeError(
                f"{call} would wait for {name_ranks(busy)} of the job, in serve() of another ParameterServerStrategy "
                "until this worker has closed that one: call its close() first, or use it as `with strategy:`"
            )
