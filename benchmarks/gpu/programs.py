"""What is checked by running other programs: the tests that need a GPU, and the example."""

from __future__ import annotations

import io
import os
import re
import runpy
import sys
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from gpu.bench import Bench
from gpu.report import NOT_MEASURED, Report

__all__ = ["Summary", "accuracy", "digits", "files_with_gpu_tests", "tests"]

ROOT = Path(__file__).parent.parent.parent
TINY_FILES = (  # their tests keep the settings of who starts them, which others take away
    "tests/collectives/test_device_numbers.py",
    "tests/variables/test_variables_on_gpus.py",
)
MOST_DIFFERENCE = 0.011  # of 360 digits: 4. Sums in another order round otherwise


def files_with_gpu_tests() -> list[str]:
    """Return the test modules that have tests marked `gpu`, or use the fixture that is, by name."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(its.relative_to(ROOT)) for its in paths if re.search(r"mark\.gpu|host_cuda\.gpus", its.read_text())]


class Summary:
    """A plugin of pytest that keeps what became of the tests."""

    def __init__(self) -> None:
        self.counts, self.notes = dict.fromkeys(("passed", "failed", "skipped"), 0), ""

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Count, and name the tests that failed, and why others were skipped, most frequent first."""
        its = terminalreporter.stats
        failed = [one.nodeid for one in (*its.get("failed", ()), *its.get("error", ()))]
        reasons = Counter(str(one.longrepr[2]).removeprefix("Skipped: ") for one in its.get("skipped", ()))
        self.counts = {"passed": len(its.get("passed", ())), "failed": len(failed), "skipped": reasons.total()}
        notes = [f"failed: {', '.join(dict.fromkeys(failed))}"] if failed else []
        self.notes = "; ".join([*notes, *(f"skipped: {reason}" for reason, _ in reasons.most_common(3))])[:700]


def tests(bench: Bench, report: Report, ranks: str, name: str, *files: str) -> None:
    """Run the tests of files that need a GPU, or of all; if it is a tiny check, a few, and not of all files."""
    os.chdir(ROOT)
    files = files or (TINY_FILES if bench.is_tiny else tuple(files_with_gpu_tests()))
    summary = Summary()
    options = ["-q", "-m", "gpu", "-rsfE", "-p", "no:cacheprovider", "--ranks", ranks]
    options += ["--sample", "20"] if bench.is_tiny else []
    code = int(pytest.main([*options, *files], plugins=[summary]))
    got = ", ".join(f"{number} {what}" for what, number in summary.counts.items())
    note = summary.notes if code in (0, 1) else f"pytest's exit code {code}; {summary.notes}"
    if code == 0 and not summary.counts["passed"]:
        got, note = NOT_MEASURED, f"{got}; {note}"
    report.add(f"tests that need a GPU, {name}", got, None if got == NOT_MEASURED else code == 0, note=note)


def accuracy(device: str, epochs: int) -> float:
    """Train the example, and return the share of held-out digits that the first rank reads right. Collective."""
    example, said = str(ROOT / "docs" / "examples" / "digits.py"), io.StringIO()
    sys.argv = [example, "--device", device, "--epochs", str(epochs)]
    with redirect_stdout(said):
        runpy.run_path(example, run_name="__main__")
    print(said.getvalue(), flush=True)
    found = re.search(r"([\d.]+)% of \d+ held-out", said.getvalue())
    return float(found[1]) / 100 if found else 0.0


def digits(bench: Bench, report: Report) -> None:
    """Train on the CPU and on the GPU, which the ranks share. Collective."""
    gpu, cpu = (accuracy(device, 1 if bench.is_tiny else 12) for device in ("gpu", "cpu"))
    is_right = cpu > 0.5 and abs(gpu - cpu) <= MOST_DIFFERENCE
    question = f"digits on the GPU, {bench.size} rank{'s' * (bench.size > 1)}"
    report.add(question, f"{gpu:.1%} on the GPU, {cpu:.1%} on the CPU", is_right)
