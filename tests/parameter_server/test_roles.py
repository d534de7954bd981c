"""Which rank is a worker and which one a server, and clusters that are refused on every rank."""

import json
from fractions import Fraction

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


def resolver_of(tasks, rank):
    """Make the resolver of a rank, where rank r is the r-th task."""
    jobs = {}
    for job, _ in tasks:
        jobs.setdefault(job, []).append("n:1")
    return SimpleClusterResolver(ClusterSpec(jobs), "", *tasks[rank])


def end(strategy):
    if strategy.is_ps:
        strategy.serve()
    strategy.close()


PS, WORKER = ("ps", 0), ("worker", 0)
# What makes the strategy of each of 3 ranks, which of them serve, and which one is the chief: the lowest worker.
ROLES = {
    "default": (lambda rank: {}, [2], 0),
    "two servers": (lambda rank: {"num_ps": 2}, [1, 2], 0),
    "named ranks": (lambda rank: {"ps_ranks": [0]}, [0], 1),
    "resolver": (lambda rank: {"cluster_resolver": resolver_of([PS, WORKER, ("chief", 0)], rank)}, [0], 2),
}


@pytest.mark.ranks(3)
@pytest.mark.core
@pytest.mark.parametrize("how", ROLES)
def test_roles_of_ranks_follow_the_arguments(comm, how):
    """Devices are those of the servers, and of this worker."""
    arguments, servers, chief = ROLES[how]
    strategy = ParameterServerStrategy(comm=comm, **arguments(comm.rank))
    own, workers = (f"/rank:{comm.rank}/cpu:0",), [rank for rank in range(3) if rank not in servers]
    assert (strategy.is_ps, strategy.is_chief) == (comm.rank in servers, comm.rank == chief)
    assert (strategy.num_ps, strategy.num_replicas_in_sync) == (len(servers), 1)
    assert strategy.extended.parameter_devices == tuple(f"/rank:{rank}/cpu:0" for rank in servers)
    assert strategy.extended.worker_devices == (() if strategy.is_ps else own)
    if not strategy.is_ps:
        assert strategy.topology.size == len(workers)
        assert (strategy.topology.rank == 0) == strategy.is_chief
        assert strategy.run(lambda: mpidist.get_replica_context().devices) == own
    end(strategy)


@pytest.mark.ranks(3)
@pytest.mark.core
def test_close_failed_on_the_chief_releases_the_others(comm):
    strategy = ParameterServerStrategy(comm=comm, on_worker_lost="ignore")
    role = parts_of(strategy).peers
    assert isinstance(role, Role)

    def fail(reason):
        raise KeyError("mine")

    if strategy.is_chief:
        role.before_closing = fail
        with pytest.raises(KeyError, match="mine"):
            strategy.close()
    else:
        end(strategy)
    assert role.group is None or not role.group.is_open


