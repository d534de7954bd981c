"""One collective call, from the user's values to a transport and back."""

from mpidist.collectives.all_gather import all_gather as all_gather
from mpidist.collectives.arguments import axes_of as axes_of
from mpidist.collectives.arguments import axes_text as axes_text
from mpidist.collectives.arguments import require_values as require_values
from mpidist.collectives.arguments import whole_axes as whole_axes
from mpidist.collectives.arithmetic import wire_and_result_dtypes as wire_and_result_dtypes
from mpidist.collectives.broadcast import broadcast as broadcast
from mpidist.collectives.call import Algorithm as Algorithm
from mpidist.collectives.call import Reduce as Reduce
from mpidist.collectives.call import ReductionCall as ReductionCall
from mpidist.collectives.destinations import NOTHING_KEPT as NOTHING_KEPT
from mpidist.collectives.destinations import Kept as Kept
from mpidist.collectives.destinations import ValueWithDestinations as ValueWithDestinations
from mpidist.collectives.destinations import put_together as put_together
from mpidist.collectives.destinations import ranks_of as ranks_of
from mpidist.collectives.destinations import take_apart as take_apart
from mpidist.collectives.out_arrays import outs_like as outs_like
from mpidist.collectives.plan import require_num_packs as require_num_packs
from mpidist.collectives.reduce_scatter import reduce_scatter as reduce_scatter
from mpidist.collectives.reductions import PendingResult as PendingResult
from mpidist.collectives.reductions import Reductions as Reductions
from mpidist.collectives.signature import require_usable as require_usable

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
