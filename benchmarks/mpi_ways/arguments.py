"""Sums of whatever arrays users have: private, strided and symmetric ones, into new arrays, themselves and others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from ranks.over_mpi import reduce
from ranks.way import Way

from mpi_ways.all_reduce import raw_ways, way_of

if TYPE_CHECKING:
    from ranks.over_mpi import Mpi
    from ranks.work import Work

    import mpidist

__all__ = ["ways"]


def ways(mpi: Mpi, work: Work) -> dict[str, Way]:
    """List raw ways, and those of mpidist. Every call has arrays of its own, as equal layers of a model have."""
    strategy = mpi.strategy()

    def shared(per_node: bool = False) -> list[list[Any]]:
        return [strategy.symmetric_empty_like(work.empty(), per_node=per_node) for _ in range(work.calls)]

    private, others = ([work.empty() for _ in range(work.calls)] for _ in range(2))
    own, of_node = shared(), shared(per_node=True)
    strided = [[np.empty((*shape, 2), np.float32)[..., 0] for shape in work.shapes] for _ in private]
    transposed = [[np.empty(shape[::-1], np.float32).T for shape in work.shapes] for _ in private]
    given = {
        "into new": (private, None),
        "in place": (private, private),
        "into others": (private, others),
        "into symmetric": (private, shared()),
        "per node": (private, of_node),
        "symmetric into new": (own, None),
        "symmetric in place": (own, own),
        "symmetric into others": (own, shared()),
        "symmetric per node": (own, of_node),
        "strided into new": (strided, None),
        "transposed into new": (transposed, None),
    }
    found = {name: way_of(strategy, work, values, outs) for name, (values, outs) in given.items()}
    return {**raw_ways(mpi, private), **found, **_metrics(mpi, strategy)}


def _metrics(mpi: Mpi, strategy: mpidist.Strategy) -> dict[str, Way]:
    """A float, a count and a float32 number, as a training step logs them. Not checked, and the same in each work."""
    values = {"loss": 1.5, "count": 2, "norm": np.float32(3)}

    def raw(_: int) -> Any:
        return [mpi.comm.allreduce(value) for value in values.values()]

    return {
        "raw, 3 numbers": Way([], raw, ""),
        "3 numbers": Way(
            [], lambda _: reduce("sum", values), "raw, 3 numbers", within=lambda timed: strategy.run(timed)
        ),
    }
