"""Making variables: of equal values, names and rules on all ranks."""

import re

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from support.everywhere import raises_everywhere, same_everywhere

import mpidist
from mpidist import MultiWorkerMirroredStrategy, Variable
from mpidist.context_stack import parts_of
from mpidist.errors import InvalidArgumentError
from mpidist.transport.failures import open_groups

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size

pytestmark = pytest.mark.ranks(1, 3)
every_synchronization = pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])


@pytest.fixture
def _in_scope(strategy):
    with strategy.scope():
        yield


in_scope = pytest.mark.usefixtures("_in_scope")


# --- Where it comes from ---


@pytest.mark.core
@every_synchronization
def test_initial_value_is_that_of_rank_0(placement, synchronization):
    """Also of random initialisers, seeded by rank."""
    rng = np.random.default_rng(RANK)
    with MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        given = Variable(np.full(3, RANK + 1.0), synchronization=synchronization)
        called = Variable(lambda: rng.normal(size=(2, 3)), synchronization=synchronization)
    assert given.local_value().tolist() == [1, 1, 1]
    assert np.array_equal(called.local_value(), np.random.default_rng(0).normal(size=(2, 3)))
    assert same_everywhere(WORLD, called.local_value())


def test_variable_outside_of_any_scope_is_this_process_own():
    variable = Variable(RANK + 1.0, aggregation="SUM")
    assert variable.strategy is mpidist.get_strategy()
    assert variable.read_value() == RANK + 1
    assert variable.assign_add(1.0).read_value() == RANK + 2
    metric = Variable(RANK + 1.0, synchronization="ON_READ")
    assert metric.assign_add(1.0).read_value() == RANK + 2


def test_variable_outside_of_the_scope_of_an_open_strategy_warns(caplog):
    """Its value is each rank's own. Once for each variable, and where no other rank can be meant, not at all."""

    def warnings():
        return [record.getMessage() for record in caplog.records if record.name == "mpidist.variables"]

    before = open_groups.num_open()
    alone = Variable(1.0)
    assert len(warnings()) == (before > 0)
    caplog.clear()
    with MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            Variable(1.0)
        strategy.run(lambda: Variable(1.0))
        assert not warnings()
        outside = Variable(RANK + 1.0, name="w")
        for _ in range(2):
            outside.assign_add(1.0)
        assert len(warnings()) == (SIZE > 1)
        assert SIZE == 1 or re.search(
            r"variable 'w' was made outside of strategy\.scope\(\).*make it inside", *warnings()
        )
        text = r"mixing different strategies; variable '.*' was made outside of strategy\.scope\(\); make it inside"
        for variable in (outside, alone):
            for assign in (variable.assign, variable.assign_add, lambda x, v=variable: v.scatter_add(x)):
                with strategy.scope(), pytest.raises(RuntimeError, match=text):
                    assign(1.0)
                with pytest.raises(RuntimeError, match=text):
                    strategy.run(assign, (1.0,))
    assert outside.read_value() == RANK + 3


@pytest.mark.ranks(3)
@in_scope
def test_ranks_that_make_different_variables_are_refused(strategy):
    for mine, theirs, text in (
        ({"name": "a"}, {"name": "b"}, "name: rank 0: a; ranks? 1.*: b"),
        ({"initial_value": np.ones(2)}, {"initial_value": np.ones(3)}, r"float64\[2\].*float64\[3\]"),
        ({"initial_value": 1}, {"initial_value": 1.0}, "int64.*float64"),
        ({"dtype": "f4"}, {"dtype": "f8"}, "float32.*float64"),
        ({"aggregation": "SUM"}, {"aggregation": "MEAN"}, "aggregation: rank 0: SUM"),
        ({"synchronization": "ON_READ"}, {"synchronization": "ON_WRITE"}, "synchronization"),
        ({"synchronization": "bogus"}, {}, "bogus"),
        ({"aggregation": "bogus"}, {}, "bogus"),
        ({"initial_value": object()}, {}, "object"),
        ({"initial_value": lambda: 1 / 0}, {}, "division by zero"),
        ({"dtype": "bogus"}, {}, "bogus"),
    ):
        with raises_everywhere(WORLD, InvalidArgumentError, text):
            Variable(**{"initial_value": 1.0, **(mine if RANK == 0 else theirs)})
        assert Variable(1.0).strategy is strategy


