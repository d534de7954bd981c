"""Errors and warnings that name late ranks say where each of these is in its program."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from jobs.faults import BLOCKS, THREE, UNEVEN, Job, Placement, job, of_others, on

__all__ = ["job"]

pytestmark = pytest.mark.no_mpi

LATE = """
def busy():
    {}
if is_faulty:
    busy()
attempt("late", lambda: reduce(DEADLINE))
time.sleep(5)  # the others have their error by themselves
sys.exit(3)
"""
PLACE = r"; it is at \S+program\.py:\d+ in busy"


@pytest.mark.core
@on(THREE, BLOCKS, UNEVEN)
@pytest.mark.parametrize("does", ["time.sleep(600)", "while True: pass", "sum(range(10**12))"])
def test_stack_of_a_late_rank_is_in_the_error_of_all_others(job: Job, placement: Placement, does: str) -> None:
    ended = job(LATE.format(does), placement)
    for note in of_others(ended, "late", placement):
        assert note.kind == "DeadlineExceededError", note
        assert re.search(rf"\n  rank {placement.faulty}: finished reduce \(call 2\) .*{PLACE}\Z", note.text), note


def test_stack_of_a_late_rank_is_in_its_flight_file(job: Job, tmp_path: Path) -> None:
    ended = job(LATE.format("while True: pass"), THREE, MPIDIST_FLIGHT_DIR=str(tmp_path / "flights"))
    assert ended.status != 0
    (file,) = (tmp_path / "flights").glob("*/rank-1.json")
    told = json.loads(file.read_text())
    assert told["written_by"] != 1
    assert [frame[2] for frame in told["stack"][0]] == ["busy", "<module>"]


def test_stack_of_a_stopped_rank_is_not_awaited(job: Job) -> None:
    ended = job(LATE.format("os.kill(os.getpid(), signal.SIGSTOP)"), THREE)
    for note in of_others(ended, "late", THREE):
        state = r"its process \d+ is stopped, by a signal or a debugger; it finished [^;]*"
        assert re.search(rf"\n  rank 1: {state}\Z", note.text), note


def test_stack_signal_that_is_off_leaves_errors_as_they_were(job: Job) -> None:
    ended = job(LATE.format("time.sleep(600)"), THREE, MPIDIST_STACK_SIGNAL="off")
    for note in of_others(ended, "late", THREE):
        assert re.search(r"\n  rank 1: finished reduce .* and has made no call since\Z", note.text), note
