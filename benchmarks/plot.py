"""What do the numbers look like?

python benchmarks plot results

Draws two pictures for each file: times and ratios over sizes, and bars for the lists of gradients. Of what runs over
either MPI, the faster one is drawn.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any, Final

import numpy as np
from record import text_of, text_of_bytes

__all__ = ["main"]

Row = dict[str, str]

# mpidist in blue, raw mpi4py in greys, the others in warm colours; the order is that of the bars.
_STYLES: Final[dict[str, dict[str, Any]]] = {
    "mpidist symmetric per node": {"color": "#56b4e9", "marker": "D", "linestyle": "--"},
    "mpidist symmetric": {"color": "#56b4e9", "marker": "D"},
    "mpidist per node": {"color": "#0072b2", "marker": "s", "linestyle": ":"},
    "mpidist in place": {"color": "#0072b2", "marker": "o", "linestyle": "--"},
    "mpidist": {"color": "#0072b2", "marker": "o"},
    "raw": {"color": "0.15", "linewidth": 2.2},
    "raw in place": {"color": "0.15", "linestyle": "--", "linewidth": 2.2},
    "raw 1 MiB": {"color": "0.5", "linestyle": "--", "marker": "."},
    "raw bucket": {"color": "0.5"},
    "chainermn naive": {"color": "#009e73", "marker": "v"},
    "horovod grouped": {"color": "#e69f00", "marker": "^"},
    "gloo": {"color": "#d55e00", "marker": "x"},
    "gloo coalesced": {"color": "#d55e00"},
    "gloo DDP": {"color": "#d55e00"},
    "gloo views": {"color": "#d55e00", "marker": "x", "linestyle": "--"},
    "tensorflow": {"color": "#cc79a7", "marker": "+"},
    "tensorflow packs": {"color": "#cc79a7"},
}
_OTHERS: Final = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8c564b", "#7f7f7f")
_SPREAD: Final = ("us", "us_low", "us_high")
_DOTS_PER_INCH: Final = 80  # readable, and below 150 KB, as pictures under docs/ must be


def _styles(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Give each way a style, in the order to be drawn; ways without one of their own take colours in turn."""
    ways = {row["way"]: None for row in rows}
    known = {way: style for way, style in _STYLES.items() if way in ways}
    others = [way for way in ways if way not in known]
    return known | {way: {"color": _OTHERS[at % len(_OTHERS)], "marker": "o"} for at, way in enumerate(others)}


