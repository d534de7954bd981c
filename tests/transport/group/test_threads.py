"""Threads: a strategy for each works, one strategy for two is refused, and MPI may allow less than any thread."""

import threading
import time
from contextlib import nullcontext, suppress

import numpy as np
import pytest
from support.placements import one_and_two_nodes
from support.reductions import all_reduce

from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.transport.group.thread_guard import OtherThreadError, ThreadGuard

pytestmark = pytest.mark.core

several = pytest.mark.ranks(2)


def in_thread(body, name="worker"):
    """Run something in a thread of its own; return what it returns, or raise what it raises."""
    ended = []

    def run():
        try:
            ended.append(body())
        except Exception as error:  # raised below, in the thread that waits
            ended.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    if isinstance(ended[0], Exception):
        raise ended[0]
    return ended[0]


def in_threads_of_one_number(body):
    """Run something in threads of their own until one has the number of the one before; return what both do."""
    pairs = [in_thread(lambda: (threading.get_ident(), body()))]
    for _ in range(1000):
        pairs.append(in_thread(lambda: (threading.get_ident(), body())))
        if pairs[-1][0] == pairs[-2][0]:
            break
    (number, before), (again, after) = pairs[-2:]
    assert number == again
    return before, after


@pytest.mark.no_mpi
def test_thread_with_the_number_of_one_that_has_ended_makes_no_calls():
    guards = []

    def make():
        guards.append(ThreadGuard())
        return len(guards) > 1 and guards[-2].is_of_this_thread()

    assert in_threads_of_one_number(make) == (False, False)


@one_and_two_nodes
def test_thread_with_the_number_of_one_that_has_ended_takes_the_calls_over(comm, placement):
    """An exception in it ends the job, as other ranks may wait for its calls."""
    with Strategy(comm=comm) as strategy:
        group = parts_of(strategy).group

        def call():
            group.enter("reduce")
            return comm.size == 1 or group.is_of_this_thread()

        assert in_threads_of_one_number(call) == (True, True)


@one_and_two_nodes
def test_two_threads_with_a_strategy_each(comm, placement):
    """They run at once, in any order on any rank; built in one order on all."""
    strategies = [Strategy(comm=comm) for _ in range(2)]
    wrong = []

    def train(number):
        for step in range(60):
            value = np.full(3 + 5000 * (step % 7 == 0), float(number + step))
            total = all_reduce(strategies[number], "SUM", value)
            if not (total == comm.size * (number + step)).all():
                wrong.append((number, step))

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    for strategy in strategies:
        strategy.close()


@several
def test_thread_that_waits_lends_its_calls(comm):
    """As a thread of JAX makes the calls of a compiled function, which the program waits for."""
    with Strategy(comm=comm) as strategy:
        group = parts_of(strategy).group

        def reduce():
            with group.lent_to_this_thread("psum", threading.main_thread()):
                with pytest.raises(RuntimeError, match="but thread 'worker' makes this strategy's calls"):
                    in_thread(lambda: strategy.reduce("SUM", 1.0), "other")
                return float(strategy.reduce("SUM", 1.0))

        for _ in range(3):
            assert in_thread(reduce) == strategy.reduce("SUM", 1.0) == comm.size


@several
def test_thread_lends_only_calls_that_it_may_make(comm):
    with Strategy(comm=comm) as strategy:
        group, reached, done = parts_of(strategy).group, threading.Event(), threading.Event()
        trainer = threading.Thread(target=lambda: (reached.set(), done.wait()), name="trainer")
        trainer.start()

        def reduce(lender):
            with group.lent_to_this_thread("psum", lender):
                return float(strategy.reduce("SUM", 1.0))

        assert in_thread(lambda: reduce(trainer)) == comm.size  # it takes them over from the thread that has built it
        with pytest.raises(RuntimeError, match="psum in thread 'MainThread', but thread 'trainer' makes"):
            in_thread(lambda: reduce(threading.main_thread()), "worker")
        assert in_thread(lambda: reduce(trainer)) == comm.size
        done.set()
        trainer.join()
        assert in_thread(lambda: reduce(threading.main_thread())) == strategy.reduce("SUM", 1.0) == comm.size


@several
def test_second_thread_is_refused_while_the_first_lives(comm):
    """The builder may hand it on, once."""
    with Strategy(comm=comm) as strategy:
        assert strategy.reduce("SUM", 1.0) == comm.size
        reached, done = threading.Event(), threading.Event()

        def work():
            total = float(strategy.reduce("SUM", 1.0))
            reached.set()
            done.wait()
            return total + float(strategy.reduce("SUM", 1.0))

        result = []
        thread = threading.Thread(target=lambda: result.append(work()), name="trainer")
        thread.start()
        reached.wait()
        pattern = "reduce in thread 'MainThread', but thread 'trainer' makes this strategy's calls: "
        with pytest.raises(RuntimeError, match=pattern):
            strategy.reduce("SUM", 1.0)
        for call in (strategy.reset, lambda: strategy.gather(np.ones(1), 0), lambda: all_reduce(strategy, "SUM", 1.0)):
            with pytest.raises(RuntimeError, match="'trainer' makes this strategy's calls"):
                call()
        done.set()
        thread.join()
        assert result == [2.0 * comm.size]
        assert strategy.reduce("SUM", 1.0) == comm.size  # it has ended
        assert in_thread(lambda: strategy.reduce("SUM", 1.0)) == comm.size
        assert strategy.reduce("SUM", 1.0) == comm.size


