"""What a job prints when it fails: tracebacks of the program's own lines, crashes, and where to read more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from jobs.failing import PROJECT, Job, job
from mpi_session import clean_environment

pytestmark = [pytest.mark.no_mpi, pytest.mark.core]

__all__ = ["job"]

STEP = """
import ctypes
def step(number):
    if rank == 1 and number == 2:
        {what}
    mpidist.get_replica_context().all_reduce("sum", 1.0)
with strategy.scope():
    for number in range(4):
        strategy.run(step, args=(number,))
"""


# One rank alone: the first of several that fail may end the others before they print.
REFUSED = "if rank == 0: strategy.run(print, 1)"


@pytest.mark.parametrize("what", ["raise KeyError('mine')", "sys.exit('mine')"])
def test_traceback_leaves_out_frames_of_the_library(job: Job, what: str) -> None:
    lines = job(STEP.format(what=what)).lines_of(1)
    assert [line.split(", in ")[1] for line in lines if ", in " in line] == ["<module>", "step"]
    assert lines[-1].endswith("'mine'" if "Key" in what else "SystemExit: mine")


def test_traceback_of_a_refused_call_ends_in_the_program(job: Job) -> None:
    lines = job(REFUSED).lines_of(0)
    assert lines[-2:] == [
        "  (then within mpidist: MPIDIST_TRACEBACK=full prints these frames, too)",
        "ValueError: run: args must be a list or tuple, got int; write args=(x,)",
    ]
    assert "/mpidist/" not in "".join(lines)


def test_traceback_is_whole_if_asked_for(job: Job) -> None:
    lines = job(REFUSED, MPIDIST_TRACEBACK="full").lines_of(0)
    assert any(line.endswith(", in run") for line in lines)


def test_traceback_of_a_process_without_a_launcher_is_short_too() -> None:
    program = "import mpidist; mpidist.OneDeviceStrategy().run(print, 1, 2)"
    command = [sys.executable, "-c", program]
    environment = {**clean_environment(), "PYTHONPATH": PROJECT}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr.splitlines()[-1].endswith("write args=(x, y)")
    assert "line 1, in <module>" in done.stderr
    assert "/mpidist/" not in done.stderr


def test_crash_of_a_rank_shows_the_line(job: Job) -> None:
    ended = job(STEP.format(what="ctypes.string_at(0)"))
    assert ended.status != 0
    assert "Segmentation fault" in ended.err
    assert "program.py" in ended.err
    assert " in step" in ended.err


def test_immediate_exit_of_a_rank_is_told(job: Job) -> None:
    ended = job(STEP.format(what="os._exit(0)"))
    assert ended.lines_of(1) == [
        "os._exit(0) ends this rank with a strategy that is not closed: the job is not complete"
    ]
    assert not job("if os.fork() == 0:\n    os._exit(0)\nos.wait()\nstrategy.close()").err


@pytest.mark.parametrize("fails", [False, True])
def test_job_that_is_traced_says_once_how_to_read_the_trace(job: Job, tmp_path: Path, fails: bool) -> None:
    what = "raise KeyError('mine')" if fails else "pass"
    ended = job(STEP.format(what=what), MPIDIST_TRACE=str(tmp_path / "traces"))
    (folder,) = (tmp_path / "traces").iterdir()
    (line,) = [line for line in ended.lines_of(int(fails)) if "trace merge" in line]
    assert line.startswith("what calls waited for: python -m mpidist trace merge ")
    assert Path(line.split()[-1]).name == folder.name
    assert ended.err.count("trace merge") == 1
