"""Several hosts on one machine, out of Linux namespaces: ranks on two of them can only talk TCP.

Each host has a network, a host name, processes, System V IPC, mounts and a /dev/shm of its own. A link joins it to a
bridge in one more set of namespaces, the head, where mpiexec runs; both ends of a link are limited by `tc tbf`. Files
are the machine's, but each host has a TMPDIR. Nothing of the machine itself is touched: no interface, no route, and no
file but those of a folder under /tmp.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

__all__ = ["HEAD", "Hosts", "HostsError", "bits_per_second"]

HEAD: Final = "head"

_TOOLS: Final = {"iproute2": ("ip", "tc", "bridge"), "util-linux": ("unshare", "nsenter", "setpriv", "mount")}
_NET: Final = "10.77.0"
_HEAD_NUMBER: Final = 254
_MOST_HOSTS: Final = 200
_UNITS: Final = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_UNSHARE: Final = ("unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--propagation", "private", "--fork")
_ENTER: Final = "--net --uts --ipc --pid --mount"
_BLOCKED, _FORWARDING = "0", "3"  # states of a port of a bridge
_SECONDS: Final = 30  # for a command that sets something up
_ZOMBIE_SECONDS: Final = 5

# The first process of a host, with its name and /etc/hosts: it says what its pids are, in the namespaces from the
# outermost to its own, and then waits for the end of its input. That comes, too, when the program that made it dies.
_INIT: Final = """
set -e
while read -r key pids; do [ "$key" != NSpid: ] || break; done </proc/self/status
mount -t proc proc /proc
echo "$1" >/proc/sys/kernel/hostname
mount --bind "$2" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
# of the new network; a host works without it
mount -t sysfs sysfs /sys 2>/dev/null || true
# IPv6 would check for a second or two that nobody else has the address of a new link
for which in all default; do
    { echo 1 >/proc/sys/net/ipv6/conf/$which/disable_ipv6; } 2>/dev/null || true
done
ip link set lo up
echo ready "$pids"
# the kernel buries orphans that come to a first process that ignores this; sh cannot be told to
exec env --ignore-signal=CHLD cat >/dev/null 2>&1
"""

# What the launchers of MPI call as their ssh, on the head. Like ssh, it answers 255 when the other end dies.
_SSH: Final = """#!/bin/sh
while :; do
    case $1 in
        -[xnqT]) shift ;;
        -[olp]) shift 2 ;;
        *) break ;;
    esac
