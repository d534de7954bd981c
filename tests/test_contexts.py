"""Which strategy is current, on which side of it, and what is refused where: any number of ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.alarms import RangError, alarm
from support.replicas import inside

import mpidist
from mpidist import OneDeviceStrategy, context_stack
from mpidist.transport.failures import open_groups

pytestmark = pytest.mark.ranks(1, 3)


@pytest.fixture
def other():
    with OneDeviceStrategy() as made:
        yield made


@pytest.fixture
def no_strategy_is_open(monkeypatch):
    """Other modules may keep strategies open, outside of which the default strategy's replica refuses calls."""
    monkeypatch.setattr(open_groups, "num_strategies", lambda: 0)


@pytest.fixture(autouse=True)
def _leave_the_thread_as_it_was():
    before = state()
    yield
    assert state() == before


def state():
    return (
        mpidist.get_strategy(),
        mpidist.get_replica_context(),
        mpidist.in_cross_replica_context(),
        mpidist.has_strategy(),
    )


DEFAULT = state()


def across(strategy):
    return strategy, None, True, True


def seen_in_run(strategy):
    return strategy.run(state)


def in_thread(function):
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()


@pytest.mark.core
def test_default_strategy_has_one_replica():
    strategy, context, in_cross, has = state()
    assert (in_cross, has) == (False, False)
    assert context is not None
    assert (context.strategy, context.replica_id_in_sync_group, context.num_replicas_in_sync) == (strategy, 0, 1)
    assert strategy.num_replicas_in_sync == 1


@pytest.mark.core
def test_scope_is_cross_replica_context(strategy):
    assert mpidist.get_loss_reduction() is mpidist.ReduceOp.SUM
    scope = strategy.scope()
    for _ in range(2):
        with scope as entered:
            assert entered is strategy
            assert mpidist.get_loss_reduction() is mpidist.ReduceOp.SUM
            with strategy.scope(), scope:  # once more inside itself
                assert state() == across(strategy)
            assert state() == across(strategy)
        assert state() == DEFAULT


@pytest.mark.core
def test_run_is_replica_context_of_this_rank(strategy):
    """Outside the scope and inside it, under both names."""

    def look(call):
        current, context, in_cross, has = call(state)
        assert (current, in_cross, has) == (strategy, False, True)
        assert context.strategy is strategy
        assert context.replica_id_in_sync_group == strategy.topology.rank
        assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
        assert context.devices == (strategy.extended.worker_devices[strategy.topology.rank],)

    for call in (strategy.run, strategy.extended.call_for_each_replica):
        look(call)
        with strategy.scope():
            look(call)


def test_merge_call_is_cross_replica_context(strategy):
    def step():
        context = mpidist.get_replica_context()
        assert context.merge_call(lambda merged: (merged, state())) == (strategy, across(strategy))
        assert mpidist.get_replica_context() is context

    strategy.run(step)


def test_update_is_cross_replica_context(strategy):
    with strategy.scope():
        variable = mpidist.Variable(0.0)
    assert strategy.extended.update(variable, lambda var: state()) == across(strategy)
    assert strategy.run(lambda: strategy.extended.update(variable, lambda var: state())) == across(strategy)


def test_new_thread_is_in_the_default_state(strategy):
    with strategy.scope():
        assert in_thread(state) == DEFAULT
    assert strategy.run(lambda: in_thread(state)) == DEFAULT


def test_threads_may_be_in_different_scopes_at_once(strategy, other):
    inside = threading.Barrier(2)

    def enter(mine):
        with mine.scope():
            inside.wait()
            seen = [state(), seen_in_run(mine)]
            inside.wait()
        return seen

    with ThreadPoolExecutor(2) as executor:
        first, second = executor.map(enter, (strategy, other))
    for mine, (in_scope, in_run) in ((strategy, first), (other, second)):
        assert in_scope == across(mine)
        assert (in_run[0], in_run[2], in_run[3]) == (mine, False, True)


def test_exceptions_come_out_as_they_are_and_leave_no_context_behind(strategy):
    def fail(*_):
        raise KeyError("mine")

    with strategy.scope():
        variable = mpidist.Variable(0.0)
    calls = [
        lambda: strategy.run(fail),
        lambda: inside(strategy, "merge_call", fail),
        lambda: inside(strategy, "merge_call", lambda merged: merged.run(fail)),
        lambda: inside(strategy, "merge_call", lambda merged: inside(merged, "merge_call", fail)),
        lambda: strategy.extended.update(variable, fail),
    ]
    for call in calls:
        with pytest.raises(KeyError, match="mine"):
            call()
        assert state() == DEFAULT
        assert strategy.reduce("SUM", 1) == strategy.size
    with pytest.raises(KeyError), strategy.scope():
        fail()


