"""The proof that MPI takes device memory, in a process of its own: an MPI that does not may crash the process.

    python -m mpidist.cli.cuda_aware_child DEVICE

It sends arrays of device memory to itself, and prints "right" or "wrong".
"""

from __future__ import annotations

import sys
from typing import Final

from mpidist.transport import cuda, takes_device_memory

__all__ = ["RIGHT"]

RIGHT: Final = "right"


if __name__ == "__main__":
    cupy = cuda.current().cupy
    cupy.cuda.Device(int(sys.argv[1])).use()
    print(RIGHT if takes_device_memory(cupy) else "wrong", flush=True)
