"""Training that is disturbed in a real Slurm: it is requeued, goes on, and ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
from slurm.batch_jobs import LIBRARIES, PROJECT, BatchJob, submit
from slurm.emulated_cluster import EmulatedCluster

pytestmark = [pytest.mark.no_mpi, pytest.mark.long, pytest.mark.timeout(300)]

EXAMPLE = PROJECT / "docs" / "examples" / "preemptible.py"
# The example, slowly in the attempts that are to be disturbed. It tells when all ranks have made a step.
PROGRAM = f"""
import os, runpy, sys
from mpidist.experimental import PreemptionCheckpointHandler

attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
original = PreemptionCheckpointHandler.run

def run(self, *arguments):
    if self.total_run_calls == 1 and os.environ["SLURM_PROCID"] == "0":
        print(f"attempt {{attempt}} works", flush=True)
    return original(self, *arguments)

PreemptionCheckpointHandler.run = run
sys.argv = ["preemptible.py", "checkpoints", "0.5" if attempt < int(sys.argv[1]) else "0"]
end = runpy.run_path({str(EXAMPLE)!r})
if os.environ["SLURM_PROCID"] == "0":
    print("bits", end["weights"].numpy().tobytes().hex())
"""
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1", "--time=10", "--signal=USR1@5")


def last_lines(job: BatchJob) -> list[str]:
    ended = job.end()
    assert (ended.state, ended.code) == ("COMPLETED", 0), str(ended)
    lines = [line for line in ended.output.splitlines() if line.startswith(("step ", "bits "))]
    assert len(lines) == 2, str(ended)
    return lines


def test_disturbed_training_ends_with_the_same_bits(cluster: EmulatedCluster, tmp_path: Path) -> None:
    """By a signal, by a requeue, and by a time limit. With both libraries at once, as jobs mostly wait."""
    jobs, undisturbed = [], []
    for library in LIBRARIES:
        for name, disturbances in (("disturbed", "3"), ("undisturbed", "0")):
            folder = tmp_path / f"{library}-{name}".replace(" ", "-")
            folder.mkdir()
            job = submit(cluster, folder, library, "requeue.sbatch", PROGRAM, *TWO_NODES, arguments=(disturbances,))
            (undisturbed if disturbances == "0" else jobs).append(job)
    for job in jobs:
        job.wait_for_output("attempt 0 works")
        cluster.call("scancel", "--signal=USR1", job.number)
    for job in jobs:
        job.wait_for_output(f"job {job.number}: saved, goes on in attempt 1")
        job.start_again(1, "10")
    for job in jobs:
        job.wait_for_output("attempt 1 works")
        cluster.call("scontrol", "requeue", job.number)
    for job in jobs:
        job.start_again(2, "1")  # Slurm warns of its end 25 s after the start at the earliest
    for job in jobs:
        job.wait_for_output("attempt 2 works")
    for job in jobs:
        job.wait_for_output(f"job {job.number}: saved, goes on in attempt 3")
        job.start_again(3, "10")
    assert [last_lines(job) for job in jobs] == [last_lines(job) for job in undisturbed]


def test_cancelled_job_is_not_requeued(cluster: EmulatedCluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, LIBRARIES[0], "requeue.sbatch", PROGRAM, *TWO_NODES, arguments=("1",))
    job.wait_for_output("attempt 0 works")
    assert job.cancel().state == "CANCELLED"
    assert job.restarts() == 0
    assert job.processes() == []