def test_default_scope_changes_nothing_and_mixes_with_no_other(strategy):
    default = mpidist.get_strategy()
    with default.scope() as entered:
        assert entered is default
        with default.scope():
            assert state() == DEFAULT
        text = r"mixing different strategies; .* of another one, .*: use one strategy, or make the call outside "
        with pytest.raises(RuntimeError, match=text), strategy.scope():
            pass
        assert state() == DEFAULT
    with strategy.scope():
        with pytest.raises(RuntimeError, match="mixing different strategies"), default.scope():
            pass
        assert state() == across(strategy)


@pytest.mark.core
def test_scopes_are_left_in_reverse_order_only(strategy):
    """The refused scope is left, too, as no `with` statement can leave it again."""

    def leave(scope):
        with pytest.raises(RuntimeError, match="scope nesting error"):
            scope.__exit__(None, None, None)

    outer, inner = strategy.scope(), strategy.scope()
    outer.__enter__()
    inner.__enter__()
    leave(outer)
    assert state() == across(strategy)
    inner.__exit__(None, None, None)
    assert state() == DEFAULT
    outer.__enter__()
    strategy.run(leave, (outer,))
    assert state() == DEFAULT


def test_set_strategy_enters_its_scope(strategy, other):
    default = mpidist.get_strategy()
    for none in (None, default):
        mpidist.experimental_set_strategy(strategy)
        assert state() == across(strategy)
        mpidist.experimental_set_strategy(other)
        assert mpidist.get_strategy() is other
        assert in_thread(state) == DEFAULT
        mpidist.experimental_set_strategy(none)
        assert state() == DEFAULT
    with pytest.raises(TypeError, match="strategy"):
        mpidist.experimental_set_strategy("mirrored")


def test_set_strategy_is_refused_inside_scope_and_run(strategy, other):
    def try_all():
        before = state()
        for wanted in (other, strategy, None):
            with pytest.raises(RuntimeError, match="must not be called inside"):
                mpidist.experimental_set_strategy(wanted)
            assert state() == before

    with strategy.scope():
        try_all()
    strategy.run(try_all)


@pytest.mark.usefixtures("no_strategy_is_open")
def test_default_context_reduces_its_own_value():
    default, context = mpidist.get_strategy(), mpidist.get_replica_context()
    assert default.reduce("SUM", 2.0) == 2.0
    assert context.all_reduce("MEAN", 2.0) == 2.0
    assert context.all_gather(np.arange(2), axis=0).tolist() == [0, 1]
    assert context.merge_call(lambda strategy, x: strategy.reduce("SUM", x), (3.0,)) == 3.0
    assert default.run(lambda x: x + 1, (1,)) == 2


@pytest.mark.usefixtures("no_strategy_is_open")
def test_default_strategy_stays_open_after_close():
    for _ in range(2):
        with mpidist.get_strategy() as default:
            assert default.reduce("SUM", 2.0) == 2.0
        default.close()
    assert mpidist.get_replica_context().all_reduce("SUM", 2.0) == 2.0
    assert float(mpidist.Variable(1.0).assign_add(1.0)) == 2.0


@pytest.mark.usefixtures("no_strategy_is_open")
def test_merge_call_of_the_default_context_is_cross_replica_context():
    """As in TensorFlow: there the default strategy's scope and `run` change nothing, and `merge_call` does."""
    default, context = mpidist.get_strategy(), mpidist.get_replica_context()

    def merged(strategy):
        assert strategy is default
        with pytest.raises(RuntimeError, match="cross-replica"):
            context.all_reduce("SUM", 1.0)
        with pytest.raises(RuntimeError, match="cross-replica"):
            context.merge_call(merged)
        assert strategy.run(state) == DEFAULT
        assert strategy.extended.reduce_to("SUM", 2.0, 0) == 2.0
        return state()

    assert context.merge_call(merged) == (default, None, True, False)
    assert default.run(lambda: mpidist.get_replica_context().merge_call(merged)) == (default, None, True, False)


def test_run_interrupted_by_a_signal_handler_leaves_no_context(strategy):
    """Wherever it comes: between entering the context and the function, or after it."""

    def forever(delay):
        with alarm(delay):
            while True:
                strategy.run(state)

    for delay in np.random.default_rng(strategy.topology.rank).uniform(2e-5, 2e-4, size=1000).tolist():
        with pytest.raises(RangError):
            forever(delay)
        assert context_stack.innermost() is None


