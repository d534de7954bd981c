"""Whose turn it is at a variable: many reads at once, or one write."""

from __future__ import annotations

import numpy as np
import pytest

from mpidist.parameter_server.store import Stored

pytestmark = pytest.mark.no_mpi


def test_reads_go_together_and_writes_alone() -> None:
    stored = Stored(np.zeros(2))
    first, second = stored.enter(False), stored.enter(False)
    assert stored.may_go(first)
    assert stored.may_go(second)
    write, later = stored.enter(True), stored.enter(False)
    assert not stored.may_go(write)
    assert not stored.may_go(later), "a read must not overtake a write, or writes would wait for ever"
    stored.leave(second)
    assert not stored.may_go(write)
    stored.leave(first)
    assert stored.may_go(write)
    assert not stored.may_go(later)
    other = stored.enter(True)
    assert not stored.may_go(other)
    stored.leave(write)
    assert not stored.may_go(other)
    assert stored.may_go(later)
    stored.leave(later)
    assert stored.may_go(other)
    stored.leave(other)
    assert not stored.queue


def test_who_leaves_the_queue_keeps_nobody_waiting() -> None:
    stored = Stored(np.zeros(2))
    first, lost, last = stored.enter(True), stored.enter(True), stored.enter(False)
    stored.leave(lost)
    assert not stored.may_go(last)
    stored.leave(first)
    assert stored.may_go(last)


@pytest.mark.parametrize("writes", [False, True])
def test_nobody_waits_at_a_variable_that_nobody_uses(writes: bool) -> None:
    stored = Stored(np.zeros(()))
    for _ in range(3):
        turn = stored.enter(writes)
        assert stored.may_go(turn)
        stored.leave(turn)
