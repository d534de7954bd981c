"""Waits: how often a rank looks, and what it leaves of its core to others."""

import time

import pytest

from mpidist.transport.waiting import poll

WAIT_SECONDS, AFTER_SECONDS = 0.6, 0.02
MOST_LOOKS = 650  # 64 naps while a wait becomes e times as long, up to 64 ms, are 75; then one each millisecond


@pytest.mark.no_mpi
def test_poll_without_messages_releases_the_core():
    """A GPU's copies need nobody who tests them, as MPI's messages do."""
    looks = []

    def is_over():
        looks.append(time.monotonic())
        return looks[-1] - looks[0] >= WAIT_SECONDS

    poll(is_over, lambda: None, is_message=False)
    assert sum(at - looks[0] >= AFTER_SECONDS for at in looks) < MOST_LOOKS
