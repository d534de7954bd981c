"""Variables: arrays that a strategy keeps on every rank."""

from mpidist.variables.mirrored import MirroredVariable
from mpidist.variables.placement import OncePerNode, OnEachRank, VariablePlacement
from mpidist.variables.rules import VariableAggregation, VariableSynchronization
from mpidist.variables.sync_on_read import SyncOnReadVariable
from mpidist.variables.updating import update_copies
from mpidist.variables.variable import Variable

__all__ = [
    "MirroredVariable",
    "OnEachRank",
    "OncePerNode",
    "SyncOnReadVariable",
    "Variable",
    "VariableAggregation",
    "VariablePlacement",
    "VariableSynchronization",
    "update_copies",
]
