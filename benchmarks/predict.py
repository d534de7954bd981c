"""How long would an all-reduce take on clusters that are not here?

python benchmarks predict       # a table for each of three clusters; measures nothing

The formulas are those of `mpidist.transport.costs.cost_model`; `python benchmarks model` holds them against what is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, final

from formulas import predict
from record import parser_of, text_of, text_of_bytes

from mpidist.transport.costs.cost_model import CostModel

__all__ = ["CLUSTERS", "Cluster", "main", "table"]

_NODES: Final = (16, 128, 1024)
_SIZES: Final = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30)
_ALGORITHMS: Final = ("leader", "two_shot", "hierarchical", "mpi", "ring", "recursive_doubling")


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
        for size in _SIZES:
            times = [predict(name, cluster.model, size, placement) for name in _ALGORITHMS]
            cells = [f"**{text_of(time * 1e6)}**" if time == min(times) else text_of(time * 1e6) for time in times]
            taken = cluster.model.choose(size, placement)
            lines.append(f"| {nodes} | {text_of_bytes(size)} | {' | '.join(cells)} | {taken} |")
    return "\n".join(lines)


def main() -> None:
    """Predict."""
    parser_of("predict", __doc__).parse_args()
    print("\n\n".join(table(cluster) for cluster in CLUSTERS))
