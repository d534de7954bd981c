"""Nested lists, tuples, dicts and objects: to a flat list, and back; where a leaf is, in words."""

import enum
import sys
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from fractions import Fraction
from itertools import product
from pathlib import PurePosixPath
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import mpidist
from mpidist import nest
from mpidist.nest import decode, encode
from mpidist.nest.text import form_text, paths

pytestmark = pytest.mark.no_mpi


class Layer(NamedTuple):
    kernel: Any
    bias: Any


OldStyle = namedtuple("OldStyle", "x")


@dataclass
class Dense:
    kernel: Any
    bias: Any
    name: str = field(default="dense", metadata={"static": True})


@dataclass(frozen=True)
class Frozen:
    w: Any


@dataclass
class Branch:
    value: Any
    parent: Any = None


class WithAttrs:
    """As attrs makes them: the list of fields is what tells."""

    __attrs_attrs__ = (SimpleNamespace(name="a", metadata={}), SimpleNamespace(name="b", metadata={"static": True}))

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __eq__(self, other):
        return isinstance(other, WithAttrs) and (self.a, self.b) == (other.a, other.b)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Place:
    layer: int
    part: str


class Loud(str):
    """A text that ranks would write differently."""

    def __repr__(self):
        return f"Loud at {id(self)}"


class Key:
    """An object that ranks can only tell by its place. Whoever prints or compares one makes a test fail."""

    def __repr__(self):
        raise AssertionError("printed")

    def __eq__(self, other):
        raise AssertionError("compared")

    __hash__ = object.__hash__


ROWS = [
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
    ({1: "int", "1": "str", (0, 1): "tuple"}, ["str", "int", "tuple"]),
    ({10: "b", 9: "a"}, ["a", "b"]),
    (Counter("aab"), [2, 1]),
    ([[[[[5]]]]], [5]),
    (Dense([1], {"a": 2}), [1, 2]),
    ([Frozen(Dense(1, 2)), 3], [1, 2, 3]),
    (WithAttrs([1, 2], "static"), [1, 2]),
]


@pytest.mark.parametrize(("value", "leaves"), ROWS)
def test_leaves_are_listed_with_dicts_by_sorted_keys_and_rebuild_undoes_it(value, leaves):
    assert nest.flatten(value)[0] == leaves
    again = nest.rebuild(value, leaves)
    assert again == value
    assert type(again) is type(value)


def test_rebuild_keeps_the_order_of_keys_and_the_default():
    """The caller's order, though the leaves travel by sorted keys."""
    value = defaultdict(list, {"z": [1], "a": {"y": 2, "b": 3}})
    again = nest.rebuild(value, nest.flatten(value)[0])
    assert again == value
    assert again.default_factory is list
    assert list(again) == ["z", "a"]
    assert list(again["a"]) == ["y", "b"]


def test_arrays_are_leaves_and_stay_themselves():
    array = np.zeros((2, 3))
    leaves, _ = nest.flatten({"w": array})
    assert leaves[0] is array
    assert nest.rebuild({"w": array}, leaves)["w"] is array


def test_nests_of_one_form_have_one_structure():
    pairs = [
        ({"a": 1, "b": 2}, {"b": 3, "a": 4}),
        (OrderedDict(a=1), {"a": 2}),
        ([1, (2, {})], [3, (4, {})]),
        (Layer(1, 2), Layer(3, 4)),
    ]
    for one, other in pairs:
        first, second = nest.flatten(one)[1], nest.flatten(other)[1]
        assert first == second
        assert hash(first) == hash(second)
        assert repr(first) == repr(second)


def test_nests_of_other_forms_have_other_structures():
    pairs = [
        ([1, 2], (1, 2)),
        ([1, [2]], [[1], 2]),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": [1]}),
        ({1: 0}, {"1": 0}),
        (Layer(1, 2), (1, 2)),
        ([], {}),
        (1, [1]),
        ([[], [1]], [[1], []]),
        (Dense(1, 2), Layer(1, 2)),
        ({1: 0, "a": 0}, {"1": 0, "a": 0}),
        ({"a": 0, ("b",): 0}, {"a": 0, ("c",): 0}),
    ]
    for one, other in pairs:
        first, second = nest.flatten(one)[1], nest.flatten(other)[1]
        assert first != second
        assert repr(first) != repr(second)


