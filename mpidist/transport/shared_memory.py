"""Arrays in memory that all ranks of a node reach."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final, final

import numpy as np

from mpidist.transport import arrays
from mpidist.transport.agreement import fingerprint_of
from mpidist.transport.communicator import Communicator
from mpidist.transport.mpi import MpiCommunicator, load_mpi

__all__ = ["SharedArrays"]

_ALIGNMENT: Final = 64  # a cache line, so that ranks which write side by side do not fight for one


@final
class SharedArrays:
    """The shared windows of one node.

    Attributes:
        within_node: The ranks of the node.
    """

    def __init__(self, within_node: Communicator) -> None:
        self.within_node = within_node
        self._windows: list[Any] = []
        self._own: list[np.ndarray[Any, Any]] = []
        self._per_node: list[tuple[int, int]] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], per_node: bool) -> np.ndarray[Any, Any]:
        """Allocate an array in a shared window. Collective over the node.

        Args:
            shape: The shape, the same on every rank.
            dtype: The dtype, the same on every rank.
            per_node: One array for all ranks, instead of one for each.

        Returns:
            A C-contiguous array of uninitialised numbers, which lives until `free`.
        """
        node = self.within_node
        if not isinstance(node, MpiCommunicator):  # one rank: its own memory is all that the node shares
            array = np.empty(shape, dtype)
            if per_node:  # the ranks of other nodes share theirs, and all must know alike
                self._own.append(array)
                self._per_node.append(arrays.memory_bounds(array))
            return array
        nbytes = prod(shape) * dtype.itemsize
        owner = 0 if per_node else node.rank
        mine = nbytes + _ALIGNMENT if node.rank == owner else 0
        window = load_mpi().Win.Allocate_shared(mine, 1, comm=node.comm)
        window.Lock_all()  # MPI lets only a locked window be synchronised
        self._windows.append(window)
        memory, _ = window.Shared_query(owner)
        flat = np.frombuffer(memory, np.uint8)
        start = -flat.ctypes.data % _ALIGNMENT
        array = flat[start : start + nbytes].view(dtype).reshape(shape)
        if per_node:
            self._per_node.append(arrays.memory_bounds(array))
        return array

    def is_per_node(self, array: Any) -> bool:
        """Whether an array lies in memory that is one for all ranks of the node."""
        if not self._per_node or arrays.is_device(array):
            return False
        start, stop = arrays.memory_bounds(array)
        return any(its_start <= start and stop <= its_stop for its_start, its_stop in self._per_node)

    def fingerprint(self, outs: Sequence[Any]) -> int:
        """Return a number that tells which of some arrays are one for all ranks of the node; 0 for none."""
        which = [index for index, out in enumerate(outs) if self._per_node and self.is_per_node(out)]
        return fingerprint_of(which) if which else 0

    def write(self, out: Any, result: Any) -> None:
        """Let the node's first rank write an array that is one for all. Collective over the node.

        Returns when the numbers are there for this rank to read.
        """
        if self.within_node.rank == 0:
            out[...] = result
        self._sync()
        self.within_node.broadcast(np.zeros(1, np.uint8), 0)  # sent after the numbers were written
        self._sync()

    def free(self) -> None:
        """Free the windows, last made first. Collective over the node. The arrays are gone."""
        for window in reversed(self._windows):
            window.Unlock_all()
            window.Free()
        self._windows.clear()
        self._own.clear()
        self._per_node.clear()

    def _sync(self) -> None:
        for window in self._windows:
            window.Sync()
