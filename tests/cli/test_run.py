"""`mpidist run` starts ranks with the launcher of the MPI that this Python's mpi4py loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mpi_session import HANG_SECONDS, clean_environment

pytestmark = [pytest.mark.no_mpi, pytest.mark.core]

PROGRAM = """
import os, sys
import mpidist
strategy = mpidist.MultiWorkerMirroredStrategy()
words = ["rank", strategy.rank, "of", strategy.size, os.environ["OMP_NUM_THREADS"], *sys.argv[1:]]
os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # at once: launchers may put others between two writes
sys.exit(7 if "fail" in sys.argv and strategy.rank == 1 else 0)
"""


def mpidist_run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(PROGRAM)
    unset = {"OMP_NUM_THREADS", "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"}
    environment = {name: value for name, value in clean_environment().items() if name not in unset}
    return subprocess.run(
        [sys.executable, "-m", "mpidist", "run", *arguments],
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


@pytest.mark.parametrize("program", [["train.py"], ["-m", "train"]], ids=["file", "module"])
def test_run_starts_so_many_ranks_with_the_arguments_of_the_program(tmp_path: Path, program: list[str]) -> None:
    done = mpidist_run(tmp_path, "-n", "3", *program, "-n", "--tag")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 3 1 -n --tag" for rank in range(3)]


def test_run_ends_with_the_exit_status_of_the_program_and_tags_its_lines(tmp_path: Path) -> None:
    done = mpidist_run(tmp_path, "-n", "2", "--tag", "--threads", "5", "train.py", "fail", OMP_NUM_THREADS="2")
    assert done.returncode == 7
    (line,) = (line for line in done.stdout.splitlines() if "rank 1 of 2 5" in line)
    assert line.startswith(("[1]", "[1,1]"))


def test_run_leaves_a_number_of_threads_that_is_set_to_all_libraries(tmp_path: Path) -> None:
    words = mpidist_run(
        tmp_path, "-n", "1", "--dry-run", "train.py", OMP_NUM_THREADS="3", OPENBLAS_NUM_THREADS=""
    ).stdout
    assert "NUM_THREADS" not in words


def test_run_in_a_job_of_slurm_uses_srun_for_all_tasks(tmp_path: Path) -> None:
    (tmp_path / "srun").touch(mode=0o755)
    job = {"SLURM_JOB_ID": "3", "SLURM_NTASKS": "8", "SLURM_CPUS_PER_TASK": "4", "SLURM_PROCID": "0"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    words = mpidist_run(tmp_path, "--dry-run", "train.py", PATH=path, **job).stdout.split()
    assert "OMP_NUM_THREADS=4" in words
    srun = words[words.index("srun") :]
    assert srun[1] in ("--mpi=pmi2", "--mpi=pmix")
    assert srun[2:6] == ["-n", "8", "-c", "4"]
    assert srun[-2:] == [sys.executable, "train.py"]


@pytest.mark.parametrize(
    ("arguments", "variables", "text"),
    [
        (["train.py"], {}, "how many ranks? Give -n, as in `mpidist run -n "),
        (["-n", "2", "none.py"], {}, "there is no file none.py in "),
        (["-n", "2", "none"], {}, "there is no program none: "),
        (["-n", "2", "train.py"], {"PMI_RANK": "1", "PMI_SIZE": "2"}, "this process is a rank already: "),
        (["-n", "0", "train.py"], {}, "'0' is no number of 1 or more"),
    ],
)  # fmt: skip
def test_run_refuses_and_says_what_to_do(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], text: str
) -> None:
    done = mpidist_run(tmp_path, *arguments, **variables)
    assert done.returncode == 2
    assert text in done.stderr.replace("\n", " ")
