"""Batches that are put on GPUs."""

import numpy as np
import pytest
from host_cuda.gpus import gpus, one_node, require_gpus

from mpidist import InputOptions, MirroredStrategy, Variable
from mpidist import MultiWorkerMirroredStrategy as MultiWorker
from mpidist.context_stack import parts_of
from mpidist.transport import arrays

__all__ = ["gpus", "one_node"]


@pytest.mark.ranks(3)
@pytest.mark.usefixtures("one_node")
@pytest.mark.parametrize("first_kind", ["GPU", "CPU"])
def test_parts_are_put_on_the_devices_of_their_replicas(comm, gpus, monkeypatch, first_kind):
    """On GPUs that one process may not have: the test notes which one would be current at each copy."""
    require_gpus(2 * comm.size)
    current = []
    copied = []
    to_device = arrays.to_device

    def noting(array):
        copied.append((current[-1], array.tolist()))
        return to_device(array)

    monkeypatch.setattr(arrays, "use_gpu", current.append)
    monkeypatch.setattr(arrays, "to_device", noting)
    devices = [f"{first_kind if at % 2 == 0 else 'GPU'}:{at}" for at in range(2 * comm.size)]
    with MirroredStrategy(devices, comm=comm) as strategy:
        batches = [{"x": np.arange(8)}]
        (part,) = strategy.experimental_distribute_dataset(batches)
        mine = range(2 * comm.rank, 2 * comm.rank + 2)
        on_gpus = [at for at in mine if devices[at].startswith("GPU")]
        expected = np.array_split(np.arange(8), 2 * comm.size)
        assert copied == [(at, expected[at].tolist()) for at in on_gpus]
        kinds = [np.ndarray if at not in on_gpus else gpus.cupy.ndarray for at in mine]
        assert [type(rows) for rows in part["x"].values] == kinds
        assert first_kind == "CPU" or current[-1] == mine[0]  # a rank's first device is its current one
        copied.clear()
        list(strategy.experimental_distribute_dataset(batches, InputOptions(experimental_fetch_to_device=False)))
        assert copied == []


@pytest.mark.ranks(1, 3)
def test_batches_of_numpy_stay_on_the_host_beside_found_gpus(comm, gpus):
    """The example of the README: only a GPU that has been named, or an option, makes batches CuPy arrays."""
    batches = [np.ones((2 * comm.size, 3))]
    with MultiWorker(comm=comm) as strategy, strategy.scope():
        weights = Variable(np.zeros((3, 2)))
        for x in strategy.experimental_distribute_dataset(batches):
            strategy.run(lambda x: weights.assign_sub(x.T @ (x @ weights - 1)), args=(x,))
        assert isinstance(weights.local_value(), np.ndarray)
        options = InputOptions(experimental_fetch_to_device=True)
        (part,) = strategy.experimental_distribute_dataset(batches, options)
        assert isinstance(part, gpus.cupy.ndarray) == parts_of(strategy).replicas.devices[0].is_gpu
