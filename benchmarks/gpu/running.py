"""One part in processes of its own: started, ended in time with all that it started, and read."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from gpu.environment import Environment
from gpu.parts import Part
from gpu.report import NOT_MEASURED, Row, read_rows

__all__ = ["Outcome", "kill_all", "run"]

TOKEN = "GPU_CHECK_TOKEN"
OWN = uuid.uuid4().hex  # of this check: its processes are found by it
LEAST_SECONDS = 8.0
GRACE = 8.0  # for a summary of the tests that were done
LOG = 12_000  # characters at the end of a log that are kept


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
    if not environment.launcher and (part.ranks or part.ask == "gpu.programs:tests"):
        why = f"needs MPI: {environment.mpi}"
    elif part.tool and not shutil.which(part.tool[0], path=environment.variables["PATH"]):
        why = f"{part.tool[0]} is not on PATH"
    elif limit < LEAST_SECONDS:
        why = "no time was left"
    else:
        why, said = _run(part, limit, environment, results)
    rows = read_rows(results)
    if not rows or why:
        question = "the rest of this part" if rows else part.question
        rows.append(Row(question, NOT_MEASURED, note=why or "it ended without an answer"))
    return Outcome(part.name, time.monotonic() - start, why, tuple(rows), said[-LOG:])


def _run(part: Part, limit: float, environment: Environment, results: Path) -> tuple[str, str]:
    launcher = (*environment.launcher, "-n", str(part.ranks)) if part.ranks else ()
    command = [*launcher, *part.tool, sys.executable, "-m", "gpu", part.ask, *part.words]
    told = {"GPU_CHECK_OUT": str(results), "GPU_CHECK_RANKS": str(part.ranks)}
    token, log = f"{OWN}/{uuid.uuid4().hex}", results.with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env={**environment.variables, **part.environment, **told, TOKEN: token}, cwd=results.parent,
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            why = f"ended with code {code}" if (code := process.wait(limit)) else ""
        except subprocess.TimeoutExpired:
            why = f"not done within {limit:.0f} s"
            process.terminate()
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
    kill_all(token)
    process.wait()
    said = log.read_text(errors="replace")
    if why.startswith("ended"):
        why += f": {(said.strip().splitlines() or ['it said nothing'])[-1][:300]}"
    elif not why and part.must_say not in said:
        why = f"{part.tool[0]} did not say {part.must_say}"
    return why, said


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
