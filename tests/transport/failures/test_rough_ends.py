"""Jobs that fail, or never start, where saying so is hard: each ends soon, with a code that is not 0, and says why."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs.failing import HEAD, LONG_SECONDS, PROJECT, SIGNS, Ended, Job
from mpi_session import clean_environment

pytestmark = [pytest.mark.no_mpi, pytest.mark.core]

IMPORTS = HEAD.partition("strategy =")[0]
DEADLINE = {"MPIDIST_TIMEOUT_SECONDS": "0.5"}


def test_exception_that_cannot_say_what_it_is_is_named(job: Job) -> None:
    program = """
class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")
if rank == 1:
    raise Mute
reduce_for_ever()
"""
    ended = job(program, ranks=2)
    assert ended.status != 0
    assert ended.lines_of(1)[-1] == "Mute: <exception str() failed>"
    assert "Error in sys.excepthook" not in ended.err


def test_a_deleted_folder_is_no_other_error(job: Job, tmp_path: object) -> None:
    program = (
        IMPORTS
        + SIGNS
        + """
import tempfile
from mpi4py import MPI
folder = tempfile.mkdtemp()
os.chdir(folder)
strategy = mpidist.MultiWorkerMirroredStrategy()
rank = strategy.topology.rank
os.rmdir(folder)
if rank == 1:
    await_signs("rank 0")
try:
    strategy.reduce("SUM", 1.0, options=mpidist.CommunicationOptions(timeout_seconds=0.5))
except mpidist.errors.DeadlineExceededError as error:
    sys.stdout.write(f"rank {rank} is told\\n")
    sys.stdout.flush()
leave_sign(f"rank {rank}")
await_signs("rank 0")
raise KeyError("mine")
"""
    )
    ended = job(program, ranks=2, head="", MPIDIST_FLIGHT_DIR="")
    assert ended.status != 0
    assert "rank 0 is told" in ended.out
    assert "FileNotFoundError" not in ended.err
    assert "KeyError: 'mine'" in ended.err


def test_many_signals_at_once_are_one(job: Job, tmp_path: object) -> None:
    program = """
def storm():
    for _ in range(200):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.002)
threading.Thread(target=storm, daemon=True).start()
end = time.monotonic() + 0.8
while strategy.reduce("MIN", end - time.monotonic()) > 0:
    pass
strategy.close()
"""
    ended = job(program, ranks=2, MPIDIST_FLIGHT_DIR=str(tmp_path))
    assert ended.status == 0, ended.err


BUILD = """
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
if rank == 1:
    await_signs({signs})
for _ in range(3):
    try:
        strategy = mpidist.MultiWorkerMirroredStrategy()
    except (mpidist.errors.DeadlineExceededError, mpidist.errors.UnavailableError) as error:
        sys.stdout.write(f"rank {{rank}}: {{type(error).__name__}} {{error}}\\n")
        sys.stdout.flush()
leave_sign(f"rank {{rank}} has tried")
"""


def test_strategy_that_a_rank_builds_too_late_ends_the_job(job: Job) -> None:
    """Also one that is tried again, and for the rank that comes too late."""
    ended = job(IMPORTS + SIGNS + BUILD.format(signs="'rank 0 has tried'"), ranks=2, head="", **DEADLINE)
    assert ended.status != 0
    assert "rank 0: DeadlineExceededError building a strategy on rank 0 has waited" in ended.out
    assert ended.out.count("rank 0: UnavailableError not all ranks came to build a strategy before") == 2


def test_strategy_that_a_rank_never_builds_ends_the_job(job: Job) -> None:
    ended = job(IMPORTS + SIGNS + BUILD.format(signs="'never'"), ranks=2, head="", **DEADLINE)
    assert ended.status != 0
    assert "this job ends with exit code 75: not all ranks came to build a strategy" in ended.err


NOT_BUILT = f"""
import time
from mpi4py import MPI
import mpidist
MPI.COMM_WORLD.Barrier()  # all have imported what they need
if MPI.COMM_WORLD.rank == 0:
    time.sleep({LONG_SECONDS})
