"""Variables: arrays that a strategy keeps on every rank, equal or read together."""

from mpidist.variables.placement import OncePerNode as OncePerNode
from mpidist.variables.placement import OnEachRank as OnEachRank
from mpidist.variables.placement import VariablePlacement as VariablePlacement
from mpidist.variables.variable import MirroredVariable as MirroredVariable
from mpidist.variables.variable import SyncOnReadVariable as SyncOnReadVariable
from mpidist.variables.variable import Variable as Variable
from mpidist.variables.variable import VariableAggregation as VariableAggregation
from mpidist.variables.variable import VariableSynchronization as VariableSynchronization

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
