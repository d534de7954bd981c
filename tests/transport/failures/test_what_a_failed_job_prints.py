"""What a job prints when it fails: tracebacks of the program's own lines, crashes, and where to read more."""

import subprocess
import sys
from pathlib import Path

import pytest
from jobs.failing import PROJECT, Ended, Job
from mpi_session import clean_environment

pytestmark = [pytest.mark.no_mpi, pytest.mark.core]


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


@pytest.mark.parametrize("what", ["raise KeyError('mine')", "sys.exit('mine')"])
def test_traceback_leaves_out_frames_of_the_library_and_names_the_trace(job: Job, tmp_path: Path, what: str) -> None:
    traces = tmp_path / "traces"
    ended = job(STEP.format(what=what), ranks=2, MPIDIST_TRACE=str(traces) if "Key" in what else "")
    lines = ended.lines_of(1)
    assert [line.split(", in ")[1] for line in lines if ", in " in line] == ["<module>", "step"]
    (last,) = [line for line in lines if line.endswith("'mine'" if "Key" in what else "SystemExit: mine")]
    assert lines[-1] == last or "Key" in what
    if "Key" in what:
        require_trace_is_named(ended, 1, traces)


def test_trace_of_a_job_that_ends_well_is_named(job: Job, tmp_path: Path) -> None:
    ended = job(STEP.format(what="pass"), ranks=2, MPIDIST_TRACE=str(tmp_path / "traces"))
    require_trace_is_named(ended, 0, tmp_path / "traces")


def require_trace_is_named(ended: Ended, rank: int, traces: Path) -> None:
    """Require that this rank says once how to read the trace."""
    (folder,) = traces.iterdir()
    (line,) = [line for line in ended.lines_of(rank) if "trace merge" in line]
    assert line.startswith("what calls waited for: python -m mpidist trace merge ")
    assert Path(line.split()[-1]).name == folder.name
    assert ended.err.count("trace merge") == 1


@pytest.mark.parametrize("is_whole", [False, True])
def test_traceback_of_a_refused_call_ends_in_the_program_unless_asked_for(is_whole: bool) -> None:
    """Also in a process without a launcher."""
    command = [sys.executable, "-c", "import mpidist; mpidist.OneDeviceStrategy().run(print, 1, 2)"]
    environment = {**clean_environment(), "PYTHONPATH": PROJECT, "MPIDIST_TRACEBACK": "full" if is_whole else ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    lines = done.stderr.splitlines()
    assert lines[-1] == "ValueError: run: args must be a list or tuple, got int; write args=(x, y)"
    assert "line 1, in <module>" in done.stderr
    assert any(line.endswith(", in run") for line in lines) == ("/mpidist/" in done.stderr) == is_whole
    assert (lines[-2] == "  (then within mpidist: MPIDIST_TRACEBACK=full prints these frames, too)") != is_whole


def test_crash_of_a_rank_shows_the_line(job: Job) -> None:
    ended = job(STEP.format(what="ctypes.string_at(0)"), ranks=2)
    assert ended.status != 0
    assert "Segmentation fault" in ended.err
    assert "program.py" in ended.err
    assert " in step" in ended.err


def test_immediate_exit_of_a_rank_is_told(job: Job) -> None:
    ended = job(STEP.format(what="os._exit(3)"), ranks=2)
    assert ended.status in (3, 9), "MPICH sometimes tells how it ended the other ranks"
    assert ended.lines_of(1) == [
        "os._exit(3) ends this rank with a strategy that is not closed: the job is not complete"
    ]
