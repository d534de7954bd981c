"""What `doctor` finds right and wrong in what the ranks see, and in an all-reduce that they make."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from statistics import median
from typing import Final, NamedTuple, final

import numpy as np

from mpidist.cli.leftovers import Leftover, leftovers_text
from mpidist.cli.rank_facts import THREAD_VARIABLES, RankFacts
from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.cross_device_ops.collective_all_reduce import CollectiveAllReduce
from mpidist.errors import TopologyError, UnavailableError
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.nccl.availability import reason_against_nccl
from mpidist.transport.settings import unknown_settings
from mpidist.transport.text import count_text, name_ranks, size_text, time_text
from mpidist.transport.topology import Topology

__all__ = ["Finding", "Mark", "compare_nodes", "find"]

_SIZES: Final = (8, 16 << 20)  # bytes of the all-reduces that are made
_ROUNDS: Final = 5
_LEAST_SHARED_BYTES: Final = 256 << 20


@final
class Mark(Enum):
    """How good or bad a finding is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@final
class Finding(NamedTuple):
    """Something that is right or wrong.

    Attributes:
        mark: How bad it is.
        text: What it is, and what to do.
    """

    mark: Mark
    text: str


def find(group: SyncGroup, facts: Sequence[RankFacts], is_clean: bool = False) -> list[Finding]:
    """Check what the ranks see, and make an all-reduce. Collective; the result is for the first rank.

    Args:
        group: The ranks.
        facts: What each rank sees.
        is_clean: Whether what ended jobs had left has been removed.
    """
    found = _all_reduces(group)
    found += [Finding(Mark.WARN, text) for text in unknown_settings(os.environ)]
    found += _packages(facts)
    for ranks in group.topology.nodes:
        found += _cores(ranks, [facts[rank] for rank in ranks])
        found += _shared_memory(group, ranks, facts[ranks[0]])
        found += _leftovers(facts[ranks[0]].leftovers, is_clean)
    found += _gpus(group, facts)
    return _once(found)


def compare_nodes(topology: Topology, facts: Sequence[RankFacts], wanted: Mapping[str, str]) -> list[Finding]:
    """Compare what the ranks see with what is expected of them.

    Args:
        topology: The ranks and nodes.
        facts: What each rank sees.
        wanted: What each rank should see, by title.
    """
    found = []
    for title, text in wanted.items():
        others: dict[str, list[int]] = {}
        for rank, one in enumerate(facts):
            is_first = (
                topology.nodes[topology.node_of_rank[rank]][0] == rank
            )  # some facts are those of a node's first rank
            if one.texts.get(title, "") != text and (title in one.texts or is_first):
                others.setdefault(one.texts.get(title, "nothing"), []).append(rank)
        for got, ranks in others.items():
            hosts = ", ".join(dict.fromkeys(topology.hostnames[rank] for rank in ranks))
            found.append(Finding(Mark.FAIL, f"{title} on {name_ranks(ranks)} ({hosts}) is {got}; expected is {text}"))
    return found or [Finding(Mark.OK, "all ranks see what is expected")]


def _all_reduces(group: SyncGroup) -> list[Finding]:
    """Sum arrays over all ranks, and check and time the sums. Collective."""
    topology, ops = group.topology, BoundOps(CollectiveAllReduce(), group)
    if topology.size == 1:
        return [Finding(Mark.OK, "one rank: there is nothing to reduce. Start more, as your jobs do, to try it")]
    texts, wrong = [], 0
    for nbytes in _SIZES:
        base = np.arange(nbytes // 8, dtype=np.int64)
        seconds = []
        for step in range(_ROUNDS):
            start = time.perf_counter()
            total = ops.all_reduce("sum", base * (topology.rank + 1) + step)
            seconds.append(time.perf_counter() - start)
            factor = topology.size * (topology.size + 1) // 2
            wrong += not np.array_equal(total, base * factor + step * topology.size)
        slowest = float(ops.all_reduce("max", np.float64(median(seconds[1:]))))
        texts.append(f"{size_text(nbytes)} in {time_text(slowest)}")
    num_wrong = int(ops.all_reduce("sum", np.int64(wrong)))
    if num_wrong:
        return [Finding(Mark.FAIL, f"all-reduce: {num_wrong} of the sums that ranks got were wrong. Do not train here")]
    return [
        Finding(Mark.OK, f"all-reduce of {count_text(topology.size, 'rank')}: right everywhere; {', '.join(texts)}")
    ]


def _packages(facts: Sequence[RankFacts]) -> list[Finding]:
    several = {one.mpi_packages for one in facts if len(one.mpi_packages) > 1}
    return [
        Finding(
            Mark.WARN, f"several MPI libraries in one environment: {', '.join(names)}. Which mpiexec is found is luck"
        )
        for names in sorted(several)
    ]


def _cores(ranks: Sequence[int], facts: Sequence[RankFacts]) -> list[Finding]:
    """Hold the ranks and threads of a node against the cores that its ranks may use together."""
    num_cores = len(frozenset().union(*(one.cores for one in facts)))
    if len(ranks) > num_cores:
        return [
            Finding(
                Mark.WARN,
                f"{len(ranks)} ranks share {count_text(num_cores, 'core')} of a node: they take turns, and wait for "
                "each other. Start fewer, or give them more (--cpus-per-task, --bind-to)",
            )
        ]
    if any(not one.threads and len(one.cores) > 1 for one in facts) and len(ranks) > 1:
        least = max(1, num_cores // len(ranks))
        return [
            Finding(
                Mark.WARN,
                f"{THREAD_VARIABLES[0]} is not set: NumPy may start as many threads in every rank as the rank has "
                f"cores. Set it to {least}, the cores of a node divided by its ranks",
            )
        ]
    return []


def _shared_memory(group: SyncGroup, ranks: Sequence[int], facts: RankFacts) -> list[Finding]:
    if len(ranks) == 1 or facts.shared_bytes >= _LEAST_SHARED_BYTES:
        return []
    return [
        Finding(
            Mark.WARN,
            f"/dev/shm of node {group.topology.node_of_rank[ranks[0]]} has {size_text(facts.shared_bytes)}: too little "
            "for large arrays of several ranks. In a container: --shm-size=1g",
        )
    ]


def _leftovers(leftovers: Sequence[Leftover], is_clean: bool) -> list[Finding]:
    if not leftovers:
        return []
    text = leftovers_text(leftovers)
    if is_clean:
        return [Finding(Mark.OK, f"removed what ended jobs had left: {text}")]
    return [Finding(Mark.WARN, f"ended jobs have left {text}; `mpidist doctor --clean` removes them")]


def _gpus(group: SyncGroup, facts: Sequence[RankFacts]) -> list[Finding]:
    topology = group.topology
    shared = [ranks for ranks in topology.nodes if len(ranks) > 1]
    if not shared or not group.settings.nccl or not any("CuPy" in one.texts for one in facts):
        return []
    try:
        reason = reason_against_nccl([one.gpu for one in facts], shared, topology.hostnames)
    except (TopologyError, UnavailableError) as error:  # the error of a job's first call
        return [Finding(Mark.FAIL, f"NCCL is refused: {error}")]
    if reason:
        return [Finding(Mark.WARN, f"device memory goes through the host: {reason}")]
    return [Finding(Mark.OK, "NCCL can join the GPUs of each node")]


def _once(found: Sequence[Finding]) -> list[Finding]:
    """Tell once what is found on several nodes, and say how often."""
    times = {one: found.count(one) for one in found}
    return [Finding(one.mark, f"{one.text} ({times[one]} nodes)" if times[one] > 1 else one.text) for one in times]
