"""Coordinators whose chief or workers are lost, or late."""

import time

import numpy as np
import pytest
from jobs.faults import FOUR, THREE, job
from jobs.ulfm import HAS_ULFM, survivor
from parameter_server.clusters import PATIENT, deadline_of, on_workers, role_of

from mpidist import Variable
from mpidist.errors import DeadlineExceededError, PeerFailedError
from mpidist.experimental import server_rules
from mpidist.experimental.coordinator import ClusterCoordinator, register

__all__ = ["job", "survivor"]

HERE = {}  # what functions of this rank find


@register("losses: wait")
def wait(num_numbers=1):
    """Wait until the chief has sent rank 1, which is first to call a function, a message."""
    while not HERE["comm"].Iprobe(0):
        time.sleep(0.01)
    return np.ones(num_numbers)


@register("losses: push what is refused")
def push_what_is_refused(fails):
    """To a variable of each server."""
    for variable in HERE["variables"]:
        HERE["strategy"].push(variable, np.ones(2), server_rules.Registered("losses: refuse"))
    if fails:
        raise KeyError("mine")


@register("losses: add")
def add():
    for variable in HERE["variables"]:
        variable.assign_add(1.0)


@server_rules.register("losses: refuse")
def refuse(value, gradient, memory):
    raise ValueError("no such gradient")


class LeavesError(BaseException):
    """What ends a worker, and not its function alone."""


@pytest.mark.core
@pytest.mark.ranks(4)
def test_error_caused_by_another_one_keeps_its_cause_at_each_join(comm):
    """So that its traceback is not printed beside the other one, also where all workers have left before."""
    HERE["comm"], told = comm, list[PeerFailedError]()

    def work(strategy):
        coordinator = ClusterCoordinator(strategy)
        if comm.rank == 2:
            comm.recv(source=0)
            raise LeavesError("tired")
        if not strategy.is_chief:
            coordinator.serve()
        comm.send(None, 2)
        coordinator.schedule(wait)
        for _ in range(2):
            with pytest.raises(PeerFailedError, match="tired") as caught:
                coordinator.join()
            told.append(caught.value)
        comm.send(None, 1)
        raise told[1]

    with pytest.raises(LeavesError if comm.rank == 2 else PeerFailedError, match="tired"):
        on_workers(comm, work)
    if comm.rank == 0:
        assert "following" in vars(told[0])
        assert vars(told[1]) == vars(told[0])
    elif comm.rank == 1:
        comm.recv(source=0)


@pytest.mark.core
@pytest.mark.ranks(3)
def test_deadline_of_the_strategy_holds_for_functions(comm):
    """The chief's error ends the wait of the others."""
    HERE["comm"] = comm

    def work(strategy):
        coordinator = ClusterCoordinator(strategy)
        if not strategy.is_chief:
            coordinator.serve()
        coordinator.schedule(wait)
        join_until_the_deadline(comm, strategy, coordinator)

    late = r"join\(\) \(calls: 'losses: wait' on rank 1\).* waited 0.2 s"
    with pytest.raises(DeadlineExceededError if comm.rank == 0 else PeerFailedError, match=late):
        on_workers(comm, work, communication_options=PATIENT)
    if comm.rank == 1:
        comm.recv(source=0)


def join_until_the_deadline(comm, strategy, coordinator):
    """Wait in vain for the function `wait`, and let it end then."""
    try:
        with deadline_of(strategy, 0.2):
            coordinator.join()
    finally:
        comm.send(None, 1)


@pytest.mark.ranks(1, 3)
@pytest.mark.core
@pytest.mark.parametrize("on_worker_lost", ["abort", "ignore"])
def test_failed_push_is_an_error_of_its_own_function_alone(comm, on_worker_lost):
    def work(strategy):
        with strategy.scope():
            HERE.update(strategy=strategy, variables=[Variable(np.zeros(2)) for _ in range(2)])
        coordinator = ClusterCoordinator(strategy)
        if not strategy.is_chief:
            coordinator.serve()
            return
        for fails in (False, True):
            with pytest.raises(Exception, match="mine" if fails and comm.size > 2 else "no such gradient"):
                schedule_and_join(coordinator, comm.size, fails)
            for _ in range(comm.size):
                coordinator.schedule(add)
            coordinator.join()
        for variable in HERE["variables"]:
            assert variable.numpy().tolist() == [2 * comm.size] * 2

    on_workers(comm, work, num_ps=max(1, min(2, comm.size - 1)), on_worker_lost=on_worker_lost)


