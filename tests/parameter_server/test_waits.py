"""How long requests may take, which thread makes them, and what is told of the ranks that others wait for."""

from __future__ import annotations

import logging
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from parameter_server.clusters import PATIENT, deadline_of, meet, on_workers
from support.everywhere import raises_everywhere

from mpidist import CommunicationOptions, Variable
from mpidist.errors import DeadlineExceededError, InvalidArgumentError, PeerFailedError, UnavailableError
from mpidist.experimental import ParameterServerStrategy, server_rules
from mpidist.parameter_server import Role

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

HERE: dict[str, Any] = {}  # what a rule of this rank finds


@pytest.mark.ranks(min=3)
@pytest.mark.core
def test_a_strategy_has_a_deadline_of_its_own(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes before that of the environment; afterwards the strategy works, and reset() has nothing to do."""
    monkeypatch.setenv("MPIDIST_TIMEOUT_SECONDS", "60")
    workers = comm.Split(int(comm.rank == comm.size - 1), comm.rank)

    def work(strategy: ParameterServerStrategy) -> None:
        with strategy.scope():
            variable = Variable(0.0)
        if strategy.is_chief:
            variable.numpy()
        workers.Barrier()
        if not strategy.is_chief:
            begun = time.monotonic()
            with pytest.raises(
                DeadlineExceededError,
                match=rf"^barrier\(\) of rank {comm.rank} waited 3 s, and .*rank 0 did not .*longer timeout_seconds",
            ) as caught:
                strategy.barrier()
            assert 3 <= time.monotonic() - begun < 30
            assert "rank 0: finished read of" in str(caught.value)
            strategy.reset()
        meet(workers)
        variable.assign_add(1.0)
        strategy.barrier()
        assert float(variable) == strategy.topology.size

    on_workers(comm, work, communication_options=CommunicationOptions(timeout_seconds=3))


def test_deadlines_that_differ_are_refused(comm: Intracomm) -> None:
    options = CommunicationOptions(timeout_seconds=1 + comm.rank % 2)
    if comm.size > 1:
        with raises_everywhere(comm, InvalidArgumentError, "timeout_seconds must be the same on all ranks"):
            ParameterServerStrategy(comm=comm, communication_options=options)
    with raises_everywhere(comm, TypeError, "communication_options must be CommunicationOptions, got float"):
        ParameterServerStrategy(comm=comm, communication_options=3.0)  # type: ignore[arg-type]


@pytest.mark.ranks(min=2)
@pytest.mark.core
def test_one_thread_makes_the_requests(comm: Intracomm) -> None:
    """As in the other strategies: another one is refused as long as the first one lives, and later takes over."""

    def work(strategy: ParameterServerStrategy) -> None:
        with strategy.scope():
            variable = Variable(0.0)
        has_called, is_over = threading.Event(), threading.Event()

        def first() -> None:
            variable.assign_add(1.0)
            has_called.set()
            is_over.wait(10)

        thread = threading.Thread(target=first, name="first")
        thread.start()
        has_called.wait(10)
        for call in (variable.numpy, strategy.flush, strategy.barrier, strategy.close):
            with pytest.raises(RuntimeError, match="but thread 'first' makes this strategy's calls"):
                call()
        is_over.set()
        thread.join()
        strategy.barrier()
        assert float(variable) == strategy.topology.size

    on_workers(comm, work)


@pytest.mark.ranks(min=2)
def test_others_see_what_a_server_serves(comm: Intracomm) -> None:
    def work(strategy: ParameterServerStrategy) -> None:
        with strategy.scope():
            variable = Variable(0.0)
        role, server = strategy.extended.service, comm.size - 1
        assert isinstance(role, Role)
        assert role.group is not None
        until = time.monotonic() + 5
        text = ""
        while " requests, the last one of worker 0, rank 0)" not in text and time.monotonic() < until:
            if strategy.is_chief:
                variable.numpy()
            time.sleep(0.01)
            (text,) = role.group.status_lines([server])
        start = f"rank {server}: is in the middle of serve() (parameter server 0 (rank {server}): "
        assert text.startswith(start)
        assert " requests, the last one of worker 0, rank 0)" in text
        strategy.barrier()

    on_workers(comm, work)


@server_rules.register("sleeps")
def sleeps(value: Any, gradient: Any, memory: dict[str, Any]) -> None:
    while not HERE["comm"].Iprobe(0):
        time.sleep(0.01)


@pytest.mark.ranks(min=2)
@pytest.mark.core
def test_worker_that_has_caught_its_deadline_and_ends_keeps_nobody(comm: Intracomm) -> None:
    """The server that did not answer it in time learns of it, and so do the other workers."""
    HERE["comm"], begun, error = comm, time.monotonic(), None
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
    assert time.monotonic() - begun < 30


@server_rules.register("is_away")
def is_away(value: Any, gradient: Any, memory: dict[str, Any]) -> None:
    for rank in range(1, HERE["comm"].size - 1):
        while not HERE["comm"].Iprobe(rank):
            time.sleep(0.01)


@pytest.mark.ranks(min=3)
def test_a_server_is_lost_for_all_workers_whatever_ends_the_one_that_has_found_it(comm: Intracomm) -> None:
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


class Tells(logging.Handler):
    """Tells rank 0 of a warning with a certain text."""

    def __init__(self, comm: Intracomm, pattern: str) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self._comm, self._pattern, self._sends = comm, re.compile(pattern), []  # type: ignore[var-annotated]

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.texts.append(text)
        if self._pattern.match(text):
            self._sends.append(self._comm.isend(text, 0))


LATE = {
    "barrier": r"barrier\(\) of rank 1 has waited for 0 s, and rank 0 did not make this call, which all workers .*",
    "read": "a read of rank 1 has waited for 0 s, and rank 0 had done 0 steps, and rank 1 had done 1, which is .*",
    "close": r"close\(\) of rank 1 has waited for 0 s, and rank 0 did not close the strategy",
}


@pytest.mark.ranks(3)
@pytest.mark.core
@pytest.mark.parametrize("call", LATE)
def test_the_server_warns_of_late_workers(comm: Intracomm, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """And the worker that waits does not warn of the server, which answers it."""
    monkeypatch.setenv("MPIDIST_STALL_SECONDS", "0.3")
    tells, ours = Tells(comm, f"mpidist: {LATE[call]}; rank 0: "), logging.getLogger("mpidist")
    ours.addHandler(tells)

    def work(strategy: ParameterServerStrategy) -> None:
        with strategy.scope():
            variable = Variable(0.0)
        if strategy.is_chief:
            until = time.monotonic() + 40
            while not comm.iprobe(2) and time.monotonic() < until:
                time.sleep(0.01)
            assert comm.iprobe(2), "the server did not warn"
            comm.recv(source=2)
            strategy.step_done()
        elif call == "read":
            strategy.step_done()
            variable.numpy()
        if call == "barrier":
            strategy.barrier()

    try:
        on_workers(comm, work, staleness=0 if call == "read" else None)
    finally:
        ours.removeHandler(tells)
    waited = [text for text in tells.texts if re.match(f"mpidist: ({call}|read).* at parameter server", text)]
    assert waited == []
