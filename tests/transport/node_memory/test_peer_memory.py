"""Copies out of the memory of other processes: right bytes, and a plain answer where there are none to be had."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mpidist.transport.node_memory import PeerMemory

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

pytestmark = [pytest.mark.core]


def memory_of(comm: Intracomm) -> PeerMemory:
    """Return the memory of all ranks, which lie on one node. Collective."""
    memory = PeerMemory.open(comm)
    assert memory is not None, "this system forbids processes to copy out of each other, which the tests need"
    return memory


def test_every_rank_copies_out_of_every_other(comm: Intracomm) -> None:
    memory = memory_of(comm)
    for count in (1, 5, 4096, 1 << 20):
        own = np.arange(count, dtype=np.int64) + comm.rank
        addresses = comm.allgather(memory.own_address(own))
        for rank, address in enumerate(addresses):
            into = np.zeros(count, np.int64)
            assert memory.copy(rank, address, into)
            assert (into == np.arange(count) + rank).all()
        part = np.zeros(1, np.int64)
        assert memory.copy(comm.size - 1, addresses[-1] + 8 * (count - 1), part)
        assert part[0] == count - 1 + comm.size - 1
        comm.Barrier()


@pytest.mark.ranks(2, 3)
def test_all_ranks_learn_that_one_may_not(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where each rank has process numbers of its own: the number that one rank tells is another process's."""
    with monkeypatch.context() as patch:
        if comm.rank == 0:
            patch.setattr(os, "getpid", lambda: 1)
        assert PeerMemory.open(comm) is None
    assert PeerMemory.open(comm) is not None


@pytest.mark.ranks(1)
def test_a_process_that_is_gone_and_memory_that_is_gone_are_told() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    memory, into = PeerMemory([child.pid]), np.zeros(8, np.uint8)
    assert not memory.copy(0, 8, into)  # nothing lies there
    child.kill()
    child.communicate()
    assert not memory.copy(0, 8, into)
    own, pages = PeerMemory([os.getpid()]), mmap.mmap(-1, 2 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert own.copy(0, address + mmap.PAGESIZE, into)
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + mmap.PAGESIZE), mmap.PAGESIZE, 0)
    both = np.zeros(2 * mmap.PAGESIZE, np.uint8)
    assert not own.copy(0, address, both)


@pytest.mark.ranks(1)
def test_memory_that_the_system_does_not_copy_has_no_address() -> None:
    """As that of some devices. Every process has some such memory, which the kernel writes for it: `vvar`."""
    memory = PeerMemory([os.getpid()])
    plain = np.zeros(3)
    assert memory.own_address(plain) == plain.ctypes.data
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = [int(line.partition("-")[0], 16) for line in lines if line.endswith("[vvar]")]
    for start in found:
        pages = np.frombuffer((ctypes.c_uint8 * 64).from_address(start), np.uint8)
        assert memory.own_address(pages) == 0
    assert found or sys.platform != "linux"