def schedule_and_join(coordinator, calls, fails):
    for _ in range(calls):
        coordinator.schedule(push_what_is_refused, args=(fails,))
    coordinator.join()


@pytest.mark.core
@pytest.mark.ranks(3)
def test_late_change_of_a_lost_worker_counts_no_second_time(comm):
    """It arrives when another worker has made the call again, and makes the next one."""

    def work(strategy):
        with strategy.scope():
            sums = Variable(0.0)
        servers = role_of(strategy).servers
        servers.begin_call(1, 1)
        strategy.barrier()
        if strategy.is_chief:
            sums.assign_add(1.0)
            servers.begin_call(2, 2)
            sums.assign_add(10.0)
            strategy.flush()
        strategy.barrier()
        if not strategy.is_chief:
            sums.assign_add(1.0)
            strategy.flush()
        strategy.barrier()
        servers.begin_call(0, 0)
        return float(sums)

    assert on_workers(comm, work, on_worker_lost="ignore") == [11.0, 11.0]


@pytest.mark.core
@pytest.mark.ranks(3)
@pytest.mark.parametrize(("on_worker_lost", "num_numbers"), [("abort", 1_000_000), ("ignore", 1)])
def test_workers_end_after_a_chief_that_has_caught_its_deadline(comm, caplog, on_worker_lost, num_numbers):
    """Nobody receives what their functions return."""
    HERE["comm"] = comm

    def work(strategy):
        coordinator = ClusterCoordinator(strategy)
        if strategy.is_chief:
            coordinator.schedule(wait, args=(num_numbers,))
            with pytest.raises(DeadlineExceededError):
                join_until_the_deadline(comm, strategy, coordinator)
        else:
            coordinator.serve()
            assert "serve() of the coordinator ends, as the chief has left: join() " in caplog.text

    on_workers(comm, work, communication_options=PATIENT, on_worker_lost=on_worker_lost)
    if comm.rank == 1:
        comm.recv(source=0)


KILLED_CHIEF = """
strategy.close()
strategy = mpidist.experimental.ParameterServerStrategy(on_worker_lost="ignore")
if strategy.is_ps:
    strategy.serve()
else:
    coordinator = mpidist.experimental.coordinator.ClusterCoordinator(strategy)
    if strategy.is_chief:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        attempt("serve", coordinator.serve)
    note("closes")
strategy.close()
note("end")
"""


@pytest.mark.no_mpi
def test_workers_do_not_wait_for_a_chief_that_is_killed(job):
    """Neither one that serves nor one that closes its strategy."""
    ended = job(KILLED_CHIEF, FOUR._replace(faulty=0), is_blind=True)
    assert ended.status == 75, ended
    lost = "the chief, rank 0, is lost: its process is gone"
    served = ended.of("serve")[1]
    assert served.kind == "PeerFailedError"
    assert lost in served.text
    assert f"close() of the coordinator: {lost}" in ended.err
    assert set(ended.of("closes")) == {1, 2}
    assert set(ended.of("end")) == {1, 2, 3}


KILLED_WORKER = """
strategy.close()
strategy = mpidist.experimental.ParameterServerStrategy(on_worker_lost={on_worker_lost!r})

@mpidist.experimental.coordinator.register("call")
def call(number):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number

def ask():
    values = [coordinator.schedule(call, args=(number,)) for number in range(5)]
    while not coordinator.done():
        time.sleep(0.01)
    return coordinator.fetch(values)

if strategy.is_ps:
    attempt("serves", strategy.serve)
else:
    coordinator = mpidist.experimental.coordinator.ClusterCoordinator(strategy)
    attempt("done" if strategy.is_chief else "serves", ask if strategy.is_chief else coordinator.serve)
"""


