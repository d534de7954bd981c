"""Replicas of one rank on a GPU each: NCCL moves their arrays, kernels add them in the order of the tree."""

import importlib
import time
from collections import Counter

import ml_dtypes
import numpy as np
import pytest
from host_cuda.gpus import down, emulated, gpus, one_node, require_gpus, up

from mpidist import CommunicationOptions, MirroredStrategy, Variable, get_replica_context
from mpidist.context_stack import parts_of
from mpidist.errors import UnavailableError
from mpidist.transport import cuda
from mpidist.transport.communicator import shard_bounds
from mpidist.transport.nccl import handles as nccl_handles
from mpidist.values import PerReplica

__all__ = ["emulated", "gpus", "one_node"]

pytestmark = pytest.mark.usefixtures("one_node")

DTYPES = [np.dtype(code) for code in ("f4", "f8", "f2", "i4", "u1", "c8")] + [np.dtype(ml_dtypes.bfloat16)]
SIZES = (0, 1, 2, 5, 31, 4099)
DEADLINE = 8.0  # seconds; long enough for ranks of a busy machine, and shorter than it takes to compile


def context():
    return get_replica_context()


def numbers(own, count, dtype):
    """Numbers whose sum depends on the order."""
    rng = np.random.default_rng([own, count])
    made = rng.normal(size=count) * 10.0 ** rng.integers(-3, 3, count)
    return (made * 10 if dtype.kind in "iu" else made).astype(np.int64 if dtype.kind in "iu" else "f8").astype(dtype)


def devices(comm, count, more=0):
    """`count` GPUs for each rank, and one more for so many of them."""
    total = count * comm.size + more
    require_gpus(total)
    return [f"GPU:{at}" for at in range(total)]


@pytest.mark.ranks(1, 2)
def test_outs_of_every_replica_may_lie_at_any_number(gpus, comm):
    """Complex numbers that begin within others, with gaps between them."""
    strategy = MirroredStrategy(devices(comm, 2))

    def step():
        around = up(np.full(40, 9, np.float32))
        odd = around[1:33].view(np.complex64)[::2]
        context().all_reduce("sum", up(np.full(8, 1 + 2j, np.complex64)), out=odd)
        return down(around)[:6].tolist()

    number = strategy.num_replicas_in_sync
    assert [its.values for its in strategy.run(step)] == [(its,) * 2 for its in (9, number, 2 * number, 9, 9, number)]
    strategy.close()


def ones_added():
    return down(context().all_reduce("sum", up(np.ones(3)))).tolist()


def assert_right(strategy):
    total = strategy.num_replicas_in_sync
    assert [its.values for its in strategy.run(ones_added)] == [(total,) * parts_of(strategy).replicas.num_here] * 3


def bytes_of(results):
    return [(result if isinstance(result, np.ndarray) else down(result)).tobytes() for result in results]


