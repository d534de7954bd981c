"""Jobs of real ranks in which something goes wrong on purpose, and what became of them."""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from mpi_session import HANG_SECONDS
from mpi_session.launch import Launcher

from jobs.failing import Ended as EndedJob
from jobs.failing import environment, processes_with
from mpidist.transport.text import name_ranks

__all__ = [
    "BLOCKS",
    "DEADLINE_SECONDS",
    "Ended",
    "FOUR",
    "HEAD",
    "Note",
    "Placement",
    "THREE",
    "TWO",
    "TWO_APART",
    "UNEVEN",
    "UNEVEN_ALONE",
    "environment",
    "late",
    "job",
    "of_others",
    "on",
    "require_deadline",
    "require_right",
    "run_command",
    "run_job",
]

DEADLINE_SECONDS = 3.0  # of the calls in HEAD that one rank does not make: within it, the others come to them
_JOB_SECONDS = 0.6 * HANG_SECONDS  # before the test's own limit, so that what the job wrote is shown
_BURY_SECONDS = 0.2 * HANG_SECONDS
_MARK = "FAULT_JOB"

HEAD = """
import gc, json, os, resource, signal, subprocess, sys, threading, time
from sys import exit as early_exit
import numpy as np
import mpidist
from mpidist import CommunicationOptions
from mpidist.context_stack import parts_of
from mpidist.errors import DeadlineExceededError, InvalidArgumentError, PeerFailedError
from mpidist.transport.failures import watchdog

strategy = mpidist.MultiWorkerMirroredStrategy()
rank, size, faulty = strategy.topology.rank, strategy.topology.size, int(os.environ["FAULT_RANK"])
is_faulty, others = rank == faulty, [one for one in range(size) if one != faulty]
watchdog._ANSWER_SECONDS = 5.0  # for ranks of other nodes, which live, but where a test says that they are silent
watchdog._STACK_SECONDS = 4.0
DEADLINE = CommunicationOptions(timeout_seconds=3)
PATIENT = CommunicationOptions(timeout_seconds=600)

def note(what, **more):
    line = json.dumps({"rank": rank, "what": what, **more})
    with open(os.environ["FAULT_NOTES"], "a") as file:
        file.write(line + "\\n")

def recorded_seconds():  # of the last call, by the flight recorder
    last = parts_of(strategy).group.membership.flights()[rank].entries[-1]
    return (abs(last.ended) - last.begun) / 1e9

def await_notes(what, *ranks):  # the job's limit ends a wait in vain
    awaited = set(ranks)
    while awaited:
        with open(os.environ["FAULT_NOTES"]) as file:
            whole = file.read().split("\\n")[:-1]  # the last line may be half written
        awaited -= {line["rank"] for line in map(json.loads, whole) if line["what"] == what}
        time.sleep(0.01)

def attempt(what, call):
    try:
        kind, text = "value", repr(call())
    except Exception as error:
        seconds = recorded_seconds() if isinstance(error, DeadlineExceededError) else 0.0
        note(what, kind=type(error).__name__, text=str(error), seconds=seconds)
        return error
    note(what, kind=kind, text=text)

def reduce(options=None):
    return strategy.reduce("SUM", 1.0, options=options)

def reduce_until_an_error():
    try:
        while True:
            reduce()
    except Exception as error:
        note("error", kind=type(error).__name__, text=str(error))
        return error

reduce()
note("ready")
"""

# Launchers end a job when they see a rank die. Behind this one they do not see it for minutes, or until all have ended.
_BLIND = """
"$@"; code=$?
: >"$FAULT_NOTES.$$"
left=3000; set -- "$FAULT_NOTES".*
while [ $left -gt 0 ] && [ $# -lt "$FAULT_SIZE" ]; do left=$((left - 1)); sleep 0.1; set -- "$FAULT_NOTES".*; done
exit $code
"""


class Placement(NamedTuple):
    """Ranks on nodes, and the rank that has the fault."""

    nodes: tuple[int, ...]
    faulty: int

    @property
    def size(self):
        return len(self.nodes)

    @property
    def others(self):
        return [rank for rank in range(self.size) if rank != self.faulty]

    def __str__(self):
        return f"nodes {','.join(map(str, self.nodes))} fault on {self.faulty}"


TWO = Placement((0, 0), 1)
TWO_APART = Placement((0, 1), 1)
THREE = Placement((0, 0, 0), 1)
UNEVEN = Placement((0, 1, 1), 1)
UNEVEN_ALONE = Placement((0, 1, 1), 0)
FOUR = Placement((0, 0, 0, 0), 3)
BLOCKS = Placement((0, 0, 1, 1), 2)


