"""Messages that Open MPI sends over TCP without being asked: how long they are, and arrays that are cut into them."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.ranks import Intracomm

from mpidist.transport.mpi import open_mpi
from mpidist.transport.mpi.communicator import MpiCommunicator
from mpidist.transport.mpi.library import load_mpi
from mpidist.transport.mpi.open_mpi import eager_limit_bytes

IS_OPEN_MPI = "Open MPI"


class Tools:
    """MPI's interface for tools: what it tells, and what is left open."""

    def __init__(self, settings: dict[str, int]) -> None:
        self.names, self.numbers, self.open = list(settings), list(settings.values()), 0

    @property
    def library(self) -> SimpleNamespace:
        """Its functions, as ctypes calls them."""
        return SimpleNamespace(
            MPI_T_init_thread=self.start,
            MPI_T_finalize=self.end,
            MPI_T_cvar_get_index=self.find,
            MPI_T_cvar_handle_alloc=self.take,
            MPI_T_cvar_read=self.read,
            MPI_T_cvar_handle_free=self.let_go,
        )

    def start(self, _required: int, _provided: Any) -> int:
        self.open += 1
        return 0

    def end(self) -> int:
        self.open -= 1
        return 0

    def find(self, name: bytes, index: Any) -> int:
        if name.decode() not in self.names:
            return 73
        ctypes.cast(index, ctypes.POINTER(ctypes.c_int))[0] = self.names.index(name.decode())
        return 0

    def take(self, index: ctypes.c_int, _object: None, handle: Any, _count: Any) -> int:
        self.open += 1
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_size_t))[0] = 1 + index.value
        return 0

    def read(self, handle: ctypes.c_void_p, value: Any) -> int:
        ctypes.cast(value, ctypes.POINTER(ctypes.c_size_t))[0] = self.numbers[(handle.value or 0) - 1]
        return 0

    def let_go(self, _handle: Any) -> int:
        self.open -= 1
        return 0


@pytest.mark.ranks(2)
def test_only_open_mpi_is_asked_and_it_may_be_asked_again(comm: Intracomm) -> None:
    said = [eager_limit_bytes() for _ in range(3)]
    assert said[0] == said[1] == said[2]
    if load_mpi().get_vendor()[0] != IS_OPEN_MPI:
        assert said[0] is None
    comm.Barrier()  # MPI is as it was


@pytest.mark.ranks(2)
@pytest.mark.core
def test_asking_leaves_the_level_of_threads_as_it_is(comm: Intracomm) -> None:
    """Open MPI takes what its interface for tools is started with as that of the whole process."""
    before = load_mpi().Query_thread()
    eager_limit_bytes()
    assert load_mpi().Query_thread() == before == load_mpi().THREAD_MULTIPLE


@pytest.mark.no_mpi
@pytest.mark.parametrize("file", ["/no/such/library.so", None])
def test_a_library_that_hides_its_settings_says_nothing(file: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = SimpleNamespace(get_vendor=lambda: (IS_OPEN_MPI, (5, 0, 11)), __file__=file, Query_thread=lambda: 3)
    monkeypatch.setattr(open_mpi, "load_mpi", lambda: mpi)
    assert eager_limit_bytes() is None


@pytest.mark.no_mpi
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"pml_ob1_priority": 20, "btl_tcp_eager_limit": 65536}, 65536 - 256),
        ({"pml_ob1_priority": 20, "btl_tcp_eager_limit": 300}, 16 << 10),  # a header and little more
        ({"pml_ob1_priority": 20}, None),  # no TCP
        ({"pml_ucx_priority": 51, "btl_tcp_eager_limit": 65536}, None),  # UCX carries the messages
    ],
)
def test_the_limit_counts_only_where_tcp_carries_messages(
    settings: dict[str, int], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpi = SimpleNamespace(get_vendor=lambda: (IS_OPEN_MPI, (5, 0, 11)), __file__="mpi.so", Query_thread=lambda: 3)
    tools = Tools(settings)
    monkeypatch.setattr(open_mpi, "load_mpi", lambda: mpi)
    monkeypatch.setattr(open_mpi.ctypes, "CDLL", lambda _: tools.library)
    assert eager_limit_bytes() == expected
    assert tools.open == 0


@pytest.mark.ranks(3)
def test_arrays_arrive_whole_in_short_messages(comm: Intracomm) -> None:
    for nbytes in (0, 1, 999, 1000, 1001, 5000, 64_000):
        communicator = MpiCommunicator(comm.Dup(), "all", message_bytes=1000)
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        numbers = np.random.default_rng(nbytes).integers(0, 256, (comm.size, nbytes), np.uint8)
        incoming = np.zeros(nbytes, np.uint8)
        requests = communicator.receive(incoming, before, 1) + communicator.send(numbers[comm.rank], after, 1)
        assert len(requests) == 2 * max(1, -(-nbytes // 1000))
        while not communicator.test_all(requests):
            pass
        assert incoming.tobytes() == numbers[before].tobytes()
        communicator.free()
