"""The chief schedules functions, the other workers call them, and their results and errors come back."""

import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from parameter_server.clusters import on_workers, worker_test
from transport.failures.clocks import clock

import mpidist
from mpidist import Variable
from mpidist.errors import CancelledError, OutOfRangeError, PeerFailedError
from mpidist.experimental import ParameterServerStrategy as Strategy
from mpidist.experimental import server_rules
from mpidist.experimental.coordinator import ClusterCoordinator, register

__all__ = ["clock"]

HERE = {}  # what functions of this rank find


@register("test: echo")
def echo(*args, **kwargs):
    return {"args": args, "kwargs": kwargs}


@register("test: add")
def add(delta, seconds=0.0):
    time.sleep(seconds)
    HERE["variable"].assign_add(delta)
    return int(HERE["rank"])


@register("test: fail")
def fail(text, waits_for_chief=False):
    while waits_for_chief and not HERE["comm"].Iprobe(0):
        time.sleep(0.001)
    raise ZeroDivisionError(text)


@register("test: wait")
def wait(seconds):
    time.sleep(seconds)
    return seconds


@register("test: wait for the chief")
def wait_for_chief():
    while not HERE["comm"].Iprobe(0):
        time.sleep(0.001)


@register("test: take")
def take(iterator):
    return [HERE["rank"], next(iterator)]


@register("test: return an object")
def return_object():
    return object()


@register("test: push too much")
def push_too_much():
    HERE["strategy"].push(HERE["variable"], np.ones(2), server_rules.Registered("test: refuse"))


@server_rules.register("test: refuse")
def refuse(value, gradient, memory):
    raise ValueError("no such gradient")


class LeavesError(BaseException):
    """What ends a worker, and not its function alone."""


def coordinate(comm, work, **arguments):
    """Let the chief do something with a coordinator, and the others serve. Returns what the chief has returned."""

    def on_each(strategy):
        with strategy.scope():
            HERE.update(variable=Variable(np.zeros(2)), rank=strategy.topology.rank, strategy=strategy)
        coordinator = ClusterCoordinator(strategy)
        HERE["dataset"] = coordinator.create_per_worker_dataset(data)
        if strategy.is_chief:
            return work(coordinator)
        coordinator.serve()
        return None

    return on_workers(comm, on_each, **arguments)[0]


def data(context):
    return list(range(100 * context.input_pipeline_id, 100 * context.input_pipeline_id + 50))


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.core
@pytest.mark.parametrize("num_ps", [1, 2])
def test_functions_are_called_and_joined(comm, num_ps):
    def work(coordinator):
        sums = []
        assert coordinator.done()
        for _ in range(2):
            values = [coordinator.schedule(add, args=([1.0, 2.0],)) for _ in range(20)]
            coordinator.join()
            assert coordinator.done()
            sums.append(HERE["variable"].numpy().tolist())
            ranks = set(coordinator.fetch(values))
            assert ranks <= {*range(min(1, comm.size - num_ps - 1), max(1, comm.size - num_ps))}
        return sums

    num_ps = min(num_ps, max(1, comm.size - 1))
    assert coordinate(comm, work, num_ps=num_ps) == [[20, 40], [40, 80]]


@pytest.mark.ranks(1, 3)
@pytest.mark.core
def test_arguments_and_results_are_nests(comm):
    large = np.arange(400_000.0)
    given = [
        (2, (3, 4.5), [5], {"v": 1, 2: None, (1, "b"): True}),
        ["text", "ä", "", 1 + 2j, float("inf"), 10**30, -0.0, False],
        [np.float32(1.5), np.arange(6, dtype=np.int16).reshape(2, 3).T, np.zeros((0, 3)), np.array(7), large],
        [np.array(["a", "bcd"]), np.array([True]), np.array(b"xy"), np.array([1, 2], ">i4"), np.datetime64("2020")],
    ]

    def work(coordinator):
        value = coordinator.schedule("test: echo", given, {"key": large[::2]})
        changed = coordinator.fetch({"it": value, "other": 5})
        assert changed["other"] == 5
        found = changed["it"]
        assert found["args"][:2] == tuple(given[:2])
        assert isinstance(found["args"][1][7], bool)
        for its, mine in zip([*found["args"][2], *found["args"][3]], [*given[2], *given[3]], strict=True):
            assert (type(its), its.dtype, its.shape) == (type(mine), mine.dtype, mine.shape)
            assert (its == mine).all()
        assert (found["kwargs"]["key"] == large[::2]).all()
        found["args"][2][4][:] = 0  # belongs to the caller
        assert value.fetch() is found

    coordinate(comm, work)


