"""Do the kernels read and write only what is theirs, and in order? By compute-sanitizer.

python -m gpu.sanitizer --tool memcheck --out file.json
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from gpu.part import NO_GPU
from gpu.report import Report

__all__ = ["check", "verdict"]

FOUND = 99  # its exit code if it finds something


def check(report: Report, tool: str, seconds: float) -> None:
    """Run the kernels under one of its tools."""
    question = f"compute-sanitizer {tool} on a small run of the kernels"
    with report.question("sanitizer", question):
        program = shutil.which("compute-sanitizer")
        if program is None:
            raise RuntimeError("compute-sanitizer is not on PATH; it comes with CUDA's compiler")
        command = [program, "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, "-m", "gpu.small_kernels"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        said = done.stdout + done.stderr
        print(said[-20000:], flush=True)
        got, met, note = verdict(done.returncode, said)
        report.add("sanitizer", question, got, target="0 errors", met=met, note=note)


def verdict(code: int, said: str) -> tuple[str, bool | None, str]:
    """Read what it said: what was got, whether that is clean, and why it is not known."""
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.+)", said)
    if code == NO_GPU or not summary:
        return "not measured", None, f"exit code {code}: {(said.strip().splitlines() or ['it said nothing'])[-1]}"[:200]
    numbers = [int(number) for number in re.findall(r"(\d+) (?:error|hazard)", summary[-1])]
    is_clean = code == 0 and "right numbers" in said and not any(numbers)
    return summary[-1].strip(), is_clean, "" if code in (0, FOUND) else f"exit code {code}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tool", default="memcheck", choices=["memcheck", "racecheck", "initcheck", "synccheck"])
    given = parser.parse_args()
    report = Report(given.out)
    check(report, given.tool, float(os.environ.get("GPU_CHECK_LIMIT", "120")) - 10)
    return int(report.num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
