"""Measure mpidist, raw mpi4py, other libraries and older commits, in one run and in turns.

python benchmarks performance            # the numbers and the page docs/performance.md: ten minutes
python benchmarks page                   # the page alone, from benchmarks/results/*/latest.csv
python benchmarks faults                 # the messages of mpidist, mpi4py and torchrun for eleven faults: an hour
python benchmarks torch_faults           # six faults in DDP over mpidist, fifty jobs each
python benchmarks NAME --out results     # names: see below

README.md in this folder describes the columns and the method.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
sys.path[:1] = [str(_ROOT / "benchmarks"), str(_ROOT), str(_ROOT / "tools")]

import faults  # noqa: E402
import page  # noqa: E402
import performance  # noqa: E402
import torch_faults  # noqa: E402
from harness import record  # noqa: E402
from harness.bounds import Bound, Link, Prediction  # noqa: E402
from harness.cases import CASES, works_of  # noqa: E402
from harness.environments import FOLDERS, PEERS, ROOT, TUNED, Peer, missing, peers_of, python_of  # noqa: E402
from harness.group import Group, GroupError  # noqa: E402
from harness.measuring import fitting, measure  # noqa: E402
from harness.tables import lines_of, row_of  # noqa: E402
from hosts import Hosts, HostsError, bits_per_second  # noqa: E402

from mpidist.transport.costs.cost_model import CostModel  # noqa: E402

_QUICK = {"sizes": "4,64K,1M", "lists": "20x1K", "rounds": 2, "seconds": 0.02}


def _parse() -> argparse.Namespace:
    names = "\n".join(f"  {name:<18} {case.question}" for name, case in CASES.items())
    parser = record.parser_of("", f"{__doc__}\n{names}")
    peers = ", ".join(peer.name for peer in (*PEERS, *TUNED))
    parser.add_argument("name", choices=CASES, metavar="NAME")
    parser.add_argument("--peers", help=f"measure only these of {peers}")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=PYTHON", help=f"of {', '.join(FOLDERS)}")
    parser.add_argument("--beside", metavar="COMMIT", help="mpidist of an older commit, too")
    parser.add_argument("--ranks", type=int, help="of each library: 2, or 2 for each host")
    parser.add_argument("--workers", type=int, default=2, help="of parameter servers: %(default)s")
    parser.add_argument("--servers", type=int, default=1, help="how many: %(default)s")
    parser.add_argument("--hosts", type=int, help="emulate so many hosts, as root; with --in-job: how many there are")
    parser.add_argument("--rate", default="200mbit", help="of each host's link, each way: %(default)s")
    parser.add_argument("--link-us", type=float, default=100, help="latency of a link, for `model`: %(default)s")
    parser.add_argument("--in-job", action="store_true", help="measure the ranks of the job that this is started in")
    parser.add_argument("--sizes", help="of float32 arrays, as 4,64K; '' for none")
    parser.add_argument("--lists", help="of gradients, as resnet50,1000x1K; '' for none")
    parser.add_argument("--ways", default="", help="measure only these, as 'raw,mpidist'")
    parser.add_argument(
        "--after", type=record.parse_size, default=0, metavar="SIZE", help="bytes of other work before each call"
    )
    parser.add_argument("--dcp", action="store_const", const="torch", dest="peers", help="checkpoints: torch's, too")
    parser.add_argument("--rounds", type=int, help="turns of each way")
    parser.add_argument("--seconds", type=float, help="of a turn of one way, about")
    parser.add_argument("--out", type=Path, help="folder for the CSV file; without, none is written")
    parser.add_argument("--quick", action="store_true", help="few of each: does it run?")
    return _completed(parser.parse_args(), parser)


def _completed(given: argparse.Namespace, parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Take the defaults of the case."""
    case = CASES[given.name]
    for name in ("sizes", "lists", "rounds", "seconds", "hosts"):
        if getattr(given, name) is None:
            quick = given.quick and name in _QUICK and getattr(case, name)
            setattr(given, name, _QUICK[name] if quick else getattr(case, name))
    given.ranks = given.ranks or 2 * max(1, given.hosts)
    if given.name == "servers":
        given.ranks = given.workers + given.servers
    given.peers = given.peers.split(",") if given.peers else list(case.peers)
    kind, environments = f"library of {given.name}", [text.partition("=")[0] for text in given.env]
    for what, names, known in ((kind, given.peers, peers_of(case.peers)), ("environment", environments, [*FOLDERS])):
        if unknown := set(names) - set(known):
            parser.error(f"{', '.join(sorted(unknown))} is no {what}: there are {', '.join(known)}")
    if (given.hosts or given.name == "model") and (given.hosts < 2 or given.ranks % given.hosts):
        parser.error(f"{given.ranks} ranks on {given.hosts} hosts: give 2 hosts or more, and as many ranks for each")
    if min(given.ranks, given.workers, given.servers) < 1:
        parser.error("give 1 rank, 1 worker and 1 server, or more")
    try:
        bits_per_second(given.rate)
        given.works = list(works_of(given.name, given.sizes, given.lists))
    except (ValueError, argparse.ArgumentTypeError) as error:
        parser.error(str(error))
    if given.after:
        given.works = [replace(work, calls=1, other_bytes=given.after) for work in given.works]
    return given


