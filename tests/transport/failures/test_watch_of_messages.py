"""A watchdog without lock step: a rank waits for any message, and the rank that should send it is late, or gone."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from jobs.faults import BLOCKS, Job, Placement, job, of_others, on
from support.agreements import warnings_of
from support.any_message import Mailbox
from transport.failures.clocks import LONG_SECONDS, Clock, clock, come_late, wait_for_late_rank

from mpidist.errors import DeadlineExceededError, PeerFailedError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["clock", "job"]

pytestmark = pytest.mark.core

several = pytest.mark.ranks(3)


def mailbox_of(comm: Intracomm, *ranks: int, timeout: float | None = None, stall_seconds: float = 0.0) -> Mailbox:
    return Mailbox(comm, [0] * comm.size, ranks, timeout, stall_seconds)


@several
def test_messages_of_any_number_come_in_any_order(comm: Intracomm) -> None:
    """Nobody counts them: one rank sends many, another one none."""
    mailbox = mailbox_of(comm, *range(1, comm.size), timeout=600.0)
    if comm.rank == 0:
        received = [mailbox.receive() for _ in range(3 * (comm.size - 1))]
        assert sorted(received) == sorted((rank, number) for rank in range(1, comm.size) for number in range(3))
    else:
        for number in range(3):
            time.sleep(0.01)
            mailbox.send((comm.rank, number), 0)


@several
def test_silent_rank_ends_the_wait_at_the_deadline(comm: Intracomm) -> None:
    mailbox = mailbox_of(comm, comm.size - 1, timeout=0.2)
    if comm.rank == 0:
        last = comm.size - 1
        late = (
            rf"rank {last} of {comm.size} ranks has sent nothing\. Start the job again\n  rank {last}: has made no call"
        )
        with pytest.raises(DeadlineExceededError, match=rf"^receive\(\) on rank 0 waited 0.2 s, and {late}"):
            mailbox.receive()
        assert isinstance(mailbox.watchdog.broken, DeadlineExceededError)
    comm.Barrier()


@several
def test_every_wait_has_its_own_deadline(comm: Intracomm, clock: Clock) -> None:
    mailbox = mailbox_of(comm, comm.size - 1, timeout=1.5 * LONG_SECONDS)
    for number in range(3):
        if comm.rank == comm.size - 1:
            comm.recv(source=0)
            mailbox.send(number, 0)
        elif comm.rank == 0:
            clock.go_on_in_wait(lambda: comm.send(None, comm.size - 1))
            assert mailbox.receive() == number


@several
def test_long_wait_is_told_once(comm: Intracomm, caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    last = comm.size - 1
    mailbox = mailbox_of(comm, last, stall_seconds=LONG_SECONDS / 2)
    if comm.rank < last:
        wait_for_late_rank(clock, comm, last, lambda: comm.rank > 0 or bool(warnings_of(caplog)))
        assert mailbox.receive() == "late"
    if comm.rank == 0:
        (line,) = warnings_of(caplog)
        assert re.match(r"mpidist: receive\(\) on rank 0 has waited for 1\d\d\d s, and ", line)
        assert f"rank {last} of {comm.size} ranks has sent nothing; rank {last}: has made no call yet" in line
    elif comm.rank == last:
        come_late(comm)
        for other in range(last):
            mailbox.send("late", other)
        assert warnings_of(caplog) == []


@several
def test_failed_program_of_an_awaited_rank_ends_the_wait(comm: Intracomm) -> None:
    mailbox = mailbox_of(comm, comm.size - 1)
    if comm.rank == comm.size - 1:
        mailbox.watchdog.tell_end("KeyError: 'mine'")
    elif comm.rank == 0:
        reason = rf"receive\(\) on rank 0 cannot complete: rank {comm.size - 1} ended: KeyError: 'mine'"
        with pytest.raises(PeerFailedError, match=reason):
            mailbox.receive()
    comm.Barrier()


@several
def test_failed_program_of_another_rank_does_not(comm: Intracomm) -> None:
    mailbox = mailbox_of(comm, comm.size - 1, timeout=600.0)
    if comm.rank == 1:
        mailbox.watchdog.tell_end("KeyError: 'mine'")
    comm.Barrier()
    if comm.rank == comm.size - 1:
        time.sleep(0.2)
        mailbox.send("here", 0)
    elif comm.rank == 0:
        assert mailbox.receive() == "here"
    comm.Barrier()


WAITS = """
sys.path.insert(0, os.environ["TESTS"])
from mpi4py import MPI
from support.any_message import Mailbox
mailbox = Mailbox(MPI.COMM_WORLD, json.loads(os.environ["NODES"]), [faulty], {timeout})
if is_faulty:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.{signal})
attempt("receive", mailbox.receive)
"""


@pytest.mark.no_mpi
@on(BLOCKS)
def test_killed_rank_ends_the_wait_at_once_without_a_deadline(job: Job, placement: Placement) -> None:
    """On other nodes, too: ranks of the node of the killed one tell them."""
    nodes, tests = str([*placement.nodes]), str(Path(__file__).parents[2])
    ended = job(WAITS.format(timeout=None, signal="SIGKILL"), placement, is_blind=True, NODES=nodes, TESTS=tests)
    gone = rf"the process of rank {placement.faulty} of {placement.size} ranks is gone"
    for note in of_others(ended, "receive", placement):
        assert note.kind == "PeerFailedError", note
        assert re.search(rf"^receive\(\) on rank {note.rank} cannot complete: .*{gone}", note.text), note
