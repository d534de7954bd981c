"""`Strategy.run` where the number of replicas was chosen: what each replica is, sees, passes and gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.everywhere import raises_everywhere

from mpidist import (
    CommunicationOptions,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    PerReplica,
    ReduceOp,
    ReductionToOneDevice,
    Variable,
    get_replica_context,
    get_strategy,
)
from mpidist.context_stack import parts_of
from mpidist.errors import InvalidArgumentError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

pytestmark = pytest.mark.core


def context() -> Any:
    return get_replica_context()


def replica_id() -> int:
    return context().replica_id_in_sync_group


def totals(size: int) -> list[int]:
    return [size, size + 1, 2 * size, 8]


@pytest.fixture(params=range(4), ids=["P", "P+1", "2P", "8"])
def strategy(request: pytest.FixtureRequest, comm: Intracomm) -> Any:
    with MirroredStrategy(replicas=totals(comm.size)[request.param]) as made:
        yield made


def ids_here(strategy: Any) -> range:
    total, size, rank = strategy.num_replicas_in_sync, strategy.topology.size, strategy.topology.rank
    least, more = divmod(total, size)
    start = rank * least + min(rank, more)
    return range(start, start + least + (rank < more))


def test_replicas_lie_over_the_ranks_in_blocks(strategy: Any) -> None:
    def describe() -> Any:
        own = context()
        return (own.replica_id_in_sync_group, own.num_replicas_in_sync, own.strategy is strategy, own.devices)

    seen = strategy.run(describe)
    rank, total = strategy.topology.rank, strategy.num_replicas_in_sync
    assert seen[0].values == tuple(ids_here(strategy))
    assert seen[1].values == (total,) * len(ids_here(strategy))
    assert [part for name in seen[3] for part in name.values] == [f"/rank:{rank}/cpu:0"] * len(ids_here(strategy))
    assert len(strategy.extended.worker_devices) == total


def test_results_are_values_of_the_replicas(strategy: Any) -> None:
    ids = tuple(ids_here(strategy))
    given = strategy.experimental_distribute_values_from_function(lambda own: own.replica_id_in_sync_group * 1.0)
    result = strategy.run(lambda x, y, z: {"sum": x + y, "none": None, "z": z}, args=(given, 10), kwargs={"z": given})
    assert result["sum"].values == tuple(at + 10.0 for at in ids)
    assert result["none"] is None
    assert strategy.experimental_local_results(result["z"]) == tuple(map(float, ids))
    nests = strategy.experimental_local_results([result["sum"], 1])
    assert nests == tuple([at + 10.0, 1] for at in ids)
    assert strategy.experimental_local_results("plain") == ("plain",)


def test_first_example_of_tensorflow() -> None:
    """Reference S4: two devices of one process; in a job of more ranks, on a communicator of one rank each."""
    from mpi4py import MPI

    with MirroredStrategy(devices=["CPU:0", "CPU:1"], comm=MPI.COMM_SELF) as strategy:
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


def test_all_reduce_counts_every_replica(strategy: Any) -> None:
    total = strategy.num_replicas_in_sync

    def step() -> Any:
        own = float(replica_id())
        return context().all_reduce("sum", {"a": np.full((2, 3), own), "b": [own, np.float16(own)]})

    for part in strategy.experimental_local_results(strategy.run(step)):
        expected = total * (total - 1) / 2
        assert (part["a"] == expected).all()
        assert part["b"] == [expected, expected]
        assert part["b"][1].dtype == np.float16


def test_results_are_shared_and_read_only(strategy: Any) -> None:
    def step() -> Any:
        result = context().all_reduce("sum", np.ones(3))
        with pytest.raises(ValueError, match="read-only"):
            result += 1
        return result

    first, *others = strategy.run(step).values
    assert all(other is first for other in others)


def test_outs_are_those_of_each_replica(strategy: Any) -> None:
    total = strategy.num_replicas_in_sync

    def step() -> Any:
        values, later = [np.full(1000, 1.0), np.full(3, 2.0)], np.full(5, 3.0)
        started = context().start_all_reduce("sum", later, out=later)
        assert context().all_reduce("sum", values, out=values) is values
        assert started.wait() is later
        return [*values, later]

    for part in strategy.experimental_local_results(strategy.run(step)):
        assert [array.tolist() for array in part] == [[total * at] * count for at, count in ((1, 1000), (2, 3), (3, 5))]


def test_gathers_are_in_the_order_of_replicas(strategy: Any) -> None:
    total, ids = strategy.num_replicas_in_sync, ids_here(strategy)

    def step() -> Any:
        own = replica_id()
        return context().all_gather({"a": np.array([own]), "b": np.full((2, own), own)}, 0 if own < 0 else -1)

    gathered = strategy.run(step)
    expected = np.concatenate([np.full((2, at), at) for at in range(total)], axis=1)
    for part in strategy.experimental_local_results(gathered):
        assert part["a"].tolist() == list(range(total))
        assert part["b"].tolist() == expected.tolist()
    across = strategy.gather(PerReplica(tuple(np.array([at]) for at in ids)), 0)
    assert across.tolist() == list(range(total))


def test_reduce_scatter_gives_each_replica_a_part(strategy: Any) -> None:
    total = strategy.num_replicas_in_sync
    parts = strategy.run(lambda: context().reduce_scatter("sum", np.arange(3 * total + 1.0)))
    whole = np.arange(3 * total + 1.0) * total
    bounds = [at * 3 + min(at, 1) for at in range(total + 1)]
    for at, part in zip(ids_here(strategy), parts.values, strict=True):
        assert part.tolist() == whole[bounds[at] : bounds[at + 1]].tolist()


@pytest.mark.parametrize(
    ("value", "axis", "text"),
    [(np.ones(9), 1, r"array of shape \[9\] has no axis 1"), (1.0, 0, "scalar has no axis 0")],
)
def test_reduce_scatter_along_no_axis_is_refused_before_data_moves(
    strategy: Any, comm: Intracomm, value: Any, axis: int, text: str
) -> None:
    with raises_everywhere(comm, InvalidArgumentError, f"^reduce_scatter along axis {axis}: an? {text}$"):
        strategy.run(lambda: context().reduce_scatter("sum", value, axis))


def test_merge_call_sees_all_replicas_of_the_rank(strategy: Any) -> None:
    ids, calls = ids_here(strategy), []

    def merge(inner: Any, value: Any, rate: Any, *, name: str) -> Any:
        assert inner is strategy
        assert get_strategy() is strategy
        assert get_replica_context() is None
        calls.append((value.values, rate.values, name))
        return strategy.reduce("sum", value), value

    def step() -> Any:
        own = np.float64(replica_id())
        total, mine = context().merge_call(merge, args=(own, 0.5), kwargs={"name": "n"})
        return total, mine == own

    total = strategy.num_replicas_in_sync
    for sum_, is_own in strategy.experimental_local_results(strategy.run(step)):
        assert (sum_, is_own) == (total * (total - 1) / 2, True)
    assert calls == [(tuple(map(float, ids)), (0.5,) * len(ids), "n")]


def test_reduce_along_an_axis_weighs_rows(strategy: Any) -> None:
    total = strategy.num_replicas_in_sync
    value = strategy.experimental_distribute_values_from_function(
        lambda own: np.full((own.replica_id_in_sync_group, 2), float(own.replica_id_in_sync_group))
    )
    rows = [float(at) for at in range(total) for _ in range(at)]
    if rows:
        assert strategy.reduce("mean", value, axis=0) == pytest.approx([np.mean(rows)] * 2)
    assert strategy.reduce("sum", value, axis=0).tolist() == [sum(rows)] * 2


def test_value_of_a_rank_is_no_value_of_a_replica(strategy: Any, comm: Intracomm) -> None:
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


WRONG: dict[str, tuple[Callable[[int], Any], str]] = {
    "skips": (lambda own: None, "replica {0} returned from the function, while replica"),
    "other call": (
        lambda own: context().all_gather(np.ones(1), 0),
        "replica {0} called all_gather along axis 0, while",
    ),
    "other op": (lambda own: context().all_reduce("mean", np.ones(2)), "replica {0} passes reduce_op MEAN, and"),
    "other shape": (lambda own: context().all_reduce("sum", np.ones(3)), "array 0 of replica {0} is f64.3., and"),
    "other nest": (lambda own: context().all_reduce("sum", [np.ones(2)]), "replica {0} passes"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_replica_that_differs_is_named_on_every_rank(kind: str, comm: Intracomm) -> None:
    """Acceptance (9). Of two replicas or more on each rank, the second one of rank 0 differs."""
    wrong, text = WRONG[kind]
    with MirroredStrategy(replicas=2 * comm.size) as strategy:

        def step() -> Any:
            return wrong(1) if replica_id() == 1 else context().all_reduce("sum", np.ones(2))

        with raises_everywhere(comm, InvalidArgumentError, text.format(1)):
            strategy.run(step)
        assert strategy.run(lambda: context().all_reduce("sum", 1.0)).values == (2 * comm.size,) * 2


def test_replica_that_raises_is_named_on_every_rank(comm: Intracomm) -> None:
    with MirroredStrategy(replicas=2 * comm.size) as strategy:

        def step() -> Any:
            if replica_id() == 1:
                raise KeyError("mine")
            return context().all_reduce("sum", np.ones(2))

        error: Exception | None = None
        try:
            strategy.run(step)
        except Exception as caught:
            error = caught
        if comm.rank == 0:
            assert repr(error) == "KeyError('mine')"
        else:
            assert isinstance(error, InvalidArgumentError)
            assert "replica 1 raised KeyError: 'mine'" in str(error)
        assert strategy.run(lambda: context().all_reduce("sum", 1.0)).values == (2 * comm.size,) * 2


def test_options_that_add_in_another_order_are_refused(comm: Intracomm) -> None:
    total = 2 * comm.size
    for options in (CommunicationOptions(compression="bf16"), CommunicationOptions(implementation="RING")):
        with raises_everywhere(comm, ValueError, "cannot be used where the number of replicas is chosen"):
            MultiWorkerMirroredStrategy(None, options, replicas=total)
        with MirroredStrategy(replicas=total) as strategy, raises_everywhere(comm, ValueError, "cannot be used"):
            strategy.run(lambda options=options: context().all_reduce("sum", 1.0, options))
    ops = ReductionToOneDevice(accumulation_fn=lambda one, other: one + other)
    with raises_everywhere(comm, ValueError, "ReductionToOneDevice cannot be used"):
        MirroredStrategy(cross_device_ops=ops, replicas=total)


@pytest.mark.ranks(min=2)
def test_too_few_replicas_are_refused(comm: Intracomm) -> None:
    """Acceptance (12)."""
    for kind in (MirroredStrategy, MultiWorkerMirroredStrategy):
        with raises_everywhere(comm, ValueError, rf"replicas={comm.size - 1} is too few for {comm.size} ranks"):
            kind(replicas=comm.size - 1)


def test_arguments_of_another_kind_are_refused(comm: Intracomm) -> None:
    for wrong in ("8", 2.0, True):
        with raises_everywhere(comm, TypeError, "replicas must be a whole number"):
            MirroredStrategy(replicas=wrong)  # type: ignore[arg-type]
    with raises_everywhere(comm, ValueError, "devices for replicas=9; leave one"):
        MirroredStrategy(["/cpu:0"] * 8, replicas=9)


@pytest.mark.ranks(min=2)
def test_ranks_that_choose_other_numbers_are_refused(comm: Intracomm) -> None:
    with raises_everywhere(comm, InvalidArgumentError, "replicas: rank 0: 8, chosen; "):
        MirroredStrategy(replicas=8 if comm.rank == 0 else 9)


def test_without_replicas_values_are_bare(comm: Intracomm) -> None:
    with MirroredStrategy() as strategy:
        assert strategy.run(lambda: context().all_reduce("sum", 1.0)) == comm.size
        assert parts_of(strategy).replicas.tree is None
        result = strategy.run(lambda: context().all_reduce("sum", np.ones(2)))
        result += 1  # each rank's own


def test_outs_are_written_before_a_replica_may_change_its_own(strategy: Any) -> None:
    total = strategy.num_replicas_in_sync

    def step() -> list[Any]:
        first, second = np.ones(3), np.ones(3)
        context().all_reduce("sum", first, out=first)
        first += 100
        started = context().start_all_reduce("sum", second, out=second)
        started.wait()
        second += 100
        return [first, second]

    for part in strategy.experimental_local_results(strategy.run(step)):
        assert [array.tolist() for array in part] == [[total + 100.0] * 3] * 2


@pytest.mark.parametrize(
    ("out", "text"),
    [
        (lambda: np.empty((2, 3)), "replica 1: out 0 must be an array f64.3."),
        (lambda: np.empty(3, np.float32), "replica 1: out 0 must be an array f64.3."),
        (lambda: np.empty(0).reshape(0), "replica 1: out 0 must be an array f64.3."),
        (lambda: [1.0, 2.0, 3.0], "out must be a nest of the same form"),
        (lambda: None, "replica 1 passes out none, and replica 0 some"),
    ],
)
def test_outs_of_all_replicas_are_checked(out: Callable[[], Any], text: str, comm: Intracomm) -> None:
    with MirroredStrategy(replicas=2 * comm.size) as strategy:

        def step() -> Any:
            value = np.ones(3)
            return context().all_reduce("sum", value, out=out() if replica_id() == 1 else value)

        with raises_everywhere(comm, InvalidArgumentError, text):
            strategy.run(step)


def test_result_of_merge_call_cannot_be_written_by_one_replica(strategy: Any) -> None:
    kept = np.ones(2)

    def step() -> Any:
        result = context().merge_call(lambda _: [kept, "text"])
        with pytest.raises(ValueError, match="read-only"):
            result[0][...] = 5
        return result[1]

    assert set(strategy.run(step).values) == {"text"}
    kept += 1  # the program's own array stays its own


def test_numbers_of_merge_call_are_those_of_the_replicas(strategy: Any) -> None:
    """Whether they are equal or not, so that a program does not depend on them, nor on the ranks."""

    def step(number: float) -> Any:
        return context().merge_call(lambda inner, value: inner.reduce("sum", value), args=(number,))

    assert set(strategy.run(step, args=(0.5,)).values) == {0.5 * strategy.num_replicas_in_sync}


def test_one_operation_can_be_written_in_many_ways(comm: Intracomm) -> None:
    with MirroredStrategy(replicas=3 * comm.size) as strategy:
        ways = ["sum", "SUM", ReduceOp.SUM]
        result = strategy.run(lambda: context().all_reduce(ways[replica_id() % 3], 1.0))
        assert set(result.values) == {3.0 * comm.size}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("is_raised", [False, True])
def test_replica_alone_on_its_rank_that_leaves_a_call_out_is_found(is_raised: bool, comm: Intracomm) -> None:
    """In the next call of its rank, which the other ranks would take for the call that was left out."""
    with MirroredStrategy(replicas=comm.size) as strategy:

        def step(number: int) -> Any:
            if number == 0 and replica_id() == comm.size - 1:
                if is_raised:
                    raise KeyError
                return None
            return context().all_reduce("sum", 1.0)

        def train() -> None:
            for number in range(2):
                try:
                    strategy.run(step, args=(number,))
                except KeyError:
                    continue

        rank = comm.size - 1
        text = (
            rf"rank {rank} left step 1 by KeyError"
            if is_raised
            else rf"strategy.run\(\): rank.* 0.*: 1; rank {rank}: 2"
        )
        with raises_everywhere(comm, InvalidArgumentError, text):
            train()


def test_what_all_replicas_wrote_stays_if_they_raise(strategy: Any) -> None:
    """A checkpoint that is written then must not depend on the number of ranks."""
    with strategy.scope():
        count = Variable(0)

    def step() -> None:
        count.assign_add(1)
        raise StopIteration

    with pytest.raises(StopIteration):
        strategy.run(step)
    assert int(count) == 1


@pytest.mark.filterwarnings("error")
def test_overflow_to_half_precision_is_a_result(strategy: Any) -> None:
    with np.errstate(all="raise"):
        result = strategy.run(lambda: context().all_reduce("sum", [np.full(2, 60000, np.float16), np.ones(3, "f2")]))
    total = strategy.num_replicas_in_sync
    assert (result[0].values[0] == (np.inf if total > 1 else 60000)).all()


def test_complex_products_have_the_same_bits(comm: Intracomm) -> None:
    """NumPy rounds a product of complex numbers by the length of the array, and so by the number of ranks."""
    from mpi4py import MPI

    def product(strategy: Any, count: int) -> Any:
        def step() -> Any:
            rng = np.random.default_rng(replica_id())
            return context().all_reduce("prod", rng.normal(size=count) + 1j * rng.normal(size=count))

        return strategy.run(step).values[0]

    with MirroredStrategy(replicas=16) as together, MirroredStrategy(replicas=16, comm=MPI.COMM_SELF) as alone:
        for count in (1, 2, 5, 1000):
            assert product(together, count).tobytes() == product(alone, count).tobytes()
