"""How long would an all-reduce take on clusters that are not here? And how far is the formula from what is?

python benchmarks/extrapolate.py --out results       # a table for three clusters, and a picture; no MPI
mpiexec -n 4 python benchmarks/extrapolate.py --check --link-us 100 --link-mbit 200       # measured beside predicted

The formulas of mpidist's algorithms are those of `mpidist.transport.costs.cost_model`; others are in `formulas.py`.
`--check` belongs on several hosts, real or emulated.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Final, final

import numpy as np
from formulas import predict
from record import parse_size, text_of, text_of_bytes

import mpidist
from mpidist.transport.communicator import Communicator
from mpidist.transport.costs.cost_model import CostModel, Placement
from mpidist.transport.group.levels import Levels
from mpidist.transport.mpi.ring import ring_all_reduce
from mpidist.transport.reduction import Reduction

__all__ = ["CLUSTERS", "Cluster", "check", "plot", "table"]

_NODES: Final = (16, 128, 1024)
_SIZES: Final = tuple(1 << power for power in range(12, 31, 2))
_TABLE_SIZES: Final = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30)
_ALGORITHMS: Final = ("leader", "pipeline", "hierarchical", "mpi", "ring", "recursive_doubling")
_STYLES: Final[dict[str, dict[str, Any]]] = {
    "leader": {"color": "#e69f00", "marker": "s"},
    "pipeline": {"color": "#0072b2", "marker": "o"},
    "hierarchical": {"color": "#56b4e9", "marker": "D"},
    "mpi": {"color": "0.15"},
    "ring": {"color": "#009e73", "marker": "^"},
    "recursive_doubling": {"color": "0.6", "linestyle": "--"},
}
_CHECK_SIZES: Final = "64K,1M,4M"
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
            cells = [f"**{_text(time)}**" if time == min(times) else _text(time) for time in times]
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


def check(model: CostModel, sizes: Sequence[int], rounds: int) -> None:
    """Measure on the hosts that there are, and print measured beside predicted. Collective over the world."""
    strategy = mpidist.MultiWorkerMirroredStrategy(cross_device_ops=mpidist.HierarchicalCopyAllReduce())
    group, levels = strategy.extended.group, strategy.extended.group.levels
    placement = group.topology.node_sizes
    if strategy.is_chief:
        print(f"{', '.join(map(str, placement))} ranks; link {model.link_seconds * 1e6:g} us,", end=" ")
        print(f"{model.link_bytes_per_second * 8e-6:g} Mbit/s; measured / predicted, medians of {rounds}\n")
        print("| size | way | predicted as | predicted | measured | ratio |\n| --- | --- | --- | --- | --- | --- |")
    for size in sizes:
        for name, algorithm, call in _ways(strategy, levels, model, size, placement):
            measured = _measure(levels.world, call, size, rounds)
            if strategy.is_chief:
                predicted = predict(algorithm, model, size, placement)
                times = f"{_text(predicted)} | {_text(measured)} | {measured / predicted:.2f}"
                print(f"| {text_of_bytes(size)} | {name} | {algorithm} | {times} |", flush=True)
    strategy.close()


Way = tuple[str, str, Callable[[Any], Any]]


def _ways(strategy: Any, levels: Levels, model: CostModel, size: int, placement: Placement) -> list[Way]:
    """List what is compared: a name, the algorithm whose formula predicts it, and the call, in place."""
    node, nodes, fused, total = levels.within_node, levels.across_nodes, levels.fused, Reduction()

    def whole(array: Any) -> Any:
        def step() -> Any:
            return mpidist.get_replica_context().all_reduce("sum", array, out=array)

        return strategy.run(step)

    def leader(array: Any) -> None:
        node.reduce(array, total, root=0)
        if node.rank == 0:
            nodes.all_reduce(array, total)
        node.broadcast(array, root=0)

    def hierarchical(array: Any) -> None:
        nodes.all_reduce(node.reduce_scatter(array, total), total)
        node.all_gather(array)

    from mpi4py import MPI

    ways: list[Way] = [("mpidist", model.choose(size, placement), whole), ("leader", "leader", leader)]
    if levels.is_even:
        ways.append(("hierarchical", "hierarchical", hierarchical))
    if fused is not None:
        ways.append(("pipeline", "pipeline", lambda array: fused.all_reduce(array, total)))
    ways.append(("MPI_Allreduce", "mpi", lambda array: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array)))
    return [*ways, ("ring", "ring", lambda array: ring_all_reduce(levels.world, array, total))]


def _measure(world: Communicator, call: Callable[[Any], Any], size: int, rounds: int) -> float:
    """Return the median over rounds of the slowest rank's time."""
    array, times = np.ones(size // 4, np.float32), []
    call(array)
    if not (array == world.size).all():
        raise ArithmeticError(f"the sum of {world.size} ranks is wrong")
    for _ in range(rounds):
        array.fill(1)
        world.all_reduce(np.zeros(1), Reduction())  # a barrier
        start = perf_counter()
        call(array)
        times.append(perf_counter() - start)
    slowest = np.array(times)
    world.all_reduce(slowest, Reduction("max"))
    return statistics.median(slowest.tolist())


def _text(seconds: float) -> str:
    return text_of(seconds * 1e6)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the picture; without it there is none")
    parser.add_argument("--check", action="store_true", help="measure on the hosts that there are; an MPI program")
    parser.add_argument("--link-us", type=float, default=20, help="with --check: latency of a message between hosts")
    parser.add_argument("--link-mbit", type=float, default=10_000, help="with --check: rate of a host's link")
    parser.add_argument("--sizes", default=_CHECK_SIZES, help="with --check: sizes of arrays")
    parser.add_argument("--rounds", type=int, default=9, help="with --check: how often each is measured")
    return parser.parse_args()


def main() -> None:
    """Predict, or check."""
    arguments = _parse()
    if arguments.check:
        model = CostModel(link_seconds=arguments.link_us * 1e-6, link_bytes_per_second=arguments.link_mbit * 1e6 / 8)
        check(model, [parse_size(text) for text in arguments.sizes.split(",")], arguments.rounds)
        return
    print("\n\n".join(table(cluster) for cluster in CLUSTERS))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        plot(arguments.out / "scaling.png")


if __name__ == "__main__":
    main()
