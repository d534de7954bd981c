"""Turns at a variable, and changes and reads whose worker is lost: nothing is half made, and nobody waits for it."""

from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

from mpidist.parameter_server.membership import Membership
from mpidist.parameter_server.messages.ends import Connection
from mpidist.parameter_server.messages.lane import LANE_BYTES, Lane
from mpidist.parameter_server.messages.protocol import CHUNK_BYTES, Change, Header, Op, plan_messages
from mpidist.parameter_server.store import Store, Stored
from mpidist.parameter_server.transfers import Changing, VariableList, change_rows, send_variables
from mpidist.transport.failures.awaited_peers import AwaitedPeers
from mpidist.transport.group.service_group import ServiceGroup
from mpidist.transport.reduction import Reduction

pytestmark = pytest.mark.no_mpi

SIZES = (10, 3 * CHUNK_BYTES // 8 + 7, 20, CHUNK_BYTES // 8)  # of float64 numbers
NUM_MESSAGES = len(plan_messages(tuple(8 * size for size in SIZES)))


class Worker:
    """A connection to a worker that sends ones, up to some message, and takes so much of what it reads."""

    def __init__(self, num_messages=NUM_MESSAGES, lane=None):
        self.num_messages, self.lane = num_messages, lane
        self.sent = 0
        self.rank = self.worker = 0
        self.has_ended = self.is_making = False
        self.steps: Iterator[bool] | None = None
        self.memory = np.zeros(8 * sum(SIZES), np.uint8)

    def receive(self, sizes):
        for at, pieces in enumerate(plan_messages(sizes)):
            while at >= self.num_messages:
                yield (), None
            count = sum(stop - start for _, start, stop in pieces) // 8
            yield pieces, np.ones(count).view(np.uint8)

    def whole(self, nbytes):
        return self.memory[:nbytes]

    def send(self, parts):
        while self.sent >= self.num_messages:
            yield False
        self.sent += 1
        yield True

    def abandon(self):
        if self.steps is not None:
            cast("Generator[bool]", self.steps).close()
        self.has_ended = True


def connection(*args):
    return cast("Connection", Worker(*args))


def made_store():
    store = Store()
    for key, size in enumerate(SIZES):
        store.allocate(key, np.zeros(size))
    return store


def header(change, *numbers, rows=0):
    return Header(Op.CHANGE, 1, -1, rows, change, 0, numbers)


def run(steps, at_most=100):
    """Go on as long as there is progress. Returns whether all is done."""
    for _ in range(at_most):
        try:
            if not next(steps):
                return False
        except StopIteration:
            return True
    raise AssertionError("it does not end")


@pytest.mark.parametrize("num_messages", [0, 1, NUM_MESSAGES - 1, NUM_MESSAGES])
@pytest.mark.parametrize("change", ["add", "assign", "momentum"])
def test_change_of_a_lost_worker_is_made_whole_or_not_at_all(num_messages, change):
    store = made_store()
    wanted = VariableList(list(store.variables.values()), is_near=False)
    number = {"add": Change.ADD, "assign": Change.ASSIGN}.get(change)
    if number is None:
        number = Change.RULE + 8 * store.number_of_rule("Momentum") + 3
    steps = Changing(connection(num_messages), store, header(number, -1.0, 0.5, 0.0), may_be_lost=True).run(wanted)
    assert run(steps) == (num_messages == NUM_MESSAGES)
    steps.close()
    for stored in store.variables.values():
        assert (stored.value == (num_messages == NUM_MESSAGES)).all()
        assert not stored.queue


def test_variable_that_mpi_sends_from_its_own_memory_is_not_changed_meanwhile():
    """As one that fits into a message, but shares it with no other."""
    stored, worker = made_store().variables[3], Worker(0)
    reads = send_variables(cast("Connection", worker), VariableList([stored], is_near=False))
    assert not run(reads)
    change = stored.enter(writes=True)
    assert not stored.may_go(change)
    worker.num_messages = 1
    assert run(reads)
    assert stored.may_go(change)


def test_change_under_way_completes_after_its_worker_is_lost():
    store = made_store()
    large = store.variables[1]
    wanted = VariableList([large], is_near=False)
    steps = Changing(connection(), store, header(Change.ADD), may_be_lost=True).run(wanted)
    while large.value[0] == 0:
        next(steps)
    assert large.value[-1] == 0  # it is in the middle
    steps.close()
    assert (large.value == 1).all()
    assert not large.queue


@pytest.mark.parametrize("num_messages", [0, 1, NUM_MESSAGES - 1, NUM_MESSAGES])
def test_lost_worker_is_dropped_once_its_change_is_made_whole(num_messages):
    """Another worker reads one of the variables meanwhile, for longer than a lost worker is listened to."""
    store, awaited = made_store(), AwaitedPeers()
    reader, is_all = store.variables[1].enter(writes=False), num_messages == NUM_MESSAGES
    lost = connection(num_messages)
    wanted = VariableList(list(store.variables.values()), is_near=False)
    lost.steps = Changing(lost, store, header(Change.ADD), may_be_lost=True).run(wanted)

    def advance(one):
        try:
            return next(cast("Generator[bool]", one.steps))
        except StopIteration:
            one.steps = None
            return False

    awaited.lost = {0: "killed"}
    membership = Membership(cast("ServiceGroup", SimpleNamespace(awaited=awaited, timeout_seconds=None)), (0, 1), None)
    membership.drop_lost([lost], advance)
    assert lost.has_ended == (not is_all)
    assert (store.variables[0].value == is_all).all()
    assert not store.variables[1].value.any()
    store.variables[1].leave(reader)
    if is_all:
        membership.drop_lost([lost], lambda one: one.steps is not None and advance(one))
    assert lost.has_ended
    assert membership.live == {1}
    for stored in store.variables.values():
        assert (stored.value == is_all).all()
        assert not stored.queue


def test_chunks_are_added_as_they_come_where_a_lost_worker_ends_the_job():
    store = made_store()
    wanted = VariableList(list(store.variables.values()), is_near=False)
    steps = Changing(connection(1), store, header(Change.ADD), may_be_lost=False).run(wanted)
    assert not run(steps)
    assert store.variables[1].value[0] == 1
    assert store.variables[1].queue
    steps.close()
    assert not store.variables[1].queue


@pytest.mark.parametrize("num_messages", [0, 2])
def test_read_of_a_lost_worker_blocks_no_writer(num_messages):
    store = made_store()
    wanted = VariableList(list(store.variables.values()), is_near=False)
    steps = send_variables(connection(num_messages), wanted)
    assert not run(steps)
    steps.close()
    assert not any(stored.queue for stored in store.variables.values())


def shared_store():
    """A store whose variables lie in memory that a worker shares, and the two ends of the worker's lane."""
    store, memory, at = Store(), np.zeros(8 * sum(SIZES), np.uint8), 0
    for key, size in enumerate(SIZES):
        store.allocate(key, np.zeros(size), memory[at : at + 8 * size], at)
        at += 8 * size
    shared = np.zeros(LANE_BYTES, np.uint8)
    return store, Lane(shared, 0, memory, None), Lane(shared, 1, memory, None)


def test_variables_are_lent_one_by_one():
    """A writer waits for those alone that the reader has not copied."""
    store, worker, server = shared_store()
    variables = [store.variables[1], store.variables[3]] * 3
    wanted = VariableList(variables, is_near=True)
    assert len(wanted.reads) == 6
    steps = send_variables(connection(0, server), wanted)
    for copied in range(6):
        run(steps, 20) if copied == 0 else [next(steps) for _ in range(3)]
        lent = min(6, copied + 4) - copied
        assert sum(len(stored.queue) for stored in (store.variables[1], store.variables[3])) in (lent, lent + 1)
        assert worker.can_take()
        worker.take()
    assert run(steps)
    assert not any(stored.queue for stored in store.variables.values())


def test_lent_variable_is_writable_after_its_reader_is_lost():
    store, _, server = shared_store()
    variables = list(store.variables.values())
    steps = send_variables(connection(9, server), VariableList(variables, is_near=True))
    assert not run(steps)
    change = Changing(connection(), store, header(Change.ADD), may_be_lost=True).run(VariableList(variables, False))
    assert not run(change)
    assert not store.variables[1].value.any()
    steps.close()
    assert run(change)
    assert all((stored.value == 1).all() for stored in variables)


@pytest.mark.parametrize("wrong", ["short", "key"])
def test_rows_that_do_not_fit_change_nothing(wrong):
    """Not even the variables before those that do not fit."""
    store = Store()
    store.allocate(0, np.zeros((4, 2)))
    about = np.array([[0, 0 if wrong == "short" else 5], [1, 1]])
    rows = [np.array([3]), np.ones((1, 2))]
    data = np.concatenate([part.reshape(-1).view(np.uint8) for part in (about, *rows, *rows)])
    with pytest.raises((ValueError, KeyError)):
        run(change_rows(store, header(Change.ADD, rows=2), data[: -8 if wrong == "short" else None]))
    assert not store.variables[0].value.any()


# What happens to the queue of a variable, by whom, and who may go then.
QUEUE = [
    ("reads", "a", "a"), ("reads", "b", "ab"), ("writes", "c", "ab"),
    ("reads", "d", "ab"),  # a read must not overtake a write, or writes would wait for ever
    ("leaves", "b", "a"), ("leaves", "a", "c"), ("writes", "e", "c"), ("leaves", "c", "d"), ("leaves", "d", "e"),
    ("leaves", "e", ""),
    ("writes", "f", "f"), ("writes", "g", "f"), ("reads", "h", "f"),
    ("leaves", "g", "f"),  # it is lost while it waits, and keeps nobody waiting
    ("leaves", "f", "h"), ("leaves", "h", ""),
]  # fmt: skip


def test_queue_lets_reads_go_together_and_writes_alone():
    stored, places = Stored(np.zeros(2)), dict[str, Any]()
    for what, who, may_go in QUEUE:
        if what == "leaves":
            stored.leave(places.pop(who))
        else:
            places[who] = stored.enter(what == "writes")
        assert "".join(one for one, place in places.items() if stored.may_go(place)) == may_go, (what, who)
    assert not stored.queue


@pytest.mark.parametrize("change", [Change.ADD, Change.SUB])
def test_half_precision_is_added_as_by_numpy_and_not_by_it(monkeypatch, change):
    """NumPy converts float16 one number at a time, which takes 28 times as long."""
    really, added = Reduction.combine, []
    monkeypatch.setattr(Reduction, "combine", lambda self, parts, out: added.append(out) or really(self, parts, out))
    pairs = np.random.default_rng(1).integers(0, 1 << 16, (2, 5000)).astype(np.uint16)
    for dtype in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fnuz):
        value, delta = (bits.view(dtype) for bits in pairs)
        store = Store()
        store.allocate(1, value)
        store.change(store.variables[1], change, 0, delta.copy(), ())
        with np.errstate(all="ignore"):
            wanted = value + delta if change == Change.ADD else value - delta
        assert added.pop() is not None
        np.testing.assert_array_equal(store.variables[1].value.astype(np.float32), wanted.astype(np.float32))