@pytest.mark.ranks(1, 3)
@pytest.mark.core
def test_errors_are_raised_once_and_cancel_waiting_functions(comm):
    def work(coordinator):
        def schedule():
            while True:
                coordinator.schedule(wait, args=(0.001,))

        for ask in (coordinator.join, schedule, finish(coordinator)):
            failed = coordinator.schedule(fail, args=("the first",))
            with pytest.raises(
                ZeroDivisionError, match=r"'test: fail' failed on rank \d: ZeroDivisionError: the first"
            ):
                ask()
            with pytest.raises(ZeroDivisionError, match="the first"):
                failed.fetch()
            coordinator.join()
            assert coordinator.fetch(coordinator.schedule(wait, args=(0.0,))) == 0.0

    coordinate(comm, work)


def finish(coordinator):
    """Return what asks until all functions are done."""

    def ask():
        while not coordinator.done():
            time.sleep(0.001)

    return ask


@pytest.mark.ranks(3)
def test_functions_that_wait_are_cancelled(comm):
    HERE["comm"], workers = comm, range(1, comm.size - 1)

    def work(coordinator):
        first = [coordinator.schedule(wait, args=(0.05,)) for _ in workers[1:]]
        coordinator.schedule(fail, args=("the first", True))
        values = [coordinator.schedule(add, args=(1.0, 0.02)) for _ in range(300)]  # which would take seconds
        for worker in workers:
            comm.send(None, worker)
        with pytest.raises(ZeroDivisionError):
            coordinator.join()
        assert coordinator.fetch(first) == [0.05] * len(first)
        cancelled = [value for value in values if "CancelledError" in repr(value)]
        num_cancelled = len(cancelled)
        assert num_cancelled > 0
        for value in cancelled:
            with pytest.raises(CancelledError, match="'test: add' was not called: another function had failed"):
                value.fetch()
        assert HERE["variable"].numpy().tolist() == [300.0 - num_cancelled] * 2

    coordinate(comm, work)
    if comm.rank in workers:
        comm.recv(source=0)


@pytest.mark.ranks(1, 3)
def test_wrong_functions_and_arguments_are_refused(comm):
    def work(coordinator):
        value = coordinator.schedule(echo)
        for kind, text, fn, args in (
            (TypeError, "registered on all ranks, got .*lambda.*register", lambda: 1, ()),
            (TypeError, "registered on all ranks, got 'nobody'", "nobody", ()),
            (ValueError, "RemoteValue", echo, ([value],)),
            (TypeError, "type set, and needs arrays", echo, ({1},)),
            (TypeError, "type function, and needs", echo, (len_of,)),
            (TypeError, "type ServerVariable, and needs", echo, (HERE["variable"],)),
            (TypeError, "dtype object", echo, (np.array([None]),)),
            (TypeError, "args must be a list or tuple, got ndarray", echo, np.ones(1)),
        ):
            with pytest.raises(kind, match=text):
                coordinator.schedule(fn, args)
        with pytest.raises(TypeError, match="kwargs must be a dict, got list"):
            coordinator.schedule(echo, (1,), ["item"])
        assert HERE["dataset"] is not None
        for name, text in (
            ("test: return an object", "the result of 'test: return an object' has an item of type object, and needs"),
            ("test: push too much", "no such gradient"),
        ):
            coordinator.schedule(name)
            with pytest.raises((TypeError, RuntimeError, ValueError), match=text):
                coordinator.join()
        with pytest.raises(RuntimeError, match="on the chief: it is for the other workers"):
            coordinator.serve()

    coordinate(comm, work)


def len_of(item):
    return len(item)


@pytest.mark.ranks(1, 3, 4)
def test_per_worker_dataset_is_separate_on_workers(comm):
    def work(coordinator):
        with pytest.raises(NotImplementedError, match="in functions that are scheduled"):
            next(iter(HERE["dataset"]))
        first, second = iter(HERE["dataset"]), iter(HERE["dataset"])
        found = [coordinator.schedule(take, args=(iterator,)) for _ in range(10) for iterator in (first, second)]
        values = coordinator.fetch(found)
        coordinator.schedule(echo, args=([HERE["dataset"]],))
        with pytest.raises((TypeError, ValueError)):
            coordinator.schedule(echo, args=(iter([1]),))
        coordinator.join()
        with pytest.raises(OutOfRangeError, match="'test: take' failed on rank"):
            take_all(coordinator, first)
        return [values[0::2], values[1::2]]

    for iterator in coordinate(comm, work):
        for rank in {rank for rank, _ in iterator}:
            numbers = [number for of, number in iterator if of == rank]
            assert numbers == list(range(100 * max(0, rank - 1), 100 * max(0, rank - 1) + len(numbers)))


