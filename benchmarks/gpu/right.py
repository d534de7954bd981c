"""Are the numbers right? The tests that need a GPU, in one of the ways in which ranks can share it.

python -m gpu.right --ranks 2,3,4 --name "through the host" --out file.json
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from gpu.report import Report

__all__ = ["counts_of", "files_with_gpu_tests", "measure"]

ROOT = Path(__file__).parent.parent.parent
MARKED = re.compile(
    r"^\s*@pytest\.mark\.gpu|^pytestmark\b.*mark\.gpu|\bmarks=.*pytest\.mark\.gpu"
    r"|^from standin\.(?:gpus|late) import .*\bgpus\b",
    re.MULTILINE,
)


def files_with_gpu_tests() -> list[str]:
    """Return the test modules that have tests marked `gpu`, or use the fixture that is, by name."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if MARKED.search(path.read_text(encoding="utf-8"))]


def counts_of(said: str) -> dict[str, int]:
    """Read pytest's last summary: how many passed, failed and were skipped."""
    lines = [line for line in said.splitlines() if re.search(r"\d+ (passed|failed|skipped|error)", line)]
    found = re.findall(r"(\d+) (passed|failed|skipped|errors?|deselected)", lines[-1]) if lines else []
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for number, what in found:
        what = "failed" if what.startswith("error") else what
        if what in counts:
            counts[what] += int(number)
    return counts


def notes_of(said: str) -> str:
    """Name the tests that failed, and why others were skipped, most frequent first."""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    skipped = Counter(re.findall(r"^SKIPPED .*?: (.+)$", said, re.MULTILINE))
    words = [f"failed: {', '.join(dict.fromkeys(failed))}"] if failed else []
    words += [f"skipped: {reason}" for reason, _ in skipped.most_common(3)]
    return "; ".join(words)[:600]


def measure(report: Report, name: str, ranks: str, files: list[str], limit: float) -> None:
    """Run them."""
    question = f"tests that need a GPU, {name}"
    with report.question("right", question):
        options = ["-q", "-m", "gpu", "-rsfE", "-p", "no:cacheprovider", "--ranks", ranks]
        command = [sys.executable, "-m", "pytest", *options, *files]
        print(" ".join(command), flush=True)
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            said, _ = process.communicate(timeout=limit)
            why = ""
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # with a summary of what was done
            try:
                said, _ = process.communicate(timeout=8)
            except subprocess.TimeoutExpired:
                process.kill()
                said, _ = process.communicate()
            why = f"not done within {limit:.0f} s; "
        print(said, flush=True)
        counts = counts_of(said)
        met = None if not (counts["passed"] or counts["failed"] or why) else not counts["failed"] and not why
        if process.returncode and met is not False:
            why, met = f"{why}pytest's exit code {process.returncode}: {_last_line(said)}; ", False
        got = f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
        note = (why + notes_of(said))[:800]
        if met is None:
            got, note = "not measured", f"{got}; {note}"
        report.add("right", question, got, target="all pass", met=met, note=note, **counts)


def _last_line(said: str) -> str:
    return (said.strip().splitlines() or [""])[-1][:200]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ranks", default="1")
    parser.add_argument("--name", default="1 rank")
    parser.add_argument("--limit", type=float, default=100, help="seconds")
    parser.add_argument("files", nargs="*", default=files_with_gpu_tests())
    given = parser.parse_args()
    report = Report(given.out)
    whole = float(os.environ.get("GPU_CHECK_LIMIT", "inf"))  # of the part, which is ended then
    measure(report, given.name, given.ranks, given.files, max(1.0, min(given.limit, whole - 12)))
    return int(report.num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
