"""Findings of `doctor`, right and wrong, in the facts of the ranks, and in an all-reduce."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Final, NamedTuple, final

import numpy as np

from mpidist.cli.launching import THREAD_VARIABLES
from mpidist.cli.leftovers import leftovers_text
from mpidist.cli.rank_facts import RankFacts
from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.cross_device_ops.collective_all_reduce import CollectiveAllReduce
from mpidist.errors import TopologyError, UnavailableError
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.nccl.availability import reason_against_nccl
from mpidist.transport.settings import unknown_settings
from mpidist.transport.text import count_text, group_ranks, name_ranks, size_text, time_text
from mpidist.transport.topology import Topology

__all__ = ["FAIL", "OK", "WARN", "Finding", "compare_nodes", "find"]

OK: Final = "ok"
WARN: Final = "warn"
FAIL: Final = "fail"

_SIZES: Final = (8, 16 << 20)  # bytes of the all-reduces that are made
_ROUNDS: Final = 5
_LEAST_SHARED_BYTES: Final = 256 << 20


@final
class Finding(NamedTuple):
    """Something that is right or wrong: how bad it is, what it is, and what to do."""

    mark: str
    text: str


def find(group: SyncGroup, facts: Sequence[RankFacts], is_clean: bool = False) -> list[Finding]:
    """Check the facts of the ranks, and make an all-reduce. Collective; the result is for the first rank.

    `is_clean`: whether leftovers of ended jobs were removed.
    """
    packages = sorted({one.mpi_packages for one in facts if len(one.mpi_packages) > 1})
    several = "several MPI libraries in one environment: {}. Which mpiexec is found is luck"
    warnings = [*unknown_settings(os.environ), *(several.format(", ".join(names)) for names in packages)]
    found = [_all_reduces(group), *(Finding(WARN, text) for text in warnings)]
    for node, ranks in enumerate(group.topology.nodes):
        found += _of_node(node, [facts[rank] for rank in ranks], is_clean)
    found += _gpus(group, facts)
    times = {one: found.count(one) for one in found}  # what is found on several nodes is told once
    return [Finding(one.mark, f"{one.text} ({times[one]} nodes)" if times[one] > 1 else one.text) for one in times]


def compare_nodes(topology: Topology, facts: Sequence[RankFacts], wanted: Mapping[str, str]) -> list[Finding]:
    """Compare the facts of the ranks with the expected ones, by title."""
    firsts = {ranks[0] for ranks in topology.nodes}  # which alone have some facts
    found = []
    for title, text in wanted.items():
        its_texts = {rank: one.texts.get(title, "") for rank, one in enumerate(facts)}
        others = {rank: got for rank, got in its_texts.items() if got != text and (got or rank in firsts)}
        for got, ranks in group_ranks(others).items():
            where = f"{name_ranks(ranks)} ({', '.join(dict.fromkeys(topology.hostnames[rank] for rank in ranks))})"
            found.append(Finding(FAIL, f"{title} on {where} is {got or 'nothing'}; expected is {text}"))
    return found or [Finding(OK, "all ranks see the expected values")]


def _all_reduces(group: SyncGroup) -> Finding:
    """Sum arrays over all ranks, and check and time the sums. Collective."""
    topology, ops = group.topology, BoundOps(CollectiveAllReduce(), group)
    if topology.size == 1:
        return Finding(OK, "one rank: there is nothing to reduce. Start more, as your jobs do, to try it")
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
        return Finding(FAIL, f"all-reduce: {num_wrong} of the sums that ranks got were wrong. Do not train here")
    ranks = count_text(topology.size, "rank")
    return Finding(OK, f"all-reduce of {ranks}: right everywhere; {', '.join(texts)}")


def _of_node(node: int, facts: Sequence[RankFacts], is_clean: bool) -> Iterator[Finding]:
    """Hold the ranks and threads of a node against its cores, and look at its shared memory and leftovers."""
    num_ranks, num_cores = len(facts), len(frozenset().union(*(one.cores for one in facts)))
    if num_ranks > num_cores:
        yield Finding(
            WARN,
            f"{num_ranks} ranks share {count_text(num_cores, 'core')} of a node: they take turns, and wait for "
            "each other. Start fewer, or give them more (--cpus-per-task, --bind-to)",
        )
    elif any(not one.threads and len(one.cores) > 1 for one in facts) and num_ranks > 1:
        yield Finding(
            WARN,
            f"{THREAD_VARIABLES[0]} is not set: NumPy may start as many threads in every rank as the rank has "
            f"cores. Set it to {max(1, num_cores // num_ranks)}, the cores of a node divided by its ranks",
        )
    if num_ranks > 1 and facts[0].shared_bytes < _LEAST_SHARED_BYTES:
        yield Finding(
            WARN,
            f"/dev/shm of node {node} has {size_text(facts[0].shared_bytes)}: too little "
            "for large arrays of several ranks. In a container: --shm-size=1g",
        )
    if facts[0].leftovers:
        text = leftovers_text(facts[0].leftovers)
        if is_clean:
            yield Finding(OK, f"removed leftovers of ended jobs: {text}")
        else:
            yield Finding(WARN, f"ended jobs have left {text}; `mpidist doctor --clean` removes them")


def _gpus(group: SyncGroup, facts: Sequence[RankFacts]) -> Iterator[Finding]:
    topology = group.topology
    shared = [ranks for ranks in topology.nodes if len(ranks) > 1]
    if not shared or not group.settings.nccl or not any("CuPy" in one.texts for one in facts):
        return
    try:
        reason = reason_against_nccl([one.gpu for one in facts], shared, topology.hostnames)
    except (TopologyError, UnavailableError) as error:  # the error of a job's first call
        yield Finding(FAIL, f"NCCL is refused: {error}")
    else:
        if reason:
            yield Finding(WARN, f"device memory goes through the host: {reason}")
        else:
            yield Finding(OK, "NCCL can join the GPUs of each node")