def take_all(coordinator, iterator):
    for _ in range(50 * coordinator.strategy.topology.size):
        coordinator.schedule(take, args=(iterator,))
    coordinator.join()


@pytest.mark.ranks(3)
@worker_test()
def test_per_worker_dataset_refuses_other_objects(strategy):
    """At once, or, if a function returns it, in the function that asks for it."""
    coordinator = ClusterCoordinator(strategy)
    refused = [
        ("got NoneType", lambda: None),
        ("a generator is used up", lambda: (np.ones(2) for _ in range(3))),
        ("one array", lambda: np.ones((3, 2))),
        ("one batch", lambda: {"x": np.ones(2)}),
    ]
    for got, make in refused:
        with pytest.raises(TypeError, match=rf"create_per_worker_dataset.* takes a data set, .*{got}"):
            coordinator.create_per_worker_dataset(make())
    datasets = [coordinator.create_per_worker_dataset(make) for _, make in refused]
    if not strategy.is_chief:
        coordinator.serve()
        return
    for (got, _), dataset in zip(refused, datasets, strict=True):
        with pytest.raises(TypeError, match=rf"function of create_per_worker_dataset.* must return .*{got}"):
            coordinator.schedule(take, (iter(dataset),)).fetch()
        with pytest.raises(TypeError, match="must return a data set"):
            coordinator.join()


@pytest.mark.ranks(1, 3)
def test_coordinator_refuses_calls_of_a_second_thread(comm):
    """Two threads that schedule at once would take each other's results."""

    def work(coordinator):
        has_called, is_over = threading.Event(), threading.Event()

        def first():
            HERE["value"] = coordinator.schedule(add, args=(1.0,))
            has_called.set()
            is_over.wait()

        thread = threading.Thread(target=first, name="first")
        thread.start()
        has_called.wait()
        calls = (lambda: coordinator.schedule(add, args=(1.0,)), coordinator.join, coordinator.done)
        try:
            for call in calls:
                with pytest.raises(RuntimeError, match="but thread 'first' makes this strategy's calls"):
                    call()
        finally:
            is_over.set()
            thread.join()
        coordinator.join()
        return HERE["value"].fetch(), HERE["variable"].numpy().tolist()

    result = coordinate(comm, work)
    if comm.rank == 0:
        assert result[1] == [1, 1]


@pytest.mark.ranks(3)
def test_coordinator_of_a_strategy_is_unique(comm):
    def work(coordinator):
        assert ClusterCoordinator(coordinator.strategy) is coordinator
        assert coordinator.strategy is HERE["strategy"]
        value = coordinator.schedule(add, args=(1.0,))
        coordinator.close()
        assert coordinator.fetch([value])[0] in range(comm.size)
        assert HERE["variable"].numpy().tolist() == [1, 1]
        coordinator.close()
        with pytest.raises(RuntimeError, match="closed coordinator"):
            coordinator.schedule(add, args=(1.0,))

    def on_each(strategy):
        """Let all workers make calls together again afterwards."""
        with strategy.scope():
            HERE.update(variable=Variable(np.zeros(2)), rank=strategy.topology.rank, strategy=strategy)
        coordinator = ClusterCoordinator(strategy)
        if strategy.is_chief:
            work(coordinator)
        else:
            with pytest.raises(RuntimeError, match="not the chief"):
                coordinator.schedule(add, args=(1.0,))
            mpidist.Server(strategy).join()
        strategy.barrier()
        with strategy.scope():
            assert float(Variable(1.0)) == 1.0

    on_workers(comm, on_each)


@pytest.mark.ranks(3)
@worker_test()
def test_worker_waits_for_an_idle_chief_however_long(strategy, comm, clock):
    coordinator = ClusterCoordinator(strategy)
    if strategy.is_chief:
        comm.recv(source=1)
        assert coordinator.fetch(coordinator.schedule(wait, args=(0.0,))) == 0.0
    else:
        clock.do_in_wait(clock.go_on, lambda: comm.send(None, 0))
        coordinator.serve()


@pytest.mark.ranks(3)
def test_other_strategies_are_refused(comm):
    """Each rank by itself, before it waits for others."""
    with mpidist.MultiWorkerMirroredStrategy(comm=comm) as mirrored:
        with pytest.raises(ValueError, match="needs a ParameterServerStrategy, got MultiWorkerMirroredStrategy"):
            ClusterCoordinator(mirrored)
        with pytest.raises(TypeError, match="takes a strategy, got str"):
            ClusterCoordinator("strategy")
    with Strategy(comm=comm, staleness=2) as strategy:
        text = "on a parameter server" if strategy.is_ps else "needs staleness=None, got 2"
        with pytest.raises((ValueError, RuntimeError), match=text):
            ClusterCoordinator(strategy)


