"""Calls in the wrong context are refused, and those in the right one work: any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import mpidist
from mpidist import MultiWorkerMirroredStrategy, OneDeviceStrategy, Strategy

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


@pytest.fixture
def strategy() -> Iterator[Strategy]:
    with MultiWorkerMirroredStrategy() as made:
        yield made


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
    "run": lambda s, v: s.run(lambda: None),
    "scope": lambda s, v: s.scope().__enter__() and None,
    "call_for_each_replica": lambda s, v: s.extended.call_for_each_replica(lambda: None),
    "distribute_values": lambda s, v: s.experimental_distribute_values_from_function(lambda context: 1),
    "distribute_dataset": lambda s, v: s.experimental_distribute_dataset([np.ones(2)]),
    "datasets_from_function": lambda s, v: s.distribute_datasets_from_function(lambda context: [np.ones(2)]),
}
WORK_IN_SCOPE_AND_OUT = {name: call for name, call in CROSS_REPLICA.items() if name != "scope"}
WORK_IN_SCOPE_AND_OUT["update"] = lambda s, v: s.extended.update(v, lambda var: var)


@pytest.mark.parametrize("name", WORK_IN_SCOPE_AND_OUT)
def test_methods_work_in_own_scope_and_out_of_any(strategy: Strategy, other: Strategy, name: str) -> None:
    """T56: works, works, RuntimeError "mixing different"."""
    call = WORK_IN_SCOPE_AND_OUT[name]
    with strategy.scope():
        variable = mpidist.Variable(0.0)
    call(strategy, variable)
    with strategy.scope():
        call(strategy, variable)
    with other.scope(), pytest.raises(RuntimeError, match="mixing different strategies"):
        call(strategy, variable)


@pytest.mark.parametrize("name", CROSS_REPLICA)
def test_cross_replica_methods_are_refused_in_run(strategy: Strategy, name: str) -> None:
    """Table of misuse 1.4.2, rows 1, 10 and 13; X35."""

    def step() -> None:
        with pytest.raises(RuntimeError, match="requires being in cross-replica context"):
            CROSS_REPLICA[name](strategy, None)

    strategy.run(step)


def test_cross_replica_methods_work_in_merge_call(strategy: Strategy) -> None:
    def merge(merged: Strategy) -> Any:
        return [merged.reduce("SUM", 1.0), merged.run(lambda: mpidist.get_replica_context().num_replicas_in_sync)]

    size = strategy.num_replicas_in_sync
    assert strategy.run(lambda: mpidist.get_replica_context().merge_call(merge)) == [size, size]


def test_refused_gather_names_all_gather(strategy: Strategy) -> None:
    """Table of misuse 1.4.2, row 9."""

    def step() -> None:
        with pytest.raises(RuntimeError, match="all_gather"):
            strategy.gather(np.ones(2), axis=0)

    strategy.run(step)


def test_update_calls_with_the_very_variable_and_argument(strategy: Strategy) -> None:
    """T56."""
    with strategy.scope():
        variable = mpidist.Variable(0.0)
    argument = object()
    calls: list[Any] = []
    strategy.extended.update(variable, lambda *args, **kwargs: calls.append((args, kwargs)), (argument,), {"k": 1})
    assert calls == [((variable, argument), {"k": 1})]


@pytest.mark.parametrize("name", ["scope", "run"])
def test_another_strategys_scope_and_run_are_refused(strategy: Strategy, other: Strategy, name: str) -> None:
    """Table of misuse 1.4.2, rows 3 and 14; X35."""
    with strategy.scope(), pytest.raises(RuntimeError, match="mixing different strategies"):
        CROSS_REPLICA[name](other, None)

    def step() -> None:
        with pytest.raises(RuntimeError):
            CROSS_REPLICA[name](other, None)

    strategy.run(step)


def test_scope_made_earlier_is_refused_where_it_is_entered(strategy: Strategy, other: Strategy) -> None:
    made_outside = other.scope()
    with strategy.scope():
        with pytest.raises(RuntimeError, match="mixing different strategies"), made_outside:
            pass
        assert mpidist.get_strategy() is strategy


CONTEXT_CALLS: dict[str, Callable[[mpidist.ReplicaContext], Any]] = {
    "all_reduce": lambda context: context.all_reduce("SUM", ONE),
    "all_gather": lambda context: context.all_gather(np.ones(2), axis=0),
    "merge_call": lambda context: context.merge_call(lambda strategy: None),
}


@pytest.mark.parametrize("name", CONTEXT_CALLS)
def test_replica_context_is_refused_where_it_is_not_current(strategy: Strategy, other: Strategy, name: str) -> None:
    """Table of misuse 1.4.2, rows 5 and 6."""
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
    """Table of misuse 1.4.2, row 2; reference 1.4.5."""
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


OUT_OF_RUN: dict[str, Callable[[mpidist.ReplicaContext], Any]] = {
    "all_reduce": lambda context: context.all_reduce("sum", 1.0),
    "start_all_reduce": lambda context: context.start_all_reduce("sum", 1.0),
    "reduce_scatter": lambda context: context.reduce_scatter("sum", np.ones(2)),
    "all_gather": lambda context: context.all_gather(np.ones(2), 0),
    "merge_call": lambda context: context.merge_call(lambda strategy: 1),
}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("name", OUT_OF_RUN)
def test_calls_of_a_replica_outside_of_run_are_refused(comm: Intracomm, name: str) -> None:
    """Where a strategy of several ranks is open: the value of this process alone is not what is meant."""
    context = mpidist.get_replica_context()
    assert context is not None
    with mpidist.MultiWorkerMirroredStrategy(comm=comm) as strategy:
        with pytest.raises(RuntimeError, match=rf"^{name} was called outside of strategy\.run\(\).*; call "):
            OUT_OF_RUN[name](context)
        mpidist.get_strategy().run(OUT_OF_RUN[name], args=(context,))  # of the default strategy, as is said here
        assert strategy.reduce("sum", 1.0) == comm.size


@pytest.mark.parametrize("call", ["reduce", "barrier", "broadcast", "gather_object", "run"])
def test_calls_of_all_replicas_in_run_name_what_to_do(comm: Intracomm, call: str) -> None:
    with mpidist.MultiWorkerMirroredStrategy(comm=comm) as strategy:
        arguments = {"reduce": ("sum", 1.0), "barrier": (), "run": (int,)}.get(call, (1.0,))
        text = {
            "reduce": "get_replica_context.* there",
            "run": "call the function itself",
            "barrier": "leave it out",
        }.get(call, "outside.*merge_call")
        with pytest.raises(RuntimeError, match=f"^{call}.* in cross-replica context.*; .*{text}"):
            strategy.run(getattr(strategy, call), args=arguments)


def test_run_with_bare_arguments_says_how_to_pass_them() -> None:
    strategy = mpidist.OneDeviceStrategy()
    for arguments in ((1.0,), (1.0, 2.0), ((), 2.0)):
        with pytest.raises(ValueError, match=r"write args=\(x,( y)?\)"):
            strategy.run(lambda x, y: x + y, *arguments)
