"""Windows: shared memory of the ranks of a node."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import secrets
import sys
import weakref
from typing import Any, Final, final

import numpy as np

from mpidist.errors import UnavailableError
from mpidist.transport.mpi.library import Intracomm, greatest
from mpidist.transport.text import size_text

__all__ = [
    "LINE_BYTES",
    "PrivateCopy",
    "SharedWindow",
    "discard",
    "file_system_bytes",
    "map_file",
    "part_stride",
    "whole_pages",
]

LINE_BYTES: Final = 128  # two cache lines, as processors fetch them in pairs: two ranks should not write into one pair
_STRIDE_UNIT: Final = 2 << 20
_DIRECTORY: Final = "/dev/shm"
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mremap.restype = ctypes.c_void_p
    libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    return libc


@final
class _Mapping:
    """A file mapped into memory, until the last array that refers to the mapping is gone.

    Python's own `mmap` keeps the file open (before 3.13 always), and the number of open files of a process is limited.
    """

    def __init__(self, file: int, nbytes: int) -> None:
        address = _libc().mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        weakref.finalize(
            self, _libc().munmap, address, nbytes
        ).atexit = False  # code that runs later at exit may use arrays


def map_file(comm: Intracomm, nbytes: int, start: int, taken: int, needed: int = 0) -> tuple[int, Any]:
    """Map a nameless file of the node's memory file system into every rank of a node, and return both. Collective.

    It has `nbytes` on all ranks, zeros at first, of which this rank reserves memory for `taken` from `start` on. An
    error, on every rank if there is too little, names the bytes `needed`, by default those.
    """
    file, problem, memory = _open_nameless(comm, nbytes), None, None
    try:
        if taken:
            os.posix_fallocate(file, start, taken)
        memory = _Mapping(file, nbytes)
    except OSError as error:
        problem = (
            f"{size_text(needed or taken or nbytes)} cannot be had in {_DIRECTORY} ({error.strerror}); ask for less, "
            "or give containers more of it, docker run --shm-size=1g"
        )
    _require_no_problem(comm, problem, file)
    return file, np.asarray(memory)


def _open_nameless(comm: Intracomm, nbytes: int) -> int:
    """Open one new file on all ranks of a node. Collective over the node.

    A job that is killed leaves no file behind: the file has a name only for the moment in which all ranks open it. They
    come here together, from a collective call.
    """
    path, file, problem = f"{_DIRECTORY}/mpidist-{secrets.token_hex(8)}", -1, None
    is_first = comm.Get_rank() == 0
    try:
        if is_first:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            os.ftruncate(file, nbytes)
    except OSError as error:
        problem = f"{_DIRECTORY} cannot be used ({error.strerror}); mount a file system of type tmpfs there"
    path = comm.bcast(path)
    try:
        if not is_first:
            file = os.open(path, os.O_RDWR)
    except OSError as error:
        why = f"ranks of one node do not share {_DIRECTORY} ({error.strerror})"
        problem = f"{why}; let containers share it, docker run --ipc=host"
    try:
        _require_no_problem(comm, problem, file)
    finally:
        if is_first and file >= 0:
            os.unlink(path)
    return file


def _require_no_problem(comm: Intracomm, problem: str | None, file: int) -> None:
    """Close a file and raise, if a rank of the node has a problem. Collective over the node."""
    if not greatest(comm, problem is not None):
        return
    if file >= 0:
        os.close(file)
    raise UnavailableError(next(text for text in comm.allgather(problem) if text is not None))


def whole_pages(nbytes: int) -> int:
    """Return a number of bytes, rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def part_stride(nbytes: int) -> int:
    """Return how far the part of a rank begins behind the part of the rank before, where each has `nbytes`.

    From 2 MiB on, that is an odd multiple of 2 MiB. Processors of AMD (Zen) find a line in their first cache by a hash
    of bits 12 to 27 of its address, in which each of the upper eight bits is combined with one of the lower eight. If
    the hashes of two lines are equal, a core that writes both in turn takes four times as long. That happens to the
    parts of two ranks always if they are a multiple of 256 MiB apart, and often if they are 128 MiB and a page apart.
    Here only the upper bits differ, so the hashes differ, too (M. Lipp et al., Take A Way: Exploring the Security
    Implications of AMD's Cache Way Predictors, 2020).
    """
    if nbytes < _STRIDE_UNIT:
        return whole_pages(max(nbytes, 1))
    return (-(-nbytes // _STRIDE_UNIT) | 1) * _STRIDE_UNIT


@final
class SharedWindow:
    """Memory that all ranks of a node read and write, with a part for each rank. Making it is collective.

    The memory is a nameless file of the node's memory file system, and exists at least as long as any array in it. An
    MPI window does not: freeing it unmaps the memory from ranks that still read it. And if memory is too short, MPI may
    kill the process instead of returning an error; here every rank of the node raises.

    Args:
        comm: The ranks of the node; `None` for a node of this rank alone, which needs no MPI.
        nbytes: The size of each rank's part in bytes, the same on all ranks. Parts are zero at first.
        is_common: Whether there is one part for all ranks, instead of one for each rank.

    Attributes:
        parts: [ranks], each rank's part as bytes, on page boundaries; only one if `is_common`.
    """

    def __init__(self, comm: Intracomm | None, nbytes: int, is_common: bool = False) -> None:
        self._own: Any = None
        if comm is None:
            self.parts = [_own_memory(nbytes)]
            return
        rank, size, stride = comm.Get_rank(), comm.Get_size(), part_stride(nbytes)
        # Each rank reserves its own part, or its share of a common one, so that this memory is near the rank's core.
        owners, shares = (1, size) if is_common else (size, 1)
        bounds = [whole_pages(max(nbytes, 1) * share // shares) for share in range(shares + 1)]
        begin, share = divmod(rank, shares)
        own = slice(stride * begin + bounds[share], stride * begin + bounds[share + 1])
        file, whole = map_file(comm, stride * owners, own.start, own.stop - own.start, bounds[-1])
        os.close(file)
        self._own = whole[own]
        self.parts = [whole[stride * owner : stride * owner + nbytes] for owner in range(owners)]

    def discard(self) -> None:
        """Give back the memory of this rank's part except the first page, even if arrays refer to it. Local.

        Reads of that memory return 0 from then on.
        """
        rest = None if self._own is None else self._own[mmap.PAGESIZE :]
        if rest is not None and rest.size:
            discard(rest)


def _own_memory(nbytes: int) -> Any:
    """Return memory of this rank alone, zeros; raise if there is too little."""
    try:
        return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)
    except (OSError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) else "more than a process can address"
        raise UnavailableError(
            f"{size_text(nbytes)} of memory cannot be had ({why}); ask for less, or give the rank more (ulimit -v, the "
            "limits of the container or of the batch job)"
        ) from error


def discard(memory: Any) -> None:
    """Give back the memory of whole pages of a file, even if arrays refer to them, which read 0 from then on. Local."""
    _libc().madvise(memory.__array_interface__["data"][0], memory.nbytes, mmap.MADV_REMOVE)


@final
class PrivateCopy:
    """A copy of whole pages, for a process that is about to be forked. No other Python code runs meanwhile."""

    def __init__(self, memory: Any) -> None:
        self._address: int = memory.__array_interface__["data"][0]
        self._nbytes = whole_pages(memory.nbytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._copy = _libc().mmap(None, self._nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if self._copy == _MAP_FAILED:
            sys.stderr.write(
                f"mpidist: too little memory to copy {size_text(self._nbytes)} of results for a forked process: "
                "it ends if it reads them. Let these results go before, or start it in another way\n"
            )
            return
        _libc().madvise(self._copy, self._nbytes, mmap.MADV_HUGEPAGE)
        _libc_with_lock().memmove(self._copy, self._address, memory.nbytes)

    def replace(self) -> None:
        """Put the copy in the place of the pages, in the process that was forked."""
        if self._copy == _MAP_FAILED:
            _libc().munmap(self._address, self._nbytes)
            return
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
        if _libc().mremap(self._copy, self._nbytes, self._nbytes, flags, self._address) == _MAP_FAILED:
            _libc().munmap(self._address, self._nbytes)

    def free(self) -> None:
        """Give the copy back, in the process that forked the other one."""
        if self._copy != _MAP_FAILED:
            _libc().munmap(self._copy, self._nbytes)


@functools.cache
def _libc_with_lock() -> Any:
    """The C library, of which calls keep the lock of Python."""
    libc = ctypes.PyDLL(None)
    libc.memmove.restype = ctypes.c_void_p
    libc.memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return libc


def file_system_bytes() -> tuple[int, int]:
    """Return the size of the node's memory file system, and how much of it is free; raise `OSError` without one."""
    facts = os.statvfs(_DIRECTORY)
    return facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
