"""Strategies that must not be made: they are refused on every rank, and leave nothing behind."""

import json
import logging

import pytest
from mpi4py import MPI
from support.everywhere import raises_everywhere

import mpidist
from mpidist import CommunicationOptions, MirroredStrategy, MultiWorkerMirroredStrategy
from mpidist.cluster_resolver import ClusterSpec, MPIClusterResolver, SimpleClusterResolver
from mpidist.cluster_resolver.cluster_spec import number_ports
from mpidist.errors import InvalidArgumentError, TopologyError, UnavailableError
from mpidist.transport import cuda

WORLD = MPI.COMM_WORLD


@pytest.fixture
def loggers():
    """Puts the logger of mpidist back as it was: a strategy that is refused has set its level already."""
    ours = logging.getLogger("mpidist")
    level, handlers = ours.level, ours.handlers[:]
    yield
    ours.setLevel(level)
    ours.handlers[:] = handlers


@pytest.mark.ranks(1, 2)
def test_variable_that_is_not_understood_is_refused_on_all_ranks(monkeypatch):
    """Also where it is set on one rank alone."""
    last, is_wrong, transports = WORLD.size - 1, "is not understood", "; it is one of auto, mpi, shared_memory"
    for name, value, text in (
        ("MPIDIST_CHECK", "yes", is_wrong),
        ("MPIDIST_TIMEOUT_SECONDS", "-1", is_wrong),
        ("MPIDIST_TRANSPORT", "nonsense", is_wrong + transports),
        ("MPIDIST_TRANSPORT", "MPI", is_wrong + transports),
        ("MPIDIST_PRETEND_NODES", "0,a", is_wrong),
        ("MPIDIST_PRETEND_NODES", ",".join("0" * (WORLD.size + 1)), ""),
        ("MPIDIST_PRETEND_CACHES", ",".join("0" * (WORLD.size + 1)), ""),
    ):
        kind, wrong = (ValueError, f"{name}='{value}' {text}") if text else (TopologyError, name)
        monkeypatch.setenv(name, value)
        with raises_everywhere(WORLD, kind, f"^rank 0: {wrong}" if text else f"^{wrong} has the numbers of"):
            MultiWorkerMirroredStrategy()
        if WORLD.rank < last:
            monkeypatch.delenv(name)
        with raises_everywhere(WORLD, kind, f"^rank {last}: {wrong}" if text else wrong):
            MultiWorkerMirroredStrategy()
        monkeypatch.delenv(name, raising=False)


@pytest.mark.ranks(2, 3)
@pytest.mark.usefixtures("loggers")
def test_variable_that_differs_between_ranks_is_refused_on_all(monkeypatch):
    others = "rank 0" if WORLD.size == 2 else f"ranks 0-{WORLD.size - 2}"
    for name, value, another in (
        ("MPIDIST_CHECK", "0", "1"),
        ("MPIDIST_CHECK", "", "1"),
        ("MPIDIST_STALL_SECONDS", "10", "20"),
        ("MPIDIST_TIMEOUT_SECONDS", "100", "200"),
        ("MPIDIST_TIMEOUT_SECONDS", "", "1"),
        ("MPIDIST_TRANSPORT", "", "mpi"),
        ("MPIDIST_ON_ERROR", "raise", "abort"),
        ("MPIDIST_LOG", "ERROR", "CRITICAL"),
        ("MPIDIST_PRETEND_NODES", ",".join("0" * WORLD.size), ",".join("1" * WORLD.size)),
    ):
        with monkeypatch.context() as patch:
            own = another if WORLD.rank == WORLD.size - 1 else value
            patch.setenv(name, own) if own else patch.delenv(name, raising=False)
            has = f"'{value}'" if value else "not set"
            text = f"^the environment variable {name} must be the same on all ranks: {others}: {has}; rank"
            with raises_everywhere(WORLD, TopologyError, f"{text} {WORLD.size - 1}: '{another}'; set it"):
                MultiWorkerMirroredStrategy()


def resolver(size, task_id):
    return SimpleClusterResolver(ClusterSpec({"worker": ["n:1"] * size}), task_type="worker", task_id=task_id)


