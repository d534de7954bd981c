"""Memory for results of a rank in shared memory, which other ranks of the node write during a call, and only then.

A process that is forked from a rank must find results as all other memory: as they were at the moment of the fork, and
in memory of its own. So a rank copies the blocks with results before it forks, as shared memory stays shared.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, final

import numpy as np

from mpidist.transport.communicator import Array
from mpidist.transport.node_memory.arena import SharedArena
from mpidist.transport.node_memory.window import PrivateCopy

__all__ = ["ResultBlock", "is_result"]

_blocks: weakref.WeakSet[ResultBlock] = weakref.WeakSet()
_copies = threading.local()  # `made`: the copies that this thread has made for the process that it forks


@final
class ResultBlock:
    """A block of an arena, which is given back when no array lies in it any more. `take` makes it.

    Attributes:
        place: Where the block begins in this rank's part, in bytes; never 0.
        is_used: Whether there are results in the block. Only blocks with results are copied for a forked process.
    """

    def __init__(self, arena: SharedArena, place: int, nbytes: int) -> None:
        self.place = place
        self.memory = arena.own[place : place + nbytes]
        self.is_used: Callable[[], bool] = lambda: True
        weakref.finalize(self, arena.give_back, place, nbytes).atexit = False
        _blocks.add(self)

    @classmethod
    def take(cls, arena: SharedArena, nbytes: int) -> ResultBlock | None:
        """Take a block; `None` if there is too little memory."""
        place = arena.take_pages(nbytes)
        return None if place is None else cls(arena, place, nbytes)

    def array(self, start: int, nbytes: int) -> Array:
        """View bytes of the block. No other array is the `base` of the views of this one."""
        return np.asarray(_Part(self, start, nbytes))


@final
class _Part:
    """The `base` of an array in a block: refers to the block, so that it is not given back."""

    def __init__(self, block: ResultBlock, start: int, nbytes: int) -> None:
        self._block = block
        address: int = block.memory.__array_interface__["data"][0] + start
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def is_result(root: np.ndarray[Any, Any]) -> bool:
    """Whether an array, which is no view of another array, is the memory of results of this rank."""
    return type(root.base) is _Part


def _copy_used() -> None:
    """Copy the blocks with results, before this process forks another one."""
    _copies.made = made = []  # at once: whatever fails below, copies of an earlier fork are gone
    for block in list(_blocks):
        if block.is_used():
            made.append(PrivateCopy(block.memory))


def _use_copies() -> None:
    """Replace the blocks by the copies in this process, which has just been forked."""
    for copy in _copies.made:
        copy.replace()


def _drop_copies() -> None:
    for copy in _copies.made:
        copy.free()


os.register_at_fork(before=_copy_used, after_in_child=_use_copies, after_in_parent=_drop_copies)
