"""Symmetric and per-node arrays: allocated by all ranks together, in shared memory of the node or in device memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from mpidist.collectives.arguments.operands import symmetric_spec
from mpidist.strategy_parts import StrategyParts
from mpidist.transport import arrays

__all__ = ["symmetric_empty"]


def symmetric_empty(
    parts: StrategyParts, specs: Sequence[tuple[Any, Any, bool]], per_node: bool, error: Exception | None = None
) -> list[Any]:
    """Allocate arrays, those in host memory in one window: `Strategy.symmetric_empty`. Collective.

    Args:
        parts: The parts of the strategy.
        specs: Shape and dtype of each array, and whether it shall lie in device memory. The same on every rank.
        per_node: Whether to make one array for all ranks of a node, which is then in host memory: ranks share no other.
        error: An error that the caller found on this rank, which all ranks raise; `None` for none.

    Returns:
        The arrays, uninitialised.

    Raises:
        UnavailableError: If a node has too little memory: on every rank, and no rank keeps any of the arrays.
    """
    group, fields, on_host = parts.group, {}, []
    made: list[Any] = []  # arrays on a GPU; `None` in the place of each array in `on_host`
    try:
        for index, (shape, dtype, device) in enumerate(specs):
            native = symmetric_spec(shape, dtype)
            on_gpu = (device or parts.uses_device_memory) and not per_node
            fields[f"array {index}"] = f"{native[1].str}{list(native[0])}{' on a GPU' * on_gpu}"
            if on_gpu:  # allocated before the ranks agree, so that all of them learn if one lacks memory
                group.devices.require_usable("symmetric_empty")
                made.append(arrays.empty(*native, device=True))
            else:
                on_host.append(native)
                made.append(None)
    except Exception as problem:  # of any kind: the other ranks must learn of it
        error = error or problem
    parts.agree("symmetric_empty", {"per_node": str(per_node)} | fields, error)
    shared: Iterator[Any] = iter(())
    if on_host:
        # The ranks of a node fail together already; the ranks of other nodes must learn of the failure.
        with parts.raise_together("symmetric_empty", "allocation") if len(group.topology.nodes) > 1 else nullcontext():
            shared = iter(group.shared.empty(on_host, per_node, f"symmetric_empty on {group.topology.node_name}"))
    return [next(shared) if array is None else array for array in made]
