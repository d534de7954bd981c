"""`Strategy.reduce("mean", x, weight=n)`: sums of values times weights over sums of weights."""

import ml_dtypes
import numpy as np
import pytest
from support.everywhere import raises_everywhere, same_everywhere

import mpidist
from mpidist import MultiWorkerMirroredStrategy as MultiWorker
from mpidist import PerReplica
from mpidist.errors import InvalidArgumentError

pytestmark = pytest.mark.core


def test_weighted_mean_divides_by_the_sum_of_weights(comm, placement):
    with MultiWorker(comm=comm) as strategy:
        weights = [rank + 1 for rank in range(comm.size)]
        own = comm.rank + 1
        wanted = sum(weight * weight for weight in weights) / sum(weights)  # rank r has r + 1, and weighs r + 1
        value = {"a": np.full((2, 3), float(own)), "b": [float(own), np.int32(own)], "none": np.zeros((0, 2))}
        mean = strategy.reduce("mean", value, weight=own)
        assert np.allclose(mean["a"], wanted, rtol=1e-15)
        assert mean["b"] == [mean["a"][0, 0]] * 2
        assert mean["none"].shape == (0, 2)
        assert same_everywhere(comm, mean["a"])
        assert isinstance(mean["b"][0], float)
        assert np.all(value["a"] == own)


@pytest.mark.ranks(3)
def test_weighted_mean_of_exact_numbers_is_exact(comm):
    with MultiWorker(comm=comm) as strategy:
        value, out = np.arange(6.0) * comm.size + comm.rank, np.zeros(6)
        for weight in (1, 8.0, np.float32(0.5), np.array(2)):
            assert strategy.reduce("mean", value * 2, weight=weight, out=out) is out
            assert (out == strategy.reduce("mean", value * 2)).all()
        for dtype in (np.int8, np.float16):  # a product with the weight does not fit into them
            assert strategy.reduce("mean", np.full(2, 100, dtype), weight=1000).tolist() == [100, 100]
        # What weighs nothing does not count, as the mean of no rows, which is not a number.
        has_rows = comm.rank == comm.size - 1
        value = np.array([5.0, 7.0]) if has_rows else np.array([np.nan, np.inf])
        assert strategy.reduce("mean", value, weight=3 if has_rows else 0).tolist() == [5, 7]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("num_elements", [5, 100_000])
def test_weighted_means_in_turn_have_memory_of_their_own(comm, num_elements):
    """The products with the weights lie in memory that the calls share."""
    with MultiWorker(comm=comm) as strategy:
        value = [np.ones(num_elements, np.float32), np.ones((2, 3)), np.ones(num_elements, np.float16)]
        means = [strategy.reduce("mean", [its * step for its in value], weight=comm.rank) for step in range(4)]
        assert all((its == step).all() for step, mean in enumerate(means) for its in mean)
        assert all((its == 1).all() for its in value)


@pytest.mark.ranks(3)
def test_dtypes_are_those_of_means(comm):
    with MultiWorker(comm=comm) as strategy:
        for dtype in map(np.dtype, ("i1", "u2", "i4", "i8", "f2", "f4", "f8", "c8", ml_dtypes.bfloat16)):
            value = np.full(3, 2 - comm.rank % 2).astype(dtype)
            plain, weighted = strategy.reduce("mean", value), strategy.reduce("mean", value, weight=1 - comm.rank % 2)
            assert weighted.dtype == plain.dtype
            assert (weighted == 2).all()  # the others weigh nothing


