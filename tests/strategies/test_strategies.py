"""The strategies: their ranks, nodes and devices, and their end."""

import copy
import pickle

import numpy as np
import pytest
from mpi4py import MPI
from support.calls import calls_of_strategy
from support.everywhere import raises_everywhere
from support.placements import one_and_two_nodes
from support.replicas import make_variable

import mpidist
from mpidist import (
    CentralStorageStrategy,
    CollectiveAllReduce,
    CommunicationOptions,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    Strategy,
)
from mpidist.context_stack import parts_of
from mpidist.errors import DeadlineExceededError, InvalidArgumentError, PeerFailedError, TopologyError, UnavailableError
from mpidist.strategies.default import DefaultStrategy

WORLD = MPI.COMM_WORLD
KINDS = {
    "OneDeviceStrategy": OneDeviceStrategy,
    "MirroredStrategy": MirroredStrategy,
    "MultiWorkerMirroredStrategy": MultiWorkerMirroredStrategy,
    "DefaultStrategy": DefaultStrategy,
}
ALONE = ("OneDeviceStrategy", "DefaultStrategy")

every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@pytest.mark.core
def test_group_is_all_ranks_or_this_one(kind):
    rank, size = (0, 1) if kind in ALONE else (WORLD.rank, WORLD.size)
    with KINDS[kind]() as strategy:
        topology = strategy.topology
        assert (strategy.num_replicas_in_sync, topology.size, topology.rank) == (size, size, rank)
        assert topology.nodes == (tuple(range(size)),)
        assert strategy.is_chief == (rank == 0)
        assert (strategy.cluster_resolver is None) == (kind != "MultiWorkerMirroredStrategy")
        devices = strategy.extended.worker_devices
        assert [device.rpartition("/")[0] for device in devices] == [f"/rank:{other}" for other in range(size)]
        assert strategy.extended.parameter_devices == devices
        assert kind in str(strategy)
        for copies in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(RuntimeError, match="a strategy cannot be copied or pickled"):
                copies(strategy)


@every_kind
def test_use_after_close_is_refused(kind):
    """Also by a variable and a data set; closing twice is fine."""
    with KINDS[kind]() as strategy:
        steps = iter(strategy.experimental_distribute_dataset([np.ones(2)]))
        with strategy.scope():
            metric = mpidist.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
            strategy.close()
            with pytest.raises(RuntimeError, match="closed strategy"):
                mpidist.Variable(1.0)
    strategy.close()
    calls = {"scope": strategy.scope, "reset": strategy.reset, "read": metric.read_value, "next": lambda: next(steps)}
    for call in (calls | calls_of_strategy(strategy)).values():
        with pytest.raises(RuntimeError, match="closed strategy"):
            call()
    with pytest.raises(RuntimeError, match="closed strategy"):
        list(strategy.experimental_distribute_dataset([np.ones(2)]))


@pytest.mark.ranks(3)
def test_with_statement_does_not_wait_for_others_after_an_error():
    strategy = MultiWorkerMirroredStrategy()
    if WORLD.rank == 0:
        with pytest.raises(KeyError), strategy:
            raise KeyError
    WORLD.Barrier()  # would not be reached if leaving the body were collective
    if WORLD.rank:
        with pytest.raises(PeerFailedError, match="rank 0 left because of an exception: KeyError"):
            strategy.close()
    strategy.close()


@pytest.mark.no_mpi
def test_strategy_itself_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Strategy(None)


@pytest.mark.core
def test_topology_is_that_of_the_placement(placement):
    numbers = {label: number for number, label in enumerate(dict.fromkeys(placement))}
    nodes = [numbers[label] for label in placement]
    with MultiWorkerMirroredStrategy() as strategy:
        topology = strategy.topology
        assert topology.node_of_rank == tuple(nodes)
        assert topology.num_nodes == len(numbers)
        assert topology.nodes == tuple(
            tuple(rank for rank, its in enumerate(nodes) if its == node) for node in range(len(numbers))
        )
        assert topology.local_rank == nodes[: WORLD.rank].count(nodes[WORLD.rank])
        assert topology.is_leader == (topology.local_rank == 0)
        own = (strategy.rank, strategy.size, strategy.local_rank, strategy.local_size, strategy.node)
        assert own == (WORLD.rank, WORLD.size, topology.local_rank, topology.local_size, topology.node)
        assert strategy.reduce("SUM", WORLD.rank) == WORLD.size * (WORLD.size - 1) // 2


