"""What is written down with a measurement, and how numbers are read and written. Needs no MPI."""

from __future__ import annotations

import argparse
import csv
import datetime
import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

_ROOT: Final = Path(__file__).resolve().parents[2]
_SHAPES: Final = _ROOT / "benchmarks" / "shapes"
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """Make the parser of a benchmark, whose help is the docstring of its module."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"benchmarks {name}".strip(), description=description, formatter_class=form)


def parse_size(text: str) -> int:
    """Read `4`, `64K`, `256M` or `1MiB`: bytes."""
    short = text.strip().upper()
    for unit in ("B", "I"):
        short = short[:-1] if short.endswith(unit) else short
    nbytes = int(short[:-1]) * _UNITS[short[-1]] if short[-1:] in _UNITS else int(short)
    if nbytes < 4 or nbytes % 4:
        raise argparse.ArgumentTypeError(f"{text} is no size of float32 arrays: it must be a multiple of 4 bytes")
    return nbytes


def shapes_of_list(name: str) -> list[tuple[int, ...]]:
    """Read the shapes of a model's gradients, or of so many equal arrays: `resnet50`, `1000x1K`."""
    number, by, size = name.partition("x")
    if by and number.isdecimal():
        return [(parse_size(size) // 4,)] * int(number)
    if not (_SHAPES / f"{name}.json").is_file():
        known = ", ".join(sorted(path.stem for path in _SHAPES.glob("*.json")))
        raise argparse.ArgumentTypeError(f"{name} is no list of arrays: there are {known}, and 1000x1K")
    tensors = json.loads((_SHAPES / f"{name}.json").read_text())["tensors"]
    return [tuple(tensor["shape"]) for tensor in tensors]


def commit_of(folder: Path) -> str:
    """Name the commit of a folder, with `-dirty` if files of the library differ from it."""
    git = ["git", "--no-optional-locks", "-C", str(folder)]
    try:
        commit = subprocess.check_output([*git, "describe", "--always"], stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):  # installed from an archive, or no git here
        return "unknown"
    return commit + "-dirty" * bool(subprocess.call([*git, "diff", "--quiet", "HEAD", "--", "mpidist"]))


def export(root: Path, commit: str, into: Path, pythons: Iterable[Path]) -> Path:
    """Write the project as it was at a commit into a folder, and compile its compiled part for each Python.

    Raises:
        SystemExit: If git has no such commit, or it does not compile.
    """
    archive = subprocess.run(["git", "-C", str(root), "archive", commit], capture_output=True, check=False)
    if archive.returncode:
        raise SystemExit(f"git has no {commit}: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(into)
    for python in pythons if (into / "setup.py").exists() else ():
        command = [str(python), "setup.py", "-q", "build_ext", "--inplace"]
        built = subprocess.run(command, cwd=into, capture_output=True, text=True, check=False)
        if built.returncode:
            raise SystemExit(f"{commit} does not compile: {built.stderr.strip()}")
    return into


def machine_type() -> str:
    """Name the type of this machine: its processor and the number of cores."""
    model = next(iter(re.findall(r"(?m)^model name\s*:(.*)", Path("/proc/cpuinfo").read_text())), "processor")
    words = re.findall(r"[a-z0-9]+", re.sub(r"\(\w+\)|@.*|Processor|CPU", "", model).lower())
    return "-".join([*words, str(len(os.sched_getaffinity(0))), "cores"])


def stolen_seconds() -> float:
    """Say how long other machines have held this virtual machine's cores, since it started; 0 where none tells."""
    try:
        return int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return 0.0


def facts_now(**more: str) -> dict[str, str]:
    """Return the first fields of a row: when and of what, on how many cores, what the caller adds, and the load."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit_of(_ROOT),
        "cpus": str(len(os.sched_getaffinity(0))),
        **more,
        "load": f"{os.getloadavg()[0]:.2f}",
    }


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read a table; an empty one, if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Write a table as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def spread(name: str, numbers: np.ndarray[Any, Any], digits: int) -> dict[str, str]:
    """Make the fields of a median, the lowest and the highest."""
    found = {name: np.median(numbers), f"{name}_low": numbers.min(), f"{name}_high": numbers.max()}
    return {key: f"{number:.{digits}f}" for key, number in found.items()}


def text_of(microseconds: float) -> str:
    """Write a time with three digits and its unit."""
    for time, unit in ((microseconds, "us"), (microseconds / 1e3, "ms")):
        if time < 999.5:
            return f"{time:.3g} {unit}"
    return f"{microseconds / 1e6:.3g} s"


def text_of_bytes(nbytes: float) -> str:
    """Write a size with its unit."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"
