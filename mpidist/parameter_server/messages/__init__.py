"""Requests and answers: what is in a message, and the two ends of the messages between a worker and a server."""

from mpidist.parameter_server.messages.calls import Calls
from mpidist.parameter_server.messages.channel import GRACE_SECONDS, Channel
from mpidist.parameter_server.messages.connection import Connection
from mpidist.parameter_server.messages.protocol import (
    HEADER_BYTES,
    INLINE_BYTES,
    MAX_NUMBERS,
    WHOLE_NUMBERS,
    Change,
    Header,
    Op,
    Outcome,
    Piece,
    bytes_of,
    from_json,
    plan_messages,
    to_json,
)

__all__ = [
    "Calls",
    "Change",
    "Channel",
    "Connection",
    "GRACE_SECONDS",
    "HEADER_BYTES",
    "Header",
    "INLINE_BYTES",
    "MAX_NUMBERS",
    "Op",
    "Outcome",
    "Piece",
    "WHOLE_NUMBERS",
    "bytes_of",
    "from_json",
    "plan_messages",
    "to_json",
]
