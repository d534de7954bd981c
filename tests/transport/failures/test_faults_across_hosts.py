"""Networks and whole hosts fail: real ones but for the machine below them, of two and three hosts that speak TCP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from jobs.faults import HEAD, Ended, again_if_slow, require_deadline, run_command, soon
from jobs.hosts import Hosts, need_hosts
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
CUT = """
error = reduce_until_an_error(DEADLINE)
raise error
"""
SHORTLY_CUT = """
for _ in range(250):
    attempt("reduce", lambda: reduce(PATIENT))
    time.sleep(0.005)
"""
SLOW = """
value = np.ones(250_000)
attempt("slow", lambda: strategy.reduce("SUM", value, options=PATIENT).sum())
"""

shapes = pytest.mark.parametrize(("number", "slots"), [(2, 1), (2, 2), (3, 1)])


@pytest.fixture
def hosts(number: int, slots: int) -> Iterator[Hosts]:
    need_hosts()
    with Hosts(number, slots=slots) as built:
        yield built


def run_on(hosts: Hosts, folder: Path, body: str, interfere: Callable[[subprocess.Popen[bytes]], None]) -> Ended:
    """Run a program on all slots of the hosts."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    script = folder / "program.py"
    script.write_text(HEAD + body)
    ranks = len(hosts.names) * hosts.slots
    command = [*hosts.mpiexec(Path(sys.executable), ranks), sys.executable, str(script)]
    return run_command(folder, command, ranks, interfere, LAUNCHER, FAULT_RANK="-1")


def split(hosts: Hosts) -> tuple[list[int], list[int]]:
    """Return the ranks of all hosts but the last, and those of the last."""
    first = (len(hosts.names) - 1) * hosts.slots
    return list(range(first)), list(range(first, first + hosts.slots))


def unheard(hosts: Hosts, ranks: Sequence[int]) -> str:
    """Return how an error names ranks of hosts that are silent, as a pattern."""
    size = len(hosts.names) * hosts.slots
    lines = [rf"\n  ranks? [\d-]+: nothing was heard from host {hosts.names[rank // hosts.slots]}" for rank in ranks]
    named = rf"{name_ranks(ranks)} of {size} ranks (did not join it|do(es)? not get on)"
    return f"{named}(.|\n)*" + "".join(dict.fromkeys(lines))


@shapes
@again_if_slow
def test_cut_link_is_seen_at_the_deadline_on_both_sides(hosts: Hosts, tmp_path: Path) -> None:
    """Each side names the ranks and the hosts that it hears nothing of, and ends."""

    def interfere(_: subprocess.Popen[bytes]) -> None:
        time.sleep(0.2)
        hosts.cut(hosts.names[-1])

    try:
        ended = run_on(hosts, tmp_path, CUT, interfere)
    finally:
        hosts.join(hosts.names[-1])
    assert ended.status == 1
    notes = ended.of("error")
    near, far = split(hosts)
    require_deadline([notes[rank] for rank in near], unheard(hosts, far))
    require_deadline([notes[rank] for rank in far], unheard(hosts, near))
    soon(ended.at - max(notes[rank].at for rank in near), 2)


@pytest.mark.parametrize(("number", "slots"), [(2, 2), (3, 1)])
@again_if_slow
def test_link_that_is_cut_for_a_second_harms_nothing(hosts: Hosts, tmp_path: Path) -> None:
    """TCP sends again what was lost."""

    def interfere(_: subprocess.Popen[bytes]) -> None:
        time.sleep(0.2)
        hosts.cut(hosts.names[-1])
        time.sleep(1)
        hosts.join(hosts.names[-1])

    ended = run_on(hosts, tmp_path, SHORTLY_CUT, interfere)
    assert (ended.status, ended.out, ended.err) == (0, "", "")
    size = len(hosts.names) * hosts.slots
    done = [note for note in ended.notes if note.what == "reduce"]
    assert len(done) == 250 * size
    assert {(note.kind, note.text) for note in done} == {("value", f"{size:.1f}")}
    assert max(note.seconds for note in done) > 0.9


@pytest.mark.parametrize(("number", "slots"), [(3, 1)])
def test_slow_link_is_waited_for_within_the_deadline(hosts: Hosts, tmp_path: Path) -> None:
    """Delayed by 0.3 s each way; where the kernel has no delay to add, by a rate of 4 Mbit/s."""

    def interfere(_: subprocess.Popen[bytes]) -> None:
        slow_down(hosts, hosts.names[-1])

    ended = run_on(hosts, tmp_path, "time.sleep(0.5)\n" + SLOW, interfere)
    assert (ended.status, ended.out, ended.err) == (0, "", "")
    notes = ended.of("slow")
    size = len(hosts.names) * hosts.slots
    assert {note.text for note in notes.values()} == {f"np.float64({250_000.0 * size})"}
    assert len(notes) == size
    assert max(note.seconds for note in notes.values()) > 0.5


def slow_down(hosts: Hosts, host: str) -> None:
    """Delay what a host sends."""
    for kind in ("netem delay 300ms", "tbf rate 4mbit burst 16kb limit 4mb"):
        command = hosts.command(host, ["tc", *["qdisc", "replace", "dev", "eth0", "root"], *kind.split()])
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
    pytest.fail(done.stderr)


@pytest.mark.parametrize(("number", "slots"), [(3, 1)])
@again_if_slow
def test_job_that_loses_a_host_ends_where_the_launcher_sees_it(hosts: Hosts, tmp_path: Path) -> None:
    at = []

    def interfere(_: subprocess.Popen[bytes]) -> None:
        time.sleep(0.2)
        at.append(time.monotonic())
        hosts.kill(hosts.names[-1])

    ended = run_on(hosts, tmp_path, CUT, interfere)
    assert ended.status != 0
    soon(ended.at - at[0], 2)


@pytest.mark.parametrize(("number", "slots"), [(2, 2), (3, 1)])
@again_if_slow
def test_lost_host_is_named_by_those_that_are_left(hosts: Hosts, tmp_path: Path) -> None:
    """As when its power is cut: it says no more word. The launcher, which would, sleeps meanwhile."""

    def interfere(launcher: subprocess.Popen[bytes]) -> None:
        time.sleep(0.2)
        mpiexec = pid_below(launcher.pid, "mpiexec")
        os.kill(mpiexec, signal.SIGSTOP)
        hosts.cut(hosts.names[-1])
        hosts.kill(hosts.names[-1])
        time.sleep(3.0)
        os.kill(mpiexec, signal.SIGCONT)
        launcher.send_signal(signal.SIGCONT)  # nsenter stops with its child

    ended = run_on(hosts, tmp_path, CUT, interfere)
    assert ended.status != 0
    near, far = split(hosts)
    notes = ended.of("error")
    assert sorted(notes) == near
    require_deadline([notes[rank] for rank in near], unheard(hosts, far))


def pid_below(pid: int, name: str) -> int:
    """Find a process of that name among a process and those that it started, and these started."""
    if Path(f"/proc/{pid}/comm").read_text().startswith(name):
        return pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next(filter(None, (pid_below(int(child), name) for child in children)), 0)
