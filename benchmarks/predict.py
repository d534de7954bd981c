"""How long would an all-reduce take on clusters that are not here?

python benchmarks predict --out results       # a table for three clusters, and a picture; measures nothing

The formulas are those of `mpidist.transport.costs.cost_model`; `python benchmarks model` holds them against what is.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from formulas import predict
from record import text_of, text_of_bytes

from mpidist.transport.costs.cost_model import CostModel

__all__ = ["CLUSTERS", "Cluster", "main", "plot", "table"]

_NODES: Final = (16, 128, 1024)
_SIZES: Final = tuple(1 << power for power in range(12, 31, 2))
_TABLE_SIZES: Final = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30)
_ALGORITHMS: Final = ("leader", "two_shot", "hierarchical", "mpi", "ring", "recursive_doubling")
_STYLES: Final[dict[str, dict[str, Any]]] = {
    "leader": {"color": "#e69f00", "marker": "s"},
    "two_shot": {"color": "#0072b2", "marker": "o"},
    "hierarchical": {"color": "#56b4e9", "marker": "D"},
    "mpi": {"color": "0.15"},
    "ring": {"color": "#009e73", "marker": "^"},
    "recursive_doubling": {"color": "0.6", "linestyle": "--"},
}
_DOTS_PER_INCH: Final = 64  # readable, and below 150 KB, as pictures under docs/ must be


@final
@dataclass(frozen=True)
class Cluster:
    """A cluster to think of.

    Attributes:
        name: For people.
        ranks: Ranks on each node.
        model: Its speeds.
    """

    name: str
    ranks: int
    model: CostModel


# Where many ranks share the memory of a node, each has less of it.
_LARGE_NODE: Final = CostModel(stream_bytes_per_second=3e9, mpi_bytes_per_second=2e9, cache_bytes=256 << 20)
CLUSTERS: Final = (
    Cluster("10 Gbit/s, 25 us, 2 ranks a node", 2, CostModel(link_seconds=25e-6, link_bytes_per_second=1.25e9)),
    Cluster(
        "100 Gbit/s, 2 us, 64 ranks a node",
        64,
        replace(_LARGE_NODE, link_seconds=2e-6, link_bytes_per_second=12.5e9),
    ),
    Cluster(
        "400 Gbit/s, 1.5 us, 128 ranks a node",
        128,
        replace(_LARGE_NODE, link_seconds=1.5e-6, link_bytes_per_second=50e9),
    ),
)


def table(cluster: Cluster) -> str:
    """Write the predicted times of a cluster as Markdown, the best of each row in bold."""
    lines = [f"### {cluster.name}", "", f"| nodes | size | {' | '.join(_ALGORITHMS)} | taken |"]
    lines.append("| --- " * (len(_ALGORITHMS) + 3) + "|")
    for nodes in _NODES:
        placement = (cluster.ranks,) * nodes
        for size in _TABLE_SIZES:
            times = [predict(name, cluster.model, size, placement) for name in _ALGORITHMS]
            cells = [f"**{text_of(time * 1e6)}**" if time == min(times) else text_of(time * 1e6) for time in times]
            taken = cluster.model.choose(size, placement)
            lines.append(f"| {nodes} | {text_of_bytes(size)} | {' | '.join(cells)} | {taken} |")
    return "\n".join(lines)


def plot(path: Path) -> None:
    """Draw how much faster than MPI's own each algorithm is predicted to be, by cluster and number of nodes."""
    from matplotlib.figure import Figure  # tables and checks need none

    figure = Figure(figsize=(12, 9.5), layout="constrained")
    panels = figure.subplots(len(CLUSTERS), len(_NODES), sharex=True, sharey=True)
    for row, cluster in zip(panels, CLUSTERS, strict=True):
        for axes, nodes in zip(row, _NODES, strict=True):
            _plot_cluster(axes, cluster, nodes)
        row[0].set_ylabel("speed: MPI / algorithm")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(_ALGORITHMS))
    figure.suptitle("Predicted, not measured: time of MPI's own all-reduce, divided by that of each algorithm")
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _plot_cluster(axes: Any, cluster: Cluster, nodes: int) -> None:
    placement, model = (cluster.ranks,) * nodes, cluster.model
    base = [predict("mpi", model, size, placement) for size in _SIZES]
    for name in _ALGORITHMS:
        times = [predict(name, model, size, placement) for size in _SIZES]
        axes.plot(_SIZES, np.divide(base, times), label=name, markersize=4.5, **_STYLES[name])
    axes.set(xscale="log", yscale="log", ylim=(0.07, 7))
    axes.set_title(f"{nodes} nodes; {cluster.name}", fontsize=9)
    axes.set_xticks(_SIZES[::3], [text_of_bytes(size) for size in _SIZES[::3]])
    axes.set_yticks([0.1, 0.2, 0.5, 1, 2, 5], ["0.1", "0.2", "0.5", "1", "2", "5"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def main() -> None:
    """Predict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the picture; without it there is none")
    arguments = parser.parse_args()
    print("\n\n".join(table(cluster) for cluster in CLUSTERS))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        plot(arguments.out / "scaling.png")
