"""What can go wrong between ranks, as kinds of exception.

`ValueError`, `TypeError` and `RuntimeError` mean what they mean everywhere in Python. The kinds below say what
Python has no word for; each is also of the built-in kind that a program would catch.
"""

from __future__ import annotations

__all__ = [
    "DeadlineExceededError",
    "InvalidArgumentError",
    "OutOfRangeError",
    "PeerFailedError",
    "TopologyError",
    "UnavailableError",
]


class InvalidArgumentError(ValueError):
    """Ranks passed different or unusable arguments to one collective call. Raised on every rank.

    Attributes:
        raised_on_all_ranks: Whether every rank has the same text, so that printing it once will do.
    """

    raised_on_all_ranks = False


class DeadlineExceededError(TimeoutError):
    """A collective call was not joined by all ranks, or did not come to its end, within its `timeout_seconds`."""


class OutOfRangeError(IndexError):
    """A batch was asked for by name at the end of a data set: `get_next()`. A `for` loop just ends there."""


class PeerFailedError(ConnectionError):
    """Another rank left the program, or failed, while this one waited for it."""


class UnavailableError(RuntimeError):
    """Something that this machine lacks was asked for: an MPI library, a GPU, NCCL."""


class TopologyError(RuntimeError):
    """The ranks are not started, or not placed, as the call needs them."""
