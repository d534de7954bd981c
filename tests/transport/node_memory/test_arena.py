"""Memory that the ranks of a node take bit by bit."""

import errno
import os

import numpy as np
import pytest

from mpidist.transport.node_memory import arena as arena_module
from mpidist.transport.node_memory.arena import SharedArena
from mpidist.transport.node_memory.result_block import ResultBlock
from mpidist.transport.node_memory.window import LINE_BYTES

pytestmark = [pytest.mark.core, pytest.mark.ranks(3)]


def test_arena_memory_is_reached_by_all_ranks(comm):
    """Zeros at first; also what is taken long after the ranks have mapped the memory."""
    arena = SharedArena(comm, 1000 * comm.rank)
    places = []
    for nbytes in (1, 5000, 3 << 20, 0, 7):
        place = arena.take(nbytes)
        assert place is not None
        assert place % LINE_BYTES == 0
        assert place >= 1000 * comm.rank
        assert not arena.own[place : place + nbytes].any()
        arena.own[place : place + nbytes] = 1 + comm.rank
        places.append((place, nbytes))
    everyone = comm.allgather(places)
    for rank, (part, taken) in enumerate(zip(arena.parts, everyone, strict=True)):
        ends = [start + nbytes for start, nbytes in taken]
        assert all(end <= start for end, (start, _) in zip(ends, taken[1:], strict=False))
        for start, nbytes in taken:
            assert (part[start : start + nbytes] == 1 + rank).all()
    comm.Barrier()
    arena.free()


def test_memory_is_given_back(comm):
    """Whoever still refers to it."""

    def used():
        facts = os.statvfs("/dev/shm")
        return (facts.f_blocks - facts.f_bfree) * facts.f_frsize

    arena = SharedArena(comm, 1 << 20)
    place = arena.take(64 << 20)
    assert place is not None
    own = arena.own[place : place + (64 << 20)]
    own[...] = 1
    comm.Barrier()
    before = used()
    comm.Barrier()
    arena.free()
    comm.Barrier()
    assert before - used() > comm.size * (32 << 20)  # others may take some meanwhile
    assert not own.any()
    comm.Barrier()


def test_too_little_memory_later_is_no_error(comm, monkeypatch):
    arena = SharedArena(comm, 100)
    assert arena.take(arena.own.size) is None
    assert arena.take(10) is not None
    limit = 2 << 20
    really = os.posix_fallocate

    def fail_from(file, start, nbytes):
        if nbytes > limit:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        really(file, start, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", fail_from)
    assert arena.take(2 * limit) is None
    place = arena.take(limit - 8192)  # there is no more than this, though it asks for more at once
    assert place is not None
    arena.own[place : place + limit - 8192] = np.uint8(1)
    comm.Barrier()
    arena.free()


def test_arena_part_has_memory_for_the_first_take(comm, monkeypatch):
    """Also where the system says that the file system is smaller, or cannot say how large it is."""

    def unknown():
        raise OSError(errno.ENOENT, "")

    for function in (lambda: (4096, 4096), unknown):
        monkeypatch.setattr(arena_module, "file_system_bytes", function)
        arena = SharedArena(comm, 100_000)
        assert all(part.size >= 100_000 for part in arena.parts)
        arena.own[:100_000] = 1
        comm.Barrier()
        arena.free()


def test_some_memory_is_left_to_others(comm, monkeypatch):
    free = [64 << 20]
    monkeypatch.setattr(arena_module, "file_system_bytes", lambda: (64 << 20, free[0]))
    arena = SharedArena(comm, 0)
    assert arena.take(57 << 20) is None
    free[0] = 10 << 20
    assert arena.take(3 << 20) is None
    assert arena.take(1 << 20) is not None
    comm.Barrier()
    arena.free()


def test_pages_that_are_given_back_are_taken_again(comm):
    """Zeros once more; gaps that touch are one."""
    page = 4096
    arena = SharedArena(comm, page, 64 * page)
    places = [arena.take_pages(page * pages) for pages in (1, 2, 3, 4)]
    assert [place for place in places if place is not None] == [page, 2 * page, 4 * page, 7 * page]
    arena.own[page : 11 * page] = 1
    arena.give_back(2 * page, 2 * page - 5)  # sizes are those that were asked for
    arena.give_back(7 * page, 4 * page)
    assert arena.take_pages(3 * page) == 7 * page
    arena.give_back(4 * page, 3 * page)
    assert arena.take_pages(5 * page) == 2 * page
    assert not arena.own[2 * page : 10 * page].any()
    assert (arena.own[page : 2 * page] == 1).all()
    assert arena.take_pages(page) == 10 * page
    assert arena.take_pages(60 * page) is None
    assert arena.take_pages(1) == 11 * page
    comm.Barrier()
    arena.close()
    assert arena.take_pages(page) is None
    arena.give_back(page, page)  # as results do that outlive the strategy
    comm.Barrier()
    arena.free()


def test_blocks_of_results_are_given_back_with_their_last_array(comm):
    arena = SharedArena(comm, 4096)
    block = ResultBlock.take(arena, 10_000)
    assert block is not None
    place, first, second = block.place, block.array(0, 4000), block.array(4032, 4000)
    assert place > 0
    assert first.ctypes.data == arena.own[place:].ctypes.data
    view = second[10:]
    del block, first, second
    view[...] = 7
    other = ResultBlock.take(arena, 10_000)
    assert other is not None
    assert other.place != place
    assert (view == 7).all()
    del view
    again = ResultBlock.take(arena, 9_000)
    assert again is not None
    assert again.place == place
    del again, other
    comm.Barrier()
    arena.free()
