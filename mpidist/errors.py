"""Exceptions for what can go wrong between ranks.

`ValueError`, `TypeError` and `RuntimeError` mean what they mean everywhere in Python. Each class below is a subclass
of the built-in exception that a program would catch. `DeadlineExceededError` and `PeerFailedError` are `OSError`s by
that, so `except OSError` around a collective call catches them, too.
"""

from __future__ import annotations

__all__ = [
    "CancelledError",
    "DataLossError",
    "DeadlineExceededError",
    "InvalidArgumentError",
    "InvalidTypeError",
    "OutOfRangeError",
    "PeerFailedError",
    "TopologyError",
    "UnavailableError",
]


class InvalidArgumentError(ValueError):
    """Ranks passed different or unusable arguments to one collective call. Raised on every rank.

    Attributes:
        raised_on_all_ranks: Whether every rank raises the same text, so that one rank may print it for all.
    """

    raised_on_all_ranks = False


class InvalidTypeError(InvalidArgumentError, TypeError):
    """A rank passed a value of a kind that a collective call cannot take: a `TypeError`, and a `ValueError`, too.

    tf.distribute documents `ValueError`. Other ranks than that of the value raise an `InvalidArgumentError`.
    """


class CancelledError(RuntimeError):
    """A function that was scheduled was not called: another one had failed, or the coordinator was closed."""


class DeadlineExceededError(TimeoutError):
    """Not all ranks joined a call, or it did not complete, within its `timeout_seconds`; or a GPU did not finish."""


class DataLossError(OSError):
    """A file of a checkpoint is missing or damaged, or of another program."""


class OutOfRangeError(IndexError):
    """The end of a data set was passed: by `get_next()`, or by `next` in a function that a chief has scheduled."""


class PeerFailedError(ConnectionError):
    """Another rank left the program, or failed, while this one waited for it."""


class UnavailableError(RuntimeError):
    """The call needs something that this machine lacks: an MPI library, a GPU, NCCL."""


class TopologyError(RuntimeError):
    """The launcher's start or placement of the ranks does not fit the call."""
