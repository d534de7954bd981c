"""Whole programs as TensorFlow's scripts write them, and many requests in one program."""

import time

import numpy as np
import pytest
from parameter_server.clusters import PATIENT, on_workers, worker_test

import mpidist
from mpidist import Variable
from mpidist.experimental import ParameterServerStrategy
from mpidist.parameter_server.server import ParameterServer

RNG = np.random.default_rng(5)
FEATURES = RNG.normal(size=(240, 3))
TRUTH = np.array([2.0, -1.0, 0.5])
TARGETS = FEATURES @ TRUTH


@pytest.mark.ranks(3)
@pytest.mark.core
@pytest.mark.parametrize("staleness", [None, 0])
def test_linear_regression(comm, staleness):
    """Every worker takes its part of the data, and all find the same weights."""
    strategy = ParameterServerStrategy(staleness=staleness, comm=comm)
    if strategy.is_ps:
        strategy.serve()
    else:
        with strategy.scope():
            weights = Variable(np.zeros(3), name="weights")
            step = Variable(0, aggregation="ONLY_FIRST_REPLICA", name="global_step")
        dataset = strategy.distribute_datasets_from_function(
            lambda context: [
                (FEATURES[at :: context.num_input_pipelines][:24], TARGETS[at :: context.num_input_pipelines][:24])
                for at in [context.input_pipeline_id]
            ]
        )

        def train_step(features, targets):
            current = weights.numpy()
            gradient = features.T @ (features @ current - targets) / len(features)
            weights.assign_sub(0.1 * gradient)
            step.assign_add(1)

        for _ in range(80):
            for features, targets in dataset:
                strategy.run(train_step, args=(features, targets))
            strategy.step_done()
        strategy.barrier()
        assert int(step) == 80 * strategy.topology.size
        assert np.abs(weights - TRUTH).max() < 0.05
    strategy.close()


@pytest.mark.ranks(3)
@pytest.mark.core
def test_server_serves_open_strategies_one_after_the_other(comm):
    """Workers that close the first one need not wait until the server has closed it."""
    strategies = [ParameterServerStrategy(comm=comm, communication_options=PATIENT) for _ in range(2)]
    for strategy in strategies:
        if strategy.is_ps:
            strategy.serve()
        else:
            with strategy.scope():
                total = Variable(0.0)
            total.assign_add(1.0)
            strategy.barrier()
            assert float(total) == strategy.topology.size
            strategy.close()
    for strategy in reversed(strategies):
        strategy.close()


@pytest.mark.core
@pytest.mark.ranks(3)
def test_strategy_with_servers_busy_in_another_is_refused(comm):
    first, second = (ParameterServerStrategy(comm=comm, communication_options=PATIENT) for _ in range(2))
    workers = comm.Split(first.is_ps)
    if first.is_ps:
        first.serve()
    else:
        with first.scope():
            total = Variable(1.0)
        busy = f"{comm.size - 1} of the job, in serve"
        with second.scope(), pytest.raises(RuntimeError, match=f"Variable would wait for rank {busy}"):
            Variable(2.0)
        with pytest.raises(RuntimeError, match=rf"barrier\(\) would wait for rank {busy}"):
            second.barrier()
        for make in (ParameterServerStrategy, mpidist.MultiWorkerMirroredStrategy):
            with pytest.raises(RuntimeError, match=f"a new strategy would wait for rank {busy}.* comm= of workers"):
                make(comm=comm)
        with mpidist.MultiWorkerMirroredStrategy(comm=workers) as own:
            assert own.reduce("sum", 1.0) == workers.size
        assert float(total) == 1.0
        first.close()
    if not second.is_ps:
        with second.scope():
            assert float(Variable(3.0)) == 3.0
    second.close()
    workers.Free()


@pytest.mark.ranks(1, 3)
@worker_test()
def test_update_and_merge_call(strategy):
    with strategy.scope():
        variable = Variable(1.0)
    strategy.extended.update(variable, lambda var, delta: var.assign_add(delta), args=(2.0,))

    def merge(_, delta):
        variable.assign_add(delta)

    strategy.run(lambda: mpidist.get_replica_context().merge_call(merge, args=(1.0,)))
    strategy.barrier()
    assert float(variable) == 1.0 + 3.0 * strategy.topology.size
    assert strategy.experimental_local_results(variable.numpy())[0] == float(variable)


@pytest.mark.ranks(3)
def test_server_sleeps_when_idle(comm, monkeypatch):
    """Between its looks at the workers; a machine that is busy makes them fewer."""
    looks, look = list[float](), ParameterServer._advance

    def note(server, *only):
        looks.append(time.monotonic())
        return look(server, *only)

    def work(strategy):
        begun = time.monotonic()
        time.sleep(1.0)
        return begun

    monkeypatch.setattr(ParameterServer, "_advance", note)
    begun = max(on_workers(comm, work))
    assert sum(begun + 0.1 < at < begun + 0.9 for at in looks) < 5000
