"""Write docs/performance.md and its pictures from benchmarks/results/<machine>/latest.csv; measures nothing.

python benchmarks page
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from harness.environments import MPIS, ROOT, TUNED
from harness.record import read_rows, shapes_of_list, text_of, text_of_bytes

Row = dict[str, str]
Of = Mapping[tuple[str, str], Row]  # (library, way) to row, of one work

RESULTS: Final = ROOT / "benchmarks" / "results"
_PAGE: Final = ROOT / "docs" / "performance.md"
_PICTURES: Final = ROOT / "docs" / "_static"

_ALL_MPIS: Final = (*MPIS, *(peer.name for peer in TUNED))
_NAMES: Final = {
    "mpich": "MPICH",
    "openmpi": "Open MPI",
    "intel": "Intel MPI",
    "mpich release-gather": "MPICH, release_gather",
    "openmpi coll-sm": "Open MPI, coll/sm",
    "intel pt2pt": "Intel MPI, pt2pt",
    "messages": "mpi4py, Isend and Irecv",
    "window": "mpi4py, MPI.Win",
    "resnet50": "ResNet-50",
    "bert_base": "BERT-base",
}
_OURS, _BEST, _TUNED = "mpidist in place", "MPI, defaults", "MPI, tuned"

# Columns: the library's rows of which the fastest is shown.
_Choice = tuple[Sequence[str], str]
_SIZES: Final[dict[str, _Choice]] = {
    "mpidist": (MPIS, _OURS),
    _BEST: (MPIS, "raw in place"),
    _TUNED: (_ALL_MPIS, "raw in place"),
    "gloo": (("gloo",), "gloo"),
    "Horovod": (("horovod",), "horovod grouped"),
}
_LISTS: Final[dict[str, _Choice]] = {
    "mpidist, new results": (MPIS, "mpidist"),
    "mpidist, in place": (MPIS, _OURS),
    "mpidist, symmetric": (MPIS, "mpidist symmetric"),
    _BEST: (MPIS, "raw in place"),
    _TUNED: (_ALL_MPIS, "raw in place"),
    "gloo, as DDP": (("gloo",), "gloo DDP"),
    "Horovod": (("horovod",), "horovod grouped"),
}

_HEAD: Final = """<!-- Written by `python benchmarks page`. Do not edit: change benchmarks/page.py. -->

# Performance

`make performance` measures these numbers in some ten minutes, on any machine, and writes this page. Each number is
the median of some rounds, in which all libraries take turns; a call takes as long as its slowest rank. The CSV files in
`benchmarks/results/` contain the lowest and highest rounds, too, and `benchmarks/README.md` describes the method.
Compare ratios rather than times: they depend less on the machine.

* **MPI, defaults**: the fastest of the installed MPI libraries (MPICH, Open MPI, Intel MPI) with default settings; one
  in-place `Allreduce` of mpi4py for each array.
