"""One collective call, from the user's values to a transport and back."""

from mpidist.collectives.all_gather import all_gather as all_gather
from mpidist.collectives.axes import axes_of as axes_of
from mpidist.collectives.axes import axes_text as axes_text
from mpidist.collectives.axes import whole_axes as whole_axes
from mpidist.collectives.broadcast import broadcast as broadcast
from mpidist.collectives.destinations import ranks_of as ranks_of
from mpidist.collectives.leaves import outs_like as outs_like
from mpidist.collectives.leaves import require_values as require_values
from mpidist.collectives.mirrored import NOTHING_KEPT as NOTHING_KEPT
from mpidist.collectives.mirrored import Kept as Kept
from mpidist.collectives.mirrored import put_together as put_together
from mpidist.collectives.mirrored import take_apart as take_apart
from mpidist.collectives.packs import require_num_packs as require_num_packs
from mpidist.collectives.pairs import Pair as Pair
from mpidist.collectives.pairs import as_pair as as_pair
from mpidist.collectives.pending_result import PendingResult as PendingResult
from mpidist.collectives.plan import wire_and_result_dtypes as wire_and_result_dtypes
from mpidist.collectives.raise_together import ErrorReport as ErrorReport
from mpidist.collectives.raise_together import raise_reported as raise_reported
from mpidist.collectives.raise_together import raise_together as raise_together
from mpidist.collectives.reduce_scatter import reduce_scatter as reduce_scatter
from mpidist.collectives.reduction_call import BatchReducer as BatchReducer
from mpidist.collectives.signature import Request as Request
from mpidist.collectives.signature import require_usable as require_usable

__all__ = [
    "BatchReducer",
    "ErrorReport",
    "Kept",
    "NOTHING_KEPT",
    "Pair",
    "PendingResult",
    "Request",
    "all_gather",
    "as_pair",
    "axes_of",
    "axes_text",
    "broadcast",
    "outs_like",
    "put_together",
    "raise_reported",
    "raise_together",
    "ranks_of",
    "reduce_scatter",
    "require_num_packs",
    "require_usable",
    "require_values",
    "take_apart",
    "whole_axes",
    "wire_and_result_dtypes",
]