@several
def test_thread_that_is_about_to_end_gives_its_calls_back(comm):
    """As that of `torch.distributed.checkpoint.async_save`, which ends just after its result is there."""
    with Strategy(comm=comm) as strategy:
        reached = threading.Event()

        def work():
            strategy.reduce("SUM", 1.0)
            reached.set()
            time.sleep(0.1)

        thread = threading.Thread(target=work)
        thread.start()
        reached.wait()
        assert strategy.reduce("SUM", 1.0) == comm.size
        thread.join()


@pytest.mark.ranks(1)
@pytest.mark.usefixtures("comm")
@pytest.mark.parametrize("lends", [False, True])
def test_take_over_by_two_threads_at_once_admits_one(lends):
    both, ends, guards, admitted = threading.Barrier(2), threading.Barrier(2), [], []
    is_built, is_over = threading.Event(), threading.Event()

    class Builder(threading.Thread):
        def is_alive(self):  # which the guard checks: here two threads meet that check at once
            with suppress(threading.BrokenBarrierError):
                both.wait(timeout=1)
            return super().is_alive()

    def enter():
        with suppress(OtherThreadError), guards[0].lend("reduce", builder) if lends else nullcontext():
            if not lends:
                guards[0].take_over("reduce")
            admitted.append(threading.get_ident())
            ends.wait()
            return
        ends.wait()

    def build():
        guards.append(ThreadGuard())
        is_built.set()
        is_over.wait()

    builder = Builder(target=build)
    threads = [threading.Thread(target=enter) for _ in range(2)]
    builder.start()
    is_built.wait()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    is_over.set()
    builder.join()
    assert len(admitted) == 1


@several
@pytest.mark.parametrize("weight", [None, 1])
def test_thread_is_refused_while_the_first_is_in_a_call(comm, monkeypatch, weight):
    """Else its call would be another one of this rank, beside that of the first, whose numbers stay as they are."""
    monkeypatch.setenv("MPIDIST_TRANSPORT", "mpi" if weight else "auto")
    with Strategy(comm=comm) as strategy:
        agreement = parts_of(strategy).group.agreement
        before, errors = agreement.sequence, []

        def call_too():
            while agreement.sequence == before:
                time.sleep(0.001)
            try:
                strategy.reduce("MEAN", np.full(9, 1000.0), weight=weight)
            except RuntimeError as error:
                errors.append(str(error))
            comm.send(None, 1)

        thread = threading.Thread(target=call_too)
        if comm.rank == 0:
            thread.start()
        else:
            comm.recv(source=0)
        assert (strategy.reduce("MEAN", np.ones(9), weight=weight) == 1).all()
        if comm.rank == 0:
            thread.join()
            assert "but thread 'MainThread' makes this strategy's calls" in errors[0]
        assert strategy.reduce("SUM", 1.0) == comm.size


@pytest.mark.ranks(1)
def test_thread_is_admitted_once_garbage_of_the_first_is_collected(comm, monkeypatch):
    """A function that gives back memory, and which the collector calls at any moment, is no call of the program."""
    names = {"__name__": "mpidist.transport.node_memory.arena"}
    exec("def give_back(wait): wait()", names)
    begins, polls, errors, sleep, now = threading.Event(), [], [], time.sleep, time.monotonic

    def note_and_sleep(seconds):
        polls.append(threading.current_thread())
        sleep(seconds)

    def wait():
        begins.set()
        while thread.is_alive() and polls.count(thread) < 2:
            sleep(0.001)

    def call():
        begins.wait()
        try:
            assert strategy.reduce("SUM", 1.0) == 1
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    monkeypatch.setattr(time, "sleep", note_and_sleep)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0 if threading.current_thread() is thread else now())
    with Strategy(comm=comm) as strategy:
        thread.start()
        names["give_back"](wait)
        thread.join()
    assert not errors
    assert thread in polls


LEVELS = r"""
import mpi4py
mpi4py.rc.thread_level = "{level}"
import threading
import mpidist
from mpi4py import MPI
names = dict(zip((MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED), ("SINGLE", "FUNNELED", "SERIALIZED")))
strategy = mpidist.MultiWorkerMirroredStrategy()
another = mpidist.MultiWorkerMirroredStrategy()
print(f"level {{names[MPI.Query_thread()]}}\n", end="", flush=True)
def step():
    return mpidist.get_replica_context().start_all_reduce("SUM", [1.0] * 3).wait()[2]
assert strategy.run(step) == another.run(step) == another.reduce("SUM", 1.0) == 3
def work():
    try:
        print(f"total {{strategy.reduce('SUM', 1.0)}}\n", end="", flush=True)
    except RuntimeError as error:
        print(f"refused: {{error}}\n", end="", flush=True)
threads = [threading.Thread(target=work, name="other") for _ in range(1)]
for thread in threads:
    thread.start()
    thread.join()
strategy.close()
another.close()
"""


@pytest.mark.no_mpi
@pytest.mark.parametrize(("level", "nodes"), [("single", "0,1,1"), ("serialized", "0,0,0")])
def test_less_than_thread_multiple_will_do(job, level, nodes):
    """One thread makes all calls then; another one may only where MPI allows it."""
    ended = job(LEVELS.format(level=level), head="", MPIDIST_PRETEND_NODES=nodes)
    if "level" not in ended.out:  # MPI may give more than was asked for
        pytest.fail(ended.err)
    if "level SERIALIZED" in ended.out:
        assert ended.out.count("total 3.0") == 3
    else:
        assert ended.out.count("refused: reduce in thread 'other': MPI was started with THREAD_") == 3
    assert ended.status == 0, ended.err
