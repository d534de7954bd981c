"""Random operations of several workers at several servers, compared with a model that makes one after the other.

A seed decides what each worker does: reads, assignments, rows, rules, nests, errors between, different numbers of
operations, early ends. Afterwards a search looks for one order of all operations on each variable that explains every
number that was read, and that keeps each worker's own order and that of operations which did not overlap in time.

A variable has rows of equal numbers, so that the model needs one number for a row, and shows a read that was
no snapshot.
"""

import os
import random
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from parameter_server.clusters import num_workers

from mpidist import IndexedSlices, ShardedVariable, Variable
from mpidist.experimental import ParameterServerStrategy, partitioners, server_rules

SEED = int(os.environ.get("TEST_SOAK_SEED", "20240229"))
NUM_PROGRAMS = int(os.environ.get("TEST_FUZZ_EXAMPLES", "6"))
NUM_ROUNDS = 3  # with a barrier between, so that the search stays short
ROWS = 5
PRIME = 1009
Array = np.ndarray[Any, Any]


@server_rules.register("random operations: mix")
def mix(value, gradient, memory):
    """Depend on the order of all changes."""
    value[...] = (3 * value + gradient + memory["count"]) % PRIME


@server_rules.register("random operations: fail")
def fail(value, gradient, memory):
    value += 1
    raise ValueError("no such gradient")


class Kind(NamedTuple):
    """A variable: its dtype, the numbers in a row, and whether a partitioner cuts it."""

    dtype: str
    width: int
    is_cut: bool


class Operation(NamedTuple):
    """What a worker does: a method, the variables, and for each variable a number for each row of `rows`."""

    method: str
    variables: tuple[int, ...] = ()
    rows: tuple[int, ...] | None = None
    numbers: tuple[tuple[float, ...], ...] = ()


@dataclass
class Event:
    """What happened to one array on a server: one variable, or one shard."""

    worker: int  # who did it
    method: str  # what was done; `read` looks at `rows`
    rows: tuple[int, ...] | None  # which rows; `None` for all
    numbers: Array  # what was given for each row, or what was read
    begun: float  # when it began, in seconds of the clock of the node
    ended: float = float("inf")  # when it was known to be done


RULES = {
    "sgd": server_rules.SGD(0.5),
    "momentum": server_rules.Momentum(0.5, 0.5),
    "mix": server_rules.Registered("random operations: mix"),
}
FAILS = server_rules.Registered("random operations: fail")
DENSE = ("assign", "assign_add", "assign_sub", *RULES)
SPARSE = ("scatter_update", "scatter_add", "scatter_sub", "scatter_mul", "scatter_max", "scatter_min", *RULES)


def draw_kinds(draw):
    widths = [1, draw.choice([1, 40]), draw.choice([1, 900]), draw.choice([200_000, 120_000])]
    return [Kind(draw.choice(["f8", "f8", "f4", "i8"]), width, draw.random() < 0.4) for width in widths]


def draw_operation(draw, kinds):
    """Draw one operation, mostly of small variables."""
    of_all = draw.choices(range(len(kinds)), [6, 4, 4, 2])[0]
    chance = draw.random()
    if chance < 0.35:
        return Operation("read", (of_all,))
    if chance < 0.40:
        return Operation("read", tuple(sorted(draw.sample(range(len(kinds)), 2))))
    if chance < 0.50:
        return Operation("read", (of_all,), tuple(draw.choices(range(ROWS), k=draw.randint(1, 4))))
    if chance < 0.60:
        return Operation(draw.choice(["wrong shape", "wrong row", "fail", "flush", "wait"]), (of_all,))
    chosen = (of_all,) if chance < 0.9 else tuple(draw.sample(range(len(kinds)), 2))
    is_whole = any(kinds[one].dtype == "i8" for one in chosen)
    rows = tuple(draw.choices(range(ROWS), k=draw.randint(1, 4))) if len(chosen) == 1 and draw.random() < 0.4 else None
    methods = DENSE if rows is None else SPARSE
    method = draw.choice([one for one in methods if not is_whole or one not in ("sgd", "momentum")])
    count = ROWS if rows is None else len(rows)
    most = 2 if method == "scatter_mul" else 50
    numbers = tuple(tuple(float(draw.randint(-most, most)) for _ in range(count)) for _ in chosen)
    return Operation(method, chosen, rows, numbers)


