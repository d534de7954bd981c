"""One collective call, from the user's values to a transport and back."""

from mpidist.collectives.all_gather import all_gather
from mpidist.collectives.arguments import axes_of, axes_text, native_dtype, require_values, whole_axes
from mpidist.collectives.arithmetic import wire_and_result_dtypes
from mpidist.collectives.broadcast import broadcast
from mpidist.collectives.call import Algorithm, Reduce, ReductionCall
from mpidist.collectives.destinations import (
    NOTHING_KEPT,
    Kept,
    ValueWithDestinations,
    put_together,
    ranks_of,
    take_apart,
)
from mpidist.collectives.out_arrays import outs_like
from mpidist.collectives.plan import require_num_packs
from mpidist.collectives.reduce_scatter import reduce_scatter
from mpidist.collectives.reductions import PendingResult, Reductions
from mpidist.collectives.signature import require_usable

__all__ = [
    "Algorithm",
    "Kept",
    "NOTHING_KEPT",
    "PendingResult",
    "Reduce",
    "ReductionCall",
    "Reductions",
    "ValueWithDestinations",
    "all_gather",
    "axes_of",
    "axes_text",
    "broadcast",
    "native_dtype",
    "outs_like",
    "put_together",
    "ranks_of",
    "reduce_scatter",
    "require_num_packs",
    "require_usable",
    "require_values",
    "take_apart",
    "whole_axes",
    "wire_and_result_dtypes",
]
