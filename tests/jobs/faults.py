"""Jobs of real ranks in which something goes wrong on purpose, and what became of them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from mpi_session import OPEN_MPI, clean_environment
from mpi_session.launch import Launcher

import mpidist
from mpidist.transport import name_ranks

__all__ = [
    "AT_ONCE_SECONDS",
    "BLOCKS",
    "CYCLIC",
    "DEADLINE_SECONDS",
    "Ended",
    "Job",
    "FOUR",
    "HEAD",
    "Note",
    "Placement",
    "Sessions",
    "THREE",
    "TWO",
    "TWO_APART",
    "TooSlowError",
    "UNEVEN",
    "UNEVEN_ALONE",
    "again_if_slow",
    "environment",
    "late",
    "job",
    "of_others",
    "on",
    "require_deadline",
    "require_right",
    "run_command",
    "run_job",
    "soon",
]

PROJECT = str(Path(mpidist.__file__).parents[1])
DEADLINE_SECONDS = 1.0  # of the calls in HEAD
AT_ONCE_SECONDS = 0.9  # what takes no time, on a busy machine: less than a deadline
SLACK_SECONDS = 0.9  # what a deadline may take longer: less than another one
_TRIES = 4  # of a test that finds a time too long, on a machine that others use
_JOB_SECONDS = 40.0
_BURY_SECONDS = 15.0  # for ranks that a cut host keeps from their launcher: they end on their own, after 3 s of MPI's
_MARK = "FAULT_JOB"

HEAD = """
import gc, json, os, resource, signal, subprocess, sys, threading, time
import numpy as np
import mpidist
from mpidist import CommunicationOptions
from mpidist.errors import DeadlineExceededError, InvalidArgumentError, PeerFailedError

strategy = mpidist.MultiWorkerMirroredStrategy()
rank, size = strategy.topology.rank, strategy.topology.size
is_faulty = rank == int(os.environ["FAULT_RANK"])
DEADLINE = CommunicationOptions(timeout_seconds=1)
PATIENT = CommunicationOptions(timeout_seconds=20)

def note(what, **more):
    line = json.dumps({"rank": rank, "what": what, "at": time.monotonic(), **more})
    with open(os.environ["FAULT_NOTES"], "a") as file:
        file.write(line + "\\n")

def await_notes(what, *ranks):  # the job's limit ends a wait in vain
    awaited = set(ranks)
    while awaited:
        with open(os.environ["FAULT_NOTES"]) as file:
            whole = file.read().split("\\n")[:-1]  # the last line may be half written
        awaited -= {line["rank"] for line in map(json.loads, whole) if line["what"] == what}
        time.sleep(0.01)

def attempt(what, call):
    begun = time.monotonic()
    try:
        kind, text = "value", repr(call())
    except Exception as error:
        note(what, begun=begun, kind=type(error).__name__, text=str(error))
        return error
    note(what, begun=begun, kind=kind, text=text)

def reduce(options=None):
    return strategy.reduce("SUM", 1.0, options=options)

def reduce_until_an_error(options=None):
    while True:
        begun = time.monotonic()
        try:
            reduce(options)
        except Exception as error:
            note("error", begun=begun, kind=type(error).__name__, text=str(error))
            return error

