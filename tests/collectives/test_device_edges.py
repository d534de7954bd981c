"""Where the parts for GPUs meet each other, and what other libraries and odd arrays bring to them."""

import threading
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from host_cuda import are_emulated
from host_cuda.gpus import (
    capturing,
    compiler,
    down,
    emulated,
    gpus,
    group,
    require_gpus,
    up,
    use_own_settings,
)
from support.everywhere import raises_everywhere

from mpidist import MultiWorkerMirroredStrategy, get_replica_context, get_strategy
from mpidist.checkpoint.leaves import leaf_of
from mpidist.collectives.reduce_scatter import reduce_scatter
from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.cross_device_ops.hierarchical_copy_all_reduce import HierarchicalCopyAllReduce
from mpidist.cross_device_ops.nccl_all_reduce import NcclAllReduce
from mpidist.errors import InvalidArgumentError, UnavailableError
from mpidist.options import CommunicationOptions
from mpidist.transport import arrays, cuda

__all__ = ["compiler", "emulated", "gpus", "group"]  # fixtures


def real_torch():
    if are_emulated():
        pytest.skip("needs a real GPU: emulated ones have no torch")
    return pytest.importorskip("torch")


class Tensor:
    """Of a library with a stream of its own, on which it writes its numbers."""

    def __init__(self, array, stream=None):
        self.array, self.stream = array, stream

    @classmethod
    def of(cls, numbers):
        with cuda.current().cupy.cuda.Stream(non_blocking=True) as stream:
            return cls(up(numbers), stream)

    __cuda_array_interface__ = property(lambda self: {"version": 2})
    shape = property(lambda self: self.array.shape)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **how):
        with self.stream or nullcontext():
            return self.array.__dlpack__(**how)

    def __array_namespace__(self):
        return SimpleNamespace(from_dlpack=Tensor)


