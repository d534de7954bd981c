"""What goes through shared memory between the workers and the servers of a node, and what through messages."""

import contextlib
import errno
import logging
import os
import random
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pytest
from parameter_server.clusters import num_workers, on_workers, worker_test

from mpidist import IndexedSlices, Variable
from mpidist.context_stack import parts_of
from mpidist.errors import PeerFailedError, UnavailableError
from mpidist.experimental import ParameterServerStrategy, server_rules
from mpidist.parameter_server.cluster import Role
from mpidist.parameter_server.messages.ends import Channel
from mpidist.parameter_server.messages.lane import LANE_BYTES, NUM_SLOTS, Lane
from mpidist.transport.group.service_group import ServiceGroup
from mpidist.transport.native.loading import native
from mpidist.transport.node_memory import barrier
from mpidist.transport.node_memory.arena import SharedArena

SIZES = (3_000_000, 100_000, 17, 20_000)  # of float32 numbers: several chunks, one that is read in place, small ones


@pytest.mark.no_mpi
def test_lane_keeps_order_both_ways():
    """Whoever is late: no more slots are filled than there are, and none is taken that was not sent."""
    memory = np.zeros(LANE_BYTES, np.uint8)
    ends = [Lane(memory, end, memory, None) for end in (0, 1)]
    chance = random.Random(5)
    for giver, taker in (ends, ends[::-1], ends):
        sent, taken = [], []
        while len(taken) < 50:
            if chance.random() < 0.5 and len(sent) < 50:
                assert giver.can_send() == (len(sent) - len(taken) < NUM_SLOTS)
                if giver.can_send():
                    number = chance.randrange(1, 200)
                    giver.slot()[:number] = number
                    giver.send(number)
                    sent.append(number)
            else:
                assert taker.can_take() == (len(taken) < len(sent))
                if taker.can_take():
                    slot = taker.sent_slot()
                    assert (slot == slot.size).all()
                    taken.append(slot.size)
                    taker.take()
                    assert giver.num_taken() >= len(taken)
        assert sent == taken


class Counting:
    """A communicator that counts the bytes of what it sends."""

    def __init__(self, comm):
        self.comm, self.sent = comm, 0

    def Isend(self, message, rank, tag):  # noqa: N802
        self.sent += message[1] if len(message) == 3 else message[0].nbytes
        return self.comm.Isend(message, rank, tag)

    def __getattr__(self, name):
        return getattr(self.comm, name)


def bytes_of_messages(comm, monkeypatch):
    """Return how many bytes all ranks send for pushes and pulls of large variables, and how many those have."""
    counts = []
    really = ServiceGroup.from_mpi

    def from_mpi(*args):
        group = really(*args)
        if group is not None:
            counts.append(Counting(group.comm))
            group.comm = counts[0]
        return group

    monkeypatch.setattr(ServiceGroup, "from_mpi", from_mpi)
    on_workers(comm, push_and_pull)
    sent = sum(comm.allgather(sum(one.sent for one in counts)))
    return sent, 2 * num_workers(comm) * 2 * 4 * sum(SIZES)


def push_and_pull(strategy):
    with strategy.scope():
        variables = [Variable(np.zeros(size, np.float32)) for size in SIZES]
        table = Variable(
            np.full((5000, 40), 100.0)
        )  # and not as the others, which are where the server's memory begins
    for number in (1, 2):
        strategy.push(variables, [np.ones(size, np.float32) for size in SIZES])
        table.scatter_add(IndexedSlices(np.ones((4000, 40)), np.arange(4000)))
        assert table.sparse_read(np.arange(3000)[::-1]).min() >= 100 + number
        assert all(value.min() >= number for value in strategy.read(variables))
        assert variables[0].numpy().min() >= number
    strategy.barrier()
    for value in [*strategy.read(variables), table.numpy()[:4000] - 100]:
        assert (value == 2 * strategy.topology.size).all()


