"""A variable whose copies may differ: it is aggregated when it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from mpidist import context_stack
from mpidist.context_stack import parts_of
from mpidist.options import ReduceOp
from mpidist.transport import arrays
from mpidist.transport.devices import on_device
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.values import Contributions
from mpidist.variables.assigning import store
from mpidist.variables.rules import VariableAggregation, VariableSynchronization
from mpidist.variables.variable import Variable

__all__ = ["SyncOnReadVariable"]


@final
class SyncOnReadVariable(Variable, synchronization=VariableSynchronization.ON_READ):
    """A variable whose copies may differ. Reading it in cross-replica context aggregates them: a metric, say.

    There is a copy for each replica, on the replica's device, also where a rank carries several.
    """

    _is_trainable_by_default = False

    def is_mirrored_over(self, group: SyncGroup) -> bool:
        """Return False: copies may differ."""
        return False

    def _place(self, value: Any) -> Sequence[Any]:
        copies, devices = [value], parts_of(self._strategy).replicas.devices
        for at in range(1, 1 if self._replicas is None else self._replicas.num_here):
            with on_device(devices, at):
                copies.append(arrays.copied_here(value))
        return copies

    def _store(self, at: int, array: Any, ufunc: np.ufunc | None) -> None:
        """Write the copy of a replica of this rank, on the replica's device."""
        with on_device(parts_of(self._strategy).replicas.devices, at):
            store(self._copies[at], arrays.on_current_device(array), ufunc)

    def _here(self) -> Any:
        entry = context_stack.innermost()
        if self._replicas is None or entry is None or entry.strategy is not self._strategy:
            return self._value
        if entry.replica_context is None:
            return self._copies[entry.copy_number]
        return self._copies[self._replicas.ids_here.index(entry.replica_context.replica_id_in_sync_group)]

    def _read_view(self) -> Any:
        """Return this replica's copy in `Strategy.run`; elsewhere the aggregate of all copies, which is collective."""
        entry = context_stack.innermost()
        if (entry is not None and (entry.replica_context is not None or entry.is_update)) or context_stack.is_default(
            self._strategy
        ):
            return self._local_view if self._replicas is None else self.local_value()
        ops = parts_of(self._strategy).cross_device_ops
        self._require_aggregation("read")
        call = f"reading of {self._what}"
        if self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return ops.broadcast(self._value, "all", call=call)
        contribution = self._value if self._replicas is None else Contributions(self._copies)
        return ops.all_reduce(ReduceOp[self._aggregation.name], contribution, call=call)

    def _write(self, value: Any, ufunc: np.ufunc | None) -> None:
        store(self._value if self._replicas is None else self._here(), self._cast(value), ufunc)

    def _assign_across_replicas(self, value: Any, ufunc: np.ufunc | None) -> None:
        if not context_stack.is_default(self._strategy):
            self._require_aggregation("assigned")
            if self._aggregation is VariableAggregation.SUM:
                if ufunc is not None:
                    raise ValueError(
                        f"variable {self._name!r} has aggregation SUM: in cross-replica context it can be assigned, "
                        "and not added to or subtracted from"
                    )
                self._store_shares(self._cast(value))
                return
        array = self._cast(value)
        for at in range(len(self._copies)):
            self._store(at, array, ufunc)

    def _store_shares(self, total: Any) -> None:
        """Store each replica's part of a sum: equal parts, with the remainder in replica 0's part.

        They are multiples of the last place of the total, or of a complex one's parts: no sum of them is rounded.
        """
        count = self._strategy.num_replicas_in_sync
        if total.dtype.kind in "biu":
            wide = total.astype(np.uint64 if total.dtype.kind == "u" else np.int64)
            rest = np.fmod(wide, wide.dtype.type(count))
            share = (wide - rest) // wide.dtype.type(count)
        else:
            total = np.asarray(total) if isinstance(total, np.generic) else total
            host = arrays.on_host(total)  # where all dtypes have `nextafter`
            parts = np.ascontiguousarray(host).reshape(-1).view(host.real.dtype)  # a complex number has two
            rest, is_finite = np.zeros_like(parts), np.isfinite(parts)
            np.copyto(rest, parts, where=is_finite)
            with np.errstate(all="ignore"):  # of infinite numbers; and float8 has NaN in place of too large units
                units = (parts - np.nextafter(parts, np.zeros_like(parts))) * parts.dtype.type(count)
                np.fmod(parts, units, out=rest, where=is_finite & (np.abs(units) > 0))
            share, rest = (its.view(host.dtype).reshape(host.shape) for its in ((parts - rest) / count, rest))
            if arrays.is_device(total):
                share, rest = arrays.to_device(share), arrays.to_device(rest)
        has_first = parts_of(self._strategy).replicas.has_first
        for at in range(len(self._copies)):
            self._store(at, share + rest if at == 0 and has_first else share, None)

    def _scatter(self, call: str, delta: Any) -> None:
        raise NotImplementedError(
            f"{call} is not supported by variable {self._name!r}, which is ON_READ: read the variable, change the "
            "array, and assign the array"
        )

    def _require_aggregation(self, what: str) -> None:
        if self._aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"variable {self._name!r} with aggregation NONE cannot be {what} in cross-replica context: could not "
                "convert NONE to a ReduceOp. Choose SUM, MEAN or ONLY_FIRST_REPLICA, or use local_value()"
            )
