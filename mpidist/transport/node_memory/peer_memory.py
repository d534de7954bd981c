"""Memory of the other ranks of a node that no rank has shared: the system copies out of it, once, where it is asked to.

Linux does so for a process of the same user (`process_vm_readv`), where neither Yama, nor a container, nor a namespace
forbids it. Ranks ask once, when their group is made, and never change what the system permits.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import Sequence
from functools import cache
from typing import Any, final

import numpy as np

from mpidist.transport.communicator import Array
from mpidist.transport.mpi import Intracomm

__all__ = ["PeerMemory"]


@final
class _Range(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


@cache
def _process_vm_readv() -> Any:
    """Return the function of the C library; `None` where there is none."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if function is not None:
        function.restype = ctypes.c_ssize_t
        pointer = ctypes.POINTER(_Range)
        function.argtypes = [ctypes.c_int, pointer, ctypes.c_ulong, pointer, ctypes.c_ulong, ctypes.c_ulong]
    return function


@final
class PeerMemory:
    """The memory of the processes of a node. `open` makes it. For one thread at a time.

    Args:
        processes: [ranks], the number of each rank's process.
    """

    def __init__(self, processes: Sequence[int]) -> None:
        self._processes = processes
        self._read = _process_vm_readv()
        self._from, self._to = _Range(), _Range()
        self._scratch = np.empty(0, np.uint8)

    @classmethod
    def open(cls, comm: Intracomm) -> PeerMemory | None:
        """Find out whether all ranks of a node may copy out of each other's memory. Collective over the node.

        Returns:
            Their memory; `None` on all ranks if one of them may not.
        """
        token = np.frombuffer(secrets.token_bytes(16), np.uint8)
        processes, addresses, tokens = zip(*comm.allgather((os.getpid(), _address(token), bytes(token))), strict=True)
        memory = cls(processes)
        can_read = memory._read is not None and all(
            memory._has(rank, address, expected)
            for rank, (address, expected) in enumerate(zip(addresses, tokens, strict=True))
        )
        return memory if all(comm.allgather(can_read)) else None  # until then nobody's token may go

    def _has(self, rank: int, address: int, token: bytes) -> bool:
        """Whether a token lies at an address of a rank: not so where the number is another process's over there."""
        found = np.zeros(len(token), np.uint8)
        try:
            return self.copy(rank, address, found) and bytes(found) == token
        except OSError:
            return False

    def own_address(self, array: Array) -> int:
        """Return where a contiguous array of this rank begins; 0 if the system cannot copy out of it.

        It cannot where memory is no ordinary memory, as that of some devices.
        """
        address, sample = _address(array), np.empty(1, np.uint8)
        last = address + max(array.nbytes - 1, 0)
        try:
            can_read = all(self._copy(os.getpid(), at, sample) for at in (address, last))
        except OSError:
            return 0
        return address if can_read else 0

    def scratch(self, num_arrays: int, count: int, dtype: np.dtype[Any]) -> list[Array]:
        """Lend arrays of `count` numbers each, until the next call."""
        nbytes = num_arrays * count * dtype.itemsize
        if self._scratch.nbytes < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return list(self._scratch[:nbytes].view(dtype).reshape(num_arrays, count))

    def copy(self, rank: int, address: int, into: Array) -> bool:
        """Copy from the memory of another rank into a contiguous array. Local.

        Args:
            rank: The rank on the node.
            address: Where the bytes begin in the memory of that rank's process.
            into: Takes the bytes.

        Returns:
            Whether that was done; not so if the process is gone, or what lay there.

        Raises:
            OSError: If the system does not permit it.
        """
        return self._copy(self._processes[rank], address, into)

    def _copy(self, process: int, address: int, into: Array) -> bool:
        begin, left = _address(into), into.nbytes
        while left:
            self._from.address, self._to.address = address, begin
            self._from.nbytes = self._to.nbytes = left
            copied = self._read(process, self._to, 1, self._from, 1, 0)
            if copied <= 0:
                code = ctypes.get_errno()
                if copied == 0 or code in (errno.ESRCH, errno.EFAULT):
                    return False
                raise OSError(code, f"the memory of process {process} cannot be read: {os.strerror(code)}")
            address, begin, left = address + copied, begin + copied, left - copied
        return True


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
