"""What a program does with device memory: right numbers, a late rank, nothing that grows."""

import gc
import os
import time
import weakref
from itertools import product
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from host_cuda import are_emulated
from host_cuda.gpus import down, gpus, grown_by, up
from support.contributions import COMPLEX, HALVES, INTEGERS, bits, contribution
from support.everywhere import raises_everywhere
from support.used import functions_called

import mpidist
from mpidist import CommunicationOptions as Options
from mpidist import MultiWorkerMirroredStrategy as Strategy

__all__ = ["gpus"]

DTYPES = [*dict.fromkeys(INTEGERS), *HALVES, np.dtype("f4"), np.dtype("f8"), *COMPLEX[:2], np.dtype(bool)]
SHAPES = ((40,), (129, 33))
LAYOUTS = ("whole", "unaligned", "backwards with gaps", "transposed", "on the host")
LARGE = (70_003,)  # which goes through the host in two chunks
CHUNK_BYTES = "262144"  # the least
OPS = ("SUM", "MEAN", "MIN", "MAX", "PROD")
WAYS = ("to the last rank", "new", "out=", "started", "started with out=", "in place")
ALGORITHMS = {
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
# A rank alone copies at most; across nodes there is a message between.
on_one_and_two_nodes = pytest.mark.parametrize(
    "placement",
    [pytest.param("one node", marks=pytest.mark.ranks(1, 3)), pytest.param("even", marks=pytest.mark.ranks(3))],
    indirect=True,
)
SLOW = ("collective", "hierarchical", "bfloat16 between nodes")  # enough where ranks share a GPU by real NCCL
CALLS, SECONDS = 10_000, 8.0


def context():
    return mpidist.get_replica_context()


@pytest.fixture(params=["NCCL", "staged"])
def _way(request, monkeypatch):
    """Let device memory go by NCCL or through the host, unless who started the tests has said which."""
    if "MPIDIST_NCCL" not in os.environ:
        monkeypatch.setenv("MPIDIST_NCCL", "1" if request.param == "NCCL" else "0")
        monkeypatch.setenv("MPIDIST_STAGING_BYTES", CHUNK_BYTES)
    elif request.param == "NCCL":
        pytest.skip("MPIDIST_NCCL is set: the other case asks the same")


def contributed(op, rank):
    """Arrays of every dtype that the operation takes, on the host, and how they shall lie. Results are exact.

    Over all operations each dtype meets each shape and each layout.
    """
    name, turn = "sum" if op == "MEAN" else op.lower(), OPS.index(op)
    kinds = "iufb" if op in ("MIN", "MAX") else "iufc"
    dtypes = [dtype for dtype in DTYPES if dtype.kind in kinds or dtype in HALVES]
    of_dtypes = [(dtype, SHAPES[(at + turn) % len(SHAPES)]) for at, dtype in enumerate(dtypes)]
    odd = [(dtypes[3 * turn % len(dtypes)], ()), (dtypes[2 * turn], (0, 3))]
    if op == "SUM":
        odd.append((np.dtype("f4"), LARGE))
    arrays = [contribution(name, rank, int(np.prod(its)), dtype).reshape(its) for dtype, its in of_dtypes + odd]
    if op == "MEAN":
        arrays.append(np.full(9, 2**63, np.uint64))
    return arrays, [LAYOUTS[(at + 2 * turn) % len(LAYOUTS)] for at in range(len(arrays))]


def placed(array, layout):
    """Bring an array to the device in a layout, by a copy of bytes; or leave it."""
    if layout == "on the host":
        return array.copy()
    shape, dtype, view = array.shape, array.dtype, lambda its: its
    if layout == "unaligned":  # begins within a number, if that is complex
        dtype = array.real.dtype
        shape = (array.nbytes // dtype.itemsize + 2,)
        view = lambda its: its[1:-1].view(array.dtype).reshape(array.shape)  # noqa: E731
    elif layout == "backwards with gaps" and array.ndim:
        shape, view = (*shape[:-1], shape[-1] + 1), lambda its: its[..., :0:-1]
    elif layout == "transposed":
        shape, view = shape[::-1], lambda its: its.T
    whole = np.zeros(shape, dtype)
    view(whole)[...] = array
    return view(up(whole))


def on_host(array):
    """Copy an array to the host, by a copy of bytes."""
    if isinstance(array, np.ndarray):
        return array.copy()
    if array.flags.c_contiguous:
        return down(array)
    start = array.data.ptr - array.base.data.ptr
    return np.ndarray(array.shape, array.dtype, down(array.base).reshape(-1).view("u1"), start, array.strides)


def are_same(op, got, want):
    """Compare bits; of means in half precision, which are rounded once in each phase, to two roundings."""
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return False
    if op == "MEAN" and got.dtype in HALVES:
        limit = float(ml_dtypes.finfo(got.dtype).eps) * abs(want.astype(np.float64))
        return bool((abs(got.astype(np.float64) - want.astype(np.float64)) <= limit).all())
    return bits(got) == bits(want)


@pytest.mark.usefixtures("_way")
@on_one_and_two_nodes
@pytest.mark.parametrize("name", ALGORITHMS)
def test_numbers_are_those_of_host_memory(gpus, comm, placement, name):
    """Of all dtypes and layouts in one call; sums in every way to ask for them. Arguments are only read."""
    is_slow = os.environ.get("TEST_HOSTIDS") == "1"
    if is_slow and name not in SLOW:
        pytest.skip("takes long where ranks share a GPU by real NCCL")
    make, options = ALGORITHMS[name]

    def reduced(way, op, values, out):
        if way == "to the last rank":
            return strategy.extended.reduce_to(op, values, comm.size - 1, options)
        if way.startswith("started"):
            return strategy.run(lambda: context().start_all_reduce(op, values, options, out=out).wait())
        return strategy.run(lambda: context().all_reduce(op, values, options, out=out))

    with Strategy(comm=comm, cross_device_ops=make()) as strategy:
        for op in ("SUM", "MAX") if is_slow else OPS:
            host, layouts = contributed(op, comm.rank)
            wanted = reduced("new", op, host, None)
            values, ways = list(map(placed, host, layouts)), WAYS[: -1 if op == "MEAN" else None]
            # Each way with each algorithm, on one node or on two; and with each operation, over all algorithms.
            first = [*ALGORITHMS].index(name) + len(set(placement))
            ways = ways[first % 2 :: 2] if op == "SUM" else ways[first % len(ways) :][:1]
            for way in ways:
                outs = list(map(placed, map(np.zeros_like, wanted), layouts)) if way.endswith("out=") else None
                results = reduced(way, op, values, values if way == "in place" else outs)
                kept = [] if way == "in place" else zip(values, host, strict=True)
                if way != "to the last rank" or comm.rank == comm.size - 1:
                    kept = [*kept, *zip(results, wanted, strict=True)]
                for got, want in kept:
                    assert are_same(op, on_host(got), want), (op, way, want.dtype, want.shape)


OTHER_CALLS = {
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


@pytest.mark.usefixtures("_way", "placement")
@on_one_and_two_nodes
def test_other_calls_have_the_results_of_host_memory(gpus, comm, strategy):
    shapes = [(comm.size, 2), (3 * comm.size + 1, 5), (700, 40)]
    dtypes = [*(np.dtype(code) for code in ("i2", "i4", "f4", "c8")), *HALVES]
    for (first, (name, call)), place in product(enumerate(OTHER_CALLS.items()), range(3)):
        dtype = dtypes[(first + 2 * place) % len(dtypes)]
        shape, layout = shapes[(first + place) % len(shapes)], LAYOUTS[(first + place) % 4]
        host = contribution("prod", comm.rank, int(np.prod(shape)), dtype).reshape(shape)
        wanted = call(strategy, host)
        got = call(strategy, placed(host, layout))
        assert (got is None) == (wanted is None), name
        assert wanted is None or are_same("", down(got), wanted), (name, dtype, shape)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("memory", ["one allocation", "an allocation each", "another library's", "of DLPack"])
def test_outs_may_overlap_the_arguments_of_others(gpus, comm, memory):
    """Another library's memory does not say whether it is that of another array."""
    cupy, numbers = gpus.cupy, np.arange(400, dtype=np.float32)
    whole = second = up(numbers)
    if memory == "an allocation each":
        second = up(numbers)
    elif memory == "another library's":
        foreign = cupy.cuda.UnownedMemory(whole.data.ptr, whole.nbytes, whole)
        second = cupy.ndarray(whole.shape, whole.dtype, cupy.cuda.MemoryPointer(foreign, 0))
    elif memory == "of DLPack":
        kind = {"__dlpack__": whole.__dlpack__, "__dlpack_device__": whole.__dlpack_device__}
        second = cupy.from_dlpack(SimpleNamespace(**kind))
    values, outs = [whole[:100], whole[200:300]], [second[250:350], second[:100]]
    with Strategy(comm=comm) as strategy:
        strategy.run(lambda: context().all_reduce("sum", values, out=outs))
    assert (down(outs[0]) == comm.size * numbers[:100]).all()
    assert (down(outs[1]) == comm.size * numbers[200:300]).all()


@pytest.mark.ranks(max=1)
@pytest.mark.parametrize("into", ["new arrays", "the values", "other arrays"])
def test_all_reduce_function_calls_do_not_grow_with_arrays(gpus, comm, into):
    """From the second call on, by the addresses of the arrays, which may be other objects each time."""
    called = []
    with Strategy(comm=comm) as strategy:
        for number in (16, 161):
            values, others = ([up(np.ones((3, 5), np.float32)) for _ in range(number)] for _ in range(2))

            def call(values=values, others=others):
                own = [its.view() for its in values]
                out = {"new arrays": None, "the values": own}.get(into, [its.view() for its in others])
                strategy.run(lambda: context().all_reduce("mean", own, out=out))

            call()
            called.append(functions_called(call))
    assert called[1] == called[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("into", ["new arrays", "the values", "other arrays"])
def test_lists_of_other_forms_at_the_same_addresses_are_other_lists(gpus, comm, into):
    memory, others = up(np.zeros(4000, np.float32)), up(np.zeros(4000, np.float32))
    forms = [
        ((6, 10), "f4"),
        ((60,), "f4"),
        ((60,), "i4"),
        ((30,), "f8"),
        ((7,), "f4"),
    ]
    with Strategy(comm=comm) as strategy:
        for turn in range(4 * len(forms)):
            shape, code = forms[turn % len(forms)]
            count = int(np.prod(shape))
            values, outs = (
                [its[at : at + 60].view(code)[:count].reshape(shape) for at in range(0, 4000, 200)]
                for its in (memory, others)
            )
            for at, value in enumerate(values):
                value[...] = turn + at + comm.rank
            out = {"new arrays": None, "the values": values}.get(into, outs)
            results = strategy.run(lambda values=values, out=out: context().all_reduce("sum", values, out=out))
            for at, result in enumerate(results):
                assert result.shape == shape
                assert (down(result) == 2 * (turn + at) + 1).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("into", ["new arrays", "the values", "other arrays"])
def test_repeated_list_of_gpu_arrays_keeps_none_of_them(gpus, comm, into):
    kept = []

    def repeat():
        values, others = ([up(np.ones(6, np.float32)) for _ in range(20)] for _ in range(2))
        out = {"new arrays": None, "the values": values}.get(into, others)
        for _ in range(3):
            context().all_reduce("sum", values, out=out)
        kept.extend(map(weakref.ref, (*values, *others)))

    with Strategy(comm=comm) as strategy:
        strategy.run(repeat)
        gc.collect()
        assert [one() for one in kept if one() is not None] == []


@pytest.mark.ranks(2)
def test_repeated_list_of_gpu_arrays_is_compared_by_its_shapes(gpus, comm):
    values = [up(np.ones(6, np.float32)) for _ in range(20)]
    with Strategy(comm=comm) as strategy:
        for _ in range(3):
            strategy.run(lambda: context().all_reduce("sum", values, out=values))
        if comm.rank:
            values[3].shape = (2, 3)
        with raises_everywhere(comm, mpidist.errors.InvalidArgumentError, r"f32\[2,3\] on a GPU"):
            strategy.run(lambda: context().all_reduce("sum", values, out=values))


@pytest.mark.ranks(max=2)
@pytest.mark.parametrize("what", ["new results", "new values", "out= given", "in place", "several packs", "started"])
def test_all_reduce_repeated_grows_no_resource(gpus, comm, what, strategy):
    arrays, others = ([up(np.ones(size, np.float32)) for size in (3, 1000, 17)] for _ in range(2))
    out = {"out= given": others, "in place": arrays, "several packs": arrays}.get(what)
    options = Options(bytes_per_pack=100) if what == "several packs" else None

    def reduce():
        values = [its.copy() for its in arrays] if what == "new values" else arrays
        if what == "started":
            handles = [context().start_all_reduce("mean", values, out=its) for its in (others, None)]
            handles[1].wait()
        else:
            context().all_reduce("mean", values, options, out=out)

    start = time.monotonic()
    for _ in range(50):
        strategy.run(reduce)
    fits = int(SECONDS * 50 / (time.monotonic() - start))
    number = 50 if are_emulated() else comm.bcast(min(CALLS, fits))
    assert grown_by(lambda: strategy.run(reduce), number) == {}


@pytest.mark.ranks(max=1)
def test_growth_of_files_and_device_memory_is_measured(gpus, tmp_path):
    kept = []
    assert grown_by(lambda: kept.append((tmp_path / "file").open("w")), 50) == {"open files": 50}
    assert grown_by(lambda: kept.append(gpus.cupy.empty(3)), 50) == {"device memory in use": 50 * 512}
    for file in kept[:55]:
        file.close()
