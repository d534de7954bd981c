"""Steps on every rank, and what they bring together: `run`, `merge_call`, `reduce`, `all_reduce`, training."""

import gc
import operator
import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from mpi4py import MPI
from support.everywhere import raises_everywhere
from support.reductions import all_reduce
from support.replicas import context, inside

import mpidist
from mpidist import Mirrored, MirroredStrategy, MultiWorkerMirroredStrategy, OneDeviceStrategy, PerReplica
from mpidist.errors import InvalidArgumentError

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
SUM_OF_RANKS = SIZE * (SIZE - 1) // 2


class Point(NamedTuple):
    x: Any
    y: Any


def merge(strategy, *args, **kwargs):
    return inside(strategy, "merge_call", *args, **kwargs)


@pytest.mark.ranks(1, 3)
@pytest.mark.core
def test_runs_may_be_chained(strategy):
    """Results of one run are arguments of the next."""
    x = strategy.run(lambda: context().replica_id_in_sync_group + 1)
    powers = strategy.run(lambda x: {"a": 2 * x, "b": x * x}, (x,))
    assert (x, powers) == (RANK + 1, {"a": 2 * (RANK + 1), "b": (RANK + 1) ** 2})
    assert strategy.run(lambda a, b, c: a + 2 * b + c, kwargs={**powers, "c": 2}) == 2 * x + 2 * x * x + 2


@pytest.mark.ranks(1, 3)
def test_run_opens_distributed_values_and_passes_on_the_rest(strategy):
    other = object()
    nest = {"p": Point(PerReplica((1,)), [Mirrored((2,)), other])}
    args, kwargs = strategy.run(lambda *args, **kwargs: (args, kwargs), [PerReplica((0,)), other], {"nest": nest})
    assert args == (0, other)
    assert kwargs == {"nest": {"p": Point(1, [2, other])}}
    plain = [other]
    assert strategy.run(lambda plain: plain, (plain,)) is plain


@pytest.mark.ranks(2)
def test_arguments_of_run_that_cannot_be_are_refused(strategy):
    """Among them a call `step(x)` in the place of the function `step`."""
    for args in ("ab", {}, 3, np.ones(2)):
        with pytest.raises(ValueError, match="must be a list or tuple"):
            strategy.run(lambda: None, args)
        with pytest.raises(ValueError, match="kwargs must be a dict, got list"):
            strategy.run(lambda: None, kwargs=[args])
    with pytest.raises(ValueError, match="options must be None"):
        strategy.run(lambda: None, options=object())
    for fn in (3, None, [1.0]):
        with raises_everywhere(WORLD, TypeError, "run: needed a function, got .*; pass the function itself"):
            strategy.run(fn)
        assert strategy.reduce("SUM", 1) == SIZE


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:coroutine")
def test_run_of_a_generator_or_coroutine_is_refused(replicas):
    def generate(x):
        yield context().all_reduce("SUM", x)

    async def wait(x):
        return context().all_reduce("SUM", x)

    async def both(x):
        yield context().all_reduce("SUM", x)

    with MirroredStrategy(replicas=replicas) as strategy:
        for fn, kind in ((generate, "generator"), (partial(wait), "coroutine"), (both, "async_generator")):
            with raises_everywhere(WORLD, TypeError, f"returned a {kind}, whose body was not executed"):
                strategy.run(fn, (1.0,))
    gc.collect()  # a coroutine that was never awaited warns here


@pytest.mark.ranks(1, 3)
def test_merge_function_gets_its_arguments_as_they_are(strategy):
    """With one replica on a rank: nothing is wrapped, and nothing copied; the result is opened."""
    with strategy.scope():
        variable = mpidist.Variable(0.0)
    array, other = np.full(2, RANK), object()
    mine, mirrored = PerReplica((RANK,)), Mirrored((1,))
    given = [array, RANK, variable, "text", None, True, other, {"x": (array, [2.5])}, mine, mirrored]

    def merged(current, *args, again):
        assert current is strategy
        assert all(map(operator.is_, args, given))
        assert again is given
        assert (args[0] + 1).tolist() == [RANK + 1] * 2
        assert current.reduce("SUM", args[1]) == current.reduce("SUM", mine) == SUM_OF_RANKS
        return {"mine": [mine, mirrored], "array": array}

    result = merge(strategy, merged, given, {"again": given})
    assert result["mine"] == [RANK, 1]
    assert result["array"] is array
    assert merge(strategy, lambda merged, value: value, (given[:7],)) is not None
    assert merge(strategy, lambda merged: None) is None
    assert merge(strategy, lambda merged: other) is other