@one_and_two_nodes
@pytest.mark.core
def test_mirrored_strategy_is_for_one_node(placement):
    if len(set(placement)) == 1:
        MirroredStrategy().close()
        return
    with pytest.raises(TopologyError, match="use MultiWorkerMirroredStrategy"):
        MirroredStrategy()


@pytest.mark.ranks(2)
def test_mirrored_strategy_takes_a_device_or_one_per_rank():
    for device in ("/cpu:0", "/device:CPU:0", "/rank:0/cpu:0"):
        for devices in (device, [device] * WORLD.size):
            with MirroredStrategy(devices) as strategy:
                assert strategy.extended.worker_devices == tuple(f"/rank:{rank}/cpu:0" for rank in range(WORLD.size))
    for num_devices in range(WORLD.size):
        with pytest.raises(ValueError, match=rf"{num_devices} devices for {WORLD.size} ranks.*mpiexec -n"):
            MirroredStrategy(["/cpu:0"] * num_devices)


@pytest.mark.ranks(1, 2)
def test_device_that_is_not_understood_is_refused_on_all_ranks():
    devices = ["/cpu:0"] * WORLD.size
    devices[-1] = "/tpu:0"
    with pytest.raises(ValueError, match="/tpu:0"):
        MirroredStrategy(devices)
    for wrong in ("tpu", 3):
        with pytest.raises(ValueError, match="a device is a string"):
            OneDeviceStrategy(wrong)


@pytest.mark.ranks(1, 2)
def test_missing_gpu_is_refused_on_all_ranks():
    """Also where only one rank asks for it."""
    devices = ["/cpu:0"] * WORLD.size
    devices[-1] = "/gpu:99"
    with pytest.raises((UnavailableError, InvalidArgumentError), match="gpu:99"):
        MirroredStrategy(devices)
    with pytest.raises(UnavailableError, match="pip install"):
        OneDeviceStrategy("/gpu:99")


@pytest.mark.ranks(3)
@pytest.mark.core
def test_part_of_the_world_in_its_own_order():
    part = WORLD.Split(WORLD.rank % 2, -WORLD.rank)
    with MultiWorkerMirroredStrategy(comm=part) as strategy:
        assert (strategy.topology.rank, strategy.num_replicas_in_sync) == (part.rank, part.size)
        ranks = strategy.gather(np.array([WORLD.rank]), axis=0)
        assert ranks.tolist() == sorted(range(WORLD.rank % 2, WORLD.size, 2), reverse=True)
    part.Free()


@one_and_two_nodes
def test_part_of_the_world_numbers_its_own_nodes(placement):
    part = WORLD.Split(int(WORLD.rank == 0), WORLD.rank)
    mine = [0] if WORLD.rank == 0 else list(range(1, WORLD.size))
    numbers = {label: number for number, label in enumerate(dict.fromkeys(placement[rank] for rank in mine))}
    with MultiWorkerMirroredStrategy(comm=part) as strategy:
        assert strategy.topology.node_of_rank == tuple(numbers[placement[rank]] for rank in mine)
        assert strategy.reduce("SUM", 1) == len(mine)
    part.Free()


@pytest.mark.ranks(1)
@pytest.mark.core
def test_group_of_one_gives_every_value_back():
    """X47: a mean of integers is a float at any number of ranks, also at one."""
    makers = [
        *(KINDS[kind] for kind in ALONE),
        lambda: MirroredStrategy(comm=MPI.COMM_SELF),
        lambda: MultiWorkerMirroredStrategy(comm=MPI.COMM_SELF),
    ]
    for make in makers:
        with make() as strategy:
            for dtype in (np.int8, np.int64, np.float16, np.float32, np.float64, np.complex64):
                value = np.array([1, 2, 3], dtype)
                for op in mpidist.ReduceOp:
                    if np.dtype(dtype).kind == "c" and op.name in ("MIN", "MAX"):
                        continue
                    result = strategy.reduce(op, value)
                    assert result.tolist() == [1, 2, 3]
                    assert not np.shares_memory(result, value)
                    if op is not mpidist.ReduceOp.MEAN:
                        assert result.dtype == dtype
            assert strategy.reduce("MEAN", np.int16([3])).dtype == np.float32
            assert strategy.reduce("MEAN", np.int64([3])).dtype == np.float64
            assert strategy.reduce("SUM", 5) == 5
            assert strategy.gather(np.arange(2), 0).tolist() == [0, 1]
            assert strategy.experimental_local_results(5) == (5,)


