"""One-sided parameter servers: Accumulate into windows of the servers and Get from them, with MPI's own guarantees.

A number is added whole, but an array is not: a Get may see a part of an Accumulate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from harness.work import Work
from mpi4py import MPI

from backends.servers import ServerBackend, place_parts


class Window(ServerBackend):
    """The ranks of MPI's world. Collective."""

    _window: MPI.Win | None = None

    def serve(self) -> None:
        self.pin()
        while True:
            sizes = self.comm.bcast(None, 0)  # waits inside MPI, which so can add what arrives
            if sizes is None:
                self._free()
                return
            self._open(4 * sum(sizes[self.rank - self.size]))

    def begin(self, work: Work) -> tuple[Callable[[], object], Callable[[], Any]]:
        placed = place_parts(work, self.servers)
        self.comm.bcast(placed, 0)
        window = self._open(0)
        ones = [[np.ones(size, np.float32) for size in sizes] for sizes in placed]
        found = [[np.empty(size, np.float32) for size in sizes] for sizes in placed]
        starts = [np.cumsum([0, *sizes]).tolist() for sizes in placed]
        window.Lock_all(MPI.MODE_NOCHECK)

        def push() -> None:
            for server, arrays in enumerate(ones, self.size):
                for start, array in zip(starts[server - self.size], arrays, strict=False):
                    window.Accumulate([array, MPI.FLOAT], server, (start, array.size, MPI.FLOAT), MPI.SUM)
            window.Flush_all()

        def pull() -> Sequence[Any]:
            for server, arrays in enumerate(found, self.size):
                for start, array in zip(starts[server - self.size], arrays, strict=False):
                    window.Get([array, MPI.FLOAT], server, (start, array.size, MPI.FLOAT))
            window.Flush_all()
            return [array for arrays in found for array in arrays]

        return push, pull

    def _open(self, nbytes: int) -> MPI.Win:
        self._free()
        window = self._window = MPI.Win.Allocate(nbytes, 4, comm=self.comm)
        np.frombuffer(window.tomemory(), np.float32)[...] = 0
        self.comm.Barrier()
        return window

    def _free(self) -> None:
        if self._window is not None:
            if self.rank < self.size:
                self._window.Unlock_all()
            self._window.Free()
            self._window = None

    def close(self) -> None:
        self.comm.bcast(None, 0)
        self._free()
