"""Reductions that are started while the next gradients are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from ranks.over_mpi import reduce
from ranks.way import Way

import mpidist

if TYPE_CHECKING:
    from collections.abc import Callable

    from ranks.over_mpi import Mpi
    from ranks.work import Work

__all__ = ["ways"]

_ROWS = 192  # of the matrices that are multiplied before each gradient is there


def ways(mpi: Mpi, work: Work) -> dict[str, Way]:
    """List: compute alone; reduce when all gradients are there; start each one's reduction when it is there."""
    strategy, gradients = mpi.strategy(), work.empty()
    matrix = np.ones((_ROWS, _ROWS), np.float32)

    def compute() -> Any:
        return [np.matmul(matrix, matrix) for _ in gradients]

    def after() -> Any:
        compute()
        return reduce("sum", gradients, gradients)

    def early() -> Any:
        context, handles = mpidist.get_replica_context(), []
        assert context is not None  # inside strategy.run
        for gradient in gradients:
            np.matmul(matrix, matrix)
            handles.append(context.start_all_reduce("sum", gradient, out=gradient))
        return [handle.wait() for handle in handles]

    def way(step: Callable[[], Any], written: list[list[Any]]) -> Way:
        return Way(written, lambda _: step(), "reduce after", within=lambda timed: strategy.run(timed))

    return {
        "compute alone": way(compute, []),
        "reduce after": way(after, [gradients]),
        "start early": way(early, [gradients]),
    }
