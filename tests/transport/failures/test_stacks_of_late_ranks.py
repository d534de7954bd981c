"""Errors and warnings that name late ranks say where each of these is in its program."""

import json
import re

import pytest
from jobs.faults import BLOCKS, TWO, UNEVEN, job, of_others, on

__all__ = ["job"]

pytestmark = pytest.mark.no_mpi

LATE = """
def busy():
    {}
if is_faulty:
    busy()
attempt("late", lambda: reduce(DEADLINE))
note("given up")
await_notes("given up", *others)  # the others have their error by themselves
sys.exit(3)
"""


@pytest.mark.core
@on(BLOCKS, UNEVEN)
def test_stack_of_a_late_rank_is_in_the_error_of_all_others_and_in_its_flight_file(job, tmp_path, placement):
    ended = job(LATE.format("sum(range(10**12))"), placement, MPIDIST_FLIGHT_DIR=str(tmp_path / "flights"))
    for note in of_others(ended, "late", placement):
        assert note.kind == "DeadlineExceededError", note
        line = rf"\n  rank {placement.faulty}: finished reduce \(call 2\) .*; it is at \S+program.py:\d+ in busy(\n|\Z)"
        assert re.search(line, note.text), note.text
    (file,) = (tmp_path / "flights").glob(f"*/rank-{placement.faulty}.json")
    told = json.loads(file.read_text())
    assert told["written_by"] != placement.faulty
    assert [frame[2] for frame in told["stack"][0]] == ["busy", "<module>"]


def test_late_rank_inside_another_strategy_is_reported_as_such(job):
    body = """
other = mpidist.MultiWorkerMirroredStrategy()
attempt("late", lambda: (other if is_faulty else strategy).reduce("SUM", 1.0, options=DEADLINE))
strategy.reset()
other.reset()
"""
    ended = job(body, UNEVEN)
    pattern = r"no call since; it is inside mpidist, called at \S+program\.py:\d+ in <lambda>(\n|\Z)"
    assert [note.rank for note in of_others(ended, "late", UNEVEN) if re.search(pattern, note.text)] == UNEVEN.others


def test_stack_signal_that_is_off_leaves_errors_as_they_were(job):
    ended = job(LATE.format("time.sleep(600)"), TWO, MPIDIST_STACK_SIGNAL="off")
    for note in of_others(ended, "late", TWO):
        assert re.search(r"\n  rank 1: finished reduce .* and has made no call since\Z", note.text), note
