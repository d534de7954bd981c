"""What the memory of this machine allows: bandwidth that is measured, and bytes that an all-reduce must move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from contest.group import Group
from contest.measuring import measure
from contest.work import Work

__all__ = ["SIZES", "Roofline", "traffic_bytes"]

SIZES: Final = (256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)

# Times that each byte of the payload is read or written.
_PASSES: Final = {"copy": 2, "add": 3}


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
