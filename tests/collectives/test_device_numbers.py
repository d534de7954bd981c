"""What a program does with device memory: right numbers, a late rank, nothing that grows."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from host_cuda import are_emulated
from host_cuda.gpus import down, gpus, up

import mpidist
from mpidist import CommunicationOptions as Options
from mpidist.collectives.arguments import Spec
from mpidist.collectives.plans import Arithmetic, make_messages
from mpidist.options import Compression
from mpidist.transport import bfloat16
from mpidist.transport.gpu import DeviceKernels

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["gpus"]

OPS = ("SUM", "MEAN", "MIN", "MAX", "PROD")
SHAPES: tuple[tuple[int, ...], ...] = ((), (0, 3), (7,), (129, 33), (100_003,))
DTYPES = [*map(np.dtype, "bBhHiIqQefdFD"), np.dtype(bfloat16())]
HALF_UNITS = {np.dtype(np.float16): 2.0**-11, np.dtype(bfloat16()): 2.0**-8}
ROUNDING = 2.0  # units in the last place
ALGORITHMS: dict[str, tuple[Callable[[], Any], Options | None]] = {
    "collective": (mpidist.CollectiveAllReduce, None),
    "hierarchical": (mpidist.HierarchicalCopyAllReduce, None),
    "3 packs": (lambda: mpidist.NcclAllReduce(3), None),
    "to one device": (mpidist.ReductionToOneDevice, None),
    "reproducible": (mpidist.CollectiveAllReduce, Options(reproducible=True)),
    "small packs": (mpidist.CollectiveAllReduce, Options(bytes_per_pack=1000)),
    "bfloat16 between nodes": (mpidist.HierarchicalCopyAllReduce, Options(compression="bf16")),
    "float16 everywhere": (mpidist.CollectiveAllReduce, Options(compression="fp16", compress_everywhere=True)),
}
SLOW = ("collective", "hierarchical", "bfloat16 between nodes")  # enough where ranks share a GPU by real NCCL
DEADLINE = 0.5  # seconds
LIMIT_BYTES = 4 << 20  # of growth
CALLS, SECONDS = 10_000, 8.0


def contribution(op: str, rank: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return what a rank adds (1 to 7), multiplies (1 or 2) or compares: sums are exact in every dtype and order."""
    where = np.arange(int(np.prod(shape))).reshape(shape)
    if op == "PROD":
        return (1 + (rank + where) % 2).astype(dtype)
    if op in ("MIN", "MAX"):
        return ((5 * rank + 3 * where) % 13).astype(dtype)
    return (1 + (3 * rank + where) % 7).astype(dtype)


