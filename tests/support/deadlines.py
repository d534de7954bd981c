"""Calls with a deadline, and how long they take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from mpidist import CommunicationOptions


def options(timeout_seconds: float | None) -> CommunicationOptions:
    return CommunicationOptions(timeout_seconds=timeout_seconds)


@contextmanager
def taking(at_least: float, at_most: float = 15) -> Iterator[None]:
    """Expect the body to take so many seconds."""
    start = time.monotonic()
    yield
    assert at_least <= time.monotonic() - start < at_most