class Momentum:
    """An optimizer of TensorFlow's kind: gradients are combined and applied in `merge_call`."""

    def __init__(self, strategy, variables):
        with strategy.scope():
            self.speeds = {variable: mpidist.Variable(np.zeros(variable.shape)) for variable in variables}

    def apply_gradients(self, pairs, loss):
        return context().merge_call(self._apply, args=(list(pairs),), kwargs={"loss": loss})

    def _apply(self, strategy, pairs, loss):
        extended = strategy.extended
        gradients = extended.batch_reduce_to(mpidist.ReduceOp.SUM, pairs)
        for gradient, (_, variable) in zip(gradients, pairs, strict=True):
            extended.update(variable, self._update, args=(gradient,), kwargs={"rate": 0.5}, group=False)
        return extended.reduce_to("MEAN", loss + 1, destinations="all")

    def _update(self, variable, gradient, rate):
        speed = self.speeds[variable]
        speed.assign(0.5 * speed.local_value() + gradient)
        variable.assign_sub(rate * speed.local_value())


@pytest.mark.core
@pytest.mark.parametrize("make", [OneDeviceStrategy, MirroredStrategy, MultiWorkerMirroredStrategy, None])
def test_merge_call_optimizer_of_tensorflow_updates_variables(make):
    """Also with the default strategy, and in whole numbers and halves, which are exact."""
    strategy = mpidist.get_strategy() if make is None else make()
    size, rank = strategy.num_replicas_in_sync, strategy.topology.rank
    with strategy.scope():
        variables = [mpidist.Variable(np.zeros(2), name="w"), mpidist.Variable(1.0, name="b")]
    optimizer = Momentum(strategy, variables)

    def step():
        return optimizer.apply_gradients([(np.full(2, rank), variables[0]), (2.0, variables[1])], loss=float(rank))

    losses = [strategy.run(step) for _ in range(3)]
    moved = 0.5 * (1 + 1.5 + 1.75)
    assert losses == [(size - 1) / 2 + 1] * 3
    assert variables[0].numpy().tolist() == [-moved * size * (size - 1) / 2] * 2
    assert float(variables[1]) == 1 - moved * 2 * size
    if make is not None:
        strategy.close()


def merged_one(strategy):
    return 1


def merged_two(strategy):
    return 2


@pytest.mark.ranks(2, 3)
def test_merge_call_unlike_on_ranks_raises(strategy):
    """Another function, results of another form at their next use across replicas, and none."""
    with pytest.raises(InvalidArgumentError, match="merged_one"):
        merge(strategy, merged_one if RANK == 0 else merged_two)
    with pytest.raises(InvalidArgumentError):
        strategy.reduce("SUM", strategy.run(lambda: [1.0] * context().replica_id_in_sync_group))
    if RANK > 0:
        with pytest.raises(InvalidArgumentError, match="merge_call"):
            merge(strategy, lambda merged: None)
    with pytest.raises(InvalidArgumentError, match="merge_call") if RANK == 0 else pytest.raises(ZeroDivisionError):
        strategy.reduce("SUM", 1.0) if RANK == 0 else 1 / 0


@pytest.mark.ranks(1, 3)
def test_results_come_in_the_kinds_and_the_form_of_the_values(strategy):
    value = {"b": Point(1, np.float32(2)), "a": [np.ones(2, np.int8), (3.5, np.ones(()))]}
    for result in (strategy.reduce("SUM", value), all_reduce(strategy, "SUM", value)):
        assert list(result) == ["b", "a"]
        assert result["b"] == Point(SIZE, 2 * SIZE)
        assert [type(item) for item in result["b"]] == [int, np.float32]
        assert (result["a"][0].dtype, result["a"][0].tolist()) == (np.int8, [SIZE, SIZE])
        assert result["a"][1] == (3.5 * SIZE, SIZE)
        assert [type(item) for item in result["a"][1]] == [float, np.ndarray]
        assert isinstance(result["b"], Point)


