"""How far workers get ahead of each other."""

import time

import numpy as np
import pytest
from parameter_server.clusters import PATIENT, meet, on_workers, set_deadline_of_meetings, worker_test

from mpidist import Variable
from mpidist.errors import DeadlineExceededError, InvalidArgumentError
from mpidist.experimental import ParameterServerStrategy as Strategy
from mpidist.experimental import server_rules
from mpidist.parameter_server.messages.ends import Channel
from mpidist.parameter_server.messages.protocol import Op, Step

STEPS = 8


@pytest.mark.ranks(3, 4)
@pytest.mark.core
@pytest.mark.parametrize(("staleness", "num_ps"), [(0, 1), (3, 1), pytest.param(1, 2, marks=pytest.mark.ranks(4))])
def test_staleness_bounds_reads_by_the_slowest_worker(comm, staleness, num_ps):
    """Each worker writes the steps it has done beside those of the others."""

    def work(strategy):
        rank, workers = strategy.topology.rank, strategy.topology.size
        with strategy.scope():
            done = [Variable(np.zeros(workers)) for _ in range(num_ps)]
        own, ahead, slow = np.eye(workers)[rank], 0, workers - 1
        for step in range(STEPS):
            if staleness and slow and (rank, step) == (slow, 0):
                comm.recv(source=0)
            for counts in strategy.read(done):
                assert counts[rank] == step
                assert counts.min() >= step - staleness
                ahead = max(ahead, int(step - counts.min()))
            if staleness and slow and (rank, step) == (0, 1):
                comm.send(None, slow)
            strategy.push(done, [own] * num_ps)
            strategy.step_done()
        return ahead

    aheads = on_workers(comm, work, staleness=staleness, num_ps=num_ps)
    assert max(aheads) <= staleness
    if staleness and len(aheads) > 1:
        assert max(aheads) > 0, "nobody was ahead, so nothing was tested"


@pytest.mark.ranks(3, 4)
@pytest.mark.core
@pytest.mark.parametrize("num_ps", [1, pytest.param(2, marks=pytest.mark.ranks(4))])
@worker_test(staleness=0, communication_options=PATIENT)
def test_workers_with_unlike_numbers_of_steps_meet(strategy, num_ps):
    """Who waits in a call of all workers holds nobody up, on any server; the next epoch goes on."""
    workers, rank = strategy.topology.size, strategy.topology.rank
    with strategy.scope():
        counts = [Variable(0.0) for _ in range(num_ps)]
    for epoch in range(1, 4):
        for _ in range(3 + 2 * rank):
            strategy.read(counts)
            strategy.push(counts, [1.0] * num_ps)
            strategy.step_done()
        strategy.barrier()
        wanted = epoch * sum(3 + 2 * other for other in range(workers))
        assert strategy.read(counts) == [wanted] * num_ps
        strategy.barrier()


@server_rules.register("cannot be applied")
def cannot_be_applied(value, gradient, memory):
    raise KeyError("mine")


@pytest.mark.ranks(3, 4)
@pytest.mark.core
@worker_test(staleness=0, num_ps=2, communication_options=PATIENT)
def test_staleness_holds_after_a_failed_push(strategy):
    """All workers learn of it; the servers count the worker afterwards, also where workers do not meet."""
    workers, rank = strategy.topology.size, strategy.topology.rank
    with strategy.scope():
        done = [Variable(np.zeros(workers)) for _ in range(2)]
    if strategy.is_chief:
        strategy.push(done[-1], np.ones(workers), server_rules.Registered("cannot be applied"))
    error = RuntimeError if strategy.is_chief else InvalidArgumentError
    with strategy.scope(), pytest.raises(error, match="KeyError: 'mine'"):
        Variable(0.0)
    own = np.eye(workers)[rank]
    for step in range(STEPS):
        time.sleep(0.01 * strategy.is_chief)
        for counts in strategy.read(done):
            assert counts.min() >= step
        strategy.push(done, [own] * 2)
        strategy.step_done()
    strategy.barrier()


