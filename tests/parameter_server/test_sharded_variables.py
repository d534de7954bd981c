"""Partitioners, and variables that several servers hold."""

import copy

import numpy as np
import pytest
from parameter_server.clusters import on_workers, role_of, worker_test

from mpidist import IndexedSlices, Variable, get_replica_context
from mpidist.errors import InvalidArgumentError
from mpidist.experimental import ParameterServerStrategy, ShardedVariable, partitioners, server_rules


@pytest.mark.no_mpi
@pytest.mark.parametrize(
    ("partitioner", "shape", "shards"),
    [
        (partitioners.FixedShardsPartitioner(2), (10, 3), [2, 1]),
        (partitioners.FixedShardsPartitioner(9), (3,), [3]),
        (partitioners.FixedShardsPartitioner(4), (0, 2), [1, 1]),
        (partitioners.MinSizePartitioner(4, max_shards=10), (6, 1), [6, 1]),
        (partitioners.MinSizePartitioner(4, max_shards=2), (6, 1), [2, 1]),
        (partitioners.MinSizePartitioner(1024, max_shards=10), (6, 1), [1, 1]),
        (partitioners.MinSizePartitioner(10, max_shards=9), (7,), [3]),
        (partitioners.MinSizePartitioner(), (1 << 20,), [1]),
        (partitioners.MaxSizePartitioner(4), (6, 1), [6, 1]),
        (partitioners.MaxSizePartitioner(4, max_shards=2), (6, 1), [2, 1]),
        (partitioners.MaxSizePartitioner(1), (6, 2), [6, 1]),
        (partitioners.MaxSizePartitioner(16), (10, 2), [5, 1]),
    ],
)
def test_numbers_of_shards(partitioner, shape, shards):
    assert partitioner(shape=shape, dtype=np.float32) == shards


@pytest.mark.no_mpi
def test_partitioners_of_wrong_numbers_are_refused():
    for make in (
        lambda number: partitioners.FixedShardsPartitioner(number),
        lambda number: partitioners.MinSizePartitioner(number),
        lambda number: partitioners.MinSizePartitioner(max_shards=number),
        lambda number: partitioners.MinSizePartitioner(bytes_per_string=number),
        lambda number: partitioners.MaxSizePartitioner(number),
        lambda number: partitioners.MaxSizePartitioner(5, max_shards=number),
    ):
        for number, kind in ((0, ValueError), (True, TypeError), (1.5, TypeError), ("2", TypeError)):
            with pytest.raises(kind, match="whole number >= 1, got"):
                make(number)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("num_ps", [1, 2])
@pytest.mark.core
@worker_test(variable_partitioner=partitioners.FixedShardsPartitioner(4))
def test_shards_are_dealt_to_servers(strategy, num_ps):
    """10 rows in 4 shards are 3, 3, 2, 2; servers take turns across shards and variables."""
    with strategy.scope():
        table, number = Variable(np.arange(20.0).reshape(10, 2), name="t"), Variable(3.0)
        more = Variable(np.zeros((2, 1)))
    assert isinstance(table, ShardedVariable)
    assert [shard.shape for shard in table.variables] == [(3, 2), (3, 2), (2, 2), (2, 2)]
    assert [shard.name for shard in table.variables] == [f"t/part_{at}" for at in range(4)]
    assert [shard.server for shard in table.variables] == [at % strategy.num_ps for at in range(4)]
    assert number.server == 4 % strategy.num_ps
    assert [shard.server for shard in more.variables] == [at % strategy.num_ps for at in (5, 6)]
    assert (table.name, table.shape, table.dtype) == ("t", (10, 2), np.dtype("float64"))
    assert table.trainable
    assert (table.numpy() == np.arange(20.0).reshape(10, 2)).all()
    values = strategy.read({"t": table, "n": number})
    assert (values["t"] == table.numpy()).all()
    assert float(values["n"]) == 3.0