@pytest.mark.ranks(3)
def test_strategies_on_one_communicator_are_separate(comm):
    """Nor do they hear the messages of the program on the very communicator."""
    backwards = comm.Split(0, -comm.rank)
    with MultiWorkerMirroredStrategy(comm=comm) as one, MultiWorkerMirroredStrategy(comm=backwards) as two:
        request = comm.isend("mine", (comm.rank + 1) % comm.size, tag=0)
        for step in range(3):
            assert one.reduce("SUM", step + one.topology.rank) == comm.size * step + sum(range(comm.size))
            assert two.gather(np.array([comm.rank]), 0).tolist() == list(range(comm.size))[::-1]
        assert comm.recv(source=(comm.rank - 1) % comm.size, tag=0) == "mine"
        request.wait()
    backwards.Free()


SOON = CommunicationOptions(timeout_seconds=0.3)
MAKE = {
    "mirrored": lambda comm: MirroredStrategy(communication_options=SOON, comm=comm),
    "mirrored, by its algorithm": lambda comm: MirroredStrategy(None, CollectiveAllReduce(SOON), comm=comm),
    "mirrored, per node": lambda comm: MirroredStrategy(communication_options=SOON, per_node_variables=True, comm=comm),
    "central storage": lambda comm: CentralStorageStrategy(communication_options=SOON, comm=comm),
    "multi-worker": lambda comm: MultiWorkerMirroredStrategy(None, SOON, comm=comm),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", MAKE)
def test_communication_options_deadline_holds_for_every_strategy(comm, make):
    strategy = MAKE[make](comm)

    def variable():
        with strategy.scope():
            mpidist.Variable(np.zeros(2))

    for call in (strategy.barrier, variable, strategy.close):
        if comm.rank == 0:
            comm.barrier()  # late, until the other has given up
        with pytest.raises(DeadlineExceededError):
            call()
        if comm.rank:
            comm.barrier()
        comm.barrier()
        if call != strategy.close:
            strategy.reset()


@pytest.mark.ranks(2)
def test_communication_options_of_another_type_are_refused(comm):
    wrong = 3
    for make in (MirroredStrategy, CentralStorageStrategy, MultiWorkerMirroredStrategy):
        with raises_everywhere(comm, TypeError, "communication_options must be CommunicationOptions, got int"):
            make(communication_options=wrong, comm=comm)


@one_and_two_nodes
@pytest.mark.core
def test_communication_options_of_a_call_win_also_false(comm, placement):
    """Numbers between two of bfloat16 show whether they were compressed."""
    options = CommunicationOptions(compression="bf16", compress_everywhere=True)
    value = np.full(3, 1 + 2**-12, np.float32)
    with MultiWorkerMirroredStrategy(None, options, comm=comm) as strategy:
        compressed, exact = (strategy.reduce("mean", value, options=its) for its in (None, _exact()))
        assert (exact == value).all()
        assert (compressed == (1 if comm.size > 1 else value)).all()


def _exact():
    return CommunicationOptions(compression="none")


@pytest.mark.ranks(2)
def test_communication_options_of_an_algorithm_in_a_scope_are_those_of_the_strategy(comm):
    options = CommunicationOptions(implementation="ring")
    with MultiWorkerMirroredStrategy(None, options, comm=comm) as strategy, strategy.scope():
        refusing = mpidist.ReductionToOneDevice(accumulation_fn=sum)
        with pytest.raises(ValueError, match="which a ring cannot call"):
            refusing.reduce("sum", 1.0, "all")


@pytest.mark.core
def test_ranks_of_a_node_read_one_memory_of_a_variable(comm, placement):
    with MultiWorkerMirroredStrategy(comm=comm, per_node_variables=True) as strategy:
        weights, topology = make_variable(strategy, np.full((3, 2), 1.0 + comm.rank)), strategy.topology
        assert (weights.numpy() == 1).all()  # rank 0's
        strategy.barrier()
        if topology.is_leader:
            parts_of(strategy).group.shared.place(weights._value).arrays[0][:] = 7 + topology.node
        strategy.barrier()
        assert (weights.local_value() == 7 + topology.node).all()
        count = make_variable(strategy, np.zeros(1000), "SUM")
        strategy.run(lambda: count.assign_add(np.full(1000, comm.rank + 1.0)))
        assert (count.numpy() == comm.size * (comm.size + 1) / 2).all()