def _installed(given: argparse.Namespace) -> list[tuple[Peer, Path]]:
    """List the libraries that can be measured with their Pythons, and report why the others cannot."""
    found = []
    for peer in (peer for peer in (*PEERS, *TUNED) if peer.name in given.peers):
        python = python_of(peer, given.env)
        lack = missing(peer, python, given.ranks)
        print(f"{peer.name}: not installed: {lack}" if lack else f"{peer.name}: installed", flush=True)
        arguments = (str(given.workers),) if given.name == "servers" else ()
        found += [] if lack else [(replace(peer, arguments=arguments), python)]
    return found


@contextlib.contextmanager
def _groups(given: argparse.Namespace, hosts: Hosts | None) -> Iterator[list[Group]]:
    """Start all groups one after the other, and end them."""
    with contextlib.ExitStack() as ending:
        peers = _installed(given)
        if given.beside:
            ours = [(peer, it) for peer, it in peers if "mpidist" in peer.modules and not peer.ways]
            into = Path(ending.enter_context(tempfile.TemporaryDirectory()))
            source = record.export(ROOT, given.beside, into, {it for _, it in ours})
            peers += [(replace(peer, name=f"{peer.name}@{given.beside}", source=source), it) for peer, it in ours]
        groups: list[Group] = []
        for peer, python in peers:
            group = Group(peer, python, given.ranks, hosts)
            ending.callback(group.close)
            try:
                group.join()
            except GroupError as error:
                print(f"{peer.name}: {error}", file=sys.stderr, flush=True)
                continue
            print(f"{peer.name}: " + ", ".join(f"{name} {text}" for name, text in group.versions.items()))
            groups.append(group)
        yield groups


def _bound(given: argparse.Namespace) -> Bound | None:
    """Return the least times that the measurements are compared with."""
    if given.name == "model":
        rate = bits_per_second(given.rate) / 8
        model = CostModel(link_seconds=given.link_us * 1e-6, link_bytes_per_second=rate)
        return Prediction(model, (given.ranks // given.hosts,) * given.hosts)
    return Link(given.hosts, bits_per_second(given.rate)) if given.hosts else None


def _run(given: argparse.Namespace, groups: Sequence[Group], bound: Bound | None) -> None:
    """Measure work by work; print and save the results so far."""
    place = {"hosts": str(given.hosts), "rate": given.rate} if given.hosts else {}
    place |= {"workers": str(given.workers), "servers": str(given.servers)} if given.name == "servers" else {}
    where, stolen, rows = record.facts_now(ranks=str(given.ranks), **place), record.stolen_seconds(), []
    print(", ".join(f"{name} {text}" for name, text in where.items()), flush=True)
    versions = {group.peer.name: ", ".join(map(" ".join, group.versions.items())) for group in groups}
    for work in given.works:
        chosen, began = fitting(groups, work), time.monotonic()
        left_out = [group.peer.name for group in groups if group not in chosen and not group.failure]
        timings = measure(chosen, work, given.rounds, given.seconds, [*filter(None, given.ways.split(","))])
        lost = {"stolen_seconds": f"{record.stolen_seconds() - stolen:.2f}"}
        new = [row_of(one, timings, bound) for one in timings]
        rows += [where | lost | {"versions": versions[row["peer"]]} | row for row in new]
        for line in lines_of(new) if new else [f"{work.name}: nobody could be measured"]:
            print(line)
        lacking = f"; no memory for {', '.join(left_out)}" if left_out else ""
        print(f"in {time.monotonic() - began:.0f} s{lacking}", flush=True)
        if given.out:  # a long run that is interrupted has written the rows so far
            record.write_rows(given.out / f"{_file_name(given)}.csv", rows)


def _file_name(given: argparse.Namespace) -> str:
    ranks = f"{given.workers}-workers-{given.servers}-servers" if given.name == "servers" else f"{given.ranks}-ranks"
    parts = [given.name, ranks]
    parts += [f"{given.hosts}-hosts-{given.rate}"] if given.hosts else []
    parts += ["after-other-work"] if given.after else []
    return "-".join([*parts, *([f"beside-{given.beside}"] if given.beside else [])])


def _in_job(given: argparse.Namespace) -> None:
    """Measure the ranks of this job, with rank 0. Collective."""
    from harness.job import Job  # starts MPI

    job = Job()
    given.ranks = job.ranks
    if not job.is_first:
        job.obey()
        return
    with contextlib.closing(job):
        print(", ".join(f"{name} {text}" for name, text in job.versions.items()))
        _run(given, [job], _bound(given))


def main() -> None:
    """Measure, print and save."""
    others = {
        "faults": faults.main,
        "page": page.main,
        "performance": performance.main,
        "torch_faults": torch_faults.main,
    }
    if sys.argv[1:2] and sys.argv[1] in others:
        sys.exit(others[sys.argv.pop(1)]())
    given = _parse()
    if given.in_job:
        _in_job(given)
        return
    # As an exception, so that all that was started is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    try:
        built = Hosts(given.hosts, given.rate, given.ranks // given.hosts) if given.hosts else contextlib.nullcontext()
        with built as hosts, _groups(given, hosts) as groups:
            _run(given, groups, _bound(given))
    except HostsError as error:
        raise SystemExit(f"hosts cannot be built here: {error}; {Hosts.missing()}") from error


if __name__ == "__main__":
    main()
