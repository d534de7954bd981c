"""Counts what budget.cfg limits."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

from mpi_session import clean_environment
from mpi_session.selection import plan, teams_of

ROOT = Path(__file__).resolve().parents[2]


def totals():
    """Return today's totals, by section and name."""
    package = [ast.parse(path.read_text()) for path in ROOT.glob("mpidist/**/*.py")]
    return {
        ("mpidist", "lines"): _lines("mpidist", "py", "pyi", "c", "h", "cu"),
        ("mpidist", "classes"): sum(isinstance(node, ast.ClassDef) for tree in package for node in ast.walk(tree)),
        ("mpidist", "modules"): len(package),
        ("tests", "lines"): _lines("tests", "py", "cpp", "h", "c", "sh"),
        ("tests", "runs"): _runs(),
        ("docs", "words"): sum(len(path.read_text().split()) for path in _files("docs", "md")),
        ("benchmarks", "lines"): _lines("benchmarks", "py"),
    }


def _files(folder, *endings):
    for path in (ROOT / folder).rglob("*.*"):
        if path.suffix[1:] in endings and "_build" not in path.parts:
            yield path


def _lines(folder, *endings):
    return sum(len(path.read_text().splitlines()) for path in _files(folder, *endings))


def _runs():
    """Let a session of its own collect all tests, which ends with `pytest_collection_finish` below."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-qq",
        "-m",
        "not gpu",
        "-p",
        "project.budget",
        "tests",
    ]
    environment = {
        **clean_environment(),
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("tests", "tools")),
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    found = re.search(r"^(\d+) runs$", done.stdout, re.MULTILINE)
    assert found, f"the tests could not be collected:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return int(found[1])


def pytest_collection_finish(session):
    runs = plan(session.items, teams_of([1, 2, 3, 4], num_lanes=1))
    print(f"\n{sum(map(len, runs.values()))} runs")


if __name__ == "__main__":
    for (section, name), number in totals().items():
        print(f"{section:<10} {name:<8} {number:>7,}")
