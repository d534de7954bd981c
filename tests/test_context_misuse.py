"""Calls in the wrong context are refused, and those in the right one work: any number of ranks."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import OneDeviceStrategy, Strategy

pytestmark = pytest.mark.ranks(1, 3)


@pytest.fixture
def other() -> Iterator[Strategy]:
    with OneDeviceStrategy() as made:
        yield made


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()


ONE = np.float32(1.0)
CROSS_REPLICA: dict[str, Callable[[Strategy, Any], Any]] = {
    "reduce": lambda s, v: s.reduce("SUM", ONE, axis=None),
    "reduce along an axis": lambda s, v: s.reduce("SUM", np.ones(2), axis=0),
    "reduce_to": lambda s, v: s.extended.reduce_to("SUM", ONE, 0),
    "batch_reduce_to": lambda s, v: s.extended.batch_reduce_to("SUM", [(ONE, 0)]),
    "broadcast_to": lambda s, v: s.extended.broadcast_to(ONE, "all"),
    "gather": lambda s, v: s.gather(np.ones(2), axis=0),
    "barrier": lambda s, v: s.barrier(),
    "broadcast": lambda s, v: s.broadcast(1.0),
    "broadcast_object": lambda s, v: s.broadcast_object(1),
    "gather_object": lambda s, v: s.gather_object(1),
    "run": lambda s, v: s.run(lambda: None),
    "scope": lambda s, v: s.scope().__enter__() and None,
    "call_for_each_replica": lambda s, v: s.extended.call_for_each_replica(lambda: None),
    "distribute_values": lambda s, v: s.experimental_distribute_values_from_function(lambda context: 1),
    "distribute_dataset": lambda s, v: s.experimental_distribute_dataset([np.ones(2)]),
    "datasets_from_function": lambda s, v: s.distribute_datasets_from_function(lambda context: [np.ones(2)]),
}
WORK_IN_SCOPE_AND_OUT = {name: call for name, call in CROSS_REPLICA.items() if name != "scope"}
WORK_IN_SCOPE_AND_OUT["update"] = lambda s, v: s.extended.update(v, lambda var: var)


def test_methods_work_in_own_scope_and_out_of_any(strategy: Strategy, other: Strategy) -> None:
    with strategy.scope():
        variable = mpidist.Variable(0.0)
    for call in WORK_IN_SCOPE_AND_OUT.values():
        call(strategy, variable)
        with strategy.scope():
            call(strategy, variable)
        with other.scope(), pytest.raises(RuntimeError, match="mixing different strategies"):
            call(strategy, variable)


def test_cross_replica_methods_are_refused_in_run(strategy: Strategy) -> None:
    def step() -> None:
        for call in CROSS_REPLICA.values():
            with pytest.raises(RuntimeError, match="requires being in cross-replica context"):
                call(strategy, None)
        with pytest.raises(RuntimeError, match="all_gather"):
            strategy.gather(np.ones(2), axis=0)

    strategy.run(step)


def test_cross_replica_methods_work_in_merge_call(strategy: Strategy) -> None:
    def merge(merged: Strategy) -> Any:
        return [merged.reduce("SUM", 1.0), merged.run(lambda: mpidist.get_replica_context().num_replicas_in_sync)]

    size = strategy.num_replicas_in_sync
    assert strategy.run(lambda: mpidist.get_replica_context().merge_call(merge)) == [size, size]


def test_update_calls_with_the_very_variable_and_argument(strategy: Strategy) -> None:
    with strategy.scope():
        variable = mpidist.Variable(0.0)
    argument = object()
    calls: list[Any] = []
    strategy.extended.update(variable, lambda *args, **kwargs: calls.append((args, kwargs)), (argument,), {"k": 1})
    assert calls == [((variable, argument), {"k": 1})]


def test_another_strategys_scope_and_run_are_refused(strategy: Strategy, other: Strategy) -> None:
    made_outside = other.scope()
    with strategy.scope():
        with pytest.raises(RuntimeError, match="mixing different strategies"), made_outside:
            pass
        assert mpidist.get_strategy() is strategy

    def step() -> None:
        with pytest.raises(RuntimeError):
            call(other, None)

    for call in (CROSS_REPLICA["scope"], CROSS_REPLICA["run"]):
        with strategy.scope(), pytest.raises(RuntimeError, match="mixing different strategies"):
            call(other, None)
        strategy.run(step)


CONTEXT_CALLS: dict[str, Callable[[mpidist.ReplicaContext], Any]] = {
    "all_reduce": lambda context: context.all_reduce("sum", 1.0),
    "start_all_reduce": lambda context: context.start_all_reduce("sum", 1.0),
    "reduce_scatter": lambda context: context.reduce_scatter("sum", np.ones(2)),
    "all_gather": lambda context: context.all_gather(np.ones(2), 0),
    "merge_call": lambda context: context.merge_call(lambda strategy: 1),
}


@pytest.mark.parametrize("name", ["all_reduce", "merge_call"])
def test_replica_context_is_refused_where_it_is_not_current(strategy: Strategy, other: Strategy, name: str) -> None:
    call = CONTEXT_CALLS[name]
    context = strategy.run(mpidist.get_replica_context)
    with strategy.scope(), pytest.raises(RuntimeError, match=r"needs to be inside the function of strategy\.run"):
        call(context)
    with pytest.raises(RuntimeError, match="mismatching strategies"):
        other.run(call, [context])
    with pytest.raises(RuntimeError, match="mismatching ReplicaContext"):
        strategy.run(call, [context])
    with pytest.raises(RuntimeError, match="mismatching strategies"):
        call(context)

    def merge_in_merge(_: Strategy) -> None:
        with pytest.raises(RuntimeError, match="needs to be inside"):
            call(mine)

    def step() -> None:
        nonlocal mine
        mine = mpidist.get_replica_context()
        with pytest.raises(RuntimeError, match="mismatching"):
            in_thread(lambda: strategy.run(call, [mine]))
        mine.merge_call(merge_in_merge)

    mine: Any = None
    strategy.run(step)


def test_colocate_vars_with_needs_the_scope(strategy: Strategy, other: Strategy) -> None:
    with strategy.scope():
        variable = mpidist.Variable(0.0)
        with strategy.extended.colocate_vars_with(variable):
            beside = mpidist.Variable(1.0)
    assert strategy.extended.variable_created_in_scope(beside)
    assert not other.extended.variable_created_in_scope(beside)
    with pytest.raises(RuntimeError, match="need to be inside"), strategy.extended.colocate_vars_with(variable):
        pass
    with other.scope(), pytest.raises(ValueError, match="scope"), other.extended.colocate_vars_with(variable):
        pass


@pytest.mark.ranks(3)
def test_calls_of_a_replica_outside_of_run_are_refused(strategy: Strategy) -> None:
    """Where a strategy of several ranks is open: the value of this process alone is not what is meant."""
    context = mpidist.get_replica_context()
    assert context is not None
    for name, call in CONTEXT_CALLS.items():
        with pytest.raises(RuntimeError, match=rf"^{name} was called outside of strategy\.run\(\).*; call "):
            call(context)
        mpidist.get_strategy().run(call, args=(context,))  # of the default strategy, as is said here
    assert strategy.reduce("sum", 1.0) == 3


def test_calls_of_all_replicas_in_run_name_what_to_do(strategy: Strategy) -> None:
    for call, arguments, text in (
        ("reduce", ("sum", 1.0), "get_replica_context.* there"),
        ("barrier", (), "leave it out"),
        ("broadcast", (1.0,), "outside.*merge_call"),
        ("gather_object", (1.0,), "outside.*merge_call"),
        ("run", (int,), "call the function itself"),
    ):
        with pytest.raises(RuntimeError, match=f"^{call}.* in cross-replica context.*; .*{text}"):
            strategy.run(getattr(strategy, call), args=arguments)


@pytest.mark.no_mpi
def test_run_with_bare_arguments_says_how_to_pass_them() -> None:
    strategy = mpidist.OneDeviceStrategy()
    for arguments in ((1.0,), (1.0, 2.0), ((), 2.0)):
        with pytest.raises(ValueError, match=r"write args=\(x,( y)?\)"):
            strategy.run(lambda x, y: x + y, *arguments)
