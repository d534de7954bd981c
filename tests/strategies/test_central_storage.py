"""CentralStorageStrategy: one copy of each variable in the memory of the node, which all replicas read."""

import gc
from pathlib import Path

import numpy as np
import pytest
from host_cuda.gpus import down, gpus, one_node, up
from support.everywhere import raises_everywhere
from support.replicas import make_variable as make
from support.replicas import replica_id

import mpidist
from mpidist import CollectiveAllReduce, Variable
from mpidist.context_stack import parts_of
from mpidist.errors import TopologyError
from mpidist.experimental import CentralStorageStrategy
from mpidist.transport import arrays

__all__ = ["gpus", "one_node"]  # fixtures, which pytest finds by their names here

CPU = "/cpu:0"
NUM_DEVICES = {"default": lambda size: None, "2P": lambda size: 2 * size, "8": lambda size: 8}

every_number = pytest.mark.parametrize("number", NUM_DEVICES)


def strategy_of(comm, number="default"):
    count = NUM_DEVICES[number](comm.size)
    return CentralStorageStrategy(None if count is None else [CPU] * count, comm=comm)


@every_number
@pytest.mark.core
def test_replicas_and_devices(comm, number):
    with strategy_of(comm, number) as strategy:
        count = NUM_DEVICES[number](comm.size) or comm.size
        assert strategy.num_replicas_in_sync == count
        assert len(strategy.extended.worker_devices) == count
        assert strategy.extended.parameter_devices == ("/rank:0/cpu:0",)
        assert isinstance(parts_of(strategy).cross_device_ops.algorithm, CollectiveAllReduce)
        assert str(strategy).startswith("<CentralStorageStrategy: ")
        assert mpidist.experimental.CentralStorageStrategy is CentralStorageStrategy


@every_number
def test_variables_are_read_without_a_copy_and_written_once(comm, number):
    with strategy_of(comm, number) as strategy:
        weights = make(strategy, np.arange(6.0).reshape(2, 3), "MEAN")
        view = weights.local_value()
        seen = strategy.run(lambda: np.shares_memory(weights.local_value(), view))
        assert list(strategy.experimental_local_results(seen)) == [True] * parts_of(strategy).replicas.num_here
        strategy.run(lambda: weights.assign(np.full((2, 3), float(replica_id()))))
        assert (view == (strategy.num_replicas_in_sync - 1) / 2).all()
        weights.assign(np.ones((2, 3)))
        strategy.extended.update(weights, lambda var, by: var.assign_add(by), (1.0,))
        assert (view == 2).all()
        weights.assign(7.0 + comm.rank)  # rank 0 writes for the node
        assert (view == 7).all()


@pytest.mark.ranks(3)
def test_variable_overflows_on_all_ranks_whatever_numpy_is_set_to_raise(comm):
    """One rank writes for all, and would raise alone."""
    one = mpidist.IndexedSlices(np.full(1, 3e38, np.float32), [0])
    with strategy_of(comm) as strategy, np.errstate(all="raise"):
        weights = make(strategy, np.full(2, 3e38, np.float32), "ONLY_FIRST_REPLICA")
        for change in (lambda: weights.assign_add(np.float32([3e38, 0])), lambda: weights.scatter_add(one)):
            for call in (change, lambda change=change: strategy.run(change)):
                weights.assign(np.full(2, 3e38, np.float32))
                call()
                assert weights.numpy().tolist() == [np.inf, np.float32(3e38)]


@pytest.mark.ranks(1)
def test_replica_that_is_alone_has_plain_variables(comm):
    with CentralStorageStrategy(comm=comm) as strategy:
        variable = make(strategy, 10.0)
        strategy.run(lambda: variable.assign_add(1.0))
        assert float(variable) == 11
        assert strategy.extended.parameter_devices == strategy.extended.worker_devices


