"""Hosts out of namespaces: they are apart but for their network, it can be cut, and nothing of them is left."""

import contextlib
import csv
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import HEAD, Hosts, HostsError, bits_per_second
from jobs.failing import ran
from jobs.hosts import need_hosts
from mpi_session import clean_environment

pytestmark = [pytest.mark.no_mpi, pytest.mark.long]

PROJECT = Path(__file__).parents[3]

REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), 1)
except OSError as error:
    print(type(error).__name__)
"""
KILLED = """
import subprocess, time
from hosts import HEAD, Hosts
with Hosts(number=1) as hosts:
    said = lambda *argv: subprocess.run(argv, capture_output=True, text=True).stdout.strip()
    namespaces = [said(*hosts.command(name, ["readlink", "/proc/self/ns/pid"])) for name in (HEAD, "h1")]
    folder = said(*hosts.command(HEAD, ["sh", "-c", "dirname $TMPDIR"]))
    print(folder, *namespaces, flush=True)
    time.sleep(6000)
"""


@pytest.fixture
def hosts():
    need_hosts()
    with Hosts() as built:
        yield built


def said(hosts, host, *argv):
    """Run a command on a host, and return what it prints."""
    done = ran(hosts.command(host, argv))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def reach(hosts, host, other):
    return said(hosts, host, sys.executable, "-c", REACH, hosts.addresses[other])


def wait_until_reached(hosts, host, other):
    while reach(hosts, host, other) != "ConnectionRefusedError":
        pass


def traces(hosts):
    """Return the PID namespaces of all hosts, and the folder where their files are."""
    names = (HEAD, *hosts.names)
    found = {said(hosts, name, "readlink", "/proc/self/ns/pid") for name in names}
    assert len(found) == len(names)
    return found, Path(said(hosts, HEAD, "sh", "-c", "echo $TMPDIR")).parent


def still_used(namespaces):
    """Return those of these PID namespaces that any process is in."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/pid"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found.add(os.readlink(link))
    return found & namespaces


def test_hosts_are_apart_but_for_a_network_that_can_be_cut(hosts, tmp_path):
    for host, other in (("h1", 1), ("h2", 0), (HEAD, 0)):
        wait_until_reached(hosts, host, other)
    look = "ls /dev/shm; name=$(cat /proc/sys/kernel/hostname); touch /dev/shm/$name; echo $name $(basename $TMPDIR)"
    assert [said(hosts, name, "sh", "-c", look) for name in hosts.names] == ["h1 h1", "h2 h2"]  # no file of the other
    command = hosts.command("h1", ["sh", "-c", "pwd; sleep 5000"])
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        assert started.stdout.readline().strip() == str(tmp_path.resolve())
        assert "sleep" not in said(hosts, "h2", "sh", "-c", "cat /proc/[0-9]*/comm")
        started.kill()
    hosts.clear()  # of what the command started itself
    assert "sleep" not in said(hosts, "h1", "sh", "-c", "cat /proc/[0-9]*/comm")
    hosts.cut("h2")
    assert reach(hosts, "h1", 1) == reach(hosts, "h2", 0) == "TimeoutError"
    hosts.join("h2")
    wait_until_reached(hosts, "h1", 1)
    wait_until_reached(hosts, "h2", 0)


def test_hosts_run_ranks_and_a_killed_one_loses_its_processes_alone(hosts):
    program = "import sys; from mpi4py.MPI import *; sys.stdout.write(f'{Get_processor_name()} {COMM_WORLD.size}\\n')"
    command = [*hosts.mpiexec(Path(sys.executable), 3), sys.executable, "-c", program]
    done = ran(command, env=clean_environment(), stdin=subprocess.DEVNULL)
    assert sorted(done.stdout.splitlines()) == ["h1 3", "h1 3", "h2 3"], done.stderr
    with pytest.raises(HostsError, match="5 ranks cannot run on 2 hosts with 2 slots each"):
        hosts.mpiexec(Path(sys.executable), 5)
    sleepers = [subprocess.Popen(hosts.command(name, ["sleep", "5000"])) for name in hosts.names]
    hosts.kill("h2")
    assert sleepers[1].wait() != 0
    assert sleepers[0].poll() is None
    while (end := reach(hosts, "h1", 1)) == "ConnectionRefusedError":
        pass  # the kernel takes the network of a dead host down when it finds the time
    assert end in ("TimeoutError", "OSError")
    with pytest.raises(HostsError, match="host h2 is dead"):
        hosts.command("h2", ["true"])
    sleepers[0].kill()
    sleepers[0].wait()


def test_hosts_interrupted_leave_no_processes_or_namespaces():
    need_hosts()
    started, left = [], []

    def interrupted():
        with Hosts() as some, Hosts() as others:
            for hosts in (some, others):
                started.append(subprocess.Popen(hosts.command("h1", ["sleep", "5000"])))
                left.append(traces(hosts))
            wait_until_reached(some, "h1", 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [one.wait() != 0 for one in started] == [True, True]
    assert not left[0][0] & left[1][0]
    for namespaces, folder in left:
        assert not still_used(namespaces)
        assert not folder.exists()


def test_hosts_die_with_the_program_that_made_them():
    need_hosts()
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], cwd=PROJECT / "tools", stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        folder, *namespaces = started.stdout.readline().split()
        assert still_used(set(namespaces)) == set(namespaces)
        started.kill()
    while still_used(set(namespaces)):
        time.sleep(0.02)
    shutil.rmtree(folder)  # nobody was left to do it


def test_benchmark_over_hosts_checks_bytes_sent(tmp_path):
    need_hosts()
    sizes = "--sizes 1M --rounds 1 --seconds 0.1"
    command = [sys.executable, str(PROJECT / "benchmarks"), "network", *sizes.split()]
    command += [f"--env={name}={tmp_path / 'none'}" for name in ("openmpi", "gloo")]
    done = ran([*command, "--env", f"mpich={sys.executable}", "--out", str(tmp_path)], env=clean_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gloo: not installed: no environment" in done.stdout
    assert "sent / least" in done.stdout
    with (tmp_path / "network-4-ranks-2-hosts-200mbit.csv").open(newline="") as file:
        rows = {row["way"]: row for row in csv.DictReader(file)}
    ours = [f"mpidist {name}" for name in ("in place", "reproducible", "bf16", "fp16")]
    assert list(rows) == ["raw in place", *ours], done.stderr
    for way, row in rows.items():
        share = 0.5 if way.endswith("16") else 1.0
        assert float(row["us"]) >= 0.9 * share * float(row["bound_us"])  # the links let no more through
        assert 0.99 * share <= float(row["net_sent_to_least"]) < 2 * share


def test_hosts_refuse_wrong_arguments():
    for wrong in ("200", "mbit", "-1mbit", "fast"):
        with pytest.raises(ValueError, match="is no rate"):
            Hosts(rate=wrong)
    with pytest.raises(ValueError, match="0 hosts"):
        Hosts(number=0)
    with pytest.raises(HostsError, match="there is no host 'h1': there are none, outside of `with`"):
        Hosts().command("h1", ["true"])
    assert bits_per_second("1.5gbit") == 1.5e9
