"""How fast is an all-reduce of mpidist, next to other libraries?

python benchmarks/peers.py --out results

Starts a group of processes for each library that is installed, and times them in turns within one run. README.md
beside this file says what the columns mean and how to be fair.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from contest.environments import MEMORY, PEERS, Peer, missing
from contest.group import Group, GroupError
from contest.measuring import Timing, fitting, measure
from contest.roofline import SIZES, Roofline
from contest.tables import lines_of_roofline, lines_of_timings, lines_of_verdicts, row_of
from contest.targets import verdicts
from contest.work import Work
from record import SHAPES, parse_size, shapes_of_list, stolen_seconds, text_of, write_rows

_SIZES: Final = "4,1K,4K,16K,64K,256K,1M,4M,16M,64M,256M"
_LISTS: Final = "tiny1000,many10000,resnet50,bert_base,gpt2_small"
_QUICK: Final = ("4,64K,1M", "tiny1000", 2, 0.02)
_MADE_UP: Final = {"many10000": [(100,)] * 10_000}
_CALLS_OF_SMALL: Final = 8
_SMALL_BYTES: Final = 16 << 10


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(peer.name for peer in PEERS)
    known = ", ".join([*sorted(path.stem for path in SHAPES.glob("*.json")), *_MADE_UP])
    parser.add_argument("--ranks", "--rank", type=int, default=2, help="of each library: %(default)s")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=PYTHON", help=f"NAME: {names}")
    parser.add_argument("--peers", default="", help=f"measure only these of {names}")
    parser.add_argument("--sizes", default=_SIZES, help="bytes: %(default)s; '' for none")
    parser.add_argument("--lists", default=_LISTS, help=f"of {known}: %(default)s; '' for none")
    parser.add_argument("--rounds", type=int, default=7, help="medians to take: %(default)s")
    parser.add_argument("--seconds", type=float, default=0.25, help="of a turn of one way, about: %(default)s")
    parser.add_argument("--out", type=Path, help="folder for the CSV file; without, none is written")
    parser.add_argument("--quick", action="store_true", help="in place of the above, few of each: does it run?")
    given = parser.parse_args()
    if given.quick:
        given.sizes, given.lists, given.rounds, given.seconds = _QUICK
    chosen = list(filter(None, given.peers.split(",")))
    unknown = {*chosen, *(text.partition("=")[0] for text in given.env)} - {peer.name for peer in PEERS}
    if unknown:
        parser.error(f"no library is called {', '.join(sorted(unknown))}: there are {names}")
    given.peers = chosen or [peer.name for peer in PEERS]
    return given


def _works(sizes: str, lists: str) -> Iterator[Work]:
    for text in filter(None, sizes.split(",")):
        nbytes = parse_size(text)
        yield Work("size", text, ((nbytes // 4,),), _CALLS_OF_SMALL if nbytes <= _SMALL_BYTES else 1)
    for name in filter(None, lists.split(",")):
        yield Work("list", name, tuple(_MADE_UP.get(name) or shapes_of_list(name)))


def _pythons(given: list[str]) -> dict[str, Path]:
    """Find the Python of each library's environment: what the user names, or a folder beside this one."""
    named = dict(text.split("=", 1) for text in given)
    root = Path(__file__).resolve().parent.parent
    # Not resolved: the Python of a virtual environment is a link.
    return {peer.name: Path(named.get(peer.name) or root / peer.folder / "bin/python").absolute() for peer in PEERS}


def _installed(names: list[str], pythons: dict[str, Path], ranks: int) -> list[Peer]:
    """List the libraries that can be measured, and say why the others cannot."""
    found = []
    for peer in PEERS:
        if peer.name in names:
            lack = missing(peer, pythons[peer.name], ranks)
            print(f"{peer.name}: not installed: {lack}" if lack else f"{peer.name}: installed", flush=True)
            found += [] if lack else [peer]
    return found


