"""Repeated calls of an array or of a nest, which compiled code carries out as a whole, as far as no rank waits long.

Mistakes in them, and ranks whose arrays lie differently, are in test_repeated_calls.
"""

import time
import weakref
from collections import Counter

import numpy as np
import pytest
from support.everywhere import raises_everywhere
from support.reductions import all_reduce
from support.used import are_gone

import mpidist
from mpidist import CommunicationOptions, nest
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.transport.agreement.agreement import Progress
from mpidist.transport.agreement.mpi_agreement import MpiAgreement
from mpidist.transport.failures.flight_recorder import MAX_CALLS, entries_in
from mpidist.transport.native.loading import native

pytestmark = [
    pytest.mark.ranks(2, 3),
    pytest.mark.skipif(native is None, reason="needs the compiled part: nothing is carried out as a whole without it"),
]

SHAPES = [(), (3000,), (1 << 16,), (1 << 20,)]  # one-shot and two-shot, also in several chunks


@pytest.fixture(params=["no deadline", "a deadline"])
def strategy(comm, request):
    """With a deadline, ranks meet twice before each call."""
    options = CommunicationOptions(timeout_seconds=600 if request.param == "a deadline" else None)
    with Strategy(comm=comm, communication_options=options) as made:
        yield made


@pytest.fixture
def progress(monkeypatch):
    """How many calls came how far."""
    really = MpiAgreement.join_at_once
    seen = Counter()

    def join_at_once(agreement, call, run, value, *given):
        came = really(agreement, call, run, value, *given)
        if value is not None:  # else it is the comparison alone
            seen[came] += 1
        return came

    monkeypatch.setattr(MpiAgreement, "join_at_once", join_at_once)
    return seen


def is_on_one_node(strategy):
    return strategy.topology.num_nodes == 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_in_place", [True, False])
def test_compiled_call_completes_for_early_and_late_ranks(strategy, comm, progress, request, shape, is_in_place):
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
    joined, ended = (
        comm.allreduce(sum(progress[came] for came in these))
        for these in ((Progress.JOINED,), (Progress.AGREED, Progress.DONE))
    )
    if is_on_one_node(strategy):
        assert joined >= 1, "ranks were early in most steps"
        if request.node.callspec.params["strategy"] == "no deadline":  # else the last one waits for the others to wake
            assert ended >= 1, "a rank was the last in each step"
        assert progress.total() == 4 * comm.size - 1, "all but the first call are repeated"
    else:
        assert not progress


def test_compiled_calls_are_in_the_flight_recorder(strategy, comm, progress):
    flight = parts_of(strategy).group.agreement.flight
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


