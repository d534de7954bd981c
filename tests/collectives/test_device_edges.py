"""Where the parts for GPUs meet each other, and what other libraries and odd arrays bring to them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from standin import kernels as standin_kernels
from standin.gpus import down, group, up
from standin.late import standin
from standin.nccl import Stream
from standin.overlap import LateStandIn
from support.everywhere import raises_everywhere

from mpidist import MultiWorkerMirroredStrategy, get_replica_context
from mpidist.cross_device_ops import HierarchicalCopyAllReduce, NcclAllReduce
from mpidist.errors import InvalidArgumentError, UnavailableError
from mpidist.options import CommunicationOptions
from mpidist.transport import arrays
from mpidist.transport.group import SyncGroup

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["group", "standin"]  # fixtures


class Tensor:
    """Of a library with a stream of its own, on which it writes its numbers."""

    def __init__(self, standin: LateStandIn, array: Any, stream: Stream | None = None) -> None:
        self.standin, self.array, self.stream = standin, array, stream

    @classmethod
    def of(cls, standin: LateStandIn, numbers: Any) -> Tensor:
        stream = Stream(standin, non_blocking=True)
        with standin.stream(stream):
            return cls(standin, up(numbers), stream)

    __cuda_array_interface__ = property(lambda self: {"version": 2})

    def __dlpack__(self, stream: int) -> Any:
        event = self.standin.module.cuda.Event(disable_timing=True)
        event.record(self.stream)
        self.standin.streams[stream].wait_event(event)
        return self.array

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=lambda array: Tensor(self.standin, array))


def test_a_library_with_its_own_stream_is_waited_for(standin: LateStandIn, group: SyncGroup, comm: Intracomm) -> None:
    """As PyTorch's arrays in `with torch.cuda.stream(...)`, of which the interface of CUDA arrays tells nothing."""
    ops = NcclAllReduce().bound_to(group)
    for _ in range(2):
        value = Tensor.of(standin, np.full(50, comm.rank + 1.0))
        result = ops.all_reduce("SUM", value)
        assert (down(result.array) == comm.size * (comm.size + 1) / 2).all()
        handle = ops.start_all_reduce("SUM", Tensor.of(standin, np.ones(3000)))
        assert (down(handle.wait().array) == comm.size).all()


def test_what_was_waited_for_can_be_used_in_any_stream(standin: LateStandIn, group: SyncGroup, comm: Intracomm) -> None:
    ops = HierarchicalCopyAllReduce().bound_to(group)
    for _ in range(2):
        handle = ops.start_all_reduce("MEAN", [up(np.ones(count)) for count in (5, 700)])
        results = handle.wait()
        with standin.stream(Stream(standin, non_blocking=True)):
            assert all((down(result) == 1).all() for result in results)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("starts", [False, True])