@in_scope
def test_rules_that_mean_the_same_agree():
    names = ["AUTO", "on_write", mpidist.VariableSynchronization.ON_WRITE]
    aggregations = ["sum", mpidist.VariableAggregation.SUM]
    variable = Variable(1.0, synchronization=names[RANK % 3], aggregation=aggregations[RANK % 2])
    assert variable.synchronization is mpidist.VariableSynchronization.ON_WRITE
    assert variable.aggregation is mpidist.VariableAggregation.SUM


@in_scope
def test_variable_that_cannot_be_is_refused():
    for arguments, kind, text in (
        ({"synchronization": "NONE"}, ValueError, "synchronization NONE"),
        ({"synchronization": "bogus"}, ValueError, "bogus"),
        ({"aggregation": "bogus"}, ValueError, "bogus"),
        (
            {"aggregation": "MEAN", "initial_value": 1},
            ValueError,
            "^variable 'w' of dtype int64 cannot have aggregation MEAN.*SUM",
        ),
        (
            {"aggregation": "MEAN", "initial_value": 1, "dtype": np.int8},
            ValueError,
            "variable 'w' of dtype int8 cannot have aggregation MEAN",
        ),
        ({"aggregation": "MEAN", "initial_value": 1, "synchronization": "ON_READ"}, ValueError, "MEAN"),
        *(
            (
                {"aggregation": rule, "initial_value": np.zeros(2, dtype), "synchronization": "ON_READ"},
                ValueError,
                f"^variable 'w' of dtype {np.dtype(dtype)} cannot be ON_READ with aggregation {rule}, .*ONLY_FIRST",
            )
            for rule in ("SUM", "MEAN")
            for dtype in (ml_dtypes.int4, ml_dtypes.float8_e8m0fnu)
        ),
        ({"initial_value": None}, TypeError, "NoneType"),
        ({"initial_value": object()}, TypeError, "object"),
        ({"initial_value": [[1], [1, 2]]}, ValueError, "variable 'w' takes lists of equal lengths: .*inhomogeneous"),
        (
            {"initial_value": "text"},
            TypeError,
            "variable 'w' cannot take a value of type builtins.str; needed an array",
        ),
        ({"dtype": "bogus"}, TypeError, "variable 'w': the dtype must be one of NumPy's, as 'float32', got 'bogus'"),
        ({"initial_value": lambda: 1 / 0}, ZeroDivisionError, "division"),
        *(
            ({"initial_value": value, "dtype": dtype}, ValueError, "another kind of number|does not fit in")
            for value, dtype in ((2.7, int), (300, np.uint8), (np.nan, int), (1 + 2j, float), ([1, -1], np.uint8))
        ),
    ):
        with raises_everywhere(WORLD, kind, text):
            Variable(**{"initial_value": 1.0, "name": "w", **arguments})


# --- What it is ---


@in_scope
def test_names_are_given_alike_on_all_ranks():
    named = Variable(1.0, name="kernel")
    others = [Variable(1.0).name for _ in range(3)]
    assert named.name == "kernel"
    assert len(set(others)) == 3
    assert set(WORLD.allgather(tuple(others))) == {tuple(others)}


@in_scope
def test_on_read_variable_is_not_trainable_by_default():
    assert Variable(1.0).trainable
    assert Variable(1.0, synchronization="ON_WRITE").trainable
    assert not Variable(1.0, synchronization="ON_READ").trainable
    assert Variable(1.0, synchronization="ON_READ", trainable=True).trainable
    assert not Variable(1.0, trainable=False).trainable


@in_scope
@every_synchronization
def test_reading_makes_one_call_and_no_second_one_for_each_row(strategy, synchronization):
    variable = Variable(np.arange(50.0), synchronization=synchronization, aggregation="MEAN")
    calls = [
        lambda: sum(variable), lambda: list(variable), lambda: 7 in variable, lambda: variable.T, lambda: variable[1:3],
        lambda: variable + 1, lambda: np.asarray(variable), lambda: f"{variable[0]:.1f}",
    ]  # fmt: skip
    agreement = parts_of(strategy).group.agreement
    for call in calls:
        before = agreement.sequence
        call()
        assert agreement.sequence - before == (SIZE > 1 and synchronization == "ON_READ")
    before = agreement.sequence
    assert (len(variable), variable.ndim, variable.size, variable.shape) == (50, 1, 50, (50,))
    assert agreement.sequence == before