ONE = np.float32(1.0)
CROSS_REPLICA = {
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


def test_methods_work_in_own_scope_and_out_of_any(strategy, other):
    with strategy.scope():
        variable = mpidist.Variable(0.0)
    for call in WORK_IN_SCOPE_AND_OUT.values():
        call(strategy, variable)
        with strategy.scope():
            call(strategy, variable)
        with other.scope(), pytest.raises(RuntimeError, match="mixing different strategies"):
            call(strategy, variable)


def test_cross_replica_methods_are_refused_in_run(strategy):
    def step():
        for call in CROSS_REPLICA.values():
            with pytest.raises(RuntimeError, match="requires being in cross-replica context"):
                call(strategy, None)
        with pytest.raises(RuntimeError, match="all_gather"):
            strategy.gather(np.ones(2), axis=0)

    strategy.run(step)


def test_update_calls_with_the_very_variable_and_argument(strategy):
    with strategy.scope():
        variable = mpidist.Variable(0.0)
    argument = object()
    calls = []
    strategy.extended.update(variable, lambda *args, **kwargs: calls.append((args, kwargs)), (argument,), {"k": 1})
    assert calls == [((variable, argument), {"k": 1})]


def test_another_strategys_scope_and_run_are_refused(strategy, other):
    made_outside = other.scope()
    with strategy.scope():
        with pytest.raises(RuntimeError, match="mixing different strategies"), made_outside:
            pass
        assert mpidist.get_strategy() is strategy

    def step():
        with pytest.raises(RuntimeError):
            call(other, None)

    for call in (CROSS_REPLICA["scope"], CROSS_REPLICA["run"]):
        with strategy.scope(), pytest.raises(RuntimeError, match="mixing different strategies"):
            call(other, None)
        strategy.run(step)


CONTEXT_CALLS = {
    "all_reduce": lambda context: context.all_reduce("sum", 1.0),
    "start_all_reduce": lambda context: context.start_all_reduce("sum", 1.0),
    "reduce_scatter": lambda context: context.reduce_scatter("sum", np.ones(2)),
    "all_gather": lambda context: context.all_gather(np.ones(2), 0),
    "merge_call": lambda context: context.merge_call(lambda strategy: 1),
}


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "merge_call"])
def test_replica_context_is_refused_where_it_is_not_current(strategy, other, name):
    call = CONTEXT_CALLS[name]
    context = strategy.run(mpidist.get_replica_context)
    with (
        strategy.scope(),
        pytest.raises(RuntimeError, match=rf"\.{name} needs to be inside the function of strategy\.run"),
    ):
        call(context)
    with pytest.raises(RuntimeError, match="mismatching strategies"):
        other.run(call, [context])
    with pytest.raises(RuntimeError, match="mismatching ReplicaContext"):
        strategy.run(call, [context])
    with pytest.raises(RuntimeError, match="mismatching strategies"):
        call(context)

    def merge_in_merge(_):
        with pytest.raises(RuntimeError, match="needs to be inside"):
            call(mine)

    def step():
        nonlocal mine
        mine = mpidist.get_replica_context()
        with pytest.raises(RuntimeError, match="mismatching"):
            in_thread(lambda: strategy.run(call, [mine]))
        mine.merge_call(merge_in_merge)

    mine = None
    strategy.run(step)


def test_colocate_vars_with_needs_the_scope(strategy, other):
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
def test_calls_of_a_replica_outside_of_run_are_refused(strategy):
    """Where a strategy of several ranks is open: the value of this process alone is not what is meant."""
    context = mpidist.get_replica_context()
    assert context is not None
    for name, call in CONTEXT_CALLS.items():
        with pytest.raises(RuntimeError, match=rf"^{name} was called outside of strategy\.run\(\).*; call "):
            call(context)
        mpidist.get_strategy().run(call, args=(context,))  # of the default strategy, as is said here
    assert strategy.reduce("sum", 1.0) == 3


def test_run_refuses_calls_of_all_replicas_with_advice(strategy):
    for call, arguments, text in (
        ("gather_object", (1.0,), "outside.*merge_call"),
        ("run", (int,), "call the function itself"),
    ):
        with pytest.raises(RuntimeError, match=f"^{call}.* in cross-replica context.*; .*{text}"):
            strategy.run(getattr(strategy, call), args=arguments)


@pytest.mark.no_mpi
def test_run_with_bare_arguments_raises_with_advice():
    strategy = mpidist.OneDeviceStrategy()
    for arguments in ((1.0,), (1.0, 2.0), ((), 2.0)):
        with pytest.raises(ValueError, match=r"write args=\(x,( y)?\)"):
            strategy.run(lambda x, y: x + y, *arguments)
