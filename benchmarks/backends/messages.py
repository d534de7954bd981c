"""A parameter server of plain mpi4py, as a careful user writes it: Isend, Irecv, NumPy, and arrays that are kept.

A server receives each message into one of two buffers and adds the message before, so that it adds while the next one
arrives. Small arrays lie side by side on both sides, and travel as one message without a copy. No deadline, no checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from harness.work import Work
from mpi4py import MPI

from backends.servers import ServerBackend, place_parts

_REQUEST, _DATA, _SIZES = 1, 2, 3
_PUSH, _PULL, _BEGIN, _END = range(4)


class Messages(ServerBackend):
    """The ranks of MPI's world. Collective."""

    def serve(self) -> None:
        self.pin()
        comm, request, status, parts = self.comm, np.zeros(1, np.int64), MPI.Status(), []
        nothing = np.zeros(0, np.float32)
        buffers: list[Any] = []
        while True:
            comm.Recv(request, MPI.ANY_SOURCE, _REQUEST, status)
            worker = status.Get_source()
            if request[0] == _END:
                return
            if request[0] == _BEGIN:
                parts = [np.zeros(size, np.float32) for size in comm.recv(source=worker, tag=_SIZES)]
                buffers = [np.empty(max((part.size for part in parts), default=0), np.float32) for _ in range(2)]
                comm.Send(nothing, worker, _DATA)
            elif request[0] == _PULL:
                MPI.Request.Waitall([comm.Isend(part, worker, _DATA) for part in parts])
            else:
                self._add(worker, parts, buffers)
                comm.Send(nothing, worker, _DATA)

    def _add(self, worker: int, parts: list[Any], buffers: list[Any]) -> None:
        coming = None
        for at, part in enumerate(parts):
            now = coming or self.comm.Irecv(buffers[at % 2][: part.size], worker, _DATA)
            now.Wait()
            coming = None
            if at + 1 < len(parts):
                coming = self.comm.Irecv(buffers[(at + 1) % 2][: parts[at + 1].size], worker, _DATA)
            part += buffers[at % 2][: part.size]

    def begin(self, work: Work) -> tuple[Callable[[], object], Callable[[], Any]]:
        comm, nothing = self.comm, np.zeros(0, np.float32)
        pushes, pulls = np.array([_PUSH], np.int64), np.array([_PULL], np.int64)
        servers = range(self.size, self.size + self.servers)
        placed = dict(zip(servers, place_parts(work, self.servers), strict=True))
        used = {server: sizes for server, sizes in placed.items() if sizes}
        ones = {server: [np.ones(size, np.float32) for size in sizes] for server, sizes in used.items()}
        found = {server: [np.empty(size, np.float32) for size in sizes] for server, sizes in used.items()}
        if self.rank == 0:
            for server, sizes in placed.items():
                comm.Send(np.array([_BEGIN], np.int64), server, _REQUEST)
                comm.send(sizes, server, _SIZES)
                comm.Recv(nothing, server, _DATA)
        self.barrier()

        def push() -> None:
            requests = []
            for server, arrays in ones.items():
                requests.append(comm.Isend(pushes, server, _REQUEST))
                requests += [comm.Isend(array, server, _DATA) for array in arrays]
                requests.append(comm.Irecv(nothing, server, _DATA))
            MPI.Request.Waitall(requests)

        def pull() -> Sequence[Any]:
            requests = []
            for server, arrays in found.items():
                requests += [comm.Irecv(array, server, _DATA) for array in arrays]
                requests.append(comm.Isend(pulls, server, _REQUEST))
            MPI.Request.Waitall(requests)
            return [array for arrays in found.values() for array in arrays]

        return push, pull

    def close(self) -> None:
        self.barrier()
        if self.rank == 0:
            for server in range(self.size, self.size + self.servers):
                self.comm.Send(np.array([_END], np.int64), server, _REQUEST)