mpidist.MultiWorkerMirroredStrategy()
"""


@pytest.mark.parametrize("before", [(), ("sh", "-c", '"$@"; exit $?', "sh")], ids=["no shell", "a shell for each rank"])
def test_ranks_warn_that_rank_0_does_not_build_a_strategy(job: Job, before: tuple[str, ...]) -> None:
    ended = job(NOT_BUILT, head="", before=before, MPIDIST_STALL_SECONDS="1", MPIDIST_TIMEOUT_SECONDS="3")
    pattern = r"building a strategy on rank [12] has waited \d+ s, and not all 3 ranks have come to build it"
    places = r" \(rank 0: \S+program\.py:7 in <module>; ranks 1-2: \S+program\.py:8 in <module>\)"
    assert len(re.findall(pattern + (r"" if before else places), ended.err)) == 1, ended.err


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


LAUNCHED = """
import os, sys, time
rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")))
"""
BUILD_AND_ADD = """
strategy = mpidist.MultiWorkerMirroredStrategy()
sys.stdout.write(f"sum {strategy.reduce('sum', 1.0)}\\n")
strategy.close()
"""
# Rank 1 comes when another one has warned of it.
COMES_LATE = """
import logging
import mpidist
class Sign(logging.StreamHandler):
    def emit(self, record):
        super().emit(record)
        leave_sign("a warning")
logging.getLogger("mpidist").addHandler(Sign())
if rank == 1:
    await_signs("a warning")
"""
WARNING = "starting MPI on rank 0 has waited"


@pytest.mark.parametrize(
    ("fault", "status", "ranks"), [("raise KeyError('mine')", 1, 3), ("sys.exit(3)", 3, 2)], ids=["exception", "exit"]
)
def test_rank_that_fails_before_its_first_strategy_ends_the_job(job: Job, fault: str, status: int, ranks: int) -> None:
    """Whether the other ranks wait in MPI_Init for the rank, or do not come there for long."""
    program = LAUNCHED + f"import mpidist\nif rank == 1:\n    time.sleep(0.5)\n    {fault}\n"
    program += f"if rank == 2:\n    time.sleep({LONG_SECONDS})\n"
    ended = job(program + BUILD_AND_ADD, ranks=ranks, head="")
    assert ended.status == status
    if status == 1:
        assert ended.err.count("KeyError: 'mine'") == ended.err.count("Traceback") == 1


def test_a_mistake_of_all_ranks_is_printed_once(job: Job) -> None:
    ended = job(LAUNCHED + "import mpidist\ntime.sleep(60 * rank)\nraise KeyError('ours')\n", ranks=2, head="")
    assert ended.status == 1
    assert ended.err.count("KeyError: 'ours'") == 1


def test_exit_in_good_order_ends_no_job(job: Job) -> None:
    program = LAUNCHED + "import mpidist\nif rank:\n    time.sleep(0.5)\n    print('came')\nsys.exit(0)\n"
    ended = job(program, ranks=2, head="")
    assert (ended.status, ended.out) == (0, "came\n")


def test_a_rank_that_comes_late_is_named_once(job: Job) -> None:
    ended = job(LAUNCHED + "import mpidist\n" + SIGNS + COMES_LATE + BUILD_AND_ADD, head="", MPIDIST_STALL_SECONDS="5")
    assert (ended.status, ended.out.count("sum 3.0")) == (0, 3)
    assert ended.err.count("has waited") == ended.err.count(WARNING) == 1
    assert "and rank 1 (process " in ended.err
    assert re.search(r"\) did not come to start it \(rank 1: \S+program\.py:\d+ in await_signs\)", ended.err)


def test_ranks_that_do_not_come_until_the_deadline_end_the_job(job: Job) -> None:
    """There a short deadline counts as 10 s, and nobody is late before 5 s. A rank leaves before it has imported."""
    program = (
        LAUNCHED + f"if rank == 2:\n    os._exit(0)\nif rank == 1:\n    time.sleep({LONG_SECONDS})\nimport mpidist\n"
    )
    ended = job(program + BUILD_AND_ADD, head="", MPIDIST_STALL_SECONDS="1", MPIDIST_TIMEOUT_SECONDS="2")
    assert ended.status == 1
    assert len(re.findall(rf"mpidist: {WARNING} \d+ s", ended.err)) == 1
    last = ended.lines_of(0)[-1]
    assert re.match(rf"mpidist\.errors\.DeadlineExceededError: {WARNING} \d\d s, and rank 1 \(process ", last)
    assert ") did not come to start it, and the program of rank 2 has ended. Every rank must" in last
    assert "strategy = mpidist.MultiWorkerMirroredStrategy()" in ended.err  # where the program waits
    assert "start_mpi" not in ended.err  # what lies within the library tells nothing
