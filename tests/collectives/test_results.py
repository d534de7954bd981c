"""What comes back from a reduction: new arrays, or the caller's own; and what the arguments look like afterwards."""

from __future__ import annotations

import logging
import tracemalloc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.contributions import bits
from support.everywhere import raises_everywhere
from support.reductions import DTYPES, LARGE, LAYOUTS, all_reduce, numbers, total
from tensors import Tensor

import mpidist
from mpidist import CommunicationOptions, nest
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.context_stack import parts_of
from mpidist.transport.text import count_text

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

pytestmark = pytest.mark.core


@pytest.fixture
def strategy(comm: Intracomm) -> Iterator[Strategy]:
    with Strategy(comm=comm) as made:
        yield made


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(4, 6), LARGE])
def test_inputs_of_any_layout_are_read_and_left_alone(strategy: Strategy, layout: str, shape: tuple[int, ...]) -> None:
    """X50."""
    for dtype in DTYPES:
        value = LAYOUTS[layout](shape, dtype)
        value[...] = numbers(strategy, shape, dtype)
        value.flags.writeable = False
        before = bits(value), value.strides
        for argument in (value, [value, np.float32(1)]):
            result = nest.flatten(all_reduce(strategy, "SUM", argument))[0][0]
            assert (result == total(strategy, shape, dtype)).all(), dtype
            assert result.dtype == dtype
            assert result.flags.c_contiguous
            assert result.flags.writeable
            assert not np.shares_memory(result, value)
            assert (bits(value), value.strides) == before


@pytest.mark.parametrize("kib", [16, 32, 64, 128])
@pytest.mark.parametrize("op", ["SUM", "MAX"])
def test_lists_around_each_size_from_which_on_another_way_is_faster(strategy: Strategy, op: str, kib: int) -> None:
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
def test_small_values_of_several_dtypes_share_a_barrier(strategy: Strategy, op: str) -> None:
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


def test_values_of_another_layout_are_copied_once(strategy: Strategy) -> None:
    value, out = np.ones((300, 200)).T, np.empty((200, 300))
    most = 0
    for _ in range(3):
        tracemalloc.start()
        all_reduce(strategy, "SUM", [value], out=[out])
        most = tracemalloc.get_traced_memory()[1]  # the first call plans
        tracemalloc.stop()
        assert (out == strategy.topology.size).all()
    assert most < 1.5 * value.nbytes


def test_a_broadcast_array_counts_with_all_its_elements(strategy: Strategy) -> None:
    """X50: a stride of 0."""
    value = np.broadcast_to(np.float32(2), (3, 5))
    assert (all_reduce(strategy, "SUM", value) == 2 * strategy.topology.size).all()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1)])
def test_shapes_are_kept(strategy: Strategy, shape: tuple[int, ...]) -> None:
    """X49, X50: also those without dimensions, and without elements."""
    for op in ("SUM", "MEAN", "MAX"):
        for value in (np.ones(shape, np.float32), np.ones(shape, ">i4")):
            result, other = all_reduce(strategy, op, (value, np.ones(3)))
            assert type(result) is np.ndarray
            assert result.shape == shape
            assert (result == other[0]).all()


def test_results_come_in_the_kinds_of_the_values(strategy: Strategy) -> None:
    size = strategy.topology.size
    value = {
        "int": 2,
        "float": 1.5,
        "complex": 1j,
        "scalar": np.int8(1),
        "list": [np.float64(1), (Tensor(np.ones(2)),)],
    }
    result = all_reduce(strategy, "SUM", value)
    kinds = [(type(leaf), value) for leaf, value in zip(*(nest.flatten(it)[0] for it in (result, value)), strict=True)]
    assert all(kind is type(value) for kind, value in kinds)
    assert (result["int"], result["float"], result["complex"]) == (2 * size, 1.5 * size, 1j * size)
    assert result["list"][1][0].array.tolist() == [size, size]
    mean = all_reduce(strategy, "MEAN", {"int": 2, "scalar": np.int8(1)})
    assert (type(mean["int"]), type(mean["scalar"])) == (float, np.float32)


@pytest.mark.parametrize("method", ["all_reduce", "reduce", "batch_reduce", "broadcast"])
def test_results_alias_neither_arguments_nor_later_results(strategy: Strategy, method: str) -> None:
    """On one rank too, where nothing needs to move."""
    ops = parts_of(strategy).cross_device_ops
    call: dict[str, Callable[[Any], Any]] = {
        "all_reduce": lambda values: ops.all_reduce("MEAN", values),
        "reduce": lambda values: ops.reduce("MEAN", values, "all"),
        "batch_reduce": lambda values: ops.batch_reduce("MEAN", [(value, "all") for value in values]),
        "broadcast": lambda values: ops.broadcast(values, "all"),
    }
    for shapes in ([(3,)], [(3,), (4, 6)], [(3,), LARGE], [()]):
        values = [np.full(shape, 2, np.float32) for shape in shapes]
        first, second = call[method](values), call[method](values)
        for result in first:
            result[...] = -1
        for value, later in zip(values, second, strict=True):
            assert (value == 2).all()
            assert (later == 2).all()
        assert all((result == -1).all() for result in first)


