"""Nests of values, such as lists, dicts and dataclasses: flattened to a list of leaves, and rebuilt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy, deepcopy
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import Any, Final

import numpy as np

from mpidist.nest import keys as nest_keys

__all__ = ["LEAF", "Structure", "flatten", "map_structure", "rebuild"]

# The form of a nest without its leaves: hashable, and equal on ranks whose nests have the same form. Either `LEAF`, or
# a class name, the steps (number of children, or their names), and the children's structures unless all are leaves.
Structure = tuple[Any, ...]
LEAF: Final[Structure] = ("leaf",)

# Classes whose values are leaves, so that a list of thousands of arrays needs no walk. Classes of arrays are added.
_LEAVES: Final[set[type]] = {np.ndarray, bool, int, float, complex, str, bytes, type(None)}
_ARRAY_PROTOCOLS: Final = ("__array__", "__dlpack__", "__cuda_array_interface__")

# One level of a nest: class name, steps, children, and a function that builds such a nest of other children.
_Opened = tuple[str, Any, Sequence[Any], Callable[[list[Any]], Any]]
_Opener = Callable[[Any], _Opened | None]


def flatten(nest: Any) -> tuple[list[Any], Structure]:
    """List the leaves of a nest, and return them with the structure, equal for nests of the same form.

    Lists, tuples, named tuples, mappings, dataclasses (without fields that have `metadata={"static": True}`), classes
    of attrs, and classes registered with `jax.tree_util` are opened. Everything else is a leaf, also `None`, and an
    object inside itself. A mapping is walked in the order of `nest_keys.sort_keys`, so that ranks which filled it in
    another order agree.
    """
    if type(nest) in _LEAVES:
        return [nest], LEAF
    if type(nest) is list and _LEAVES.issuperset(map(type, nest)):
        return list(nest), (list.__name__, len(nest))  # the most frequent nest
    leaves: list[Any] = []
    return leaves, _walk(nest, leaves, ())


def rebuild(like: Any, leaves: Sequence[Any]) -> Any:
    """Build a nest of the form and classes of another one, with new leaves in the order of `flatten`.

    Mappings keep `like`'s order of keys. Dataclasses are copied: neither `__init__` nor `__post_init__` runs.
    """
    if type(like) in _LEAVES:
        return leaves[0]
    if type(like) is list and len(like) == len(leaves) and _LEAVES.issuperset(map(type, like)):
        return list(leaves)  # the most frequent nest
    return _fill(like, iter(leaves), ())


def map_structure(function: Callable[[Any], Any], nest: Any) -> Any:
    """Apply a function to every leaf of a nest and keep its form."""
    leaves, _ = flatten(nest)
    return rebuild(nest, [function(leaf) for leaf in leaves])


def _walk(nest: Any, leaves: list[Any], above: tuple[int, ...]) -> Structure:
    opened = _open(nest, above)
    if opened is None:
        leaves.append(nest)
        return LEAF
    name, steps, children, _ = opened
    if _LEAVES.issuperset(map(type, children)):
        leaves += children
        return name, steps
    if children is not nest:
        above = (*above, id(nest))
    parts = [_walk(child, leaves, above) for child in children]
    return (name, steps) if all(part is LEAF for part in parts) else (name, steps, *parts)


def _fill(like: Any, leaves: Iterator[Any], above: tuple[int, ...]) -> Any:
    opened = _open(like, above)
    if opened is None:
        return next(leaves)
    _, _, children, build = opened
    if _LEAVES.issuperset(map(type, children)):
        return build(list(islice(leaves, len(children))))
    if children is not like:
        above = (*above, id(like))
    return build([_fill(child, leaves, above) for child in children])


def _open(nest: Any, above: tuple[int, ...]) -> _Opened | None:
    """Open one level of a nest; `None` for a leaf. `above`: ids of the mappings and objects that contain `nest`."""
    kind = type(nest)
    if kind in _LEAVES or (above and id(nest) in above):
        return None
    return _opener(kind)(nest)  # type: ignore[arg-type]  # every class has a hash


@lru_cache(1024)
def _opener(kind: type) -> _Opener:
    """Return the function that opens values of a class."""
    name = kind.__name__
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        steps = _steps(kind._fields)
        return lambda nest: (name, steps, nest, lambda children: _made(kind, *children))
    if issubclass(kind, (list, tuple)):
        make = kind if kind in (list, tuple) else partial(_made, kind)
        return lambda nest: (name, len(nest), nest, make)
    if issubclass(kind, dict):
        return _open_mapping
    if issubclass(kind, Mapping):
        return partial(_open_registered, _open_mapping)
    if hasattr(kind, "__next__"):  # it can be read once; JAX would warn of it
        return _open_leaf
    if any(hasattr(kind, protocol) for protocol in _ARRAY_PROTOCOLS):
        _LEAVES.add(kind)
        return _open_leaf
    names = _field_names(kind)
    if names is None:
        return partial(_open_registered, _open_leaf)
    return partial(_open_registered, partial(_open_fields, names, _steps(names)))


def _open_leaf(leaf: Any) -> None:
    """Return `None`, as for every leaf."""


def _open_mapping(nest: Any) -> _Opened:
    # Ranks may differ in the class of a mapping: `dict` and `OrderedDict` hold the same values.
    name, steps, keys = nest_keys.sort_keys(nest)
    return name, steps, [nest[key] for key in keys], partial(_mapping_of, nest, keys)


def _open_fields(names: tuple[str, ...], steps: tuple[str, ...], nest: Any) -> _Opened:
    return type(nest).__name__, steps, [getattr(nest, name) for name in names], partial(_with_fields, names, nest)


def _open_registered(otherwise: _Opener, nest: Any) -> _Opened | None:
    """Open a value whose class is registered with JAX, if the program has imported JAX."""
    tree_util = sys.modules.get("jax.tree_util")
    if tree_util is None:
        return otherwise(nest)
    branches, treedef = tree_util.tree_flatten_with_path(nest, is_leaf=lambda part: part is not nest)
    data = treedef.node_data()
    if data is None:
        return otherwise(nest)
    name, steps = type(nest).__name__, _registered_steps([path[0] for path, _ in branches])
    if isinstance(steps, int):  # then keys, if there are any, are in the auxiliary data of JAX's node
        label = nest_keys.label_of(data[1])
        name = name if label is None else f"{name} of {label}"
    return name, steps, [child for _, child in branches], treedef.unflatten


def _registered_steps(entries: Sequence[Any]) -> int | tuple[str, ...]:
    """Name the steps of a registered class as JAX does; count them if a step has no name, or a key without a label."""
    for entry in entries:
        key = getattr(entry, "name", getattr(entry, "key", getattr(entry, "idx", None)))
        if type(entry).__name__ == "FlattenedIndexKey" or nest_keys.label_of(key) is None:
            return len(entries)
    return tuple(map(str, entries))


def _field_names(kind: type) -> tuple[str, ...] | None:
    """Name the fields that are children in a dataclass or a class of attrs; `None` for any other class."""
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind) if not field.metadata.get("static"))
    if hasattr(kind, "__attrs_attrs__"):
        return tuple(field.name for field in kind.__attrs_attrs__ if not field.metadata.get("static"))
    return None


def _steps(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(f".{name}" for name in names)


def _with_fields(names: Sequence[str], like: Any, children: list[Any]) -> Any:
    copied = copy(like)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(copied, name, child)  # frozen classes, too
    return copied


def _mapping_of(like: Mapping[Any, Any], keys: Sequence[Any], children: list[Any]) -> Any:
    filled = dict(zip(keys, children, strict=True))
    in_order = {key: filled[key] for key in like}
    if type(like) is dict:
        return in_order
    if isinstance(like, MutableMapping):  # a copy keeps attributes such as the factory of a `defaultdict`
        # A shallow copy of another class than `dict` may share what holds the items, and `like` would change.
        kept = {id(one): one for item in like.items() for one in item}
        try:
            copied = copy(like) if isinstance(like, dict) else deepcopy(like, kept)
        except TypeError:  # it holds a lock, or a file
            copied = copy(like)
        for key, value in in_order.items():
            copied[key] = value
        return copied
    return _made(type(like), in_order)


def _made(kind: Callable[..., Any], *arguments: Any) -> Any:
    """Make a nest with the constructor of its class, which may take other arguments than the nest's children."""
    try:
        return kind(*arguments)
    except Exception as problem:
        raise TypeError(
            f"a {kind.__name__} cannot be made of new leaves: {problem}; pass a plain tuple, list or dict in its place"
        ) from problem
