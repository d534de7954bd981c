"""Measure the costs of a reduction's parts on this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import takewhile
from typing import Final, TypeAlias, final

import numpy as np

from mpidist.transport.communicator import Array, Communicator
from mpidist.transport.costs.cost_model import CostModel
from mpidist.transport.group.levels import Levels
from mpidist.transport.reduction import Reduction
from mpidist.transport.shared_memory.communicator import SharedMemoryCommunicator

__all__ = ["measure_cost_model"]

Step: TypeAlias = Callable[[], object]

_ROUNDS: Final = 9  # of each step; their median counts
_BLOCK: Final = 256 << 10  # bytes that a rank copies or adds at once; a slot has more
_SWEEP: Final = tuple(1 << power for power in range(18, 26))  # 256 KiB to 32 MiB
_MESSAGE: Final = 1 << 20
_MOST_REPEATS: Final = 100_000
_SLOWEST: Final = Reduction("max")


def measure_cost_model(
    levels: Levels, seconds: float = 10, begin_wait: Step = lambda: None
) -> tuple[CostModel, tuple[str, ...], float]:
    """Measure what mpidist's own parts cost here. Collective; the result is the same on all ranks.

    The ranks work at once, as they do in an all-reduce. A time is the median of some rounds, on the slowest rank.
    Returns the model, the names of its numbers that could be measured here, and how many times as long slow rounds of
    one step took as fast ones. `begin_wait` is called before the ranks wait for each other: no wait is as long as the
    whole measurement, of about `seconds`.
    """
    clock, node = _Clock(levels.world, begin_wait), levels.within_node
    ranks = round(clock.slowest(node.size))  # of the largest node
    lanes = -round(clock.slowest(-node.size))  # the ranks of the smallest
    steps = _array_steps(node)
    if ranks > 1:
        steps |= {"mpi": _messages(node, 8), "mpi long": _messages(node, _MESSAGE)}
    if ranks > 1 and levels.fused is not None:
        tiny, total = np.zeros(8, np.float32), Reduction()
        steps["two_shot"] = (lambda: node.reduce(tiny, total, 0)) if node.size > 1 else _rest
    if node.size < levels.world.size:  # from each node to the next, one message alone, and long ones of all lanes
        steps["link"] = _messages(levels.across_nodes, 8) if node.rank == 0 else _rest
        steps["link long"] = _messages(levels.across_nodes, _MESSAGE) if node.rank < lanes else _rest
    times, spread = clock.measure(steps, seconds)
    found = _costs(times, ranks, lanes)
    return CostModel(**found), tuple(found), spread


@final
class _Clock:
    """Times that are the same on all ranks: those of the slowest rank."""

    def __init__(self, world: Communicator, begin_wait: Step) -> None:
        self._world, self._begin_wait = world, begin_wait

    def slowest(self, value: float) -> float:
        """Return the largest of all ranks' values. Collective."""
        everyone = np.array([value])
        self._begin_wait()
        self._world.all_reduce(everyone, _SLOWEST)
        return float(everyone[0])

    def measure(self, steps: Mapping[str, Step], seconds: float) -> tuple[dict[str, float], float]:
        """Measure steps, which all ranks do equally often, and the largest spread of their rounds. Collective.

        Steps take turns, so that a disturbance slows a few rounds of each step, and not all rounds of one.
        """
        budget = seconds / len(steps) / _ROUNDS
        first = {name: self.slowest(min(self._round(step, 1) for _ in range(3))) for name, step in steps.items()}
        repeats = {name: min(max(1, int(budget / first[name])), _MOST_REPEATS) for name in steps}
        rounds = [{name: self._round(step, repeats[name]) for name, step in steps.items()} for _ in range(_ROUNDS)]
        # The fifth of the nine rounds counts; the third and the seventh show how certain it is.
        low, median, high = (
            {name: self.slowest(sorted(times[name] for times in rounds)[at]) for name in steps}
            for at in (_ROUNDS // 4, _ROUNDS // 2, -1 - _ROUNDS // 4)
        )
        return median, max(high[name] / low[name] for name in steps)

    def _round(self, step: Step, repeats: int) -> float:
        self.slowest(0)  # a barrier
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        return (time.perf_counter() - start) / repeats


def _array_steps(node: Communicator) -> dict[str, Step]:
    """Return steps: calls of NumPy, and barriers, copies and sums as a two-shot all-reduce makes them.

    Each rank copies a block into its own slot, which another rank has read, and a block out of the slot that the next
    rank has just written: so the copies are those from one core to another.
    """
    barrier, own, others = _staging(node)
    tiny, total = np.ones(8, np.float32), np.empty(8, np.float32)
    block, result = np.ones(_BLOCK, np.uint8), np.empty(_BLOCK // 4, np.float32)

    def copy(blocks: Array) -> None:
        for block in blocks:
            own[...] = block
            barrier()
            block[...] = others
            barrier()

    def add() -> None:
        own[...] = block
        barrier()
        np.add(block.view(np.float32), others.view(np.float32), out=result)
        barrier()

    steps: dict[str, Step] = {"call": lambda: np.add(tiny, tiny, out=total), "sync": barrier, "add": add}
    return steps | {f"copy {size}": partial(copy, np.ones((size // _BLOCK, _BLOCK), np.uint8)) for size in _SWEEP}


def _staging(node: Communicator) -> tuple[Callable[[], None], Array, Array]:
    """Return the node's barrier, this rank's staging memory and the next rank's: its own where none is shared."""
    if not isinstance(node, SharedMemoryCommunicator):
        memory = np.zeros(_BLOCK, np.uint8)
        return _rest, memory, memory
    views = node.fused.slots.views(np.dtype(np.uint8))[0]
    return node.fused.synchronize, views[node.rank][:_BLOCK], views[(node.rank + 1) % node.size][:_BLOCK]


def _costs(times: Mapping[str, float], ranks: int, lanes: int) -> dict[str, float]:
    """Turn the times of steps into the numbers of a model."""
    call, sync = times["call"], times["sync"]
    rates = {size: _rate(2 * size, times[f"copy {size}"], 2 * size / _BLOCK * sync) for size in _SWEEP}
    fast, slow = rates[_SWEEP[0]], min(rates.values())
    cached = takewhile(lambda size: rates[size] >= math.sqrt(fast * slow), _SWEEP)
    costs = {"call_seconds": call}
    if ranks == 1 or "two_shot" in times:  # else no rank read the memory of another one
        costs |= {
            "copy_bytes_per_second": fast,
            "stream_bytes_per_second": slow,
            "add_bytes_per_second": _rate(_BLOCK, times["add"], 2 * sync + _BLOCK / fast),
            "cache_bytes": float(max(cached) * ranks),
        }
    if "two_shot" in times:
        parts = 2 * sync + (3 + 2 * ranks) * call
        costs |= {"sync_seconds": sync, "two_shot_seconds": max(times["two_shot"] - parts, call)}
    for name, message in (("mpi", _MESSAGE), ("link", lanes * _MESSAGE)):
        if name in times:
            rate = _rate(message, times[f"{name} long"], times[name])
            costs |= {f"{name}_seconds": times[name], f"{name}_bytes_per_second": rate}
    return costs


def _rate(nbytes: float, seconds: float, besides: float) -> float:
    """Return bytes a second, without the time for other work, `besides`; that is at most half of `seconds`."""
    return nbytes / max(seconds - besides, seconds / 2)


def _messages(ring: Communicator, nbytes: int) -> Step:
    """Return a step that sends bytes to the next rank, and receives as many from the one before, at once."""
    if ring.size == 1:
        return _rest
    outgoing, incoming = np.zeros(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    after, before = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
    return lambda: ring.send_receive(outgoing, after, incoming, before)


def _rest() -> None:
    """Do nothing, while other ranks measure."""