def _fastest(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Find for each work and way the row of the MPI with which it is fastest."""
    found: dict[str, dict[str, Row]] = {}
    for row in (row for row in rows if "@" not in row["peer"]):
        of = found.setdefault(row["work"], {})
        if row["way"] not in of or float(row["us"]) < float(of[row["way"]]["us"]):
            of[row["way"]] = row
    return found


def plot_sizes(rows: list[Row], path: Path) -> None:
    """Draw times over sizes, and how many times faster than its baseline each way is, with the range of the rounds."""
    from matplotlib.figure import Figure  # measuring needs none

    figure = Figure(figsize=(9.5, 9), layout="constrained")
    times, ratios = figure.subplots(2, 1, sharex=True)
    works = _fastest(rows).values()
    for way, style in _styles(rows).items():
        chosen = [of for of in works if way in of]
        if not chosen:
            continue
        sizes = [int(of[way]["bytes"]) for of in chosen]
        times.plot(sizes, [float(of[way]["us"]) for of in chosen], label=way, **{"markersize": 4.5, **style})
        compared = [of[way] for of in chosen if of[way].get("ratio")]
        if compared:
            sizes = [int(row["bytes"]) for row in compared]
            middle, low, high = (
                [float(row[name]) for row in compared] for name in ("ratio", "ratio_low", "ratio_high")
            )
            ratios.plot(sizes, middle, **{"markersize": 4.5, **style})
            ratios.fill_between(sizes, low, high, color=style["color"], alpha=0.12, linewidth=0)
    ticks = sorted({int(row["bytes"]) for row in rows})
    times.set(xscale="log", yscale="log", ylabel="time of a call", xlim=(ticks[0] * 0.7, ticks[-1] * 1.4))
    times.yaxis.set_major_formatter(lambda microseconds, _: text_of(microseconds))
    ratios.axhline(1, color="0.15", linewidth=2.2)
    ratios.set(yscale="log", ylabel="speed: baseline / this", xlabel="size of the float32 array")
    ratios.yaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}")
    ratios.set_xticks(ticks, [text_of_bytes(size) for size in ticks])
    for axes in (times, ratios):
        axes.xaxis.minorticks_off()
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.suptitle(_title(rows), fontsize=11)
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def plot_bars(rows: list[Row], path: Path) -> None:
    """Draw a bar for each way and list, with the range of the rounds and the ratio to its baseline."""
    from matplotlib.figure import Figure

    works, styles = _fastest(rows), _styles(rows)
    num_columns = min(2, len(works))
    num_rows = -(-len(works) // num_columns)
    height = 0.6 + num_rows * max(3.9, 0.2 * len(styles))
    figure = Figure(figsize=(11 if num_columns == 2 else 8, height), layout="constrained")
    grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    for axes, (name, of) in zip(grid, works.items(), strict=False):
        _plot_list(axes, of, name, styles)
    for axes in grid[len(works) :]:
        axes.axis("off")
    figure.suptitle(f"{_title(rows)}\nx: baseline / this", fontsize=11)
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _plot_list(axes: Any, of: dict[str, Row], name: str, styles: dict[str, dict[str, Any]]) -> None:
    ways = [way for way in styles if way in of]
    times = np.array([float(of[way]["us"]) for way in ways]) / 1000
    ends = np.array([[float(of[way][end]) for way in ways] for end in ("us_low", "us_high")]) / 1000
    errors = np.abs(ends - times)
    bars = axes.barh(ways, times, xerr=errors, error_kw={"linewidth": 1, "ecolor": "0.3"})
    for bar, way, end in zip(bars, ways, ends[1], strict=True):
        bar.set_color(styles[way]["color"])
        label = f" {text_of(float(of[way]['us']))}"
        label += f"  {float(of[way]['ratio']):.2g} x" if of[way].get("ratio") else ""
        axes.text(end, bar.get_y() + bar.get_height() / 2, label, va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set(xscale="log", xlim=(ends[0].min() / 2, ends[1].max() * 8))
    axes.xaxis.set_major_formatter(lambda milliseconds, _: f"{milliseconds:g}")
    axes.xaxis.minorticks_off()
    row = of[ways[0]]
    tensors = f"{row['arrays']} tensors, " if row["kind"] == "list" else ""
    axes.set_title(f"{name}: {tensors}{text_of_bytes(int(row['bytes']))}", fontsize=10)
    axes.set_xlabel("ms", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(axis="x", alpha=0.3)


def plot_turns(rows: list[Row], path: Path) -> None:
    """Draw what ways of `turns.py` took: a picture for each work, a bar for each way, in it what came sooner."""
    from matplotlib.figure import Figure

    works = list(dict.fromkeys(row["work"] for row in rows))
    num_ways = len({row["way"] for row in rows})
    figure = Figure(figsize=(7.5, 0.9 + len(works) * (0.55 + 0.32 * num_ways)), layout="constrained")
    unit = 1e3 if max(float(row["us"]) for row in rows) > 1e3 else 1.0
    for axes, work in zip(figure.subplots(len(works), 1, sharex=True, squeeze=False).ravel(), works, strict=True):
        of = [row for row in rows if row["work"] == work]
        columns = list(dict.fromkeys(row["column"] for row in of))
        for column, color in zip(reversed(columns), ("#56b4e9", "#0072b2"), strict=False):
            drawn = [row for row in of if row["column"] == column]
            times, low, high = (np.array([float(row[name]) for row in drawn]) / unit for name in _SPREAD)
            bars = {"xerr": [times - low, high - times], "error_kw": {"linewidth": 1, "ecolor": "0.3"}}
            axes.barh([row["way"] for row in drawn], times, color=color, label=column, **bars)
        axes.invert_yaxis()
        axes.set_title(work, fontsize=10, loc="left")
        axes.tick_params(labelsize=9)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    axes.set_xlabel(f"{columns[-1]}, {'ms' if unit > 1 else 'us'}: median, lowest and highest round", fontsize=9)
    if len(columns) > 1:
        axes.legend(fontsize=9, frameon=False)
    figure.suptitle(f"{rows[0]['ranks']} ranks on {rows[0]['cpus']} cores, {rows[0]['date']}", fontsize=10)
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _title(rows: list[Row]) -> str:
    row = rows[0]
    return (
        f"{row.get('benchmark', 'all_reduce')}, {row['ranks']} ranks on {row['cpus']} cores, all in the same run; "
        f"mpidist {row['commit']}, {row['date']}"
    )


def main() -> None:
    """Read the files that are named, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="CSV files of results, or their folder")
    parser.add_argument("--out", type=Path, help="folder for the pictures; by default beside each file")
    arguments = parser.parse_args()
    import matplotlib as mpl

    mpl.rcParams["axes.spines.top"] = mpl.rcParams["axes.spines.right"] = False
    files = [file for path in arguments.paths for file in (sorted(path.glob("*.csv")) if path.is_dir() else [path])]
    for path in files:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        folder = arguments.out or path.parent
        folder.mkdir(parents=True, exist_ok=True)
        if "column" in rows[0]:
            plot_turns(rows, folder / f"{path.stem}.png")
            continue
        sizes, lists = ([row for row in rows if row["kind"] == kind] for kind in ("size", "list"))
        if len({row["bytes"] for row in sizes}) > 1:
            plot_sizes(sizes, folder / f"{path.stem}-sizes.png")
        if bars := lists or sizes[: len(sizes) * (len({row["bytes"] for row in sizes}) == 1)]:
            plot_bars(bars, folder / f"{path.stem}-bars.png")
