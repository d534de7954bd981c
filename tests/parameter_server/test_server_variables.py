"""Variables on servers: where they live, how workers read and change them, and what is refused."""

import copy
import pickle
import random
import time

import ml_dtypes
import numpy as np
import pytest
from parameter_server.clusters import on_workers, worker_test
from support.everywhere import raises_everywhere

import mpidist
from mpidist import IndexedSlices, Variable
from mpidist.errors import InvalidArgumentError
from mpidist.experimental import ParameterServerStrategy

LARGE = (3 << 20) // 4 + 5  # float32 numbers that take several messages


def made(strategy, *args, **kwargs):
    with strategy.scope():
        return Variable(*args, **kwargs)


@pytest.mark.ranks(3)
@pytest.mark.core
@pytest.mark.parametrize("count", [2, 5 * LARGE])
@worker_test()
def test_read_is_a_snapshot_of_whole_writes(strategy, count):
    """All numbers that are written together are read together, and never fall behind."""
    variable = made(strategy, np.zeros(count, np.float32))
    last, delta = 0.0, np.ones(count, np.float32)
    for step in range(30 if count == 2 else 12):
        if strategy.topology.rank % 2 == 0:
            variable.assign_add(delta)
            strategy.flush()
            time.sleep(0.003)  # so that others begin to read while this worker has begun to write
            continue
        value = variable.numpy()
        assert (value == value[0]).all(), (step, value.min(), value.max())
        assert value[0] >= last
        last = value[0]
    strategy.barrier()
    assert (variable.numpy() == (30 if count == 2 else 12) * ((strategy.topology.size + 1) // 2)).all()


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("num_ps", "servers"), [(1, [0] * 5), (2, [0, 1, 1, 0, 1])])
@worker_test()
def test_variables_are_placed_in_turn(strategy, num_ps, servers):
    """`colocate_vars_with` does not take a turn."""
    with strategy.scope():
        n, x = Variable(1.0), Variable(2.0)
        with strategy.extended.colocate_vars_with(x):
            y = Variable(3.0)
        z, more = Variable(4.0), Variable(5.0)
    assert [variable.server for variable in (n, x, y, z, more)] == servers


@pytest.mark.ranks(3)
@worker_test(num_ps=2, placement="bytes")
def test_variables_can_be_placed_by_bytes(strategy):
    with strategy.scope():
        assert [Variable(np.zeros(size)).server for size in (100, 10, 10, 10, 80, 1)] == [0, 1, 1, 1, 1, 0]


@pytest.mark.ranks(3)
@worker_test()
def test_reductions_are_those_of_the_workers_own_replica(strategy):
    rank = float(strategy.topology.rank)
    context = strategy.run(mpidist.get_replica_context)
    assert context.num_replicas_in_sync == strategy.num_replicas_in_sync == 1
    inside = strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", rank))
    with pytest.raises(ValueError, match="rank"):
        strategy.extended.reduce_to("SUM", rank, 1)  # another worker
    assert float(strategy.reduce("MEAN", rank)) == float(inside) == rank


@pytest.mark.ranks(1, 3)
@worker_test()
def test_variables_of_any_dtype_are_assigned_and_read(strategy):
    for dtype in map(np.dtype, (ml_dtypes.bfloat16, "int8", "complex64", "bool")):
        variable = made(strategy, np.ones((2, 3), dtype))
        assert variable.dtype == dtype
        if strategy.is_chief:
            variable.assign(np.zeros((2, 3), dtype))
            variable.assign_add(np.ones((2, 3), dtype))
        strategy.barrier()
        value = variable.numpy()
        assert value.dtype == dtype
        assert (value == np.ones((2, 3), dtype)).all()


@pytest.mark.ranks(1, 3)
@worker_test()
def test_results_belong_to_the_caller(strategy):
    value = np.zeros(LARGE, np.float32)
    variable = made(strategy, value)
    value += 1
    one = variable.numpy()
    one += 5
    delta = np.ones(LARGE, np.float32)
    variable.assign_sub(delta)
    delta[:] = 100  # what was passed may be changed at once
    strategy.barrier()
    assert (variable.numpy() == -strategy.topology.size).all()


@pytest.mark.ranks(1, 3)
@worker_test()
def test_assign_takes_any_layout(strategy):
    """Reversed, Fortran-ordered, big-endian, 0-d, read-only, empty."""
    if not strategy.is_chief:
        with strategy.scope():
            Variable(np.zeros((3, 4)))
            Variable(np.zeros((0, 5)))
        return
    with strategy.scope():
        variable, empty = Variable(np.zeros((3, 4))), Variable(np.zeros((0, 5)))
    base = np.arange(12.0).reshape(3, 4)
    read_only = base.copy()
    read_only.flags.writeable = False
    for value in (base[::-1], np.asfortranarray(base), base.astype(">f8"), read_only, 2, np.float32(3), base.T.T):
        before = np.array(value)
        variable.assign(value)
        assert (variable.numpy() == np.broadcast_to(value, (3, 4))).all()
        assert (np.array(value) == before).all()
    empty.assign_add(np.ones((0, 5)))
    assert empty.numpy().shape == (0, 5)
    variable.scatter_add(IndexedSlices(np.ones((0, 4)), np.zeros(0, int)))


@pytest.mark.ranks(1, 3)
@worker_test()
def test_rows_are_changed_on_the_server(strategy):
    table = made(strategy, np.zeros((10, 2)))
    rank, workers = strategy.topology.rank, strategy.topology.size
    table.scatter_add(IndexedSlices(np.ones((3, 2)), [rank, 9, 9]))
    strategy.barrier()
    expected = np.zeros((10, 2))
    expected[:workers] = 1
    expected[9] = 2 * workers
    assert (table.numpy() == expected).all()
    assert (table.sparse_read([9, 0, 9]) == expected[[9, 0, 9]]).all()
    assert table.sparse_read([]).shape == (0, *expected.shape[1:])
    strategy.barrier()
    if strategy.is_chief:
        for call, number, result in (
            ("scatter_update", 8.0, 8.0),
            ("scatter_sub", 2.0, 6.0),
            ("scatter_mul", 3.0, 18.0),
            ("scatter_div", 2.0, 9.0),
            ("scatter_max", 11.0, 11.0),
            ("scatter_min", 5.0, 5.0),
        ):
            assert getattr(table, call)(IndexedSlices([[number, number]], [4])) is table
            assert (table.numpy()[4] == result).all()


@pytest.mark.ranks(1, 3)
@pytest.mark.core
@worker_test()
def test_nests_are_read_into_arrays_that_are_kept(strategy):
    """Of any layout: side by side in one buffer, columns of a matrix, the other byte order, other parts of shards."""
    with strategy.scope():
        variables = [Variable(np.full(size, float(at), np.float32)) for at, size in enumerate([3, LARGE, 0])]
        variables.append(Variable(np.float32(8.0)))
    nest = {"twice": [variables[0]] * 2, "none": (), "large": variables[1]}
    found = strategy.read(nest)
    assert found["none"] == ()
    assert found["twice"][0].tolist() == found["twice"][1].tolist() == [0.0] * 3
    assert (found["large"] == 1).all()
    buffer = np.zeros((3 + LARGE) * 2 + 1, np.float32)
    swapped = np.dtype(np.float32).newbyteorder()
    outs = [buffer[:3], buffer[3 : 3 + 2 * LARGE : 2], np.zeros(0, np.float32), np.zeros((), swapped)]
    for step in range(3):
        kept = strategy.read(variables, out=outs)
        assert kept is outs
        for at, (size, out) in enumerate(zip([3, LARGE, 0], outs, strict=False)):
            assert out.tolist() == [at + step] * size
        assert outs[3] == 8.0 + step
        assert not buffer[4 : 3 + 2 * LARGE : 2].any()
        strategy.barrier()
        if strategy.is_chief:
            strategy.push(variables, [1.0] * 4)
        strategy.barrier()


@pytest.mark.ranks(3)
@worker_test()
def test_read_refuses_wrong_outs(strategy):
    variables = {"a": made(strategy, np.arange(3.0)), "b": made(strategy, np.zeros(2))}
    a, b = np.full(3, 9.0), np.full(2, 9.0)
    read_only = b.copy()
    read_only.setflags(write=False)
    assert strategy.read(variables, out={"a": a, "b": b})["a"] is a
    a[:] = b[:] = 9.0
    b.setflags(write=False)
    with pytest.raises(InvalidArgumentError, match="read-only"):  # also after a call with the same array
        strategy.read(variables, out={"a": a, "b": b})
    b.setflags(write=True)
    for out, text in [
        ([a, b], "same form"),
        ({"a": a}, "same form"),
        ({"a": a, "b": b[:1]}, r"out 1 must be an array f64\[2\], got f64\[1\]"),
        ({"a": a, "b": b.astype(np.float32)}, "got f32"),
        ({"a": a, "b": [9.0, 9.0]}, "same form"),
        ({"a": a, "b": 9.0}, "must be an array"),
        ({"a": a, "b": read_only}, "read-only"),
        ({"a": a, "b": a[1:]}, "share memory"),
    ]:
        with pytest.raises(InvalidArgumentError, match=text):
            strategy.read(variables, out=out)
    assert [*a, *b] == [9.0] * 5
    assert strategy.read(variables, out={"a": a, "b": b})["a"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.ranks(3)
@worker_test()
def test_changes_of_wrong_values_are_refused_before_data_moves(strategy):
    variable, whole = made(strategy, np.zeros((2, 3), np.float32)), made(strategy, np.zeros(2, np.int8))
    flag = made(strategy, True)
    for kind, text, call in (
        (ValueError, r"shape \[2, 3\].*shape \[3\]", lambda: variable.assign(np.zeros(3))),
        (ValueError, "another kind of number", lambda: whole.assign_add(0.5)),
        (ValueError, "does not fit", lambda: whole.assign(300)),
        (TypeError, "text|str", lambda: variable.assign("text")),
        (TypeError, "bool", lambda: flag.assign_sub(True)),
        (ValueError, "rows 0 to 1", lambda: variable.scatter_add(IndexedSlices(np.ones((1, 3)), [2]))),
        (TypeError, "IndexedSlices", lambda: variable.scatter_add(np.ones((2, 3)))),
        (IndexError, "out of bounds", lambda: variable.sparse_read([-1])),
        (TypeError, "integers", lambda: variable.sparse_read([0.5])),
        (TypeError, "assign_add", lambda: exec("variable += 1", {"variable": variable})),
        (TypeError, "in part", lambda: variable.__setitem__(0, 1)),
        (RuntimeError, "cannot be copied", lambda: copy.copy(variable)),
        (RuntimeError, "cannot be copied", lambda: pickle.dumps(variable)),
        (ValueError, r"push\(\): variables are", lambda: strategy.push([variable], {"a": 1.0})),
        (TypeError, "update must be", lambda: strategy.push([variable], [1.0], "multiply")),
        (TypeError, "variables of this strategy", lambda: strategy.read([variable, 3.0])),
        (TypeError, "variables of this strategy", lambda: strategy.push([3.0], [3.0])),
        (ValueError, "NONE", lambda: made(strategy, 1, synchronization="NONE")),
        (ValueError, "MEDIAN", lambda: made(strategy, 1, aggregation="MEDIAN")),
        (
            ValueError,
            "int32 cannot have aggregation ME",
            lambda: made(strategy, 1, dtype="int32", aggregation="MEAN"),
        ),
        ((TypeError, ValueError), "'x' cannot be on a .*needs numbers", lambda: made(strategy, ["U"], name="x")),
    ):
        with pytest.raises(kind, match=text):
            call()
    assert (variable.numpy() == 0).all()
    assert (whole.numpy() == 0).all()
    assert made(strategy, np.zeros(2, "M8[s]"), name="x").dtype == np.dtype("M8[s]")
    with mpidist.OneDeviceStrategy().scope(), pytest.raises(RuntimeError, match="mixing different strategies"):
        variable.assign(2.0)


@pytest.mark.ranks(3)
@worker_test()
def test_server_variable_has_name_rules_and_repr(strategy):
    with strategy.scope():
        first, second = Variable(1.0, name="w", aggregation="SUM"), Variable([1, 2], trainable=False)
        third = Variable(0.0, synchronization="ON_READ")
    assert (first.name, second.name, third.name) == ("w", "variable", "variable_1")
    assert isinstance(first, Variable)
    assert isinstance(first, mpidist.DistributedValues)
    assert first.strategy is strategy
    assert first.assign(first) is first
    assert strategy.extended.variable_created_in_scope(first)
    assert [first.trainable, second.trainable, third.trainable] == [True, False, False]
    assert str(first.aggregation) == str(mpidist.VariableAggregation.SUM)
    assert str(third.synchronization) == str(mpidist.VariableSynchronization.ON_READ)
    assert repr(second) == "<mpidist.Variable 'variable' int64[2] on parameter server 0>"


@pytest.mark.ranks(3)
@pytest.mark.core
def test_workers_must_make_the_same_variables(comm):
    """The text is the same on all workers; then they can go on."""
    strategy = ParameterServerStrategy(comm=comm)
    workers = comm.Split(int(strategy.is_ps), comm.rank)
    if not strategy.is_ps:
        is_last = strategy.topology.rank == strategy.topology.size - 1
        with raises_everywhere(workers, InvalidArgumentError, r"name: a on rank.*name: b on rank"):
            made(strategy, 1.0, name="b" if is_last else "a")
        with raises_everywhere(workers, InvalidArgumentError, r"value: float64\[3\] on"):
            made(strategy, np.zeros(2 + is_last))
        with raises_everywhere(workers, InvalidArgumentError, "call: Variable on.*call: barrier"):
            strategy.barrier() if is_last else made(strategy, 1.0)
        assert float(made(strategy, 4.0)) == 4.0
    workers.Free()
    if strategy.is_ps:
        strategy.serve()
    strategy.close()


@pytest.mark.ranks(4)
@worker_test()
def test_variable_made_after_the_chief_has_ended_is_an_error(strategy):
    if not strategy.is_chief:
        text = "^Variable failed on the servers: the chief, rank 0, has ended its part$"
        with strategy.scope(), pytest.raises(RuntimeError, match=text):
            Variable(np.zeros(3))


@pytest.mark.ranks(1, 3)
@worker_test()
def test_initial_value_that_raises_is_an_error_of_all_workers(strategy):
    def initial():
        if strategy.topology.rank == 0:
            raise KeyError("no file")
        return 1.0

    kind = KeyError if strategy.topology.rank == 0 else InvalidArgumentError
    with pytest.raises(kind, match="no file"):
        made(strategy, initial)
    assert made(strategy, 2.0, name="next").name == "next"


@pytest.mark.core
@pytest.mark.parametrize("seed", range(4))
def test_random_operations_are_those_of_a_sequential_model(comm, seed):
    """Each worker has variables of its own among those of the others, so every one of its reads is known."""
    num_ps = 2 if comm.size > 3 else 1

    def work(strategy):
        rank, workers = strategy.topology.rank, strategy.topology.size
        shapes = [(), (4,), (6, 3), (1500, 2), (300_000,)]
        with strategy.scope():
            variables = [Variable(np.zeros(shapes[at % 5])) for at in range(5 * workers)]
            shared, added = Variable(np.zeros(3)), Variable(0.0)
        chance = random.Random(1000 * seed + rank)
        own, model = variables[5 * rank : 5 * rank + 5], [np.zeros(shape) for shape in shapes]
        for _ in range(60):
            at, number = chance.randrange(5), float(chance.randrange(-8, 9))
            operation = chance.choice(["assign", "assign_add", "assign_sub", "read", "rows", "push", "shared"])
            if operation == "read":
                assert (own[at].numpy() == model[at]).all()
            elif operation == "push":
                strategy.push(own, [np.full(shape, number) for shape in shapes])
                model = [value + number for value in model]
            elif operation == "shared":
                shared.assign_add(np.ones(3))
                added.assign_add(1.0)
            elif operation == "rows" and shapes[at]:
                rows = [chance.randrange(shapes[at][0]) for _ in range(5)]
                own[at].scatter_add(IndexedSlices(np.full((5, *shapes[at][1:]), number), rows))
                np.add.at(model[at], rows, number)
            elif operation.startswith("assign"):
                getattr(own[at], operation)(np.full(shapes[at], number))
                model[at] = {"assign": 0 * model[at]}.get(operation, model[at]) + (
                    -number if operation == "assign_sub" else number
                )
        for value, expected in zip(strategy.read(own), model, strict=True):
            assert (value == expected).all()
        strategy.barrier()
        assert shared.numpy().tolist() == [float(added)] * 3

    on_workers(comm, work, num_ps=num_ps)