@pytest.mark.no_mpi
@pytest.mark.parametrize(
    ("mode", "placement", "kind", "text"),
    [
        ("ignore", FOUR._replace(faulty=1), "value", "[0, 1, 2, 3, 4]"),
        ("abort", THREE, "PeerFailedError", "done()"),
    ],
)
def test_asking_whether_all_is_done_notices_a_worker_that_is_killed(job, mode, placement, kind, text):
    ended = job(KILLED_WORKER.format(on_worker_lost=mode), placement, is_blind=True)
    asked = ended.of("done")[0]
    assert asked.kind == kind, ended
    assert asked.text.startswith(text)


if HAS_ULFM:

    @pytest.mark.core
    @pytest.mark.no_mpi
    def test_chief_survives_a_worker_reported_lost_by_mpi(survivor):
        loop = "while not coordinator.done():\n        time.sleep(0.01)"
        assert loop in KILLED_WORKER
        body = KILLED_WORKER.replace(loop, "coordinator.join()").format(on_worker_lost="ignore")
        ended = survivor(body, FOUR._replace(faulty=1))
        asked = ended.of("done")[0]
        assert (asked.kind, asked.text) == ("value", "[0, 1, 2, 3, 4]"), ended
        assert {note.kind for note in ended.of("serves").values()} == {"value"}, ended

    @pytest.mark.core
    @pytest.mark.no_mpi
    def test_workers_survive_a_chief_reported_lost_by_mpi(survivor):
        ended = survivor(KILLED_CHIEF, FOUR._replace(faulty=0))
        assert ended.status == 75, ended
        served = ended.of("serve")[1]
        assert served.kind == "PeerFailedError", ended
        assert "the chief, rank 0, is lost: " in served.text
        assert set(ended.of("end")) == {1, 2, 3}, ended

    @pytest.mark.core
    @pytest.mark.no_mpi
    def test_worker_that_loses_chief_and_server_prints_its_error(survivor):
        end = "os.kill(os.getpid(), signal.SIGKILL)"
        body = KILLED_CHIEF.replace(end, f"os.kill(server, signal.SIGKILL)\n        {end}")
        body = body.replace('attempt("serve", coordinator.serve)', "coordinator.serve()")
        head = "server = int(strategy.gather(np.array([os.getpid()]), axis=0)[2])"
        ended = survivor(f"{head}\n{body}", THREE._replace(faulty=0))
        assert "PeerFailedError: serve() of the coordinator: the chief, rank 0, is lost: " in ended.err
        assert "Error in sys.excepthook" not in ended.err


@pytest.mark.core
@pytest.mark.no_mpi
def test_interrupt_of_the_chief_in_the_middle_of_a_result_is_an_error_of_later_calls(job):
    """The result may be lost, and `join` would wait for it for ever."""
    program = """
strategy.close()
from mpidist.experimental.coordinator import ClusterCoordinator, register
from mpidist.coordinator import crew
strategy = mpidist.experimental.ParameterServerStrategy(num_ps=1)
add = register("add")(lambda one: one + 1)
with strategy:
    if strategy.is_ps:
        attempt("server", strategy.serve)
        os._exit(0)
    else:
        coordinator = ClusterCoordinator(strategy)
        if not strategy.is_chief:
            attempt("worker", coordinator.serve)
            os._exit(0)
        else:
            assert coordinator.schedule(add, args=(1,)).fetch() == 2
            def interrupt(*_):
                crew.result_of = really
                raise KeyboardInterrupt
            really, crew.result_of = crew.result_of, interrupt
            result = coordinator.schedule(add, args=(2,))
            try:
                coordinator.join()
            except KeyboardInterrupt:
                pass
            for call in (coordinator.join, lambda: coordinator.schedule(add, args=(3,)), strategy.close):
                attempt("chief", call)
os._exit(0)
"""
    ended = job(program, THREE, is_blind=True)
    kinds = [(note.what, note.kind) for note in ended.notes if note.what != "ready"]
    assert kinds.count(("chief", "UnavailableError")) == 3, (kinds, ended.err)
    assert ("worker", "PeerFailedError") in kinds