* **MPI, tuned**: the fastest of these, and of each library with [settings for one node](#settings).
* **tuned / mpidist**: above 1, mpidist is faster than the fastest MPI library.
"""
_TAIL: Final = """
## Not measured

* NCCL between several GPUs, and device memory over a real network.
* Clusters: the hosts above are emulated on one machine, and their links are slow on purpose.
* Nodes with many ranks, unless a machine above has them.

## Settings

The settings of *MPI, tuned*:

"""


def _rows(results: Path) -> list[Row]:
    return [row for path in sorted(results.glob("*/latest.csv")) for row in read_rows(path)]


def _works(rows: Iterable[Row]) -> dict[str, dict[tuple[str, str], Row]]:
    works: dict[str, dict[tuple[str, str], Row]] = {}
    for row in rows:
        works.setdefault(row["work"], {})[row["peer"], row["way"]] = row
    return works


def _fastest(of: Of, choice: _Choice) -> Row | None:
    peers, way = choice
    found = [of[peer, way] for peer in peers if (peer, way) in of]
    return min(found, key=_median, default=None)


def _median(row: Row) -> float:
    return float(row["median"])


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return _time(row) + (f" ({_NAMES[row['peer']]})" if row["peer"] in _ALL_MPIS else "")


def _time(row: Row) -> str:
    """Write a time that no line break divides."""
    return text_of(_median(row)).replace(" ", "\u00a0")


def _ratio(of: Of, columns: Mapping[str, _Choice], ours: str, theirs: str = _TUNED) -> float | None:
    one, other = (_fastest(of, columns[name]) for name in (theirs, ours))
    return _median(one) / _median(other) if one and other else None


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    used = [at for at in range(len(heads)) if at == 0 or any(line[at] for line in lines)]
    rows = ([heads[at] for at in used], ["---"] * len(used), *([line[at] for at in used] for line in lines))
    return ["", *(f"| {' | '.join(row)} |" for row in rows), ""]


def _title(work: str, of: Of) -> str:
    size = text_of_bytes(int(next(iter(of.values()))["bytes"]))
    if _is_size(work):
        return size.replace(" ", "\u00a0")
    shapes = shapes_of_list(work)
    if work[:1].isdecimal():
        return f"{len(shapes)} arrays of {text_of_bytes(4 * shapes[0][0])}"
    return f"{_NAMES.get(work, work)}: {len(shapes)} arrays, {size}"


def _where(rows: Sequence[Row]) -> str:
    """Name machine, date and versions of a run."""
    row = rows[0]
    versions = dict.fromkeys(f"{name} {number}" for one in rows for name, number in _versions(one["versions"]))
    commits = " and ".join(dict.fromkeys(one["version"] for one in rows))
    return f"*{row['machine']}, {row['setting']}, {row['date']}, mpidist {commits}; {', '.join(versions)}.*"


def _versions(text: str) -> Iterable[tuple[str, str]]:
    for part in text.split(", "):
        name, _, number = part.partition(" ")
        if name == "mpi":
            name, _, number = number.rpartition(" ")
        if name not in ("placement", "python"):
            yield name, number


def _compared(rows: Sequence[Row], columns: Mapping[str, _Choice], ours: str) -> list[str]:
    """Make a table of a line for each work, with the ratio of the tuned MPI to mpidist."""
    lines = []
    for work, of in _works(rows).items():
        ratio = _ratio(of, columns, ours)
        cells = [_cell(_fastest(of, choice)) for choice in columns.values()]
        lines.append([_title(work, of), *cells, f"{ratio:.2f}" if ratio else ""])
    return _table(["", *columns, "tuned / mpidist"], lines)


def _node(rows: Sequence[Row]) -> list[str]:
    sizes, lists = _split(rows)
    lines = ["![Time of an all-reduce by size, on one node](_static/performance-sizes.png)"]
    lines += _compared(sizes, _SIZES, "mpidist")
    lines += ["The gradients of a model, as one call of mpidist, and as one call for each array of MPI:", ""]
    lines += ["![Time to sum the gradients of two models, on one node](_static/performance-models.png)"]
    return [*lines, *_compared(lists, _LISTS, "mpidist, in place")]


def _is_size(work: str) -> bool:
    return work[:1].isdecimal() and "x" not in work


def _split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    return [row for row in rows if _is_size(row["work"])], [row for row in rows if not _is_size(row["work"])]


def _after(rows: Sequence[Row]) -> list[str]:
    text = "One call a step, after each rank has written 8 MiB of its own memory, as the rest of a training step does:"
    return [text, *_compared(rows, _SIZES, "mpidist")]


def _hosts(rows: Sequence[Row]) -> list[str]:
    ways = list(dict.fromkeys(row["way"] for row in rows))
    lines = []
    for work, of in _works(rows).items():
        fastest = [_fastest(of, ((*MPIS, "gloo"), way)) for way in ways]
        lines.append([_title(work, of), *(_cell(row) for row in fastest)])
    text = "Emulated hosts on one machine, joined by slow links, so that the network dominates:"
    return [text, *_table(["", *(way.replace("raw in place", "MPI") for way in ways)], lines)]


def _servers(rows: Sequence[Row]) -> list[str]:
    peers, lines = list(dict.fromkeys(row["peer"] for row in rows)), []
    for work, of in _works(rows).items():
        for way in dict.fromkeys(way for _, way in of if way != "two copies"):
            times = [_time(of[peer, way]) if (peer, way) in of else "" for peer in peers]
            lines.append([f"{way}, {_title(work, of)}", *times])
    text = "One worker and one server of a node. The programs with mpi4py are written for this one task, and\n"
    text += "guarantee less: no snapshots, no deadlines, no rules, no order of changes."
    return [text, *_table(["", *(_NAMES.get(peer, peer) for peer in peers)], lines)]


def _gpu(rows: Sequence[Row]) -> list[str]:
    def value(row: Row) -> str:
        return f"{float(row['median']):.3g}\u00a0%" if row["unit"] == "%" else _time(row)

    lines = [[row["work"], f"`{row['way']}`" if "_" in row["way"] else row["way"], value(row)] for row in rows]
    text = "Two ranks on this machine share the GPU, so their times do not show NCCL between GPUs."
    return [text, *_table(["", "", "median"], lines)]


_SECTIONS: Final[dict[str, tuple[str, Callable[[Sequence[Row]], list[str]]]]] = {
    "node": ("One node", _node),
    "after": ("One call after other work", _after),
    "hosts": ("Between hosts", _hosts),
    "servers": ("Parameter servers", _servers),
    "gpu": ("One GPU", _gpu),
}


def _faster_elsewhere(rows: Sequence[Row]) -> list[str]:
    """List the works for which another library is faster than mpidist in place."""
    lines = []
    for run, where in (("node", "in a loop of calls"), ("after", "for one call after other work")):
        of_run = [row for row in rows if row["run"] == run]
        for split, columns, ours in zip(
            _split(of_run), (_SIZES, _LISTS), ("mpidist", "mpidist, in place"), strict=True
        ):
            for name in (column for column in columns if not column.startswith("mpidist")):
                ratios = {_title(work, of): _ratio(of, columns, ours, name) for work, of in _works(split).items()}
                slower = [title for title, ratio in ratios.items() if ratio and ratio < 1]
                lines += [f"* {name}, {where}: {'; '.join(slower)}."] if slower else []
    return ["## Where other libraries are faster", "", *(lines or ["Nowhere in these measurements."]), ""]


def _settings() -> list[str]:
    lines = []
    for peer in TUNED:
        plain = " ".join(f"{name}={text}" for name, text in peer.variables.items())
        lines.append(f"* {_NAMES[peer.name]}: `{' '.join(['mpiexec', *peer.options]) if peer.options else plain}`")
    return lines


def text_of_page(results: Path = RESULTS) -> str:
    """Make the page from the CSV files of all machines."""
    rows, lines = _rows(results), [_HEAD]
    for run, (title, table) in _SECTIONS.items():
        machines = dict.fromkeys(row["machine"] for row in rows if row["run"] == run)
        lines += [f"## {title}", ""] if machines else []
        for machine in machines:
            of_machine = [row for row in rows if (row["run"], row["machine"]) == (run, machine)]
            lines += [*table(of_machine), _where(of_machine), ""]
    return "\n".join([*lines, *_faster_elsewhere(rows)]).rstrip() + "\n" + _TAIL + "\n".join(_settings()) + "\n"


_COLORS: Final = {
    "mpidist": "#0072b2", "mpidist, new results": "#0072b2", "mpidist, in place": "#0072b2",
    "mpidist, symmetric": "#56b4e9", _BEST: "0.55", _TUNED: "0.15",
}  # fmt: skip


def _plot_sizes(axes: Any, sizes: Mapping[str, Of]) -> None:
    ticks = sorted({int(row["bytes"]) for of in sizes.values() for row in of.values()})
    for number, (name, choice) in enumerate(_SIZES.items()):
        chosen = [row for of in sizes.values() if (row := _fastest(of, choice))]
        places, times = [ticks.index(int(row["bytes"])) for row in chosen], [*map(_median, chosen)]
        if chosen:
            axes.plot(places, times, label=name, marker="o", markersize=4, color=_COLORS.get(name, f"C{number}"))
    axes.set(yscale="log", xlabel="size of a float32 array", ylabel="time of an all-reduce in place")
    axes.set_xticks(range(len(ticks)), [text_of_bytes(size) for size in ticks])
    axes.yaxis.set_major_formatter(lambda microseconds, _: text_of(microseconds))
    axes.legend(frameon=False)


def _plot_model(axes: Any, work: str, of: Of) -> None:
    found = {name: _median(row) for name, choice in _LISTS.items() if (row := _fastest(of, choice))}
    times = [time / 1000 for time in found.values()]
    bars = axes.barh(list(found), times, color=[_COLORS.get(name, "#d99a4e") for name in found])
    axes.bar_label(bars, [f" {text_of(time)}" for time in found.values()])
    axes.invert_yaxis()
    axes.set(title=_title(work, of), xlabel="ms", xlim=(0, 1.25 * max(times)))


def _plot(rows: Sequence[Row]) -> None:
    from matplotlib.figure import Figure  # the page alone needs none

    sizes, lists = map(_works, _split(rows))
    models = list(lists.items())[-2:]  # the largest
    for name, number, height in (("sizes", 1, 4.2), ("models", len(models), 0.4 + 2.3 * len(models))):
        figure = Figure(figsize=(7, height), layout="constrained")
        for at, axes in enumerate(figure.subplots(number, 1, squeeze=False).ravel()):
            if name == "sizes":
                _plot_sizes(axes, sizes)
            else:
                _plot_model(axes, *models[at])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(_PICTURES / f"performance-{name}.png", dpi=110)


def main() -> int:
    """Write the page and its pictures."""
    rows = [row for row in _rows(RESULTS) if row["run"] == "node"]
    _PAGE.write_text(text_of_page())
    if rows:
        _plot(rows)
    print(f"{_PAGE} is written")
    return 0
