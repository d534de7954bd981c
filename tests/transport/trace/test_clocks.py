"""Clocks of hosts, compared by messages: ranks of one machine with clocks that go wrong on purpose."""

import time

import pytest
from support.ranks import Intracomm

from mpidist.transport.trace.clocks import compare_clocks, name_clock

SECOND = 1_000_000_000


def ahead_of(host: int) -> int:
    """By how much the clock of a pretended host is ahead of the machine's, in nanoseconds."""
    return (0, -7 * SECOND, 90_000 * SECOND, SECOND // 3)[host]


@pytest.mark.core
@pytest.mark.ranks(3)
@pytest.mark.parametrize("ranks_of_a_host", [1, 2])
def test_difference_of_clocks_is_found_within_the_error(comm: Intracomm, ranks_of_a_host: int) -> None:
    host = comm.rank // ranks_of_a_host
    num_hosts = (comm.size - 1) // ranks_of_a_host + 1
    samples = compare_clocks(comm, f"host{host}", lambda: time.monotonic_ns() + ahead_of(host))
    assert comm.allgather(samples) == [samples] * comm.size
    assert [sample.clock for sample in samples] == [f"host{one}" for one in range(num_hosts)]
    assert samples[0][2:] == (0, 0)
    for one, sample in enumerate(samples):
        assert abs(sample.offset + ahead_of(one)) <= sample.error
        assert sample.error < 60 * SECOND  # of messages on a busy machine
        assert abs(sample.time - ahead_of(one) - time.monotonic_ns()) < 100 * SECOND


@pytest.mark.ranks(2)
def test_ranks_of_a_host_have_one_clock(comm: Intracomm) -> None:
    (sample,) = compare_clocks(comm, name_clock())
    assert sample == (name_clock(), sample.time, 0, 0)
    assert compare_clocks(None, "alone")[0][2:] == (0, 0)
