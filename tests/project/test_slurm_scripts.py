"""The job script with parameter servers: which ranks it starts, and how many serve. A stand-in answers for srun."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.no_mpi

SCRIPT = Path(__file__).parents[2] / "slurm" / "roles.sbatch"
JOB = {"SLURM_JOB_ID": "7", "MPI_TYPE": "pmi2", "VIRTUAL_ENV": "/nowhere"}
TWO_COMPONENTS = {"SLURM_HET_SIZE": "2", "SLURM_NTASKS_HET_GROUP_0": "4", "SLURM_NTASKS_HET_GROUP_1": "2"}


@pytest.mark.parametrize(
    ("variables", "said", "started"),
    [
        (TWO_COMPONENTS, "workers: 4, parameter servers: 2", "2: --het-group=0,1 --mpi=pmi2"),
        ({"SLURM_NTASKS": "5"}, "workers: 4, parameter servers: 1", "1: --mpi=pmi2"),
        ({"SLURM_NTASKS": "5", "NUM_PS": "3"}, "workers: 2, parameter servers: 3", "3: --mpi=pmi2"),
    ],
    ids=["two components", "plain", "plain with NUM_PS"],
)
def test_roles_of_a_job(tmp_path: Path, variables: dict[str, str], said: str, started: str) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$NUM_PS: $*"\n')
    srun.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **JOB, **variables}
    command = ["bash", str(SCRIPT), "train.py", "--name", "two words"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"job 7: {said}",
        f"{started} --kill-on-bad-exit=1 python train.py --name two words",
    ]


@pytest.mark.parametrize(
    ("code", "attempt", "is_requeued"),
    [(75, "0", True), (75, "3", True), (75, "20", False), (1, "0", False), (0, "0", False)],
)
def test_requeue_when_the_program_says_try_again(tmp_path: Path, code: int, attempt: str, is_requeued: bool) -> None:
    stand_ins = {"srun": f'case "$*" in *python*) exit {code};; esac', "scontrol": 'echo "scontrol $*"', "sleep": ""}
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_RESTART_COUNT": attempt, "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2", "USER": "user"}
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **JOB, **variables}
    command = ["bash", str(SCRIPT.with_name("requeue.sbatch")), "train.py"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert ("scontrol requeue 7" in done.stdout) == is_requeued
