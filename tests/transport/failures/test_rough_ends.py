"""Jobs that fail where saying so is hard: each ends soon, with a code that is not 0, and says what it can."""

import re

import pytest
from jobs.failing import HEAD, LONG_SECONDS, SIGNS, Job

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
