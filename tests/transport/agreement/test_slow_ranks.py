"""A rank for which the others wait in most calls is named in the log, once in an interval and on rank 0 alone."""

import re
import time

import numpy as np
import pytest
from support.agreements import warnings_of

from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.transport.agreement.slow_ranks import SlowRanks, WaitReport
from mpidist.transport.failures.flight_recorder import FLIGHT_BYTES, FlightRecorder
from mpidist.transport.topology import Topology

several = pytest.mark.ranks(3)

SECONDS = 0.02  # what a slow rank takes for a step, besides what all take


@pytest.fixture
def make(monkeypatch, comm):
    def made(interval="0.3", nodes="0,0,0,0"):
        monkeypatch.setenv("MPIDIST_PRETEND_NODES", nodes[: 2 * comm.size - 1])
        monkeypatch.setenv("MPIDIST_STRAGGLER", interval)
        return Strategy(comm=comm)

    return made


def line_of(caplog, strategy, work, pattern):
    """Make steps until rank 0 has logged such a line: a busy machine may make another rank slow first. Collective."""
    step, found = 0, None
    while not strategy.reduce("max", found is not None, axis=None):
        work(step)
        step += 1
        found = next((match for text in warnings_of(caplog) if (match := re.fullmatch(pattern, text))), None)
    assert strategy.rank == 0 or not warnings_of(caplog)
    return found


def pattern(who, size, does, pronouns="was it it"):
    was, it, they = pronouns.split()
    return (
        rf"mpidist: {who} of {size} ranks, on host \S+, {was} last in (\d+) of (\d+) calls in which ranks waited; most "
        rf"others waited for {it} for (\d+)% of \S+ s, while {they} {was} {does}"
    )


@several
@pytest.mark.parametrize(("nodes", "slow"), [("0,0,0", 0), ("0,0,1", -1)])
def test_slow_rank_that_computes_is_named(caplog, make, nodes, slow):
    with make(nodes=nodes) as strategy:
        slow %= strategy.size
        line = pattern(f"rank {slow}", strategy.size, "computing")
        found = line_of(caplog, strategy, lambda step: time.sleep(SECONDS * (strategy.rank == slow)), line)
        if found:
            late, waited, share = map(int, found.groups())
            assert 3 <= late <= waited
            assert waited <= late / 0.8
            assert share >= 5


@several
@pytest.mark.parametrize("nodes", ["0,1,1"])
def test_slow_rank_that_reads_data_is_named(caplog, make, nodes):
    class Endless:
        def __iter__(self):
            while True:
                time.sleep(SECONDS * (strategy.rank == 1))
                yield np.ones(2)

    with make(nodes=nodes) as strategy:
        batches = iter(strategy.distribute_datasets_from_function(lambda context: Endless()))
        line = pattern("rank 1", strategy.size, r"reading data \(next of a data set\)")
        line_of(caplog, strategy, lambda step: next(batches), line)


@pytest.mark.ranks(4)
def test_slow_node_is_named_by_its_ranks(caplog, make):
    """Its two ranks come last in turn, so that neither comes last in most calls."""
    with make(nodes="0,1,0,1") as strategy:

        def work(step):
            if strategy.rank % 2:
                time.sleep(SECONDS * (1.2 if strategy.rank == step % 2 * 2 + 1 else 1))

        line_of(caplog, strategy, work, pattern("ranks 1, 3", 4, "computing", "were them they"))


def reports(waits, reads):
    return [WaitReport(True, 10.0, np.array(one), np.array(other)) for one, other in zip(waits, reads, strict=True)]


@pytest.mark.no_mpi
@pytest.mark.parametrize(
    ("waits", "reads", "found"),
    [
        ([[0, 0, 0], [1, 1, 1]], [[1, 1, 1], [1, 1, 1]], "3 of 3 .* 30% .* computing"),
        ([[0, 0, 0], [1, 1, 1]], [[1, 1, 0], [0, 0, 0]], "3 of 3 .* 30% .* reading data"),
        ([[0, 0, 0, 9, 9], [1, 1, 1]], [[0, 0, 0, 0, 0], [0, 0, 0]], ""),
        ([[9, 9, 0, 0, 0], [1, 1, 1]], [[0, 0, 0, 0, 0], [0, 0, 0]], "3 of 3 .* 30% "),  # reports of several lengths
        ([[0, 0, 0, 0], [0, 5, 0, 0]], [[0] * 4] * 2, ""),  # a single wait
        ([[0, 0, 0], [0.16, 0.16, 0.16]], [[0] * 3] * 2, ""),  # short waits
        ([[0, 0, 0, 1], [1, 1, 1, 0]], [[0] * 4] * 2, ""),  # one call of four waits for the other rank
        ([[0, 0, 0, 0.1], [1, 1, 1, 0]], [[0] * 4] * 2, "3 of 3 "),  # but not for long
        ([[0.9, 0.9, 0.9], [1, 1, 1], [0, 0, 0]], [[0] * 3] * 3, "rank 2 of 3 .* 27%"),
        ([[0.1, 0.1, 0.1], [1, 1, 1], [0, 0, 0]], [[0] * 3] * 3, ""),  # most other ranks come late, too: one waits
        ([[0, 1, 0, 1], [1, 0, 1, 0]], [[0] * 4] * 2, ""),  # slow in turn
        ([[], []], [[], []], ""),
    ],
)
def test_slow_rank_is_the_one_for_which_most_others_wait_in_most_calls(caplog, waits, reads, found):
    recorder, size = FlightRecorder(np.zeros(FLIGHT_BYTES, np.uint8)), len(waits)
    slow_ranks = SlowRanks(recorder, Topology.from_labels(0, "h" * size, "h" * size), 60.0)
    slow_ranks.take(reports(waits, reads))
    assert re.search(found, *warnings_of(caplog)) if found else warnings_of(caplog) == []


@several
def test_straggler_variable_of_zero_turns_the_line_off(caplog, make):
    with make("0") as strategy:
        for _ in range(40):
            time.sleep(SECONDS * (strategy.rank == 1))
            strategy.reduce("sum", 1.0, axis=None)
        assert warnings_of(caplog) == []