reduce()
note("ready")
"""

# Launchers end a job when they see a rank die. Behind this one they do not see it for ten seconds.
_BLIND = '"$@"; code=$?; left=100; while [ $left -gt 0 ]; do left=$((left - 1)); sleep 0.1; done; exit $code'


class TooSlowError(AssertionError):
    """Something took longer than it may; a busy machine can be the reason."""


class Placement(NamedTuple):
    """Ranks on nodes, and the rank that has the fault."""

    nodes: tuple[int, ...]
    faulty: int

    @property
    def size(self) -> int:
        return len(self.nodes)

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.faulty]

    @property
    def is_seen(self) -> bool:
        """Whether a rank is on the node of the faulty one, and sees what becomes of its process."""
        return self.nodes.count(self.nodes[self.faulty]) > 1

    def __str__(self) -> str:
        return f"nodes {','.join(map(str, self.nodes))} fault on {self.faulty}"


TWO = Placement((0, 0), 1)
TWO_APART = Placement((0, 1), 1)
THREE = Placement((0, 0, 0), 1)
UNEVEN = Placement((0, 1, 1), 1)
UNEVEN_ALONE = Placement((0, 1, 1), 0)
FOUR = Placement((0, 0, 0, 0), 3)
BLOCKS = Placement((0, 0, 1, 1), 2)
CYCLIC = Placement((0, 1, 0, 1), 1)


@dataclass(frozen=True)
class Note:
    """What a rank wrote down of a call: when it began it, when it was over, and what came of it."""

    rank: int
    what: str
    at: float
    begun: float = 0.0
    kind: str = ""
    text: str = ""

    @property
    def seconds(self) -> float:
        return self.at - self.begun


@dataclass(frozen=True)
class Ended:
    """A job that has come to its end, all processes of it."""

    status: int
    out: str
    err: str
    at: float
    notes: tuple[Note, ...]

    def lines_of(self, rank: int) -> list[str]:
        """Return what a rank wrote with its name in front."""
        prefix = f"[rank {rank} on {socket.gethostname()}] "
        return [line.partition(prefix)[2] for line in self.err.splitlines() if prefix in line]

    def of(self, what: str) -> dict[int, Note]:
        """Return the notes of that name, by rank."""
        return {note.rank: note for note in self.notes if note.what == what}


Interfere = Callable[["subprocess.Popen[bytes]"], None]


def run_job(
    folder: Path,
    body: str,
    placement: Placement,
    is_blind: bool = False,
    before: Sequence[str] = (),
    interfere: Interfere | None = None,
    **variables: str,
) -> Ended:
    """Run a program on ranks of the MPI library that these tests run with, and require that all of it ends.

    Args:
        folder: For its files.
        body: What follows on HEAD.
        placement: Where the ranks are, and which has the fault.
        is_blind: Whether the launcher shall not notice that a rank dies.
        before: Words in front of the command.
        interfere: Called with the launcher's process once all ranks are ready.
        variables: More of the environment.
    """
    folder = Path(tempfile.mkdtemp(dir=folder))
    script = folder / "program.py"
    script.write_text(HEAD + body)
    python = ["sh", "-c", _BLIND, "sh", sys.executable] if is_blind else [sys.executable]
    command = [*before, *Launcher.find(None).command, "-n", str(placement.size), *python, str(script)]
    variables["FAULT_RANK"] = str(placement.faulty)
    if any(placement.nodes):
        variables["MPIDIST_PRETEND_NODES"] = ",".join(map(str, placement.nodes))
    return run_command(folder, command, placement.size, interfere, **variables)


Job = Callable[..., Ended]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Run a program with a fault in it: `run_job` in a folder of its own."""
    return functools.partial(run_job, tmp_path)


def on(*placements: Placement) -> pytest.MarkDecorator:
    """Run a test with each of these placements."""
    return pytest.mark.parametrize("placement", placements, ids=str)


