"""Networks and whole hosts fail: real ones but for the machine below them, of two and three hosts that speak TCP."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hosts import Hosts
from jobs.faults import HEAD, require_deadline, run_command
from jobs.hosts import need_hosts
from mpi4py import MPI

from mpidist.transport.text import name_ranks

pytestmark = [
    pytest.mark.long,
    pytest.mark.no_mpi,
    pytest.mark.skipif(
        "MPICH" not in MPI.Get_library_version(), reason="once will do: the CI has MPICH where it has hosts"
    ),
]

LAUNCHER = r"hydra_pmi_proxy"  # on a host that is cut off it learns of nothing
TEST = -1  # whose notes are of no rank
CUT = f"""
await_notes("cut", {TEST})
raise attempt("error", lambda: reduce(DEADLINE))
"""
SHORTLY_CUT = """
total = 0.0
while not total:
    has_joined = '"joined"' in open(os.environ["FAULT_NOTES"]).read()
    total = strategy.reduce("SUM", float(has_joined and rank == 0), options=PATIENT)
note("end", text=str(total))
"""
SLOW = f"""
value = np.ones(250_000)
await_notes("slow", {TEST})
total = strategy.reduce("SUM", value, options=PATIENT).sum()
note("end", text=str(total), seconds=recorded_seconds())
"""

shapes = pytest.mark.parametrize(("number", "slots"), [(2, 2), (3, 1)])


@pytest.fixture
def hosts(number, slots):
    need_hosts()
    with Hosts(number, slots=slots) as built:
        yield built


def tell(notes, what):
    """Write a note for the ranks."""
    with notes.open("a") as file:
        file.write(json.dumps({"rank": TEST, "what": what}) + "\n")


def run_on(hosts, folder, body, interfere):
    """Run a program on all slots of the hosts."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    script = folder / "program.py"
    script.write_text(HEAD + body)
    ranks = len(hosts.names) * hosts.slots
    command = [*hosts.mpiexec(Path(sys.executable), ranks), sys.executable, str(script)]
    return run_command(folder, command, ranks, interfere, LAUNCHER, FAULT_RANK="-1")


def split(hosts):
    """Return the ranks of all hosts but the last, and those of the last."""
    first = (len(hosts.names) - 1) * hosts.slots
    return list(range(first)), list(range(first, first + hosts.slots))


def unheard(hosts, ranks):
    """Return how an error names ranks of hosts that are silent, as a pattern."""
    size = len(hosts.names) * hosts.slots
    lines = [rf"\n  ranks? [\d-]+: nothing was heard from host {hosts.names[rank // hosts.slots]}" for rank in ranks]
    named = rf"{name_ranks(ranks)} of {size} ranks (did not join it|makes? no progress)"
    return f"{named}(.|\n)*" + "".join(dict.fromkeys(lines))


@shapes
def test_cut_link_is_seen_at_the_deadline_on_both_sides(hosts, tmp_path):
    """Each side names the ranks and the hosts that it hears nothing of, and ends."""

    def interfere(_, notes):
        hosts.cut(hosts.names[-1])
        tell(notes, "cut")

    try:
        ended = run_on(hosts, tmp_path, CUT, interfere)
    finally:
        hosts.join(hosts.names[-1])
    assert ended.status == 1
    notes = ended.of("error")
    near, far = split(hosts)
    require_deadline([notes[rank] for rank in near], unheard(hosts, far))
    require_deadline([notes[rank] for rank in far], unheard(hosts, near))


@shapes
def test_link_that_is_cut_for_a_second_harms_nothing(hosts, tmp_path):
    """TCP sends again what was lost."""

    def interfere(_, notes):
        hosts.cut(hosts.names[-1])
        time.sleep(1)
        hosts.join(hosts.names[-1])
        tell(notes, "joined")

    ended = run_on(hosts, tmp_path, SHORTLY_CUT, interfere)
    assert (ended.status, ended.out, ended.err) == (0, "", "")
    assert [note.text for note in ended.of("end").values()] == ["1.0"] * len(hosts.names) * hosts.slots


@pytest.mark.parametrize(("number", "slots"), [(3, 1)])
def test_slow_link_is_waited_for_within_the_deadline(hosts, tmp_path):
    """Delayed by 0.3 s each way; where the kernel has no delay to add, by a rate of 4 Mbit/s."""

    def interfere(_, notes):
        slow_down(hosts, hosts.names[-1])
        tell(notes, "slow")

    ended = run_on(hosts, tmp_path, SLOW, interfere)
    assert (ended.status, ended.out, ended.err) == (0, "", "")
    notes = ended.of("end")
    size = len(hosts.names) * hosts.slots
    assert {note.text for note in notes.values()} == {f"{250_000.0 * size}"}
    assert len(notes) == size
    assert max(note.seconds for note in notes.values()) > 0.5


def slow_down(hosts, host):
    """Delay what a host sends."""
    for kind in ("netem delay 300ms", "tbf rate 4mbit burst 16kb limit 4mb"):
        command = hosts.command(host, ["tc", *["qdisc", "replace", "dev", "eth0", "root"], *kind.split()])
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
    pytest.fail(done.stderr)


@shapes
def test_lost_host_is_named_by_those_that_are_left(hosts, tmp_path):
    """As when its power is cut: it says no more word. The launcher, which would, sleeps meanwhile."""

    def interfere(launcher, notes):
        mpiexec = pid_below(launcher.pid, "mpiexec")
        os.kill(mpiexec, signal.SIGSTOP)
        hosts.cut(hosts.names[-1])
        hosts.kill(hosts.names[-1])
        tell(notes, "cut")
        while notes.read_text().count('"error"') < len(split(hosts)[0]):
            time.sleep(0.1)
        os.kill(mpiexec, signal.SIGCONT)
        launcher.send_signal(signal.SIGCONT)  # nsenter stops with its child

    ended = run_on(hosts, tmp_path, CUT, interfere)
    assert ended.status != 0
    near, far = split(hosts)
    notes = ended.of("error")
    assert sorted(notes) == near
    require_deadline([notes[rank] for rank in near], unheard(hosts, far))


def pid_below(pid, name):
    """Find a process of that name among a process and those that it started, and these started."""
    if Path(f"/proc/{pid}/comm").read_text().startswith(name):
        return pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next(filter(None, (pid_below(int(child), name) for child in children)), 0)
