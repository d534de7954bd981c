"""What a program does with device memory: right numbers, a late rank, nothing that grows."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from host_cuda import are_emulated
from host_cuda.gpus import down, gpus, grown_by, up
from support.contributions import COMPLEX, HALVES, INTEGERS, bits, contribution

import mpidist
from mpidist import CommunicationOptions as Options
from mpidist import MultiWorkerMirroredStrategy as Strategy

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["gpus"]

DTYPES = [*dict.fromkeys(INTEGERS), *HALVES, np.dtype("f4"), np.dtype("f8"), *COMPLEX[:2], np.dtype(bool)]
SHAPES: tuple[tuple[int, ...], ...] = ((), (0, 3), (40,), (129, 33))
LARGE = (150_003,)  # which goes through the host in several chunks
CHUNK_BYTES = "262144"  # the least
ALGORITHMS: dict[str, tuple[Callable[[], Any], Options]] = {
    "collective": (mpidist.CollectiveAllReduce, Options()),
    "hierarchical": (mpidist.HierarchicalCopyAllReduce, Options()),
    "a pack": (mpidist.NcclAllReduce, Options()),
    "3 packs": (lambda: mpidist.NcclAllReduce(3), Options()),
    "no packs": (lambda: mpidist.NcclAllReduce(0), Options()),
    "to one device": (mpidist.ReductionToOneDevice, Options()),
    "ring": (mpidist.HierarchicalCopyAllReduce, Options(implementation="RING")),
    "reproducible": (mpidist.CollectiveAllReduce, Options(reproducible=True)),
    "small packs": (mpidist.CollectiveAllReduce, Options(bytes_per_pack=1000)),
    "bfloat16 between nodes": (mpidist.HierarchicalCopyAllReduce, Options(compression="bf16")),
    "float16 everywhere": (mpidist.CollectiveAllReduce, Options(compression="fp16", compress_everywhere=True)),
}
SLOW = ("collective", "hierarchical", "bfloat16 between nodes")  # enough where ranks share a GPU by real NCCL
DEADLINE = 0.5  # seconds
CALLS, SECONDS = 10_000, 8.0


def context() -> Any:
    return mpidist.get_replica_context()


@pytest.fixture(params=["NCCL", "staged"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let device memory go by NCCL or through the host, unless who started the tests has said which."""
    if "MPIDIST_NCCL" not in os.environ:
        monkeypatch.setenv("MPIDIST_NCCL", "1" if request.param == "NCCL" else "0")
        monkeypatch.setenv("MPIDIST_STAGING_BYTES", CHUNK_BYTES)


def contributed(op: str, rank: int) -> list[Any]:
    """Arrays of every dtype and shape that the operation takes, on the host. Their results are exact in any order."""
    name = "sum" if op == "MEAN" else op.lower()
    kinds = {"MIN": "iufb", "MAX": "iufb"}.get(op, "iufc")
    dtypes = [dtype for dtype in DTYPES if dtype.kind in kinds or dtype in HALVES]
    sizes = {shape: int(np.prod(shape)) for shape in SHAPES}
    arrays = [contribution(name, rank, sizes[shape], its).reshape(shape) for its in dtypes for shape in SHAPES]
    if op == "SUM":  # once: the emulation takes long for them
        arrays += [contribution(name, rank, *LARGE, dtype) for dtype in (np.dtype("f4"), HALVES[0])]
    return [*arrays, np.full(9, 2**63, np.uint64)] if op == "MEAN" else arrays


