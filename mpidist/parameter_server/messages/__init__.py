"""Requests and answers: what is in a message, and the two ends of the messages between a worker and a server."""

from mpidist.parameter_server.messages.calls import Calls
from mpidist.parameter_server.messages.channel import GRACE_SECONDS, Channel
from mpidist.parameter_server.messages.connection import Connection
from mpidist.parameter_server.messages.known_lists import KnownLists
from mpidist.parameter_server.messages.lane import LANE_BYTES, Lane, lanes_to
from mpidist.parameter_server.messages.locations import Location, RowsChange, by_server
from mpidist.parameter_server.messages.protocol import (
    CHUNK_BYTES,
    HEADER_BYTES,
    IN_PLACE_BYTES,
    INLINE_BYTES,
    MAX_NUMBERS,
    NO_PLACE,
    SERVE_CALL,
    WHOLE_NUMBERS,
    Change,
    Header,
    Op,
    Outcome,
    Piece,
    Step,
    from_json,
    is_read_in_place,
    plan_messages,
    to_json,
)
from mpidist.parameter_server.messages.push import Push

__all__ = [
    "CHUNK_BYTES",
    "Calls",
    "Change",
    "Channel",
    "Connection",
    "GRACE_SECONDS",
    "HEADER_BYTES",
    "Header",
    "INLINE_BYTES",
    "IN_PLACE_BYTES",
    "LANE_BYTES",
    "KnownLists",
    "Lane",
    "Location",
    "MAX_NUMBERS",
    "NO_PLACE",
    "Op",
    "Outcome",
    "Piece",
    "Push",
    "RowsChange",
    "SERVE_CALL",
    "Step",
    "WHOLE_NUMBERS",
    "by_server",
    "from_json",
    "is_read_in_place",
    "lanes_to",
    "plan_messages",
    "to_json",
]
