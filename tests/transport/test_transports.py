"""Which transport serves the ranks of a node: messages, or memory that they share. Results are the same.

See `tests/support/transports.py` for the modules that are run on both.
"""

import numpy as np
import pytest
from support.reductions import all_reduce
from support.transports import TRANSPORTS
from support.used import Used

from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.transport.communicator import SoloCommunicator
from mpidist.transport.mpi.communicator import MpiCommunicator
from mpidist.transport.shared_memory.communicator import SharedMemoryCommunicator

pytestmark = pytest.mark.core


@pytest.mark.parametrize("transport", ["auto", *TRANSPORTS], indirect=True)
def test_transport_variable_chooses_communicators(comm, transport, placement):
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
def test_messages_need_no_shared_memory(comm, monkeypatch):
    """Until the program asks for arrays in it."""
    monkeypatch.setenv("MPIDIST_TRANSPORT", "mpi")
    before = Used.now().mapped
    with Strategy(comm=comm) as strategy:
        strategy.reduce("SUM", np.ones(300_000))
        assert Used.now().mapped == before + (comm.size > 1)  # where they show what they do, not what they send
        array = strategy.symmetric_empty(300_000, np.float64)
        assert Used.now().mapped == before + 2 * (comm.size > 1)
        together = strategy.symmetric_empty(300_000, np.float64, per_node=True)
        array[...] = comm.rank
        assert (all_reduce(strategy, "SUM", array, out=together) == sum(range(comm.size))).all()
        assert (all_reduce(strategy, "SUM", array, out=array) == sum(range(comm.size))).all()


@pytest.mark.ranks(2)
def test_unknown_variable_is_logged_once(comm, monkeypatch, caplog):
    monkeypatch.setenv("MPIDIST_TIMEOUT_SEKONDS", "5")
    for _ in range(2):
        Strategy(comm=comm).close()
    told = [record.message for record in caplog.records if "MPIDIST_TIMEOUT_SEKONDS means nothing" in record.message]
    assert len(told) == (comm.rank == 0)
