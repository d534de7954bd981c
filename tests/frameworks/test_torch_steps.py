"""The benchmark of training steps in PyTorch: does it run?"""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from mpi_session import clean_environment

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WAYS = ["no reduction", "DDP over gloo", "mpidist, out= gradients", "mpidist, symmetric"]

pytestmark = [pytest.mark.no_mpi, pytest.mark.timeout(180)]


def test_steps_of_all_ways_are_measured(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS), "torch_steps", "--width=16", "--rounds=1", f"--out={tmp_path}"]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "torch_steps.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = [(work, way) for work in ("float32", "bfloat16") for way in WAYS for _ in range(2)]
    assert [(row["work"], row["way"]) for row in rows] == wanted
    assert all(float(row["us"]) > 0 for row in rows if row["column"] == "a step" or row["way"] != WAYS[0])
    assert done.stdout.count("MiB of new pages in a step") == len(rows) // 2
    assert done.stdout.count("of the reduction hidden") == 2 * (len(WAYS) - 1)
