"""Costs of an all-reduce, by formula: the algorithm to take, and its chunks.

Alpha-beta models: a step costs a latency and the bytes that it moves. All results follow from a few measured numbers
and the placement of the ranks, so they are the same on all ranks; nothing here communicates.

In the formulas: n bytes; K nodes of G ranks, P in all; L lanes, the ranks of each node that add (those that every node
has); m, the bytes of one chunk. Times are in seconds, sizes in bytes.

Sources: Hockney, "The communication challenge for MPP", Parallel Computing 1994 (alpha and beta); Thakur, Rabenseifner
and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005 (steps and bytes of MPI's own).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final, TypeAlias, final

from mpidist.transport.node_memory.window import LINE_BYTES

__all__ = ["ALGORITHMS", "LEADER_BYTES", "NEVER", "CostModel", "Placement", "name_placement"]

Placement: TypeAlias = tuple[int, ...]  # number of ranks of each node

NEVER: Final = 1 << 62  # bytes: more than any array has

_LEAST_CHUNK: Final = 512 << 10  # of which four slots fit into a core's cache; on one node the only size
_MOST_CHUNK: Final = 2 << 20
_LEAST_SHARD: Final = 32 << 10
LEADER_BYTES: Final = 16 << 10  # below, sending all of it through one rank costs less than more steps would
_LEAST_DEPTH, _MOST_DEPTH = 2, 8
_SMALLEST, _LARGEST = 1 << 10, 1 << 30  # bytes: the bounds of the search for thresholds
_LATENCY_SHARE: Final = 0.1  # of a shard's time on the link
_LEAST_NUMBER, _MOST_NUMBER = 1e-12, 1e18  # in any unit: products stay finite


@final
@dataclass(frozen=True)
class CostModel:
    """Speeds of a machine, and the costs that follow from them.

    Attributes:
        sync_seconds: One barrier in shared memory.
        call_seconds: One call of NumPy.
        two_shot_seconds: Python of one two-shot call.
        copy_bytes_per_second: A copy in the cache, all ranks busy.
        stream_bytes_per_second: A copy out of the cache, all ranks busy.
        add_bytes_per_second: Adding one array to another.
        mpi_seconds: One message of MPI within a node; between nodes, the processor's time for one.
        mpi_bytes_per_second: MPI's own messages within a node, per rank.
        link_seconds: Latency of one message between nodes.
        link_bytes_per_second: A node's link, in each direction at once, shared by its ranks.
        cache_bytes: The cache that the ranks of a node share.
    """

    sync_seconds: float = 1.5e-6
    call_seconds: float = 0.5e-6
    two_shot_seconds: float = 7e-6
    copy_bytes_per_second: float = 12e9
    stream_bytes_per_second: float = 8e9
    add_bytes_per_second: float = 10e9
    mpi_seconds: float = 2e-6
    mpi_bytes_per_second: float = 3.5e9
    link_seconds: float = 20e-6
    link_bytes_per_second: float = 1.25e9
    cache_bytes: float = 16 << 20

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not _LEAST_NUMBER <= value <= _MOST_NUMBER:
                raise ValueError(
                    f"{name} must be a positive number, {_LEAST_NUMBER:g} to {_MOST_NUMBER:g}, got {value!r}"
                )

    def seconds(self, algorithm: str, nbytes: int, placement: Placement) -> float:
        """Predict the time of an all-reduce of an array of the caller's.

        Args:
            algorithm: One of `ALGORITHMS`. `"one_shot"` is for one node.
            nbytes: Size of the array.
            placement: Number of ranks of each node.
        """
        if sum(placement) == 1:
            return nbytes / self.stream_bytes_per_second
        return ALGORITHMS[algorithm](self, nbytes, placement)

    def choose(self, nbytes: int, placement: Placement) -> str:
        """Name the fastest of the algorithms for a placement."""
        if len(placement) == 1:
            return "one_shot" if nbytes <= self.one_shot_bytes(placement) else "two_shot"
        return "two_shot" if nbytes >= self.least_bytes(placement) else _staged(nbytes, placement)

    def one_shot_bytes(self, placement: Placement) -> int:
        """Return the size up to which one-shot is faster than two-shot, a power of two. 0 across nodes."""
        if len(placement) > 1:
            return 0
        size = 1 << (self.chunk_bytes(placement).bit_length() - 1)
        while size >= _SMALLEST and not self._beats("one_shot", "two_shot", round(size / math.sqrt(2)), placement):
            size //= 2
        return size if size >= _SMALLEST else 0

    def least_bytes(self, placement: Placement) -> int:
        """Return the size from which on two-shot is faster than node, nodes and node in turn, a power of two.

        `NEVER` if two-shot is not. 0 on one node.
        """
        if len(placement) == 1:
            return 0
        size = _LARGEST
        while size >= _SMALLEST and self._beats("two_shot", _staged(size, placement), size, placement):
            size //= 2
        return 2 * size if size < _LARGEST else NEVER

    def chunk_bytes(self, placement: Placement) -> int:
        """Return the size of a chunk of a two-shot all-reduce: 512 KiB on one node, else to 2 MiB; a multiple of 128.

        Within these bounds, every lane has 32 KiB of the chunk, and a latency is at most a tenth of a chunk's time on
        the link, 2 m (K - 1) / K / link.
        """
        nodes = len(placement)
        size = _LEAST_CHUNK
        if nodes > 1:
            size = _LEAST_SHARD * min(placement)
            across = self.link_seconds * self.link_bytes_per_second / _LATENCY_SHARE
            size = max(size, math.ceil(across * nodes / (2 * (nodes - 1))))
        return -(-min(max(size, _LEAST_CHUNK), _MOST_CHUNK) // LINE_BYTES) * LINE_BYTES

    def depth(self, placement: Placement) -> int:
        """Return how many shards a lane has under way between nodes: 2 to 8. 0 on one node.

        As many as a lane adds while one shard is under way (2 latencies and its time on the link), and one that waits.
        """
        if len(placement) == 1:
            return 0
        chunk = self.chunk_bytes(placement)
        link = self.busy_link_seconds(chunk, len(placement))
        under_way = 2 * self.link_seconds + link
        return min(
            max(1 + math.ceil(under_way / max(link, self._work(chunk, 1, placement))), _LEAST_DEPTH), _MOST_DEPTH
        )

    def busy_link_seconds(self, nbytes: float, nodes: int) -> float:
        """Predict how long the bytes of the least all-reduce across nodes keep a link busy: 2 n (K - 1) / K / link."""
        return 2 * nbytes * (nodes - 1) / nodes / self.link_bytes_per_second

    def _beats(self, one: str, other: str, nbytes: int, placement: Placement) -> bool:
        return self.seconds(one, nbytes, placement) <= self.seconds(other, nbytes, placement)

    def _copy(self, moved: float, nbytes: int, ranks: int) -> float:
        """Copy `moved` bytes of arrays of n bytes: out of the cache if those of all ranks do not fit in."""
        fits = nbytes * ranks <= self.cache_bytes
        return moved / (self.copy_bytes_per_second if fits else self.stream_bytes_per_second)

    def _work(self, nbytes: int, chunks: int, placement: Placement) -> float:
        """Predict the time that a rank works in a two-shot all-reduce.

        Copies n (L - 1) / L in, adds n / L from G places, copies n out; a barrier and 3 + 2 G calls a chunk. Between
        nodes, for each chunk, it sends 2 (K - 1) messages, and adds n / L / K from K - 1 places.
        """
        lanes, ranks, nodes = min(placement), max(placement), len(placement)
        copied = self._copy(nbytes * (lanes - 1) / lanes + nbytes, nbytes, ranks)
        added = nbytes / lanes * (ranks + (nodes - 1) / nodes) / self.add_bytes_per_second
        of_chunk = self.sync_seconds + (3 + 2 * ranks) * self.call_seconds + 2 * (nodes - 1) * self.mpi_seconds
        return copied + added + chunks * of_chunk

    def _one_shot(self, nbytes: int, placement: Placement) -> float:
        """Copy n, a barrier, read G n; 1 + G calls. There is none across nodes."""
        if len(placement) > 1:
            return math.inf
        ranks = placement[0]
        added = ranks * nbytes / self.add_bytes_per_second
        return self._copy(nbytes, nbytes, ranks) + self.sync_seconds + added + (1 + ranks) * self.call_seconds

    def _two_shot(self, nbytes: int, placement: Placement) -> float:
        """The longer of a rank's work and the link's; the shorter for one chunk, to fill and drain; 2 latencies.

        With d shards under way, a chunk takes no less than a d-th of the time of one shard.
        """
        nodes, chunk = len(placement), self.chunk_bytes(placement)
        chunks = max(1, math.ceil(nbytes / chunk))
        seconds = self.two_shot_seconds + self.sync_seconds
        work = self._work(nbytes, chunks, placement)
        if nodes == 1:
            return seconds + work
        first = min(nbytes, chunk)
        link, link_of_first = self.busy_link_seconds(nbytes, nodes), self.busy_link_seconds(first, nodes)
        under_way = (2 * self.link_seconds + link_of_first) / self.depth(placement)
        fill = min(self._work(first, 1, placement), link_of_first)
        return seconds + max(work, link, chunks * under_way) + fill + 2 * self.link_seconds

    def _tree_across(self, nbytes: float, nodes: int) -> float:
        """Predict MPI's own all-reduce of K nodes: the better of log K steps of n, and 2 log K of 2 n (K - 1) / K."""
        steps, latency, rate = math.ceil(math.log2(nodes)), self.link_seconds, self.link_bytes_per_second
        doubling = steps * (latency + nbytes / rate + nbytes / self.add_bytes_per_second)
        share = nbytes * (nodes - 1) / nodes
        return min(doubling, 2 * steps * latency + 2 * share / rate + share / self.add_bytes_per_second)

    def _leader(self, nbytes: int, placement: Placement) -> float:
        """Reduce in shared memory, as two-shot does; MPI's own all-reduce among the K leaders; a copy in and out."""
        across = self._tree_across(nbytes, len(placement))
        if max(placement) == 1:
            return across
        broadcast = self.two_shot_seconds + self.sync_seconds + self._copy(nbytes, nbytes, max(placement))
        return self._two_shot(nbytes, (max(placement),)) + across + broadcast

    def _hierarchical(self, nbytes: int, placement: Placement) -> float:
        """Within nodes, across, and within again, in turn: two-shot in two calls, and MPI's own across."""
        across = self._tree_across(nbytes, len(placement))
        if max(placement) == 1:
            return across
        return self._two_shot(nbytes, (max(placement),)) + across + self.two_shot_seconds + self.sync_seconds


ALGORITHMS: Final[dict[str, Callable[[CostModel, int, Placement], float]]] = {
    "one_shot": CostModel._one_shot,
    "two_shot": CostModel._two_shot,
    "leader": CostModel._leader,
    "hierarchical": CostModel._hierarchical,
}


def _staged(nbytes: int, placement: Placement) -> str:
    """Name what `HierarchicalCopyAllReduce` does by itself: small arrays, and uneven nodes, go through a leader."""
    is_even = len(set(placement)) == 1 < placement[0]
    return "hierarchical" if is_even and nbytes > LEADER_BYTES else "leader"


def name_placement(placement: Placement) -> str:
    """Return the numbers of ranks and nodes, for people."""
    ranks, nodes = sum(placement), len(placement)
    text = f"{ranks} rank{'s' if ranks > 1 else ''} on {nodes} node{'s' if nodes > 1 else ''}"
    if nodes == 1:
        return text
    if len(set(placement)) == 1:
        return f"{text}, {placement[0]} on each"
    return f"{text}, {min(placement)} to {max(placement)} on each"
