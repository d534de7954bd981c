"""Variables: arrays that a strategy keeps on every rank."""

from mpidist.variables.placement import OncePerNode, OnEachRank, VariablePlacement
from mpidist.variables.variable import (
    MirroredVariable,
    SyncOnReadVariable,
    Variable,
    VariableAggregation,
    VariableSynchronization,
)

__all__ = [
    "MirroredVariable",
    "OnEachRank",
    "OncePerNode",
    "SyncOnReadVariable",
    "Variable",
    "VariableAggregation",
    "VariablePlacement",
    "VariableSynchronization",
]
