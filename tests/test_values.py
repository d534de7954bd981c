"""`PerReplica`, `Mirrored`: values with a component on each replica, of which a rank holds its own."""

import copy
import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest

from mpidist import DistributedValues, IndexedSlices, Mirrored, OneDeviceStrategy, PerReplica, Variable
from mpidist.values import contribution, contributions, local_component, local_components

pytestmark = pytest.mark.no_mpi

both = pytest.mark.parametrize("kind", [PerReplica, Mirrored])


class Point(NamedTuple):
    x: Any
    y: Any


@both
def test_values_are_a_tuple_of_this_ranks_component(kind):
    component = object()
    given = [component]
    for value in (kind(given), kind((component,))):
        given.clear()
        assert isinstance(value, DistributedValues)
        assert value.values == (component,)
        assert local_component(value) is component
    assert repr(kind((3,))) == f"{kind.__name__}:{{0: 3}}"
    assert repr(kind((3, "b"))) == f"{kind.__name__}:{{0: 3, 1: 'b'}}"


def test_components_are_as_many_as_replicas():
    """Else a component would be lost in silence. Of a mirrored value all components are equal."""
    value = PerReplica((1, 2))
    assert local_component(value, 1, 2) == 2
    assert local_components([value, 3], 1, 2) == [2, 3]
    for use in (contribution, contributions, local_component, local_components):
        with pytest.raises(ValueError, match="this PerReplica has 2 components, and this rank carries one replica"):
            use(value)
    with pytest.raises(ValueError, match="has 2 components, and this rank carries 3 replicas"):
        local_component(value, 1, 3)
    assert local_component(Mirrored((7,)), 1, 2) == 7


@both
def test_components_come_in_a_list_or_tuple_of_at_least_one(kind):
    wrong = [1.0, None, "a", np.ones(1), {"a": 1}]
    for values in wrong:
        with pytest.raises(TypeError, match="takes a tuple"):
            kind(values)
    for empty in ((), []):
        with pytest.raises(ValueError, match="a component for each replica of this rank; got none"):
            kind(empty)


def test_distributed_values_itself_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        DistributedValues((1,))


def test_values_that_differ_cannot_be_computed_with_across_replicas():
    value = PerReplica((np.ones(2),))
    with pytest.raises(TypeError):
        value + 1
    with pytest.raises(TypeError):
        float(value)
    conversions = [
        lambda: np.sum(value), lambda: np.asarray(value), lambda: np.ones(2) + value, lambda: np.mean([value]),
    ]  # fmt: skip
    for convert in conversions:
        with pytest.raises(ValueError, match="a PerReplica cannot be converted to an array"):
            convert()
    with pytest.raises(ValueError, match="a PerReplica is neither true nor false"):
        bool(value)


def test_values_that_are_equal_are_arrays():
    value = Mirrored((np.ones(2),))
    assert np.sum(value) == 2
    assert (np.ones(2) + value).tolist() == [2, 2]
    assert np.asarray(value, np.float32).dtype == np.float32
    np.array(value)[...] = 7
    assert value.values[0].tolist() == [1, 1]


def test_variables_are_distributed_values():
    variable = Variable(np.ones(2))
    assert isinstance(variable, DistributedValues)
    (own,) = variable.values
    assert own.tolist() == [1, 1]
    assert not own.flags.writeable
    assert local_component(variable) is variable
    assert contribution(variable).tolist() == [1, 1]
    assert contribution(PerReplica((3,))) == 3
    nest = [variable, PerReplica((1,))]
    assert local_components(nest)[0] is variable
    assert local_components([variable])[0] is variable
    assert contributions(nest)[0].tolist() == [1, 1]


def test_indexed_slices_keep_their_arguments():
    values, indices = np.ones((2, 3)), [4, 0]
    slices = IndexedSlices(values, indices, [5, 3])
    assert slices.values is values
    assert slices.indices is indices
    assert slices.dense_shape == (5, 3)
    assert IndexedSlices(values, indices).dense_shape is None
    assert repr(IndexedSlices(1, 2)) == "IndexedSlices(values=1, indices=2, dense_shape=None)"


@both
def test_copies_keep_the_component(kind):
    value = kind(([1, 2],))
    assert copy.copy(value).values[0] is value.values[0]
    for other in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert type(other) is kind
        assert other.values == ([1, 2],)
        assert other.values[0] is not value.values[0]


def test_opening_a_nest_keeps_its_form():
    nest = (PerReplica(("a1",)), ["b1", {"e": PerReplica(("f1",)), "c": Mirrored(("d1",))}], Point(PerReplica((0,)), 1))
    opened = contributions(nest)
    assert opened == ("a1", ["b1", {"c": "d1", "e": "f1"}], Point(0, 1))
    assert isinstance(opened[2], Point)
    assert list(opened[1][1]) == ["e", "c"]


def test_nest_without_distributed_values_stays_the_same_object():
    """So does every leaf beside one."""
    foo = object()
    nest = {"a": [foo]}
    assert contributions(nest) is nest
    assert contributions(foo) is foo
    assert contributions((PerReplica((1,)), foo))[1] is foo


def test_component_may_be_anything():
    for component in (None, "text", {"a": 1}, [1, 2], (3,), np.ones(2), PerReplica((1,))):
        value = PerReplica((component,))
        assert value.values[0] is component
        with OneDeviceStrategy() as strategy:
            assert strategy.run(lambda given: given, (value,)) is component
            assert strategy.experimental_local_results(value)[0] is component
