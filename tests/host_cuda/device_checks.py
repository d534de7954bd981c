"""What every communicator of device memory must do, whoever carries it."""

import numpy as np
from support.contributions import DTYPES, contribution, reduction_of
from transport.communicator_checks import A_FEW, CheckedMemory, checks_of

from host_cuda.gpus import down, up
from mpidist.transport import cuda
from mpidist.transport.reduction import Reduction

__all__ = ["CHECKS", "CHUNK"]

CHUNK = 192  # bytes, of those whose messages are cut; the parts of 1 to 4 ranks are whole numbers
DEVICE = CheckedMemory(up, down, [dtype for dtype in DTYPES if dtype.char not in "gG"], A_FEW, CHUNK)


def check_streams(its):
    """Work follows the current stream, after a kernel and after a copy: nothing of the caller's waits but events."""
    cupy, size = cuda.current().cupy, 4 * CHUNK
    runtime, memory = cupy.cuda.runtime, cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(4 * size), 0)
    pinned = np.ndarray(size, np.float32, buffer=memory)
    pinned[:] = contribution("sum", its.rank, size, pinned.dtype)
    expected = reduction_of("sum", its.size, size, pinned.dtype)
    for stream in [cupy.cuda.Stream(non_blocking=True), cupy.cuda.get_current_stream()] * 3:
        with stream:
            buffer = cupy.empty(size, np.float32)
            buffer[...] = 1
            its.all_reduce(buffer, Reduction())
            buffer /= 2
            assert (down(buffer) == its.size / 2).all()
            address = int(buffer.data.ptr)
            runtime.memcpyAsync(address, pinned.ctypes.data, pinned.nbytes, runtime.memcpyHostToDevice, stream.ptr)
            its.all_reduce(buffer, Reduction())
            assert (down(buffer) == expected).all()
            del buffer


CHECKS = checks_of(DEVICE) | {"streams": check_streams}
