"""What comes back from a reduction: new arrays, or the caller's own; and what the arguments look like afterwards."""

import logging
import tracemalloc

import numpy as np
import pytest
from support.everywhere import raises_everywhere
from support.reductions import all_reduce

import mpidist
from mpidist import CommunicationOptions, nest
from mpidist.context_stack import parts_of
from mpidist.transport.text import count_text

pytestmark = pytest.mark.core


@pytest.mark.parametrize("kib", [16, 32, 64, 128])
@pytest.mark.parametrize("op", ["SUM", "MAX"])
@pytest.mark.ranks(1, 2, 3)
def test_lists_around_each_size_from_which_on_another_way_is_faster(strategy, op, kib):
    """Into new arrays, in place, and the same in memory that the ranks of a node share."""
    size, rank = strategy.topology.size, strategy.topology.rank
    want = size * (size + 1) / 2 if op == "SUM" else size
    for count in (1, 4, 50):
        for more in (-1, 0, 1):
            private = [np.empty(length, np.float32) for length in [kib * 256 // count] * (count - 1)]
            private.append(np.empty(kib * 256 + more - sum(array.size for array in private), np.float32))
            for values in (private, strategy.symmetric_empty_like(private)):
                for out in (None, None, values):
                    for value in values:
                        value[...] = rank + 1
                    results = all_reduce(strategy, op, values, out=out)
                    assert all((result == want).all() for result in results)
                    assert out is not None or all((value == rank + 1).all() for value in values)
                    strategy.barrier()


@pytest.mark.parametrize("op", ["SUM", "MEAN", "MAX"])
def test_small_values_of_several_dtypes_share_a_barrier(strategy, op):
    """As metrics of a step: numbers, counts, and a histogram. Means of whole numbers are floats."""
    size, rank = strategy.topology.size, strategy.topology.rank
    of_ranks = {"SUM": size * (size + 1) / 2, "MEAN": (size + 1) / 2, "MAX": size}[op]
    given = {"loss": 0.5, "count": 2, "bins": np.arange(7, dtype=np.int16), "rest": [np.ones((3, 3), "f4"), np.ones(0)]}
    values = nest.map_structure(lambda value: np.asarray(value) * np.asarray(rank + 1, np.asarray(value).dtype), given)
    outs = nest.map_structure(np.empty_like, all_reduce(strategy, op, values))
    fused = parts_of(strategy).group.levels.fused
    for step in range(4):
        before = 0 if fused is None else fused.slots.barrier.count
        result = all_reduce(strategy, op, values, out=outs if step % 2 else None)
        for one, value in zip(nest.flatten(result)[0], nest.flatten(given)[0], strict=True):
            assert (one == np.multiply(value, of_ranks)).all()
            assert np.shape(one) == np.shape(value)
        if fused is not None:
            assert fused.slots.barrier.count == before + 1


def test_values_of_another_layout_are_copied_once(strategy):
    value, out = np.ones((300, 200)).T, np.empty((200, 300))
    most = 0
    for _ in range(3):
        tracemalloc.start()
        all_reduce(strategy, "SUM", [value], out=[out])
        most = tracemalloc.get_traced_memory()[1]  # the first call plans
        tracemalloc.stop()
        assert (out == strategy.topology.size).all()
    assert most < 1.5 * value.nbytes


@pytest.mark.ranks(1, 3)
def test_small_integers_wrap_in_sums_and_not_in_means(strategy):
    """As in NumPy."""
    size = strategy.topology.size
    value = np.full(3, 100, np.int8)
    assert (all_reduce(strategy, "SUM", value) == np.full(size, 100, np.int8).sum(dtype=np.int8)).all()
    assert (all_reduce(strategy, "MEAN", value) == 100).all()
    for dtype in (np.int32, np.uint32, np.int64, np.uint64):
        for count in (3, 50_000):
            large = np.full(count, np.iinfo(dtype).max, dtype)
            assert (all_reduce(strategy, "MEAN", large) == np.float64(large[0])).all(), (dtype, count)


@pytest.mark.ranks(1, 3)
def test_flags_have_a_least_and_a_greatest(strategy, comm):
    """What all ranks agree to, or any. A sum of flags would be no flag."""

    def in_run(name):
        return lambda op, flags: strategy.run(lambda: getattr(mpidist.get_replica_context(), name)(op, flags))

    calls = [
        in_run("all_reduce"),
        in_run("reduce_scatter"),
        lambda op, flags: in_run("start_all_reduce")(op, flags).wait(),
        lambda op, flags: strategy.extended.reduce_to(op, flags, "all"),
        lambda op, flags: strategy.reduce(op, flags, axis=0),
    ]
    for reduced in calls:
        for count in (1, 7, 200_000):
            flags = np.arange(count) % comm.size == comm.rank  # each is set on one rank
            for op, right in (("max", True), ("min", comm.size == 1)):
                result = reduced(op, flags)
                assert result.dtype == bool
                assert (result == right).all()
        for op in ("sum", "mean", "prod"):
            with raises_everywhere(comm, mpidist.errors.InvalidArgumentError, "needs numbers, got dtype bool"):
                reduced(op, np.ones(3, bool))
    assert strategy.reduce("max", strategy.is_chief) is True
    assert strategy.reduce("min", strategy.topology.rank > 0) is False
    assert strategy.reduce("min", True) is True


def test_dicts_may_be_filled_in_another_order_on_every_rank(strategy):
    """And come back in the caller's own."""
    rank, size = strategy.topology.rank, strategy.topology.size
    names = ["w", "b", "scale", "a"]
    names = names[rank % 4 :] + names[: rank % 4]
    value = {name: np.full(len(name), len(name) + rank, np.float32) for name in names}
    result = all_reduce(strategy, "SUM", value)
    assert list(result) == names
    for name, array in result.items():
        assert (array == size * len(name) + size * (size - 1) / 2).all()
    out = {name: np.zeros(len(name), np.float32) for name in sorted(names)}
    assert all_reduce(strategy, "SUM", value, out=out) is out
    assert all((out[name] == result[name]).all() for name in names)


def records_of(caplog, call):
    caplog.clear()
    with caplog.at_level(logging.INFO, "mpidist"):
        call()
    return [record.getMessage() for record in caplog.records if record.name == "mpidist.cross_device_ops"]


def test_all_reduce_signatures_are_logged_once_on_rank_0(strategy, caplog):
    size, is_chief = strategy.topology.size, strategy.is_chief
    value = [np.ones(6, np.float32), np.ones(2, np.int64), np.ones(4, np.float32)]
    options = CommunicationOptions(1)
    lines = records_of(caplog, lambda: all_reduce(strategy, "SUM", value, options=options))
    algorithm = type(parts_of(strategy).cross_device_ops.algorithm).__name__
    is_fused = parts_of(strategy).group.levels.fused is not None
    form = "fused" if is_fused else "3 packs in 3 messages"
    wanted = f"r0 | all_reduce: SUM of 3 arrays, {form}, 56 B, {count_text(size, 'rank')}, {algorithm}"
    assert lines == ([wanted] if is_chief else [])
    assert not records_of(caplog, lambda: all_reduce(strategy, "SUM", value, options=options))
    for other in (lambda: all_reduce(strategy, "MAX", value), lambda: all_reduce(strategy, "SUM", value[1:])):
        assert len(records_of(caplog, other)) == is_chief
    lines = records_of(caplog, lambda: all_reduce(strategy, "SUM", value, options=CommunicationOptions(10**9)))
    form = "fused" if is_fused else "2 packs in 2 messages"
    assert not lines or f"{form}, 56 B" in lines[0]
    pairs = [(value[0], 0), (value[1], 0), (value[2], "all")]
    lines = records_of(caplog, lambda: strategy.extended.batch_reduce_to("SUM", pairs))
    is_one_call = size == 1 or (is_fused and not parts_of(strategy).group.levels.fused.spans_nodes)
    assert len(lines) == (1 if is_one_call else 2) * is_chief
    assert is_one_call or not is_chief or ("2 arrays" in lines[0] and lines[0].endswith(", to rank 0"))
