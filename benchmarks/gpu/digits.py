"""Does the example learn on the GPU what it learns on the CPU?"""

from __future__ import annotations

import io
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

from gpu.bench import Bench
from gpu.report import Report

__all__ = ["accuracy", "digits"]

EXAMPLE = str(Path(__file__).parents[2] / "docs" / "examples" / "digits.py")
MOST_DIFFERENCE = 0.011  # of 360 digits: 4. Sums in another order round otherwise


def accuracy(device: str, epochs: int) -> float:
    """Train the example, and return the share of held-out digits that the first rank reads right. Collective."""
    sys.argv, said = [EXAMPLE, "--device", device, "--epochs", str(epochs)], io.StringIO()
    with redirect_stdout(said):
        runpy.run_path(EXAMPLE, run_name="__main__")
    print(said.getvalue(), flush=True)
    found = re.search(r"([\d.]+)% of \d+ held-out", said.getvalue())
    return float(found[1]) / 100 if found else 0.0


def digits(bench: Bench, report: Report) -> None:
    """Train on the CPU and on the GPU, which the ranks share. Collective."""
    gpu, cpu = (accuracy(device, 1 if bench.is_tiny else 12) for device in ("gpu", "cpu"))
    is_right = cpu > 0.5 and abs(gpu - cpu) <= MOST_DIFFERENCE
    question = f"digits on the GPU, {bench.size} rank{'s' * (bench.size > 1)}"
    report.add(question, f"{gpu:.1%} on the GPU, {cpu:.1%} on the CPU", is_right)
