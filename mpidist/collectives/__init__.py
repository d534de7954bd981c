"""One collective call, from the user's values to a transport and back."""

from mpidist.collectives.all_gather import all_gather
from mpidist.collectives.arguments import (
    NO_CONTRIBUTIONS,
    HostOuts,
    Spec,
    axes_of,
    axes_text,
    axes_tuple,
    axis_of,
    flatten_contributions,
    name_call,
    native_dtype,
    per_replica_value,
    ranks_of,
    rebuild_results,
    replica_components,
    require_usable,
    require_values,
    result_outs,
    write_outs,
)
from mpidist.collectives.broadcast import broadcast
from mpidist.collectives.open_call import PendingResult, open_all_reduce, open_batch_reduce
from mpidist.collectives.plans import (
    Algorithm,
    Reduce,
    require_num_packs,
    require_tree_order,
    wire_and_result_dtypes,
)
from mpidist.collectives.reduce_scatter import reduce_scatter
from mpidist.collectives.reductions import Reductions
from mpidist.collectives.repeated_calls import key_of_repeated
from mpidist.collectives.symmetric_empty import SymmetricSpec, symmetric_empty

__all__ = [
    "NO_CONTRIBUTIONS",
    "Algorithm",
    "HostOuts",
    "PendingResult",
    "Reduce",
    "Reductions",
    "Spec",
    "SymmetricSpec",
    "all_gather",
    "axes_of",
    "axes_text",
    "axes_tuple",
    "axis_of",
    "broadcast",
    "flatten_contributions",
    "key_of_repeated",
    "name_call",
    "native_dtype",
    "open_all_reduce",
    "open_batch_reduce",
    "per_replica_value",
    "ranks_of",
    "rebuild_results",
    "reduce_scatter",
    "replica_components",
    "require_num_packs",
    "require_tree_order",
    "require_usable",
    "require_values",
    "result_outs",
    "symmetric_empty",
    "wire_and_result_dtypes",
    "write_outs",
]
