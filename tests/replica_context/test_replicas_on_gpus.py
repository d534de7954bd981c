"""Several replicas on a rank, with arrays in device memory: on one GPU, or on a GPU each."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from host_cuda.gpus import down, gpus, one_node, up

from mpidist import CommunicationOptions, MirroredStrategy, get_replica_context

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["gpus", "one_node"]  # fixtures

pytestmark = pytest.mark.usefixtures("one_node")


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


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("rows", ["a row", "two rows"])
@pytest.mark.parametrize("is_started", [False, True])
def test_the_time_that_kernels_of_sums_take_to_compile_is_no_deadlines(
    gpus: Any, comm: Intracomm, monkeypatch: pytest.MonkeyPatch, rows: str, is_started: bool
) -> None:
    """It is seconds, on the ranks of a node that has never done it. CuPy has no kernels of this operation yet."""
    compiler, slow = importlib.import_module("cupy.cuda.compiler"), 0.0 if comm.rank else 1.5
    compile_module = compiler._compile_module_with_cache
    taken = []

    def compile_slowly(*arguments: Any, **more: Any) -> Any:
        taken.append(slow)
        time.sleep(slow)
        return compile_module(*arguments, **more)

    replicas = 2 * comm.size + (rows != "a row")
    dtype = np.dtype(["u2", "i2"][is_started] if rows == "a row" else ["u8", "i8"][is_started])
    options = CommunicationOptions(timeout_seconds=1.0)
    with MirroredStrategy(replicas=replicas) as strategy:
        values = [up(np.full(size, 2, dtype)) for size in (5, 30_000)]
        strategy.run(lambda: context().all_reduce("sum", values))
        results = []

        def step() -> Any:
            call = context().start_all_reduce if is_started else context().all_reduce
            result = call("prod", values, options)
            return [down(array) for array in (result.wait() if is_started else result)]

        monkeypatch.setattr(compiler, "_compile_module_with_cache", compile_slowly)
        for _ in range(2):  # a rank that still compiles would be late for the second call
            results.append(strategy.run(step))
    assert taken or comm.rank
    expected = np.full(1, 2, dtype) ** np.array(replicas, dtype)
    for own in results:
        for arrays in own:
            assert all((array == expected).all() for array in arrays.values)
