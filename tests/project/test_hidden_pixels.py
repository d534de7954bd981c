"""The example with parameter servers: each of its ways learns, on any number of ranks; wrong numbers are refused."""

import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from jobs.failing import ran
from jobs.faults import environment
from mpi_session.launch import Launcher

import mpidist

pytestmark = pytest.mark.no_mpi

ROOT = Path(mpidist.__file__).parents[1]
WANTED = 0.205  # the mean of each pixel has an error of 0.27
ROW = re.compile(r"^(in step|at most 8 steps ahead|free) +(?:0|8|None) +(\d+) +[\d.]+ +[\d.]+ +([\d.]+)$", re.MULTILINE)


def run(folder, ranks, *arguments, **variables):
    program = [sys.executable, str(ROOT / "docs" / "examples" / "hidden_pixels.py"), *arguments]
    command = [*Launcher.find(None).command, "-n", str(ranks), *program] if ranks else program
    return ran(command, env={**environment(), **variables}, cwd=folder)


@pytest.mark.core
@pytest.mark.parametrize(("ranks", "workers", "servers"), [(4, 2, 2), (0, 1, 1), (3, 1, 2)])
def test_hidden_pixels_reaches_the_error_in_all_modes(tmp_path, ranks, workers, servers):
    """0 ranks: without mpiexec."""
    plot = ["--plot", "curves.png"] if find_spec("matplotlib") else []
    done = run(tmp_path, ranks, "--steps", "300", "--pause", "0.002", *plot)
    assert done.returncode == 0, done.stderr
    assert f"workers: {workers}, servers: {servers};" in done.stdout
    rows = ROW.findall(done.stdout)
    assert [row[0] for row in rows] == ["in step", "at most 8 steps ahead", "free"], done.stdout
    for _, steps, error in rows:
        assert 300 <= int(steps) < 300 + workers
        assert float(error) <= WANTED
    assert not plot or (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_hidden_pixels_servers_are_set_by_option_or_variable(tmp_path):
    few = "--steps", "5", "--pause", "0"
    assert "workers: 2, servers: 1;" in run(tmp_path, 3, "--servers", "1", *few).stdout
    assert "workers: 2, servers: 1;" in run(tmp_path, 3, *few, NUM_PS="1").stdout


@pytest.mark.parametrize(
    ("ranks", "arguments", "text"),
    [
        (3, ["--servers", "3"], "num_ps=3 of 3 ranks leaves no worker; start more ranks"),
        (0, ["--servers", "0"], "--servers must be 1 or more, got 0"),
        (0, ["--steps", "-1"], "--steps must be 1 or more, got -1"),
    ],
)
def test_wrong_numbers_are_refused(tmp_path, ranks, arguments, text):
    done = run(tmp_path, ranks, *arguments)
    assert done.returncode != 0
    assert text in done.stderr + done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("ranks", ["x", "0", "-1", "2.5", ""])
def test_make_refuses_a_number_of_ranks_that_is_none(ranks):
    """The launcher would start nothing, say nothing, and end with 0."""
    command = ["make", "--dry-run", "train-ps", f"RANKS={ranks}"]
    done = ran(command, cwd=ROOT, env=dict(os.environ))
    assert done.returncode == 2
    assert f"RANKS={ranks} is no number of ranks" in done.stderr
