"""What files of `all_reduce` and `torch_steps` hold, as tables in Markdown.

python benchmarks tables results/all_reduce-2-ranks.csv results/torch_steps.csv
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from record import text_of, text_of_bytes

from contest.environments import MPIS

__all__ = ["main", "of_all_reduce"]

Row = dict[str, str]

_NAMES: Final = {"mpich": "MPICH", "openmpi": "Open MPI"}
_FIRST: Final = ("raw", "raw in place", "raw 1 MiB", "raw bucket")
_OURS: Final = ("mpidist", "mpidist in place", "mpidist per node", "mpidist symmetric", "mpidist symmetric per node")
_SHORT: Final = {"mpidist": "new results", **{way: way.removeprefix("mpidist ") for way in _OURS[1:]}}
_COMPARED: Final = _OURS[1]  # other libraries reduce in place


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return ["", *(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *lines))]


def _time(row: Row | None) -> str:
    return text_of(float(row["us"])) if row else ""


def _spread(row: Row | None, name: str) -> str:
    if not row or not row.get(name):
        return ""
    low, high = (float(row[f"{name}{end}"]) for end in ("_low", "_high"))
    return f"{float(row[name]):.2f} ({low:.2f} to {high:.2f})"


def _title(row: Row) -> str:
    size = text_of_bytes(int(row["bytes"]))
    return size if row["kind"] == "size" else f"{row['work']}: {row['arrays']} arrays, {size}"


def _over_mpi(works: Mapping[str, Mapping[tuple[str, str], Row]]) -> list[str]:
    """Make two tables of a line for each work and MPI: times; ratios to raw and to the older commit."""
    times, ratios = [], []
    for work, of in works.items():
        for peer in (peer for peer in MPIS if (peer, "raw") in of):
            where = [work, _NAMES[peer]]
            times.append([*where, *(_time(of.get((peer, way))) for way in (*_FIRST, *_OURS))])
            ratio = [_spread(of.get((peer, way)), "ratio") for way in _OURS]
            ratios.append([*where, *ratio, *(_spread(of.get((peer, way)), "old_by_new") for way in _OURS)])
    ours = [_SHORT[way] for way in _OURS]
    heads = ["work", "MPI", *(f"raw / {way}" for way in ours), *(f"old / new, {way}" for way in ours)]
    has_old = any(any(line[2 + len(ours) :]) for line in ratios)
    end = len(heads) if has_old else 2 + len(ours)
    lines = _table(["work", "MPI", *_FIRST, *ours], times)
    return lines + _table(heads[:end], [line[:end] for line in ratios])


def _other_libraries(works: Mapping[str, Mapping[tuple[str, str], Row]]) -> list[str]:
    """Make a table of a line for each work: the other libraries, and their times by that of mpidist in place."""
    others = dict.fromkeys(key for of in works.values() for key in of if key[0].partition("@")[0] not in MPIS)
    lines = []
    for work, of in works.items():
        ours = [of[peer, _COMPARED] for peer in MPIS if (peer, _COMPARED) in of]
        if not ours:
            continue
        fastest = min(ours, key=lambda row: float(row["us"]))
        cells = [f"{_time(of[key])}, {_times_as_long(of[key], fastest)}" if key in of else "" for key in others]
        lines.append([work, f"{_time(fastest)} ({_NAMES[fastest['peer']]})", *cells])
    return _table(["work", "mpidist in place", *(way for _, way in others)], lines) if others else []


def _times_as_long(row: Row, ours: Row) -> str:
    numbers = [np.array(one["us_rounds"].split(), float) for one in (row, ours)]
    return f"{float(np.median(numbers[0] / numbers[1])):.2g} x"


def of_all_reduce(rows: Sequence[Row]) -> list[str]:
    """Make the tables of a file of `all_reduce`: times over MPI, ratios, and other libraries."""
    works: dict[str, dict[tuple[str, str], Row]] = {}
    for row in rows:
        works.setdefault(_title(row), {})[row["peer"], row["way"]] = row
    return [*_over_mpi(works), *_other_libraries(works)]


def _of_steps(rows: Sequence[Row]) -> list[str]:
    """Make a table of a line for each dtype and way."""
    alone = {(row["work"], row["way"]): row for row in rows if row["column"] == "reduction alone"}
    lines = []
    for row in (row for row in rows if row["column"] == "a step"):
        hidden = f"{float(row['hidden']):.0%}" if row.get("hidden") else ""
        cells = [_time(alone[row["work"], row["way"]]) if hidden else "", _time(row), _spread(row, "ratio"), hidden]
        memory = [row["new_pages_mib"], row["most_mib"]]
        lines.append([row["work"], row["way"], *cells, *memory, _spread(row, "old_by_new")])
    heads = ["dtype", "way", "reduction alone", "a step", "step / no reduction", "hidden"]
    return _table([*heads, "new pages, MiB", "memory above, MiB", "old / new"], lines)


def main() -> int:
    """Print the tables of files."""
    parser = argparse.ArgumentParser(
        "benchmarks tables", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        if not rows or not {"kind", "column"} & set(rows[0]):
            raise SystemExit(f"{path} is no file of all_reduce or torch_steps")
        print("\n".join(_of_steps(rows) if "column" in rows[0] else of_all_reduce(rows)))
    return 0
