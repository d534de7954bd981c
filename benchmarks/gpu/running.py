"""One part in processes of its own: started, watched, ended in time with all that it started, and read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu.environment import Environment
from gpu.part import NO_GPU
from gpu.parts import Part
from gpu.report import NOT_MEASURED, Row, is_missing, read_report

__all__ = ["Outcome", "kill_all", "log_text", "not_run", "run"]

TOKEN = "GPU_CHECK_TOKEN"
OWN = uuid.uuid4().hex  # of this check: its processes are found by it
LEAST_SECONDS = 8.0
GRACE = 5.0
UNANSWERED = "some questions have no answer"
HEAD, TAIL = 2_000, 10_000  # characters of a log that are kept


@dataclass(frozen=True)
class Outcome:
    """What became of a part.

    Attributes:
        name: Its name.
        seconds: How long it took.
        why: Why it did not end well; empty if it did.
        facts: What it said of the machine.
        rows: Its answers, and rows without one for what it owes.
        log: What it printed, cut in the middle.
    """

    name: str
    seconds: float
    why: str
    facts: dict[str, Any] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    log: str = ""


def run(part: Part, seconds: float, environment: Environment, folder: Path) -> Outcome:
    """Run a part.

    Args:
        part: Which.
        seconds: Time that is left for all.
        environment: To run in.
        folder: For its files.
    """
    if (part.ranks or part.needs_mpi) and not environment.launcher:
        return not_run(part, f"needs MPI: {environment.mpi}")
    limit = min(part.limit, seconds)
    if limit < LEAST_SECONDS:
        return not_run(part, "no time was left")
    results, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
    results.unlink(missing_ok=True)
    launcher = [*environment.launcher, "-n", str(part.ranks)] if part.ranks else []
    command = [*launcher, sys.executable, "-m", *part.command, "--out", str(results)]
    token = f"{OWN}/{uuid.uuid4().hex}"
    variables = {**environment.variables, **part.environment, TOKEN: token, "GPU_CHECK_RANKS": str(part.ranks or 1)}
    variables["GPU_CHECK_LIMIT"] = f"{limit:.1f}"
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True, cwd=folder,
        )  # fmt: skip
        why = _wait(process, limit, token)
    kill_all(token)
    took = time.monotonic() - start
    facts, rows = read_report(results)
    said = log.read_text(errors="replace")
    if why == "ended with code 1" and any(map(is_missing, rows)):
        why = UNANSWERED
    elif why and not why.startswith("not done"):
        why += f": {_last_line(said)}"
    return Outcome(part.name, took, why, facts, (*rows, *_owed(part, rows, why)), log_text(said))


def not_run(part: Part, why: str) -> Outcome:
    """Return the outcome of a part that was not started."""
    return Outcome(part.name, 0.0, why, {}, tuple(_owed(part, [], why)))


def _wait(process: subprocess.Popen[bytes], limit: float, token: str) -> str:
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            kill_all(token)
            process.wait()
        return f"not done within {limit:.0f} s"
    if code == 0:
        return ""
    if code == NO_GPU:
        return "no GPU"
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _owed(part: Part, rows: list[Row], why: str) -> list[Row]:
    """Return a row for what a part owes and has not answered."""
    if not rows:
        return [Row(part.question, NOT_MEASURED, note=why or "it ended without an answer")]
    return [Row("the rest of this part", NOT_MEASURED, note=why)] if why and why != UNANSWERED else []


def kill_all(token: str = OWN) -> None:
    """Kill what was started under a token, and all that it started. Nothing else has it in its environment."""
    needle = f"{TOKEN}={token}".encode()
    for _ in range(3):
        found = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if needle in _content(path)]
        for pid in found:
            if pid != os.getpid():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        if not found:
            return
        time.sleep(0.05)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def log_text(said: str) -> str:
    """Keep the beginning and the end of a log."""
    if len(said) <= HEAD + TAIL:
        return said
    return f"{said[:HEAD]}\n... {len(said) - HEAD - TAIL} characters left out ...\n{said[-TAIL:]}"


def _last_line(said: str) -> str:
    return (said.strip().splitlines() or ["it said nothing"])[-1][:300]