@pytest.mark.ranks(3, 4)
@pytest.mark.core
def test_workers_may_end_early_and_the_chief_may_close_at_any_time(comm):
    def work(strategy):
        with strategy.scope():
            HERE.update(variable=Variable(0.0), rank=strategy.topology.rank)
        coordinator = ClusterCoordinator(strategy)
        if strategy.is_chief:
            values = []
            with suppress(PeerFailedError):  # once all others have closed
                for _ in range(40):
                    values.append(coordinator.schedule(wait, args=(0.001,)))
            if strategy.topology.size != 2:
                coordinator.fetch(values[:20])
            return values
        if strategy.topology.rank > 1:  # the others close at once
            coordinator.serve()
        return None

    def on_all(strategy):
        values = work(strategy)
        strategy.close()
        if not values:
            return 0
        assert all(value.is_ready for value in values)
        return sum("Error" not in repr(value) for value in values)

    called = max(on_workers(comm, on_all))
    workers = max(1, comm.size - 1)
    assert called == 40 if workers == 1 else called == 0 if workers == 2 else called >= 20


@pytest.mark.ranks(3)
def test_functions_without_a_worker_are_an_error(comm):
    with suppress(LeavesError), Strategy(comm=comm, on_worker_lost="ignore") as strategy:
        if strategy.is_ps:
            strategy.serve()
        else:
            coordinator = ClusterCoordinator(strategy)
            if strategy.is_chief:
                value = coordinator.schedule(wait, args=(0.0,))
                with pytest.raises(PeerFailedError, match=r"'test: wait' cannot be called: .*rank 1 left: .*tired"):
                    coordinator.join()
                with pytest.raises(CancelledError, match="'test: wait' was not called: no worker is left"):
                    value.fetch()
                late = coordinator.schedule(wait, args=(0.0,))
                with pytest.raises(CancelledError, match="no worker is left"):
                    late.fetch()
                with pytest.raises(PeerFailedError, match="no worker is left"):
                    coordinator.join()
            else:
                raise LeavesError("tired of \udcff")  # as names of files may be


@pytest.mark.core
@pytest.mark.ranks(3)
def test_workers_go_on_without_a_chief_that_left(comm, caplog):
    with suppress(LeavesError), Strategy(comm=comm, on_worker_lost="ignore") as strategy:
        if strategy.is_ps:
            strategy.serve()
        else:
            with strategy.scope():
                HERE.update(variable=Variable(0.0), rank=strategy.topology.rank)
            coordinator = ClusterCoordinator(strategy)
            if strategy.is_chief:
                coordinator.fetch(coordinator.schedule(add, args=(5.0,)))
                raise LeavesError("tired")
            coordinator.serve()
            assert "serve() of the coordinator ends, as the chief has left: " in caplog.text
            assert "tired" in caplog.text
            assert HERE["variable"].numpy() == 5.0


@pytest.mark.ranks(1, 3)
def test_error_without_a_join_is_raised_when_the_strategy_is_closed(comm):
    def work(strategy):
        coordinator = ClusterCoordinator(strategy)
        if not strategy.is_chief:
            coordinator.serve()
            return
        coordinator.fetch(coordinator.schedule(wait, args=(0,)))  # the worker serves
        coordinator.schedule(fail, args=("unseen",))
        with pytest.raises(ZeroDivisionError, match=r"'test: fail' failed on rank \d: ZeroDivisionError: unseen"):
            strategy.close()

    on_workers(comm, work)


@pytest.mark.ranks(1, 3)
def test_error_that_fetch_has_raised_is_not_raised_again_when_the_strategy_is_closed(comm):
    def work(strategy):
        coordinator = ClusterCoordinator(strategy)
        if not strategy.is_chief:
            coordinator.serve()
            return
        with pytest.raises(ZeroDivisionError, match="seen"):
            coordinator.fetch(coordinator.schedule(fail, args=("seen",)))
        strategy.close()

    on_workers(comm, work)


@pytest.mark.ranks(3)
def test_functions_without_a_join_that_are_not_called_are_logged(comm, caplog):
    def work(coordinator):
        for _ in range(4):
            coordinator.schedule(wait_for_chief)
        comm.send(None, 1)

    HERE["comm"] = comm
    coordinate(comm, work)
    if comm.rank == 1:
        comm.recv(source=0)
    text = "the strategy was closed before join(), so 3 scheduled functions will never be called"
    assert (text in caplog.text) == (comm.rank == 0)
