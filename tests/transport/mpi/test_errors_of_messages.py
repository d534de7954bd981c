"""An error of MPI in a message, which comes when the process of another rank is gone."""

import numpy as np
import pytest
from support.ranks import Intracomm

from mpidist.errors import PeerFailedError
from mpidist.transport.mpi import communicator as module
from mpidist.transport.mpi.communicator import MpiCommunicator
from mpidist.transport.waiting import poll


# Not in the core, which runs with Open MPI: that cuts a message which does not fit, and says nothing.
@pytest.mark.ranks(1)
@pytest.mark.parametrize("is_told", [True, False], ids=["others tell the rank", "nobody knows"])
def test_error_of_mpi_becomes_the_loss_of_a_rank(
    comm: Intracomm, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """MPI finds the loss in a message before the rank looks at the processes of others, and names no rank."""
    monkeypatch.setattr(module, "NEWS_SECONDS", 60.0 if is_told else 0.01)
    own = comm.Split(comm.rank)
    communicator, number_of_looks = MpiCommunicator(own, "across_nodes"), 0

    def look() -> None:
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
def test_the_only_other_rank_is_named(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where one of two nodes has a single rank, and that is killed."""
    monkeypatch.setattr(module, "NEWS_SECONDS", 0.01)
    communicator = MpiCommunicator(comm.Dup(), "across_nodes")
    large, small = np.zeros(2), np.zeros(1)
    requests = communicator.receive(small, comm.rank, 5) + communicator.send(large, comm.rank, 5)
    with pytest.raises(PeerFailedError, match=rf"rank {1 - comm.rank} of the job, to which they go, was probably kil"):
        poll(lambda: communicator.test_all(requests), lambda: None)
    communicator.free()