class FailingResolver(SimpleClusterResolver):
    """One that fails on the last rank, as when a file is missing there."""

    def cluster_spec(self):
        if WORLD.rank == WORLD.size - 1:
            raise OSError("no such file")
        return super().cluster_spec()


@pytest.mark.ranks(2)
@pytest.mark.core
def test_resolver_that_is_wrong_is_refused_on_all_ranks():
    """Of another size; and a wrong task, or a file that is missing, on one rank alone."""
    for its, text in (
        (resolver(3, WORLD.rank), "^rank 0: SimpleClusterResolver has 3 tasks .* MPI has 2 rank"),
        (resolver(2, 0), "rank 1: .*worker 0.*in MPI it is rank 1"),
        (FailingResolver(ClusterSpec({"worker": ["n:1"] * 2})), "rank 1.*no such file"),
    ):
        kind = (TopologyError, OSError) if isinstance(its, FailingResolver) else TopologyError
        with pytest.raises(kind, match=text):
            MultiWorkerMirroredStrategy(its)


@pytest.mark.ranks(1)
def test_resolver_of_another_size_is_refused_on_one_rank():
    with pytest.raises(TopologyError, match=r"SimpleClusterResolver has 2 tasks .* MPI has 1 rank"):
        MultiWorkerMirroredStrategy(resolver(2, 0))


def tf_config(size, index, **more):
    cluster = {"worker": [f"localhost:{12345 + worker}" for worker in range(size)], **more}
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})


@pytest.mark.ranks(2)
@pytest.mark.core
def test_tf_config_is_the_default_resolver(monkeypatch):
    """As in TensorFlow's printed sample; other jobs than chief and worker are not counted."""
    monkeypatch.setenv("TF_CONFIG", tf_config(WORLD.size, WORLD.rank, ps=["localhost:34567"]))
    with mpidist.experimental.MultiWorkerMirroredStrategy() as strategy:
        assert strategy.cluster_resolver.task_type == "worker"
        assert (strategy.cluster_resolver.task_id, strategy.cluster_resolver.num_tasks) == (WORLD.rank, WORLD.size)
        assert strategy.cluster_resolver.cluster_spec().num_tasks("ps") == 1
    given = resolver(WORLD.size, WORLD.rank)
    with MultiWorkerMirroredStrategy(given) as strategy:
        assert strategy.cluster_resolver is given


@pytest.mark.ranks(1, 3)
def test_mpi_is_the_resolver_where_nothing_else_speaks_of_these_ranks(monkeypatch):
    """Of a strategy over some ranks, in their order, TF_CONFIG does not speak. No question is collective."""
    part = WORLD.Split(WORLD.rank % 2, -WORLD.rank)
    for config in ("", tf_config(WORLD.size, WORLD.rank)) if WORLD.size > 1 else ("",):
        monkeypatch.setenv("TF_CONFIG", config)
        with MultiWorkerMirroredStrategy(comm=part) as strategy:
            its = strategy.cluster_resolver
            assert isinstance(its, MPIClusterResolver)
            assert (its.task_type, its.task_id, its.num_tasks) == ("worker", part.rank, part.size)
            if part.rank == 0:
                assert its.cluster_spec() == {"worker": number_ports(strategy.topology.hostnames)}
                assert its.master("worker", part.size - 1).endswith(f":{8888 + part.size - 1}")
    part.Free()


@pytest.mark.ranks(2)
def test_tf_config_that_is_wrong_is_refused_on_all_ranks(monkeypatch):
    """The commonest: one that a launcher has handed to all ranks alike."""
    right, contradicts = tf_config(2, WORLD.rank), "TFConfigClusterResolver .* or unset TF_CONFIG: MPI is enough"
    for configs, text in (
        ([tf_config(3, 0)] * 2, contradicts),
        ([tf_config(2, 0)] * 2, contradicts),
        ([right, "{"], "rank 1: TF_CONFIG: ValueError: TF_CONFIG is not JSON"),
        (["", right], "TF_CONFIG is set, .* but not on rank 0"),
    ):
        monkeypatch.setenv("TF_CONFIG", configs[WORLD.rank])
        with raises_everywhere(WORLD, TopologyError, text):
            MultiWorkerMirroredStrategy()


