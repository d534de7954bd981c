"""What do the numbers of peers.py look like?

python benchmarks/plot_peers.py results

Draws two pictures for each file: times and ratios over sizes, and bars for the lists of gradients. Of what runs over
either MPI, the faster one is drawn.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from record import text_of, text_of_bytes

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
_DOTS_PER_INCH: Final = 80  # readable, and below 150 KB, as pictures under docs/ must be


def _fastest(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Find for each work and way the row of the MPI with which it is fastest."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        of = found.setdefault(row["work"], {})
        if row["way"] not in of or float(row["us"]) < float(of[row["way"]]["us"]):
            of[row["way"]] = row
    return found


def _rounds(row: Row) -> np.ndarray[Any, Any]:
    return np.array(row["us_rounds"].split(), float)


def _best_raw(of: dict[str, Row]) -> Row | None:
    raw = [row for way, row in of.items() if way in ("raw", "raw in place", "raw 1 MiB")]
    return min(raw, key=lambda row: float(row["us"]), default=None)


def plot_sizes(rows: list[Row], path: Path) -> None:
    """Draw times over sizes, and how many times faster than the best raw way, with the range of the rounds."""
    figure = Figure(figsize=(9.5, 9), layout="constrained")
    times, ratios = figure.subplots(2, 1, sharex=True)
    works = _fastest(rows).values()
    for way, style in _STYLES.items():
        chosen = [of for of in works if way in of]
        if not chosen:
            continue
        sizes = [int(of[way]["bytes"]) for of in chosen]
        times.plot(sizes, [float(of[way]["us"]) for of in chosen], label=way, **{"markersize": 4.5, **style})
        compared = [(size, of) for size, of in zip(sizes, chosen, strict=True) if _best_raw(of)]
        spread = np.array([_ratios(of, way) for _, of in compared])
        if len(spread) and not way.startswith("raw"):
            sizes = [size for size, _ in compared]
            ratios.plot(sizes, spread[:, 0], **{"markersize": 4.5, **style})
            ratios.fill_between(sizes, spread[:, 1], spread[:, 2], color=style["color"], alpha=0.12, linewidth=0)
    ticks = sorted({int(row["bytes"]) for row in rows})
    times.set(xscale="log", yscale="log", ylabel="time of a call", xlim=(ticks[0] * 0.7, ticks[-1] * 1.4))
    times.yaxis.set_major_formatter(lambda microseconds, _: text_of(microseconds))
    ratios.axhline(1, color="0.15", linewidth=2.2)
    ratios.set(yscale="log", ylabel="speed: best raw mpi4py / this", xlabel="size of the float32 array")
    ratios.yaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}")
    ratios.set_xticks(ticks, [text_of_bytes(size) for size in ticks])
    for axes in (times, ratios):
        axes.xaxis.minorticks_off()
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.suptitle(_title(rows), fontsize=11)
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _ratios(of: dict[str, Row], way: str) -> tuple[float, float, float]:
    raw = _best_raw(of)
    assert raw is not None  # asked before
    ratios = _rounds(raw) / _rounds(of[way])
    return float(np.median(ratios)), float(ratios.min()), float(ratios.max())


def plot_lists(rows: list[Row], path: Path) -> None:
    """Draw a bar for each way and list, with the range of the rounds and the ratio to the best raw way."""
    works = _fastest(rows)
    num_rows = (len(works) + 1) // 2
    figure = Figure(figsize=(11, 0.6 + 3.9 * num_rows), layout="constrained")
    grid = figure.subplots(num_rows, 2, squeeze=False).ravel()
    for axes, (name, of) in zip(grid, works.items(), strict=False):
        _plot_list(axes, of, name)
    for axes in grid[len(works) :]:
        axes.axis("off")
    figure.suptitle(f"{_title(rows)}\nx: speed against the best raw mpi4py that sends tensors", fontsize=11)
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _plot_list(axes: Any, of: dict[str, Row], name: str) -> None:
    ways = [way for way in _STYLES if way in of]
    times = np.array([float(of[way]["us"]) for way in ways]) / 1000
    ends = np.array([[float(of[way][end]) for way in ways] for end in ("us_low", "us_high")]) / 1000
    errors = np.abs(ends - times)
    bars = axes.barh(ways, times, xerr=errors, error_kw={"linewidth": 1, "ecolor": "0.3"})
    best = _best_raw(of)
    for bar, way, end in zip(bars, ways, ends[1], strict=True):
        bar.set_color(_STYLES[way]["color"])
        label = f" {text_of(float(of[way]['us']))}"
        label += f"  {_ratios(of, way)[0]:.2g} x" * (best is not None and not way.startswith("raw"))
        axes.text(end, bar.get_y() + bar.get_height() / 2, label, va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set(xscale="log", xlim=(ends[0].min() / 2, ends[1].max() * 8))
    axes.xaxis.set_major_formatter(lambda milliseconds, _: f"{milliseconds:g}")
    row = of[ways[0]]
    axes.set_title(f"{name}: {row['arrays']} tensors, {text_of_bytes(int(row['bytes']))}", fontsize=10)
    axes.set_xlabel("ms", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(axis="x", alpha=0.3)


def _title(rows: list[Row]) -> str:
    row = rows[0]
    return (
        f"All-reduce of {row['ranks']} ranks on {row['cpus']} cores, each library in the same run; "
        f"mpidist {row['commit']}, {row['date']}"
    )


def main() -> None:
    """Read the files that are named, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="CSV files that peers.py wrote, or their folder")
    parser.add_argument("--out", type=Path, help="folder for the pictures; by default beside each file")
    arguments = parser.parse_args()
    mpl.rcParams["axes.spines.top"] = mpl.rcParams["axes.spines.right"] = False
    files = [file for path in arguments.paths for file in (path.glob("peers-*.csv") if path.is_dir() else [path])]
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