def run_command(
    folder: Path,
    command: Sequence[str],
    ranks: int,
    interfere: Interfere | None = None,
    may_stay: str | None = None,
    **variables: str,
) -> Ended:
    """Run a command that starts ranks of a program with HEAD; see `run_job`.

    Args:
        may_stay: What the commands look like that may be left, as a pattern; by default none may.
    """
    notes, mark = folder / "notes", uuid.uuid4().hex
    notes.touch()
    with (
        (folder / "out").open("wb") as out,
        (folder / "err").open("wb") as err,
        # What a killed launcher leaves is named by its number, and would stop a later one of the same number.
        tempfile.TemporaryDirectory(prefix="job-", ignore_cleanup_errors=True) as temporary,
    ):
        process = subprocess.Popen(
            command,
            env={**environment(), "FAULT_NOTES": str(notes), "TMPDIR": temporary, _MARK: mark, **variables},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            if interfere is not None:
                _wait_until(lambda: notes.read_text().count('"ready"') == ranks or process.poll() is not None)
                interfere(process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_JOB_SECONDS)
            at = time.monotonic()
            left = _bury(mark, may_stay)
        finally:
            process.kill()
            process.wait()
    said = (folder / "out").read_text(), (folder / "err").read_text()
    assert not left, f"these processes did not end with the job: {left}; it wrote {said} and {notes.read_text()}"
    found = tuple(Note(**json.loads(line)) for line in notes.read_text().splitlines())
    return Ended(process.returncode, *said, at, found)


def environment() -> dict[str, str]:
    """Return the variables of a job's ranks."""
    return {
        **clean_environment(),
        "PYTHONPATH": PROJECT,
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",  # of others, 64 MiB of addresses each are had in advance, whatever the limit is
        "OPENBLAS_NUM_THREADS": "1",
        # There may be more ranks than cores: one that waits gives its own up soon.
        "MPIR_CVAR_POLLS_BEFORE_YIELD": "10",
        "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
        **OPEN_MPI,
        "OMPI_MCA_osc": "^ucx",  # writes of its own when a shared window is made, and is not used
    }


def _bury(mark: str, may_stay: str | None) -> list[str]:
    """Wait for the processes of a job to end, kill those that do not, and return their commands."""
    sought = f"{_MARK}={mark}".encode()

    def those_left() -> list[str]:
        commands = _processes_with(sought).values()
        return [command for command in commands if may_stay is None or not re.search(may_stay, command)]

    _wait_until(lambda: not those_left(), _BURY_SECONDS)
    left = those_left()
    for pid in _processes_with(sought):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return left


def _processes_with(sought: bytes) -> dict[int, str]:
    """Return the commands of processes that have something in their environment."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if sought in (path / "environ").read_bytes():
                found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
    return {pid: command for pid, command in found.items() if command}  # without one, it is just ending


def _wait_until(is_so: Callable[[], bool], seconds: float = _JOB_SECONDS) -> None:
    limit = time.monotonic() + seconds
    while not is_so() and time.monotonic() < limit:
        time.sleep(0.02)


def soon(seconds: float, limit: float) -> None:
    """Require that something took less than a limit, in seconds."""
    if seconds >= limit:
        raise TooSlowError(f"{seconds:.2f} s; it must be less than {limit} s")


def again_if_slow(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test again, three times at most, while all that it found wrong is an upper bound of a time."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        for tries_left in reversed(range(_TRIES)):
            try:
                test(*args, **kwargs)
                return
            except TooSlowError:
                if not tries_left:
                    raise
                for sessions in kwargs.values():
                    if isinstance(sessions, Sessions):
                        sessions.forget()

    return run


def late(*ranks: int, size: int) -> str:
    """Return how an error names the ranks that did not come, as a pattern."""
    return rf"{name_ranks(ranks)} of {size} ranks did not join it"


def require_deadline(notes: Sequence[Note], pattern: str, seconds: float = DEADLINE_SECONDS) -> None:
    """Require that ranks that waited all have their error at the deadline: not before it, and soon after it.

    A rank that came to the call after others hears from them, and so before it has waited as long itself.
    """
    assert notes
    begun = min(note.begun for note in notes)
    for note in notes:
        assert note.kind == "DeadlineExceededError", note
        assert re.search(pattern, note.text), note
        own = f"waited {seconds:g} s" in note.text
        assert note.at - (note.begun if own else begun) >= seconds, note
    for note in notes:
        soon(note.seconds, seconds + SLACK_SECONDS)


def of_others(ended: Ended, what: str, placement: Placement) -> list[Note]:
    """Return the notes of all ranks but the faulty one, and require that there are some of all of them."""
    notes = ended.of(what)
    assert sorted({*notes} - {placement.faulty}) == placement.others, ended
    return [notes[rank] for rank in placement.others]


def require_right(ended: Ended, what: str, placement: Placement) -> None:
    """Require that the call after a fault worked on all ranks."""
    texts = [note.text for note in ended.of(f"{what}, after").values()]
    assert texts == [f"{placement.size:.1f}"] * placement.size


class Sessions:
    """Jobs that go on after faults, one of each placement; run when a test first needs it."""

    def __init__(self, folder: Path, body: str) -> None:
        self._folder, self._body = folder, body
        self._ended: dict[Placement, Ended] = {}

    def run(self, placement: Placement) -> Ended:
        if placement not in self._ended:
            self._ended[placement] = run_job(self._folder, self._body, placement)
        ended = self._ended[placement]
        assert (ended.status, ended.out, ended.err) == (0, "", "")
        return ended

    def forget(self) -> None:
        self._ended.clear()