@pytest.mark.ranks(1, 3)
@worker_test(variable_partitioner=partitioners.FixedShardsPartitioner(2), num_ps=2)
def test_shards_change_as_one_array(strategy):
    with strategy.scope():
        table = Variable(np.zeros((5, 2)))
    rank, workers = strategy.topology.rank, strategy.topology.size
    delta = np.arange(10.0).reshape(5, 2)
    assert table.assign_add(delta) is table
    table.assign_sub(1.0)
    strategy.push([table], [delta])
    strategy.push([table], [IndexedSlices(np.ones((3, 2)), [4, 0, 4])])
    table.scatter_add(IndexedSlices(np.ones((2, 2)), [3, 1]))
    strategy.barrier()
    expected = (2 * delta - 1 + np.array([[1], [1], [0], [1], [2]])) * workers
    assert (table.numpy() == expected).all()
    assert (table.sparse_read([4, 0, 3]) == expected[[4, 0, 3]]).all()
    assert table.sparse_read([]).shape == (0, 2)
    assert (table[-1] == expected[-1]).all()
    assert (table[1:4, 1] == expected[1:4, 1]).all()
    assert (table[True] == expected[True]).all()
    assert table[False].shape == (0, 5, 2)
    assert (np.asarray(table) + 1 == table + 1).all()
    strategy.barrier()
    if rank == 0:
        table.assign(delta)
        table.scatter_update(IndexedSlices([[7.0, 8.0]], [2]))
        assert (table[2] == [7, 8]).all()
        assert (table[3] == delta[3]).all()


@pytest.mark.ranks(3)
def test_shards_of_a_closed_strategy_are_not_read(comm):
    tables = []

    def work(strategy):
        with strategy.scope():
            tables.append(Variable(np.zeros((5, 2))))

    on_workers(comm, work, variable_partitioner=partitioners.FixedShardsPartitioner(2))
    for table in tables:
        with pytest.raises(RuntimeError, match=r"^read_value on a closed strategy"):
            table.numpy()


WRONG_COUNTS = [None, [0, 1], [2, 2], [1, 1, 1], "ab"]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("variable_partitioner", [lambda shape, dtype, its=its: its for its in WRONG_COUNTS])
@worker_test()
def test_wrong_answer_of_partitioner_is_refused(strategy, variable_partitioner):
    with strategy.scope():
        assert float(Variable(1.0)) == 1.0  # a variable without axes is not cut
        with pytest.raises((ValueError, InvalidArgumentError), match="variable_partitioner must return"):
            Variable(np.zeros((4, 2)))


@pytest.mark.ranks(3)
@worker_test(variable_partitioner=partitioners.FixedShardsPartitioner(2))
def test_wrong_indices_and_values_are_refused(strategy):
    with strategy.scope():
        table = Variable(np.zeros((5, 2)))
    for kind, text, call in (
        (IndexError, "out of bounds", lambda: table[100]),
        (IndexError, "out of bounds", lambda: table[-100]),
        (IndexError, "out of bounds", lambda: table.sparse_read([5])),
        (TypeError, "sparse_read", lambda: table[np.array([1])]),
        (ValueError, "zero", lambda: table[::0]),
        (
            ValueError,
            r"shape \[5, 2\], and a value of shape \[5, 3\] was assigned",
            lambda: table.assign(np.zeros((5, 3))),
        ),
        (ValueError, "rows 0 to 4", lambda: table.scatter_add(IndexedSlices(np.ones((1, 2)), [5]))),
    ):
        with pytest.raises(kind, match=text):
            call()
        with pytest.raises(RuntimeError, match=r"read its value, as with numpy\(\)"):
            copy.copy(table)
    assert (table.numpy() == 0).all()
    assert (table.synchronization.name, table.aggregation.name) == ("ON_WRITE", "NONE")


