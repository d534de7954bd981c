"""Replicas of one rank take turns between the calls in which they meet."""

import decimal
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from greenlet import getcurrent

from mpidist import OneDeviceStrategy, context_stack
from mpidist.context_stack import Entry
from mpidist.errors import InvalidArgumentError
from mpidist.replica_context.pending_writes import PendingWrites
from mpidist.replica_context.turns import Turns
from mpidist.transport.devices import Device

pytestmark = [pytest.mark.no_mpi, pytest.mark.core]


class Log:
    def __init__(self):
        self.calls: list[tuple[Any, ...]] = []

    def add(self, arguments, error):
        if error is not None:
            raise error
        self.calls.append(tuple(arguments))
        return [sum(arguments)] * len(arguments)


def turns_of(*replica_ids):
    return Turns(replica_ids, [Device("cpu")] * len(replica_ids), PendingWrites(replica_ids))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_replicas_meet_in_each_call_once(count):
    turns, log, order = turns_of(*range(count)), Log(), []

    def body(at):
        total = 0
        for step in range(3):
            order.append((step, at))
            total += turns.meet("add", log.add, 10**at)
        return total

    def run():
        each = sum(10**at for at in range(count))
        assert turns.run([lambda at=at: body(at) for at in range(count)]) == [3 * each] * count
        assert log.calls == [tuple(10**at for at in range(count))] * 3
        assert order == [(step, at) for step in range(3) for at in range(count)]  # in turn, by replica
        log.calls.clear()
        order.clear()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()
    run()
    run()  # on the same stacks


def test_stacks_are_kept_and_go_with_turns():
    stacks = []

    def run():
        turns = turns_of(0, 1)
        for _ in range(2):
            turns.run([lambda: stacks.append(weakref.ref(getcurrent()))] * 2)
        assert stacks[:2] == stacks[2:]

    run()
    assert [stack() for stack in stacks] == [None] * 4


def test_turns_can_be_taken_after_an_error():
    turns, log = turns_of(0, 1), Log()
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            turns.run([lambda: add(turns, log), lambda: fail(turns, log)])
        assert turns.run([lambda: add(turns, log), lambda: add(turns, log)]) == [2, 2]


def differ(first, second):
    turns, log = turns_of(6, 7), Log()
    with pytest.raises((InvalidArgumentError, KeyError)) as raised:
        turns.run([lambda: first(turns, log), lambda: second(turns, log)])
    assert log.calls == []
    return raised.value


def add(turns, log):
    return turns.meet("add", log.add, 1)


def fail(turns, log):
    raise KeyError("mine")


def test_error_of_a_replica_ends_the_others():
    """Their `finally` clauses run, and make no further call."""
    seen = []

    def waits(turns, log):
        try:
            add(turns, log)
        finally:
            try:
                add(turns, log)
            except RuntimeError as error:
                seen.append(str(error))

    assert repr(differ(waits, fail)) == "KeyError('mine')"
    assert seen == ["add: replica 6 was ended, as another replica has failed"]
    assert repr(differ(fail, waits)) == "KeyError('mine')"


def test_cause_of_an_error_is_kept():
    def chained():
        raise ValueError("outer") from KeyError("inner")

    turns = turns_of(0, 1)
    with pytest.raises(ValueError, match="outer") as raised:
        turns.run([lambda: add(turns, Log()), chained])
    assert isinstance(raised.value.__cause__, KeyError)


def test_error_of_a_call_names_its_line_to_each_replica_once():
    def fail_for_all(arguments, error):
        raise ValueError("of all")

    def step():
        turns.meet("call", fail_for_all, None)

    turns = turns_of(0, 1)
    with pytest.raises(ValueError, match="of all") as raised:
        turns.run([step, step])
    names = [entry.name for entry in raised.traceback]
    assert (names.count("step"), names.count("fail_for_all"), names[-1]) == (1, 1, "fail_for_all")


def test_interrupt_ends_all_replicas_at_once():
    turns, log, ended = turns_of(0, 1), Log(), []

    def waits():
        try:
            turns.meet("add", log.add, 1)
        finally:
            ended.append(True)

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        turns.run([waits, interrupt])
    assert (log.calls, ended) == ([], [True])


def test_turns_keep_contexts_of_replicas_separate():
    turns, log, strategy = turns_of(0, 1), Log(), OneDeviceStrategy("/cpu:0")

    def body(entry):
        def inner():
            seen = [context_stack.innermost() is entry]
            turns.meet("add", log.add, 1)
            return [*seen, context_stack.innermost() is entry]

        return context_stack.call(entry, inner)

    entries = [Entry(strategy), Entry(strategy)]
    outer = context_stack.copy_entries()
    assert turns.run([lambda: body(entries[0]), lambda: body(entries[1])]) == [[True, True], [True, True]]
    assert context_stack.copy_entries() == outer


def test_replicas_inherit_context_variables():
    """NumPy's error state, for example, and that of `decimal`."""
    turns = turns_of(0, 1)
    with np.errstate(over="raise"), decimal.localcontext(decimal.Context(prec=5)):
        seen = turns.run([lambda: (np.geterr()["over"], decimal.getcontext().prec)] * 2)
    assert seen == [("raise", 5)] * 2


def test_replica_that_catches_everything_is_left_behind():
    """Its loop would go on for ever, and hide why."""
    turns, log = turns_of(0, 1), Log()

    def stubborn():
        while True:
            try:
                turns.meet("add", log.add, 1)
            except BaseException:
                continue

    with pytest.raises(KeyError, match="mine"):
        turns.run([stubborn, lambda: fail(turns, log)])