@server_rules.register("fails if there are many")
def fails_if_there_are_many(value, gradient, memory):
    if value.size > 1000:
        raise ValueError(f"too many: {value.size}")
    value += gradient


def push_and_wait(strategy, variables, rule):
    strategy.push(variables, [1.0] * len(variables), rule)
    strategy.flush()


@pytest.mark.ranks(1, 3)
@pytest.mark.core
@worker_test()
def test_lane_works_after_a_failed_push(strategy):
    """All of its data is taken, and the next push is made."""
    size = 2_000_000
    with strategy.scope():
        variables = [Variable(np.zeros(count, np.float32)) for count in (size, 10, size, 300)]
    for _ in range(3):
        with pytest.raises((RuntimeError, ValueError), match=f"too many: {size}"):  # a rank alone is the server
            push_and_wait(strategy, variables, server_rules.Registered("fails if there are many"))
    strategy.push(variables, [1.0] * 4)
    for value in strategy.read(variables):
        assert (value == value[0]).all()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("is_read", [False, True])
def test_interrupted_request_breaks_the_channel(comm, monkeypatch, is_read):
    """Ctrl-C comes while a chunk is copied."""
    really, calls = Lane.take if is_read else Lane.slot, [0]

    def interrupted(lane):
        calls[0] += 1
        if calls[0] == 2:
            raise KeyboardInterrupt
        return really(lane)

    def program(strategy):
        if strategy.is_ps:
            strategy.serve()
        with strategy.scope():
            variables = [Variable(np.zeros(1_000_000, np.float32)) for _ in range(3)]
        strategy.barrier()
        monkeypatch.setattr(Lane, "take" if is_read else "slot", interrupted)
        with pytest.raises(KeyboardInterrupt):
            strategy.read(variables) if is_read else strategy.push(variables, [1.0] * 3)
        with pytest.raises((UnavailableError, PeerFailedError), match=r"interrupted|left"):
            variables[0].assign_add(1.0)
        raise KeyError("mine")

    kinds = PeerFailedError if comm.rank == comm.size - 1 else (KeyError, PeerFailedError)
    with pytest.raises(kinds), ParameterServerStrategy(comm=comm) as strategy:
        program(strategy)


