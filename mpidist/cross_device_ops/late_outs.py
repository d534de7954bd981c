"""The caller's arrays that take results which a rank computes once a call is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from mpidist.collectives.arguments.operands import Spec
from mpidist.collectives.arguments.out_arrays import result_outs, write_outs
from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.nest.structure import Structure
from mpidist.transport.agreement.agreement import Call

__all__ = ["LateOuts"]


@final
class LateOuts:
    """Arrays of the argument `out`, checked before the call, and written after it.

    Args:
        out: The nest of arrays; or the nests of all replicas of this rank, of which only the first one is written.
        structure: The form of the nest of values.
        specs: The results.
        ops: The ranks and replicas.
        has_mirrored: Whether some values are mirrored.

    Raises:
        InvalidArgumentError: If the arrays cannot take the results.
    """

    def __init__(
        self, out: Any, structure: Structure, specs: Sequence[Spec], ops: BoundOps, has_mirrored: bool = False
    ) -> None:
        self._group = ops.group
        self._outs = result_outs(out, structure, specs, ops.replicas, has_mirrored)

    def write(self, call: str, results: Sequence[Any]) -> None:
        """Write results. Local; collective if an array is a per-node one, which one rank of the node writes."""
        if not any(map(self._group.shared.is_per_node, self._outs)):
            write_outs(self._outs, results, self._group.shared)
            return
        what = f"writing of per-node arrays, of {call}"
        with self._group.call(Call(what, self._group.agreement.fingerprint(what, (), dict))):
            write_outs(self._outs, results, self._group.shared)
