"""How ranks wait for each other at the end of their programs, where some may be lost."""

import time

import pytest

from mpidist.transport.group.exit_barrier import ExitBarrier

pytestmark = [pytest.mark.core, pytest.mark.ranks(min=2)]


class Losses:
    """Which ranks a rank finds gone: what it sees itself, or what another rank lets it see."""

    def __init__(self, comm, lost, knows, is_in_round):
        self._comm, self._lost, self._knows, self._is_in_round = comm, lost, knows, is_in_round
        self._num_calls = 0

    def __call__(self):
        self._num_calls += 1  # the first call comes before the messages, all others after them
        if self._comm.rank == self._knows:
            sees = self._num_calls > self._is_in_round
        else:
            sees = self._is_in_round and self._comm.Iprobe(self._knows)
        return [self._lost] if sees else []


@pytest.mark.ranks(min=3)
@pytest.mark.parametrize("is_in_round", [False, True], ids=["before", "in the round"])
def test_exit_barrier_spreads_a_loss_seen_by_one_rank(comm, is_in_round):
    """Else those of other nodes, which cannot see the process, would wait for ever; here they see it after that."""
    lost, knows, own = comm.size - 1, max(0, comm.size - 2), comm.Dup()
    text = None
    if comm.rank != lost:
        text = ExitBarrier(own, Losses(comm, lost, knows, is_in_round)).wait()
    if is_in_round and comm.rank == knows:
        for other in range(knows):
            comm.send(None, other)
    elif is_in_round and comm.rank < knows:
        comm.recv(source=knows)
    comm.Barrier()
    if comm.rank == lost:  # nothing stays under way
        ExitBarrier(own, list).wait()
    texts = comm.allgather(text)
    told = f"the process of rank {lost} of {comm.size} ranks was lost before; all others are done"
    assert (texts[knows] == told) == (is_in_round or knows == 0)
    assert texts[0] == told
    assert None not in texts[:lost]  # which would go on to MPI_Finalize


class Clock:
    """Stands still until rank 0 has heard of all ranks that their messages are on their way; then the time is over."""

    def __init__(self, comm):
        self._comm, self._num_calls, self._now = comm, 0, 0.0

    def monotonic(self):
        self._num_calls += 1
        if self._num_calls == 2:  # the first one in the round
            self._comm.send(None, 0)
        if not self._now and self._comm.Iprobe(0):
            self._comm.recv(source=0)
            self._now = 1.0
        return self._now


def test_exit_barrier_logs_awaited_ranks_once_on_the_lowest_rank(comm, monkeypatch):
    own, lines = comm.Dup(), list[str]()
    others = range(1, comm.size)

    def tell(line):
        lines.append(line)
        if comm.rank == 1:
            comm.send(None, 0, 1)

    with monkeypatch.context() as patch:
        if comm.rank:
            patch.setattr("mpidist.transport.group.exit_barrier.time", Clock(comm))
        else:
            for other in others:
                comm.recv(source=other, tag=0)
            for other in others:
                comm.send(None, other)
            comm.recv(source=1, tag=1)
            time.sleep(0.2)  # in which others might tell, too
        assert ExitBarrier(own, list, 0.1 if comm.rank else 0.0, tell).wait() is None
    told = comm.allgather(lines)
    text = f"has come to its end, and has waited 0.1 s for rank 0 of {comm.size} ranks to come there"
    assert told[1] == [f"{text}; it waits on while their processes live"]
    assert told[0] == []
    assert not any(told[2:])
    assert ExitBarrier(own, list, 0.0, lines.append).wait() is None
    assert comm.allgather(lines) == told