@pytest.mark.ranks(2)
def test_strategies_of_one_worker_have_no_resolver(monkeypatch):
    """As in TensorFlow."""
    monkeypatch.setenv("TF_CONFIG", tf_config(WORLD.size, WORLD.rank))
    for make in (MirroredStrategy, mpidist.OneDeviceStrategy):
        with make() as strategy:
            assert strategy.cluster_resolver is None


@pytest.mark.ranks(1, 2)
def test_driver_that_fails_on_one_rank_is_every_ranks_error(monkeypatch):
    """And leaves nothing behind: the next strategy is built as if nothing had been."""

    def fail(self):
        raise RuntimeError("CUDA driver error")

    failing = WORLD.size - 1
    text = f"rank {failing}: RuntimeError: CUDA" if failing else "CUDA driver error"
    kind = InvalidArgumentError if failing else RuntimeError
    for make in (MirroredStrategy, MultiWorkerMirroredStrategy):
        with monkeypatch.context() as patch, raises_everywhere(WORLD, kind, text):
            if WORLD.rank == failing:
                patch.setattr(cuda.Cuda, "support", property(fail))
            make()
    MultiWorkerMirroredStrategy().close()


@pytest.mark.ranks(2)
def test_ranks_that_make_different_strategies_are_refused():
    with pytest.raises(InvalidArgumentError, match="MultiWorkerMirroredStrategy"):
        (MirroredStrategy if WORLD.rank == 0 else MultiWorkerMirroredStrategy)()
    with raises_everywhere(WORLD, InvalidArgumentError, "variable placement: rank 0: .*; rank 1: "):
        MirroredStrategy(per_node_variables=WORLD.rank == 0)
    options = CommunicationOptions(bytes_per_pack=1 + WORLD.rank)
    with pytest.raises(InvalidArgumentError, match="bytes_per_pack=2"):
        MultiWorkerMirroredStrategy(communication_options=options)


WRONG = {
    "cluster_resolver": lambda wrong: MultiWorkerMirroredStrategy(wrong),
    "communication_options": lambda wrong: MultiWorkerMirroredStrategy(None, wrong),
    "cross_device_ops": lambda wrong: MultiWorkerMirroredStrategy(cross_device_ops=wrong),
    "comm": lambda wrong: MirroredStrategy(comm=wrong),
    "devices": lambda wrong: MirroredStrategy(devices=wrong),
}


@pytest.mark.ranks(1, 2)
def test_argument_of_the_wrong_kind_is_refused():
    for argument, make in WRONG.items():
        with pytest.raises(TypeError, match=argument):
            make(3)
    with pytest.raises(TypeError, match="cross_device_ops"):
        WRONG["cross_device_ops"](mpidist.NcclAllReduce)  # a class in place of an object
    with pytest.raises(TypeError, match="intra-communicator"):
        WRONG["comm"](MPI.COMM_NULL)
    for make in (MultiWorkerMirroredStrategy, MirroredStrategy):
        with raises_everywhere(WORLD, TypeError, "per_node_variables must be True or False, got 'no'"):
            make(per_node_variables="no")


@pytest.fixture
def few_communicators_left():
    """Take up all communicators that the MPI library has, but for as many as two strategies need."""
    taken = []
    try:
        while len(taken) < 1 << 15:  # MPICH has 2^11; Open MPI has so many that this shows nothing
            taken.append(MPI.COMM_SELF.Dup())
    except MPI.Exception:
        for comm in taken[-20:]:
            comm.Free()
        del taken[-20:]
    yield
    for comm in taken:
        comm.Free()


@pytest.mark.core
@pytest.mark.ranks(2)
def test_strategies_that_are_closed_or_refused_and_resets_leave_no_communicators(few_communicators_left):
    for _ in range(30):
        MultiWorkerMirroredStrategy().close()
        with pytest.raises(TopologyError):
            MultiWorkerMirroredStrategy(resolver(WORLD.size + 1, 0))
        with pytest.raises(ValueError, match="devices"):
            MirroredStrategy(["/cpu:0"] * (WORLD.size - 1))
        with pytest.raises(UnavailableError):
            MirroredStrategy("/gpu:99")
    with MultiWorkerMirroredStrategy() as strategy:
        for _ in range(20):
            strategy.reset()
