"""Which transport serves the ranks of a node: messages, or memory that they share. Results are the same.

See `tests/support/transports.py` for the modules that are run on both.
"""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.contributions import HALVES, REALS, bits
from support.everywhere import raises_everywhere
from support.ranks import Intracomm
from support.reductions import all_reduce
from support.transports import TRANSPORTS

from mpidist import CommunicationOptions, HierarchicalCopyAllReduce
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.errors import TopologyError
from mpidist.transport.communicator import SoloCommunicator
from mpidist.transport.mpi.communicator import MpiCommunicator
from mpidist.transport.shared_memory.communicator import SharedMemoryCommunicator

pytestmark = pytest.mark.core


@pytest.mark.parametrize("transport", ["auto", *TRANSPORTS], indirect=True)
def test_the_environment_chooses(comm: Intracomm, transport: str, placement: tuple[int, ...]) -> None:
    """A rank that is alone needs neither."""
    shares = transport != "mpi" and comm.size > 1
    with Strategy(comm=comm) as strategy:
        levels, topology = parts_of(strategy).group.levels, strategy.topology
        of_node = SharedMemoryCommunicator if shares else MpiCommunicator
        assert type(levels.within_node) is (of_node if topology.local_size > 1 else SoloCommunicator)
        if topology.num_nodes == 1:
            assert type(levels.world) is (of_node if comm.size > 1 else SoloCommunicator)
        else:
            assert type(levels.world) is MpiCommunicator
        assert (levels.fused is not None) == shares
        assert parts_of(strategy).group.agreement.is_node_barrier == (shares and topology.num_nodes == 1)


@pytest.mark.ranks(2)
def test_messages_need_no_shared_memory(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the program asks for arrays in it."""

    def staged() -> int:
        gc.collect()  # strategies of other tests
        return Path("/proc/self/maps").read_text().count("/dev/shm/mpidist-")

    monkeypatch.setenv("MPIDIST_TRANSPORT", "mpi")
    before = staged()
    with Strategy(comm=comm) as strategy:
        strategy.reduce("SUM", np.ones(300_000))
        assert staged() == before + (comm.size > 1)  # where they show what they do, not what they send
        array = strategy.symmetric_empty(300_000, np.float64)
        assert staged() == before + 2 * (comm.size > 1)
        together = strategy.symmetric_empty(300_000, np.float64, per_node=True)
        array[...] = comm.rank
        assert (all_reduce(strategy, "SUM", array, out=together) == sum(range(comm.size))).all()
        assert (all_reduce(strategy, "SUM", array, out=array) == sum(range(comm.size))).all()


@pytest.mark.ranks(1, 2)
def test_a_transport_that_there_is_not_is_every_ranks_error(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only one rank asks for it."""
    for name in ("nonsense", "MPI"):
        pattern = f"MPIDIST_TRANSPORT='{name}' is not understood; it is one of auto, mpi, shared_memory"
        last = comm.size - 1
        monkeypatch.delenv("MPIDIST_TRANSPORT", raising=False)
        if comm.rank == last:
            monkeypatch.setenv("MPIDIST_TRANSPORT", name)
        with raises_everywhere(comm, ValueError, f"rank {last}: {pattern}"):
            Strategy(comm=comm)
        monkeypatch.setenv("MPIDIST_TRANSPORT", name)
        with raises_everywhere(comm, ValueError, f"rank 0: {pattern}"):
            Strategy(comm=comm)


@pytest.mark.ranks(2)
def test_ranks_must_ask_for_one_transport(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or some would wait for a message, and some in shared memory."""
    if comm.rank == 0:
        monkeypatch.setenv("MPIDIST_TRANSPORT", "mpi")
    with raises_everywhere(comm, TopologyError, "MPIDIST_TRANSPORT must be the same on all ranks: rank 0: 'mpi'; rank"):
        Strategy(comm=comm)


@pytest.mark.ranks(min=2)
def test_results_in_rank_order_do_not_depend_on_the_transport(
    comm: Intracomm, placement: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, small and in several chunks."""
    options = CommunicationOptions(reproducible=True)
    random = np.random.default_rng(comm.rank)
    value = [random.standard_normal(count).astype(dtype) for dtype in (*REALS, *HALVES) for count in (3, 4000, 150_000)]
    results: list[list[Any]] = []
    for transport in TRANSPORTS:
        monkeypatch.setenv("MPIDIST_TRANSPORT", transport)
        with Strategy(None, options, cross_device_ops=HierarchicalCopyAllReduce(), comm=comm) as strategy:
            results.append(strategy.reduce("SUM", value) + strategy.reduce("MEAN", value))
    assert all(bits(one) == bits(other) for one, other in zip(*results, strict=True))


@pytest.mark.ranks(2)
def test_a_variable_that_means_nothing_is_told_once(
    comm: Intracomm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MPIDIST_TIMEOUT_SEKONDS", "5")
    for _ in range(2):
        Strategy(comm=comm).close()
    told = [record.message for record in caplog.records if "MPIDIST_TIMEOUT_SEKONDS means nothing" in record.message]
    assert len(told) == (comm.rank == 0)