@dataclass
class Worker:
    """One worker's part of a program, with what it saw."""

    strategy: ParameterServerStrategy
    variables: list[Any]
    kinds: list[Kind]
    events: dict[str, list[Event]] = field(default_factory=dict)  # what happened, for each array
    torn: list[str] = field(default_factory=list)  # reads that were no snapshots
    _open: list[tuple[int, Event]] = field(default_factory=list)

    def make(self, operation):
        """Make an operation, and note what came of it."""
        begun = time.monotonic()
        variables = [self.variables[one] for one in operation.variables]
        if operation.method in ("wrong shape", "wrong row", "fail", "flush", "wait"):
            self._go_wrong(operation.method, variables[0])
        elif operation.method == "read":
            self._read(operation, variables, begun)
        else:
            self._change(operation, variables, begun)

    def finish(self):
        """Wait until all changes of this worker are made."""
        self.strategy.flush()
        self._close(range(self.strategy.num_ps))

    def _go_wrong(self, method, variable):
        if method == "wait":
            time.sleep(0.001)
        elif method == "wrong shape":
            with pytest.raises(ValueError, match="shape"):
                variable.assign_add(np.ones((ROWS + 1, 2), variable.dtype))
        elif method == "wrong row":
            with pytest.raises((IndexError, ValueError), match="row"):
                variable.sparse_read([ROWS])
        else:
            self.finish()
            if method == "fail":
                with pytest.raises((RuntimeError, ValueError), match="no such gradient"):
                    self._push_what_fails(variable)
                for _ in shards_of(variable):
                    with suppress(RuntimeError):  # of the other servers of the shards
                        self.strategy.flush()

    def _push_what_fails(self, variable):
        self.strategy.push(variable, np.ones(variable.shape, variable.dtype), FAILS)
        self.strategy.flush()

    def _read(self, operation, variables, begun):
        if operation.rows is not None:
            (variable,) = variables
            found = [variable.sparse_read(list(operation.rows))]
        else:
            found = self.strategy.read(variables) if len(variables) > 1 else [variables[0].numpy()]
        ended = time.monotonic()
        for variable, array in zip(variables, found, strict=True):
            flat = array.reshape(len(array), -1)
            if (flat != flat[:, :1]).any():
                self.torn.append(f"{variable.name}: {[np.unique(row)[:4].tolist() for row in flat]}")
            self._note(variable, "read", operation.rows, flat[:, 0].copy(), begun, ended)

    def _change(self, operation, variables, begun):
        method, rows = operation.method, operation.rows
        numbers = [np.array(of_one, one.dtype) for of_one, one in zip(operation.numbers, variables, strict=True)]
        values = [
            np.repeat(of_one, one.shape[1], 0).reshape(-1, one.shape[1])
            for of_one, one in zip(numbers, variables, strict=True)
        ]
        if rows is not None:
            slices = IndexedSlices(values[0], list(rows))
            if method in RULES:
                self.strategy.push(variables[0], slices, RULES[method])
            else:
                getattr(variables[0], method)(slices)
        elif len(variables) > 1 or method in RULES:
            self.strategy.push(variables, values, RULES.get(method, method))
        else:
            getattr(variables[0], method)(values[0])
        for variable, of_one in zip(variables, numbers, strict=True):
            self._note(variable, method, rows, of_one, begun, None)

    def _note(self, variable, method, rows, numbers, begun, ended):
        """Note an operation at each shard that it meets. What was under way at its server is done."""
        start, servers, changes = 0, [], []
        for shard in shards_of(variable):
            stop = start + shard.shape[0]
            inside = range(start, stop)
            places = [at for at, row in enumerate(range(ROWS) if rows is None else rows) if row in inside]
            if places or method in RULES:  # a rule counts a gradient without rows of a shard, too
                its_rows = None if rows is None else tuple(rows[at] - start for at in places)
                event = Event(self.strategy.topology.rank, method, its_rows, numbers[places], begun)
                self.events.setdefault(shard.name, []).append(event)
                servers.append(shard.server)
                if ended is None:
                    changes.append((shard.server, event))
                else:
                    event.ended = ended
            start = stop
        if ended is not None:
            self._close(servers)
        self._open += changes

    def _close(self, servers):
        now = time.monotonic()
        for server, event in self._open:
            if server in servers:
                event.ended = now
        self._open = [(server, event) for server, event in self._open if server not in servers]


