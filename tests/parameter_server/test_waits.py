"""How long requests may take, which thread makes them, and what is told of the ranks that others wait for."""

import logging
import re
import threading
import time
from contextlib import contextmanager

import pytest
from parameter_server.clusters import PATIENT, deadline_of, meet, on_workers, set_deadline_of_meetings, worker_test
from support.deadlines import recorded_seconds
from transport.failures.clocks import clock

from mpidist import Variable
from mpidist.context_stack import parts_of
from mpidist.errors import DeadlineExceededError, PeerFailedError, UnavailableError
from mpidist.experimental import ParameterServerStrategy, server_rules
from mpidist.parameter_server.cluster import Role
from mpidist.transport.failures.awaited_peers import AwaitedPeers

__all__ = ["clock"]

HERE = {}  # what a rule of this rank finds


@pytest.mark.ranks(3)
@pytest.mark.core
@worker_test(communication_options=PATIENT)
def test_deadline_of_a_call_of_all_workers_comes_to_the_first_that_waits_and_not_early(strategy, comm):
    """The others that wait with it are told whose it was; afterwards the strategy works: reset() has nothing to do."""
    workers = comm.Create_group(comm.Get_group().Excl([comm.size - 1]))
    with strategy.scope():
        variable = Variable(0.0)
    if strategy.is_chief:
        set_deadline_of_meetings(strategy, variable, 1.0)
    workers.Barrier()
    if not strategy.is_chief:
        time.sleep(0.1 * comm.rank)  # so that they come one after the other
        with pytest.raises(DeadlineExceededError, match=r"ranks? 0.* did not .*longer timeout_seconds") as caught:
            strategy.barrier()
        text = str(caught.value)
        told = re.match(rf"barrier\(\) of rank {comm.rank} cannot complete: rank (\d) waited 1 s, and", text)
        assert told, text
        assert int(told[1]) != comm.rank or recorded_seconds(strategy) >= 1
        assert "rank 0: finished " in text
        strategy.reset()
    meet(workers)
    if strategy.is_chief:
        set_deadline_of_meetings(strategy, variable, 600.0)
    meet(workers)
    variable.assign_add(1.0)
    strategy.barrier()
    assert float(variable) == strategy.topology.size


@pytest.mark.ranks(1, 3)
@pytest.mark.core
@worker_test()
def test_one_thread_makes_the_requests(strategy):
    """As in the other strategies: another one is refused as long as the first one lives, and later takes over."""
    with strategy.scope():
        variable = Variable(0.0)
    has_called, is_over, errors = threading.Event(), threading.Event(), []

    def first():
        try:
            variable.assign_add(1.0)
        except Exception as error:
            errors.append(error)
        has_called.set()
        is_over.wait()

    thread = threading.Thread(target=first, name="first")
    thread.start()
    has_called.wait()
    assert not errors
    calls = [variable.numpy, lambda: variable.assign_add(1.0)]
    if strategy.topology.size > 1:  # one rank alone waits for nothing
        calls += [strategy.flush, strategy.barrier, strategy.close]
    for call in calls:
        with pytest.raises(RuntimeError, match="but thread 'first' makes this strategy's calls"):
            call()
    is_over.set()
    thread.join()
    strategy.barrier()
    assert float(variable) == strategy.topology.size


@pytest.mark.ranks(3)
@worker_test()
def test_status_of_a_server_names_its_last_request(strategy, comm):
    with strategy.scope():
        variable = Variable(0.0)
    role, server = parts_of(strategy).peers, comm.size - 1
    assert isinstance(role, Role)
    assert role.group is not None
    text = ""
    while " requests, the last one of worker 0, rank 0)" not in text:
        if strategy.is_chief:
            variable.numpy()
        time.sleep(0.01)
        (text,) = role.group.membership.status_lines([server])
    start = f"rank {server}: is in the middle of serve() (parameter server 0 (rank {server}): "
    assert text.startswith(start)
    strategy.barrier()


@server_rules.register("sleeps")
def sleeps(value, gradient, memory):
    while not HERE["comm"].Iprobe(0):
        time.sleep(0.01)


@pytest.mark.ranks(3)
@pytest.mark.core
def test_worker_that_has_caught_its_deadline_and_ends_keeps_nobody(comm):
    """The server that did not answer it in time learns of it, and so do the other workers."""
    HERE["comm"], error = comm, None
    try:
        with ParameterServerStrategy(comm=comm, communication_options=PATIENT) as strategy:
            if strategy.is_ps:
                strategy.serve()
            else:
                with strategy.scope():
                    variable = Variable(0.0)
                if strategy.is_chief:
                    strategy.push(variable, 1.0, server_rules.Registered("sleeps"))
                    with (
                        deadline_of(strategy, 0.3),
                        pytest.raises(UnavailableError, match=r"parameter server 0 .* is lost.*waited 0.3 s"),
                    ):
                        variable.numpy()
    except (PeerFailedError, UnavailableError) as caught:
        error = caught
    if comm.rank == 0:  # which has left
        comm.send(None, comm.size - 1)
    elif comm.rank == comm.size - 1:
        comm.recv(source=0)
    seen = comm.allgather(type(error).__name__)
    *others, server = seen[1:]
    assert (seen[0], server) == ("NoneType", "PeerFailedError")
    assert set(others) <= {"UnavailableError", "NoneType"}  # some may have ended before


@server_rules.register("takes a moment")
def take_a_moment(value, gradient, memory):
    time.sleep(0.05)


