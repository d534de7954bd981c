"""Sums over MPI's ranks: raw mpi4py, and mpidist with new results, in place and with arrays in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from backends.mpi import Mpi, reduce
from harness.work import Way, Work
from mpi4py import MPI

import mpidist
from mpidist import CommunicationOptions, HierarchicalCopyAllReduce, ReduceOp
from mpidist.transport.mpi.ring import ring_all_reduce
from mpidist.transport.reduction import Reduction

_MOST_BUCKET_BYTES = 128 << 20  # above, a bucket loses to a call a tensor, and takes as much memory again


def _private(work: Work) -> list[list[Any]]:
    """Allocate the arrays of each call that is timed with others, as equal layers of a model have."""
    return [work.empty() for _ in range(work.calls)]


def raw_ways(mpi: Mpi, private: list[list[Any]]) -> dict[str, Way]:
    """List the calls of mpi4py alone: one a tensor."""
    all_reduce, in_place = mpi.comm.Allreduce, MPI.IN_PLACE

    def fresh(array: Any) -> Any:
        result = np.empty_like(array)
        all_reduce(array, result)
        return result

    def call_in_place(at: int) -> Any:
        for array in private[at]:
            all_reduce(in_place, array)
        return private[at]

    return {
        "raw": Way(private, lambda at: [fresh(array) for array in private[at]], ""),
        "raw in place": Way(private, call_in_place, ""),
    }


def _raw_bucket(mpi: Mpi, work: Work, private: list[list[Any]]) -> Way:
    flat = np.empty(work.nbytes // 4, np.float32)
    ends = np.cumsum([np.prod(shape, dtype=int) for shape in work.shapes])[:-1]
    parts = [part.reshape(shape) for part, shape in zip(np.split(flat, ends), work.shapes, strict=True)]

    def call(at: int) -> Any:
        np.concatenate([array.reshape(-1) for array in private[at]], out=flat)
        mpi.comm.Allreduce(MPI.IN_PLACE, flat)
        for array, part in zip(private[at], parts, strict=True):
            array[...] = part
        return private[at]

    return Way(private, call)


def way_of(
    strategy: mpidist.Strategy, work: Work, values: Any, outs: Any = None, options: Any = None, **more: Any
) -> Way:
    """Make a sum by mpidist, of one array or a list, for each call. Without `outs`, results are new arrays."""
    single = work.kind == "size"
    given = [value[0] if single else value for value in values]
    taken = [out[0] if single else out for out in outs] if outs else [None] * len(given)

    def call(at: int) -> Any:
        return reduce(ReduceOp.SUM, given[at], taken[at], options)

    fields = {"baseline": "raw in place" if outs else "raw", "within": strategy.run, **more}
    return Way(values, call, results=lambda result: [result] if single else result, **fields)


def all_reduce(mpi: Mpi, work: Work) -> dict[str, Way]:
    """List raw ways, and those of mpidist."""
    private, strategy = _private(work), mpi.strategy()
    found = raw_ways(mpi, private)
    if work.kind == "list" and work.nbytes <= _MOST_BUCKET_BYTES:
        found["raw bucket"] = _raw_bucket(mpi, work, private)
    own = [strategy.symmetric_empty_like(private[0]) for _ in private]
    of_node = [strategy.symmetric_empty_like(private[0], per_node=True) for _ in private]
    return {
        **found,
        "mpidist": way_of(strategy, work, private),
        "mpidist in place": way_of(strategy, work, private, private),
        "mpidist per node": way_of(strategy, work, private, of_node),
        "mpidist symmetric": way_of(strategy, work, own, own),
        "mpidist symmetric per node": way_of(strategy, work, own, of_node),
    }


def algorithms(mpi: Mpi, work: Work) -> dict[str, Way]:
    """List the algorithms, all with new results, and raw."""
    private = _private(work)
    parts: dict[str, dict[str, Any]] = {
        "CollectiveAllReduce": {"cross_device_ops": mpidist.CollectiveAllReduce()},
        "HierarchicalCopyAllReduce": {"cross_device_ops": HierarchicalCopyAllReduce()},
        "ReductionToOneDevice": {"cross_device_ops": mpidist.ReductionToOneDevice()},
        "ring": {"communication_options": CommunicationOptions(implementation="RING")},
        "reproducible": {"communication_options": CommunicationOptions(reproducible=True)},
    }
    ours = {name: way_of(mpi.strategy(**its), work, private) for name, its in parts.items()}
    return {"raw": raw_ways(mpi, private)["raw"], **ours}


def network(mpi: Mpi, work: Work) -> dict[str, Way]:
    """List raw, and mpidist with its options, all in place. Compressed numbers are rounded twice."""
    private, strategy = _private(work), mpi.strategy()
    options: dict[str, tuple[dict[str, Any], float]] = {
        "in place": ({}, 1e-6),
        "reproducible": ({"reproducible": True}, 1e-6),
        "bf16": ({"compression": "bf16"}, 2.0**-7),
        "fp16": ({"compression": "fp16"}, 2.0**-10),
    }
    found = {"raw in place": raw_ways(mpi, private)["raw in place"]}
    for name, (its, tolerance) in options.items():
        more = {"tolerance": tolerance} | ({"baseline": "mpidist in place"} if its else {})
        found[f"mpidist {name}"] = way_of(strategy, work, private, private, CommunicationOptions(**its), **more)
    return found


def model(mpi: Mpi, work: Work) -> dict[str, Way]:
    """List mpidist as a program calls it, the algorithms alone, and MPI's own; all in place."""
    from mpidist.context_stack import parts_of  # older commits have none, and measure the other cases

    strategy = mpi.strategy(cross_device_ops=HierarchicalCopyAllReduce())
    levels, private = parts_of(strategy).group.levels, [work.empty()]
    node, nodes, fused, total = levels.within_node, levels.across_nodes, levels.fused, Reduction()

    def leader(array: Any) -> None:
        node.reduce(array, total, root=0)
        if node.rank == 0:
            nodes.all_reduce(array, total)
        node.broadcast(array, root=0)

    def hierarchical(array: Any) -> None:
        nodes.all_reduce(node.reduce_scatter(array, total), total)
        node.all_gather(array)

    functions: dict[str, Callable[[Any], object]] = {"leader": leader}
    functions |= {"hierarchical": hierarchical} if levels.is_even else {}
    functions |= {"two_shot": lambda array: fused.all_reduce(array, total)} if fused is not None else {}
    functions["ring"] = lambda array: ring_all_reduce(levels.world, array, total)

    def way(function: Callable[[Any], object]) -> Way:
        return Way(private, lambda at: function(private[at][0]), results=lambda _: private[0])

    ours = {"mpidist": way_of(strategy, work, private, private)}
    found = ours | {name: way(function) for name, function in functions.items()}
    return {**found, "raw in place": raw_ways(mpi, private)["raw in place"]}
