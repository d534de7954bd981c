"""How fast is an all-reduce of mpidist between hosts whose network is the limit, next to raw MPI and gloo?

python benchmarks/across_hosts.py --out results

Builds hosts on this machine (see hosts.py; Linux, as root), and starts a fresh job of each library over them in every
round. README.md beside this file says what the columns mean.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from contest.across_tables import Link, Timing, lines_of_timings, row_of, verdicts
from contest.environments import PEERS, Peer, environment_of, missing
from contest.tables import lines_of_verdicts
from hosts import Hosts, HostsError, bits_per_second
from record import parse_size, stolen_seconds, write_rows

_NAMES: Final = ("mpich", "openmpi", "gloo")
_PEERS: Final = tuple(peer for peer in PEERS if peer.name in _NAMES)
_PORT: Final = 29500
_START_SECONDS: Final = 90
_MOST_WAYS: Final = 5
_PATIENCE: Final = 20  # times what the links need
_LINES: Final = 15


class JobError(RuntimeError):
    """A job failed, or did not end."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="2 or more: %(default)s")
    parser.add_argument("--ranks-per-host", type=int, default=2, help="of each library: %(default)s")
    parser.add_argument("--rate", default="200mbit", help="of each host's link, each way: %(default)s")
    parser.add_argument("--sizes", default="16M", help="bytes: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each library: %(default)s")
    parser.add_argument("--steps", type=int, default=3, help="of each way in a job, after one more: %(default)s")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=PYTHON", help="NAME: " + ", ".join(_NAMES))
    parser.add_argument("--out", type=Path, help="folder for the CSV file; without, none is written")
    given = parser.parse_args()
    if min(given.hosts - 1, given.ranks_per_host, given.rounds, given.steps) < 1:
        parser.error("it needs 2 hosts or more, and 1 or more of ranks, rounds and steps")
    named = dict(text.partition("=")[::2] for text in given.env)
    unknown = set(named) - set(_NAMES)
    if unknown:
        parser.error(f"no library is called {', '.join(sorted(unknown))}: there are {', '.join(_NAMES)}")
    try:
        bits_per_second(given.rate)
        given.nbytes = {text: parse_size(text) for text in given.sizes.split(",")}
    except (ValueError, argparse.ArgumentTypeError) as error:
        parser.error(str(error))
    root = Path(__file__).resolve().parent.parent
    # Not resolved: the Python of a virtual environment is a link.
    given.pythons = {
        peer.name: Path(named.get(peer.name) or root / peer.folder / "bin/python").absolute() for peer in _PEERS
    }
    return given


def _installed(given: argparse.Namespace, ranks: int) -> list[Peer]:
    """List the libraries that can be measured, and say why the others cannot."""
    found = []
    for peer in _PEERS:
        lack = missing(peer, given.pythons[peer.name], ranks)
        print(f"{peer.name}: not installed: {lack}" if lack else f"{peer.name}: installed", flush=True)
        found += [] if lack else [peer]
    return found


def _commands(peer: Peer, hosts: Hosts, given: argparse.Namespace) -> list[list[str]]:
    """List the commands that start all ranks of a job."""
    python, ranks = given.pythons[peer.name], len(hosts.names) * hosts.slots
    program = [str(python), "-m", "contest.across", peer.kind, given.sizes, str(given.steps)]
    if peer.by_mpiexec:
        return [[*hosts.mpiexec(python, ranks), *program]]
    address = f"tcp://{hosts.addresses[0]}:{_PORT}"
    places = [name for name in hosts.names for _ in range(hosts.slots)]
    return [hosts.command(name, [*program, str(rank), str(ranks), address]) for rank, name in enumerate(places)]


def _run_job(peer: Peer, hosts: Hosts, given: argparse.Namespace, limit: float) -> list[dict[str, Any]]:
    """Start a job over the hosts, wait for its end, and return what it says.

    Raises:
        JobError: If it fails, or does not end in time. Then nothing of it is left.
    """
    commands, ranks = _commands(peer, hosts, given), len(hosts.names) * hosts.slots
    environment = environment_of(ranks) | {"GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": hosts.addresses[0]}
    with tempfile.TemporaryDirectory(prefix="across-") as folder, contextlib.ExitStack() as ending:
        log = Path(folder, "log")
        with log.open("a") as file:
            ending.callback(hosts.clear)
            started = []
            for command in commands:
                started.append(
                    subprocess.Popen(
                        command,
                        cwd=folder,  # nothing is imported from where the user stands
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        env=environment,
                    )
                )
                ending.callback(_end_process, started[-1])
        lack = _wait(started, limit)
        lines = log.read_text(errors="replace").splitlines()
        if lack:
            raise JobError("\n".join([lack, *lines[-_LINES:]]))
        return [json.loads(line) for line in lines if line.startswith("{")]


