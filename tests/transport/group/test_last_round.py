"""How ranks wait for each other at the end of their programs, where some may be lost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from mpidist.transport.group.last_round import LastRound

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

pytestmark = [pytest.mark.core, pytest.mark.ranks(min=2)]


@pytest.mark.parametrize("seconds", [0.0, 0.3], ids=["before", "in the round"])
def test_a_rank_that_alone_knows_of_a_loss_does_not_go_silently(comm: Intracomm, seconds: float) -> None:
    """Else those of other nodes, which cannot see the process, would wait for ever."""
    lost, knows, own, begun = comm.size - 1, max(0, comm.size - 2), comm.Dup(), time.monotonic()
    text = None

    def gone() -> list[int]:
        sees = comm.rank == knows or time.monotonic() > begun + 2  # so that this test ends
        return [lost] if sees and time.monotonic() >= begun + seconds else []

    if comm.rank != lost:
        text = LastRound(own, gone).wait()
    took = time.monotonic() - begun
    comm.Barrier()
    if comm.rank == lost:  # nothing stays under way
        LastRound(own, list).wait()
    texts, times = comm.allgather(text), comm.allgather(took)
    told = f"the process of rank {lost} of {comm.size} ranks was lost before; all others are done"
    assert (texts[knows] == told) == (seconds > 0 or knows == 0)
    assert texts[0] == told
    assert times[knows] < 1.8
    if not seconds:
        assert max(times) < 1.8, "who has come later was told"


def test_the_lowest_rank_that_is_done_tells_once_whom_it_waits_for(comm: Intracomm) -> None:
    own, lines = comm.Dup(), list[str]()
    if comm.rank == 0:
        time.sleep(0.5)
    assert LastRound(own, list, 0.1, lines.append).wait() is None
    told = comm.allgather(lines)
    text = f"has come to its end, and has waited 0.1 s for rank 0 of {comm.size} ranks to come to theirs"
    assert told[1] == [f"{text}; it waits on while their processes live"]
    assert told[0] == []
    assert not any(told[2:])
    assert LastRound(own, list, 0.0, lines.append).wait() is None
    assert comm.allgather(lines) == told
