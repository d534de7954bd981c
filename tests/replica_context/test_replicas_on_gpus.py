"""Several replicas on a rank, with arrays in device memory: on one GPU, or on a GPU each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from standin.gpus import down, gpus, standin, up

from mpidist import MirroredStrategy, get_replica_context

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["gpus", "standin"]


def context() -> Any:
    return get_replica_context()


@pytest.fixture(params=["one GPU", "a GPU each"])
def strategy(request: pytest.FixtureRequest, gpus: Any, comm: Intracomm) -> Iterator[Any]:
    total = 2 * comm.size
    if request.param == "a GPU each" and gpus.support.num_devices < total:
        pytest.skip(f"needs a GPU: {total} of them")
    devices = [f"/gpu:{at}" for at in range(total)] if request.param == "a GPU each" else None
    with MirroredStrategy(devices, replicas=total) as made:
        yield made


def test_sums_have_the_bits_of_the_host(strategy: Any, gpus: Any) -> None:
    """Numbers whose sum depends on the order."""
    total = strategy.num_replicas_in_sync

    def numbers(own: int) -> Any:
        rng = np.random.default_rng(own)
        return [(rng.normal(size=count) * 10.0 ** rng.integers(-3, 3, count)).astype("f4") for count in (5, 30_000)]

    def step(place: Any) -> Any:
        values = [place(array) for array in numbers(context().replica_id_in_sync_group)]
        summed = context().all_reduce("sum", values)
        outs = [place(np.empty_like(array)) for array in numbers(0)]
        assert context().all_reduce("mean", values, out=outs) is outs
        started = context().start_all_reduce("sum", values)
        gathered = context().all_gather(values[0], 0)
        device = context().devices[0].rpartition("/")[2]
        if place is up:
            assert {f"gpu:{array.device.id}" for array in (*summed, *outs, gathered)} == {device}
        results = [*summed, *outs, *started.wait(), gathered]
        return [(down(array) if place is up else array).tobytes() for array in results]

    on_gpus = strategy.run(step, args=(up,))
    on_host = strategy.run(step, args=(np.asarray,))
    assert [value.values for value in on_gpus] == [value.values for value in on_host]
    assert all(len(set(value.values)) == 1 and len(value.values) == 2 for value in on_gpus)
    assert len(on_gpus[-1].values[0]) == 4 * 5 * total