done
host=${{1#*@}}
shift
case $host in
{cases}
    *) echo "there is no host $host" >&2; exit 255 ;;
esac
[ -e "/proc/$pid/ns/net" ] || {{ echo "host $host is dead" >&2; exit 255; }}
code=0
TMPDIR={folder}/$host nsenter --target "$pid" {enter} -- \\
    sh -c 'cd "$1" 2>/dev/null; eval "$2"' sh "$PWD" "$*" || code=$?
[ "$code" -lt 128 ] || code=255
exit "$code"
"""

# Which addresses do not answer? A host refuses a connection to a port where nobody listens, and does so at once.
_REACH: Final = """
import socket, sys, time
limit = time.monotonic() + 10
for address in sys.argv[1:]:
    while True:
        try:
            socket.create_connection((address, 9), 1).close()
        except ConnectionRefusedError:
            break
        except OSError as error:
            if time.monotonic() > limit:
                sys.exit(f"{address} does not answer: {error}")
            time.sleep(0.02)
"""


class HostsError(RuntimeError):
    """The hosts cannot be built, or not be used so."""


def bits_per_second(rate: str) -> float:
    """Read the rate of a link, `200mbit` or `1.5gbit`.

    Raises:
        ValueError: If it is none.
    """
    text = rate.strip().lower()
    number, unit = text[:-4], text[-4:]
    try:
        bits = float(number) * _UNITS[unit]
    except (KeyError, ValueError):
        raise ValueError(f"{rate!r} is no rate: give a number of {', '.join(_UNITS)}, as 200mbit") from None
    if not 0 < bits < float("inf"):
        raise ValueError(f"{rate!r} is no rate: it must be above 0")
    return bits


@dataclass(frozen=True)
class _Host:
    """A set of namespaces.

    Attributes:
        name: Its host name.
        started: What started it, and ends after it.
        pid: Its first process.
        pid_on_head: The same, as the head numbers it.
    """

    name: str
    started: subprocess.Popen[str]
    pid: int
    pid_on_head: int

    @property
    def is_dead(self) -> bool:
        return self.started.poll() is not None or not Path(f"/proc/{self.pid}/ns/net").exists()

    def end(self) -> None:
        """Kill everything there, and wait until all of it is gone."""
        if self.started.poll() is None:
            # By its parent's death or by its own, all of its PID namespace ends with it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        # The zombie of a command whose nsenter was killed belongs to the machine's first process, and the kernel waits
        # until that one buries it: it takes a second, and the first process of a container may never do it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.started.wait(_ZOMBIE_SECONDS)
        assert self.started.stdin is not None
        self.started.stdin.close()


@final
class Hosts:
    """Hosts `h1`, `h2`, ... on this machine, from `with` to its end. Needs root.

    A program that is killed while it has hosts takes them with it, and leaves an almost empty folder `/tmp/hosts-...`.

    Args:
        number: How many.
        rate: Of each link, each way, as `tc` writes it.
        slots: How many ranks mpiexec starts on each.
    """

    def __init__(self, number: int = 2, rate: str = "200mbit", slots: int = 2) -> None:
        if not 1 <= number <= _MOST_HOSTS or slots < 1:
            raise ValueError(
                f"{number} hosts with {slots} slots: there can be 1 to {_MOST_HOSTS} hosts, and 1 slot or more"
            )
        bits_per_second(rate)
        self.rate, self.slots = rate, slots
        self.names: Final = tuple(f"h{at}" for at in range(1, number + 1))
        self.addresses: Final = tuple(f"{_NET}.{at}" for at in range(1, number + 1))
        self._hosts: dict[str, _Host] = {}
        self._ending = contextlib.ExitStack()
        self._folder = Path()

    @staticmethod
    def missing() -> str:
        """Say what this machine lacks for hosts; nothing if they can be built.

        Returns:
            A reason for a person, or "".
        """
        if not sys.platform.startswith("linux"):
            return f"namespaces are of Linux, and this is {sys.platform}"
        if os.geteuid() != 0:
            return "only root may make namespaces and links"
        for package, tools in _TOOLS.items():
            lacking = [tool for tool in tools if shutil.which(tool) is None]
            if lacking:
                return f"there is no {', '.join(lacking)}, of the package {package}"
        try:
            with Hosts(number=1):
                return ""
        except HostsError as error:
            return str(error)

    def __enter__(self) -> Hosts:
        if self._hosts:
            raise HostsError("these hosts are up already")
        with contextlib.ExitStack() as stack:
            # Not where TMPDIR points: sockets lie below it, and their paths must be short.
            folder = tempfile.TemporaryDirectory(prefix="hosts-", dir="/tmp", ignore_cleanup_errors=True)
            self._folder = Path(stack.enter_context(folder))
            stack.callback(self._end)
            self._start()
            self._ending = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """Make the command that runs another on one host, in the working directory that it is started in.

        When it is killed, what it started is killed, too.

        Args:
            host: One of `names`, or `HEAD`.
            argv: The other command.

        Raises:
            HostsError: If there is no such host, or it was killed.
        """
        pid = self._host(host).pid
        # nsenter waits outside for its child inside, and would leave it running.
        script = f'exec nsenter --target {pid} {_ENTER} -- setpriv --pdeathsig KILL env --chdir="$PWD" "$@"'
        return ["sh", "-c", script, host, f"TMPDIR={self._folder / host}", *argv]

    def mpiexec(self, python: Path, ranks: int) -> list[str]:
        """Make the command that starts ranks on the hosts, `slots` on each, to which the program is added.

        Args:
            python: Of an environment whose `mpiexec`, beside it, is MPICH's or that of Open MPI 5.
            ranks: How many.

        Raises:
            HostsError: If there is no such `mpiexec`, or there are more ranks than slots.
        """
        if not 1 <= ranks <= len(self.names) * self.slots:
            raise HostsError(f"{ranks} ranks cannot run on {len(self.names)} hosts with {self.slots} slots each")
        mpiexec = python.absolute().parent / "mpiexec"  # not resolved: the Python of an environment is a link
        hosts = ",".join(f"{name}:{self.slots}" for name in self.names)
        variables, options = _options(mpiexec, self._folder / "ssh", hosts, ranks > len(os.sched_getaffinity(0)))
        return self.command(HEAD, [*variables, str(mpiexec), *options, "-n", str(ranks)])

    def cut(self, host: str) -> None:
        """Lose every packet from and to a host, silently."""
        self._set_port(host, _BLOCKED)

    def join(self, host: str) -> None:
        """Undo `cut`."""
        self._set_port(host, _FORWARDING)

    def kill(self, host: str) -> None:
        """Kill every process of a host at once, as the loss of its power would. It does not come back."""
        self._host(host).end()

    def clear(self) -> None:
        """Kill all that still runs on hosts; the hosts stay."""
        for name in self.names:
            host = self._hosts.get(name)
            if host is not None and not host.is_dead:
                # -1: all in the PID namespace but the first and kill itself; on the head, those of all hosts, too.
                # It fails where there is none.
                _run(["nsenter", "--target", str(host.pid), "--pid", "--", "kill", "-KILL", "-1"], may_fail=True)

    def _host(self, name: str) -> _Host:
        host = self._hosts.get(name)
        if host is None:
            known = ", ".join(self._hosts) or "none, outside of `with`"
            raise HostsError(f"there is no host {name!r}: there are {known}")
        if host.is_dead:
            raise HostsError(f"host {name} is dead")
        return host

    def _set_port(self, host: str, state: str) -> None:
        self._host(host)
        self._in_network(HEAD, f"bridge link set dev p-{host} state {state}")

    def _in_network(self, host: str, command: str, *more: str) -> None:
        _run(["nsenter", "--target", str(self._host(host).pid), "--net", "--", *command.split(), *more])

    def _start(self) -> None:
        lines = [f"{address} {name}" for address, name in zip(self.addresses, self.names, strict=True)]
        lines += ["127.0.0.1 localhost", f"{_NET}.{_HEAD_NUMBER} {HEAD}"]
        (self._folder / "hosts").write_text("\n".join(lines) + "\n")
        self._start_host(HEAD)
        self._in_network(HEAD, "ip link add br0 type bridge forward_delay 0 stp_state 0")
        self._in_network(HEAD, f"ip addr add {_NET}.{_HEAD_NUMBER}/24 dev br0")
        self._in_network(HEAD, "ip link set br0 up")
        for name, address in zip(self.names, self.addresses, strict=True):
            self._start_host(name)
            self._link(name, address)
        self._in_network(HEAD, sys.executable, "-c", _REACH, *self.addresses)
        pids = {name: self._host(name).pid_on_head for name in self.names}
        cases = "\n".join(f"    {name}) pid={pid} ;;" for name, pid in pids.items())
        ssh = self._folder / "ssh"
        ssh.write_text(_SSH.format(cases=cases, folder=shlex.quote(str(self._folder)), enter=_ENTER))
        ssh.chmod(0o755)

    def _start_host(self, name: str) -> None:
        (self._folder / name).mkdir()
        # All others are below the PID namespace of the head, so they end with it, and it can enter them.
        inside = [] if name == HEAD else ["nsenter", "--target", str(self._host(HEAD).pid), "--pid", "--"]
        started = subprocess.Popen(
            [*inside, *_UNSHARE, "sh", "-c", _INIT, "host", name, str(self._folder / "hosts")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
            text=True,
            start_new_session=True,  # Ctrl-C is for the program, which ends the hosts
        )
        assert started.stdin is not None
        assert started.stdout is not None
        said = ""
        try:
            with started.stdout as output:
                for line in output:
                    said += line
                    if line.startswith("ready "):
                        pids = [int(pid) for pid in line.split()[1:]]
                        self._hosts[name] = _Host(name, started, pids[0], pids[-2])
                        return
        finally:
            if name not in self._hosts:
                started.stdin.close()  # it ends, also when it is interrupted here before it is ready
                code = started.wait()
        raise HostsError(f"host {name} could not be made: {said.strip() or f'it ended with {code}'}")

    def _link(self, name: str, address: str) -> None:
        port, pid = f"p-{name}", self._host(name).pid
        limit = f"root tbf rate {self.rate} burst 16kb limit 4mb"
        # As on a cluster's network: the kernel cuts data into frames, and those of 1,500 bytes take most of a core.
        mtu = "mtu 9000"
        self._in_network(HEAD, f"ip link add {port} {mtu} type veth peer name eth0 {mtu} netns {pid}")
        self._in_network(HEAD, f"ip link set {port} master br0 up")
        self._in_network(name, f"ip addr add {address}/24 dev eth0")
        self._in_network(name, "ip link set eth0 up")
        self._in_network(HEAD, f"tc qdisc replace dev {port} {limit}")
        self._in_network(name, f"tc qdisc replace dev eth0 {limit}")

    def _end(self) -> None:
        """End the head first, and all others with it."""
        for host in self._hosts.values():
            host.end()
        self._hosts.clear()


def _run(command: Sequence[str], may_fail: bool = False) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostsError(f"{_shown(command)}: {error}") from error
    if done.returncode and not may_fail:
        said = (done.stderr + done.stdout).strip() or f"it ended with {done.returncode}"
        raise HostsError(f"{_shown(command)}: {said}")


def _shown(command: Sequence[str]) -> str:
    """Write a command without the way into the namespaces, and without a whole program."""
    own = command[command.index("--") + 1 :] if "--" in command else command
    return " ".join(word for word in own if "\n" not in word)


def _options(mpiexec: Path, ssh: Path, hosts: str, is_crowded: bool) -> tuple[list[str], list[str]]:
    """Find the variables and options that make an mpiexec go over the hosts."""
    try:
        done = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostsError(f"{mpiexec} cannot be started: {error}") from error
    version = done.stdout + done.stderr
    if "HYDRA" in version:
        # It would give the TMPDIR of the head to all ranks.
        variables = ["env", "--unset=TMPDIR"]
        # More ranks than cores: one that waits should give its core up soon.
        variables += ["MPIR_CVAR_ENABLE_HEAVY_YIELD=1", "MPIR_CVAR_POLLS_BEFORE_YIELD=10"] if is_crowded else []
        return variables, f"-launcher ssh -launcher-exec {ssh} -iface br0 -hosts {hosts}".split()
    if "(Open MPI) 4" in version or "Open MPI" not in version:
        raise HostsError(f"{mpiexec} is neither MPICH's nor that of Open MPI 5: {version.strip() or 'it says nothing'}")
    variables = [f"{name}_ALLOW_RUN_AS_ROOT{more}=1" for name in ("PRTE", "OMPI") for more in ("", "_CONFIRM")]
    options = f"--prtemca plm ssh --prtemca plm_ssh_agent {ssh} --host {hosts} --bind-to none".split()
    options += ["--prtemca", "plm_ssh_no_tree_spawn", "1"]  # only the head can enter the hosts
    options += f"--prtemca prte_if_include {_NET}.0/24 --mca btl_tcp_if_include {_NET}.0/24".split()
    return variables, options + (["--mca", "mpi_yield_when_idle", "1"] if is_crowded else [])