def test_map_structure_changes_the_leaves_alone():
    value = {"b": Layer(1, [2, 3]), "a": ()}
    assert nest.map_structure(lambda leaf: 10 * leaf, value) == {"b": Layer(10, [20, 30]), "a": ()}
    assert value == {"b": Layer(1, [2, 3]), "a": ()}
    assert nest.map_structure(lambda leaf: -leaf, 3) == -3


VALUES = [
    lambda: [1, 2.5, 1j, False, None, Fraction(1, 3), np.int64(7)],
    lambda: ["a", b"a", np.str_("b"), Loud("c"), PurePosixPath("a/b")],
    lambda: [date(2026, 1, 1), date(2025, 1, 1)],
    lambda: [Color.BLUE, Color.RED],
    lambda: [Key, int, np.dtype("f4")],
    lambda: [("b", (1, Color.RED)), ("a", 2), frozenset("ab"), Place(1, "bias"), Place(0, "kernel")],
    lambda: ["a", 1, ("a", 1), Color.RED],
]


def test_keys_that_are_values_may_be_filled_in_in_any_order():
    """Other ranks make equal keys of their own."""
    for make in VALUES:
        one, other = make(), make()[::-1]
        assert len(set(map(repr, one))) == len(one)
        leaves, structure = nest.flatten({key: index for index, key in enumerate(one)})
        last = len(one) - 1
        assert nest.flatten({key: last - index for index, key in enumerate(other)}) == (leaves, structure)
        assert sorted(leaves) == list(range(len(one)))


def test_keys_of_numpy_text_are_those_of_plain_text():
    plain = nest.flatten({"a": 1, "b": 2})
    for keys in (np.array(["b", "a"]), ["b", np.str_("a")]):
        like = {key: 2 - at for at, key in enumerate(keys)}
        assert nest.flatten(like) == plain
        assert [(type(key), value) for key, value in nest.rebuild(like, "AB").items()] == [
            (type(key), str(key).upper()) for key in keys
        ]

    class Text(str):
        __eq__, __hash__ = object.__eq__, object.__hash__

    assert len(set(paths(nest.flatten({Text("a"): 1, Text("a"): 2})[1]))) == 2


def test_flatten_sorts_variable_keys_by_name():
    """Their numbers must not be looked at: they differ from step to step, or from rank to rank."""
    one, other = mpidist.Variable(1.0, name="w"), mpidist.Variable([2.0, 3.0], name="b")
    leaves, structure = nest.flatten({one: "w", other: "b"})
    assert leaves == ["b", "w"]
    one.assign(7.0)
    assert nest.flatten({other: "b", one: "w"}) == (leaves, structure)
    assert paths(structure) == ["[variable 'b']", "[variable 'w']"]
    result = nest.rebuild({one: 0, other: 0}, leaves)
    assert [(key is one, value) for key, value in result.items()] == [(True, "w"), (False, "b")]


def test_flatten_separates_variable_keys_of_one_name():
    twins = [mpidist.Variable(0.0, name="w") for _ in range(3)]
    leaves, structure = nest.flatten({twin: index for index, twin in enumerate(twins)})
    assert leaves == [0, 1, 2]
    assert len(set(paths(structure))) == 3


def test_other_objects_are_keys_by_their_place():
    """The mapping's own order; they are neither printed nor compared, and come after the others."""
    keys = [Key() for _ in range(20)]
    value = {keys[0]: 0, "b": 1, **{key: index + 2 for index, key in enumerate(keys[1:])}, "a": 3}
    leaves, structure = nest.flatten(value)
    assert leaves == [3, 1, 0, *range(2, 21)]
    assert nest.flatten({**{Key(): 0 for _ in keys}, "a": 0, "b": 0})[1] == structure
    assert nest.flatten({**{object(): 0 for _ in keys}, "a": 0, "b": 0})[1] != structure
    again = nest.rebuild(value, leaves)
    assert list(map(id, again)) == list(map(id, value))
    assert list(again.values()) == list(value.values())


def test_map_structure_copies_objects_and_keeps_other_attributes():
    """Also frozen ones, and without their initialiser."""
    dense = Dense(np.ones(2), 1.0, name="first")
    dense.extra = "kept"
    again = nest.map_structure(lambda leaf: leaf * 2, dense)
    assert (again.kernel.tolist(), again.bias, again.name, again.extra) == ([2, 2], 2.0, "first", "kept")
    assert (dense.kernel.tolist(), dense.bias) == ([1, 1], 1.0)
    assert nest.map_structure(str, Frozen(3)) == Frozen("3")


