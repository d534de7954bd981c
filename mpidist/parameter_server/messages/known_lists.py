"""Lists of variables that a server knows by a number, so that a request names many variables by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, final

import numpy as np

from mpidist.parameter_server.messages.channel import Channel
from mpidist.parameter_server.messages.locations import KnownList, Location
from mpidist.parameter_server.messages.protocol import Op

__all__ = ["KnownLists"]

_MAX_LISTS: Final = 64  # that a server remembers of a worker


@final
class KnownLists:
    """The lists that this worker has told its servers.

    Args:
        channels: The messages from and to each server.
    """

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = channels
        self._lists: list[dict[tuple[int, ...], KnownList]] = [{} for _ in channels]

    def of(self, locations: Sequence[Location], parts: Mapping[int, Sequence[int]]) -> dict[int, KnownList]:
        """Return each server's list, once nothing is under way: errors come before anything is asked.

        Args:
            locations: Variables.
            parts: The places in `locations` that each server has.
        """
        lists = {
            server: self._known_list(server, [locations[place].key for place in places])
            for server, places in parts.items()
        }
        for server in parts:
            self._channels[server].finish()
        return lists

    def _known_list(self, server: int, keys: Sequence[int]) -> KnownList:
        """Return the list of variables as a server knows it; tell the server the list where it is new."""
        if len(keys) == 1:
            return KnownList(keys[0], ())
        lists, wanted = self._lists[server], tuple(keys)
        known = lists.get(wanted)
        if known is None:
            number = -1 - len(lists)
            if len(lists) >= _MAX_LISTS:
                number = lists.pop(next(iter(lists))).number
            channel, places = self._channels[server], np.empty(len(keys), np.int64)
            channel.start("numbering of variables", Op.NAME_LIST, number, [np.array(keys, np.int64)])
            channel.finish()
            channel.data([places])
            known = lists[wanted] = KnownList(number, tuple(places.tolist()))
        return known
