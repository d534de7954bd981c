"""`python -m mpidist stacks`: where the ranks of a running job are in their programs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs.failing import ran
from jobs.faults import THREE, Job, environment, job

__all__ = ["job"]

pytestmark = pytest.mark.no_mpi

RUNS = """
def read():
    await_notes("go on")
if is_faulty:
    read()
reduce()
"""


def stacks(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mpidist", "stacks", *arguments]
    return ran(command, env=environment())


@pytest.mark.core
def test_stacks_of_a_running_job_are_put_together(job: Job) -> None:
    """The job goes on."""
    found: list[subprocess.CompletedProcess[str]] = []

    def look(launcher: subprocess.Popen[bytes], notes: Path) -> None:
        place = r"^ranks 0, 2: \S+program\.py:\d+ in reduce\nrank 1: \S+program\.py:\d+ in await_notes$"
        whole = r"^rank 1: .*\n    \S+ in await_notes\n    \S+ in read\n    \S+ in <module>$"
        for option, pattern in (("", place), ("--whole", whole)):  # the test's limit ends a look in vain
            while not re.search(pattern, (one := stacks(str(launcher.pid), *option.split())).stdout, re.MULTILINE):
                pass
            found.append(one)
        with notes.open("a") as file:
            file.write('{"rank": 0, "what": "go on"}\n')

    ended = job(RUNS.replace('"go on"', '"go on", 0'), THREE, interfere=look)
    assert (ended.status, ended.err) == (0, "")
    assert [(one.returncode, one.stderr) for one in found] == [(0, "")] * 2
    assert re.match(r"job \d+: .*, ranks 0-2 on \S+\n", found[0].stdout)


def test_stacks_of_no_job_are_refused() -> None:
    done = stacks("no-job")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("mpidist stacks: no job no-job of yours runs on ")