def placed(at: int, array: Any) -> Any:
    """Bring an array to the device, whole, unaligned, backwards with gaps, or transposed; or leave it."""
    if at % 5 == 4 or array.ndim == 0:
        return array.copy() if at % 10 == 9 else up(array)
    if at % 5 == 1 and array.size:  # begins within a number
        part = array.real.dtype  # of a complex number
        around = up(np.zeros(array.nbytes // part.itemsize + 2, part))
        target = around[1:-1].view(array.dtype).reshape(array.shape)
    elif at % 5 == 2:
        target = up(np.zeros((*array.shape[:-1], array.shape[-1] + 1), array.dtype))[..., :0:-1]
    elif at % 5 == 3:
        target = up(np.zeros(array.shape[::-1], array.dtype)).T
    else:
        return up(array)
    target[...] = up(array)
    return target


def on_host(arrays: list[Any]) -> list[Any]:
    return [array.copy() if isinstance(array, np.ndarray) else down(array) for array in arrays]


def are_same(op: str, got: Any, want: Any) -> bool:
    """Compare bits; of means in half precision, which are rounded once in each phase, to two roundings."""
    if op == "MEAN" and got.dtype in HALVES:
        limit = float(ml_dtypes.finfo(got.dtype).eps) * abs(want.astype(np.float64))
        return bool((abs(got.astype(np.float64) - want.astype(np.float64)) <= limit).all())
    return bits(got) == bits(want)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_numbers_are_those_of_host_memory(gpus: Any, comm: Intracomm, placement: tuple[int, ...], name: str) -> None:
    """Of all dtypes, shapes and layouts in one call, in every way to ask for them; arguments are only read."""
    is_slow = os.environ.get("TEST_HOSTIDS") == "1"
    if is_slow and name not in SLOW:
        pytest.skip("takes long where ranks share a GPU by real NCCL")
    make, options = ALGORITHMS[name]
    with Strategy(comm=comm, cross_device_ops=make()) as strategy:
        for turn, op in enumerate(("SUM", "MAX") if is_slow else ("SUM", "MEAN", "MIN", "MAX", "PROD")):
            host = contributed(op, comm.rank)
            wanted = strategy.run(lambda op=op, host=host: context().all_reduce(op, host, options))
            values = [placed(at, array) for at, array in enumerate(host, turn)]
            outs, others = ([placed(at, np.zeros_like(its)) for at, its in enumerate(wanted, turn)] for _ in range(2))

            def ways(op: str = op, values: Any = values, outs: Any = outs, others: Any = others) -> dict[str, Any]:
                ours = context()
                results = {
                    "new": ours.all_reduce(op, values, options),
                    "out=": ours.all_reduce(op, values, options, out=outs),
                    "started": ours.start_all_reduce(op, values, options).wait(),
                    "started with out=": ours.start_all_reduce(op, values, options, out=others).wait(),
                    "values": values,
                }
                results = {way: on_host(arrays) for way, arrays in results.items()}
                if op != "MEAN":
                    results["in place"] = on_host(ours.all_reduce(op, values, options, out=values))
                return results

            to_last = [strategy.extended.reduce_to(op, its, comm.size - 1, options) for its in (values, host)]
            found, expected = strategy.run(ways), {"values": host}
            if comm.rank == comm.size - 1:
                found["to the last rank"], expected["to the last rank"] = map(on_host, to_last)
            for way, results in found.items():
                for at, (got, want) in enumerate(zip(results, expected.get(way, wanted), strict=True)):
                    is_right = (got.dtype, got.shape) == (want.dtype, want.shape) and are_same(op, got, want)
                    assert is_right, (op, way, host[at].dtype, host[at].shape)


OTHER_CALLS: dict[str, Callable[[Strategy, Any], Any]] = {
    "reduce_scatter": lambda strategy, value: strategy.run(lambda: context().reduce_scatter("SUM", value)),
    "mean of shards": lambda strategy, value: strategy.run(lambda: context().reduce_scatter("MEAN", value, 1)),
    "all_gather": lambda strategy, value: strategy.run(lambda: context().all_gather(value, 1)),
    "gather": lambda strategy, value: strategy.gather(value, 0),
    "broadcast": lambda strategy, value: strategy.broadcast(value),
    "broadcast_to": lambda strategy, value: strategy.extended.broadcast_to(value, [0]),
    "reduce_to": lambda strategy, value: strategy.extended.reduce_to(
        "PROD", value, value.shape[0] % 3 % strategy.topology.size
    ),
    "reduce along an axis": lambda strategy, value: strategy.reduce("MEAN", value, axis=0),
}


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("call", OTHER_CALLS)
def test_other_calls_have_the_results_of_host_memory(
    gpus: Any, comm: Intracomm, placement: tuple[int, ...], call: str
) -> None:
    with Strategy(comm=comm) as strategy:
        for dtype in [np.dtype(code) for code in ("i2", "i4", "f4", "c8")] + HALVES:
            for at, shape in enumerate([(comm.size, 2), (3 * comm.size + 1, 5), (700, 40)]):
                host = contribution("prod", comm.rank, int(np.prod(shape)), dtype).reshape(shape)
                wanted = OTHER_CALLS[call](strategy, host)
                got = OTHER_CALLS[call](strategy, placed(at + (at == 2), host))
                assert (got is None) == (wanted is None)
                assert wanted is None or (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
                assert wanted is None or bits(down(got)) == bits(wanted), (dtype, shape)


@pytest.mark.usefixtures("_way")
@pytest.mark.ranks(2)
def test_a_rank_that_misses_a_call_is_noticed_and_the_ranks_begin_anew(gpus: Any, comm: Intracomm) -> None:
    array = up(np.full(1 << 20, comm.rank + 1, np.float32))

    def reduce(options: Options | None = None) -> None:
        context().all_reduce("sum", array, options, out=array)

    with Strategy(comm=comm) as strategy:
        strategy.run(reduce)
        comm.Barrier()
        if comm.rank == 0:
            start = time.monotonic()
            with pytest.raises(mpidist.errors.DeadlineExceededError):
                strategy.run(reduce, args=(Options(timeout_seconds=DEADLINE),))
            assert time.monotonic() - start >= DEADLINE
        comm.Barrier()
        strategy.reset()
        array[...] = up(np.full(1 << 20, comm.rank + 1, np.float32))
        strategy.run(reduce)
        assert (down(array) == 3).all()


@pytest.mark.ranks(max=2)
@pytest.mark.parametrize("memory", ["one allocation", "an allocation each", "another library's"])
def test_outs_may_overlap_the_arguments_of_others(gpus: Any, comm: Intracomm, memory: str) -> None:
    """Another library's memory does not say whether it is that of another array."""
    cupy, numbers = gpus.cupy, np.arange(400, dtype=np.float32)
    whole = second = up(numbers)
    if memory == "an allocation each":
        second = up(numbers)
    elif memory == "another library's":
        foreign = cupy.cuda.UnownedMemory(whole.data.ptr, whole.nbytes, whole)
        second = cupy.ndarray(whole.shape, whole.dtype, cupy.cuda.MemoryPointer(foreign, 0))
    values, outs = [whole[:100], whole[200:300]], [second[250:350], second[:100]]
    with Strategy(comm=comm) as strategy:
        strategy.run(lambda: context().all_reduce("sum", values, out=outs))
    assert (down(outs[0]) == comm.size * numbers[:100]).all()
    assert (down(outs[1]) == comm.size * numbers[200:300]).all()


def functions_called(call: Callable[[], object]) -> int:
    """Count the calls of functions of mpidist in this thread."""
    number, folder = 0, str(Path(mpidist.__file__).parent)

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal number
        number += event == "call" and frame.f_code.co_filename.startswith(folder)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return number


@pytest.mark.ranks(max=1)
@pytest.mark.parametrize("into", ["new arrays", "the values", "other arrays"])
def test_no_function_is_called_for_each_array(gpus: Any, comm: Intracomm, into: str) -> None:
    """From the second call on: 10,000 arrays would take 10,000 times as long as one."""
    called = []
    with Strategy(comm=comm) as strategy:
        for number in (2, 300):
            values, others = ([up(np.ones((3, 5), np.float32)) for _ in range(number)] for _ in range(2))
            out = {"new arrays": None, "the values": values}.get(into, others)

            def call(values: Any = values, out: Any = out) -> None:
                strategy.run(lambda: context().all_reduce("mean", values, out=out))

            call()
            called.append(functions_called(call))
    assert called[1] <= called[0] + 10


@pytest.mark.ranks(max=2)
@pytest.mark.parametrize("what", ["new results", "new values", "out= given", "in place", "several packs", "started"])
def test_nothing_grows(gpus: Any, comm: Intracomm, what: str) -> None:
    arrays, others = ([up(np.ones(size, np.float32)) for size in (3, 1000, 17)] for _ in range(2))
    out = {"out= given": others, "in place": arrays, "several packs": arrays}.get(what)
    options = Options(bytes_per_pack=100) if what == "several packs" else None

    def reduce() -> None:
        values = [its.copy() for its in arrays] if what == "new values" else arrays
        if what == "started":
            handles = [context().start_all_reduce("mean", values, out=its) for its in (others, None)]
            handles[1].wait()
        else:
            context().all_reduce("mean", values, options, out=out)

    with Strategy(comm=comm) as strategy:
        start = time.monotonic()
        for _ in range(50):
            strategy.run(reduce)
        fits = int(SECONDS * 50 / (time.monotonic() - start))
        number = 50 if are_emulated() else comm.bcast(min(CALLS, fits))
        assert grown_by(lambda: strategy.run(reduce), number) == {}


@pytest.mark.ranks(max=1)
def test_what_grows_is_seen(gpus: Any, tmp_path: Path) -> None:
    kept: list[Any] = []
    assert grown_by(lambda: kept.append((tmp_path / "file").open("w")), 50) == {"open files": 50}
    assert grown_by(lambda: kept.append(gpus.cupy.empty(3)), 50) == {"device memory in use": 50 * 512}
    for file in kept[:55]:
        file.close()
