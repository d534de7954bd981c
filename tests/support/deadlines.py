"""Calls with a deadline, and how long they take by the library's own record."""

from mpidist import CommunicationOptions
from mpidist.context_stack import parts_of

__all__ = ["options", "recorded_seconds"]


def options(timeout_seconds):
    return CommunicationOptions(timeout_seconds=timeout_seconds)


def recorded_seconds(strategy):
    parts = parts_of(strategy)
    last = (parts.group.membership if parts.peers.is_in_lock_step else parts.peers.group).recorder.last()
    assert last is not None
    return (abs(last.ended) - last.begun) / 1e9
