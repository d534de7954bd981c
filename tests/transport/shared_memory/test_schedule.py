"""How lists of arrays are cut into chunks, and chunks into shards: every element once, and where it is said to be."""

from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpidist.transport.shared_memory.schedule import chunk_bounds, fused_schedule

pytestmark = pytest.mark.no_mpi

LINE = 16  # elements

lengths_of = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 300)), max_size=25) | st.lists(
    st.sampled_from([0, 7, 7, 7]), max_size=40
)
lanes_of = st.integers(1, 6)
chunk_of = st.integers(1, 700)


def places(move, lengths):
    """Open a move: piece, element of it, and place in the chunk, of every element."""
    if move.last == move.first + 1:
        elements = [(move.first, at) for at in range(move.start, move.stop)]
    else:
        assert (move.start, move.stop) == (0, lengths[move.first]), "of several pieces, all are whole"
        elements = [(piece, at) for piece in range(move.first, move.last) for at in range(lengths[piece])]
    assert len(elements) == move.end - move.at
    return [(piece, element, move.at + index) for index, (piece, element) in enumerate(elements)]


def check_shards(schedule, lanes, lengths):
    """See that the moves of every shard fill it, from its first place to its last."""
    for chunk in schedule.chunks:
        assert len(chunk.bounds) == lanes + 1
        assert len(chunk.shards) == lanes
        assert (chunk.bounds[0], chunk.bounds[-1]) == (0, chunk.count)
        for (start, stop), moves in zip(pairwise(chunk.bounds), chunk.shards, strict=True):
            assert start <= stop
            assert [at for move in moves for _, _, at in places(move, lengths)] == list(range(start, stop))
            assert all(move.last > move.first and move.end > move.at for move in moves)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(lengths_of, lanes_of, chunk_of)
@example([], 3, 5)
@example([0, 0], 2, 5)
@example([0, 4, 0, 4, 0, 0, 4, 5, 4, 0], 1, 100)  # a run of whole pieces, with empty ones within
@example([4, 4, 4, 2], 1, 10)  # a run that the end of a chunk cuts
@example([1], 4, 1)
@example([1000], 4, 700)
def test_fused_schedule_has_elements_once(lengths, lanes, chunk_count):
    schedule = fused_schedule(lengths, lanes, chunk_count)
    check_shards(schedule, lanes, lengths)
    total = sum(lengths)
    assert (schedule.count, schedule.lengths) == (total, tuple(lengths))
    counts = [chunk.count for chunk in schedule.chunks]
    assert sum(counts) == total
    assert counts == [min(chunk_count, total - begin) for begin in range(0, total, chunk_count)]
    origins = [0, *accumulate(lengths)]
    seen = [np.zeros(length, int) for length in lengths]
    for begin, chunk in zip(range(0, total, chunk_count), schedule.chunks, strict=True):
        for moves in chunk.shards:
            for move in moves:
                for piece, element, at in places(move, lengths):
                    assert origins[piece] + element == begin + at
                    seen[piece][element] += 1
    assert all((times == 1).all() for times in seen)


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 5000), lanes_of)
def test_shards_of_a_chunk_are_fair_and_begin_at_whole_lines(count, lanes):
    bounds = chunk_bounds(count, lanes)
    sizes = [stop - start for start, stop in pairwise(bounds)]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 2 * LINE
    if count >= 4 * LINE * lanes:
        assert all(bound % LINE == 0 for bound in bounds[:-1])
    else:
        assert max(sizes) - min(sizes) <= 1


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 1 << 50), min_size=1, max_size=4), lanes_of, st.integers(1, 1 << 20), st.randoms())
def test_schedule_computes_chunks_on_access(lengths, lanes, chunk_count, random):
    """However many there are: a call of these arrays may be refused."""
    total = sum(lengths)
    chunks = fused_schedule(lengths, lanes, chunk_count).chunks
    assert len(chunks) == -(-total // chunk_count)
    if total:
        at = random.randrange(len(chunks))
        assert chunks[at].count == min(chunk_count, total - at * chunk_count)
