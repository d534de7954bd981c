"""Small calls of every kind: the cost of Python, checks and deadlines; and reductions that are started early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from backends.mpi import Mpi, context, reduce
from harness.work import Way, Work

import mpidist
from cases.sums import raw_ways, way_of

_MANY = 161  # arrays: as many as ResNet-50 has gradients
_ROWS = 192  # of the matrices that are multiplied before each gradient of `overlap`


def calls(mpi: Mpi, work: Work) -> dict[str, Way]:
    """List sums and raw, then other calls in replica context and in cross-replica context."""
    private, strategy = [work.empty() for _ in range(work.calls)], mpi.strategy()
    unchecked = mpi.strategy({"MPIDIST_CHECK": "0"})
    return {
        **raw_ways(mpi, private),
        "all_reduce, no check": way_of(unchecked, work, private),
        "all_reduce": way_of(strategy, work, private),
        "all_reduce, deadline": way_of(mpi.strategy({"MPIDIST_TIMEOUT_SECONDS": "600"}), work, private),
        "all_reduce out=, no check": way_of(unchecked, work, private, private),
        "all_reduce out=": way_of(strategy, work, private, private),
        "run of all_reduce": Way(private, lambda at: [strategy.run(reduce, ("sum", private[at][0]))], "raw"),
        "strategy.reduce": Way(private, lambda at: [strategy.reduce("sum", private[at][0])], "raw"),
        **_others(strategy),
    }


def _others(strategy: mpidist.Strategy) -> dict[str, Way]:
    """List other calls in replica context, and in cross-replica context."""
    one, many = np.ones(4, np.float32), [np.ones(4, np.float32) for _ in range(_MANY)]
    parts = np.ones(4 * strategy.num_replicas_in_sync, np.float32)
    with strategy.scope():
        variable = mpidist.Variable(np.zeros(4, np.float32), aggregation="sum")
    steps = iter(strategy.experimental_distribute_dataset([np.ones((8, 4), np.float32)] * 200_000))
    in_replica: dict[str, Callable[[], Any]] = {
        f"{_MANY} small arrays": lambda: reduce("sum", many),
        "3 numbers, as a step logs them": lambda: reduce("sum", {"loss": 1.5, "count": 2, "norm": np.float32(3)}),
        "a float, by name of op": lambda: reduce("mean", 1.5),
        "all_gather of 16 B": lambda: context().all_gather(one, 0),
        "reduce_scatter of 16 B": lambda: context().reduce_scatter("sum", parts),
        "aggregated assign_add of 16 B": lambda: variable.assign_add(one),
        "merge_call": lambda: context().merge_call(lambda strategy: None),
        "start_all_reduce and wait of 16 B": lambda: context().start_all_reduce("sum", one).wait(),
    }
    across: dict[str, Callable[[], Any]] = {
        "strategy.run of nothing": lambda: strategy.run(lambda: None),
        "strategy.reduce of a float": lambda: strategy.reduce("sum", 1.0),
        "strategy.reduce along an axis": lambda: strategy.reduce("mean", one, axis=0),
        "strategy.gather of 16 B": lambda: strategy.gather(one, 0),
        "step of a data set": lambda: next(steps),
    }
    found = {name: Way([], lambda _, call=call: call(), "", within=strategy.run) for name, call in in_replica.items()}
    return found | {name: Way([], lambda _, call=call: call(), "") for name, call in across.items()}


def overlap(mpi: Mpi, work: Work) -> dict[str, Way]:
    """List: compute alone; reduce when all gradients are there; start each one's reduction when it is there."""
    strategy, gradients = mpi.strategy(), work.empty()
    matrix = np.ones((_ROWS, _ROWS), np.float32)

    def compute() -> Any:
        return [np.matmul(matrix, matrix) for _ in gradients]

    def after() -> Any:
        compute()
        return reduce("sum", gradients, gradients)

    def early() -> Any:
        handles = []
        for gradient in gradients:
            np.matmul(matrix, matrix)
            handles.append(context().start_all_reduce("sum", gradient, out=gradient))
        return [handle.wait() for handle in handles]

    def way(step: Callable[[], Any], written: list[list[Any]], baseline: str = "reduce after") -> Way:
        return Way(written, lambda _: step(), baseline, within=strategy.run)

    return {
        "compute alone": way(compute, [], ""),
        "reduce after": way(after, [gradients]),
        "start early": way(early, [gradients]),
    }