@pytest.mark.ranks(3)
@pytest.mark.core
@worker_test(staleness=1)
def test_staleness_ignores_workers_that_have_ended(strategy):
    """Nor one that ends while others wait for it."""
    with strategy.scope():
        variable = Variable(0.0)
    if strategy.is_chief:
        time.sleep(0.1)
        return
    for _ in range(STEPS):
        strategy.step_done()
        variable.numpy()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("call", ["read", "barrier"])
@worker_test(staleness=0, communication_options=PATIENT)
def test_staleness_deadline_names_late_workers(strategy, comm, call):
    workers = comm.Create_group(comm.Get_group().Excl([comm.size - 1]))
    with strategy.scope():
        variable = Variable(0.0)
    if not strategy.is_chief:
        strategy.step_done()
    else:
        set_deadline_of_meetings(strategy, variable, 0.5)
    strategy.flush()
    workers.Barrier()
    if not strategy.is_chief:
        with pytest.raises(DeadlineExceededError, match=r"waited 0.5 s, and .*ranks? 0\b"):
            {"read": variable.numpy, "barrier": strategy.barrier}[call]()
    meet(workers)
    if strategy.is_chief:
        assert float(variable) == 0.0


@pytest.mark.ranks(min=4)
def test_staleness_holds_for_a_worker_slow_to_leave_a_call(comm, monkeypatch):
    """Where workers do not meet, a server counts all of them again as soon as one of them goes on."""
    start, slow = Channel.start, comm.size - 3

    def start_late(channel, call, op, *args, **more):
        if op == Op.STEP and more.get("rows") in (Step.GOES_ON, Step.ALL_GO_ON):
            monkeypatch.setattr(Channel, "start", start)
            assert comm.recv(None, 0) == "has waited"
        start(channel, call, op, *args, **more)

    def work(strategy):
        with strategy.scope():
            _, elsewhere = Variable(0.0), Variable(0.0)
        if comm.rank == slow:
            monkeypatch.setattr(Channel, "start", start_late)
        strategy.barrier()
        if comm.rank == 0:
            strategy.step_done()
            set_deadline_of_meetings(strategy, elsewhere, 0.5)
            with pytest.raises(DeadlineExceededError, match=f"rank {slow} had done 0 steps, and rank 0 had done 1"):
                elsewhere.numpy()
            comm.send("has waited", slow)
            assert float(elsewhere) == 0.0
        else:
            strategy.step_done()

    on_workers(comm, work, staleness=0, num_ps=2, communication_options=PATIENT)


@pytest.mark.core
@pytest.mark.ranks(3)
@pytest.mark.parametrize("end", ["barrier()", "close()"])
def test_staleness_without_step_done_warns_and_is_an_error_at_the_end(comm, caplog, end):
    """All its changes are made, and all ranks end their parts in order."""

    def texts():
        return [record.getMessage() for record in caplog.records if "never called step_done()" in record.getMessage()]

    strategy = Strategy(comm=comm, staleness=1)
    if not strategy.is_ps:
        with strategy.scope():
            count = Variable(0.0, name="count")
        for turn in range(5):
            assert count.numpy() >= turn
            count.assign_add(1.0)
            assert len(texts()) == (turn > 1)  # two steps may be begun
        if end == "barrier()":
            with pytest.raises((RuntimeError, InvalidArgumentError), match=r"barrier\(\).*staleness=1 bounds nothing"):
                strategy.barrier()
    if strategy.is_ps:
        strategy.serve()
        strategy.close()
    else:
        with pytest.raises(RuntimeError, match=r"^close\(\): rank . has changed variable 'count' more than 2 times"):
            strategy.close()
    with pytest.raises(RuntimeError, match="closed"):
        strategy.run(int)


@pytest.mark.ranks(3)
@pytest.mark.core
def test_staleness_with_step_done_is_no_error(comm, caplog):
    """Also of steps that change a variable for each of several gradients, after the first one."""

    def work(strategy):
        with strategy.scope():
            counts = [Variable(0.0) for _ in range(3)]
        for step in range(3):
            for _ in range(1 + 3 * (step > 0)):
                strategy.push(counts, [1.0] * 3)
            strategy.step_done()
        strategy.barrier()

    on_workers(comm, work, staleness=0)
    assert "step_done" not in caplog.text