def expected(op: str, size: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return what must come of it, in double precision."""
    wide = np.complex128 if dtype.kind == "c" else np.float64
    rows = np.stack([contribution(op, rank, shape, dtype).astype(wide) for rank in range(size)])
    join = {"PROD": rows.prod, "MIN": rows.min, "MAX": rows.max}.get(op, rows.sum)
    return join(axis=0) / (size if op == "MEAN" else 1)


def is_right(op: str, got: Any, wanted: Any, dtype: np.dtype[Any], options: Options | None) -> bool:
    """Compare: exactly, but for means that are not whole, and may have been compressed."""
    if got.shape != wanted.shape or got.dtype != dtype:
        return False
    wide = got.astype(wanted.dtype)
    if op != "MEAN":
        return bool((wide == wanted).all())
    unit = HALF_UNITS.get(dtype, 2.0**-24)
    if dtype == np.float32 and options is not None and options.compression is not Compression.NONE:
        unit = 2.0**-8 if options.compression is Compression.BF16 else 2.0**-11
    return bool((np.abs(wide - wanted) <= ROUNDING * unit * np.abs(wanted)).all())


def can(op: str, dtype: np.dtype[Any]) -> bool:
    if dtype.kind == "c":
        return op in ("SUM", "MEAN", "PROD")
    return op != "MEAN" or dtype.kind not in "iu"


def wrong_leaves(comm: Intracomm, op: str, shapes: tuple[Any, ...], options: Options | None) -> Iterator[str]:
    """Reduce a nest of all dtypes and shapes in three ways; name the leaves that are wrong."""
    leaves = [its for its in product(DTYPES, shapes) if can(op, its[0])]
    context = mpidist.get_replica_context()

    def nest() -> dict[str, list[Any]]:
        arrays = [up(contribution(op, comm.rank, shape, dtype)) for dtype, shape in leaves]
        return {"first": arrays[:9], "rest": arrays[9:]}

    value, in_place = nest(), nest()
    before = down(value["first"][2]).copy()
    results = {
        "all_reduce": context.all_reduce(op, value, options),
        "out=": context.all_reduce(op, in_place, options, out=in_place),
        "start_all_reduce": context.start_all_reduce(op, value, options).wait(),
    }
    for way, result in results.items():
        for got, (dtype, shape) in zip([*result["first"], *result["rest"]], leaves, strict=True):
            if not is_right(op, down(got), expected(op, comm.size, shape, dtype), dtype, options):
                yield f"{op} {way} {dtype}{list(shape)}"
    if not (down(value["first"][2]) == before).all():
        yield f"{op}: the value was written"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_numbers_are_right(gpus: Any, comm: Intracomm, name: str) -> None:
    is_small = are_emulated()
    is_slow = os.environ.get("TEST_HOSTIDS") == "1"
    if is_slow and name not in SLOW:
        pytest.skip("takes long where ranks share a GPU by real NCCL")
    make, options = ALGORITHMS[name]
    with mpidist.MultiWorkerMirroredStrategy(comm=comm, cross_device_ops=make()) as strategy:
        for op in ("SUM", "MAX") if is_slow or is_small else OPS:
            found = strategy.run(lambda op=op: list(wrong_leaves(comm, op, SHAPES[: 3 if is_small else 5], options)))
            assert found == []


def test_wrong_numbers_are_seen() -> None:
    wanted, half = expected("MEAN", 3, (7,), np.dtype(np.float16)), np.dtype(np.float16)
    assert is_right("MEAN", wanted.astype(half), wanted, half, None)
    assert not is_right("MEAN", (wanted * 1.01).astype(half), wanted, half, None)
    whole = expected("SUM", 3, (7,), half)
    assert not is_right("SUM", (whole + (np.arange(7) == 3)).astype(half), whole, half, None)
    assert not is_right("SUM", whole[:6].astype(half), whole, half, None)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("nccl", ["0", "1"])
def test_a_rank_that_misses_a_call_is_noticed_and_the_ranks_begin_anew(
    gpus: Any, comm: Intracomm, monkeypatch: pytest.MonkeyPatch, nccl: str
) -> None:
    if nccl == "0" or "MPIDIST_NCCL" not in os.environ:
        monkeypatch.setenv("MPIDIST_NCCL", nccl)
    options = Options(timeout_seconds=DEADLINE)
    array = up(np.full(1 << 20, comm.rank + 1, np.float32))

    def reduce() -> None:
        mpidist.get_replica_context().all_reduce("sum", array, options=options, out=array)

    with mpidist.MultiWorkerMirroredStrategy(comm=comm) as strategy:
        strategy.run(reduce)
        comm.Barrier()
        if comm.rank == 0:
            start = time.monotonic()
            with pytest.raises(mpidist.errors.DeadlineExceededError):
                strategy.run(reduce)
            assert DEADLINE <= time.monotonic() - start <= 10 * DEADLINE
        else:
            time.sleep(2 * DEADLINE)
        strategy.reset()
        array[...] = up(np.full(1 << 20, comm.rank + 1, np.float32))
        strategy.run(reduce)
        assert (down(array) == 3).all()


def holdings(cupy: Any) -> dict[str, int]:
    """Count what the process holds now."""
    cupy.cuda.runtime.deviceSynchronize()
    cupy.cuda.alloc_pinned_memory(1)  # when CuPy lets go of the events of its own copies that are done
    gc.collect()
    pool, objects = cupy.get_default_memory_pool(), [type(its) for its in gc.get_objects()]
    return {
        "device memory in use": int(pool.used_bytes()),
        "pinned blocks": int(cupy.get_default_pinned_memory_pool().n_free_blocks()),
        "device memory of the GPU": -int(cupy.cuda.runtime.memGetInfo()[0]),
        "host memory": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "events": objects.count(cupy.cuda.Event),
        "streams": objects.count(cupy.cuda.Stream),
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def grown_by(cupy: Any, call: Callable[[], object], number: int) -> dict[str, int]:
    """Say what grows in so many calls, after a tenth of them."""
    for _ in range(number // 10):
        call()
    before = holdings(cupy)
    for _ in range(number):
        call()
    growth = {name: many - before[name] for name, many in holdings(cupy).items()}
    return {name: by for name, by in growth.items() if by > (LIMIT_BYTES if "memory" in name else 0)}


@pytest.mark.ranks(max=2)
@pytest.mark.parametrize("memory", ["one allocation", "an allocation each", "another library's"])
def test_outs_may_overlap_the_arguments_of_others(gpus: Any, comm: Intracomm, memory: str) -> None:
    """Another library's memory does not say whether it is that of another array."""
    cupy, numbers = gpus.cupy, np.arange(400, dtype=np.float32)
    whole = up(numbers)
    second = whole
    if memory == "an allocation each":
        second = up(numbers)
    elif memory == "another library's":
        if not hasattr(cupy.cuda, "MemoryPointer"):
            pytest.skip("needs CuPy itself")
        foreign = cupy.cuda.UnownedMemory(whole.data.ptr, whole.nbytes, whole)
        second = cupy.ndarray(whole.shape, whole.dtype, cupy.cuda.MemoryPointer(foreign, 0))
    values, outs = [whole[:100], whole[200:300]], [second[250:350], second[:100]]
    with mpidist.MultiWorkerMirroredStrategy(comm=comm) as strategy:
        strategy.run(lambda: mpidist.get_replica_context().all_reduce("sum", values, out=outs))
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
    with mpidist.MultiWorkerMirroredStrategy(comm=comm) as strategy:
        for number in (2, 300):
            values = [up(np.ones((3, 5), np.float32)) for _ in range(number)]
            others = [up(np.ones((3, 5), np.float32)) for _ in range(number)] if into == "other arrays" else values

            def call(values: Any = values, out: Any = None if into == "new arrays" else others) -> None:
                strategy.run(lambda: mpidist.get_replica_context().all_reduce("mean", values, out=out))

            call()
            called.append(functions_called(call))
    assert called[1] <= called[0] + 10


@pytest.mark.ranks(min=2)
def test_packs_of_gpu_arrays_are_padded_and_those_of_host_arrays_are_not(comm: Intracomm) -> None:
    """So that each array begins at a multiple of 16 bytes: less than 16 bytes for each array."""
    specs = {device: [Spec((size,), np.dtype(np.float16), device) for size in (3, 8, 1)] for device in (True, False)}
    with mpidist.MultiWorkerMirroredStrategy(comm=comm) as strategy:
        levels = strategy.extended.group.levels
        arithmetic = Arithmetic.of(mpidist.ReduceOp.SUM, Options(), levels, by_node=False)
        made = {device: make_messages(arithmetic, its, 1 << 20, 1, levels)[0] for device, its in specs.items()}
    assert [message.nbytes for message in made[True]] == [3 * 16]
    assert [message.nbytes for message in made[False]] == [2 * 12]


@pytest.mark.ranks(max=2)
@pytest.mark.parametrize("what", ["new results", "out= given", "in place", "started", "pack and unpack"])
def test_nothing_grows(gpus: Any, comm: Intracomm, what: str) -> None:
    def ones() -> list[Any]:
        return [up(np.ones(size, np.float32)) for size in (3, 1000, 17)]

    arrays, kernels = ones(), DeviceKernels()
    out = {"out= given": ones(), "in place": arrays}.get(what)

    def reduce() -> None:
        context = mpidist.get_replica_context()
        if what == "started":
            context.start_all_reduce("mean", arrays).wait()
        else:
            context.all_reduce("mean", arrays, out=out)

    def pack_and_unpack() -> None:
        fresh, buffer = ones(), up(np.ones(1020, np.float32))
        kernels.pack(fresh, buffer)
        kernels.unpack(buffer, fresh)

    with mpidist.MultiWorkerMirroredStrategy(comm=comm) as strategy:
        call = pack_and_unpack if what == "pack and unpack" else lambda: strategy.run(reduce)
        start = time.monotonic()
        for _ in range(50):
            call()
        fits = int(SECONDS * 50 / (time.monotonic() - start))
        number = 50 if are_emulated() else comm.bcast(min(CALLS, fits))
        assert grown_by(gpus.cupy, call, number) == {}


@pytest.mark.ranks(max=1)
def test_what_grows_is_seen(gpus: Any, tmp_path: Path) -> None:
    kept: list[Any] = []
    assert grown_by(gpus.cupy, lambda: kept.append((tmp_path / "file").open("w")), 50) == {"open files": 50}
    for file in kept:
        file.close()
