"""Messages of MPI: how long they may be, of how many bytes rows of a replica tree are, and errors in them."""

import ctypes
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from support.contributions import bits, in_tree_order, replica_tree, rows_of_this_rank, unlike_numbers

from mpidist.errors import PeerFailedError
from mpidist.transport.group.row_reduction import exchange_rows, row_traffic
from mpidist.transport.mpi import communicator as module
from mpidist.transport.mpi import open_mpi
from mpidist.transport.mpi.communicator import MpiCommunicator
from mpidist.transport.mpi.library import load_mpi
from mpidist.transport.mpi.open_mpi import eager_limit_bytes
from mpidist.transport.reduction import Reduction
from mpidist.transport.topology import Topology
from mpidist.transport.waiting import poll

IS_OPEN_MPI = "Open MPI"


class Tools:
    """MPI's interface for tools: what it tells, and what is left open."""

    def __init__(self, settings):
        self.names, self.numbers, self.open = list(settings), list(settings.values()), 0
        self.library = SimpleNamespace(  # its functions, as ctypes calls them
            MPI_T_init_thread=lambda required, provided: self.count(1),
            MPI_T_finalize=lambda: self.count(-1),
            MPI_T_cvar_get_index=self.find,
            MPI_T_cvar_handle_alloc=self.take,
            MPI_T_cvar_read=self.read,
            MPI_T_cvar_handle_free=lambda handle: self.count(-1),
        )

    def count(self, opened):
        self.open += opened
        return 0

    def find(self, name, index):
        if name.decode() not in self.names:
            return 73
        ctypes.cast(index, ctypes.POINTER(ctypes.c_int))[0] = self.names.index(name.decode())
        return 0

    def take(self, index, _object, handle, _count):
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_size_t))[0] = 1 + index.value
        return self.count(1)

    def read(self, handle, value):
        ctypes.cast(value, ctypes.POINTER(ctypes.c_size_t))[0] = self.numbers[(handle.value or 0) - 1]
        return 0


@pytest.mark.ranks(2)
@pytest.mark.core
def test_eager_limit_is_of_open_mpi_alone_and_asking_leaves_mpi_as_it_is(comm):
    """Open MPI takes the level of threads that its interface for tools is started with for that of the process."""
    before = load_mpi().Query_thread()
    (said,) = {eager_limit_bytes() for _ in range(3)}
    assert said is None or load_mpi().get_vendor()[0] == IS_OPEN_MPI
    assert load_mpi().Query_thread() == before == load_mpi().THREAD_MULTIPLE
    comm.Barrier()  # MPI is as it was


@pytest.mark.no_mpi
@pytest.mark.parametrize("file", ["/no/such/library.so", None])
def test_eager_limit_of_a_library_without_settings_is_none(file, monkeypatch):
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
def test_eager_limit_holds_only_for_messages_by_tcp(settings, expected, monkeypatch):
    mpi = SimpleNamespace(get_vendor=lambda: (IS_OPEN_MPI, (5, 0, 11)), __file__="mpi.so", Query_thread=lambda: 3)
    tools = Tools(settings)
    monkeypatch.setattr(open_mpi, "load_mpi", lambda: mpi)
    monkeypatch.setattr(open_mpi.ctypes, "CDLL", lambda _: tools.library)
    assert eager_limit_bytes() == expected
    assert tools.open == 0


@pytest.mark.ranks(3)
def test_arrays_arrive_whole_in_short_messages(comm):
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


# Not in the core, which runs with Open MPI: that cuts a message which does not fit, and says nothing.
@pytest.mark.ranks(1)
@pytest.mark.parametrize("is_told", [True, False], ids=["others tell the rank", "nobody knows"])
def test_error_of_mpi_becomes_the_loss_of_a_rank(comm, monkeypatch, is_told):
    """MPI finds the loss in a message before the rank looks at the processes of others, and names no rank."""
    monkeypatch.setattr(module, "NEWS_SECONDS", 60.0 if is_told else 0.01)
    own = comm.Split(comm.rank)
    communicator, number_of_looks = MpiCommunicator(own, "across_nodes"), 0

    def look():
        nonlocal number_of_looks
        number_of_looks += 1
        if is_told and number_of_looks == 3:
            raise PeerFailedError("rank 1 is gone")

    communicator.set_wait_hook(look)
    large, small = np.zeros(2), np.zeros(1)
    requests = communicator.receive(small, 0, 5) + communicator.send(large, 0, 5)  # an error, as it does not fit
    unknown = r"MPI cannot complete the messages of across_nodes on rank 0 \(.*was probably killed"
    with pytest.raises(PeerFailedError, match="rank 1 is gone" if is_told else unknown):
        poll(lambda: communicator.test_all(requests), lambda: None)
    communicator.free()


@pytest.mark.ranks(2)
def test_killed_rank_is_named_if_it_is_the_only_other(comm, monkeypatch):
    """As where one of two nodes has a single rank, and that is killed."""
    monkeypatch.setattr(module, "NEWS_SECONDS", 0.01)
    communicator = MpiCommunicator(comm.Dup(), "across_nodes")
    large, small = np.zeros(2), np.zeros(1)
    requests = communicator.receive(small, comm.rank, 5) + communicator.send(large, comm.rank, 5)
    with pytest.raises(PeerFailedError, match=rf"rank {1 - comm.rank} of the job, to which they go, was probably kil"):
        poll(lambda: communicator.test_all(requests), lambda: None)
    communicator.free()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("limit", [1 << 30, 300])
def test_as_many_bytes_move_as_are_counted(comm, limit, monkeypatch):
    topology = Topology.from_labels(comm.rank, [0] * comm.size, ["host"] * comm.size)
    communicator = MpiCommunicator(comm.Dup(), "all", limit)
    moved = [0, 0]
    transfer = MpiCommunicator.transfer

    def counting(self, sends, receives):
        for at, messages in enumerate((sends, receives)):
            moved[at] += sum(part.nbytes for part, _ in messages)
        transfer(self, sends, receives)

    monkeypatch.setattr(MpiCommunicator, "transfer", counting)
    for total in (comm.size, 8, 13):
        tree = replica_tree(total, topology)
        count = 600  # whole shards, of every chunk too
        numbers = unlike_numbers(total, count, np.float32)
        (out, *_) = rows = rows_of_this_rank(tree, np.add, numbers)
        moved[:] = 0, 0
        communicator.traffic.clear()
        exchange_rows(communicator, tree.num_rows, rows, out, partial(tree.world.combine, np.add))
        assert bits(out) == bits(in_tree_order(np.add, numbers))
        nbytes, own = count * 4, count * 4 // comm.size
        if limit > nbytes:
            assert tuple(moved) == row_traffic(tree.num_rows, comm.rank, nbytes, own), total
        assert communicator.traffic.nbytes == {"all_reduce": max(moved)}
        assert communicator.traffic.calls == {"all_reduce": 1}
        if tree.num_rows == (1,) * comm.size:
            counted = communicator.traffic.nbytes["all_reduce"]
            communicator.traffic.clear()
            communicator.all_reduce(out, Reduction(in_rank_order=True))
            assert communicator.traffic.nbytes == {"all_reduce": counted}
    communicator.free()
