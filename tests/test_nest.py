"""Nested lists, tuples and dicts: to a flat list, and back."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from mpidist import nest

pytestmark = pytest.mark.no_mpi


class Layer(NamedTuple):
    kernel: Any
    bias: Any


OldStyle = namedtuple("OldStyle", "x")

ROWS: list[tuple[Any, list[Any]]] = [
    (1, [1]),
    ("text", ["text"]),
    (None, [None]),
    ([], []),
    ((), []),
    ({}, []),
    ([1, [2, (3,)], {}], [1, 2, 3]),
    ({"b": 1, "a": 2}, [2, 1]),
    ({"a": {"y": 1, "x": 2}, "b": [3]}, [2, 1, 3]),
    (Layer([1, 2], {"k": 3}), [1, 2, 3]),
    (OldStyle(4), [4]),
    (OrderedDict([("z", 1), ("a", 2)]), [2, 1]),
    (MappingProxyType({"q": 1}), [1]),
    ({1: "int", "1": "str", (0, 1): "tuple"}, ["int", "str", "tuple"]),
    (Counter("aab"), [2, 1]),
    ([[[[[5]]]]], [5]),
]


@pytest.mark.parametrize(("value", "leaves"), ROWS)
def test_leaves_are_listed_with_dicts_by_sorted_keys(value: Any, leaves: list[Any]) -> None:
    assert nest.flatten(value)[0] == leaves


@pytest.mark.parametrize("value", [value for value, _ in ROWS])
def test_rebuild_undoes_flatten(value: Any) -> None:
    leaves, _ = nest.flatten(value)
    again = nest.rebuild(value, leaves)
    assert again == value
    assert type(again) is type(value)


def test_rebuild_undoes_flatten_of_a_defaultdict() -> None:
    value = defaultdict(list, {"b": [1], "a": [2]})
    leaves, _ = nest.flatten(value)
    again = nest.rebuild(value, leaves)
    assert again == value
    assert again.default_factory is list


def test_rebuild_keeps_the_order_of_keys() -> None:
    """The caller's order, though the leaves travel by sorted keys."""
    value = {"z": 1, "a": {"y": 2, "b": 3}}
    again = nest.rebuild(value, nest.flatten(value)[0])
    assert list(again) == ["z", "a"]
    assert list(again["a"]) == ["y", "b"]


def test_arrays_are_leaves_and_stay_themselves() -> None:
    array = np.zeros((2, 3))
    leaves, _ = nest.flatten({"w": array})
    assert leaves[0] is array
    assert nest.rebuild({"w": array}, leaves)["w"] is array


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 3, "a": 4}),
        (OrderedDict(a=1), {"a": 2}),
        ([1, (2, {})], [3, (4, {})]),
        (5, "five"),
        (Layer(1, 2), Layer(3, 4)),
    ],
)
def test_nests_of_one_form_have_one_structure(one: Any, other: Any) -> None:
    first, second = nest.flatten(one)[1], nest.flatten(other)[1]
    assert first == second
    assert hash(first) == hash(second)
    assert repr(first) == repr(second)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], (1, 2)),
        ([1, 2], [1, [2]]),
        ([1, [2]], [[1], 2]),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": [1]}),
        ({1: 0}, {"1": 0}),
        (Layer(1, 2), (1, 2)),
        ([], ()),
        ([], {}),
        (1, [1]),
        ([[], [1]], [[1], []]),
    ],
)
def test_nests_of_other_forms_have_other_structures(one: Any, other: Any) -> None:
    first, second = nest.flatten(one)[1], nest.flatten(other)[1]
    assert first != second
    assert repr(first) != repr(second)


def test_map_structure_changes_the_leaves_alone() -> None:
    value = {"b": Layer(1, [2, 3]), "a": ()}
    assert nest.map_structure(lambda leaf: 10 * leaf, value) == {"b": Layer(10, [20, 30]), "a": ()}
    assert value == {"b": Layer(1, [2, 3]), "a": ()}
    assert isinstance(nest.map_structure(str, value), Mapping)


def test_map_structure_of_a_leaf_is_a_call() -> None:
    assert nest.map_structure(lambda leaf: -leaf, 3) == -3