@contextlib.contextmanager
def _groups(peers: list[Peer], pythons: dict[str, Path], ranks: int) -> Iterator[list[Group]]:
    """Start all groups one after the other, and end them."""
    groups: list[Group] = []
    try:
        for peer in peers:
            groups.append(Group(peer, pythons[peer.name], ranks))
            try:
                groups[-1].join()
            except GroupError as error:
                print(f"{peer.name}: {error}", file=sys.stderr, flush=True)
                groups.pop().end()
                continue
            print(f"{peer.name}: " + ", ".join(f"{name} {text}" for name, text in groups[-1].versions.items()))
        yield groups
    finally:
        for group in groups:
            group.end()


def _run(groups: list[Group], given: argparse.Namespace) -> Iterator[list[Timing]]:
    for work in _works(given.sizes, given.lists):
        chosen, began = fitting(groups, work), time.monotonic()
        left_out = [group.peer.name for group in groups if group not in chosen and not group.failure]
        timings = measure(chosen, work, given.rounds, given.seconds)
        best = min(timings, key=lambda timing: timing.seconds, default=None)
        text = f"{work.name:>10} in {time.monotonic() - began:.0f} s"
        text += f", fastest: {best.way} of {best.peer}, {text_of(best.seconds * 1e6)}" if best else ""
        text += f"; no memory for {', '.join(left_out)}" if left_out else ""
        print(text, flush=True)
        yield timings


def _where(ranks: int, groups: list[Group]) -> dict[str, str]:
    """Say what is measured, and on what; machines and people are not named."""
    commits = {group.versions["commit"] for group in groups if "commit" in group.versions}
    return {
        "date": datetime.date.today().isoformat(),
        "commit": " ".join(sorted(commits)),
        "cpus": str(len(os.sched_getaffinity(0))),
        "ranks": str(ranks),
    }


def _save(given: argparse.Namespace, notes: list[dict[str, str]], timings: list[Timing], roofline: Roofline) -> None:
    if given.out:
        rows = [note | row_of(timing, roofline) for note, timing in zip(notes, timings, strict=True)]
        write_rows(given.out / f"peers-{given.ranks}-ranks.csv", rows)


def _end(*_: object) -> None:
    raise SystemExit("ended by a signal")


def main() -> None:
    """Measure, print and save."""
    signal.signal(signal.SIGTERM, _end)  # so that all groups are ended, too
    given = _arguments()
    load, stolen, pythons = f"{os.getloadavg()[0]:.2f}", stolen_seconds(), _pythons(given.env)
    pythons[MEMORY.name] = Path(sys.executable)
    peers = _installed(given.peers, pythons, given.ranks)
    timings: list[Timing] = []
    notes: list[dict[str, str]] = []
    with _groups([MEMORY, *peers], pythons, given.ranks) as groups:
        roofline, libraries = Roofline(groups[0], {}), groups[1:]
        where = _where(given.ranks, libraries) | {"load": load}
        print(", ".join(f"{name} {text}" for name, text in where.items()), flush=True)
        versions = {group.peer.name: " ".join(map(" ".join, group.versions.items())) for group in libraries}
        sizes = SIZES[:2] if given.quick else SIZES
        roofline.measure(sizes, given.rounds, given.seconds)
        for new in _run(libraries, given):
            lost = {"stolen_seconds": f"{stolen_seconds() - stolen:.2f}"}
            notes += [where | lost | {"versions": versions[timing.peer]} for timing in new]
            timings += new
            _save(given, notes, timings, roofline)  # a long run that is broken off has written what it has
        roofline.measure(sizes, given.rounds, given.seconds)
    _save(given, notes, timings, roofline)
    found = verdicts(timings, given.ranks, int(where["cpus"]))
    for line in [*lines_of_timings(timings), *lines_of_roofline(roofline, timings), *lines_of_verdicts(found)]:
        print(line)


if __name__ == "__main__":
    main()
