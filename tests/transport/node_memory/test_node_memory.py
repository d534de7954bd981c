"""Memory that the ranks of a node share: that all reach it, that it is gone afterwards, and the barrier in it."""

import errno
import gc
import logging
import mmap
import os
import random
import secrets
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from support.everywhere import raises_everywhere
from support.placements import one_and_two_nodes
from support.used import Used

from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.errors import UnavailableError
from mpidist.transport.node_memory import barrier as barrier_module
from mpidist.transport.node_memory import window as window_module
from mpidist.transport.node_memory.barrier import Fence, NodeBarrier
from mpidist.transport.node_memory.window import LINE_BYTES, SharedWindow, part_stride

pytestmark = pytest.mark.core


def mapped():
    """The files of shared memory that this process has mapped."""
    gc.collect()  # arrays of other tests
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if "/dev/shm/mpidist-" in line]


@pytest.mark.ranks(3)
def test_all_ranks_reach_all_parts(comm):
    """Zeros at first; what a rank writes into any part, all read; on pages of their own."""
    for nbytes in (0, 1, 4096, 4097, (2 << 20) + 1):
        parts = SharedWindow(comm, nbytes).parts
        assert len(parts) == comm.size
        for part in parts:
            assert (part.dtype, part.shape) == (np.uint8, (nbytes,))
            assert part.flags.writeable
            assert part.ctypes.data % mmap.PAGESIZE == 0
            assert not part.any()
        comm.Barrier()
        following = (comm.rank + 1) % comm.size
        parts[comm.rank][: nbytes // 2] = 1 + comm.rank
        parts[following][nbytes // 2 :] = 101 + comm.rank
        comm.Barrier()
        for owner, part in enumerate(parts):
            assert (part[: nbytes // 2] == 1 + owner).all()
            assert (part[nbytes // 2 :] == 101 + (owner - 1) % comm.size).all()
        comm.Barrier()


def l1_hash(address):
    """The hash by which AMD's Zen finds a line: `part_stride` names the source."""
    pairs = [(12, 27), (13, 26), (14, 25), (15, 20), (16, 21), (17, 22), (18, 23), (19, 24)]
    return sum((address >> low & 1 ^ address >> high & 1) << at for at, (low, high) in enumerate(pairs))


@pytest.mark.no_mpi
def test_part_stride_separates_parts_in_the_first_cache():
    for mebibytes in (2, 15, 128, 255, 320, 4096):
        for nbytes in (mebibytes << 20, (mebibytes << 20) + 128, (mebibytes << 20) + 5000):
            stride = part_stride(nbytes)
            assert 0 <= stride - nbytes < (4 << 20)
            for rank in range(1, 16):
                for place in range(0, nbytes, max(4096, nbytes // 257 // 4096 * 4096)):
                    address = (1 << 46) + place
                    assert l1_hash(address) != l1_hash(address + rank * stride)


@pytest.mark.ranks(2)
def test_window_file_has_no_name_while_memory_is_reserved(comm, monkeypatch):
    """A job that is killed leaves nothing behind. To reserve takes long where there is much."""
    links, really = [], os.posix_fallocate

    def reserve(file, start, length):
        links.append(os.fstat(file).st_nlink)
        really(file, start, length)

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    files, before = Used.now().files, set(mapped())
    windows = [SharedWindow(comm, nbytes) for nbytes in (1000, 1000, 3 << 20)]
    if comm.rank == 0:  # which takes the name away
        assert links == [0] * 3
    comm.Barrier()  # it does so last, when other ranks may have their window already
    names = set(mapped()) - before
    assert len(names) == 3
    assert all(name.endswith(" (deleted)") for name in names)
    assert not any(Path(name.removesuffix(" (deleted)")).exists() for name in names)
    comm.Barrier()
    del windows
    assert set(mapped()) == before
    assert Used.now().files == files


def full_disk(monkeypatch):
    """Let the node have no memory left, once this rank asks for its part."""

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)


def no_directory(monkeypatch):
    monkeypatch.setattr(window_module, "_DIRECTORY", "/dev/shm/no/such/folder")


def closed_directory(monkeypatch):
    """Let a rank see another folder, as if it was in a container of its own."""
    really = os.open

    def look_elsewhere(path, *args):
        return really(f"{path}-elsewhere" if str(path).startswith("/dev/shm/mpidist-") else path, *args)

    monkeypatch.setattr(os, "open", look_elsewhere)


PROBLEMS = {
    "no memory for the last": (
        full_disk,
        -1,
        r"[KM]iB cannot be had in /dev/shm \(No space left on device\); ask for less",
    ),
    "no folder": (no_directory, 0, r"no/such/folder cannot be used \(No such file or directory\); mount "),
    "containers": (
        closed_directory,
        -1,
        r"ranks of one node do not share /dev/shm \(No such .*\); let containers share it",
    ),
}


class Problem(NamedTuple):
    """Why shared memory cannot be had: on which rank alone, and what the error says."""

    rank: int
    pattern: str


@pytest.fixture(params=PROBLEMS)
def problem(request, comm, monkeypatch):
    """Make shared memory impossible to have."""
    make, rank, pattern = PROBLEMS[request.param]
    if comm.rank == rank % comm.size:
        make(monkeypatch)
    return Problem(rank % comm.size, pattern)


@pytest.mark.ranks(2, 3)
def test_too_little_memory_is_every_ranks_error(comm, problem, monkeypatch):
    """Also where only one rank has none; and nothing is left of it."""
    with monkeypatch.context() as patch:
        patch.setattr(secrets, "token_hex", lambda _: f"test-{comm.name}-{os.getppid()}")
        path = comm.bcast(f"/dev/shm/mpidist-{secrets.token_hex(8)}")
        files, before = Used.now().files, mapped()
        with raises_everywhere(comm, UnavailableError, problem.pattern):
            SharedWindow(comm, 1000)
    assert mapped() == before
    assert Used.now().files == files
    assert not os.path.exists(path)
    monkeypatch.setenv("MPIDIST_TRANSPORT", "shared_memory")
    pattern = f"MPIDIST_TRANSPORT=shared_memory cannot be followed: rank 0: .*{problem.pattern}"
    with raises_everywhere(comm, UnavailableError, pattern) as raised:
        Strategy(comm=comm)
    assert vars(raised[0])["raised_on_all_ranks"]  # its text is printed once


@one_and_two_nodes
def test_without_shared_memory_ranks_send_messages(comm, placement, problem, caplog):
    """On all nodes alike, with one warning, of rank 0; and the results are right."""
    needs_it = placement.count(placement[problem.rank]) > 1  # ranks alone on a node have memory of their own
    with caplog.at_level(logging.WARNING, "mpidist"), Strategy(comm=comm) as strategy:
        assert (parts_of(strategy).group.levels.fused is None) == needs_it
        for count in (1, 1000, 200_000):
            assert (strategy.reduce("SUM", np.full(count, comm.rank)) == sum(range(comm.size))).all()
        assert strategy.gather(np.ones(2), 0).size == 2 * comm.size
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (needs_it and comm.rank == 0)
    for text in warnings:
        assert text.startswith("ranks of a node send messages instead of sharing memory, which is slower: rank ")


@pytest.mark.ranks(1, 3)
def test_reset_and_close_leave_no_memory_behind(comm):
    """Of the staging memory at once; of arrays, when the last is gone."""
    before = len(mapped())
    strategy = Strategy(comm=comm)
    used = len(mapped())
    array = strategy.symmetric_empty(5, np.float64)
    for _ in range(2):
        strategy.reset()
        assert len(mapped()) == used + (comm.size > 1)
    array[...] = comm.rank
    strategy.close()
    del strategy
    assert (array == comm.rank).all()
    assert len(mapped()) == before + (comm.size > 1)
    del array
    assert len(mapped()) == before


def resident():
    """How much of this process's memory lies in shared windows, in KiB."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0]:
            counts = "/dev/shm/mpidist-" in line
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@pytest.mark.ranks(2)
def test_close_gives_staging_memory_back_whoever_still_refers_to_it(comm):
    gc.collect()
    before = resident()
    strategy = Strategy(comm=comm)
    strategy.reduce("SUM", np.ones(1_000_000))
    held = parts_of(strategy).group.levels
    assert resident() - before > 256
    comm.Barrier()
    strategy.close()
    comm.Barrier()
    assert resident() - before <= 2 * comm.size * mmap.PAGESIZE >> 10  # of staging memory, and of the board
    del held


# The barrier


@pytest.fixture(params=["ordered processor", "fence of MPI"])
def fence(request, monkeypatch):
    """What `Fence` does on this processor, and on one that needs it."""
    monkeypatch.setattr(barrier_module, "_ORDERED", request.param == "ordered processor")
    made = Fence()
    assert (made.sync is None) == (request.param == "ordered processor")
    yield made.sync
    made.free()


def wait(barrier):
    while not barrier.has_passed():
        time.sleep(0)


@pytest.mark.ranks(2, 3)
def test_node_barrier_passes_after_all_have_arrived(comm, fence):
    barrier = NodeBarrier(SharedWindow(comm, LINE_BYTES), comm.rank, fence)
    assert barrier.count == 0
    for late in range(comm.size):
        if comm.rank != late:
            barrier.post()
        comm.Barrier()
        if comm.rank != late:
            for _ in range(3):
                assert not barrier.has_passed()
        comm.Barrier()
        if comm.rank == late:
            barrier.post()
            assert barrier.has_passed()
        comm.Barrier()
        assert barrier.has_passed()
        assert barrier.count == late + 1
        comm.Barrier()


def test_node_barrier_orders_writes_before_reads(comm, fence):
    """A few thousand times, at any pace: what each rank wrote for a round, all read after its barrier."""
    window = SharedWindow(comm, 4 * LINE_BYTES)
    barrier = NodeBarrier(window, comm.rank, fence)
    numbers = [part[LINE_BYTES:].view(np.int64).reshape(3, 16) for part in window.parts]
    random_ = random.Random(comm.rank)
    for step in range(1000):
        numbers[comm.rank][step % 3] = step  # read until the next barrier
        if random_.random() < 0.01:
            time.sleep(0.0005)
        barrier.post()
        wait(barrier)
        assert all((part[step % 3] == step).all() for part in numbers)
    comm.Barrier()


@pytest.mark.ranks(2, 3)
def test_words_are_those_of_the_barrier_that_was_passed_last(comm, fence):
    """Also for a rank so slow that the others have shown their next words already."""
    barrier = NodeBarrier(SharedWindow(comm, LINE_BYTES), comm.rank, fence)
    shown = random.Random(7)
    delay = random.Random(comm.rank)
    for _ in range(300):
        most = shown.choice([1, 2**63 - 1])
        words = [(shown.choice([0, most]), shown.choice([0, most])) for _ in range(comm.size)]
        if shown.random() < 0.5:
            words = [(words[0][0], second) for _, second in words]
        barrier.post_words(*words[comm.rank])
        wait(barrier)
        if delay.random() < 0.05:
            time.sleep(0.0005)
        same = tuple(len({pair[at] for pair in words}) == 1 for at in (0, 1))
        assert barrier.has_equal_words() == same


@pytest.mark.ranks(2)
def test_node_barrier_fences_before_arrival_and_after_passing(comm):
    """What cannot be seen on a processor that needs none."""
    window = SharedWindow(comm, LINE_BYTES)
    arrivals = window.parts[comm.rank][:8].view(np.int64)
    seen = []
    barrier = NodeBarrier(window, comm.rank, lambda: seen.append(int(arrivals[0])))
    for step in range(3):
        barrier.post()
        assert seen == [step]
        comm.Barrier()
        assert barrier.has_passed()
        assert seen == [step, step + 1]
        seen.clear()
        comm.Barrier()
    if comm.rank == 0 and comm.size > 1:
        barrier.post()
        assert not barrier.has_passed()
        assert seen == [3]
    comm.Barrier()
