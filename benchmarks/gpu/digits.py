"""Does the example program learn the digits as well on the GPU as on the CPU? With 1 rank, and with 4 that share it."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from gpu.report import Report

__all__ = ["accuracy", "main"]

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "docs" / "examples" / "digits.py"
MOST_DIFFERENCE = 0.011  # of 360 digits: 4. Sums in another order round otherwise
TARGET = "as on the CPU, within 1.1 %"


def accuracy(ranks: int, device: str, epochs: int, seconds: float) -> float:
    """Train, and return the share of held-out digits that are read right.

    Raises:
        RuntimeError: If the program fails.
    """
    launcher = [*shlex.split(os.environ.get("GPU_CHECK_MPIEXEC", "mpiexec")), "-n", str(ranks)] if ranks > 1 else []
    command = [*launcher, sys.executable, str(EXAMPLE), "--device", device, "--epochs", str(epochs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    print(done.stdout[-2000:], done.stderr[-4000:], flush=True)
    found = re.search(r"([\d.]+)% of \d+ held-out", done.stdout)
    if done.returncode or found is None:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"exit code {done.returncode}: {last}")
    return float(found[1]) / 100


def measure(report: Report, epochs: int) -> None:
    """Train on the CPU and on the GPU."""
    for ranks in (1, 4):
        question = f"digits on the GPU, {ranks} rank" + "s" * (ranks > 1)
        with report.question("digits", question):
            gpu, cpu = (accuracy(ranks, device, epochs, 60) for device in ("gpu", "cpu"))
            got = f"{gpu:.1%} on the GPU, {cpu:.1%} on the CPU"
            is_met = abs(gpu - cpu) <= MOST_DIFFERENCE
            report.add("digits", question, got, target=TARGET, met=is_met, gpu=gpu, cpu=cpu)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--epochs", type=int, default=12)
    given = parser.parse_args()
    report = Report(given.out)
    measure(report, given.epochs)
    return int(report.num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
