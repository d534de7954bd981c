"""TF_CONFIG with tasks that do not train: their ranks make the strategy with the others, and have no replica."""

import json

import numpy as np
import pytest
from support.everywhere import raises_everywhere

import mpidist
from mpidist import MultiWorkerMirroredStrategy
from mpidist.errors import TopologyError

pytestmark = pytest.mark.ranks(1, 3)


def set_tasks(monkeypatch, comm, tasks, listed):
    """Describe a cluster with the tasks `listed`, of which rank r is tasks[r]."""
    cluster = {job: [f"localhost:{at}" for at in range(listed.count(job))] for job in set(listed)}
    own = tasks[comm.rank]
    task = {"type": own, "index": tasks[: comm.rank].count(own)}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    return own


@pytest.mark.parametrize("first", [True, False])
def test_tf_config_with_a_ps_runs_a_block_of_each_task(comm, monkeypatch, first):
    """The printed program of the page of ParameterServerStrategy."""
    workers = ["worker"] * (comm.size - 1)
    tasks = ["ps", *workers] if first else [*workers, "ps"]
    own = set_tasks(monkeypatch, comm, tasks, tasks)
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        assert strategy.cluster_resolver is not None
        assert strategy.cluster_resolver.task_type == own
        if own == "worker":
            assert strategy.reduce("sum", np.ones(2)).tolist() == [len(workers)] * 2
            assert (strategy.rank, strategy.size) == (comm.rank - first, len(workers))
            assert strategy.is_chief == (strategy.rank == 0)
        else:
            assert not strategy.is_chief
            assert strategy.extended.worker_devices == ()
            for call in (lambda: strategy.run(int), lambda: strategy.reduce("sum", 1.0), strategy.barrier):
                with pytest.raises(RuntimeError, match="on ps 0 of the cluster, which has no replica"):
                    call()


def test_tf_config_with_an_evaluator_computes_alone(comm, monkeypatch):
    tasks = ["worker"] * (comm.size - 1) + ["evaluator"]
    own = set_tasks(monkeypatch, comm, tasks, tasks)
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        step = strategy.run(lambda: mpidist.get_replica_context().all_reduce("sum", 1.0))
        assert step == (1 if own == "evaluator" else comm.size - 1)


@pytest.mark.ranks(3)
def test_tf_config_with_a_ps_and_too_few_workers_is_refused(comm, monkeypatch):
    tasks = ["worker"] * (comm.size - 1) + ["ps"]
    set_tasks(monkeypatch, comm, tasks, [*tasks, "worker"])
    with raises_everywhere(comm, TopologyError, f"has {comm.size} tasks"):
        MultiWorkerMirroredStrategy(comm=comm)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("tasks", "text"),
    [
        (["worker", "worker", "trainer"], "rank 2: .*Unrecognized task_type 'trainer'; known are chief, worker, ps"),
        (["ps", "ps", "evaluator"], "none of the 3 ranks is a chief or a worker of the cluster"),
    ],
)
def test_tf_config_in_which_not_all_ranks_have_a_role_or_none_trains_is_refused(comm, monkeypatch, tasks, text):
    set_tasks(monkeypatch, comm, tasks, ["worker"] * comm.size)
    with raises_everywhere(comm, TopologyError, text):
        MultiWorkerMirroredStrategy(comm=comm)


def test_tf_config_with_a_ps_without_rank_is_accepted(comm, monkeypatch):
    tasks = ["worker"] * comm.size
    set_tasks(monkeypatch, comm, tasks, [*tasks, "ps"])
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        assert strategy.reduce("sum", 1.0) == comm.size