def shards_of(variable):
    return variable.variables if isinstance(variable, ShardedVariable) else [variable]


class State(NamedTuple):
    """What the model knows of an array: its rows, and what the rules keep."""

    value: Array
    velocity: Array
    count: int

    @property
    def key(self):
        return self.value.tobytes(), self.velocity.tobytes(), self.count


def changed(state, event):
    """Make one change in the model."""
    value, velocity, count = state.value.copy(), state.velocity.copy(), state.count
    given, rows, method = event.numbers, event.rows, event.method
    if method in RULES:
        gradient, touched = given, np.arange(len(value))
        if rows is not None:
            gradient, rows = np.zeros_like(value), np.array(rows, int)
            np.add.at(gradient, rows, given)
            touched = touched if method == "mix" else np.unique(rows)
        part = gradient[touched]
        if method == "sgd":
            value[touched] -= value.dtype.type(0.5) * part
        elif method == "momentum":
            velocity[touched] = value.dtype.type(0.5) * velocity[touched] + part
            value[touched] -= value.dtype.type(0.5) * velocity[touched]
        else:
            count += 1
            value[:] = (3 * value + part + count) % PRIME
        return State(value, velocity, count)
    for at, number in zip(range(len(value)) if rows is None else rows, given, strict=True):
        if method in ("assign", "scatter_update"):
            value[at] = number
        elif method in ("assign_add", "scatter_add"):
            value[at] += number
        elif method in ("assign_sub", "scatter_sub"):
            value[at] -= number
        elif method == "scatter_mul":
            value[at] *= number
        else:
            value[at] = max(value[at], number) if method == "scatter_max" else min(value[at], number)
    return State(value, velocity, count)


def outcomes(states, parts):
    """Find all states that may be left by orders of the events of all workers that explain what was read."""
    todo = [(state, (0,) * len(parts)) for state in states]
    seen = {(state.key, at) for state, at in todo}
    ends = []
    while todo:
        state, at = todo.pop()
        left = [part[place] for part, place in zip(parts, at, strict=True) if place < len(part)]
        if not left:
            ends.append(state)
            continue
        first_end = min(event.ended for event in left)
        for worker, part in enumerate(parts):
            if at[worker] == len(part) or part[at[worker]].begun > first_end:
                continue
            event = part[at[worker]]
            after = state
            if event.method == "read":
                rows = slice(None) if event.rows is None else list(event.rows)
                if not np.array_equal(state.value[rows], event.numbers):
                    continue
            else:
                after = changed(state, event)
            place = (*at[:worker], at[worker] + 1, *at[worker + 1 :])
            if (after.key, place) not in seen:
                seen.add((after.key, place))
                todo.append((after, place))
    return ends


def check(first, rounds, text):
    """See that there is an order for every array."""
    for name, value in first.items():
        states = [State(value, np.zeros_like(value), 0)]
        for number, logs in enumerate(rounds):
            parts = [log.get(name, []) for log in logs]
            before, states = states, outcomes(states, parts)
            shown = "\n".join(str(event) for part in parts for event in part)
            where = f"no order explains what happened to {name!r} in round {number}, from {before}"
            assert states, f"{text}: {where}:\n{shown}"