def _end_process(one: subprocess.Popen[bytes]) -> None:
    if one.poll() is None:
        one.kill()
        one.wait()


def _wait(started: list[subprocess.Popen[bytes]], limit: float) -> str:
    """Wait until all have ended, or one has failed; say what went wrong."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        codes = [one.poll() for one in started]
        failed = [code for code in codes if code]
        if failed:
            time.sleep(1)  # the others say something, too
            return f"ended with {failed[0]}"
        if None not in codes:
            return ""
        time.sleep(0.05)
    return f"did not end in {limit:.0f} s"


class _Results:
    """What the jobs said so far."""

    def __init__(self) -> None:
        self.timings: dict[tuple[str, str, str], Timing] = {}
        self.versions: dict[str, dict[str, str]] = {}

    def add(self, peer: str, said: list[dict[str, Any]]) -> None:
        for one in said:
            if "versions" in one:
                self.versions[peer] = one["versions"]
                continue
            key = (one["work"], peer, one["way"])
            self.timings.setdefault(key, Timing(peer, one["way"], one["work"], one["bytes"])).add(one)

    def sorted_by_size(self) -> list[Timing]:
        return sorted(self.timings.values(), key=lambda timing: timing.nbytes)


def _rounds(peers: list[Peer], hosts: Hosts, given: argparse.Namespace, link: Link) -> Iterator[_Results]:
    """Start all libraries in turn, round by round; one that fails is left out from then on."""
    results, left = _Results(), list(peers)
    needed = sum(map(link.bound, given.nbytes.values())) * _MOST_WAYS * (given.steps + 1)
    for number in range(1, given.rounds + 1):
        for peer in list(left):
            began = time.monotonic()
            try:
                results.add(peer.name, _run_job(peer, hosts, given, _START_SECONDS + _PATIENCE * needed))
            except (JobError, HostsError) as error:
                print(f"{peer.name}: {error}", file=sys.stderr, flush=True)
                left.remove(peer)
                continue
            print(f"round {number}: {peer.name} in {time.monotonic() - began:.0f} s", flush=True)
        yield results


def _where(given: argparse.Namespace) -> dict[str, str]:
    """Say what is measured, and on what; machines and people are not named."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpus": str(len(os.sched_getaffinity(0))),
        "hosts": str(given.hosts),
        "ranks_per_host": str(given.ranks_per_host),
        "rate": given.rate,
        "load": f"{os.getloadavg()[0]:.2f}",
    }


def _save(given: argparse.Namespace, where: dict[str, str], results: _Results, link: Link) -> None:
    if not given.out:
        return
    timings, rows = results.sorted_by_size(), []
    commit = " ".join(sorted({of["commit"] for of in results.versions.values() if "commit" in of}))
    for timing in timings:
        versions = {"versions": " ".join(map(" ".join, results.versions[timing.peer].items()))}
        rows.append(where | {"commit": commit} | row_of(timing, timings, link) | versions)
    write_rows(given.out / f"across-{given.hosts}-hosts-{given.ranks_per_host}-ranks-{given.rate}.csv", rows)


def _end(*_: object) -> None:
    raise SystemExit("ended by a signal")


def main() -> None:
    """Measure, print and save."""
    signal.signal(signal.SIGTERM, _end)  # so that the hosts are removed, too
    given = _arguments()
    lack = Hosts.missing()
    if lack:
        raise SystemExit(f"hosts cannot be built here: {lack}")
    where, stolen = _where(given), stolen_seconds()
    peers = _installed(given, given.hosts * given.ranks_per_host)
    link, results = Link(given.hosts, bits_per_second(given.rate)), _Results()
    print(", ".join(f"{name} {text}" for name, text in where.items()), flush=True)
    with Hosts(given.hosts, given.rate, given.ranks_per_host) as hosts:
        for results in _rounds(peers, hosts, given, link):
            where["stolen_seconds"] = f"{stolen_seconds() - stolen:.2f}"
            _save(given, where, results, link)  # a long run that is broken off has written what it has
    for name, versions in results.versions.items():
        print(f"{name}: " + ", ".join(f"{one} {text}" for one, text in versions.items()))
    timings = results.sorted_by_size()
    for line in [*lines_of_timings(timings, link), *lines_of_verdicts(verdicts(timings, link), "asked and got")]:
        print(line)


if __name__ == "__main__":
    main()
