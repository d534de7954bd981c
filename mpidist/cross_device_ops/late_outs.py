"""The caller's arrays that take results which a rank computes once a call is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from mpidist.collectives.arguments.operands import Spec
from mpidist.collectives.arguments.out_arrays import result_outs, write_outs
from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.nest.structure import Structure
from mpidist.transport.agreement.agreement import Call
from mpidist.transport.arrays import wait_for_writes

__all__ = ["LateOuts"]


@final
class LateOuts:
    """The first replica's arrays of `out`: checked before the call, and written after it."""

    def __init__(
        self, out: Any, structure: Structure, specs: Sequence[Spec], ops: BoundOps, has_mirrored: bool = False
    ) -> None:
        self._group = ops.group
        self._outs = result_outs(out, structure, specs, ops.replicas, has_mirrored)

    def name(self, call: str) -> str:
        """Name a call so that ranks compare which of its outs are per-node arrays. Local."""
        shared = [at for at, out in enumerate(self._outs) if self._group.shared.is_per_node(out)]
        return f"{call}, with the per-node outs {shared}" if shared else call

    def write(self, call: str, results: Sequence[Any]) -> None:
        """Write results. Local; collective if an array is a per-node one, which one rank of the node writes."""
        if not any(map(self._group.shared.is_per_node, self._outs)):
            write_outs(self._outs, results, self._group.shared)
        else:
            what = f"writing of per-node arrays, of {call}"
            with self._group.call(Call(what, self._group.agreement.fingerprint(what, (), dict))):
                write_outs(self._outs, results, self._group.shared)
        wait_for_writes(self._outs)
