"""One part in processes of its own: started, ended in time with all that it started, and read."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from gpu.environment import ROOT, Environment
from gpu.parts import Part
from gpu.report import NOT_MEASURED, WRONG, Row, read_rows

__all__ = ["Outcome", "files_with_gpu_tests", "kill_all", "run", "words_of_tests"]

TOKEN = "GPU_CHECK_TOKEN"
OWN = uuid.uuid4().hex  # of this check: its processes are found by it
LEAST_SECONDS = 8.0
GRACE = 8.0  # for a summary of the tests that were done
LOG = 12_000  # characters at the end of a log that are kept
TINY_FILES = (  # their tests keep the settings of who starts them, which others take away
    "tests/collectives/test_device_numbers.py",
    "tests/variables/test_variables_on_gpus.py",
)


@dataclass(frozen=True)
class Outcome:
    """What became of a part: its seconds, why it did not end well, its answers and what it owes, what it printed."""

    name: str
    seconds: float
    why: str
    rows: tuple[Row, ...]
    log: str = ""


def run(part: Part, seconds: float, environment: Environment, folder: Path) -> Outcome:
    """Run a part, within the time that is left for all, with its files in a folder."""
    limit, start = min(part.limit, seconds), time.monotonic()
    why, said, results = "", "", folder / f"{part.name}.jsonl"
    if not environment.launcher and (part.ranks or part.ask == "tests"):
        why = f"needs MPI: {environment.mpi}"
    elif limit < LEAST_SECONDS:
        why = "no time was left"
    else:
        why, said = _run(part, limit, environment, results)
    rows = read_rows(results) if part.ask != "tests" else _row_of_tests(part, why, said) if said else []
    if not rows or (why and part.ask != "tests"):
        question = "the rest of this part" if rows else part.question
        rows.append(Row(question, NOT_MEASURED, note=why or "it ended without an answer"))
    return Outcome(part.name, time.monotonic() - start, why, tuple(rows), said[-LOG:])


def _run(part: Part, limit: float, environment: Environment, results: Path) -> tuple[str, str]:
    launcher = (*environment.launcher, "-n", str(part.ranks)) if part.ranks else ()
    words = words_of_tests(part, environment) if part.ask == "tests" else ["-m", "gpu", part.ask]
    told = {"GPU_CHECK_OUT": str(results), "GPU_CHECK_RANKS": str(part.ranks)}
    token, log = f"{OWN}/{uuid.uuid4().hex}", results.with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen(
            [*launcher, sys.executable, *words], cwd=ROOT if part.ask == "tests" else results.parent,
            env={**environment.variables, **part.environment, **told, TOKEN: token},
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            why = f"ended with code {code}" if (code := process.wait(limit)) else ""
        except subprocess.TimeoutExpired:
            why = f"not done within {limit:.0f} s"
            process.send_signal(signal.SIGINT)  # so that tests end with a summary
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
    kill_all(token)
    process.wait()
    said = log.read_text(errors="replace")
    if why.startswith("ended"):
        why += f": {(said.strip().splitlines() or ['it said nothing'])[-1][:300]}"
    return why, said


def words_of_tests(part: Part, environment: Environment) -> list[str]:
    """Return what Python is told to run tests that need a GPU; if the check is tiny, a few, and not of all files."""
    is_tiny = environment.variables.get("GPU_CHECK_TINY") == "1"
    ranks, *files = part.words
    files = files or (list(TINY_FILES) if is_tiny else files_with_gpu_tests())
    options = ["-q", "-m", "gpu", "-rsfE", "-p", "no:cacheprovider", "--ranks", ranks]
    return ["-m", "pytest", *options, *(["--sample", "20"] if is_tiny else []), *files]


def files_with_gpu_tests() -> list[str]:
    """Return the test modules that have tests marked `gpu`, or use the fixture that is, by name."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(its.relative_to(ROOT)) for its in paths if re.search(r"mark\.gpu|host_cuda\.gpus", its.read_text())]


def _row_of_tests(part: Part, why: str, said: str) -> list[Row]:
    """Read pytest's summary: none, and no row, where no test was run."""
    last = (said.strip().splitlines() or [""])[-1]
    if not re.search(r"[1-9]\d* (passed|failed|error)", last) and not why:
        return []
    notes = re.findall(r"^(?:FAILED|ERROR|SKIPPED) .*", said, re.MULTILINE)
    return [
        Row(
            part.question,
            last.partition(" in ")[0],
            WRONG if why else "right",
            "; ".join(filter(None, [why, *notes]))[:700],
        )
    ]


def kill_all(token: str = OWN) -> None:
    """Kill what was started under a token, and all that it started. Nothing else has it in its environment."""
    for _ in range(3):
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"{TOKEN}={token}".encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                    os.kill(int(path.parent.name), signal.SIGKILL)
            except OSError:  # it has ended, or is another user's
                continue
        time.sleep(0.05)
