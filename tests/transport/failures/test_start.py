"""Jobs in which a rank does not come to start MPI: none waits in silence, or for ever where a deadline is set."""

import re

import pytest
from jobs.failing import LONG_SECONDS, SIGNS, Job

pytestmark = [pytest.mark.no_mpi, pytest.mark.core]

LAUNCHED = """
import os, sys, time
rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")))
"""
BUILD = """
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
    ended = job(program + BUILD, ranks=ranks, head="")
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
    ended = job(LAUNCHED + "import mpidist\n" + SIGNS + COMES_LATE + BUILD, head="", MPIDIST_STALL_SECONDS="5")
    assert (ended.status, ended.out.count("sum 3.0")) == (0, 3)
    assert ended.err.count("has waited") == ended.err.count(WARNING) == 1
    assert "and rank 1 (process " in ended.err
    assert re.search(r"\) did not come to start it \(rank 1: \S+program\.py:\d+ in await_signs\)", ended.err)


def test_ranks_that_do_not_come_until_the_deadline_end_the_job(job: Job) -> None:
    """There a short deadline counts as 10 s, and nobody is late before 5 s. A rank leaves before it has imported."""
    program = (
        LAUNCHED + f"if rank == 2:\n    os._exit(0)\nif rank == 1:\n    time.sleep({LONG_SECONDS})\nimport mpidist\n"
    )
    ended = job(program + BUILD, head="", MPIDIST_STALL_SECONDS="1", MPIDIST_TIMEOUT_SECONDS="2")
    assert ended.status == 1
    assert len(re.findall(rf"mpidist: {WARNING} \d+ s", ended.err)) == 1
    last = ended.lines_of(0)[-1]
    assert re.match(rf"mpidist\.errors\.DeadlineExceededError: {WARNING} \d\d s, and rank 1 \(process ", last)
    assert ") did not come to start it, and the program of rank 2 has ended. Every rank must" in last
    assert "strategy = mpidist.MultiWorkerMirroredStrategy()" in ended.err  # where the program waits
    assert "start_mpi" not in ended.err  # what lies within the library tells nothing
