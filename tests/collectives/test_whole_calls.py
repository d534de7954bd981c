"""Repeated calls of one array that compiled code carries out as a whole, as far as no rank has to wait long."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.everywhere import raises_everywhere
from support.reductions import all_reduce

import mpidist
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.transport import Progress, native
from mpidist.transport.agreement import MpiAgreement
from mpidist.transport.failures.flight_recorder import entries_in

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

pytestmark = [
    pytest.mark.core,
    pytest.mark.ranks(min=2),
    pytest.mark.skipif(native is None, reason="needs the compiled part: nothing is carried out as a whole without it"),
]

SHAPES = [(), (5,), (3000,), (64, 65), (1 << 16,), (1 << 20,)]  # one-shot and two-shot, also in several chunks


@pytest.fixture
def strategy(comm: Intracomm) -> Iterator[Strategy]:
    with Strategy(comm=comm) as made:
        yield made


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many calls came how far."""
    really: Callable[..., int] = MpiAgreement.join_at_once
    seen: Counter[int] = Counter()

    def join_at_once(*arguments: Any) -> int:
        came = really(*arguments)
        seen[came] += 1
        return came

    monkeypatch.setattr(MpiAgreement, "join_at_once", join_at_once)
    return seen


def is_on_one_node(strategy: Strategy) -> bool:
    return strategy.topology.num_nodes == 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_in_place", [True, False])
def test_who_comes_early_waits_and_who_comes_late_finds_all(
    strategy: Strategy, comm: Intracomm, progress: Counter[int], shape: tuple[int, ...], is_in_place: bool
) -> None:
    value, kept = np.empty(shape, np.float32), []
    for step in range(4 * comm.size):
        if step % comm.size == comm.rank:
            time.sleep(0.005)
        value[...] = step + comm.rank
        result = all_reduce(strategy, "SUM", value, out=value if is_in_place else None)
        assert (result == sum(step + rank for rank in range(comm.size))).all()
        kept.append(np.array(result) if is_in_place else result)
    for step, result in enumerate(kept):  # no later call has written to an earlier result
        assert (result == sum(step + rank for rank in range(comm.size))).all()
    if is_on_one_node(strategy):
        assert progress[Progress.JOINED] >= 1, "this rank was early in most steps"
        assert progress[Progress.DONE] + progress[Progress.AGREED] >= 1, "this rank was the last in some steps"
        assert progress.total() == 4 * comm.size - 1, "all but the first call are repeated"
    else:
        assert not progress


def test_the_flight_recorder_has_these_calls(strategy: Strategy, comm: Intracomm, progress: Counter[int]) -> None:
    flight = strategy.extended.group.agreement.flight
    assert flight is not None
    value, other = np.ones(5), np.ones((3, 3), np.float32)
    for step in range(6):
        if step % comm.size == comm.rank:
            time.sleep(0.002)
        all_reduce(strategy, "SUM", value, out=value)
        all_reduce(strategy, "MAX", other)
    calls = [entry for entry in entries_in(flight) if entry.call == "all_reduce"]
    assert len(calls) == 12
    assert [entry.state for entry in calls] == ["done"] * 12
    assert [entry.sequence - calls[0].sequence for entry in calls] == list(range(12))
    assert [", 40 B," in entry.details for entry in calls] == [True, False] * 6
    assert ["MAX" in entry.details for entry in calls] == [False, True] * 6
    times = [moment for entry in calls for moment in (entry.begun, entry.agreed, entry.ended)]
    assert times == sorted(times)
    assert bool(progress) == is_on_one_node(strategy)


def test_texts_of_calls_that_were_dropped_come_back(strategy: Strategy) -> None:
    """The recorder keeps the texts of 256 calls: a repeated call among more of them still has its own."""
    values = [np.ones(length) for length in range(1, 301)]
    for _ in range(2):
        for value in values:
            all_reduce(strategy, "MAX", value, out=value)
    all_reduce(strategy, "MAX", values[0], out=values[0])
    flight = strategy.extended.group.agreement.flight
    assert flight is not None
    assert [", 8 B," in entry.details for entry in entries_in(flight)[-2:]] == [False, True]


@pytest.mark.parametrize("shape", [(5,), (1 << 16,)])
def test_another_call_of_one_rank_is_an_error_of_all_and_nothing_else(
    strategy: Strategy, comm: Intracomm, progress: Counter[int], shape: tuple[int, ...]
) -> None:
    value = np.ones(shape)
    for step in range(6):
        for op in ("SUM", "MAX"):
            value[...] = 1
            all_reduce(strategy, op, value, out=value)
        value[...] = 1
        with raises_everywhere(comm, mpidist.errors.InvalidArgumentError, "op"):
            all_reduce(strategy, "MAX" if comm.rank == step % comm.size else "SUM", value, out=value)
        assert (value == 1).all()
    if is_on_one_node(strategy):
        assert progress.total() == 6, "an error empties the cache, so these are the calls that differ"


@pytest.mark.parametrize("shape", [(5,), (1 << 16,)])
def test_a_rank_whose_array_is_strided_meets_the_others(
    strategy: Strategy, comm: Intracomm, shape: tuple[int, ...]
) -> None:
    """Its call is not a repeated one, and its numbers are in the same places as those of repeated ones."""
    (length,) = shape
    for step in range(3 * comm.size):
        value = np.empty(2 * length)[::2] if step % comm.size == comm.rank else np.empty(length)
        value[...] = np.arange(length) + step
        all_reduce(strategy, "SUM", value, out=value)
        assert (value == comm.size * (np.arange(length) + step)).all()


def test_calls_are_counted_as_all_others(strategy: Strategy, comm: Intracomm) -> None:
    traffic, counted = strategy.extended.group.levels.world.traffic, []
    for count in (5, 1 << 16):
        value = np.ones(count)
        for _ in range(3):
            traffic.clear()
            all_reduce(strategy, "SUM", value, out=value)
            counted.append((traffic.calls["all_reduce"], traffic.nbytes["all_reduce"]))
    assert counted[0:3] == [counted[0]] * 3
    assert counted[3:6] == [counted[3]] * 3
    if is_on_one_node(strategy):
        assert counted[3] == (1, 2 * 8 * (1 << 16) * (comm.size - 1) // comm.size)
