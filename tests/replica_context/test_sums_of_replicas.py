"""Sums over a chosen number of replicas: the same bits on any number of ranks, nodes and transports."""

import time
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.contributions import in_tree_order
from support.transports import set_sizes

from mpidist import MultiWorkerMirroredStrategy, Variable, get_replica_context
from mpidist.context_stack import parts_of
from mpidist.options import CommunicationOptions

SLOW = [HealthCheck.too_slow]  # on a busy machine
UFUNCS = {"sum": np.add, "mean": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def simulate(op, parts):
    """Reduce the arrays of all replicas in one loop, without this library."""
    dtype = parts[0].dtype
    wide = np.dtype(np.float32) if dtype == np.float16 else dtype
    if op == "mean" and dtype.kind in "iu":
        wide = np.dtype({1: np.int32, 2: np.int32, 4: np.int64, 8: np.float64}[dtype.itemsize])
    with np.errstate(all="ignore"):
        total = in_tree_order(UFUNCS[op], [part.astype(wide) for part in parts])
        if op == "mean":
            result = np.float32 if dtype.kind in "iu" and dtype.itemsize < 4 else np.float64
            return (total / len(parts)).astype(dtype if dtype.kind == "f" else result)
        return total.astype(dtype)


@cache
def numbers(replica, index, shape, dtype):
    """Numbers of very different sizes, so that another order gives other bits."""
    rng = np.random.default_rng([replica, index])
    if np.dtype(dtype).kind in "iu":
        return rng.integers(0, 100, shape).astype(dtype)
    return (rng.normal(size=shape) * 10.0 ** rng.integers(-3, 3, shape)).astype(dtype)


CASES = [
    [((), "f8")],
    [((5,), "f4"), ((0,), "f4"), ((3, 2), "f8"), ((7,), "f2")],
    [((4000,), "f4"), ((3000,), "f4"), ((11,), "i1"), ((2, 2), "i8"), ((1,), "u4")],
    [((70_000,), "f4")],
    [((1000,), "f4")] * 20,
]


@pytest.mark.parametrize("total", [7, 8])
def test_bits_are_those_of_the_simulation(total, comm, placement, monkeypatch):
    set_sizes(monkeypatch, chunk_bytes=16 << 10, least_bytes=256, one_shot_bytes=2 << 10)
    with MultiWorkerMirroredStrategy(replicas=total) as strategy:
        for specs, op in product(CASES, UFUNCS):

            def step(specs=specs, op=op):
                own = get_replica_context()
                return own.all_reduce(
                    op, [numbers(own.replica_id_in_sync_group, at, *spec).copy() for at, spec in enumerate(specs)]
                )

            result = strategy.experimental_local_results(strategy.run(step))[0]
            for at, spec in enumerate(specs):
                expected = simulate(op, [numbers(replica, at, *spec) for replica in range(total)])
                got = np.asarray(result[at])
                assert got.dtype == expected.dtype
                assert got.tobytes() == expected.tobytes(), (op, spec)


@pytest.mark.core
@pytest.mark.parametrize("transport", ["mpi", "shared_memory"], indirect=True)
def test_hard_sum_is_exact_on_any_ranks(transport, comm, placement):
    """In rank order this is 5.0, or 4.0, by the number of ranks."""
    hard = [1e16, 1.0, -1e16, 1.0, 1.0, 1.0, 1.0, 1.0]
    with MultiWorkerMirroredStrategy(replicas=8) as strategy:
        value = strategy.experimental_distribute_values_from_function(lambda own: hard[own.replica_id_in_sync_group])
        assert strategy.reduce("sum", value) == 4.0
        arrays = strategy.experimental_distribute_values_from_function(
            lambda own: np.full(50_000, hard[own.replica_id_in_sync_group])
        )
        assert (strategy.reduce("sum", arrays) == 4.0).all()
        roots = strategy.extended.batch_reduce_to("sum", [(arrays, 0), (value, "all"), (value, comm.size - 1)])
        assert [root is not None for root in roots] == [comm.rank == 0, True, comm.rank == comm.size - 1]
        assert all((np.asarray(root) == 4.0).all() for root in roots if root is not None)


@pytest.mark.ranks(3, 4)
def test_bytes_are_those_of_the_rows(comm, monkeypatch):
    """With a power of two of ranks as many bytes as without replicas; with three, 4/3 as many sent."""
    monkeypatch.setenv("MPIDIST_TRANSPORT", "mpi")
    count = 3 * 4 * 1000

    def sent(strategy, options=None):
        traffic = parts_of(strategy).group.levels.world.traffic
        traffic.clear()
        strategy.run(lambda: get_replica_context().all_reduce("sum", np.ones(count), options))
        return comm.allreduce(sum(traffic.nbytes.values()))

    with MultiWorkerMirroredStrategy() as strategy:
        today = sent(strategy, CommunicationOptions(reproducible=True))
    with MultiWorkerMirroredStrategy(replicas=8) as strategy:
        rows = sent(strategy)
    assert rows == today if comm.size != 3 else rows == sum(busier_directions(count * 8, (2, 2, 1)))


def busier_directions(nbytes, rows):
    """Return the bytes of the busier direction of each rank's link, for ranks that send so many rows."""
    shard = nbytes // len(rows)
    rest = nbytes - shard
    sent = [own * rest + rest for own in rows]
    received = [(sum(rows) - own) * shard + rest for own in rows]
    assert sum(sent) == sum(received) == 2 * rest * len(rows) * 4 // 3
    return list(map(max, sent, received))


@pytest.mark.parametrize("total", [5, 8])
def test_memory_of_sums_is_not_shared_by_results_and_started_calls(total, comm, placement):
    """So large are the arrays that a rank keeps the memory of its replicas' sums; in chunks as the cost model says."""
    shapes = [(90_000,), (3, 30_000), (300_001,), (70_000,)]

    def step():
        own = get_replica_context()
        time.sleep(0.02 * comm.rank)  # a rank opens its second call while its first one waits for the others
        values = [numbers(own.replica_id_in_sync_group, at, shape, "f4").copy() for at, shape in enumerate(shapes)]
        started = [own.start_all_reduce("sum", value) for value in values[:2]]
        results = [own.all_reduce("sum", value) for value in values[2:]]
        return [pending.wait() for pending in started] + results

    with MultiWorkerMirroredStrategy(replicas=total) as strategy:
        results = strategy.experimental_local_results(strategy.run(step))[0]
        for at, shape in enumerate(shapes):
            expected = simulate("sum", [numbers(replica, at, shape, "f4") for replica in range(total)])
            assert np.asarray(results[at]).tobytes() == expected.tobytes(), shape


@st.composite
def programs(draw):
    """Reductions in a random order: (op, specs, whether it is started) of each."""
    shapes = st.sampled_from([(), (1,), (3,), (64,), (5, 7), (5000,), (0, 2)])
    specs = st.lists(st.tuples(shapes, st.sampled_from(["f4", "f8", "f2", "i4"])), min_size=1, max_size=4)
    return draw(st.lists(st.tuples(st.sampled_from(list(UFUNCS)), specs, st.booleans()), min_size=1, max_size=5))


def test_random_programs_are_those_of_the_simulation(comm, placement, monkeypatch):
    set_sizes(monkeypatch, chunk_bytes=4 << 10, least_bytes=256, one_shot_bytes=1 << 10)
    totals = np.random.default_rng([*placement]).integers(comm.size, 17, 2)
    strategies = [MultiWorkerMirroredStrategy(replicas=int(total)) for total in totals]

    @settings(max_examples=8, database=None, derandomize=True, deadline=None, suppress_health_check=SLOW)
    @given(programs())
    def run(program):
        for strategy in strategies:

            def step():
                own, results = get_replica_context(), []
                for op, specs, is_started in program:
                    value = [numbers(own.replica_id_in_sync_group, at, *spec).copy() for at, spec in enumerate(specs)]
                    results.append(own.start_all_reduce(op, value) if is_started else own.all_reduce(op, value))
                return [result.wait() if hasattr(result, "wait") else result for result in results]

            results = strategy.experimental_local_results(strategy.run(step))[0]
            for (op, specs, _), arrays in zip(program, results, strict=True):
                for at, spec in enumerate(specs):
                    parts = [numbers(replica, at, *spec) for replica in range(strategy.num_replicas_in_sync)]
                    assert np.asarray(arrays[at]).tobytes() == simulate(op, parts).tobytes(), (op, spec)

    run()
    for strategy in strategies:
        strategy.close()


RULES = ("SUM", "MEAN", "ONLY_FIRST_REPLICA", "NONE", "ON_READ SUM", "ON_READ MEAN")
SHAPE = (7,)


class Step(NamedTuple):
    """One step of a program: what every replica does."""

    kind: str  # `"reduce"`, `"assign"`, `"assign_add"` or `"assign_sub"`
    variable: int  # which variable takes part
    seed: int  # of the drawn


PROGRAMS = st.lists(
    st.builds(
        Step, st.sampled_from(["reduce", "assign", "assign_add", "assign_sub"]), st.integers(0, 5), st.integers(0, 9)
    ),
    min_size=1,
    max_size=8,
)
CHANGES = {"assign": lambda old, new: new, "assign_add": np.add, "assign_sub": np.subtract}


def drawn(seed, replica):
    """Numbers of very different sizes. What is assigned without an aggregation is the same on all replicas."""
    rng = np.random.default_rng([seed, replica])
    return (rng.normal(size=SHAPE) * 10.0 ** rng.integers(-3, 3, SHAPE)).astype(np.float32)


def add(parts):
    return in_tree_order(np.add, parts)


def aggregate(rule, parts):
    if rule == "SUM":
        return add(parts)
    return (add(parts) / len(parts)).astype(np.float32) if rule == "MEAN" else parts[0]


def simulate_program(program, total):
    """Run a program in one loop over the replicas, without this library. Returns what the variables read at the end."""
    mirrored = [np.ones(SHAPE, np.float32) for _ in RULES]
    own = [[np.ones(SHAPE, np.float32) for _ in range(total)] for _ in RULES]
    for step in program:
        rule = RULES[step.variable]
        parts = [drawn(step.seed, 0 if rule == "NONE" else replica) for replica in range(total)]
        if step.kind == "reduce":  # each replica adds the mean of all to its metrics
            mean = (add(parts) / total).astype(np.float32)
            for at in (4, 5):
                own[at] = [copy + mean for copy in own[at]]
        elif rule.startswith("ON_READ"):
            copies = own[step.variable]
            own[step.variable] = [CHANGES[step.kind](old, new) for old, new in zip(copies, parts, strict=True)]
        else:
            mirrored[step.variable] = CHANGES[step.kind](mirrored[step.variable], aggregate(rule, parts))
    return [*mirrored[:4], add(own[4]), (add(own[5]) / total).astype(np.float32)]


def run(strategy, program):
    with strategy.scope():
        variables = [
            Variable(
                np.ones(SHAPE, np.float32),
                aggregation=rule.split()[-1],
                synchronization="ON_READ" if rule.startswith("ON_READ") else "AUTO",
            )
            for rule in RULES
        ]

    def body():
        context = get_replica_context()
        assert context is not None
        for step in program:
            is_alike = RULES[step.variable] == "NONE"
            value = drawn(step.seed, 0 if is_alike else context.replica_id_in_sync_group)
            if step.kind == "reduce":
                mean = context.all_reduce("mean", value)
                for at in (4, 5):
                    variables[at].assign_add(mean)
            else:
                getattr(variables[step.variable], step.kind)(value)

    strategy.run(body)
    return [variable.numpy() for variable in variables]


def test_programs_give_the_bits_of_a_plain_loop(comm, placement):
    totals = np.random.default_rng([*placement]).integers(comm.size, 17, 2)
    strategies = [MultiWorkerMirroredStrategy(replicas=int(total)) for total in totals]

    @settings(max_examples=6, database=None, derandomize=True, deadline=None, suppress_health_check=SLOW)
    @given(PROGRAMS)
    def compare(program):
        for strategy in strategies:
            expected = simulate_program(program, strategy.num_replicas_in_sync)
            for rule, got, wanted in zip(RULES, run(strategy, program), expected, strict=True):
                assert got.tobytes() == wanted.tobytes(), (rule, strategy.num_replicas_in_sync)

    compare()
    for strategy in strategies:
        strategy.close()
