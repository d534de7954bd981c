"""What an all-reduce costs, by formula: with the algorithms of mpidist, and with those that mpidist lacks.

The letters in the formulas are those of `mpidist.transport.costs.cost_model`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from mpidist.transport.costs.cost_model import CostModel, Placement

__all__ = ["predict"]


def _mpi(model: CostModel, nbytes: int, placement: Placement) -> float:
    """`MPI_Allreduce` of all ranks: the better of recursive doubling, and halving within nodes, then across."""
    within = model.tree_seconds(nbytes, max(placement), model.mpi_seconds, model.mpi_bytes_per_second)
    halving = within + model.tree_seconds(nbytes, len(placement), model.link_seconds, model.link_bytes_per_second)
    return min(_recursive_doubling(model, nbytes, placement), halving)


def _ring(model: CostModel, nbytes: int, placement: Placement) -> float:
    """2 (P - 1) steps of n / P bytes each, all at the pace of the slowest link."""
    ranks = sum(placement)
    message = model.mpi_seconds + nbytes / ranks / model.mpi_bytes_per_second
    if len(placement) > 1:
        message = max(message, model.link_seconds + nbytes / ranks / model.link_bytes_per_second)
    return (ranks - 1) * (2 * message + nbytes / ranks / model.add_bytes_per_second)


def _recursive_doubling(model: CostModel, nbytes: int, placement: Placement) -> float:
    """Log G steps of n bytes within nodes, and log K across, in which the ranks of a node share its link."""
    within, across = (math.ceil(math.log2(count)) for count in (max(placement), len(placement)))
    shared = nbytes * max(placement) / model.link_bytes_per_second
    seconds = within * (model.mpi_seconds + nbytes / model.mpi_bytes_per_second)
    return seconds + across * (model.link_seconds + shared) + (within + across) * nbytes / model.add_bytes_per_second


_OTHERS: Final[dict[str, Callable[[CostModel, int, Placement], float]]] = {
    "mpi": _mpi,
    "ring": _ring,
    "recursive_doubling": _recursive_doubling,
}


def predict(algorithm: str, model: CostModel, nbytes: int, placement: Placement) -> float:
    """Predict the seconds of an all-reduce: by one of mpidist's algorithms, or by one that mpidist lacks."""
    other = _OTHERS.get(algorithm)
    return model.seconds(algorithm, nbytes, placement) if other is None else other(model, nbytes, placement)
