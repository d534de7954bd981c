"""Measure the numbers of docs/performance.md, and write the page.

python benchmarks performance            # benchmarks/results/<machine>/latest.csv and the page: ten minutes
python benchmarks performance --quick    # a minute, into a folder of its own: does it run?
python benchmarks performance --runs node servers    # only these; rows of the others stay

A row of the CSV file is one number: date, version, machine, run and setting, work and bytes, way and library, and the
median, the lowest and the highest of some rounds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import page
from harness.environments import MPIS, ROOT, TUNED
from harness.record import machine_type, parser_of, read_rows, write_rows

import mpidist

Row = dict[str, str]

_WAYS: Final = "raw in place,mpidist,mpidist in place,mpidist symmetric,gloo,gloo DDP,horovod grouped"
_PEERS: Final = ",".join([*MPIS, *(peer.name for peer in TUNED), "gloo", "horovod"])
_NODE: Final = ("all_reduce", f"--peers={_PEERS}", f"--ways={_WAYS}", "--rounds=5", "--seconds=0.05")
_RUNS: Final = {
    "node": (*_NODE, "--sizes=4,4K,64K,256K,1M,16M,64M", "--lists=1000x1K,resnet50,bert_base"),
    "after": (*_NODE, "--after=8M", "--sizes=4,4K,16K,64K,256K,1M", "--lists="),
    "hosts": ("network", "--hosts=2", "--rate=200mbit", "--sizes=16M", "--rounds=3"),
    "servers": ("servers", "--workers=1", "--servers=1", "--sizes=4,64M", "--lists=resnet50", "--rounds=5"),
}
_QUICK: Final = ("--rounds=2", "--seconds=0.02", "--sizes=4,64K", "--lists=")


def _parse() -> argparse.Namespace:
    parser = parser_of("performance", __doc__)
    parser.add_argument("--runs", nargs="+", choices=_RUNS, default=list(_RUNS), metavar="RUN", help="%(default)s")
    parser.add_argument("--machine", default=machine_type(), help="name of its folder: %(default)s")
    parser.add_argument("--env", action="append", default=[], metavar="ENVIRONMENT=PYTHON", help="as gloo=PYTHON")
    parser.add_argument("--results", type=Path, default=page.RESULTS, help="folder of the machines: %(default)s")
    parser.add_argument("--quick", action="store_true", help="few of each: does it run?")
    return parser.parse_args()


def _measured(name: str, given: argparse.Namespace) -> Iterator[Row]:
    """Run one case, and convert its rows."""
    arguments = [*_RUNS[name], *(_QUICK if given.quick else ()), *(f"--env={text}" for text in given.env)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "benchmarks"), *arguments, "--out", folder]
        if subprocess.run(command, check=False).returncode:
            print(f"performance: the run {name} failed, and its old rows stay", file=sys.stderr)
            return
        for path in Path(folder).glob("*.csv"):
            yield from (_row(name, given.machine, row) for row in read_rows(path))


def _row(run: str, machine: str, row: Row) -> Row:
    """Convert a row of a case."""
    ranks = f"{row['workers']} worker, {row['servers']} server" if run == "servers" else f"{row['ranks']} ranks"
    hosts = f", {row['hosts']} hosts, {row['rate']}" if row.get("hosts") else ""
    version, setting = f"{mpidist.__version__} ({row['commit']})", f"{ranks}{hosts}, {row['cpus']} cores"
    found = {"date": row["date"], "version": version, "machine": machine, "run": run, "setting": setting}
    found |= {name: row[name] for name in ("work", "bytes", "way", "peer", "versions")}
    return found | {"unit": "us", "median": row["us"], "low": row["us_low"], "high": row["us_high"]}


def main() -> int:
    """Measure, write the CSV file after each run, and then the page."""
    given = _parse()
    if given.quick and given.results == page.RESULTS:
        given.results = ROOT / "results" / "quick"
    path = given.results / given.machine / "latest.csv"
    for name in given.runs:
        rows = list(_measured(name, given))
        if rows:
            write_rows(path, [*(row for row in read_rows(path) if row["run"] != name), *rows])
    print(f"{path} is written")
    return page.main() if given.results == page.RESULTS else 0
