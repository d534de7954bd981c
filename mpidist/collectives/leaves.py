"""The leaves of a nest that a call is given: what cannot be combined is named by its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from mpidist import nest
from mpidist.collectives.mirrored import Kept
from mpidist.errors import InvalidArgumentError
from mpidist.nest import form_text, paths
from mpidist.transport import arrays
from mpidist.values import DistributedValues, local

__all__ = ["outs_like", "require_values"]

_TAKEN: Final[set[type]] = {np.ndarray, float, int}  # classes whose values some library owns


def require_values(leaves: Sequence[Any], value: Any) -> None:
    """Refuse leaves that are neither arrays nor numbers, and say where they are. Local.

    Args:
        leaves: Leaves of `value`.
        value: The nest.

    Raises:
        TypeError: If one of them is something else.
    """
    if type(value) is np.ndarray or _TAKEN.issuperset(map(type, leaves)):
        return
    for leaf in leaves:
        if type(leaf) in _TAKEN:
            continue
        try:
            arrays.library_of(local(leaf))
        except TypeError as error:
            raise _refusal(leaf, _path_of(leaf, value), str(error)) from None
        if not isinstance(leaf, DistributedValues):
            _TAKEN.add(type(leaf))


def outs_like(structure: nest.Structure, kept: Kept, out: Any) -> list[Any]:
    """List the leaves of a nest that takes results. Local.

    Raises:
        InvalidArgumentError: If its form is not that of the values, `structure`, or some of them are mirrored.
    """
    outs, form = nest.flatten(out)
    if kept:
        raise InvalidArgumentError(
            "out takes what is reduced, and mirrored values are not: leave them out of both nests"
        )
    if form != structure:
        raise InvalidArgumentError(
            f"out must be a nest of the same form as the value, {form_text(structure)}, and is {form_text(form)}"
        )
    return outs


def _path_of(leaf: Any, value: Any) -> str:
    leaves, structure = nest.flatten(value)
    return next(path for path, one in zip(paths(structure), leaves, strict=True) if one is leaf)


def _refusal(leaf: Any, path: str, text: str) -> TypeError:
    if local(leaf) is not None:
        return TypeError(f"{path}: {text}" if path else text)
    if path:
        return TypeError(
            f"{path} is None, which is neither an array nor a number: leave the place out, on all ranks, or pass zeros"
        )
    return TypeError(
        "cannot take None, which a function without `return` gives, for example; needed an array, a number, or a nest "
        "of them"
    )
