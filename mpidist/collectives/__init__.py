"""One collective call, from the user's values to a transport and back."""

from mpidist.collectives.all_gather import all_gather
from mpidist.collectives.arguments import (
    NO_CONTRIBUTIONS,
    NO_MIRRORED,
    MirroredLeaves,
    ValueWithDestinations,
    axes_of,
    axes_text,
    axes_tuple,
    axis_of,
    flatten_contributions,
    flatten_out,
    native_dtype,
    ranks_of,
    rebuild_results,
    require_usable,
    require_values,
)
from mpidist.collectives.arithmetic import wire_and_result_dtypes
from mpidist.collectives.broadcast import broadcast
from mpidist.collectives.call import Algorithm, Reduce, ReductionCall
from mpidist.collectives.local_sums import require_tree_order
from mpidist.collectives.plan import require_num_packs
from mpidist.collectives.reduce_scatter import reduce_scatter
from mpidist.collectives.reductions import PendingResult, Reductions

__all__ = [
    "Algorithm",
    "MirroredLeaves",
    "NO_CONTRIBUTIONS",
    "NO_MIRRORED",
    "PendingResult",
    "Reduce",
    "ReductionCall",
    "Reductions",
    "ValueWithDestinations",
    "all_gather",
    "axes_of",
    "axes_text",
    "axis_of",
    "broadcast",
    "native_dtype",
    "flatten_out",
    "rebuild_results",
    "ranks_of",
    "reduce_scatter",
    "require_num_packs",
    "require_tree_order",
    "require_usable",
    "require_values",
    "flatten_contributions",
    "axes_tuple",
    "wire_and_result_dtypes",
]
