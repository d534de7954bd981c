"""Which seeded faults do the tests notice?

    python tools/mutants                                 all folders: hours
    python tools/mutants checkpoint cli                  two folders
    python tools/mutants checkpoint --only 3 7           two faults
    python tools/mutants cli -- --ranks 2              other options for pytest

Each fault is put into a copy of the repository, and the folder's tests run there until one fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fault import Fault
from tables import Table, tables

ROOT = Path(__file__).resolve().parents[2]
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "build", "dist", "results", "_build", "*_cache")
OPTIONS = ["-m", "not gpu", "--ranks", "3"]


def main() -> None:
    """Read the command line, and try the faults of each folder."""
    known = tables()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help=f"of mpidist: {', '.join(known)}")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="faults of the folder, counted from 1")
    own, options = _split(sys.argv[1:])
    given = parser.parse_args(own)
    for name in set(given.folders) - set(known):
        parser.error(f"no table faults/{name}.py: there are {', '.join(known)}")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=NOT_COPIED, symlinks=True)
        for name in given.folders or known:
            try_all(copy, known[name], given.only, options or OPTIONS)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def try_all(copy: Path, table: Table, only: Sequence[int] | None, options: Sequence[str]) -> None:
    """Run the tests without a fault, which gives the limit of time, and with each."""
    began = time.monotonic()
    failure = first_failure(copy, table.tests, options, limit_seconds=3600)
    if failure is not None:
        sys.exit(f"{table.folder}: the tests fail without a fault: {failure}")
    limit_seconds = 60 + 3 * (time.monotonic() - began)
    noticed = tried = 0
    for number, fault in enumerate(table.faults, start=1):
        if only is None or number in only:
            began = time.monotonic()
            failure = with_fault(copy, table, fault, options, limit_seconds)
            noticed, tried = noticed + (failure is not None), tried + 1
            verdict = f"noticed by {failure}" if failure else "NOT NOTICED"
            print(f"{table.folder} {number:>2} {time.monotonic() - began:4.0f} s {fault.why}: {verdict}", flush=True)
    print(f"{table.folder}: {noticed} of {tried} noticed", flush=True)


def with_fault(copy: Path, table: Table, fault: Fault, options: Sequence[str], limit_seconds: float) -> str | None:
    """Return what notices a fault."""
    file = copy / table.folder / fault.file
    text = file.read_text()
    if text.count(fault.old) != 1:
        sys.exit(f"{table.folder}/{fault.file} has {text.count(fault.old)} times, not once: {fault.old!r}")
    file.write_text(text.replace(fault.old, fault.new))
    try:
        return first_failure(copy, table.tests, options, limit_seconds)
    finally:
        file.write_text(text)


def first_failure(copy: Path, tests: Sequence[str], options: Sequence[str], limit_seconds: float) -> str | None:
    """Run tests in the copy until one fails, and return its name; `None` if all pass."""
    # The path comes before what the editable installation names.
    environment = {**os.environ, "PYTHONPATH": str(copy), "MPIDIST_FLIGHT_DIR": "off"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # every rank would compile all modules anew
    with tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *options, *tests]
        process = subprocess.Popen(
            command, cwd=copy, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # pytest ends the ranks then
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            return f"no end within {limit_seconds:.0f} s"
        output.seek(0)
        said = output.read()
    if status == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
    return failed[1] if failed else f"exit status {status}: {said.strip().splitlines()[-1:]}"


if __name__ == "__main__":
    main()
