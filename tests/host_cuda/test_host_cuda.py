"""The emulated CUDA: it does what kernels ask for, late, and does not forgive what a GPU would not."""

import threading
import time

import numpy as np
import pytest

from host_cuda.emulated import memory_is_given_back_late, problems
from host_cuda.gpus import busy, emulated, gpus, only_emulated
from mpidist.transport import cuda

__all__ = ["emulated", "gpus", "only_emulated"]

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(1)]

MADE_BY_A_MACRO = """
#define ADDER(NUMBER) \\
    extern "C" __global__ void __launch_bounds__(64) add_##NUMBER(long long* at) { at[threadIdx.x] += NUMBER; }
ADDER(3) ADDER(5)
"""
REVERSING = """
extern "C" __global__ void reverse(long long* at) {
    __shared__ long long held[32];
    held[threadIdx.x] = at[threadIdx.x];
    __syncthreads();
    at[threadIdx.x] = held[blockDim.x - 1 - threadIdx.x];
}
"""
TAKING = 'struct Many {{ char of[{}]; }}; extern "C" __global__ void take_{}(const Many many) {{}}'


@pytest.fixture
def cupy(only_emulated):
    return cuda.current().cupy


def test_kernels_are_found_that_a_macro_makes(cupy):
    module, array = cupy.RawModule(code=MADE_BY_A_MACRO), cupy.zeros(4, np.int64)
    for name in ("add_3", "add_5"):
        module.get_function(name)((1,), (4,), (array,))
    assert array.get().tolist() == [8, 8, 8, 8]


def test_threads_of_a_block_wait_for_each_other(cupy):
    array = cupy.arange(32)
    cupy.RawKernel(REVERSING, "reverse")((1,), (32,), (array,))
    assert array.get().tolist() == [*range(31, -1, -1)]


def test_streams_do_not_wait_for_each_other_without_an_event(cupy):
    array, (first, second) = cupy.zeros(1), (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    cupy.cuda.Device().synchronize()
    with first, busy():
        array += 1
        with second:
            assert array.get() == 0
        changed = first.record()
    with second:
        second.wait_event(changed)
        assert array.get() == 1
    assert "a race" in problems()


def test_copy_of_the_wrong_kind_is_a_problem(cupy):
    array, runtime = cupy.zeros(4), cupy.cuda.runtime
    with pytest.raises(runtime.CUDARuntimeError):
        runtime.memcpyAsync(array.data.ptr, array.data.ptr, 8, runtime.memcpyHostToDevice, 0)
    assert "a copy's kind is not that of its memory" in problems()
    assert problems() == ""


def test_kernel_of_another_device_is_a_problem(cupy):
    with cupy.cuda.Device(1):
        stream = cupy.cuda.Stream(non_blocking=True)
    array = cupy.zeros(4, np.int64)
    function = cupy.RawModule(code=MADE_BY_A_MACRO).get_function("add_3")
    with pytest.raises(cupy.cuda.driver.CUDADriverError):
        function((1,), (4,), (array,), stream=stream)
    assert "a kernel is launched on another device than its own" in problems()


@pytest.mark.parametrize(
    ("nbytes", "old", "refusal"),
    [
        (4096, "the driver's version", None),
        (4097, "the driver's version", "CUDADriverError"),
        (4096, "NVRTC's version", None),
        (4097, "NVRTC's version", "CompileException"),
        (32_764, "", None),
        (32_765, "", "CompileException"),
    ],
)
def test_kernel_takes_as_many_parameters_as_its_compiler_and_driver(cupy, emulated, nbytes, old, refusal):
    """4,096 bytes before CUDA 12.1, which is driver 530, and 32,764 since."""
    emulated.wish(old, 12_000)
    name = f"{nbytes}_{''.join(filter(str.isalpha, old))}"
    kernel = cupy.RawKernel(TAKING.format(nbytes, name), f"take_{name}")
    many = np.zeros(1, np.dtype((np.void, nbytes)))
    if refusal is None:
        kernel((1,), (1,), (many,))
        return
    with pytest.raises(Exception) as raised:
        kernel((1,), (1,), (many,))
    assert raised.typename == refusal
    assert ("more parameters than the driver takes" in problems()) == (refusal == "CUDADriverError")


def test_streams_that_use_the_same_memory_at_once_are_a_problem(cupy):
    """Also where it goes well, as the host waits between; reading is no problem."""
    array, streams = cupy.zeros(1000), [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.Device().synchronize()
    for is_ordered in (True, False):
        with streams[0]:
            array += 1
            event = streams[0].record(cupy.cuda.Event())
        time.sleep(0.1)
        if is_ordered:
            streams[1].wait_event(event)
        with streams[1]:
            array.copy()
            event = streams[1].record(cupy.cuda.Event())
        streams[0].wait_event(event)
        assert ("a race" in problems()) == (not is_ordered)


def test_memory_that_is_freed_too_early_is_a_problem(cupy):
    stream = cupy.cuda.Stream(non_blocking=True)
    for waits in (True, False):
        with memory_is_given_back_late():
            array = cupy.zeros(1000)
            stream.wait_event(cupy.cuda.get_current_stream().record(cupy.cuda.Event()))
            with stream:
                array += 1
            if waits:
                stream.synchronize()
            del array
        assert ("a race" in problems()) == (not waits)


def test_memory_that_another_thread_frees_is_not_mistaken_for_its_next(cupy):
    """Which has the identity of the object that is gone, on another stream."""
    stream, arrays = cupy.cuda.Stream(non_blocking=True), []

    def free_and_allocate():
        arrays.clear()
        with stream:
            arrays.append(cupy.zeros(5000))

    with memory_is_given_back_late():
        for _ in range(20):
            arrays.append(cupy.zeros(1000))
            cupy.cuda.get_current_stream().synchronize()
            thread = threading.Thread(target=free_and_allocate)
            thread.start()
            thread.join()
            arrays.clear()
    assert problems() == ""


def test_kernel_with_memory_of_another_device_is_a_problem(cupy):
    with cupy.cuda.Device(1):
        array = cupy.zeros(4, np.int64)
        cupy.cuda.Device().synchronize()
    cupy.RawModule(code=MADE_BY_A_MACRO).get_function("add_3")((1,), (4,), (array,))
    assert "a kernel uses memory of another device" in problems()


def test_nccl_takes_no_memory_of_another_device(cupy):
    nccl = cuda.current().nccl
    communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    with cupy.cuda.Device(1):
        at = cupy.zeros(4, np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    communicator.allReduce(at.data.ptr, at.data.ptr, 4, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)
    stream.synchronize()
    communicator.destroy()
    assert "NCCL gets memory or a stream that is not its device's" in problems()


@pytest.mark.parametrize("may_share", ["0", "1"])
def test_communicators_of_one_gpu_need_the_variable_of_nccl(cupy, monkeypatch, may_share):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", may_share)
    nccl = cuda.current().nccl
    unique_id = nccl.get_unique_id()
    nccl.groupStart()
    made = [nccl.NcclCommunicator(2, unique_id, rank) for rank in range(2)]
    if may_share == "0":
        with pytest.raises(nccl.NcclError):
            nccl.groupEnd()
    else:
        nccl.groupEnd()
    nccl.groupStart()
    for communicator in made:
        communicator.destroy()
    nccl.groupEnd()
