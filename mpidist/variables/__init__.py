"""Variables: arrays that a strategy keeps on every rank."""

from mpidist.variables.array_protocol import ReadsAsArray
from mpidist.variables.assigning import require_no_effect
from mpidist.variables.casting import cast_for, is_python_number, native_of, require_mean
from mpidist.variables.mirrored import MirroredVariable
from mpidist.variables.placement import OncePerNode, OnEachRank, VariablePlacement
from mpidist.variables.rules import VariableAggregation, VariableSynchronization
from mpidist.variables.sparse_updates import AGGREGATED_CALLS, SparseUpdates, change_rows, checked_rows, host_indices
from mpidist.variables.sync_on_read import SyncOnReadVariable
from mpidist.variables.updating import update_copies
from mpidist.variables.variable import Variable

__all__ = [
    "AGGREGATED_CALLS",
    "MirroredVariable",
    "OnEachRank",
    "OncePerNode",
    "ReadsAsArray",
    "SparseUpdates",
    "SyncOnReadVariable",
    "Variable",
    "VariableAggregation",
    "VariablePlacement",
    "VariableSynchronization",
    "cast_for",
    "change_rows",
    "checked_rows",
    "host_indices",
    "is_python_number",
    "native_of",
    "require_mean",
    "require_no_effect",
    "update_copies",
]
