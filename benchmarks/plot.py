"""What do the numbers of all_reduce.py look like?

python benchmarks/plot.py results

Draws two pictures for each file: times and ratios over sizes, and bars for the lists of gradients.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure
from record import text_of, text_of_bytes

Row = dict[str, str]

# Raw mpi4py in greys, results in place dashed: what is compared with what shows at a glance.
_STYLES: Final[dict[str, dict[str, Any]]] = {
    "raw": {"color": "0.15", "linewidth": 2.2},
    "raw in place": {"color": "0.15", "linestyle": "--", "linewidth": 2.2},
    "bucket": {"color": "0.5"},
    "bucket in place": {"color": "0.5", "linestyle": "--"},
    "Collective": {"color": "#0072b2", "marker": "o"},
    "Hierarchical": {"color": "#e69f00", "marker": "s"},
    "ToOneDevice": {"color": "#d55e00", "marker": "v"},
    "ring": {"color": "#009e73", "marker": "^"},
    "reproducible": {"color": "#cc79a7", "marker": "D"},
    "Collective out=": {"color": "#0072b2", "marker": "o", "linestyle": "--", "markerfacecolor": "white"},
}
_DOTS_PER_INCH: Final = 80  # readable, and below 150 KB, as pictures under docs/ must be
_IN_PLACE: Final = ("raw in place", "bucket in place", "Collective out=")


def plot_sizes(rows: list[Row], path: Path) -> None:
    """Draw times and ratios over sizes, each with the range of the rounds."""
    figure = Figure(figsize=(9.5, 8.2), layout="constrained")
    times, ratios = figure.subplots(2, 1, sharex=True)
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = [row for row in rows if row["case"] == case]
        sizes = [int(row["bytes"]) for row in of_case]
        style = {"markersize": 4.5, **_STYLES[case]}
        times.plot(sizes, [float(row["us"]) for row in of_case], label=case, **style)
        if case != of_case[0]["baseline"]:
            ratios.plot(sizes, [float(row["ratio"]) for row in of_case], label=case, **style)
            low, high = ([float(row[f"ratio_{end}"]) for row in of_case] for end in ("low", "high"))
            ratios.fill_between(sizes, low, high, color=style["color"], alpha=0.12, linewidth=0)
    ticks = sorted({int(row["bytes"]) for row in rows})
    times.set(xscale="log", yscale="log", ylabel="time of a call", xlim=(ticks[0] * 0.7, ticks[-1] * 1.4))
    times.yaxis.set_major_formatter(lambda microseconds, _: text_of(microseconds))
    ratios.axhline(1, color="0.15", linewidth=2.2, label="raw mpi4py")
    ratios.set(ylabel="speed: raw mpi4py / mpidist\n(dashed: in place, both)", xlabel="size of the float32 array")
    ratios.set_ylim(bottom=0)
    ratios.set_xticks(ticks, [text_of_bytes(size) for size in ticks])
    ratios.minorticks_off()
    for axes in (times, ratios):
        axes.grid(alpha=0.3)
    times.legend(ncols=2, frameon=False)
    figure.suptitle(_title(rows), fontsize=11)
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def plot_lists(rows: list[Row], path: Path) -> None:
    """Draw a bar for each case and list, with the range of the rounds and what raw mpi4py per tensor takes."""
    names = list(dict.fromkeys(row["shape"] for row in rows))
    num_rows = (len(names) + 1) // 2
    figure = Figure(figsize=(11, 0.6 + 3.1 * num_rows), layout="constrained")
    grid = figure.subplots(num_rows, 2, squeeze=False).ravel()
    for axes, name in zip(grid, names, strict=False):
        _plot_list(axes, [row for row in rows if row["shape"] == name], name)
    for axes in grid[len(names) :]:
        axes.axis("off")
    figure.suptitle(f"{_title(rows)}\nlighter: in place; x: speed against raw mpi4py, one call a tensor", fontsize=11)
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _plot_list(axes: Any, rows: list[Row], name: str) -> None:
    times = [float(row["us"]) / 1000 for row in rows]
    low = [float(row["us_low"]) / 1000 for row in rows]
    high = [float(row["us_high"]) / 1000 for row in rows]
    errors = [[time - end for time, end in zip(times, low, strict=True)]]
    errors += [[end - time for time, end in zip(times, high, strict=True)]]
    bars = axes.barh([row["case"] for row in rows], times, xerr=errors, error_kw={"linewidth": 1, "ecolor": "0.3"})
    for bar, row, end in zip(bars, rows, high, strict=True):
        bar.set_color(_STYLES[row["case"]]["color"])
        bar.set_alpha(0.5 if row["case"] in _IN_PLACE else 0.9)
        label = f" {text_of(float(row['us']))}"
        label += f"  {float(row['ratio']):.2f} x" * (row["case"] != row["baseline"])
        axes.text(end, bar.get_y() + bar.get_height() / 2, label, va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, max(high) * 1.32)
    axes.set_title(f"{name}: {rows[0]['arrays']} tensors, {text_of_bytes(int(rows[0]['bytes']))}", fontsize=10)
    axes.set_xlabel("ms", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(axis="x", alpha=0.3)


def _title(rows: list[Row]) -> str:
    row = rows[0]
    return (
        f"All-reduce of {row['ranks']} ranks (by node: {row['placement']}) on {row['cpus']} cores, {row['mpi']}; "
        f"mpidist {row['commit']}, {row['date']}"
    )


def main() -> None:
    """Read the files that are named, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="CSV files that all_reduce.py wrote, or their folder")
    parser.add_argument("--out", type=Path, help="folder for the pictures; by default beside each file")
    arguments = parser.parse_args()
    mpl.rcParams["axes.spines.top"] = mpl.rcParams["axes.spines.right"] = False
    files = [file for path in arguments.paths for file in (path.glob("all-reduce-*.csv") if path.is_dir() else [path])]
    for path in files:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        folder = arguments.out or path.parent
        folder.mkdir(parents=True, exist_ok=True)
        for kind, plot in (("size", plot_sizes), ("list", plot_lists)):
            chosen = [row for row in rows if row["kind"] == kind]
            if chosen:
                plot(chosen, folder / f"{path.stem}-{kind}s.png")


if __name__ == "__main__":
    main()
