"""What an all-reduce costs, by formula: sane for any machine and placement, and alike on all ranks."""

import math
import platform

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.transport.costs.cost_file import processor_in
from mpidist.transport.costs.cost_model import ALGORITHMS, LEADER_BYTES, NEVER, CostModel

pytestmark = pytest.mark.no_mpi

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

latencies = st.floats(1e-8, 1e-2)
rates = st.floats(1e6, 1e12)
models = st.builds(
    CostModel,
    sync_seconds=latencies,
    call_seconds=latencies,
    two_shot_seconds=latencies,
    copy_bytes_per_second=rates,
    add_bytes_per_second=rates,
    mpi_seconds=latencies,
    mpi_bytes_per_second=rates,
    link_seconds=latencies,
    link_bytes_per_second=rates,
    stream_bytes_per_second=st.just(1e6),  # never faster than in the cache
)
placements = st.one_of(
    st.tuples(st.integers(1, 128)),
    st.lists(st.integers(1, 8), min_size=2, max_size=5).map(tuple),
    st.builds(lambda ranks, nodes: (ranks,) * nodes, st.integers(1, 128), st.integers(2, 1024)),
)
sizes = st.integers(0, 4 * GIB)


@settings(deadline=None, derandomize=True)
@given(models, placements, sizes, sizes, st.sampled_from(sorted(ALGORITHMS)))
def test_more_bytes_never_take_less_time(model, placement, one, other, algorithm):
    less, more = sorted((one, other))
    times = [model.seconds(algorithm, nbytes, placement) for nbytes in (less, more)]
    assert 0 <= times[0] <= times[1] * (1 + 1e-12)


@settings(deadline=None, derandomize=True)
@given(models, placements)
def test_sizes_stay_in_their_bounds(model, placement):
    chunk, depth = model.chunk_bytes(placement), model.depth(placement)
    assert 512 * KIB <= chunk <= 2 * MIB
    assert chunk % 128 == 0
    assert 0 <= model.one_shot_bytes(placement) <= chunk
    if len(placement) == 1:
        assert (depth, model.least_bytes(placement)) == (0, 0)
    else:
        assert 2 <= depth <= 8
        assert model.one_shot_bytes(placement) == 0
        assert KIB <= model.least_bytes(placement) <= NEVER


@settings(deadline=None, derandomize=True)
@given(models, placements, sizes)
def test_choice_follows_thresholds_and_is_the_faster_algorithm(model, placement, nbytes):
    """Within the power of two that thresholds are rounded to."""
    chosen = model.choose(nbytes, placement)
    if len(placement) == 1:
        limit = model.one_shot_bytes(placement)
        assert (chosen == "one_shot") == (nbytes <= limit)
        if limit:
            near = round(limit / math.sqrt(2))
            assert model.seconds("one_shot", near, placement) <= model.seconds("two_shot", near, placement)
        return
    least = model.least_bytes(placement)
    assert (chosen == "two_shot") == (nbytes >= least)
    if least < NEVER:
        is_even = len(set(placement)) == 1 < placement[0]
        for nbytes in (least, 2 * least):
            other = "hierarchical" if is_even and nbytes > LEADER_BYTES else "leader"
            if nbytes <= GIB:
                assert model.seconds("two_shot", nbytes, placement) <= model.seconds(other, nbytes, placement)
        assert least == KIB or model.choose(least - 1, placement) in ("leader", "hierarchical")


def test_default_thresholds_match_measurements():
    """One-shot wins to about 96 KiB at 2 ranks on 2 cores, since two-shot is compiled."""
    model = CostModel()
    assert model.one_shot_bytes((2,)) == 128 * KIB
    assert model.one_shot_bytes((4,)) in (64 * KIB, 128 * KIB)
    assert model.chunk_bytes((2,)) == 512 * KIB
    assert model.chunk_bytes((64,)) == 512 * KIB
    assert 2 <= model.depth((2, 2)) <= 4
    assert 32 * KIB <= model.least_bytes((2, 2)) <= 256 * KIB


def test_two_shot_hides_the_work_of_nodes_behind_a_slow_link():
    model = CostModel(link_bytes_per_second=25e6)
    link = 2 * 64 * MIB * 0.5 / 25e6
    assert link < model.seconds("two_shot", 64 * MIB, (2, 2)) < 1.1 * link
    assert model.seconds("hierarchical", 64 * MIB, (2, 2)) > model.seconds("two_shot", 64 * MIB, (2, 2))


def test_small_arrays_and_uneven_nodes_go_through_a_leader():
    model = CostModel(link_bytes_per_second=1e6, mpi_seconds=1e-2)  # messages cost much: no two-shot
    assert model.choose(LEADER_BYTES, (2, 2)) == "leader"
    assert model.choose(LEADER_BYTES + 1, (2, 2)) == "hierarchical"
    assert model.choose(LEADER_BYTES + 1, (2, 1)) == "leader"


def test_wrong_numbers_are_errors():
    wrong = [0, -1.0, 5e-324, 1e200, 10**25, math.inf, math.nan, True, "1", None]
    for value in wrong:
        with pytest.raises(ValueError, match="link_seconds must be a positive number"):
            CostModel(link_seconds=value)


ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\nCPU part\t: {}\n\nCPU part\t: 0xfff\n"


def test_processor_model_is_read_by_its_name():
    text = "processor\t: 0\nmodel\t\t: 85\nmodel name\t: A Processor @ 2.00GHz\n\nmodel name\t: another\n"
    assert processor_in(text) == "A Processor @ 2.00GHz"
    assert processor_in("processor\t: 0\n") == processor_in("") == ""


def test_processor_models_without_names_differ_by_numbers():
    assert processor_in(ARM.format("0xd0c")) == f"{platform.machine()} of implementer 0x41, part 0xd0c"
    assert processor_in(ARM.format("0xd4f")) != processor_in(ARM.format("0xd0c"))
