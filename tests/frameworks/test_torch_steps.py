"""The benchmarks of PyTorch run, and write a row for each way."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from mpi_session import clean_environment

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WAYS = [
    "no reduction",
    "reduction alone, gloo",
    "reduction alone, mpidist",
    "DDP over gloo",
    "DDP over mpidist",
    "all_reduce_gradients",
]

pytestmark = pytest.mark.no_mpi


def run(*arguments):
    command = [sys.executable, str(BENCHMARKS), *arguments]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def measured(folder, name, *arguments):
    """Run a case once, and return its rows."""
    options = ["--rounds=1", "--seconds=0.01", f"--env=tensors={sys.executable}", f"--out={folder}"]
    said = run(name, *arguments, *options)
    (path,) = folder.glob("*.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(float(row["us"]) > 0 for row in rows), said
    return rows


def test_torch_steps_compare_added_time_with_that_of_gloo(tmp_path):
    rows = measured(tmp_path, "torch_steps", "--lists=transformer,3x2K")
    assert [(row["work"], row["way"]) for row in rows] == [
        (work, way) for work in ("transformer", "3x2K") for way in WAYS
    ]
    assert [bool(row["added"]) for row in rows] == [False, False, False, False, True, True] * 2


def test_torch_steps_of_an_older_commit_take_turns(tmp_path):
    """The commit of now: an older one may not be in a shallow copy of the repository."""
    if subprocess.run(["git", "-C", str(BENCHMARKS), "rev-parse", "HEAD"], capture_output=True, check=False).returncode:
        pytest.skip("there is no history of git here")
    rows = measured(tmp_path, "torch_steps", "--lists=3x2K", "--beside=HEAD")
    assert [(row["peer"], row["way"]) for row in rows] == [
        (peer, way) for peer in ("torch", "torch@HEAD") for way in WAYS
    ]
    assert all(row["old_by_new"] for row in rows if row["peer"] == "torch")


def test_collectives_of_torch_are_right_and_compared_with_gloo(tmp_path):
    rows = measured(tmp_path, "torch_collectives", "--sizes=4K", "--ranks=3")
    assert [row["way"].rpartition(", ")[2] for row in rows] == ["gloo"] * 9 + ["mpidist"] * 9
    assert all(row["ratio"] for row in rows[9:])


def test_checkpoints_of_torch_are_measured(tmp_path):
    rows = measured(tmp_path, "checkpoints", "--dcp", "--sizes=64K")
    assert {"DCP save", "DCP async_save", "save"} <= {row["way"] for row in rows}


def test_torch_faults_prints_a_row_of_jobs_that_end_with_the_rank_named():
    said = run("torch_faults", "--faults=leaves", "--runs=1", f"--env=tensors={sys.executable}")
    assert said.splitlines()[-1].startswith("leaves | 1 | 1 | 1 x 1 | 0 | ")
