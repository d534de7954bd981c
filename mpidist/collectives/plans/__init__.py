"""What equal calls have in common: their arithmetic, how their arrays are cut, and how calls are carried out."""

from mpidist.collectives.plans.arithmetic import Arithmetic, OverflowReport, result_dtypes, wire_and_result_dtypes
from mpidist.collectives.plans.call import Algorithm, Execution, Plan, Reduce, ReductionCall
from mpidist.collectives.plans.fused_execution import FusedExecution
from mpidist.collectives.plans.local_sums import LocalSums, open_all_replicas, require_like_operands, require_tree_order
from mpidist.collectives.plans.packed_execution import PackedExecution, PackedPart, reduce_to_ranks
from mpidist.collectives.plans.plan import (
    make_fused_lists,
    make_messages,
    require_num_packs,
)
from mpidist.collectives.plans.repeated_reductions import RepeatedReduction
from mpidist.collectives.plans.rows_execution import RowList, RowsExecution

__all__ = [
    "Algorithm",
    "Arithmetic",
    "Execution",
    "FusedExecution",
    "LocalSums",
    "RepeatedReduction",
    "OverflowReport",
    "PackedExecution",
    "PackedPart",
    "Plan",
    "Reduce",
    "ReductionCall",
    "RowList",
    "RowsExecution",
    "make_fused_lists",
    "make_messages",
    "open_all_replicas",
    "reduce_to_ranks",
    "require_like_operands",
    "require_num_packs",
    "require_tree_order",
    "result_dtypes",
    "wire_and_result_dtypes",
]