def test_flight_recorder_of_more_calls_than_it_keeps_has_the_last_ones(strategy):
    """Compiled code begins anew at the same place as Python. Of 256 calls the texts are kept; the others come back."""
    values, agreement = [np.ones(length) for length in range(1, 261)], parts_of(strategy).group.agreement
    for _ in range(MAX_CALLS // 260 + 1):
        for value in values:
            all_reduce(strategy, "MAX", value, out=value)
    all_reduce(strategy, "MAX", values[0], out=values[0])
    assert agreement.flight is not None
    entries, last = entries_in(agreement.flight), agreement.sequence
    assert [entry.sequence for entry in entries] == list(range(last - MAX_CALLS + 1, last + 1))
    assert {entry.state for entry in entries} == {"done"}
    assert {entry.call for entry in entries[-256:]} == {"all_reduce"}
    assert [", 8 B," in entry.details for entry in entries[-2:]] == [False, True]


def nests(make):
    """Nests of what `make` gives for 0 to 4."""
    return [
        [make(0)],
        [make(0), make(1), make(2)],
        (make(3), make(1)),
        {"b": make(0), "a": make(4)},
        {"layers": [(make(0), make(1)), (make(2), make(3))], "norm": make(4)},
        [[make(0), make(1)], make(2)],
    ]


FORMS = [(3,), (4, 5), (), (700,), (64, 129)]


def leaves_of(value):
    leaves, _ = nest.flatten(value)
    return leaves


@pytest.mark.parametrize("is_in_place", [True, False])
@pytest.mark.parametrize(("op", "dtype"), [("SUM", np.float32), ("MEAN", np.float64), ("MAX", np.int32)])
def test_nests_are_carried_out_as_a_whole(strategy, comm, progress, is_in_place, op, dtype):
    mean = (comm.size - 1) / 2
    more = {"SUM": mean * comm.size, "MEAN": mean, "MAX": comm.size - 1}[op]
    times = comm.size if op == "SUM" else 1
    for which, value in enumerate(nests(lambda at: np.empty(FORMS[at], dtype))):
        kept = []
        progress.clear()
        for step in range(5):
            if not is_in_place:  # other arrays each time
                value = nests(lambda at: np.empty(FORMS[at], dtype))[which]
            for at, leaf in enumerate(leaves_of(value)):
                leaf[...] = 10 * step + at + comm.rank
            again = nest.map_structure(lambda leaf: leaf, value)  # another nest of the same arrays
            result = all_reduce(strategy, op, value, out=again if is_in_place else None)
            kept.append(result)
            assert type(result) is type(value)
            assert leaves_of(nest.map_structure(np.shape, result)) == leaves_of(nest.map_structure(np.shape, value))
            if is_in_place:
                assert result is again
            for at, (leaf, got) in enumerate(zip(leaves_of(value), leaves_of(result), strict=True)):
                assert got.dtype == dtype
                assert (got == times * (10 * step + at) + more).all()
                assert (got is leaf) == is_in_place
                assert is_in_place or not np.shares_memory(leaf, got)
        for step, result in enumerate([] if is_in_place else kept):
            for at, got in enumerate(leaves_of(result)):
                assert (got == times * (10 * step + at) + more).all(), "a later call has written to an earlier result"
        is_small = which == 0  # a nest of one small array
        assert progress.total() == (4 if is_on_one_node(strategy) and not is_small else 0)


@pytest.mark.parametrize(("op", "dtype"), [("SUM", np.float32), ("MEAN", np.float64), ("MAX", np.int32)])
def test_lists_into_per_node_arrays_are_carried_out_as_a_whole(strategy, comm, progress, op, dtype):
    """Of early and late ranks, from new lists of arrays, of which some are views; the results are those of the node."""
    shapes = [(3,), (4, 5), (700,), (64, 129)]
    times = comm.size if op == "SUM" else 1
    more = {"SUM": sum(range(comm.size)), "MEAN": (comm.size - 1) / 2, "MAX": comm.size - 1}[op]
    out = strategy.symmetric_empty_like({"b": [np.empty(its, dtype) for its in shapes[:2]],
                                         "a": [np.empty(its, dtype) for its in shapes[2:]]}, per_node=True)  # fmt: skip
    num_whole = 0
    for step in range(4 * comm.size):
        has_view = step % 4 == 3 and comm.rank == 0
        value = nest.map_structure(lambda its: np.empty(its.shape, dtype), out)
        if has_view:
            value["a"][0] = np.empty(2 * shapes[2][0], dtype)[: shapes[2][0]]
        for at, leaf in enumerate(leaves_of(value)):
            leaf[...] = 10 * step + at + comm.rank
        if step % comm.size == comm.rank:
            time.sleep(0.003)
        assert all_reduce(strategy, op, value, out=out) is out
        for at, got in enumerate(leaves_of(out)):
            assert (got == times * (10 * step + at) + more).all()
        num_whole += step > 0 and not has_view
    assert progress.total() == (num_whole if is_on_one_node(strategy) else 0)


def test_compiled_call_checks_changed_lists_of_per_node_arrays(strategy, comm):
    """Other outs, values that are views of the results, or that are symmetric; and an out of another form."""
    outs = [strategy.symmetric_empty_like([np.empty(300), np.empty(7)], per_node=True) for _ in range(2)]
    symmetric = strategy.symmetric_empty_like([np.empty(300), np.empty(7)])
    for step in range(3 * comm.size):
        values = symmetric if step % comm.size == comm.rank else [np.empty(300), np.empty(7)]
        for value in values:
            value[...] = step
        out = outs[step % 2]
        comm.Barrier()
        all_reduce(strategy, "SUM", values, out=out)
        assert all((one == comm.size * step).all() for one in out)
    comm.Barrier()
    for one in outs[0]:
        one[...] = 3
    comm.Barrier()
    all_reduce(strategy, "SUM", [one[:] for one in outs[0]], out=outs[0])
    assert all((one == 3 * comm.size).all() for one in outs[0])
    comm.Barrier()
    with raises_everywhere(comm, mpidist.errors.InvalidArgumentError, r"so nothing was sent\n  op: rank 0"):
        all_reduce(strategy, "MAX" if comm.rank else "SUM", [np.ones(300), np.ones(7)], out=outs[1])
    outs[1][1].shape = (7, 1)
    with raises_everywhere(comm, mpidist.errors.InvalidArgumentError, r"out 1 must be an array f64\[7\]"):
        all_reduce(strategy, "SUM", [np.ones(300), np.ones(7)], out=outs[1])
    references = [weakref.ref(one) for out in outs for one in out]
    del one, out, outs
    assert are_gone(references)


@pytest.mark.parametrize("dtype", ["f8", ">f8"])
def test_results_go_to_views_of_per_node_arrays_not_to_values(strategy, comm, dtype):
    """Which no rank can reach by their places: with gaps, or in another byte order."""
    whole = strategy.symmetric_empty_like([np.empty((60, 8)), np.empty((5, 40))], per_node=True)
    outs = [its[:, ::2] if dtype == "f8" else its.view(dtype) for its in whole]
    for step in range(4):
        values = [np.full(its.shape, 10.0 * step + comm.rank) for its in outs]
        comm.Barrier()
        all_reduce(strategy, "SUM", values, out=outs)
        assert all((its == 10 * step * comm.size + sum(range(comm.size))).all() for its in outs)
        assert all((its == 10 * step + comm.rank).all() for its in values)


@pytest.mark.parametrize("is_in_place", [True, False])
def test_calls_of_one_list_in_turn_are_repeated(strategy, comm, progress, is_in_place):
    values = [np.ones(5), np.ones(6)]
    for _ in range(4):
        for op in ("SUM", "MAX"):
            values[0][...] = values[1][...] = 1
            result = all_reduce(strategy, op, values, out=values if is_in_place else None)
            assert (result[1] == (comm.size if op == "SUM" else 1)).all()
    assert progress.total() == (6 if is_on_one_node(strategy) else 0)


def test_lists_in_turn_have_their_own_arrays(strategy, comm):
    """More lists than are remembered, of one plan and of several."""
    lists = [[np.empty(3 + at % 2), np.empty(5)] for at in range(300)]
    for step in range(3):
        for at, values in enumerate(lists):
            for value in values:
                value[...] = at + step
            all_reduce(strategy, "SUM", values, out=values)
            assert all((value == comm.size * (at + step)).all() for value in values)


def test_calls_are_counted_as_all_others(strategy, comm):
    traffic, counted = parts_of(strategy).group.levels.world.traffic, []
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


@pytest.mark.parametrize("shape", [(5,), (1 << 16,)])
def test_compiled_call_names_missing_rank_at_the_deadline(comm, monkeypatch, shape):
    """Of a repeated call, too; and a new beginning follows."""
    monkeypatch.setenv("MPIDIST_TIMEOUT_SECONDS", "600")
    late, value = comm.size - 1, np.ones(shape)
    with Strategy(comm=comm) as strategy:
        for _ in range(2):
            for _ in range(3):
                value[...] = 1
                assert (all_reduce(strategy, "SUM", value, out=value) == comm.size).all()
            if comm.rank != late:
                monkeypatch.setattr(parts_of(strategy).group.agreement, "_timeout_seconds", 1.0)
                named = rf"all_reduce.* waited 1 s, and ranks? .*\b{late}\b|had given up waiting"
                with pytest.raises(mpidist.errors.DeadlineExceededError, match=named):
                    all_reduce(strategy, "SUM", value, out=value)
            comm.Barrier()
            strategy.reset()
