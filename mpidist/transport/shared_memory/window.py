"""Memory that the ranks of a node share."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import secrets
import weakref
from typing import Any, Final, final

import numpy as np

from mpidist.errors import UnavailableError
from mpidist.transport.mpi import Intracomm

__all__ = ["LINE_BYTES", "SharedWindow"]

LINE_BYTES: Final = 128  # two cache lines: processors fetch them in pairs, and ranks must not write into one
_DIRECTORY: Final = "/dev/shm"
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


@final
class _Mapping:
    """A file as memory, for as long as an array refers to it.

    Python's own `mmap` keeps the file open (before 3.13 always), and a process may have only so many open files.
    """

    def __init__(self, file: int, nbytes: int) -> None:
        address = _libc().mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        weakref.finalize(self, _libc().munmap, address, nbytes).atexit = False  # others may run after us at exit


@final
class SharedWindow:
    """A piece of memory per rank of a node, which all of them reach. Making it is collective.

    The memory is a nameless file of the node's memory file system, and there is at least as long as an array that
    lies in it. MPI's own shared windows would be gone when they are freed, under whoever still reads them; and where
    there is too little memory they may kill the process, instead of saying so.

    Args:
        comm: The ranks of the node; `None` for a node of this rank alone, which needs no MPI.
        nbytes: How much each rank gets, in bytes; of one number on all ranks. Zeros at first.

    Attributes:
        parts: [ranks], each rank's memory as bytes, on page boundaries.

    Raises:
        UnavailableError: If there is too little shared memory, on every rank of the node.
    """

    def __init__(self, comm: Intracomm | None, nbytes: int) -> None:
        self._own: Any = None
        if comm is None:
            self.parts = [np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)]
            return
        rank, size = comm.Get_rank(), comm.Get_size()
        step = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        path = comm.bcast(f"{_DIRECTORY}/mpidist-{secrets.token_hex(8)}", 0)
        file, problem = -1, None
        try:
            if rank == 0:
                file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
                os.ftruncate(file, step * size)
        except OSError as error:
            problem = f"{_DIRECTORY} cannot be used: {error.strerror}"
        comm.Barrier()
        memory: Any = None
        try:
            if rank != 0:
                file = os.open(path, os.O_RDWR)
            if file >= 0:
                os.posix_fallocate(file, step * rank, step)  # by its owner, so that it lies near the owner's core
                memory = _Mapping(file, step * size)
        except OSError as error:
            problem = f"{step * size >> 10} KiB cannot be had in {_DIRECTORY} ({error.strerror})"
        problems = [text for text in comm.allgather(problem) if text is not None]
        if file >= 0:
            os.close(file)
            if rank == 0:
                os.unlink(path)
        if problems:
            raise UnavailableError(f"{problems[0]}; give containers more of it, docker run --shm-size=1g")
        whole = np.asarray(memory)
        self._own = whole[step * rank : step * (rank + 1)]
        self.parts = [whole[step * owner : step * owner + nbytes] for owner in range(size)]

    def discard(self) -> None:
        """Give back the memory of this rank's part but for its first page, whoever still refers to it. Local.

        What is read there afterwards is 0.
        """
        rest = None if self._own is None else self._own[mmap.PAGESIZE :]
        if rest is not None and rest.size:
            address, nbytes = rest.__array_interface__["data"][0], rest.nbytes
            _libc().madvise(address, nbytes, mmap.MADV_REMOVE)
