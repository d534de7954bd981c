"""The benchmarks of PyTorch: do they run?"""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from mpi_session import clean_environment

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OURS = ["DDP over mpidist", "all_reduce_gradients"]
WAYS = ["no reduction", "DDP over gloo", *OURS]

pytestmark = pytest.mark.no_mpi


def run(*arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS), *arguments]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows_in(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_steps_of_all_ways_are_measured(tmp_path: Path) -> None:
    said = run("torch_steps", "--width=16", "--models=transformer,3x500", "--rounds=1", f"--out={tmp_path}")
    rows = rows_in(tmp_path / "torch_steps.csv")
    wanted = [(work, way) for work in ("transformer float32", "3x500 float32") for way in WAYS for _ in range(2)]
    assert [(row["work"], row["way"]) for row in rows] == wanted
    assert all(float(row["us"]) > 0 for row in rows if row["column"] == "a step" or row["way"] != WAYS[0])
    assert said.count("MiB of new pages in a step") == len(rows) // 2
    assert said.count("of the reduction hidden") == 2 * (len(WAYS) - 1)


def test_steps_of_an_older_commit_take_turns(tmp_path: Path) -> None:
    """The commit of now: an older one may not be in a shallow copy of the repository."""
    if subprocess.run(["git", "-C", str(BENCHMARKS), "rev-parse", "HEAD"], capture_output=True, check=False).returncode:
        pytest.skip("there is no history of git here")
    run("torch_steps", "--width=16", "--rounds=3", "--dtypes=bfloat16", "--beside=HEAD", f"--out={tmp_path}")
    path = tmp_path / "torch_steps-beside-HEAD.csv"
    steps = {row["way"]: row for row in rows_in(path) if row["column"] == "a step"}
    assert list(steps) == [*WAYS, *(f"{way} @HEAD" for way in OURS)]
    for way in OURS:
        rounds = [[float(one) for one in steps[name]["us_rounds"].split()] for name in (f"{way} @HEAD", way)]
        ratios = sorted(old / new for old, new in zip(*rounds, strict=True))
        found = [float(steps[way][f"old_by_new{end}"]) for end in ("_low", "", "_high")]
        assert found == pytest.approx(ratios, abs=1e-3)
        assert float(steps[way]["most_mib"]) >= 0 <= float(steps[way]["new_pages_mib"])


def test_lists_are_measured_beside_those_of_numpy(tmp_path: Path) -> None:
    said = run("torch_lists", "--lists=3x5,8x100", "--rounds=1", f"--out={tmp_path}")
    rows = rows_in(tmp_path / "torch_lists.csv")
    assert [row["work"] for row in rows] == ["3x5"] * 5 + ["8x100"] * 5
    assert all(float(row["us"]) > 0 for row in rows)
    assert said.count("tensors, in place") == 2


def test_torch_faults_prints_a_row_of_jobs_that_end_with_the_rank_named() -> None:
    said = run("torch_faults", "--faults=leaves", "--runs=1", f"--env={sys.executable}")
    assert said.splitlines()[-1].startswith("leaves | 1 | 1 | 1 x 1 | 0 | ")


def test_collectives_of_torch_are_measured_beside_gloo(tmp_path: Path) -> None:
    run("torch_collectives", "--sizes=4K", "--rounds=1", f"--out={tmp_path}")
    rows = rows_in(tmp_path / "torch_collectives.csv")
    assert [row["way"] for row in rows] == ["gloo", "mpidist"] * 9
    assert all(float(row["us"]) > 0 for row in rows)