def run_program(comm, seed):
    """Let the workers work, and look for an order."""
    draw = random.Random(seed)
    num_ps = draw.randint(1, max(1, min(3, comm.size - 1)))
    workers, kinds = num_workers(comm, num_ps), draw_kinds(draw)
    counts = [[draw.choice([0, 1, 3, 6, 9]) for _ in range(NUM_ROUNDS)] for _ in range(workers)]
    ends = [
        NUM_ROUNDS if worker == 0 or draw.random() < 0.7 else draw.randrange(NUM_ROUNDS) for worker in range(workers)
    ]
    plans = [[[draw_operation(draw, kinds) for _ in range(count)] for count in of_worker] for of_worker in counts]
    staleness, placement = draw.choice([None, None, 0, 1]), draw.choice(["round_robin", "bytes"])
    cut = FixedIfCut(draw.randint(2, 4))
    logs = [{} for _ in range(NUM_ROUNDS + 1)]
    torn = []
    first = {}
    with ParameterServerStrategy(
        comm=comm, num_ps=num_ps, staleness=staleness, placement=placement, variable_partitioner=cut
    ) as strategy:
        is_ps = strategy.is_ps
        if is_ps:
            strategy.serve()
        else:
            variables = make_variables(strategy, kinds, cut)
            first = {shard.name: shard.numpy()[:, 0].copy() for one in variables for shard in shards_of(one)}
            strategy.barrier()
            worker = Worker(strategy, variables, kinds)
            rank = strategy.topology.rank
            for number in range(ends[rank]):
                worker.events = logs[number]
                for operation in plans[rank][number]:
                    worker.make(operation)
                worker.finish()
                strategy.step_done()
                strategy.barrier()
            if ends[rank] == NUM_ROUNDS:
                worker.events = logs[NUM_ROUNDS]
                worker.make(Operation("read", tuple(range(len(kinds)))))
            torn = worker.torn
    everyone = [found for found in comm.allgather((is_ps, first, logs, torn)) if not found[0]]
    text = f"seed {seed}, {workers} workers, {num_ps} servers, staleness {staleness}"
    assert [line for found in everyone for line in found[3]] == [], f"{text}: a read was no snapshot"
    check(everyone[0][1], [[found[2][number] for found in everyone] for number in range(NUM_ROUNDS + 1)], text)


class FixedIfCut:
    """A partitioner that cuts some of the variables, which are made in order."""

    def __init__(self, num_shards):
        self.is_cut = False
        self._fixed = partitioners.FixedShardsPartitioner(num_shards)

    def __call__(self, shape, dtype):
        return self._fixed(shape, dtype) if self.is_cut else [1, 1]


def make_variables(strategy, kinds, cut):
    """Make the variables: row r begins with the number r."""
    variables = []
    with strategy.scope():
        for number, kind in enumerate(kinds):
            cut.is_cut = kind.is_cut
            rows = np.arange(ROWS, dtype=kind.dtype)[:, None]
            variables.append(Variable(np.repeat(rows, kind.width, 1), name=f"v{number}"))
    return variables


@pytest.mark.core
def test_reads_of_workers_are_explained_by_an_order(comm):
    for number in range(NUM_PROGRAMS):
        run_program(comm, SEED + number)


@pytest.mark.no_mpi
def test_search_of_an_order_fails_where_there_is_none():
    """Else the test above could not fail."""

    def event(worker, method, number, begun, ended=np.inf):
        return Event(worker, method, None, np.array([number]), begun, ended)

    zero = [State(np.zeros(1), np.zeros(1), 0)]
    add, assign = event(0, "assign_add", 2, 0, 9), event(1, "assign", 5, 0, 9)
    assert {float(state.value[0]) for state in outcomes(zero, [[add], [assign]])} == {5, 7}
    assert outcomes(zero, [[add, event(0, "read", 7, 9, 10)], [assign]])
    assert not outcomes(zero, [[add, event(0, "read", 9, 9, 10)], [assign]]), "the change was made twice"
    assert not outcomes(zero, [[add, event(0, "read", 0, 9, 10)], [assign]]), "a worker reads its own writes"
    assert outcomes(zero, [[add], [event(1, "read", 0, 1, 2)]])
    assert not outcomes(zero, [[add], [event(1, "read", 0, 9.5, 10)]]), "the change was known to be made"
    reads = [event(1, "read", 2, 1, 2), event(1, "read", 0, 3, 4)]
    assert not outcomes(zero, [[add], reads]), "a read fell behind"
    mixes = [[event(0, "mix", 1, 0)], [event(1, "mix", 2, 0)]]
    assert {float(state.value[0]) for state in outcomes(zero, mixes)} == {3 * 2 + 2 + 2, 3 * 3 + 1 + 2}