@pytest.mark.ranks(1, 3)
@pytest.mark.core
def test_gradients_may_be_keyed_by_variables(strategy, caplog):
    """By their names, whatever they hold and in whatever order: the second step is the first one's shape."""
    with strategy.scope():
        shared = mpidist.Variable(np.zeros(2), name="w")
        apart = mpidist.Variable(0.0, name="b", synchronization="on_read", aggregation="sum")
    variables = [shared, apart][:: (-1) ** RANK]

    def step():
        apart.assign_add(RANK + 1.0)
        return context().all_reduce("SUM", {variable: np.full(variable.shape, RANK) for variable in variables})

    strategy.run(step)
    with caplog.at_level("DEBUG", "mpidist.cross_device_ops"):
        caplog.clear()
        for _ in range(3):
            sums = strategy.run(step)
            shared.assign_sub(sums[shared])
    assert not caplog.records
    assert [key is variable for key, variable in zip(sums, variables, strict=True)] == [True, True]
    assert (sums[apart], sums[shared].tolist()) == (SUM_OF_RANKS, [SUM_OF_RANKS] * 2)


class Parameter:
    """As those of other libraries: no name, no order, and as many addresses as ranks."""


@dataclass
class Model:
    layers: list[Any]
    scale: Any
    name: str = field(default="model", metadata={"static": True})


@pytest.mark.ranks(1, 3)
def test_gradients_may_be_keyed_by_objects_in_one_order(strategy):
    parameters = [Parameter() for _ in range(20)]
    random = np.random.default_rng(RANK).permutation(100).tolist()  # so that addresses come in another order
    parameters += [Parameter() for _ in random]
    sums = all_reduce(strategy, "SUM", {key: np.full(1, index) for index, key in enumerate(parameters)})
    assert [int(sums[key][0]) for key in parameters] == [SIZE * index for index in range(len(parameters))]


@pytest.mark.ranks(1, 3)
def test_objects_are_reduced_field_by_field(strategy):
    model = Model([Point(np.full(2, RANK), 1), {"b": 2.0}], RANK, name=f"of rank {RANK}")
    for total in (all_reduce(strategy, "SUM", model), strategy.reduce("SUM", model)):
        assert (total.layers[0].x.tolist(), total.layers[0].y) == ([SUM_OF_RANKS] * 2, SIZE)
        assert (total.layers[1], total.scale, total.name) == ({"b": 2.0 * SIZE}, SUM_OF_RANKS, f"of rank {RANK}")
    assert model.scale == RANK


@pytest.mark.ranks(1, 3)
def test_distribute_values_from_function_gets_contexts_of_replicas(strategy):
    make = strategy.experimental_distribute_values_from_function
    (array,) = strategy.experimental_local_results(make(lambda context: np.array([1, 2, 3])))
    assert array.tolist() == [1, 2, 3]
    ids, sizes = make(lambda context: (context.replica_id_in_sync_group, {"n": context.num_replicas_in_sync}))
    assert isinstance(ids, PerReplica)
    assert (ids.values, sizes["n"].values) == ((RANK,), (SIZE,))
    assert strategy.run(lambda x: x * x, (ids,)) == RANK**2
    assert strategy.gather(make(lambda context: np.ones(1)), axis=0).tolist() == [1] * SIZE
    assert strategy.reduce("SUM", ids) == SUM_OF_RANKS


def in_scope(strategy, call, *given, **more):
    with strategy.scope():
        return getattr(mpidist.NcclAllReduce(), call)(*given, **more)


WITH_HINTS = {
    "all_reduce": lambda s, **k: s.run(lambda: context().all_reduce("SUM", 1.0, **k)),
    "all_gather": lambda s, **k: s.run(lambda: context().all_gather(np.ones(1), 0, **k).sum()),
    "reduce": lambda s, **k: s.reduce("SUM", 1.0, axis=None, **k),
    "reduce along an axis": lambda s, **k: s.reduce("SUM", np.ones(1), axis=0, **k),
    "reduce_to": lambda s, **k: s.extended.reduce_to("SUM", 1.0, "all", **k),
    "batch_reduce_to": lambda s, **k: s.extended.batch_reduce_to("SUM", [(1.0, "all")], **k)[0],
    "ops.reduce": lambda s, **k: in_scope(s, "reduce", "SUM", 1.0, "all", **k),
    "ops.batch_reduce": lambda s, **k: in_scope(s, "batch_reduce", "SUM", [(1.0, "all")], **k)[0],
}