@pytest.mark.parametrize("bytes_per_pack", [0, 1, 10**9])
def test_unlike_dtypes_in_one_call(strategy: Strategy, bytes_per_pack: int) -> None:
    """X15: TF concatenates them, and fails. The order of the caller is kept."""
    dtypes = [np.dtype(code) for code in "fqdfbB"] + DTYPES
    value = [numbers(strategy, (index + 1,), dtype) for index, dtype in enumerate(dtypes)]
    results = all_reduce(strategy, "SUM", value, options=CommunicationOptions(bytes_per_pack))
    for index, (result, dtype) in enumerate(zip(results, dtypes, strict=True)):
        assert result.dtype == dtype
        assert (result == total(strategy, (index + 1,), dtype)).all(), dtype


@pytest.mark.parametrize(
    ("dtypes", "result"), [("bBhH", np.float32), ("iIlLqQ", np.float64), ("f", np.float32), ("F", np.complex64)]
)
def test_means_have_the_stated_dtype_at_any_number_of_ranks(strategy: Strategy, dtypes: str, result: Any) -> None:
    """X5: also on one rank, where TF keeps integers."""
    mean = [1, 2, 3, 5, 8, 13, 21, 34][strategy.topology.rank % 8]
    everyone = [[1, 2, 3, 5, 8, 13, 21, 34][rank % 8] for rank in range(strategy.topology.size)]
    for code in dtypes:
        found = all_reduce(strategy, "MEAN", np.full(2, mean, code))
        assert found.dtype == result
        assert (found == np.asarray(sum(everyone), result) / np.asarray(len(everyone), result)).all()


def test_small_integers_wrap_in_sums_and_not_in_means(strategy: Strategy) -> None:
    """X6: as in NumPy."""
    size = strategy.topology.size
    value = np.full(3, 100, np.int8)
    assert (all_reduce(strategy, "SUM", value) == np.full(size, 100, np.int8).sum(dtype=np.int8)).all()
    assert (all_reduce(strategy, "MEAN", value) == 100).all()
    for dtype in (np.int32, np.uint32, np.int64, np.uint64):
        for count in (3, 50_000):
            large = np.full(count, np.iinfo(dtype).max, dtype)
            assert (all_reduce(strategy, "MEAN", large) == np.float64(large[0])).all(), (dtype, count)


@pytest.mark.parametrize("call", ["all_reduce", "start_all_reduce", "reduce_scatter", "reduce_to", "axis"])
def test_flags_have_a_least_and_a_greatest(strategy: Strategy, comm: Intracomm, call: str) -> None:
    """What all ranks agree to, or any. A sum of flags would be no flag."""

    def reduced(op: str, flags: Any) -> Any:
        if call == "axis":
            return strategy.reduce(op, flags, axis=0)
        if call == "reduce_to":
            return strategy.extended.reduce_to(op, flags, "all")
        result = strategy.run(lambda: getattr(mpidist.get_replica_context(), call)(op, flags))
        return result.wait() if call == "start_all_reduce" else result

    for count in (1, 7, 200_000):
        flags = np.arange(count) % comm.size == comm.rank  # each is set on one rank
        for op, right in (("max", True), ("min", comm.size == 1)):
            result = reduced(op, flags)
            assert result.dtype == bool
            assert (result == right).all()
    for op in ("sum", "mean", "prod"):
        with raises_everywhere(comm, mpidist.errors.InvalidArgumentError, "needs numbers, got dtype bool"):
            reduced(op, np.ones(3, bool))


def test_flags_of_python_are_flags(strategy: Strategy) -> None:
    assert strategy.reduce("max", strategy.is_chief) is True
    assert strategy.reduce("min", strategy.topology.rank > 0) is False
    assert strategy.reduce("min", True) is True


def test_dicts_may_be_filled_in_another_order_on_every_rank(strategy: Strategy) -> None:
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


def records_of(caplog: pytest.LogCaptureFixture, call: Callable[[], Any]) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, "mpidist"):
        call()
    return [record.getMessage() for record in caplog.records if record.name == "mpidist.cross_device_ops"]


def test_each_shape_of_call_is_logged_once_on_rank_0(strategy: Strategy, caplog: pytest.LogCaptureFixture) -> None:
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
    assert len(lines) == (1 if size == 1 else 2) * is_chief
    assert size == 1 or not is_chief or ("2 arrays" in lines[0] and lines[0].endswith(", to rank 0"))
