"""The proof that MPI takes device memory, in a process of its own: MPI that does not may crash it.

    python -m mpidist.transport.device_over_mpi.cuda_aware_child DEVICE

It sends arrays of device memory to itself, and prints "right" or "wrong".
"""

from __future__ import annotations

import sys
from typing import Any, Final

from mpidist.transport import cuda
from mpidist.transport.mpi import load_mpi

__all__ = ["RIGHT", "is_right"]

RIGHT: Final = "right"
_SIZES: Final = (8, 100_000, 4 << 20)  # bytes: libraries send them in different ways


def is_right(cupy: Any) -> bool:
    """Send arrays to this rank itself, and compare."""
    mpi = load_mpi()
    comm, view = mpi.COMM_SELF, mpi.buffer.fromaddress
    for nbytes in _SIZES:
        sent = cupy.arange(nbytes, dtype=cupy.uint8)
        received = cupy.zeros(nbytes, dtype=cupy.uint8)
        cupy.cuda.get_current_stream().synchronize()
        into = comm.Irecv([view(int(received.data.ptr), nbytes), mpi.BYTE], 0)
        comm.Isend([view(int(sent.data.ptr), nbytes), mpi.BYTE], 0).Wait()
        into.Wait()
        if not bool((sent == received).all()):
            return False
    return True


if __name__ == "__main__":
    its_cupy = cuda.current().cupy
    its_cupy.cuda.Device(int(sys.argv[1])).use()
    print(RIGHT if is_right(its_cupy) else "wrong", flush=True)
