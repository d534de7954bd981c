"""Which rank is a worker and which one a server, and clusters that are refused on every rank."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from mpi4py import MPI
from support.everywhere import raises_everywhere

import mpidist
from mpidist import CommunicationOptions
from mpidist.cluster_resolver import ClusterSpec, SimpleClusterResolver
from mpidist.context_stack import parts_of
from mpidist.errors import InvalidArgumentError, TopologyError
from mpidist.experimental import ParameterServerStrategy, Server
from mpidist.experimental.coordinator import ClusterCoordinator
from mpidist.parameter_server.cluster import Role, Wanted

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

SimpleTask = tuple[str, int]


def resolver_of(tasks: list[SimpleTask], rank: int, **more: Any) -> SimpleClusterResolver:
    """Make the resolver of a rank, where rank r is the r-th task."""
    jobs: dict[str, list[str]] = {}
    for job, _ in tasks:
        jobs.setdefault(job, []).append("n:1")
    return SimpleClusterResolver(ClusterSpec({**jobs, **more}), "", *tasks[rank])


def end(strategy: ParameterServerStrategy) -> None:
    if strategy.is_ps:
        strategy.serve()
    strategy.close()


@pytest.mark.ranks(1, 3)
@pytest.mark.core
def test_last_rank_serves_by_default(comm: Intracomm) -> None:
    strategy = ParameterServerStrategy(comm=comm)
    assert strategy.is_ps == (comm.rank == comm.size - 1 > 0)
    assert strategy.num_ps == 1
    assert strategy.num_replicas_in_sync == 1
    assert comm.allgather(strategy.is_chief) == [True, *[False] * (comm.size - 1)]
    end(strategy)


@pytest.mark.ranks(3)
@pytest.mark.core
def test_nobody_waits_for_a_chief_whose_part_fails_as_it_ends(comm: Intracomm) -> None:
    strategy = ParameterServerStrategy(comm=comm, on_worker_lost="ignore")
    role = parts_of(strategy).service
    assert isinstance(role, Role)

    def fail(reason: str | None) -> None:
        raise KeyError("mine")

    if strategy.is_chief:
        role.before_closing = fail
        with pytest.raises(KeyError, match="mine"):
            strategy.close()
    else:
        end(strategy)
    assert role.group is None or not role.group.is_open


@pytest.mark.ranks(3)
def test_ranks_of_servers_can_be_named(comm: Intracomm) -> None:
    """Then the chief is the lowest worker."""
    strategy = ParameterServerStrategy(comm=comm, ps_ranks=[0])
    assert strategy.is_ps == (comm.rank == 0)
    assert strategy.is_chief == (comm.rank == 1)
    own = 0 if comm.rank == 0 else comm.rank - 1
    assert strategy.topology.rank == own
    assert strategy.topology.size == (1 if comm.rank == 0 else comm.size - 1)
    end(strategy)


@pytest.mark.ranks(3)
def test_one_rank_alone_is_worker_and_server_in_one() -> None:
    """Also in a program that asks for more servers."""
    from mpi4py import MPI

    strategy = ParameterServerStrategy(num_ps=2, comm=MPI.COMM_SELF)
    assert not strategy.is_ps
    assert strategy.is_chief
    with strategy.scope():
        variable = mpidist.Variable(3.0)
    variable.assign_add(1.0)
    assert float(variable) == 4.0
    strategy.barrier()
    with pytest.raises(RuntimeError, match=r"serve\(\) on a worker"):
        strategy.serve()
    strategy.close()
    with pytest.raises(RuntimeError, match="closed"):
        strategy.read(variable)


@pytest.mark.ranks(3)
@pytest.mark.core
def test_resolver_gives_roles_in_any_order_of_ranks(comm: Intracomm) -> None:
    tasks = [("ps", 0), ("worker", 0), ("chief", 0)]
    strategy = ParameterServerStrategy(resolver_of(tasks, comm.rank), comm=comm)
    assert strategy.is_ps == (comm.rank == 0)
    assert strategy.is_chief == (comm.rank == 2)
    end(strategy)


@pytest.mark.ranks(3)
def test_tf_config_gives_roles(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    job, index = [("ps", 0), ("ps", 1), ("worker", 0)][comm.rank]
    cluster = {"ps": ["a:1", "b:1"], "worker": ["c:1"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": job, "index": index}}))
    strategy = ParameterServerStrategy()
    assert strategy.is_ps == (comm.rank < 2)
    assert strategy.num_ps == 2
    assert strategy.cluster_resolver is not None
    assert strategy.cluster_resolver.task_type == job
    end(strategy)


@pytest.mark.ranks(3)
def test_evaluator_has_variables_of_its_own(comm: Intracomm) -> None:
    tasks = [("evaluator", 0), ("worker", 0), ("ps", 0)]
    strategy = ParameterServerStrategy(resolver_of(tasks, comm.rank), comm=comm)
    assert not strategy.is_chief or comm.rank == 1
    if not strategy.is_ps:
        with strategy.scope():
            variable = mpidist.Variable(float(comm.rank))
        assert float(variable) == comm.rank
    end(strategy)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("cluster", "kind", "text"),
    [
        ({"ps": ["a"]}, ValueError, "at least one worker"),
        ({"worker": ["a", "b"]}, ValueError, "needs to have `ps` jobs"),
        ({"chief": ["a", "b"], "ps": ["c"]}, ValueError, "at most one chief"),
        ({"boss": ["a"], "worker": ["b"], "ps": ["c"]}, ValueError, "Disallowed task type found"),
        ({"worker": ["a", "b"], "ps": ["c"]}, TopologyError, "3 tasks.*MPI 2 ranks"),
    ],
)
def test_wrong_clusters_are_refused_on_every_rank(
    comm: Intracomm, cluster: dict[str, list[str]], kind: type[Exception], text: str
) -> None:
    jobs = [(job, index) for job, tasks in cluster.items() for index in range(len(tasks))]
    task = jobs[min(comm.rank, len(jobs) - 1)]
    with raises_everywhere(comm, kind, text):
        ParameterServerStrategy(SimpleClusterResolver(ClusterSpec(cluster), "", *task), comm=comm)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("task", "text"),
    [
        ((None, None), "must also specify `task_type` and `task_id`"),
        (("cook", 0), "Unrecognized"),
        (("ps", 3), "no such"),
    ],
)
def test_wrong_tasks_are_refused_on_every_rank(comm: Intracomm, task: tuple[Any, Any], text: str) -> None:
    cluster = ClusterSpec({"worker": ["a"], "ps": ["b"]})
    task = ("worker", 0) if comm.rank == 0 else task
    with raises_everywhere(comm, ValueError, f"rank 1: .*{text}"):
        ParameterServerStrategy(SimpleClusterResolver(cluster, "", *task), comm=comm)


@pytest.mark.ranks(3)
def test_two_ranks_cannot_be_one_task(comm: Intracomm) -> None:
    cluster = ClusterSpec({"worker": ["a"], "ps": ["b"]})
    with raises_everywhere(comm, TopologyError, "ranks 0 and 1 both say they are ps 0"):
        ParameterServerStrategy(SimpleClusterResolver(cluster, "", "ps", 0), comm=comm)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"num_ps": 0}, ValueError, "the number of servers, must be a whole number >= 1, got 0"),
        ({"num_ps": True}, TypeError, "whole number"),
        ({"num_ps": 1, "ps_ranks": [0]}, ValueError, "leave one of the two out"),
        ({"ps_ranks": []}, ValueError, "at least one ps"),
        ({"ps_ranks": [0, 0]}, ValueError, "each rank once"),
        ({"ps_ranks": "0"}, TypeError, "list of ranks"),
        ({"staleness": -1}, ValueError, "staleness"),
        ({"staleness": 1}, InvalidArgumentError, "staleness must be the same on all ranks, got None and 1 on"),
        ({"staleness": 0.5}, TypeError, "staleness"),
        ({"on_worker_lost": "cry"}, ValueError, "'abort' or 'ignore'"),
        ({"placement": "random"}, ValueError, "'round_robin' or 'bytes'"),
        ({"variable_partitioner": 3}, TypeError, "callable"),
        ({"cluster_resolver": "local"}, TypeError, "ClusterResolver"),
    ],
)
def test_wrong_arguments_of_one_rank_are_refused_on_every_rank(
    comm: Intracomm, arguments: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with raises_everywhere(comm, kind, text):
        ParameterServerStrategy(comm=comm, **(arguments if comm.rank == comm.size - 1 else {}))


@pytest.mark.ranks(1)
def test_numbers_of_any_class_become_those_of_python() -> None:
    """For sums that would overflow, and texts of errors that could not be made."""
    options = CommunicationOptions(timeout_seconds=Fraction(5, 2))
    fields = Wanted(np.uint8(255), "abort", "bytes", None, np.int64(1), None, options, np.int8(2)).fields()
    numbers = [fields[name] for name in ("staleness", "num_ps", "replicas", "timeout_seconds")]
    assert list(map(type, numbers)) == [int, int, int, float]


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_ps": 9}, "num_ps=9 of . ranks? leaves no worker; start more ranks"),
        ({"ps_ranks": [7]}, "ranks are 0 to"),
        ({"ps_ranks": [0, 1, 2]}, "leaves no worker; name fewer ranks"),
    ],
)
def test_servers_that_do_not_fit_the_ranks_are_refused(comm: Intracomm, arguments: dict[str, Any], text: str) -> None:
    with raises_everywhere(comm, ValueError, text):
        ParameterServerStrategy(comm=comm, **arguments)


@pytest.mark.ranks(3)
@pytest.mark.core
def test_server_of_tensorflows_scripts_joins_until_workers_are_done(comm: Intracomm) -> None:
    """`join` returns, and the ranks can make another cluster after."""
    cluster = {"worker": [f"n:{rank}" for rank in range(comm.size - 1)], "ps": ["n:9"]}
    for _ in range(2):
        job, index = ("ps", 0) if comm.rank == comm.size - 1 else ("worker", comm.rank)
        server = Server(cluster, job_name=job, task_index=index)
        if job == "ps":
            server.join()
            continue
        with pytest.raises(RuntimeError, match="this one is worker"):
            server.join()
        strategy = ParameterServerStrategy(SimpleClusterResolver(ClusterSpec(cluster), "", job, index))
        with strategy.scope():
            step = mpidist.Variable(0, aggregation="ONLY_FIRST_REPLICA")
        strategy.run(lambda step=step: step.assign_add(1))
        strategy.barrier()
        assert int(step) == comm.size - 1
        strategy.close()
    comm.Barrier()


@pytest.mark.ranks(3)
def test_server_takes_a_strategy(comm: Intracomm) -> None:
    strategy = ParameterServerStrategy(comm=comm)
    server = Server(strategy)
    if strategy.is_chief:
        with pytest.raises(RuntimeError, match="on a worker"):
            server.join()
        ClusterCoordinator(strategy).close()
    else:
        server.join()
    strategy.close()


@pytest.mark.no_mpi
def test_server_refuses_what_it_cannot_use() -> None:
    with pytest.raises(ValueError, match="job_name and task_index"):
        Server({"ps": ["a"]})
    with pytest.raises(TypeError, match="ClusterSpec"):
        Server(3, "ps", 0)  # type: ignore[arg-type]


@pytest.mark.ranks(3)
def test_server_makes_no_requests(comm: Intracomm) -> None:
    strategy = ParameterServerStrategy(comm=comm)
    if strategy.is_ps:
        with strategy.scope(), pytest.raises(RuntimeError, match="a server only serves"):
            mpidist.Variable(1.0)
        for call in (strategy.barrier, strategy.flush, strategy.step_done):
            with pytest.raises(RuntimeError, match="on a parameter server"):
                call()
    end(strategy)


@pytest.mark.ranks(3)
@pytest.mark.core
def test_devices_are_those_of_the_servers_and_of_this_worker(comm: Intracomm) -> None:
    num_ps = 2 if comm.size > 2 else 1
    strategy = ParameterServerStrategy(comm=comm, num_ps=num_ps)
    servers = range(comm.size - num_ps, comm.size) if comm.size > 1 else [0]
    assert strategy.extended.parameter_devices == tuple(f"/rank:{rank}/cpu:0" for rank in servers)
    own = (f"/rank:{comm.rank}/cpu:0",)
    assert strategy.extended.worker_devices == (() if strategy.is_ps else own)
    if not strategy.is_ps:
        assert strategy.run(lambda: mpidist.get_replica_context().devices) == own  # type: ignore[union-attr]
    end(strategy)


@pytest.mark.ranks(3)
def test_calls_of_a_worker_on_a_server_are_refused(comm: Intracomm) -> None:
    strategy = ParameterServerStrategy(comm=comm)
    if strategy.is_ps:
        arguments = {"run": (int,), "reduce": ("sum", 1.0), "gather": ([1.0], 0), "reduce_to": ("sum", 1.0, "all")}
        for call, given in arguments.items():
            owner = strategy.extended if call == "reduce_to" else strategy
            with pytest.raises(
                RuntimeError, match=f"^{call} on a parameter server: it is for workers; a server calls serve"
            ):
                getattr(owner, call)(*given)
    end(strategy)


@pytest.mark.ranks(3)
def test_tf_config_is_read_for_a_duplicate_of_all_ranks(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for a part of them."""
    tasks = ["ps", *["worker"] * (comm.size - 1)]
    cluster = {"ps": ["a:1"], "worker": ["b:1"] * (comm.size - 1)}
    task = {"type": tasks[comm.rank], "index": max(0, comm.rank - 1)}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    strategy = ParameterServerStrategy(comm=comm)
    is_world = comm.size == MPI.COMM_WORLD.size
    assert strategy.is_ps == (comm.rank == 0 if is_world else comm.rank == comm.size - 1)
    end(strategy)


@pytest.mark.ranks(3)
def test_options_that_have_no_effect_are_refused(comm: Intracomm) -> None:
    for name, value in (("bytes_per_pack", 5), ("implementation", "ring"), ("compression", "bf16")):
        with raises_everywhere(comm, ValueError, "takes timeout_seconds alone"):
            ParameterServerStrategy(communication_options=CommunicationOptions(**{name: value}), comm=comm)


@pytest.mark.no_mpi
def test_arguments_of_a_server_that_have_no_effect_are_refused() -> None:
    for name, value in (("protocol", "grpc"), ("config", {}), ("start", False)):
        with pytest.raises(ValueError, match=f"Server: {name} must be .*; leave it out"):
            Server({"ps": ["a:1"]}, "ps", 0, **{name: value})  # type: ignore[arg-type]