def test_flatten_ends_a_cycle_with_a_leaf():
    root = Branch(1)
    root.parent = [Branch(2, parent=root), root]
    leaves, structure = nest.flatten(root)
    assert [leaf for leaf in leaves if not isinstance(leaf, Branch)] == [1, 2]
    assert paths(structure) == [".value", ".parent[0].value", ".parent[0].parent", ".parent[1]"]
    assert nest.rebuild(root, ["a", "b", "c", "d"]).parent[0].parent == "c"


class GetAttrKey(NamedTuple):
    name: str

    def __str__(self):
        return f".{self.name}"


class FlattenedIndexKey(NamedTuple):
    key: int


class Registry:
    """What `jax.tree_util` offers to those who look at one level of a registered class."""

    class Def(NamedTuple):
        kind: type | None = None
        names: tuple[str, ...] = ()

        def node_data(self):
            return None if self.kind is None else (self.kind, self.names)

        def unflatten(self, children):
            assert self.kind is not None
            return self.kind(**dict(zip(self.names, children, strict=True)))

    def __init__(self, names_its_children):
        self.names_its_children = names_its_children

    def tree_flatten_with_path(self, tree, is_leaf):
        assert not is_leaf(tree)
        if not isinstance(tree, SimpleNamespace):
            return [((), tree)], self.Def()
        assert all(map(is_leaf, vars(tree).values()))
        keys = map(GetAttrKey if self.names_its_children else FlattenedIndexKey, vars(tree))
        branches = [((key,), child) for key, child in zip(keys, vars(tree).values(), strict=True)]
        return branches, self.Def(SimpleNamespace, tuple(vars(tree)))


@pytest.mark.parametrize(("names_its_children", "steps"), [(True, [".w", ".b"]), (False, ["[0]", "[1]"])])
def test_flatten_opens_jax_nodes_only_if_jax_is_loaded(monkeypatch, names_its_children, steps):
    """And only there: `import mpidist` does not load JAX."""
    value = [SimpleNamespace(w=1, b={"c": None}), Dense(2, object())]
    assert nest.flatten(value)[0] == [value[0], 2, value[1].bias]
    monkeypatch.setitem(sys.modules, "jax.tree_util", Registry(names_its_children))
    leaves, structure = nest.flatten(value)
    assert leaves == [1, None, 2, value[1].bias]
    assert paths(structure) == [f"[0]{steps[0]}", f"[0]{steps[1]}['c']", "[1].kernel", "[1].bias"]
    assert structure != nest.flatten([SimpleNamespace(w=1, other={"c": None}), value[1]])[1]
    assert nest.rebuild(value, leaves) == value


@pytest.mark.parametrize(
    ("value", "where", "form"),
    [
        (1, [""], "*"),
        ([1, [2, (3,)]], ["[0]", "[1][0]", "[1][1][0]"], "[*, [*, (*)]]"),
        ([0] * 17 + [{"bias": 0}], [f"[{at}]" for at in range(17)] + ["[17]['bias']"], None),
        ([0] * 5, [f"[{at}]" for at in range(5)], "[* x 5]"),
        ({"b": [1], 'it"s': 2}, ["['b'][0]", "['it\"s']"], "{'b': [*], 'it\"s': *}"),
        ({1: 0, ("a", Color.RED): 0}, ["[1]", "[tuple('a', Color.RED)]"], "{1: *, tuple('a', Color.RED): *}"),
        (Layer(1, Dense(2, ())), [".kernel", ".bias.kernel"], "Layer(kernel=*, bias=Dense(kernel=*, bias=()))"),
        ([], [], "[]"),
        ({}, [], "{}"),
    ],
)
def test_leaves_and_forms_are_written_as_in_python(value, where, form):
    structure = nest.flatten(value)[1]
    assert paths(structure) == where
    assert form in (None, form_text(structure))


def test_equal_forms_alone_have_equal_texts():
    """Ranks compare the texts."""
    values = [value for value, _ in ROWS] + [Dense(1, 2), Frozen(1), {"*": 1}, ["*"], [1] * 5, [1] * 6, ([1],)]
    structures = {nest.flatten(value)[1] for value in values}
    assert len({form_text(structure) for structure in structures}) == len(structures)


