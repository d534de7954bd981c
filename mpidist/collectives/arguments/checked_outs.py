"""Outs that were checked before, so that later calls with the same arrays skip the check."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import numpy as np

from mpidist import nest
from mpidist.collectives.arguments.operands import Spec
from mpidist.collectives.arguments.out_arrays import (
    check_outs,
    flatten_out,
    is_target,
    native_outs,
    owners_of,
    owns_data,
)
from mpidist.transport.agreement.fingerprint import fingerprint_of
from mpidist.transport.native.loading import native
from mpidist.transport.node_memory.symmetric import SharedArrays, places_digest

__all__ = ["CheckedOuts", "KnownOuts"]

_MAX_OUTS: Final = 256  # lists of outs of one plan: layers of one shape have one plan


@final
class CheckedOuts:
    """Outs that were checked, so that a later call with the same arrays skips the check.

    Attributes:
        per_node_digest: A digest of `per_node_indices`; 0 for none.
        places: The places of the arrays in shared memory; `None` if some array is private.
        are_targets: Whether results can be made in all of the arrays: see `target_arrays`.
        are_private: Whether surely no array lies in shared memory.
        are_of_numpy: Whether all are arrays of NumPy.
        owners: What owns the host memory of the arrays: see `owners_of`.
    """

    def __init__(
        self,
        outs: Sequence[Any],
        arrays: Sequence[Any],
        specs: Sequence[Spec],
        dtypes: Sequence[np.dtype[Any]],
        shared: SharedArrays,
        on_gone: Callable[[], None] | None = None,
    ) -> None:
        check_outs(outs, arrays, specs, dtypes)
        forget = None if on_gone is None else lambda _: on_gone()
        self.are_of_numpy = {*map(type, outs)} <= {np.ndarray}  # others are known as `DeviceCalls`, or not at all
        self._outs: list[Callable[[], Any]] = [weakref.ref(out, forget) for out in outs] if self.are_of_numpy else []
        self._forms = [(out.shape, out.dtype, out.flags.c_contiguous) for out in outs]
        self._nothing = [None] * len(outs)
        self.per_node_indices = [index for index, out in enumerate(outs) if shared.is_per_node(out)]
        self.per_node_digest = fingerprint_of(self.per_node_indices) if self.per_node_indices else 0
        self.places = shared.places(outs)
        self.places_digest = places_digest(self.places)
        self.are_targets = all(is_target(out, shared) for out in outs)
        self.are_private = all(map(shared.is_private, outs))
        self.owners = None if any(spec.device for spec in specs) else owners_of(outs)

    def matches(self, outs: Sequence[Any], arrays: Sequence[Any]) -> bool:
        """Whether these are the checked arrays, unchanged in shape, dtype and layout, and still writeable."""
        if not len(outs) == len(arrays) == len(self._outs):
            return False
        if native is not None and native.are_known(list(outs), list(arrays), self._outs, self._forms):
            return True
        for out, array, ref, form in zip(outs, arrays, self._outs, self._forms, strict=True):
            if ref() is not out or not out.flags.writeable:
                return False
            if out.flags.c_contiguous != form[2] or (out is not array and (out.shape, out.dtype) != form[:2]):
                return False
        return True

    def are_apart_from(self, arrays: Sequence[Any]) -> bool:
        """Whether arrays surely share no memory with the outs; quick."""
        is_known = self.owners is not None and set(map(type, arrays)) == {np.ndarray}
        return is_known and all(map(owns_data, arrays)) and self.owners.isdisjoint(map(id, arrays))  # type: ignore[union-attr]

    def are_unchanged(self, arrays: list[Any]) -> bool:
        """Whether a list has the checked arrays, unchanged; quick. `False` may also mean that there is no quick way."""
        if native is None or len(arrays) != len(self._outs):
            return False
        return bool(native.are_known(arrays, self._nothing, self._outs, self._forms))


@final
class KnownOuts:
    """The outs of earlier calls of one plan, which are not checked again. Arrays that are gone are forgotten."""

    def __init__(self, specs: Sequence[Spec], dtypes: Sequence[np.dtype[Any]] | None = None) -> None:
        self._specs, self._dtypes = specs, [spec.dtype for spec in specs] if dtypes is None else dtypes
        self._checked: dict[int, CheckedOuts] = {}  # by the id of the first out

    def find(self, outs: Sequence[Any], arrays: Sequence[Any]) -> CheckedOuts | None:
        """Return outs as an earlier call has checked them; `None` for other ones."""
        checked = self._checked.get(id(outs[0]) if outs else 0)
        return checked if checked is not None and checked.matches(outs, arrays) else None

    def open(
        self, out: Any, structure: nest.Structure, values: Sequence[Any], arrays: Sequence[Any], shared: SharedArrays
    ) -> tuple[list[Any], CheckedOuts]:
        """List the outs in a nest as native arrays, checked by this or an earlier call: see `native_outs`."""
        outs, form = nest.flatten(out)
        checked = self.find(outs, arrays) if form == structure else None
        if checked is None:
            outs = native_outs(flatten_out(structure, False, out), values, arrays)
            checked = self.check(outs, arrays, shared)
        return outs, checked

    def check(self, outs: Sequence[Any], arrays: Sequence[Any], shared: SharedArrays) -> CheckedOuts:
        """Check new outs, and cache them until one is gone."""
        key, weak = id(outs[0]) if outs else 0, weakref.ref(self)

        def forget() -> None:
            known = weak()
            if known is not None:
                known._checked.pop(key, None)

        if len(self._checked) >= _MAX_OUTS:
            self._checked.clear()
        checked = CheckedOuts(outs, arrays, self._specs, self._dtypes, shared, forget)
        if checked.are_of_numpy:
            # What is known refers to shared memory, which is given back when its arrays are gone.
            self._checked[key] = checked
        return checked
