"""Nested lists, tuples and dicts of values: to a flat list, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from typing import Any, Final

import numpy as np

__all__ = ["LEAF", "Structure", "flatten", "map_structure", "rebuild"]

# What a nest looks like without its leaves: hashable, and the same on every rank that passed a nest alike.
Structure = tuple[Any, ...]
LEAF: Final[Structure] = ("leaf",)
# Told to be leaves by their type alone, so that lists of thousands of arrays need no walk.
_ARRAYS: Final = ({np.ndarray}, set[type]())


def flatten(nest: Any) -> tuple[list[Any], Structure]:
    """List the leaves of a nest.

    Lists, tuples, named tuples and mappings are opened; everything else is a leaf. A mapping is walked by sorted
    keys, so that ranks which filled it in another order agree.

    Args:
        nest: The nested value.

    Returns:
        The leaves, and the structure that compares equal for nests of the same form.
    """
    if type(nest) is np.ndarray or not isinstance(nest, (list, tuple, Mapping)):
        return [nest], LEAF
    leaves: list[Any] = []
    return leaves, _walk(nest, leaves)


def _walk(nest: Any, leaves: list[Any]) -> Structure:
    if isinstance(nest, (list, tuple)):
        if set(map(type, nest)) in _ARRAYS:
            leaves += nest
            return type(nest).__name__, len(nest)
        parts = [_walk(item, leaves) for item in nest]
        if all(part is LEAF for part in parts):
            return type(nest).__name__, len(nest)
        return (type(nest).__name__, *parts)
    if isinstance(nest, Mapping):
        # A mapping's class is the rank's own affair: `dict` and `OrderedDict` hold the same values.
        keys = _sorted_keys(nest)
        return ("mapping", *[(repr(key), _walk(nest[key], leaves)) for key in keys])
    leaves.append(nest)
    return LEAF


def rebuild(like: Any, leaves: list[Any]) -> Any:
    """Put leaves in the places of another nest's leaves.

    Args:
        like: A nest with as many leaves, as `flatten` took it.
        leaves: The new leaves, in `flatten`'s order.

    Returns:
        A nest of the same form and the same classes, with `like`'s order of keys.
    """
    if type(like) is np.ndarray or not isinstance(like, (list, tuple, Mapping)):
        return leaves[0]
    if type(like) is list and len(like) == len(leaves) and set(map(type, like)) in _ARRAYS:
        return list(leaves)
    return _fill(like, iter(leaves).__next__)


def map_structure(function: Callable[[Any], Any], nest: Any) -> Any:
    """Apply a function to every leaf of a nest and keep its form."""
    leaves, _ = flatten(nest)
    return rebuild(nest, [function(leaf) for leaf in leaves])


def _fill(like: Any, take: Callable[[], Any]) -> Any:
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(*[_fill(item, take) for item in like])
    if isinstance(like, (list, tuple)) and set(map(type, like)) in _ARRAYS:
        return type(like)([take() for _ in like])
    if isinstance(like, (list, tuple)):
        return type(like)([_fill(item, take) for item in like])
    if isinstance(like, Mapping):
        filled = {key: _fill(like[key], take) for key in _sorted_keys(like)}
        in_order = {key: filled[key] for key in like}
        if type(like) is dict:
            return in_order
        if isinstance(like, MutableMapping):  # a copy keeps what its class holds beside the items: a default, say
            again = copy(like)
            for key, value in in_order.items():
                again[key] = value
            return again
        return type(like)(in_order)  # type: ignore[call-arg]
    return take()


def _sorted_keys(mapping: Mapping[Any, Any]) -> list[Any]:
    return sorted(mapping, key=lambda key: (type(key).__name__, repr(key)))
