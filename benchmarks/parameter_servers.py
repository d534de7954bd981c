"""How fast are parameter servers, beside those of TensorFlow and what one writes with mpi4py?

python benchmarks servers --out results                            # 1 and 2 servers, 1 to 3 workers: ten minutes
python benchmarks servers --workers 2 --servers 1 --out results --add     # one cluster, behind what is there
python benchmarks servers --quick                                  # seconds: does it run?

Each cluster is measured by itself: all kinds of servers are resident, and take turns. Of every push it is waited until
the servers have added it, and of every pull until all numbers have come.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path
from typing import Final, final

from contest.environments import MPIS, PEERS, ROOT, Peer, missing
from contest.group import Group, GroupError
from contest.measuring import measure
from ranks.work import Work
from record import (
    end_at_sigterm,
    facts_now,
    parse_size,
    parser_of,
    read_rows,
    shapes_of_list,
    stolen_seconds,
    write_rows,
)
from servers.tables import Row, lines_of, rows_of, targets_of

__all__ = ["main"]

_KINDS: Final = {
    "mpidist": ("mpidist", "mpi4py", "numpy"),
    "messages": ("mpi4py", "numpy"),
    "window": ("mpi4py", "numpy"),
    "tensorflow": ("tensorflow",),
}
_WORKS: Final = "4,64M,resnet50,10000x400"
_QUICK: Final = "4,64K,20x1K"
_CALLS_OF_SMALL: Final = 50
_SMALL_BYTES: Final = 16 << 10
_MOST_TENSORS: Final = 2000  # in a graph of TensorFlow: with 10 000 it takes minutes to begin


def _parse() -> argparse.Namespace:
    parser = parser_of("servers", __doc__)
    parser.add_argument("--workers", help="how many, as 1,2,3")
    parser.add_argument("--servers", help="how many, as 1,2")
    parser.add_argument("--kinds", default=",".join(_KINDS), help="of servers: %(default)s")
    parser.add_argument("--mpi", choices=MPIS, default=MPIS[0], help="%(default)s")
    parser.add_argument("--env", action="append", default=[], metavar="PEER=PYTHON", help="the Python of a library")
    parser.add_argument("--works", help=f"arrays and lists of them, as {_WORKS}")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way")
    parser.add_argument("--seconds", type=float, default=0.15, help="of a turn of one way, about")
    parser.add_argument("--out", type=Path, help="folder for the CSV file; without, none is written")
    parser.add_argument("--add", action="store_true", help="keep what the file holds of other clusters")
    parser.add_argument("--quick", action="store_true", help="few of each: does it run?")
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.seconds = 2, 0.02
    try:
        given.workers = [int(text) for text in (given.workers or ("2" if given.quick else "1,2,3")).split(",")]
        given.servers = [int(text) for text in (given.servers or ("1" if given.quick else "1,2")).split(",")]
        given.works = [_work_of(text) for text in (given.works or (_QUICK if given.quick else _WORKS)).split(",")]
    except (ValueError, argparse.ArgumentTypeError) as error:
        parser.error(str(error))
    given.kinds = given.kinds.split(",")
    if min(given.workers + given.servers) < 1 or not set(given.kinds) <= set(_KINDS):
        parser.error(f"there are 1 worker, 1 server or more, of the kinds {', '.join(_KINDS)}")
    return given


def _work_of(text: str) -> Work:
    if text[:1].isdecimal() and "x" not in text:
        nbytes = parse_size(text)
        return Work("size", text, ((nbytes // 4,),), _CALLS_OF_SMALL if nbytes <= _SMALL_BYTES else 1, "servers")
    return Work("list", text, tuple(shapes_of_list(text)), 1, "servers")


@final
class _Cluster:
    """All kinds of servers with so many workers and servers each, to be used in `with`."""

    def __init__(self, given: argparse.Namespace, workers: int, servers: int) -> None:
        named = dict(text.split("=", 1) for text in given.env)
        self.groups: list[Group] = []
        self._ending = contextlib.ExitStack()
        for kind in given.kinds:
            library = next(peer for peer in PEERS if peer.name == (given.mpi if kind != "tensorflow" else kind))
            arguments = str(workers), str(servers)
            peer = Peer(
                kind, kind, _KINDS[kind], library.folder, library.by_mpiexec,
                program="servers.rank", arguments=arguments,
            )  # fmt: skip
            # Not resolved: the Python of a virtual environment is a link.
            python = Path(named.get(library.name) or ROOT / library.folder / "bin/python").absolute()
            lack = missing(peer, python, workers + servers)
            if lack:
                print(f"{kind}: left out: {lack}", flush=True)
                continue
            self._start(peer, python, workers + servers)

    def _start(self, peer: Peer, python: Path, processes: int) -> None:
        group = Group(peer, python, processes)
        self._ending.callback(group.close)
        try:
            group.join()
        except GroupError as error:
            print(f"{peer.name}: {error}", file=sys.stderr, flush=True)
        else:
            self.groups.append(group)

    def __enter__(self) -> list[Group]:
        return self.groups

    def __exit__(self, *_: object) -> None:
        self._ending.close()


def _run(given: argparse.Namespace) -> None:
    path = given.out / f"parameter-servers-{given.mpi}.csv" if given.out else None
    rows: list[Row] = read_rows(path) if path is not None and given.add else []
    for servers in given.servers:
        for workers in given.workers:
            names = {"workers": str(workers), "servers": str(servers)}
            rows = [row for row in rows if {name: row[name] for name in names} != names]
            rows += _measure(given, names, workers, servers)
            if path is not None:
                write_rows(path, rows)
    print("\n".join(targets_of(rows)))


def _measure(given: argparse.Namespace, names: Row, workers: int, servers: int) -> list[Row]:
    where = facts_now(**names)
    print("\n" + ", ".join(f"{name} {text}" for name, text in where.items()), flush=True)
    rows: list[Row] = []
    with _Cluster(given, workers, servers) as groups:
        versions = {group.peer.name: ", ".join(map(" ".join, group.versions.items())) for group in groups}
        print("\n".join(f"{name}: {text}" for name, text in versions.items()))
        for work in given.works:
            stolen, began = stolen_seconds(), time.monotonic()
            able = [group for group in groups if group.peer.kind != "tensorflow" or len(work.shapes) <= _MOST_TENSORS]
            new = rows_of(measure(able, work, given.rounds, given.seconds))
            print("\n".join(lines_of(new) if new else [f"{work.name}: nobody could be measured"]))
            print(f"in {time.monotonic() - began:.0f} s", flush=True)
            lost = {"stolen_seconds": f"{stolen_seconds() - stolen:.2f}"}
            rows += [where | lost | {"versions": versions[row["kind"]]} | row for row in new]
    return rows


def main() -> None:
    """Measure, print and save."""
    end_at_sigterm()
    _run(_parse())