@dataclass(frozen=True)
class Note:
    """What a rank wrote down of a call: what came of it, and after how many seconds by its record, at a deadline."""

    rank: int
    what: str
    kind: str = ""
    text: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Ended(EndedJob):
    """A job that has come to its end, all processes of it."""

    notes: tuple[Note, ...]

    def of(self, what):
        """Return the notes of that name, by rank."""
        return {note.rank: note for note in self.notes if note.what == what}


def run_job(
    folder,  # for its files
    body,  # what follows on HEAD
    placement,  # where the ranks are, and which has the fault
    is_blind=False,  # whether the launcher shall not notice that a rank dies
    before=(),  # words in front of the command
    interfere=None,  # called with the launcher's process, and the file of the notes, once all ranks are ready
    **variables,  # more of the environment
):
    """Run a program on ranks of the MPI library that these tests run with, and require that all of it ends."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    script = folder / "program.py"
    script.write_text(HEAD + body)
    python = ["sh", "-c", _BLIND, "sh", sys.executable] if is_blind else [sys.executable]
    command = [*before, *Launcher.find(None).command, "-n", str(placement.size), *python, str(script)]
    variables |= {"FAULT_RANK": str(placement.faulty), "FAULT_SIZE": str(placement.size)}
    if any(placement.nodes):
        variables["MPIDIST_PRETEND_NODES"] = ",".join(map(str, placement.nodes))
    return run_command(folder, command, placement.size, interfere, **variables)


@pytest.fixture
def job(tmp_path):
    """Run a program with a fault in it: `run_job` in a folder of its own."""
    return functools.partial(run_job, tmp_path)


def on(*placements):
    """Run a test with each of these placements."""
    return pytest.mark.parametrize("placement", placements, ids=str)


def run_command(
    folder,
    command,
    ranks,
    interfere=None,
    may_stay=None,  # what the commands look like that may be left, as a pattern; by default none may
    seconds=_JOB_SECONDS,  # how long it may take
    **variables,
):
    """Run a command that starts ranks of a program with HEAD; see `run_job`."""
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
                interfere(process, notes)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
            left = _bury(mark, may_stay)
        finally:
            process.kill()
            process.wait()
    said = (folder / "out").read_text(), (folder / "err").read_text()
    assert not left, f"these processes did not end with the job: {left}; it wrote {said} and {notes.read_text()}"
    found = tuple(Note(**json.loads(line)) for line in notes.read_text().splitlines())
    return Ended(process.returncode, *said, found)


def _bury(mark, may_stay):
    """Wait for the processes of a job to end, kill those that do not, and return their commands."""

    def those_left():
        commands = processes_with(**{_MARK: mark}).values()
        return [command for command in commands if may_stay is None or not re.search(may_stay, command)]

    _wait_until(lambda: not those_left(), _BURY_SECONDS)
    left = those_left()
    for pid in processes_with(**{_MARK: mark}):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return left


def _wait_until(is_so, seconds=_JOB_SECONDS):
    limit = time.monotonic() + seconds
    while not is_so() and time.monotonic() < limit:
        time.sleep(0.02)


def late(*ranks, size):
    """Return how an error names the ranks that did not come, as a pattern."""
    return rf"{name_ranks(ranks)} of {size} ranks did not join it"


def require_deadline(notes, pattern, seconds=DEADLINE_SECONDS):
    """Require that ranks that waited all have their error at the deadline, and not before it.

    A rank that came to the call after others hears from them, and so before it has waited as long itself.
    """
    for note in notes:
        assert note.kind == "DeadlineExceededError", note
        assert re.search(pattern, note.text), note
    waited = [note for note in notes if f"waited {seconds:g} s" in note.text]
    assert waited, notes
    assert all(note.seconds >= seconds for note in waited), waited


def of_others(ended, what, placement):
    """Return the notes of all ranks but the faulty one, and require that there are some of all of them."""
    notes = ended.of(what)
    assert sorted({*notes} - {placement.faulty}) == placement.others, ended
    return [notes[rank] for rank in placement.others]


def require_right(ended, what, placement):
    """Require that the call after a fault worked on all ranks."""
    texts = [note.text for note in ended.of(f"{what}, after").values()]
    assert texts == [f"{placement.size:.1f}"] * placement.size