@pytest.mark.ranks(1)
def test_device_strings(comm):
    for compute, parameter in ((None, "CPU:0"), (CPU, "/cpu:0"), ([CPU], None)):
        with CentralStorageStrategy(compute, parameter, comm=comm) as strategy:
            assert strategy.extended.worker_devices == ("/rank:0/cpu:0",)


@pytest.mark.ranks(2)
def test_devices_that_are_refused(comm):
    wrong = [
        (None, "GPU:0", ValueError, "parameter_device='GPU:0', whose memory not all replicas can read; leave it out"),
        (None, "the attic", ValueError, "a device is a string such as"),
        (7, None, TypeError, "devices must be a device string or a sequence"),
        ([], None, ValueError, "CentralStorageStrategy got 0 devices for . ranks"),
    ]
    for compute, parameter, kind, text in wrong:
        with raises_everywhere(comm, kind, text):
            CentralStorageStrategy(compute, parameter, comm=comm)


@pytest.mark.ranks(2)
def test_ranks_of_several_nodes_are_refused(comm, monkeypatch):
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", ",".join(str(rank % 2) for rank in range(comm.size)))
    with raises_everywhere(comm, TopologyError, "CentralStorageStrategy is for the ranks of one node"):
        CentralStorageStrategy(comm=comm)


@every_number
@pytest.mark.usefixtures("gpus", "one_node")
def test_variables_of_gpus_live_in_host_memory(comm, number):
    """Unless there is one replica alone. What GPUs assign comes there."""
    count = NUM_DEVICES[number](comm.size)
    with CentralStorageStrategy(["GPU:0"] * count if count else "GPU:0", comm=comm) as strategy:
        total = strategy.num_replicas_in_sync
        weights = make(strategy, lambda: up(np.array([1.0, 2.0])), "SUM")
        assert arrays.is_device(weights.local_value()) == (total == 1)
        strategy.run(lambda: weights.assign_add(up(np.ones(2))))
        held = weights.local_value()
        assert (down(held) if total == 1 else held).tolist() == [1 + total, 2 + total]
        if total > 1:
            assert strategy.extended.parameter_devices == ("/rank:0/cpu:0",)
    places = {("GPU:0", "GPU:0"): True, (None, "GPU:0"): True, ("GPU:0", "CPU:0"): False, (None, None): False}
    for (compute, parameter), is_on_gpu in places.items() if comm.size == 1 else ():
        with CentralStorageStrategy(compute, parameter, comm=comm) as strategy:
            assert arrays.is_device(make(strategy, np.arange(3.0)).local_value()) == is_on_gpu
            assert not is_on_gpu or strategy.extended.parameter_devices == ("/rank:0/gpu:0",)


def proportional_set_size():
    """This process's share of memory, but for files, in bytes: n processes share a page as 1/n each."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()  # of files, others come and go on the machine
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


@pytest.mark.ranks(2)
def test_ranks_hold_one_copy_of_a_model(comm):
    """32 MB on two ranks are 32 MB, and 64 MB under another strategy."""
    nbytes = 32 << 20

    def used(strategy):
        gc.collect()
        before = comm.allreduce(proportional_set_size())
        with strategy.scope():
            weights = Variable(lambda: np.zeros(nbytes // 4, np.float32), aggregation="SUM")
        strategy.run(lambda: weights.assign_add(np.float32(1)))
        assert float(weights.local_value().sum(dtype=np.float64)) == nbytes // 4 * comm.size
        comm.Barrier()
        after = comm.allreduce(proportional_set_size())
        comm.Barrier()
        return (after - before) / nbytes

    with CentralStorageStrategy(comm=comm) as central, mpidist.MirroredStrategy(comm=comm) as mirrored:
        for strategy in (central, mirrored) * 3:  # buffers that stay, and results that are kept for reuse
            strategy.reduce("sum", np.ones(nbytes // 4, np.float32))
        assert 0.9 < used(central) < 1.3
        assert used(mirrored) > comm.size - 0.3
