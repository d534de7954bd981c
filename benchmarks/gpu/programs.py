"""What is checked by running other programs: the tests that need a GPU, the example, the kernels under a sanitizer.

python -m gpu.programs tests RANKS NAME [FILE...] --out file.json
python -m gpu.programs digits
python -m gpu.programs sanitizer TOOL
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from gpu.part import NO_GPU
from gpu.report import NOT_MEASURED, Report

__all__ = ["accuracy", "check_sanitizer", "counts_of", "files_with_gpu_tests", "notes_of", "run_tests", "verdict"]

ROOT = Path(__file__).parent.parent.parent
MARKED = re.compile(
    r"^\s*@pytest\.mark\.gpu|^pytestmark\b.*mark\.gpu|\bmarks=.*pytest\.mark\.gpu"
    r"|^from standin\.(?:gpus|late) import .*\bgpus\b",
    re.MULTILINE,
)
MOST_DIFFERENCE = 0.011  # of 360 digits: 4. Sums in another order round otherwise
FOUND = 99  # the sanitizer's exit code if it finds something


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


def run_tests(report: Report, name: str, ranks: str, files: list[str], limit: float, is_tiny: bool = False) -> None:
    """Run the tests of files that need a GPU; a few of the first file's if it is a tiny check."""
    question = f"tests that need a GPU, {name}"
    with report.question(question):
        options = ["-q", "-m", "gpu", "-rsfE", "-p", "no:cacheprovider", "--ranks", ranks]
        chosen = ["--sample", "20", files[0]] if is_tiny else files
        command, why = [sys.executable, "-m", "pytest", *options, *chosen], ""
        print(" ".join(command), flush=True)
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            why = f"not done within {limit:.0f} s; "
            process.send_signal(signal.SIGINT)  # with a summary of what was done
            try:
                said, _ = process.communicate(timeout=8)
            except subprocess.TimeoutExpired:
                process.kill()
                said, _ = process.communicate()
        print(said, flush=True)
        counts = counts_of(said)
        is_right = None if not (counts["passed"] or counts["failed"] or why) else not counts["failed"] and not why
        if process.returncode and is_right is not False:
            why, is_right = f"{why}pytest's exit code {process.returncode}: {_last_line(said)}; ", False
        got = ", ".join(f"{number} {what}" for what, number in counts.items())
        note = (why + notes_of(said))[:800]
        if is_right is None:
            got, note = NOT_MEASURED, f"{got}; {note}"
        report.add(question, got, is_right, note, **counts)


def accuracy(ranks: int, device: str, epochs: int, seconds: float) -> float:
    """Train the example, and return the share of held-out digits that are read right.

    Raises:
        RuntimeError: If the program fails.
    """
    launcher = [*shlex.split(os.environ.get("GPU_CHECK_MPIEXEC", "mpiexec")), "-n", str(ranks)] if ranks > 1 else []
    example = str(ROOT / "docs" / "examples" / "digits.py")
    command = [*launcher, sys.executable, example, "--device", device, "--epochs", str(epochs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    print(done.stdout[-2000:], done.stderr[-4000:], flush=True)
    found = re.search(r"([\d.]+)% of \d+ held-out", done.stdout)
    if done.returncode or found is None:
        raise RuntimeError(f"exit code {done.returncode}: {_last_line(done.stderr)}")
    return float(found[1]) / 100


def check_digits(report: Report) -> None:
    """Train on the CPU and on the GPU, with 1 rank and with 4 that share it."""
    for ranks in (1, 4):
        question = f"digits on the GPU, {ranks} rank" + "s" * (ranks > 1)
        with report.question(question):
            gpu, cpu = (accuracy(ranks, device, 12, 60) for device in ("gpu", "cpu"))
            is_right = abs(gpu - cpu) <= MOST_DIFFERENCE
            report.add(question, f"{gpu:.1%} on the GPU, {cpu:.1%} on the CPU", is_right, gpu=gpu, cpu=cpu)


def check_sanitizer(report: Report, tool: str, seconds: float) -> None:
    """Run the kernels under a tool of compute-sanitizer."""
    question = f"compute-sanitizer {tool} on a small run of the kernels"
    with report.question(question):
        program = shutil.which("compute-sanitizer")
        if program is None:
            raise RuntimeError("compute-sanitizer is not on PATH; it comes with CUDA's compiler")
        command = [program, "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, "-m", "gpu.small_kernels"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        said = done.stdout + done.stderr
        print(said[-20000:], flush=True)
        report.add(question, *verdict(done.returncode, said))


def verdict(code: int, said: str) -> tuple[str, bool | None, str]:
    """Read what the sanitizer said: what was got, whether that is clean, and why it is not known."""
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.+)", said)
    if code == NO_GPU or not summary:
        return NOT_MEASURED, None, f"exit code {code}: {_last_line(said)}"
    numbers = [int(number) for number in re.findall(r"(\d+) (?:error|hazard)", summary[-1])]
    is_clean = code == 0 and "right numbers" in said and not any(numbers)
    return summary[-1].strip(), is_clean, "" if code in (0, FOUND) else f"exit code {code}"


def _last_line(said: str) -> str:
    return (said.strip().splitlines() or ["it said nothing"])[-1][:200]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("what", choices=["tests", "digits", "sanitizer"])
    parser.add_argument("words", nargs="*")
    given = parser.parse_args()
    report, is_tiny = Report(given.out), os.environ.get("GPU_CHECK_TINY") == "1"
    limit = float(os.environ.get("GPU_CHECK_LIMIT", "120"))  # of the part, which is ended then
    if given.what == "tests":
        ranks, name, *files = given.words
        run_tests(report, name, ranks, files or files_with_gpu_tests(), max(1.0, limit - 12), is_tiny)
    elif given.what == "sanitizer":
        check_sanitizer(report, given.words[0], limit - 10)
    else:
        check_digits(report)
    return int(report.num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