def test_an_overflow_into_outs_is_logged_at_once(
    group: SyncGroup, comm: Intracomm, starts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ops = NcclAllReduce().bound_to(group)
    options = CommunicationOptions(compression="fp16", compress_everywhere=True)
    value, out = up(np.full(9, 1e6, np.float32)), up(np.zeros(9, np.float32))
    with caplog.at_level(logging.WARNING, "mpidist.cross_device_ops"):
        if starts:
            ops.start_all_reduce("SUM", value, options, out=out).wait()
        else:
            ops.all_reduce("SUM", value, options, out=out)
    assert "9 numbers were too large for float16" in caplog.text


@pytest.mark.ranks(min=2)
def test_another_byte_order_on_one_gpu_is_everybodys_error(group: SyncGroup, comm: Intracomm) -> None:
    value = up(np.ones(5, ">f4" if comm.rank else "=f4"))
    with raises_everywhere(comm, InvalidArgumentError, "native byte order, got '>f4'"):
        NcclAllReduce().bound_to(group).all_reduce("SUM", value)


def shifted(standin: LateStandIn, numbers: Any) -> Any:
    """Complex numbers that begin in the middle of one."""
    array = up(np.zeros(2 * numbers.size + 2, numbers.real.dtype))[1:-1].view(numbers.dtype)
    array[...] = up(numbers)
    assert array.data.ptr % array.itemsize
    return array


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_numbers_in_any_place(standin: LateStandIn, group: SyncGroup, comm: Intracomm, dtype: Any) -> None:
    """No GPU reads 16 bytes from an address that is no multiple of 16: it gives up, and the process with it."""
    for op in ("SUM", "MEAN"):
        for ops in (NcclAllReduce(0).bound_to(group), HierarchicalCopyAllReduce().bound_to(group)):
            numbers = [np.full(count, 2 + 1j, dtype) for count in (3, 600)]
            values, outs = [shifted(standin, its) for its in numbers], [shifted(standin, 0 * its) for its in numbers]
            factor = comm.size if op == "SUM" else 1
            for results in (ops.all_reduce(op, values), ops.all_reduce(op, values, out=outs), outs):
                assert all((down(result) == factor * (2 + 1j)).all() for result in results)
            assert all((down(its) == 2 + 1j).all() for its in values)
            assert all((down(its) == factor * (2 + 1j)).all() for its in ops.all_reduce(op, values, out=values))


@contextmanager
def on_gpu(standin: LateStandIn, index: int) -> Iterator[None]:
    """Make another GPU the current one, and wait for what is made there."""
    before = standin.device
    standin.module.cuda.Device(index).use()
    yield
    arrays.wait_for_stream()
    standin.module.cuda.Device(before).use()


@pytest.mark.parametrize("is_value", [True, False], ids=["the value", "another array"])
def test_results_go_to_no_other_gpu(standin: LateStandIn, group: SyncGroup, comm: Intracomm, is_value: bool) -> None:
    """Kernels that wrote there would lose CUDA's context. Values from there are copied."""
    ops, other = NcclAllReduce().bound_to(group), comm.size
    value, out = up(np.ones(5)), up(np.zeros(5))
    if comm.rank == 0:
        with on_gpu(standin, other):
            value, out = up(np.ones(5)), up(np.zeros(5))
    with raises_everywhere(comm, InvalidArgumentError, f"out 0 must lie on GPU 0, .* lies on GPU {other}: make it"):
        ops.all_reduce("SUM", value, out=value if is_value else out)
    assert (down(ops.all_reduce("SUM", value)) == comm.size).all()


CALLS = {
    "all_reduce": lambda strategy, value: strategy.reduce("SUM", value),
    "broadcast": lambda strategy, value: strategy.extended.broadcast_to(value, "all"),
    "gather": lambda strategy, value: strategy.gather(value, 0),
}


@pytest.mark.parametrize("before", ["nothing", "a call", "a reset"])
@pytest.mark.parametrize("call", CALLS)
def test_another_current_device_is_everybodys_error(
    standin: LateStandIn, comm: Intracomm, call: str, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a thread, which begins with GPU 0. CuPy's streams are of a device, and arrays of another cannot be read."""
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        make, value = CALLS[call], up(np.ones(5))
        if before != "nothing":
            make(strategy, value)
        if before == "a reset":
            strategy.reset()
        with monkeypatch.context() as patch:
            if comm.rank == comm.size - 1:
                patch.setattr(standin.module.cuda.runtime, "getDevice", lambda: 6)
            kind = RuntimeError if comm.size == 1 else InvalidArgumentError
            with raises_everywhere(comm, kind, "GPU 6 as the current device, and this strategy works on GPU"):
                make(strategy, value)
        make(strategy, value)


@pytest.mark.parametrize("call", CALLS)
def test_no_call_goes_into_a_graph(standin: LateStandIn, comm: Intracomm, call: str) -> None:
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        value = up(np.ones(5))
        CALLS[call](strategy, value)
        standin.captured.add(standin.current.ptr)
        with raises_everywhere(comm, RuntimeError, "cannot be captured in a CUDA graph"):
            CALLS[call](strategy, value)
        standin.captured.clear()


@pytest.mark.ranks(min=2)
def test_the_time_that_kernels_take_to_compile_is_no_deadlines(
    standin: LateStandIn, group: SyncGroup, comm: Intracomm
) -> None:
    """It is seconds, on the ranks of a node that has never done it."""
    standin.compiling = 1.5 if comm.rank else 0.0
    options = CommunicationOptions(timeout_seconds=1.0)
    ops = NcclAllReduce().bound_to(group)
    assert (down(ops.all_reduce("SUM", up(np.ones(50)), options)) == comm.size).all()


FP16 = CommunicationOptions(compression="fp16", compress_everywhere=True)
CALLS_WITH_KERNELS: dict[str, tuple[str, Any, CommunicationOptions, set[str]]] = {
    "mean": ("MEAN", np.float32, CommunicationOptions(), {"copy", "divide_f4"}),
    "sum of halves": ("SUM", np.float16, CommunicationOptions(), {"copy", "f2_f2"}),
    "minimum": ("MIN", np.float64, CommunicationOptions(), {"copy", "f8_f8"}),
    "compressed sum": ("SUM", np.float32, FP16, {"copy", "cast", "f2_f2"}),
}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("kind", CALLS_WITH_KERNELS)
def test_nor_is_the_time_that_the_kernels_of_later_calls_take(
    standin: LateStandIn, group: SyncGroup, comm: Intracomm, kind: str
) -> None:
    """Of those that it may need, and through the host that of a sum which messages might need."""
    op, dtype, options, kernels = CALLS_WITH_KERNELS[kind]
    options = options.merge(CommunicationOptions(timeout_seconds=1.0))
    ops, values = NcclAllReduce().bound_to(group), [up(np.ones(size, dtype)) for size in (50, 7)]
    ops.all_reduce("SUM", up(np.ones(3, np.int32)))
    assert standin.compiled == {"copy"}
    standin.compiling = 1.5 if comm.rank else 0.0
    results = ops.all_reduce(op, values, options)
    assert all((down(its) == (comm.size if op == "SUM" else 1)).all() for its in results)
    is_staged = group.devices.levels().queue is None
    assert standin.compiled - kernels <= ({"f4_f4"} if is_staged else set())
    assert kernels <= standin.compiled


@pytest.mark.ranks(min=2)
def test_nor_is_that_of_a_reduce_scatter(standin: LateStandIn, comm: Intracomm) -> None:
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        value = up(np.ones(comm.size, np.float16))
        strategy.gather(value, 0)
        standin.compiling = 1.5 if comm.rank else 0.0
        options = CommunicationOptions(timeout_seconds=1.0)
        for _ in range(2):  # a rank that still compiles would be late for the second call
            part = strategy.run(lambda: get_replica_context().reduce_scatter("SUM", value, 0, options))
            assert down(part) == comm.size
    assert standin.compiled == {"copy", "f2_f2"}


@pytest.mark.ranks(min=2)
def test_kernels_that_one_rank_cannot_compile(
    standin: LateStandIn, group: SyncGroup, comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, name: str) -> None:
        raise RuntimeError("libnvrtc.so: cannot open shared object file")

    ops, value = NcclAllReduce().bound_to(group), up(np.ones(50))
    with monkeypatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(standin_kernels.Module, "get_function", fail)
        with raises_everywhere(comm, UnavailableError, r"could not be compiled: rank 1: libnvrtc.*`pip install"):
            ops.all_reduce("SUM", value)
    assert (down(ops.all_reduce("SUM", value)) == comm.size).all()


KINDS = [
    CommunicationOptions(),
    CommunicationOptions(implementation="NCCL"),
    CommunicationOptions(implementation="RING"),
    CommunicationOptions(compression="bf16", compress_everywhere=True),
    CommunicationOptions(compression="fp16", implementation="NCCL"),
    CommunicationOptions(reproducible=True, bytes_per_pack=900),
]


@pytest.mark.parametrize("seed", range(2))
def test_started_calls_of_all_kinds_in_any_order(
    standin: LateStandIn, comm: Intracomm, placement: tuple[int, ...], seed: int
) -> None:
    """Launched, staged, round the ring; alone, mixed with host arrays, into outs; waited for in another order."""

    def is_right(array: Any) -> bool:
        return bool(((array if isinstance(array, np.ndarray) else down(array)) == 2 * comm.size).all())

    random, group = np.random.default_rng(seed), SyncGroup.from_mpi(comm)
    standin.delay = 5
    ops = [make().bound_to(group) for make in (NcclAllReduce, HierarchicalCopyAllReduce)]
    for _ in range(3):
        handles = []
        for _ in range(6):
            options, its = KINDS[random.integers(len(KINDS))], ops[random.integers(2)]
            values = [
                up(np.full(int(random.integers(1, 400)), 2, dtype)) for dtype in (np.float32, np.int16, np.float16)
            ]
            # The stand-in's GPU works when its host asks: not while that waits for messages, as those of host arrays.
            if random.random() < 0.3 and len(set(placement)) == 1:
                values.append(np.full(70, 2.0))
            out = values if random.random() < 0.5 else None
            if random.random() < 0.2:
                assert all(map(is_right, its.all_reduce("SUM", values, options, out=out)))
            else:
                handles.append(its.start_all_reduce("SUM", values, options, out=out))
        for at in random.permutation(len(handles)):
            assert all(map(is_right, handles[at].wait()))
    group.close()
