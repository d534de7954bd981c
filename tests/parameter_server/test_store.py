"""Whose turn it is at a variable: many reads at once, or one write."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from mpidist.parameter_server.store import Stored

pytestmark = pytest.mark.no_mpi


def waits(turn: Iterator[None]) -> bool:
    return next(turn, "goes") is None


def test_reads_go_together_and_writes_alone() -> None:
    stored = Stored(np.zeros(2))
    first, second = stored.turn(False), stored.turn(False)
    assert not waits(first)
    assert not waits(second)
    write, later = stored.turn(True), stored.turn(False)
    assert waits(write)
    assert waits(later), "a read must not overtake a write, or writes would wait for ever"
    stored.leave(False)
    assert waits(write)
    stored.leave(False)
    assert not waits(write)
    assert waits(later)
    other = stored.turn(True)
    assert waits(other)
    stored.leave(True)
    assert waits(other)
    assert not waits(later)
    stored.leave(False)
    assert not waits(other)
    stored.leave(True)
    assert not stored.queue


@pytest.mark.parametrize("writes", [False, True])
def test_nobody_waits_at_a_variable_that_nobody_uses(writes: bool) -> None:
    stored = Stored(np.zeros(()))
    for _ in range(3):
        assert not waits(stored.turn(writes))
        stored.leave(writes)