class Pair(NamedTuple):
    left: int
    right: int


ITEMS = [
    None, True, 0, -1, 10**40, 0.1, -0.0, float("inf"), 2 - 3j, "", "ä\0\n", [], (), {}, [[[]]], {"a": {1: (None,)}},
]  # fmt: skip
DTYPES = [
    "?", "i1", "u8", ">i4", "f2", "c16", "U3", "S2", "M8[s]",
    ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz, ml_dtypes.int4,
]  # fmt: skip


def test_decode_restores_objects_of_python():
    for item in ITEMS:
        found = decode(encode([item, item], "it"))
        assert found == [item, item]
        assert [type(one) for one in found] == [type(item)] * 2
        assert repr(found[0]) == repr(item)
    assert np.isnan(decode(encode(float("nan"), "it")))


def test_arrays_come_back():
    shapes = [(), (3,), (0, 2), (2, 1, 2)]
    for dtype, shape in product(DTYPES, shapes):
        array = np.arange(int(np.prod(shape)), dtype=np.int16).reshape(shape).astype(dtype)
        found, other = decode(encode({"it": (array, array.T)}, "it"))["it"]
        assert (found.dtype, found.shape, other.shape) == (array.dtype, shape, shape[::-1])
        assert (found == array).all()
        assert (other == array.T).all()
        assert found.flags.writeable
        assert found.flags.aligned


def test_results_share_no_memory():
    data = encode([np.zeros(3), np.zeros(3)], "it")
    first, second = decode(data)
    first += 1
    assert (second == 0).all()
    assert (decode(data)[0] == 0).all()


def test_anything_else_is_refused():
    wrong = [{1}, object(), len, np.array([None]), np.zeros(2, "V3"), b"bytes", Pair(1, 2), range(3)]
    wrong.append(np.array(["text"], np.dtypes.StringDType()))
    for item in wrong:
        with pytest.raises(TypeError, match=r"the result of 'step' has an? .*need"):
            encode([1, {"a": (item,)}], "the result of 'step'")


def test_cycles_and_numbers_that_are_too_long_are_refused_with_the_advice():
    endless = []
    endless.append(endless)
    for item, why in ((endless, "contains itself, or too many nests"), (10**5000, "cannot be written: .*digits")):
        with pytest.raises(ValueError, match=f"^it {why}.*; pickle it$"):
            encode({"a": item}, "it", advice="pickle it")


def test_handles_stand_for_something_else():
    data = encode([range(3), 1], "it", lambda item: (len(item), -1) if isinstance(item, range) else None)
    assert decode(data, lambda handle: f"data set {handle}") == ["data set (3, -1)", 1]


def test_too_many_bytes_are_refused(monkeypatch):
    monkeypatch.setattr("mpidist.nest.encoding.MAX_BYTES", 100)
    with pytest.raises(ValueError, match=r"it takes \d+ bytes, and at most 100 can be sent"):
        encode(np.zeros(20), "it")


class Apart(UserDict[str, Any]):
    """A mapping whose shallow copy shares the dict that holds its items."""

    def __copy__(self):
        copied = Apart()
        copied.data, copied.note = self.data, self.note
        return copied

    note = "kept"


class OfTwo(tuple[Any, ...]):
    def __new__(cls, one, other):
        return super().__new__(cls, (one, other))


class Zeros(list[Any]):
    def __init__(self, length):
        super().__init__([0.0] * length)


class Tagged(Mapping[str, Any]):
    def __init__(self, items, tag):
        self.items_, self.tag = items, tag

    def __getitem__(self, key):
        return self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


def test_rebuild_of_class_with_other_arguments_names_it():
    for value in (OfTwo(1, 2), Zeros(2), Tagged({"a": 1}, "tag")):
        name = type(value).__name__
        with pytest.raises(TypeError, match=f"a {name} cannot be made of new leaves: .*; pass a plain tuple, list"):
            nest.map_structure(str, value)


def test_mapping_that_is_rebuilt_leaves_the_given_one_as_it_was():
    weights = np.ones(3)
    given = Apart(w=weights)
    given.note = "own"
    rebuilt = nest.map_structure(lambda leaf: leaf + 1, given)
    assert given["w"] is weights
    assert (type(rebuilt), rebuilt.note, rebuilt["w"].tolist()) == (Apart, "own", [2, 2, 2])