@pytest.mark.ranks(1, 3)
def test_options_are_taken_as_hints_with_a_warning(strategy):
    """The warning points at the program's line; the hints count; two names for one thing are everybody's error."""
    hints = mpidist.CommunicationOptions(timeout_seconds=120.0)
    for call in WITH_HINTS.values():
        with pytest.warns(DeprecationWarning, match="experimental_hints") as caught:
            assert call(strategy, experimental_hints=hints) == SIZE
        assert [warning.filename for warning in caught] == [__file__]
        with (
            pytest.warns(DeprecationWarning, match="hints"),
            raises_everywhere(WORLD, TypeError, "must be a CommunicationOptions"),
        ):
            call(strategy, experimental_hints=3)
        both = {"options": hints} if RANK == SIZE - 1 else {}
        refused = pytest.raises((TypeError, InvalidArgumentError), match="two names of one")
        with pytest.warns(DeprecationWarning, match="hints"), refused:
            call(strategy, experimental_hints=hints, **both)
        assert strategy.reduce("SUM", 1) == SIZE


ONES, SHORT = np.ones(3), np.ones(2)
FIRST = mpidist.VariableAggregation.ONLY_FIRST_REPLICA
REFUSED = {
    "reduce: cannot take None": (lambda s: s.reduce("sum", None), "TypeError"),
    "reduce: 'total' is not a valid ReduceOp": (lambda s: s.reduce("total", 1), "ValueError"),
    "reduce: an object of type numpy.ndarray is not": (lambda s: s.reduce(SHORT, ONES), "ValueError"),  # type: ignore
    "reduce along axis 0: <VariableAggregation": (lambda s: s.reduce(FIRST, ONES, 0), "ValueError"),  # type: ignore
    "reduce: MEAN needs numbers": (lambda s: s.reduce("mean", True), "InvalidArgument"),
    "reduce: array ['flag']: MEAN needs numbers, got dtype bool: cast it, or leave it out": (
        lambda s: s.reduce("mean", {"flag": True, "loss": 1.5}),
        "InvalidArgument",
    ),
    "reduce_scatter: array ['flag']: SUM needs numbers": (
        lambda s: inside(s, "reduce_scatter", "sum", {"flag": ONES > 0, "loss": ONES}),
        "InvalidArgument",
    ),
    "reduce: destination rank 99": (lambda s: s.extended.reduce_to("sum", ONES, 99), "ValueError"),
    "reduce along axis 4: an array": (lambda s: s.reduce("sum", ONES, axis=4), "InvalidArgument"),
    "reduce with weights: weight must": (lambda s: s.reduce("mean", 1, weight=-1), "ValueError"),
    "batch_reduce: value_destination_pairs": (lambda s: s.extended.batch_reduce_to("sum", [ONES]), "ValueError"),
    "gather: an array": (lambda s: s.gather(ONES, 4), "InvalidArgument"),
    "broadcast: out 0 must": (lambda s: s.broadcast(ONES, out=SHORT), "InvalidArgument"),
    "all_reduce: out 0 must": (lambda s: inside(s, "all_reduce", "sum", ONES, out=SHORT), "InvalidArgument"),
    "all_reduce: out must": (lambda s: inside(s, "all_reduce", "sum", 1, out=[SHORT]), "InvalidArgument"),
    "start_all_reduce: out 0": (
        lambda s: inside(s, "start_all_reduce", "sum", ONES, out=SHORT).wait(),
        "InvalidArgument",
    ),
    "all_gather: axis must": (lambda s: inside(s, "all_gather", ONES, "x"), "TypeError"),
    "reduce_scatter: cannot take None": (lambda s: inside(s, "reduce_scatter", "sum", None), "TypeError"),
}


@pytest.mark.ranks(1, 3)
def test_error_names_its_call(strategy):
    for text, (make_call, kind) in REFUSED.items():
        with raises_everywhere(WORLD, Exception, f"^{re.escape(text)}") as raised:
            make_call(strategy)
        assert kind in type(raised[0]).__name__
        assert strategy.reduce("sum", 1) == SIZE


@pytest.mark.ranks(2, 3)
def test_error_of_one_rank_names_its_call_once(strategy):
    with raises_everywhere(
        WORLD, InvalidArgumentError, r"^gather \(call \d+\).*rank 1: InvalidArgumentError: a scalar"
    ):
        strategy.gather(1.0 if RANK == 1 else ONES, 0)