@pytest.mark.ranks(3)
@worker_test(communication_options=PATIENT)
def test_deadline_of_a_request_is_its_own(strategy, clock):
    with strategy.scope():
        variable = Variable(0.0)
    for _ in range(3):
        clock.go_on(400.0)
        strategy.push(variable, 1.0, server_rules.Registered("takes a moment"))
        strategy.flush()


@server_rules.register("is_away")
def is_away(value, gradient, memory):
    for rank in range(1, HERE["comm"].size - 1):
        while not HERE["comm"].Iprobe(rank):
            time.sleep(0.01)


@pytest.mark.ranks(3)
def test_lost_server_stays_lost_after_its_finder_ends_by_another_error(comm):
    """The worker has caught that error, and ends with one of its own, in other words."""
    HERE["comm"], error, is_ps = comm, None, False
    try:
        with ParameterServerStrategy(comm=comm, communication_options=PATIENT) as strategy:
            is_ps = strategy.is_ps
            if is_ps:
                strategy.serve()
            else:
                with strategy.scope():
                    variable = Variable(0.0)
                if strategy.is_chief:
                    strategy.push(variable, 1.0, server_rules.Registered("is_away"))
                    with deadline_of(strategy, 0.3), pytest.raises(UnavailableError, match=r"waited 0.3 s"):
                        variable.numpy()
                    raise KeyError("mine")
                while True:
                    variable.numpy()
    except (KeyError, PeerFailedError, UnavailableError) as caught:
        error = caught
    if is_ps:
        for rank in range(1, comm.rank):
            comm.recv(source=rank)
    elif comm.rank > 0:  # the server may go on
        comm.send(None, comm.size - 1)
    seen = comm.allgather((type(error).__name__, str(error)))
    assert seen[0][0] == "KeyError"
    for kind, text in seen[1:-1]:
        assert kind == "UnavailableError", text
        assert "is lost, with the variables on it" in text
        assert "rank 0 left because of an exception: KeyError: 'mine'" in text
    assert seen[-1][0] == "PeerFailedError"


@pytest.mark.ranks(3)
def test_exception_of_a_worker_ends_the_waits_of_the_others(comm):
    def work(strategy):
        with strategy.scope():
            variable = Variable(0.0)
        if not strategy.is_chief:
            raise KeyError("mine")
        while True:
            variable.numpy()

    left = "rank 1 left because of an exception: KeyError: 'mine'"
    with pytest.raises(KeyError if comm.rank == 1 else PeerFailedError, match="mine" if comm.rank == 1 else left):
        on_workers(comm, work)


class Tells(logging.Handler):
    """Tells a rank of a warning with a certain text."""

    def __init__(self, comm, pattern, to=0):
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self._comm, self._to, self._pattern, self._sends = comm, to, re.compile(pattern), []

    def emit(self, record):
        text = record.getMessage()
        self.texts.append(text)
        if self._pattern.match(text):
            self._sends.append(self._comm.isend(text, self._to))


@contextmanager
def told(comm, pattern, to=0):
    """Tell a rank of warnings in the body."""
    tells, ours = Tells(comm, pattern, to), logging.getLogger("mpidist")
    ours.addHandler(tells)
    try:
        yield tells
    finally:
        ours.removeHandler(tells)


def meet_message(comm, source):
    """Wait for a message, and leave the cores to others."""
    while not comm.iprobe(source):
        time.sleep(0.01)
    comm.recv(source=source)


LATE = {
    "barrier": r"barrier\(\) of rank 1 has waited for \d+ s, and rank 0 did not make this call, which all workers .*",
    "read": r"a read of rank 1 has waited for \d+ s, and rank 0 had done 0 steps, and rank 1 had done 1, which is .*",
    "close": r"close\(\) of rank 1 has waited for \d+ s, and rank 0 did not close the strategy",
}


@pytest.mark.ranks(3)
@pytest.mark.core
@pytest.mark.parametrize("call", LATE)
def test_server_warns_of_late_workers(comm, monkeypatch, call):
    """And the worker that waits does not warn of the server, which answers it."""
    monkeypatch.setenv("MPIDIST_STALL_SECONDS", "0.3")

    def work(strategy):
        with strategy.scope():
            variable = Variable(0.0)
        if strategy.is_chief:
            meet_message(comm, 2)
            strategy.step_done()
        elif call == "read":
            strategy.step_done()
            variable.numpy()
        if call == "barrier":
            strategy.barrier()

    with told(comm, f"mpidist: {LATE[call]}; rank 0: ") as tells:
        on_workers(comm, work, staleness=0 if call == "read" else None)
    waited = [text for text in tells.texts if re.match(f"mpidist: ({call}|read).* at parameter server", text)]
    assert waited == []


@server_rules.register("waits for a warning")
def wait_for_a_warning(value, gradient, memory):
    meet_message(HERE["comm"], 1)
    value += 1


@pytest.mark.ranks(3)
@pytest.mark.core
def test_worker_warns_of_a_server_in_a_long_rule(comm, monkeypatch):
    """The server cannot warn meanwhile."""
    monkeypatch.setenv("MPIDIST_STALL_SECONDS", "0.3")
    monkeypatch.setattr(AwaitedPeers, "busy_seconds", 0.3)
    monkeypatch.setitem(HERE, "comm", comm)
    text = r"mpidist: barrier\(\) at parameter server 0 .*on rank 1 has waited for .*rank 2 .*does not answer"

    def work(strategy):
        with strategy.scope():
            variable = Variable(0.0)
        if strategy.is_chief:
            strategy.push(variable, 1.0, server_rules.Registered("waits for a warning"))
            strategy.flush()
        strategy.barrier()
        assert float(variable) == 1

    with told(comm, text, to=2):
        on_workers(comm, work)