@pytest.mark.ranks(1, 3)
def test_wrong_arguments_are_refused_before_data_moves(comm):
    wrong = [
        ({"reduce_op": "sum"}, ValueError, "weight is for means, and the operation is SUM"),
        ({"reduce_op": "min"}, ValueError, "weight is for means, and the operation is MIN"),
        ({"reduce_op": "bogus"}, ValueError, "not a valid ReduceOp"),
        ({"axis": 0}, ValueError, "weight and axis exclude each other"),
        ({"weight": 0}, InvalidArgumentError, "weights of all replicas are 0"),
        ({"out": np.zeros(3)}, InvalidArgumentError, r"out 0 must be an array f64\[2\], got f64\[3\]"),
        ({"weight": -1}, ValueError, "finite number >= 0, got -1"),
        ({"weight": float("nan")}, ValueError, "finite number >= 0, got nan"),
        ({"weight": float("inf")}, ValueError, "finite number >= 0, got inf"),
        ({"weight": "3"}, TypeError, "a number for each replica"),
        ({"weight": True}, TypeError, "a number for each replica"),
        ({"weight": np.ones(2)}, TypeError, "a number for each replica"),
        ({"value": np.array([True])}, InvalidArgumentError, "MEAN needs numbers, got dtype bool"),
        ({"value": "text"}, TypeError, "builtins.str"),
    ]
    with MultiWorker(comm=comm) as strategy:
        for arguments, kind, text in wrong:
            with raises_everywhere(comm, kind, text):
                strategy.reduce(**({"reduce_op": "mean", "value": np.ones(2), "weight": 1} | arguments))
            assert strategy.reduce("sum", 1) == comm.size


@pytest.mark.ranks(3)
def test_wrong_arguments_of_one_rank_are_everybodys_error(comm):
    with MultiWorker(comm=comm) as strategy:
        with raises_everywhere(comm, InvalidArgumentError, "got -1"):
            strategy.reduce("mean", 1.0, weight=-1 if comm.rank == 1 else 1)
        with raises_everywhere(comm, InvalidArgumentError, "reduce with weights"):
            strategy.reduce("mean", 1.0, weight=None if comm.rank == 1 else 1)
        with raises_everywhere(comm, InvalidArgumentError, r"f64\[2\]"):
            strategy.reduce("mean", np.ones(3 if comm.rank == 1 else 2), weight=1)


def test_replicas_have_weights_of_their_own(comm):
    """The same bits on any number of ranks."""

    def mean_over(comm):
        with MultiWorker(comm=comm, replicas=5) as strategy:

            def step(part):
                return (part.mean() if len(part) else np.float64("nan")), len(part)

            (part,) = strategy.experimental_distribute_dataset([np.arange(4.0) / 3])
            mean, count = strategy.run(step, (part,))
            with raises_everywhere(comm, ValueError, "weight of 1.* is this rank's and no replica's"):
                strategy.reduce("mean", mean, weight=1)
            return strategy.reduce("mean", mean, weight=count)

    found = mean_over(comm)
    assert found == pytest.approx(0.5)
    alone = comm.Split(comm.rank, 0)
    assert mean_over(alone) == found
    alone.Free()


@pytest.mark.ranks(2)
def test_mirrored_values_are_their_own_mean(comm):
    with MultiWorker(comm=comm) as strategy:
        with strategy.scope():
            variable = mpidist.Variable(0.1)
        mean = strategy.reduce("mean", [variable, mpidist.Mirrored((0.3,)), PerReplica((2.0,))], weight=3)
        assert [float(one) for one in mean] == [0.1, 0.3, 2.0]


def test_all_reduce_with_weights_is_the_same_mean(comm, placement):
    """A part without rows has a mean that is not a number, and does not count."""
    own = comm.rank
    gradients = {"w": np.full((2, 3), float(own)) if own else np.full((2, 3), np.nan), "b": np.full(1, own, np.float32)}
    wanted = sum(rank * rank for rank in range(comm.size)) / max(1, sum(range(comm.size)))

    def step():
        context = mpidist.get_replica_context()
        assert context is not None
        new = context.all_reduce("mean", gradients, weight=own if comm.size > 1 else 1)
        assert context.all_reduce("mean", gradients, weight=own if comm.size > 1 else 1, out=gradients) is gradients
        return new

    with MultiWorker(comm=comm) as strategy:
        for mean in (strategy.run(step), gradients):
            assert np.allclose(mean["b"], wanted, rtol=1e-6)
            assert comm.size == 1 or np.allclose(mean["w"], wanted, rtol=1e-15)


