"""What an all-reduce takes at least: by the memory of this machine, by the links of hosts, or as the model predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from formulas import predict
from ranks.work import Work
from record import text_of_bytes

from contest.group import Group
from contest.measuring import measure
from mpidist.transport.costs.cost_model import CostModel

__all__ = ["SIZES", "Bound", "Link", "Prediction", "Roofline", "traffic_bytes"]

SIZES: Final = (256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)

# Times that each byte of the payload is read or written.
_PASSES: Final = {"copy": 2, "add": 3}
_HEADERS: Final = 14 + 20 + 32  # bytes of Ethernet, IP and TCP with its time stamps, in every packet


def traffic_bytes(way: str, nbytes: int, ranks: int) -> float | None:
    """Count what one rank must at least read and write to sum arrays of `nbytes` on one node.

    A rank sums its 1/P of the arrays of all P ranks (reads n), and writes the sum to one place or to P. What lies in
    private memory is copied to memory that the others can read, (P-1)/P of it, and the sums are copied out likewise.

    Args:
        way: Of mpidist.
        nbytes: n.
        ranks: P.

    Returns:
        Bytes, or None for other ways: they are not held against this bound.
    """
    part, others = 1 / ranks, (ranks - 1) / ranks
    passes = {
        "mpidist symmetric": 1 + 1.0,
        "mpidist symmetric per node": 1 + part,
        "mpidist per node": 2 * others + 1 + part,
        "mpidist in place": 2 * others + 1 + 1 + 2 * others,
        "mpidist": 2 * others + 1 + 1 + 2 * others,
    }
    return passes[way] * nbytes if way in passes else None


@dataclass
class Roofline:
    """Seconds that copies and additions take.

    Attributes:
        group: Processes that do nothing else.
        seconds: The fastest that each way and size was seen.
    """

    group: Group
    seconds: dict[tuple[str, int], float]

    def measure(self, sizes: Sequence[int], num_rounds: int, seconds: float) -> None:
        """Measure again, and keep what is fastest: a bound errs to the fast side."""
        for size in sizes:
            for timing in measure([self.group], Work("size", str(size), ((size // 4,),)), num_rounds, seconds):
                key = timing.way, size
                self.seconds[key] = min(timing.seconds, self.seconds.get(key, float("inf")))

    def traffic(self, way: str, size: int) -> float:
        """Return bytes a second and rank that are read or written."""
        return _PASSES[way.split()[0]] * size / self.seconds[way, size]

    def bound(self, way: str, nbytes: int) -> float | None:
        """Return the seconds that the memory needs for an all-reduce, with all ranks at work, or None."""
        sizes = sorted({size for _, size in self.seconds})
        traffic = traffic_bytes(way, nbytes, self.group.ranks)
        if traffic is None or not sizes or nbytes < sizes[0]:
            return None
        like = max(size for size in sizes if size <= nbytes)
        return traffic / max(self.traffic(passes, like) for passes in _PASSES)

    def lines(self) -> list[str]:
        """Make a table of what the memory does."""
        lines = [
            "",
            "memory, GB/s of reads and writes by each rank: copy, add in place; one rank alone, copy, add;",
            "and the time of multiplying an array into another one / in place",
        ]
        for size in sorted({size for _, size in self.seconds}):
            passes = ("copy", "add", "copy alone", "add alone")
            rates = " ".join(f"{self.traffic(one, size) / 1e9:>8.1f}" for one in passes)
            elsewhere = self.seconds["multiply into others", size] / self.seconds["multiply", size]
            lines.append(f"{text_of_bytes(size):>10} | {rates} | {elsewhere:>8.2f}")
        return lines


@dataclass(frozen=True)
class Link:
    """What joins the hosts.

    Attributes:
        hosts: How many.
        bits_per_second: The rate of each host's link, each way.
    """

    hosts: int
    bits_per_second: float

    @property
    def least_share(self) -> float:
        """Say how much of a message each host must send at least, to have it summed over all."""
        return 2 * (self.hosts - 1) / self.hosts

    def bound(self, way: str, nbytes: int) -> float:
        """Return the seconds that the links need, not compressed."""
        return self.least_share * nbytes * 8 / self.bits_per_second

    def to_least(self, sent_bytes: float, nbytes: int, packets: float = 0.0) -> float:
        """Hold what a host sent in a step against the least; without headers, if the number of packets is given."""
        return (sent_bytes - _HEADERS * packets) / (nbytes * self.least_share)


@dataclass(frozen=True)
class Prediction:
    """What the cost model says of hosts with equally many ranks.

    Attributes:
        model: Its speeds.
        placement: Ranks on each host.
    """

    model: CostModel
    placement: tuple[int, ...]

    def bound(self, way: str, nbytes: int) -> float:
        """Return the seconds that are predicted."""
        algorithm = {"raw in place": "mpi", "mpidist": self.model.choose(nbytes, self.placement)}.get(way, way)
        return predict(algorithm, self.model, nbytes, self.placement)


Bound = Roofline | Link | Prediction
