"""`python -m mpidist stacks`: where the ranks of a running job are in their programs."""

import re
import sys

import pytest
from jobs.failing import ran
from jobs.faults import THREE, environment, job

__all__ = ["job"]

pytestmark = pytest.mark.no_mpi

RUNS = """
def read():
    await_notes("go on")
if is_faulty:
    read()
reduce()
"""


def stacks(*arguments):
    command = [sys.executable, "-m", "mpidist", "stacks", *arguments]
    return ran(command, env=environment())


@pytest.mark.core
def test_stacks_of_a_running_job_are_put_together(job):
    """The job goes on."""
    found = []

    def look(launcher, notes):
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


def test_stacks_of_no_job_are_refused():
    done = stacks("no-job")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("mpidist stacks: no job no-job of yours runs on ")