@pytest.mark.ranks(3)
def test_one_rank_alone_is_worker_and_server_in_one():
    """Also in a program that asks for more servers."""
    strategy = ParameterServerStrategy(num_ps=2, comm=MPI.COMM_SELF)
    assert (strategy.is_ps, strategy.is_chief, strategy.num_ps) == (False, True, 1)
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
def test_tf_config_gives_roles_to_all_ranks_and_a_duplicate(comm, monkeypatch):
    job, index = [("ps", 0), ("ps", 1), ("worker", 0)][comm.rank]
    cluster = {"ps": ["a:1", "b:1"], "worker": ["c:1"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": job, "index": index}}))
    for ranks in (None, comm):
        strategy = ParameterServerStrategy(comm=ranks)
        assert (strategy.is_ps, strategy.num_ps) == (comm.rank < 2, 2)
        assert strategy.cluster_resolver is not None
        assert strategy.cluster_resolver.task_type == job
        end(strategy)


@pytest.mark.ranks(3)
def test_evaluator_has_variables_of_its_own(comm):
    tasks = [("evaluator", 0), ("worker", 0), ("ps", 0)]
    strategy = ParameterServerStrategy(resolver_of(tasks, comm.rank), comm=comm)
    assert not strategy.is_chief or comm.rank == 1
    if not strategy.is_ps:
        with strategy.scope():
            variable = mpidist.Variable(float(comm.rank))
        assert float(variable) == comm.rank
    end(strategy)


def cluster(jobs, *tasks):
    """Give a resolver of these jobs to each rank: of its own task, or of the last one."""
    listed = tasks or [(job, index) for job, hosts in jobs.items() for index in range(len(hosts))]
    return lambda rank: {"cluster_resolver": SimpleClusterResolver(ClusterSpec(jobs), "", *listed[: rank + 1][-1])}


def of_last(**arguments):
    return lambda rank: arguments if rank == 2 else {}


def of_all(**arguments):
    return lambda rank: arguments


TWO = {"worker": ["a"], "ps": ["b"]}
REFUSED = [
    (cluster({"ps": ["a"]}), ValueError, "at least one worker"),
    (cluster({"worker": ["a", "b"]}), ValueError, "needs to have `ps` jobs"),
    (cluster({"chief": ["a", "b"], "ps": ["c"]}), ValueError, "at most one chief"),
    (cluster({"boss": ["a"], "worker": ["b"], "ps": ["c"]}), ValueError, "Disallowed task type found"),
    (cluster({"worker": ["a", "b", "c"], "ps": ["d"]}), TopologyError, "4 tasks.*MPI 3 ranks"),
    (cluster(TWO, WORKER, (None, None), PS), ValueError, "rank 1: .*must also specify `task_type` and `task_id`"),
    (cluster(TWO, WORKER, ("cook", 0), PS), ValueError, "rank 1: .*Unrecognized"),
    (cluster(TWO, WORKER, ("ps", 3), PS), ValueError, "rank 1: .*no such"),
    (cluster({"worker": ["a", "c"], "ps": ["b"]}, PS), TopologyError, "ranks 0 and 1 are both ps 0"),
    (of_last(num_ps=0), ValueError, "the number of servers, must be a whole number >= 1, got 0"),
    (of_last(num_ps=True), TypeError, "whole number"),
    (of_last(num_ps=1, ps_ranks=[0]), ValueError, "leave one of the two out"),
    (of_last(ps_ranks=[]), ValueError, "at least one ps"),
    (of_last(ps_ranks=[0, 0]), ValueError, "each rank once"),
    (of_last(ps_ranks="0"), TypeError, "list of ranks"),
    (of_last(staleness=-1), ValueError, "staleness"),
    (of_last(staleness=1), InvalidArgumentError, "staleness must be the same on all ranks, got None and 1 on"),
    (of_last(staleness=0.5), TypeError, "staleness"),
    (of_last(on_worker_lost="cry"), ValueError, "'abort' or 'ignore'"),
    (of_last(placement="random"), ValueError, "'round_robin' or 'bytes'"),
    (of_last(variable_partitioner=3), TypeError, "callable"),
    (of_last(cluster_resolver="local"), TypeError, "ClusterResolver"),
    (of_last(replicas=0), ValueError, "replicas must be"),
    (of_last(replicas=1.5), TypeError, "replicas must be"),
    (of_last(replicas=True), TypeError, "replicas must be"),
    (of_all(num_ps=9), ValueError, "num_ps=9 of . ranks? leaves no worker; start more ranks"),
    (of_all(ps_ranks=[7]), ValueError, "ranks are 0 to"),
    (of_all(ps_ranks=[0, 1, 2]), ValueError, "leaves no worker; name fewer ranks"),
    (of_all(communication_options=3.0), TypeError, "communication_options must be CommunicationOptions, got float"),
    (lambda rank: {"communication_options": CommunicationOptions(timeout_seconds=1 + rank)}, InvalidArgumentError,
     "timeout_seconds must be the same on all ranks"),
    *((of_all(communication_options=CommunicationOptions(**{name: value})), ValueError, "takes timeout_seconds alone")
      for name, value in (("bytes_per_pack", 5), ("implementation", "ring"), ("compression", "bf16"))),
]  # fmt: skip


@pytest.mark.ranks(3)
def test_strategy_of_wrong_arguments_is_refused_on_every_rank(comm):
    """Wrong on one rank, or on all, or different; also options that have no effect here."""
    for arguments, kind, text in REFUSED:
        with raises_everywhere(comm, kind, text):
            ParameterServerStrategy(comm=comm, **arguments(comm.rank))


@pytest.mark.ranks(1)
def test_numbers_of_any_class_become_those_of_python():
    """For sums that would overflow, and texts of errors that could not be made."""
    options = CommunicationOptions(timeout_seconds=Fraction(5, 2))
    fields = Wanted(np.uint8(255), "abort", "bytes", None, np.int64(1), None, options, np.int8(2)).fields()
    numbers = [fields[name] for name in ("staleness", "num_ps", "replicas", "timeout_seconds")]
    assert list(map(type, numbers)) == [int, int, int, float]


@pytest.mark.ranks(3)
@pytest.mark.core
def test_server_of_tensorflows_scripts_joins_until_workers_are_done(comm):
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
def test_server_takes_a_strategy(comm):
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
def test_server_refuses_wrong_arguments():
    with pytest.raises(ValueError, match="job_name and task_index"):
        Server({"ps": ["a"]})
    with pytest.raises(TypeError, match="ClusterSpec"):
        Server(3, "ps", 0)


@pytest.mark.ranks(3)
def test_server_makes_no_requests(comm):
    strategy = ParameterServerStrategy(comm=comm)
    if strategy.is_ps:
        with strategy.scope(), pytest.raises(RuntimeError, match="a server only serves"):
            mpidist.Variable(1.0)
        for call in (strategy.barrier, strategy.flush, strategy.step_done):
            with pytest.raises(RuntimeError, match="on a parameter server"):
                call()
    end(strategy)


@pytest.mark.ranks(3)
def test_calls_of_a_worker_on_a_server_are_refused(comm):
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


@pytest.mark.no_mpi
def test_arguments_of_a_server_that_have_no_effect_are_refused():
    for name, value in (("protocol", "grpc"), ("config", {}), ("start", False)):
        with pytest.raises(ValueError, match=f"Server: {name} must be .*; leave it out"):
            Server({"ps": ["a:1"]}, "ps", 0, **{name: value})
