"""The keys of a mapping: an order and labels that are the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from enum import Enum
from functools import lru_cache
from numbers import Number
from operator import itemgetter
from pathlib import PurePath
from typing import Any, Final

import numpy as np

__all__ = ["LABELLED", "PLAIN", "sort_keys", "label_of"]

# What structures call a mapping: one whose keys are compared themselves, and one whose keys are compared by labels.
PLAIN: Final = "mapping"
LABELLED: Final = "mapping by labels"

_SORTABLE: Final = (set[type](), {str}, {int})
# Classes of keys whose `repr` shows the whole value, and nothing of this process, such as an address.
_WRITTEN_BY_REPR: Final = (bytes, Number, type(None), np.generic, np.dtype, PurePath, date, time, timedelta)


def sort_keys(mapping: Mapping[Any, Any]) -> tuple[str, tuple[Any, ...], list[Any]]:
    """List the keys of a mapping in an order that is the same on every rank.

    Numbers, strings, dates, paths, members of enumerations, classes, and tuples, frozen sets and dataclasses of these
    are compared by value, variables by name and the order in which they were made; such keys are sorted. Ranks compare
    any other key by its class and its position among such keys: these keys are last, in the mapping's own order, which
    must be the same on all ranks. No label shows an address or an array's numbers.

    Returns:
        `PLAIN` or `LABELLED`; the keys or labels that ranks compare; and the keys.
    """
    keys = list(mapping)
    kinds = set(map(type, keys))
    if kinds in _SORTABLE:
        keys.sort()
        return PLAIN, tuple(keys), keys
    if all(issubclass(kind, str) and not issubclass(kind, Enum) for kind in kinds):  # np.str_("a") is equal to "a"
        of_texts = {str.__str__(key): key for key in keys}
        if len(of_texts) == len(keys):
            texts = sorted(of_texts)
            return PLAIN, tuple(texts), [of_texts[text] for text in texts]
    labelled: list[tuple[str, Any]] = []
    objects: list[tuple[str, Any]] = []
    for key in keys:
        label = label_of(key)
        if label is None:
            objects.append((f"{_name_of(type(key))} {len(objects)}", key))
        else:
            labelled.append((label, key))
    labelled.sort(key=itemgetter(0))
    labelled += objects
    labels = [label for label, _ in labelled]
    if len(set(labels)) < len(labels):  # variables of two strategies: labels must be unique
        labels = [f"{label} {index}" for index, label in enumerate(labels)]
    return LABELLED, tuple(labels), [key for _, key in labelled]


def label_of(key: Any) -> str | None:
    """Return text that is the same on all ranks for equal keys; `None` for a key that only its address identifies."""
    return _labeller(type(key))(key)  # type: ignore[arg-type]  # every class has a hash


@lru_cache(1024)
def _labeller(kind: type) -> Callable[[Any], str | None]:
    """Return the function that labels keys of a class."""
    if issubclass(kind, Enum):
        return lambda key: f"{kind.__qualname__}.{key.name}"
    if issubclass(kind, str):
        return str.__repr__  # a subclass may have a `__repr__` of its own
    if issubclass(kind, _WRITTEN_BY_REPR):
        return repr
    if issubclass(kind, (tuple, frozenset)):
        return _label_of_items
    if issubclass(kind, type):
        return _name_of
    if hasattr(kind, "aggregation"):
        return lambda key: getattr(key, "_what", None) or f"variable {key.name!r}"
    if is_dataclass(kind):
        names = [field.name for field in fields(kind)]
        return lambda key: _label_of_items([getattr(key, name) for name in names], kind.__qualname__)
    return lambda key: None


def _label_of_items(key: Any, name: str = "") -> str | None:
    labels = [label for label in map(label_of, key) if label is not None]
    if len(labels) < len(key):
        return None
    if isinstance(key, frozenset):
        labels.sort()
    return f"{name or type(key).__name__}({', '.join(labels)})"


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