@pytest.mark.ranks(3)
def test_all_reduce_waits_for_streams_of_other_libraries(group, comm):
    """As PyTorch's arrays in `with torch.cuda.stream(...)`, of which the interface of CUDA arrays tells nothing."""
    ops = BoundOps(NcclAllReduce(), group)
    for _ in range(2):
        value = Tensor.of(np.full(50, comm.rank + 1.0))
        result = ops.all_reduce("SUM", value)
        assert (down(result.array) == comm.size * (comm.size + 1) / 2).all()
        handle = ops.start_all_reduce("SUM", Tensor.of(np.ones(3000)))
        assert (down(handle.wait().array) == comm.size).all()


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("per_rank", [None, 2])
@pytest.mark.parametrize("nccl", ["1", "0"])
def test_results_in_arrays_of_a_library_with_its_own_stream(gpus, comm, monkeypatch, per_rank, nccl):
    """They are there when a call returns, also where they were copied, whatever its stream does then."""
    use_own_settings(monkeypatch)
    monkeypatch.setenv("MPIDIST_NCCL", nccl)

    def step():
        ctx = get_replica_context()
        n, own = ctx.num_replicas_in_sync, ctx.replica_id_in_sync_group
        strided = Tensor.of(np.zeros((60, 2)))
        strided.array = strided.array[:, 0]
        for out in (Tensor.of(np.zeros(60)), strided):
            value = Tensor.of(np.full(60, own + 1.0))
            holds(ctx.all_reduce("sum", value, out=out), out, n * (n + 1) / 2)
            holds(ctx.start_all_reduce("max", value, out=out).wait(), out, n)
            holds(ctx.all_reduce("mean", value, weight=2.0, out=out), out, (n + 1) / 2)
            holds(ctx.all_reduce("mean", value, out=value), value, (n + 1) / 2)
            holds(ctx.all_gather(Tensor.of(np.full(60 // n, 5.0)), 0, out=out), out, 5)
            holds(ctx.reduce_scatter("sum", Tensor.of(np.ones(60 * n)), out=out), out, n)

    def holds(result, out, number):
        assert result is out
        with out.stream:
            assert (down(out.array) == number).all()

    with MultiWorkerMirroredStrategy(comm=comm, replicas=per_rank and per_rank * comm.size) as strategy:
        for _ in range(2):
            strategy.run(step)
        value, out = Tensor.of(np.full((60, 2), float(comm.rank))), Tensor.of(np.zeros((60, 2)))
        holds(strategy.broadcast(value, root=comm.size - 1, out=out), out, comm.size - 1)
        if per_rank is None:
            mean = Tensor.of(np.zeros(60))
            holds(strategy.reduce("mean", value, axis=1, out=mean), mean, (comm.size - 1) / 2)
    leaf = leaf_of("x", out, get_strategy())
    holds(leaf.restore(np.full((60, 2), 7.0)), out, 7)


@pytest.mark.ranks(3)
def test_results_go_to_no_library_without_streams(group, comm):
    """Without DLPack: its interface of CUDA's arrays tells the stream of the past alone."""
    value = up(np.ones(5))
    out = SimpleNamespace(__cuda_array_interface__=value.__cuda_array_interface__)
    with raises_everywhere(comm, InvalidArgumentError, "out 0 cannot be written: its library has no DLPack"):
        BoundOps(NcclAllReduce(), group).all_reduce("SUM", value, out=out)


@pytest.mark.ranks(1, 3)
def test_tensors_of_torch_that_a_side_stream_is_about_to_write(group, comm):
    torch = real_torch()
    ops, work = BoundOps(NcclAllReduce(), group), torch.ones(4096, 4096, device="cuda")
    for dtype in (torch.bfloat16, torch.float32):
        tensor = torch.zeros(1 << 18, dtype=dtype, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side), cuda.current().cupy.cuda.ExternalStream(side.cuda_stream):
            for _ in range(10):  # the stream is busy for some milliseconds
                work = work @ work / len(work)
            tensor += comm.rank + 1
            total, out = ops.all_reduce("SUM", tensor), torch.zeros_like(tensor)
            assert ops.all_reduce("SUM", tensor, out=out) is out
            doubled = out + out
        torch.cuda.synchronize()
        assert total.dtype == dtype
        assert (total == comm.size * (comm.size + 1) // 2).all()
        assert (doubled == comm.size * (comm.size + 1)).all()


@pytest.mark.ranks(1, 3)
def test_hooks_of_torch_make_calls_in_the_thread_of_a_gpu(gpus, comm):
    torch, threads = real_torch(), set()
    weight = torch.ones(1 << 18, device="cuda", requires_grad=True)
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:

        def step():
            context, weight.grad = get_replica_context(), None

            def average(parameter):
                threads.add(threading.get_ident())
                context.all_reduce("mean", parameter.grad, out=parameter.grad)

            hook = weight.register_post_accumulate_grad_hook(average)
            (weight * (comm.rank + 1)).sum().backward()
            hook.remove()
            assert (weight.grad == (comm.size + 1) / 2).all()
            assert context.all_reduce("sum", 1.0) == comm.size

        for _ in range(3):
            strategy.run(step)
    assert threads - {threading.get_ident()}


@pytest.mark.ranks(3)
def test_start_all_reduce_results_are_usable_in_any_stream(group, comm):
    ops = BoundOps(HierarchicalCopyAllReduce(), group)
    for _ in range(2):
        handle = ops.start_all_reduce("MEAN", [up(np.ones(count)) for count in (5, 700)])
        results = handle.wait()
        with cuda.current().cupy.cuda.Stream(non_blocking=True):
            assert all((down(result) == 1).all() for result in results)


@pytest.mark.ranks(3)
def test_two_streams_of_the_program_in_turn_do_not_share_memory(gpus, comm):
    """Halves are joined by a kernel, and its memory is lent until it is done. Emulated GPUs report what overlaps."""
    size, count = comm.size, 20_000
    streams = [gpus.cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        values = [up(np.full(count * size, turn, np.float16)) for turn in range(6)]
        gpus.cupy.cuda.Device().synchronize()
        shards = []
        for turn, value in enumerate(values):
            with streams[turn % 2]:
                shards.append(strategy.run(lambda value=value: get_replica_context().reduce_scatter("SUM", value)))
        gpus.cupy.cuda.Device().synchronize()
        for turn, shard in enumerate(shards):
            assert (down(shard) == turn * size).all()


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("dtype", "text"),
    [(">f4", "native byte order, got '>f4'"), (ml_dtypes.float8_e5m2, "add or copy float8_e5m2: send a view of uint8")],
    ids=["another byte order", "float8"],
)
def test_device_dtype_that_one_gpu_lacks_is_refused_on_all_ranks(group, comm, dtype, text):
    value = up(np.ones(5, np.float32)).view(dtype if comm.rank else "=f4")
    with raises_everywhere(comm, InvalidArgumentError, text):
        BoundOps(NcclAllReduce(), group).all_reduce("SUM", value)


@pytest.mark.ranks(3)
def test_outs_of_earlier_calls_are_looked_at_again(group, comm):
    """Outs that were checked are known; one that has another shape since, in place, is refused on all ranks."""
    ops, values = BoundOps(NcclAllReduce(), group), [up(np.ones(6)), up(np.ones(4))]
    outs = [up(np.zeros(6)), up(np.zeros(4))]
    for _ in range(4):
        ops.all_reduce("SUM", values, out=outs)
        assert all((down(out) == comm.size).all() for out in outs)
    outs[1].shape = (2, 2)
    with raises_everywhere(comm, InvalidArgumentError, r"out 1 must be an array f64\[4\] on a GPU, got f64\[2,2\]"):
        ops.all_reduce("SUM", values, out=outs)


@pytest.mark.ranks(3)
def test_elements_may_lie_at_any_number(group, comm):
    """A view of float32 as complex64, of rows of three: the first element is aligned, and every second one is not."""
    ops, rows = BoundOps(NcclAllReduce(), group), up(np.full((64, 3), 9, np.float32))
    odd, plain = rows[:, :2].view(np.complex64), up(np.full((64, 1), 2 + 1j, np.complex64))
    assert (down(ops.all_reduce("SUM", odd).view(np.float32)) == 9 * comm.size).all()
    ops.all_reduce("SUM", plain, out=odd)
    assert (down(rows) == [2 * comm.size, comm.size, 9]).all()


@pytest.mark.ranks(3)
def test_results_go_to_no_other_gpu(gpus, group, comm):
    """Kernels that wrote there would lose CUDA's context. Values from there are copied."""
    ops, other = BoundOps(NcclAllReduce(), group), comm.size
    require_gpus(other + 1)
    first, value, out = up(np.zeros(5)), up(np.ones(5)), up(np.zeros(5))
    ops.all_reduce("SUM", [value, value], out=[first, out])  # so that the first one is known
    if comm.rank == 0:
        with gpus.cupy.cuda.Device(other):
            value, out = up(np.ones(5)), up(np.zeros(5))
            arrays.wait_for_stream()
    for into in (value, out):
        for call in (
            lambda outs: ops.all_reduce("SUM", [value, value], out=outs),
            lambda outs: ops.broadcast([value, value], "all", out=outs),
        ):
            refusal = f"out 1 must lie on GPU 0, .* lies on GPU {other}: make it"
            with raises_everywhere(comm, InvalidArgumentError, refusal):
                call([first, into])
    assert (down(ops.all_reduce("SUM", value)) == comm.size).all()


@pytest.mark.ranks(3)
def test_calls_wait_for_writes_of_another_gpu(gpus, group, comm):
    """As of arrays that are made before the strategy; and their memory is used again before it has been read."""
    ops, other = BoundOps(NcclAllReduce(), group), comm.size
    require_gpus(other + 1)
    cupy, here = gpus.cupy, arrays.current_gpu()
    calls = (ops.all_reduce, lambda _, value: ops.broadcast(value, "all"))
    for call, is_contiguous in product(calls, (True, False)):
        with cupy.cuda.Device(other):
            value = cupy.zeros((400, 250))
            for _ in range(5):
                value += 1
        total = call("MAX", value if is_contiguous else value.T)
        del value
        with cupy.cuda.Device(other):
            used_again = cupy.full((400, 250), 77.0)
        assert total.device.id == here
        assert (down(total) == 5).all()
        assert (down(used_again) == 77).all()


CALLS = {
    "reduce": lambda strategy, value: strategy.reduce("SUM", value),
    "broadcast_to": lambda strategy, value: strategy.extended.broadcast_to(value, "all"),
    "gather": lambda strategy, value: strategy.gather(value, 0),
    "start_all_reduce": lambda strategy, value: strategy.run(
        lambda: get_replica_context().start_all_reduce("SUM", value).wait()
    ),
}


@pytest.mark.ranks(1, 3)
def test_another_current_device_is_refused(gpus, comm, monkeypatch):
    """As in a thread, which begins with GPU 0. CuPy's streams are of a device, and arrays of another cannot be read.

    In the first call of a strategy, after a call, and after a reset.
    """
    kind, value = RuntimeError if comm.size == 1 else InvalidArgumentError, up(np.ones(5))
    for call in CALLS.values():
        with MultiWorkerMirroredStrategy(comm=comm) as strategy:
            for turn in range(3):
                with monkeypatch.context() as patch:
                    if comm.rank == comm.size - 1:
                        patch.setattr(gpus.cupy.cuda.runtime, "getDevice", lambda: 6)
                    with raises_everywhere(comm, kind, "GPU 6 as the current device, and this strategy works on GPU"):
                        call(strategy, value)
                call(strategy, value)
                if turn == 1:
                    strategy.reset()


@pytest.mark.ranks(1, 3)
def test_calls_in_a_graph_capture_are_refused(gpus, comm):
    value = up(np.ones(5))
    for name, call in CALLS.items():
        with MultiWorkerMirroredStrategy(comm=comm) as strategy:
            call(strategy, value)
            with capturing(), raises_everywhere(comm, RuntimeError, f"^{name} cannot be captured in a CUDA graph"):
                call(strategy, value)
            call(strategy, value)


DEADLINE = 8.0  # seconds; long enough for ranks of a busy machine, and shorter than it takes to compile
FP16 = CommunicationOptions(compression="fp16", compress_everywhere=True)
MEAN = {"copy_4", "divide_f4_f4"}
LONG_TOO = MEAN | {kernel + "_long" for kernel in MEAN}
CALLS_WITH_KERNELS = {
    "first call": ("SUM", np.float32, CommunicationOptions(), {"copy_4"}),
    "mean": ("MEAN", np.float32, CommunicationOptions(), MEAN),
    "mean of many": ("MEAN", np.float32, CommunicationOptions(), LONG_TOO),
    "mean of integers": ("MEAN", np.int64, CommunicationOptions(), {"copy_4", "copy_8", "divide_f8_f8"}),
    "sum of halves": ("SUM", np.float16, CommunicationOptions(), {"copy_4", "copy_2", "f2_sum"}),
    "minimum": ("MIN", np.float64, CommunicationOptions(), {"copy_4", "copy_8", "f8_min"}),
    "compressed sum": ("SUM", np.float32, FP16, {"copy_4", "cast_f4_f2", "cast_f2_f4", "f2_sum"}),
    "reduce-scatter": ("SUM", np.float16, CommunicationOptions(), {"copy_4", "f2_sum"}),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", CALLS_WITH_KERNELS)
def test_deadline_excludes_compilation_of_kernels(compiler, group, comm, kind):
    """It is seconds, on the ranks of a node that has never done it: of the kernels that a call may need.

    No call compiles any later, when its deadline runs. The first one is so slow that this would be too late.

    Through the host that of a sum which messages might need is compiled, too.
    """
    op, dtype, options, kernels = CALLS_WITH_KERNELS[kind]
    options = options.merge(CommunicationOptions(timeout_seconds=DEADLINE if kind == "first call" else 600))
    sizes = (50, 7) * (100 if kind == "mean of many" else 1)
    ops, values = BoundOps(NcclAllReduce(), group), [up(np.ones(size, dtype)) for size in sizes]
    if kind != "first call":
        ops.all_reduce("SUM", up(np.ones(3, np.int32)))
        assert compiler.compiled == {"copy_4"}
    is_slow = comm.rank > 0 and kind == "first call"
    compiler.seconds = 1.25 * DEADLINE if is_slow else 0.0
    for _ in range(2):  # a rank that still compiles would be late for the second call
        if kind == "reduce-scatter":
            shard = reduce_scatter(group, op, up(np.ones(comm.size, dtype)), 0, options, None)
            assert (shard.size, int(down(shard)[0])) == (1, comm.size)
        else:
            results = ops.all_reduce(op, values, options)
            assert all((down(its) == (comm.size if op == "SUM" else 1)).all() for its in results)
    is_staged = group.devices.levels().queue is None
    assert compiler.compiled - kernels <= ({"f4_sum", "f8_sum"} if is_staged else set())
    assert kernels <= compiler.compiled
    assert compiler.late == set()


@pytest.mark.ranks(3)
def test_ranks_with_drivers_of_which_one_takes_fewer_arrays_at_once(emulated, compiler, group, comm):
    if comm.rank == 1:
        emulated.wish("the driver's version", 12_000)
    values = [up(np.full(3, at, np.float32)) for at in range(200)]
    results = BoundOps(NcclAllReduce(), group).all_reduce("MEAN", values)
    assert [down(its).tolist() for its in results] == [[at] * 3 for at in range(200)]
    assert ("copy_4_long" in compiler.compiled) == (comm.rank != 1)


@pytest.mark.ranks(3)
def test_kernels_that_one_rank_cannot_compile(compiler, group, comm):
    ops, value = BoundOps(NcclAllReduce(), group), up(np.ones(50))
    if comm.rank == 1:
        compiler.error = RuntimeError("libnvrtc.so: cannot open shared object file")
    with raises_everywhere(comm, UnavailableError, r"could not be compiled: rank 1: libnvrtc.*`pip install"):
        ops.all_reduce("SUM", value)
    compiler.error = None
    assert (down(ops.all_reduce("SUM", value)) == comm.size).all()