def gpus_of(comm, which):
    """The GPUs of all replicas: "3" for each rank, one more for rank 0, or two replicas of each rank on a GPU."""
    if which in ("2", "3", "4"):
        return devices(comm, min(int(which), 8 // comm.size))
    if which == "uneven":
        return devices(comm, 1, more=1)
    both = devices(comm, 2)
    return both if which == "no NCCL" else sorted(both + both[::2])


@pytest.mark.parametrize(
    "which",
    [
        *(pytest.param(which, marks=pytest.mark.ranks(1)) for which in ("2", "4")),
        *(pytest.param(which, marks=pytest.mark.ranks(1, 2)) for which in ("one GPU", "3", "no NCCL", "a shared GPU")),
        pytest.param("uneven", marks=pytest.mark.ranks(3)),
    ],
)
def test_results_have_the_bits_of_the_host(gpus, comm, monkeypatch, caplog, which):
    """On the GPU of every replica, also where ranks have several rows, into `out=` as well.

    Without NCCL, and where replicas share a GPU, arrays are copied to the first GPU.
    """
    ops = ("sum", "mean", "max", "prod") if which in ("3", "no NCCL") else ("sum",)
    if which == "no NCCL":
        monkeypatch.setenv("MPIDIST_NCCL", "0")
    named = None if which == "one GPU" else gpus_of(comm, which)
    total = 2 * comm.size if named is None else len(named)
    asked = [(dtype, SIZES[(at + shift) % len(SIZES)]) for at, dtype in enumerate(DTYPES) for shift in (0, 3)]

    def step(place, op):
        own, is_complex = context().replica_id_in_sync_group, op in ("sum", "mean")
        values = [place(numbers(own, size, dtype)) for dtype, size in asked if dtype.kind != "c" or is_complex]
        results = context().all_reduce(op, values)
        outs = [place(np.empty(its.shape, its.dtype)) for its in results]
        assert context().all_reduce(op, values, out=outs) is outs
        started = context().start_all_reduce(op, values).wait()
        gathered = [context().all_gather(value, 0) for value in values[:4]]
        if place is up:
            device = context().devices[0].rpartition(":")[2]
            assert {str(its.device.id) for its in (*results, *outs, *started, *gathered)} == {device}
        return [bytes_of(its) for its in (results, outs, started, gathered)]

    with MirroredStrategy(named, replicas=total, comm=comm) as strategy:
        on_gpus = [strategy.run(step, args=(up, op)) for op in ops]
        assert which not in ("no NCCL", "a shared GPU") or comm.size > 1 or nccl_handles.num_open() == 0
    with MirroredStrategy(replicas=total, comm=comm) as strategy:
        on_host = [strategy.run(step, args=(np.asarray, op)) for op in ops]
    for op, of_gpus, of_host in zip(ops, on_gpus, on_host, strict=True):
        for on_gpu, expected in zip(of_gpus, of_host, strict=True):
            for at, (got, want) in enumerate(zip(on_gpu, expected, strict=True)):
                got, want = (its.values if hasattr(its, "values") else its for its in (got, want))  # of one replica
                assert got == want, (op, at)
    assert caplog.text.count("are added on the first one of them") == (which == "no NCCL")


@pytest.mark.ranks(1)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_calls_and_bytes_of_nccl(emulated, comm, count):
    """Two groups for a sum, one for the broadcast of the results, whatever the number of arrays."""

    def step(size):
        own = context().replica_id_in_sync_group
        context().all_reduce("sum", [up(numbers(own, size, np.dtype("f4"))) for _ in range(3)])

    with MirroredStrategy(devices(comm, count), comm=comm) as strategy:
        for size in (1, 7, 1000):
            strategy.run(step, args=(size,))
            emulated.forget()
            strategy.run(step, args=(size,))
            nbytes = 3 * size * 4
            lengths = np.diff(shard_bounds(3 * size, count))
            moved = emulated.calls("send", "broadcast")
            sends = sum((count - 1) * (its > 0) + (at > 0 and its > 0) for at, its in enumerate(lengths))
            assert Counter(name for name, _ in moved) == {"send": sends, "broadcast": 3 * count}
            sent = sum(its for name, its in moved if name == "send")
            assert sent == (count - 1) * nbytes + nbytes - 4 * lengths[0]
            assert sum(its for name, its in moved if name == "broadcast") == count * nbytes


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("places", [(0, 1), (0, 1, 1)], ids=["a GPU each", "a shared GPU"])
def test_values_of_several_gpus_are_combined_across_replicas(emulated, comm, places):
    """Outside of `run`, though no stream was waited for."""
    indices = [2 * at + place for at in range(comm.size) for place in places]
    with MirroredStrategy([f"GPU:{index}" for index in indices], comm=comm) as strategy:

        def make(ctx):
            cuda.current().cupy.cuda.Device(indices[ctx.replica_id_in_sync_group]).use()
            return up(np.full(2, float(ctx.replica_id_in_sync_group)))

        ids = range(len(indices))
        for call, expected in (
            (lambda value: strategy.reduce("sum", value), [sum(ids)] * 2),
            (lambda value: strategy.gather(value, 0), [float(own) for own in ids for _ in range(2)]),
        ):
            value = strategy.experimental_distribute_values_from_function(make)
            parts_of(strategy).replicas.devices[0].use()
            assert isinstance(value, PerReplica)
            assert down(call(value)).tolist() == expected


@pytest.mark.ranks(1, 2)
def test_scalars_of_several_gpus_stay_scalars(gpus, comm):
    """Metrics, losses and weights, which lie on the GPU of their replica."""
    named = devices(comm, 2)
    with MirroredStrategy(named, comm=comm) as strategy:
        with strategy.scope():
            metric = Variable(0.0, synchronization="ON_READ", aggregation="SUM")

        def step():
            own = context().replica_id_in_sync_group
            metric.assign_add(own)
            return up(np.asarray(float(own))), up(np.asarray(1 + own))

        numbers, weights = strategy.run(step)
        ids = range(len(named))
        for total in (metric.read_value(), strategy.reduce("sum", numbers)):
            assert (down(total).shape, float(total)) == ((), sum(ids))
        mean = strategy.reduce("mean", numbers, weight=weights)
        assert float(mean) == pytest.approx(sum(own * (1 + own) for own in ids) / sum(1 + own for own in ids))


@pytest.mark.ranks(1, 2)
def test_replica_that_raises_leaves_nothing_behind(emulated, comm):
    with MirroredStrategy(devices(comm, 2), comm=comm) as strategy:

        def fail_on_the_second_gpu():
            if context().replica_id_in_sync_group == 1:
                raise ValueError("of replica 1")
            return ones_added()

        with pytest.raises(Exception, match="of replica 1"):
            strategy.run(fail_on_the_second_gpu)
        assert cuda.current().cupy.cuda.runtime.getDevice() == parts_of(strategy).replicas.devices[0].index
        assert_right(strategy)


@pytest.mark.ranks(2, 3)
def test_start_all_reduce_of_one_new_kind_may_be_called_again_before_the_first_wait(emulated, comm):
    """The first call compiles the additions of replicas in its wait: the others have been started by then."""
    stream = cuda.current().cupy.cuda.Stream
    with MirroredStrategy(devices(comm, 2), comm=comm) as strategy:

        def step():
            own, handles = context().replica_id_in_sync_group, []
            for at in range(3):
                with stream(non_blocking=True):
                    value = up(np.full(3, float(own)))
                    value += at
                    handles.append(context().start_all_reduce("sum", value))
            return [down(handle.wait()).sum() for handle in handles]

        count = 2 * comm.size
        totals = [3 * (sum(range(count)) + at * count) for at in range(3)]
        for _ in range(2):
            assert [its.values for its in strategy.run(step)] == [(total, total) for total in totals]


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("fault", "status"), [("send of rank 2", 1), ("ncclCommInitRank", 2), ("ncclGetUniqueId", 2)])
def test_error_of_nccl_is_raised_and_it_is_started_again(emulated, comm, fault, status):
    """After a call that failed by a reset."""
    is_call, where = fault == "send of rank 2", "on GPUs 0, 1, 2 of one process"
    failed = "a sum over GPUs 0, 1, 2 of one process failed" if is_call else f"NCCL could not be started {where}"
    with MirroredStrategy(devices(comm, 3), comm=comm) as strategy:
        if is_call:
            assert_right(strategy)
        emulated.wish(fault, status)
        with pytest.raises(UnavailableError, match=f"{failed}: NCCL_ERROR"):
            strategy.run(ones_added)
        emulated.be_normal()
        if is_call:
            with pytest.raises(RuntimeError, match=r"cannot be used any more, because an earlier .* strategy\.reset"):
                strategy.run(ones_added)
            strategy.reset()
        assert_right(strategy)
        assert nccl_handles.num_open() == 3


@pytest.mark.ranks(1)
def test_two_strategies_have_communicators_of_their_own_and_free_them(emulated, comm):
    with MirroredStrategy(devices(comm, 2), comm=comm) as one, MirroredStrategy(devices(comm, 4), comm=comm) as other:
        for strategy in (one, other, one):
            assert_right(strategy)
        assert nccl_handles.num_open() == 6
        other.close()
        assert nccl_handles.num_open() == 2
        assert_right(one)
    assert nccl_handles.num_open() == 0
    assert emulated.ended() == [("destroy", 4), ("destroy", 2)]


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("rows", "is_started"), [("a row", True), ("two rows", False), ("a GPU each", True)])
def test_deadline_excludes_compilation_of_sum_kernels(gpus, comm, monkeypatch, rows, is_started):
    """It is seconds, on the ranks of a node that has never done it."""
    compiler, taken = importlib.import_module("cupy.cuda.compiler"), []
    compile_module = compiler._compile_module_with_cache

    def compile_slowly(*arguments, **more):
        if not (taken or comm.rank):
            time.sleep(1.25 * DEADLINE)
        taken.append(arguments)
        return compile_module(*arguments, **more)

    replicas = 2 * comm.size + (rows == "two rows")
    named = devices(comm, 2) if rows == "a GPU each" else None
    dtype = np.dtype("i8")
    options = CommunicationOptions(timeout_seconds=DEADLINE)
    with MirroredStrategy(named, replicas=replicas) as strategy:

        def step():
            values = [up(np.full(size, 2, dtype)) for size in (5, 30_000)]
            call = context().start_all_reduce if is_started else context().all_reduce
            result = call("prod", values, options)
            return [down(array) for array in (result.wait() if is_started else result)]

        strategy.run(lambda: context().all_reduce("sum", [up(np.ones(5, dtype)), up(np.ones(7, dtype))]))
        results = []
        gpus.cupy.multiply._kernel_memo.clear()  # of the tests before this one
        monkeypatch.setattr(compiler, "_compile_module_with_cache", compile_slowly)
        for _ in range(2):  # a rank that still compiles would be late for the second call
            results.append(strategy.run(step))
    assert taken or comm.rank
    expected = np.full(1, 2, dtype) ** np.array(replicas, dtype)
    for own in results:
        for arrays in own:
            assert all((array == expected).all() for array in arrays.values)