@pytest.mark.parametrize("replicas", [None, 5])
def test_all_reduce_with_weights_writes_outs(comm, replicas):
    with MultiWorker(comm=comm, replicas=replicas) as strategy:
        count = strategy.num_replicas_in_sync

        def step():
            context = mpidist.get_replica_context()
            assert context is not None
            own, out = context.replica_id_in_sync_group + 1, np.zeros((3, 2), np.float32).T
            value = np.full((2, 3), own, np.float32)
            assert context.all_reduce("mean", value, weight=own, out=out) is out
            return out

        wanted = np.float32(sum(own * own for own in range(1, count + 1)) / sum(range(1, count + 1)))
        for out in strategy.experimental_local_results(strategy.run(step)):
            assert np.allclose(out, wanted, rtol=1e-6)


@pytest.mark.ranks(1, 2)
def test_weight_that_the_dtype_of_sums_cannot_hold_is_refused(comm):
    with MultiWorker(comm=comm) as strategy:
        for weight in (1e-50, 1e-44, 1e39):
            with raises_everywhere(comm, ValueError, "does not fit into float32, in which values are added"):
                strategy.reduce("mean", np.ones(2, np.float32), weight=weight)
            assert strategy.reduce("mean", np.ones(2), weight=weight).tolist() == [1, 1]
        if comm.size > 1:
            for dtype, weight in ((np.float64, 1e308), (np.float32, 3e38)):
                with raises_everywhere(comm, InvalidArgumentError, "may to at most .*: scale all weights"):
                    strategy.reduce("mean", np.ones(2, dtype), weight=weight)


@pytest.mark.ranks(2, 3)
def test_weighted_mean_sent_as_float16_takes_weights_of_any_size(comm):
    options = mpidist.CommunicationOptions(compression="fp16", compress_everywhere=True)
    with MultiWorker(comm=comm, communication_options=options) as strategy:
        for weight in (8192, 1e-30, np.float32(1e30)):
            values = np.array([6e4, 1e-4], np.float32)
            np.testing.assert_allclose(strategy.reduce("mean", values, weight=weight), values, rtol=2e-3)
            values = np.array([np.nan if comm.rank else 10], np.float32)
            assert strategy.reduce("mean", values, weight=0 if comm.rank else weight) == pytest.approx(10, rel=2e-3)
            values = np.array([6e4], np.float32)  # of which one rank has the most
            assert strategy.reduce("mean", values, weight=0 if comm.rank else weight) == pytest.approx(6e4, rel=2e-3)
        assert strategy.num_overflowed == 0
        with raises_everywhere(comm, InvalidArgumentError, "got -1"):
            strategy.reduce("mean", values, weight=-1 if comm.rank else 1)
        with raises_everywhere(comm, InvalidArgumentError, "weights of all replicas are 0"):
            strategy.reduce("mean", values, weight=0)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("how", [{"weight": 1.0}, {"axis": 0}], ids=["weight", "axis"])
def test_ranks_compare_which_outs_of_a_mean_are_per_node(comm, how):
    """Only ranks with such outs would meet once more to write these."""
    with MultiWorker(comm=comm) as strategy:
        value, of_node = np.ones((2, 3)), np.empty((2, 3) if "weight" in how else 3)
        of_node = strategy.symmetric_empty_like(of_node, per_node=True)
        out = of_node if comm.rank else np.empty(of_node.shape)
        for _ in range(2):
            with raises_everywhere(comm, InvalidArgumentError, "with the per-node outs"):
                strategy.reduce("mean", value, out=out, **how)
        assert strategy.reduce("mean", value, out=of_node, **how) is of_node
        assert (of_node == 1).all()