@pytest.mark.ranks(3)
@worker_test()
def test_sharded_variables_can_be_made_of_variables(strategy):
    with strategy.scope():
        first, second, third = (Variable(np.full((rows, 2), float(rows))) for rows in (1, 2, 1))
        integers, longer, number = Variable([[1, 2]]), Variable(np.zeros((1, 3))), Variable(0.0)
    whole = ShardedVariable([first, second, third], name="whole")
    assert whole.shape == (4, 2)
    strategy.barrier()
    if strategy.is_chief:
        whole.assign(np.arange(8.0).reshape(4, 2))
        whole.assign_add([[1, 1], [1, 1], [2, 2], [2, 2]])
        assert second.numpy().tolist() == [[3, 4], [6, 7]]
    for wrong, kind, text in (
        (first, TypeError, "list of variables"),
        ([first, np.zeros((1, 2))], TypeError, "variables on parameter servers"),
        ([], ValueError, "at least one"),
        ([first, integers], ValueError, "one dtype"),
        ([first, longer], ValueError, "same shape but for axis 0"),
        ([number], ValueError, "same shape but for axis 0"),
    ):
        with pytest.raises(kind, match=text):
            ShardedVariable(wrong)


@server_rules.register("moves all rows, by the count")
def moves_all_rows(value, gradient, memory):
    value += gradient + memory["count"]


@pytest.mark.ranks(1, 3)
@worker_test(num_ps=2)
def test_rule_on_shards_without_rows_counts_the_gradient(strategy):
    with strategy.scope():
        shards = [Variable(np.zeros((4 // count, 2))) for count in (1, 2, 4) for _ in range(count)]
    tables = [shards[0], ShardedVariable(shards[1:3]), ShardedVariable(shards[3:])]
    for rule in (server_rules.Adam(1.0), server_rules.Registered("moves all rows, by the count")):
        strategy.barrier()
        for rows in ([0], [], [0], [3]) if strategy.is_chief else ():
            strategy.push(tables, [IndexedSlices(np.ones((len(rows), 2)), rows)] * 3, rule)
        strategy.barrier()
        whole, *others = strategy.read(tables)
        assert whole.any()
        assert all((other == whole).all() for other in others)


@server_rules.register("fails, and a shard is left out")
def fails(value, gradient, memory):
    raise ValueError("by intent")


@pytest.mark.ranks(3)
@worker_test(num_ps=2)
def test_sharded_change_reporting_an_earlier_error_changes_no_shard(strategy):
    with strategy.scope():
        shards = [Variable(np.zeros(2)) for _ in range(2)]
    table, channel = ShardedVariable(shards), vars(role_of(strategy).servers)["_channels"][shards[1].server]
    rows = IndexedSlices(np.ones(4), np.arange(4))
    for change in (lambda: table.assign_add(np.ones(4)), lambda: table.scatter_add(rows)):
        strategy.push(shards[1], np.ones(2), server_rules.Registered("fails, and a shard is left out"))
        while not vars(channel)["_incoming"].Test():
            pass
        with pytest.raises(RuntimeError, match="by intent"):
            change()
        assert not table.numpy().any()


@pytest.mark.ranks(1)
def test_replicas_change_different_rows_of_shards(comm):
    partitioner = partitioners.FixedShardsPartitioner(2)
    with ParameterServerStrategy(comm=comm, replicas=2, variable_partitioner=partitioner) as strategy:
        with strategy.scope():
            table = Variable(np.zeros((4, 2)), aggregation="sum")

        def change(rows):
            own = rows[get_replica_context().replica_id_in_sync_group]
            table.scatter_add(IndexedSlices(np.ones((len(own), 2)), own))

        for rows in ([[0], [3]], [[0], []], [[1, 2], [2]]):
            strategy.run(change, args=(rows,))
        assert table.numpy().tolist() == [[2, 2], [1, 1], [2, 2], [1, 1]]
        with pytest.raises(ValueError, match=r"with aggregation SUM: it would count 2 times"):
            strategy.run(lambda: table.assign_add(1.0))
        assert table.numpy()[0].tolist() == [2, 2]