@pytest.mark.ranks(3)
def test_data_that_an_interrupted_read_has_left_is_not_taken_by_the_next_one(comm, monkeypatch):
    """Ctrl-C comes while two servers send."""

    really = Channel.finish

    def interrupted(channel, more_seconds=0.0, arrays=(), *of, **most):
        if arrays:
            raise KeyboardInterrupt
        really(channel, more_seconds, arrays, *of, **most)

    def program(strategy):
        if strategy.is_ps:
            strategy.serve()
        with strategy.scope():
            variables = [Variable(np.full(100_000, float(number))) for number in range(4)]
            others = variables[2:], variables[:2]
        strategy.flush()
        assert len(strategy.read(variables)) == 4  # which numbers the lists
        monkeypatch.setattr(Channel, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            strategy.read(variables)
        monkeypatch.undo()
        for pair in others:
            with pytest.raises((UnavailableError, PeerFailedError), match=r"interrupted|left"):
                strategy.read(pair)
        raise KeyError("mine")

    kinds = (KeyError, PeerFailedError) if comm.rank == 0 else PeerFailedError
    with pytest.raises(kinds), ParameterServerStrategy(num_ps=2, comm=comm) as strategy:
        program(strategy)


@pytest.mark.core
@pytest.mark.ranks(3)
@pytest.mark.parametrize("why", ["", "memory is full", "MPIDIST_TRANSPORT", "MPIDIST_PRETEND_NODES"])
def test_lane_carries_gradients_in_a_node_and_mpi_elsewhere(comm, monkeypatch, why):
    """Variables for which a container's memory, which is soon full, has no place go through the slots."""
    really, has_room = SharedArena.take, cycle((True, False))
    if why == "memory is full":

        def take(arena, nbytes):
            return really(arena, nbytes) if next(has_room) else None

        monkeypatch.setattr(SharedArena, "take", take)
    elif why:
        nodes = ",".join(["0"] * (comm.size - 1) + ["1"])
        monkeypatch.setenv(why, "mpi" if why == "MPIDIST_TRANSPORT" else nodes)
    sent, data = bytes_of_messages(comm, monkeypatch)
    assert sent > data if why.startswith("MPIDIST") else sent < 100_000 < data


@pytest.mark.ranks(3)
@pytest.mark.parametrize("transport", ["auto", "shared_memory"])
def test_without_any_shared_memory(comm, monkeypatch, caplog, transport):
    """The same on all ranks, also if one alone finds it out."""

    really = os.posix_fallocate

    def fail(file, start, nbytes):
        if nbytes >= LANE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        really(file, start, nbytes)

    monkeypatch.setenv("MPIDIST_TRANSPORT", transport)
    if comm.rank == 0:
        monkeypatch.setattr(os, "posix_fallocate", fail)
    if transport == "shared_memory":
        with pytest.raises(UnavailableError, match=r"MPIDIST_TRANSPORT=shared_memory cannot be followed: rank 0: "):
            ParameterServerStrategy(comm=comm)
        return
    with caplog.at_level(logging.WARNING, logger="mpidist"):
        sent, data = bytes_of_messages(comm, monkeypatch)
    assert sent > data
    assert ("which is slower: rank 0: " in caplog.text) == (comm.rank == 0)


@pytest.mark.ranks(3)
@pytest.mark.skipif(native is None, reason="the compiled part is left out: MPIDIST_NATIVE=0, or no compiler")
def test_large_arrays_are_written_past_the_caches_where_that_takes_less(comm, monkeypatch):
    """To write into lines that a core without a common cache holds takes up to six times as long."""
    written = []

    def make(*args):
        made = native.Barrier(*args)
        made.forced_way = 1

        def copy(into, source):
            written.append(source.nbytes)
            return made.copy(into, source)

        return SimpleNamespace(copy=copy)

    monkeypatch.setattr(barrier, "native", SimpleNamespace(Barrier=make))
    on_workers(comm, push_and_pull)
    pushed, read = 2 * 4 * sum(SIZES[:2]), 2 * 8 * 3000 * 40  # by each worker; rows of the table by all
    assert sum(written) > (pushed if comm.rank < num_workers(comm) else read)


def shared_files():
    """The open files of shared memory."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own file is closed
            if "/dev/shm/mpidist-" in os.readlink(f"/proc/self/fd/{name}"):
                found.append(int(name))
    return found


@pytest.mark.ranks(3)
@pytest.mark.core
@pytest.mark.parametrize(("when_lost", "leaves"), [("abort", False), ("ignore", True)], ids=["all end", "one leaves"])
def test_ended_strategies_hold_no_shared_memory_and_no_files(comm, when_lost, leaves):
    """Also where the others go on without a worker that has left, by an exception that it has caught."""
    num_files = []
    for _ in range(3):
        comm.Barrier()
        num_files.append(len(os.listdir("/proc/self/fd")))
        file = -1
        with contextlib.suppress(KeyError), ParameterServerStrategy(comm=comm, on_worker_lost=when_lost) as strategy:
            role = parts_of(strategy).peers
            assert isinstance(role, Role)
            if role.group is not None and role.group.arena is not None:
                file = os.dup(max(shared_files()))
            if strategy.is_ps:
                strategy.serve()
            else:
                with strategy.scope():
                    variable = Variable(np.zeros(1_000_000))
                variable.assign_add(np.ones(1_000_000))
                assert variable.numpy().max() > 0
                strategy.barrier()
                if leaves and comm.rank == 1:
                    raise KeyError("mine")
        comm.Barrier()
        if file >= 0:
            held = os.fstat(file).st_blocks * 512
            os.close(file)
            assert held <= leaves * 2 * LANE_BYTES, "what a worker has sent before it left, the server may still take"
    assert num_files[1] == num_files[2]
