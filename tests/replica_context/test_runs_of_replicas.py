"""`Strategy.run` where the number of replicas was chosen: what each replica is, sees, passes and gets."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from support.everywhere import raises_everywhere
from support.replicas import context, local, replica_id

from mpidist import (
    CommunicationOptions,
    IndexedSlices,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    PerReplica,
    ReduceOp,
    ReductionToOneDevice,
    get_replica_context,
    get_strategy,
)
from mpidist.errors import InvalidArgumentError

pytestmark = [pytest.mark.core, pytest.mark.ranks(1, 3)]

several = pytest.mark.parametrize("strategy", ["2P+1"], indirect=True)


@pytest.fixture(params=["P", "2P+1"])
def strategy(request, comm):
    with MirroredStrategy(replicas=comm.size if request.param == "P" else 2 * comm.size + 1) as made:
        yield made


def ids_here(strategy):
    total, size, rank = strategy.num_replicas_in_sync, strategy.topology.size, strategy.topology.rank
    least, more = divmod(total, size)
    start = rank * least + min(rank, more)
    return range(start, start + least + (rank < more))


def test_replicas_lie_over_the_ranks_in_blocks(strategy):
    def describe():
        own = context()
        return (own.replica_id_in_sync_group, own.num_replicas_in_sync, own.strategy is strategy, own.devices)

    seen = strategy.run(describe)
    rank, total = strategy.topology.rank, strategy.num_replicas_in_sync
    assert seen[0].values == tuple(ids_here(strategy))
    assert seen[1].values == (total,) * len(ids_here(strategy))
    assert [part for name in seen[3] for part in name.values] == [f"/rank:{rank}/cpu:0"] * len(ids_here(strategy))
    assert len(strategy.extended.worker_devices) == total


def test_results_are_values_of_the_replicas(strategy):
    ids = tuple(ids_here(strategy))
    given = strategy.experimental_distribute_values_from_function(lambda own: own.replica_id_in_sync_group * 1.0)
    result = strategy.run(lambda x, y, z: {"sum": x + y, "none": None, "z": z}, args=(given, 10), kwargs={"z": given})
    assert result["sum"].values == tuple(at + 10.0 for at in ids)
    assert result["none"] is None
    assert strategy.experimental_local_results(result["z"]) == tuple(map(float, ids))
    nests = strategy.experimental_local_results([result["sum"], 1])
    assert nests == tuple([at + 10.0, 1] for at in ids)
    assert strategy.experimental_local_results("plain") == ("plain",)


@several
def test_values_of_two_forms_are_refused(strategy):
    def make(own):
        return [1, 2] if own.replica_id_in_sync_group % 2 else {"a": 1, "b": 2}

    result = strategy.run(lambda: make(context()))
    for call in (
        lambda: strategy.experimental_distribute_values_from_function(make),
        lambda: strategy.reduce("sum", result),
        lambda: strategy.gather(result, axis=0),
    ):
        with pytest.raises(InvalidArgumentError, match=r"replica \d passes .* nests of one form"):
            call()


@pytest.mark.no_mpi
def test_first_example_of_tensorflow():
    """Two devices of one process."""
    with MirroredStrategy(devices=["CPU:0", "CPU:1"]) as strategy:
        values = [
            strategy.experimental_distribute_values_from_function(
                lambda own, at=at: np.array([4 * at + 2 * own.replica_id_in_sync_group])
            )
            for at in range(2)
        ]
        text = "[PerReplica:{0: array([0]), 1: array([2])}, PerReplica:{0: array([4]), 1: array([6])}]"
        assert repr(values) == text
        assert strategy.extended.worker_devices == ("/rank:0/cpu:0", "/rank:0/cpu:1")
        assert strategy.run(lambda: context().devices)[0].values == ("/rank:0/cpu:0", "/rank:0/cpu:1")
        given = strategy.experimental_distribute_values_from_function(
            lambda own: [(1.0, [39.0, 2.0]), (3.0, [3.0, 41.0])][own.replica_id_in_sync_group]
        )
        for op, expected in (("sum", (4.0, [42.0, 43.0])), ("mean", (2.0, [21.0, 21.5]))):
            got = strategy.run(lambda value, op=op: context().all_reduce(op, value), args=(given,))
            assert [(one, list(other)) for one, other in strategy.experimental_local_results(got)] == [expected] * 2


@pytest.mark.ranks(3)
@pytest.mark.filterwarnings("error")
def test_all_reduce_counts_every_replica(strategy):
    """Results are shared and read-only; one operation can be written in many ways; an overflow is a result."""
    total, ways = strategy.num_replicas_in_sync, ["sum", "SUM", ReduceOp.SUM]

    def step():
        own = float(replica_id())
        values = {"a": np.full((2, 3), own), "b": [own, np.float16(own), np.full(2, 60000, np.float16)]}
        result = context().all_reduce(ways[replica_id() % 3], values)
        with pytest.raises(ValueError, match="read-only"):
            result["a"] += 1
        return result

    with np.errstate(all="raise"):
        parts = strategy.experimental_local_results(strategy.run(step))
    for part in parts:
        expected = total * (total - 1) / 2
        assert (part["a"] == expected).all()
        assert part["a"] is parts[0]["a"]
        assert part["b"][:2] == [expected, expected]
        assert part["b"][1].dtype == np.float16
        assert (part["b"][2] == np.inf).all()


def test_outs_are_those_of_each_replica(strategy):
    """And are written before a replica may change its own."""
    total = strategy.num_replicas_in_sync

    def step():
        values, later = [np.full(1000, 1.0), np.full(3, 2.0)], np.full(5, 3.0)
        started = context().start_all_reduce("sum", later, out=later)
        assert context().all_reduce("sum", values, out=values) is values
        values[1] += 100
        assert started.wait() is later
        later += 100
        return [*values, later]

    expected = [[total] * 1000, [2 * total + 100] * 3, [3 * total + 100] * 5]
    for part in strategy.experimental_local_results(strategy.run(step)):
        assert [array.tolist() for array in part] == expected


@pytest.mark.ranks(2, 3)
def test_repeated_calls_count_every_replica(strategy):
    """From the second one on they skip the checks, and add the arrays of a rank's replicas first."""
    total, kept = strategy.num_replicas_in_sync, {}

    def step(number, shape, into):
        value = np.full(shape, number + replica_id())
        out = {"value": value, "kept": kept.setdefault((replica_id(), shape), np.zeros(shape, int))}.get(into)
        result = reduced(value, out=out)
        assert out is None or result is out
        return result

    for number, shape, into in product(range(3), [(), (3,), (40_000,)], ["new", "value", "kept"]):
        for result in strategy.experimental_local_results(strategy.run(step, (number, shape, into))):
            assert np.all(result == total * number + total * (total - 1) // 2)
            assert result.flags.writeable == (into != "new")


def test_gather_takes_any_byte_order_of_each_replica(strategy):
    total = strategy.num_replicas_in_sync
    gathered = strategy.run(lambda: context().all_gather(np.array([replica_id()], "<>"[replica_id() % 2] + "i4"), 0))
    for result in strategy.experimental_local_results(gathered):
        assert (result.dtype, result.tolist()) == (np.int32, [*range(total)])


def test_gathers_are_in_the_order_of_replicas(strategy):
    total, ids = strategy.num_replicas_in_sync, ids_here(strategy)

    def step():
        own = replica_id()
        return context().all_gather({"a": np.array([own]), "b": np.full((2, own), own)}, -1)

    gathered = strategy.run(step)
    expected = np.concatenate([np.full((2, at), at) for at in range(total)], axis=1)
    for part in strategy.experimental_local_results(gathered):
        assert part["a"].tolist() == list(range(total))
        assert part["b"].tolist() == expected.tolist()
    across = strategy.gather(PerReplica(tuple(np.array([at]) for at in ids)), 0)
    assert across.tolist() == list(range(total))


def test_reduce_scatter_gives_each_replica_a_part(strategy, comm):
    total = strategy.num_replicas_in_sync
    parts = strategy.run(lambda: context().reduce_scatter("sum", np.arange(3 * total + 1.0)))
    whole = np.arange(3 * total + 1.0) * total
    bounds = [at * 3 + min(at, 1) for at in range(total + 1)]
    for at, part in zip(ids_here(strategy), parts.values, strict=True):
        assert part.tolist() == whole[bounds[at] : bounds[at + 1]].tolist()
    for value, axis, text in ((np.ones(9), 1, r"array of shape \[9\] has no axis 1"), (1.0, 0, "scalar has no axis 0")):
        with raises_everywhere(comm, InvalidArgumentError, f"^reduce_scatter along axis {axis}: an? {text}$"):
            strategy.run(lambda value=value, axis=axis: context().reduce_scatter("sum", value, axis))
    columns = strategy.run(lambda: context().reduce_scatter("sum", np.ones((2, total)), 1))
    assert local(strategy, columns) == [[[total], [total]]] * len(ids_here(strategy))


def test_merge_call_sees_all_replicas_of_the_rank(strategy):
    ids, calls, kept, total = ids_here(strategy), [], np.ones(2), strategy.num_replicas_in_sync

    def merge(inner, value, rate, *, name, made):
        assert inner is strategy
        assert get_strategy() is strategy
        assert get_replica_context() is None
        calls.append((value.values, rate.values, name))
        assert [one.row[0] for one in getattr(made, "values", [made])] == list(ids)
        # Numbers are those of the replicas, whether they are equal or not: a program does not depend on them.
        assert local(strategy, strategy.run(lambda: reduced(1.0))) == [total] * len(ids)  # inside of another run
        return strategy.reduce("sum", value), value, kept, inner.reduce("sum", rate)

    def step():
        own = np.float64(replica_id())
        total, mine, shared, rates = context().merge_call(
            merge, args=(own, 0.5), kwargs={"name": "n", "made": SimpleNamespace(row=np.full(2, own))}
        )
        with pytest.raises(ValueError, match="read-only"):
            shared[...] = 5
        return total, mine == own, rates

    for result in strategy.experimental_local_results(strategy.run(step)):
        assert result == (total * (total - 1) / 2, True, 0.5 * total)
    assert calls == [(tuple(map(float, ids)), (0.5,) * len(ids), "n")]
    kept += 1  # the program's own array stays its own


def test_merge_call_of_indexed_slices_reduces_them_on_any_number_of_ranks(strategy):
    """One object for all replicas of a rank, too."""
    total, same = strategy.num_replicas_in_sync, IndexedSlices(np.ones((1, 1)), [0])

    def step():
        own = IndexedSlices(np.full((1, 1), 1.0 + replica_id()), [0])
        return context().merge_call(lambda inner, *given: [inner.reduce("sum", rows) for rows in given], (own, same))

    for sums in local(strategy, strategy.run(step)):
        assert [rows.values.item() for rows in sums] == [total * (total + 1) / 2, total]


def test_value_of_a_rank_is_no_value_of_a_replica(strategy, comm):
    value = strategy.run(lambda: np.ones(2))
    assert [strategy.reduce("mean", value).tolist() for _ in range(3)] == [[1.0, 1.0]] * 3
    for call in (
        lambda: strategy.reduce("sum", 1.0),
        lambda: strategy.reduce("mean", np.ones(2)),
        lambda: strategy.reduce("sum", np.ones(2), axis=0),
        lambda: strategy.gather(np.ones(2), 0),
    ):
        with raises_everywhere(comm, ValueError, "this rank's and no replica's"):
            call()
    assert strategy.reduce("max", float(comm.rank)) == comm.size - 1
    with pytest.raises(ValueError, match="PerReplica has 9 components, and this rank carries"):
        strategy.reduce("sum", PerReplica((1.0,) * 9))


def reduced(value, **named):
    return context().all_reduce("sum", value, **named)


# What the second replica of rank 0 does, and what is said of it.
WRONG = {
    "skips": (lambda: None, "replica 1 returned from the function, while replica"),
    "other call": (lambda: context().all_gather(np.ones(1), 0), "replica 1 called all_gather along axis 0, while"),
    "other op": (lambda: context().all_reduce("mean", np.ones(3)), "replica 1 passes reduce_op MEAN, and"),
    "other shape": (lambda: reduced(np.ones(2)), "array 0 of replica 1 is f64.2., and"),
    "other nest": (lambda: reduced([np.ones(3)]), "replica 1 passes"),
    "no out": (lambda: reduced(np.ones(3)), "replica 1 passes out none, and replica 0 some"),
    "out 2 x 3": (lambda: reduced(np.ones(3), out=np.empty((2, 3))), "replica 1: out 0 must be an array f64.3."),
    "out float32": (lambda: reduced(np.ones(3), out=np.empty(3, "f4")), "replica 1: out 0 must be an array f64.3."),
    "empty out": (lambda: reduced(np.ones(3), out=np.empty(0)), "replica 1: out 0 must be an array f64.3."),
    "out list": (lambda: reduced(np.ones(3), out=[1.0, 2.0, 3.0]), "out must be a nest of the same form"),
}


@pytest.mark.ranks(3)
@several
def test_replica_that_differs_is_named_on_every_rank(strategy, comm):
    for name, (wrong, text) in WRONG.items():

        def step(name=name, wrong=wrong):
            value = np.ones(3)
            if replica_id() == 1:
                return wrong()
            return reduced(value, out=value) if "out" in name else reduced(value)

        with raises_everywhere(comm, InvalidArgumentError, text):
            strategy.run(step)
        assert local(strategy, strategy.run(lambda: reduced(1.0))) == [7.0] * len(ids_here(strategy))
        for value in map(np.ones, [3] * 3):  # from now on replica 1 differs in what would be a repeated call
            strategy.run(lambda value=value: [reduced(value.copy()), reduced(own := value.copy(), out=own)])


@pytest.mark.ranks(3)
@several
def test_replica_that_raises_is_named_on_every_rank(strategy, comm):
    def step():
        if replica_id() == 1:
            raise KeyError("mine")
        return reduced(np.ones(2))

    kind, text = (
        (KeyError, "^'mine'$") if comm.rank == 0 else (InvalidArgumentError, "replica 1 raised KeyError: 'mine'")
    )
    with pytest.raises(kind, match=text):
        strategy.run(step)
    assert local(strategy, strategy.run(lambda: reduced(1.0))) == [7.0] * len(ids_here(strategy))


def test_raise_together_in_run_one_replica_fails_all_raise(strategy):
    def step(failing):
        try:
            with strategy.raise_together("reading"):
                if replica_id() == failing:
                    raise KeyError(f"of {failing}")
        except KeyError as error:
            return str(error)
        return str(reduced(1))

    total, num_here = strategy.num_replicas_in_sync, len(ids_here(strategy))
    for failing in (total, 0, total - 1, total):
        expected = f"'of {failing}'" if failing < total else str(total)
        assert local(strategy, strategy.run(step, (failing,))) == [expected] * num_here


@several
def test_symmetric_empty_in_run_of_replicas_that_share_ranks_is_refused(strategy, comm):
    with raises_everywhere(comm, RuntimeError, "symmetric_empty requires being in cross-replica context"):
        strategy.run(lambda: strategy.symmetric_empty(2, "f4"))


@pytest.mark.ranks(3)
def test_wrong_numbers_of_replicas_and_options_are_refused(comm):
    for kind in (MirroredStrategy, MultiWorkerMirroredStrategy):
        with raises_everywhere(comm, ValueError, rf"replicas={comm.size - 1} is too few for {comm.size} ranks"):
            kind(replicas=comm.size - 1)
    for wrong in ("8", 2.0, True):
        with raises_everywhere(comm, TypeError, "replicas must be a whole number"):
            MirroredStrategy(replicas=wrong)
    with raises_everywhere(comm, ValueError, "devices for replicas=9; leave one"):
        MirroredStrategy(["/cpu:0"] * 8, replicas=9)
    with raises_everywhere(comm, InvalidArgumentError, "replicas: rank 0: 8, chosen; "):
        MirroredStrategy(replicas=8 if comm.rank == 0 else 9)
    # These add in another order.
    for options in (CommunicationOptions(compression="bf16"), CommunicationOptions(implementation="RING")):
        with raises_everywhere(comm, ValueError, "cannot be used where the number of replicas is chosen"):
            MultiWorkerMirroredStrategy(None, options, replicas=8)
        with MirroredStrategy(replicas=8) as strategy, raises_everywhere(comm, ValueError, "cannot be used"):
            strategy.run(lambda options=options: context().all_reduce("sum", 1.0, options))
    ops = ReductionToOneDevice(accumulation_fn=lambda one, other: one + other)
    with raises_everywhere(comm, ValueError, "ReductionToOneDevice cannot be used"):
        MirroredStrategy(cross_device_ops=ops, replicas=8)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("is_raised", [False, True])
def test_replica_alone_on_its_rank_that_leaves_a_call_out_is_found(is_raised, comm):
    """In the next call of its rank, which the other ranks would take for the call that was left out."""
    with MirroredStrategy(replicas=comm.size) as strategy:

        def step(number):
            if number == 0 and replica_id() == comm.size - 1:
                if is_raised:
                    raise KeyError
                return None
            return context().all_reduce("sum", 1.0)

        def train():
            for number in range(2):
                try:
                    strategy.run(step, args=(number,))
                except KeyError:
                    continue

        rank = comm.size - 1
        text = f"rank {rank} left step 1 by KeyError" if is_raised else rf"run\(\): rank.* 0.*: 1; rank {rank}: 2"
        with raises_everywhere(comm, InvalidArgumentError, text):
            train()


def test_complex_products_have_the_same_bits(comm):
    """NumPy rounds a product of complex numbers by the length of the array, and so by the number of ranks."""
    from mpi4py import MPI

    def product(strategy, count):
        def step():
            rng = np.random.default_rng(replica_id())
            return context().all_reduce("prod", rng.normal(size=count) + 1j * rng.normal(size=count))

        return strategy.run(step).values[0]

    with MirroredStrategy(replicas=16) as together, MirroredStrategy(replicas=16, comm=MPI.COMM_SELF) as alone:
        for count in (1, 2, 5, 1000):
            assert product(together, count).tobytes() == product(alone, count).tobytes()
