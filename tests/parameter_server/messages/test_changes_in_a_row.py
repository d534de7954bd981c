"""Changes of one worker: those that a server has not answered yet, and sparse pushes of a nest."""

import numpy as np
import pytest
from parameter_server.clusters import on_workers, worker_test

from mpidist import IndexedSlices, Variable
from mpidist.experimental import partitioners, server_rules
from mpidist.parameter_server.messages import ends
from mpidist.parameter_server.messages.ends import Channel
from mpidist.parameter_server.messages.protocol import WINDOW

HERE = {}  # the ranks of a test


@server_rules.register("tests: waits for a message")
def wait_for_message(value, gradient, memory):
    HERE["comm"].recv(source=0)


@server_rules.register("tests: refuses it")
def refuse(value, gradient, memory):
    raise ZeroDivisionError("by intent")


WAITS, REFUSES = (server_rules.Registered(f"tests: {what}") for what in ("waits for a message", "refuses it"))


def let_go():
    HERE["comm"].send(None, HERE["comm"].size - 1)


def name_rules(strategy, variable):
    """Use the rules once: a worker waits when it names one."""
    let_go()
    strategy.push(variable, 0.0, WAITS)
    strategy.flush()
    strategy.push(variable, 0.0, REFUSES)
    with pytest.raises(RuntimeError, match="by intent"):
        strategy.flush()


@pytest.mark.core
@pytest.mark.ranks(3)
@pytest.mark.parametrize("what", ["whole", "rows", "list"])
def test_changes_in_a_row_wait_only_for_room(comm, monkeypatch, what):
    """The server has not answered one of its changes, and all of them are made."""
    HERE["comm"], made = comm, 0
    waits = []
    really = ends.poll

    def wait(*given):
        if not waits:
            let_go()
        waits.append(made)
        really(*given)

    def work(strategy):
        nonlocal made
        with strategy.scope():
            table, bias = Variable(np.zeros((4, 2))), Variable(np.zeros(2))
        if strategy.is_chief:
            strategy.push([table, bias], [1.0, 1.0])  # numbers the list
            name_rules(strategy, table)
            monkeypatch.setattr(ends, "poll", wait)
            strategy.push(table, 0.0, WAITS)
            for _ in range(WINDOW + 5):
                if what == "whole":
                    table.assign_add(np.ones((4, 2)))
                elif what == "rows":
                    table.scatter_add(IndexedSlices(np.ones((1, 2)), [3]))
                else:
                    strategy.push([table, bias], [1.0, 1.0])
                made += 1
            assert waits[0] == WINDOW - 2
            monkeypatch.setattr(ends, "poll", really)
            assert (table.numpy()[3] == WINDOW + 6).all()
        strategy.barrier()

    on_workers(comm, work)


@pytest.mark.core
@pytest.mark.ranks(3)
@pytest.mark.parametrize(("size", "transport"), [(1, "auto"), (700_000, "auto"), (700_000, "mpi")])
def test_read_reports_all_failed_changes_once(comm, monkeypatch, size, transport):
    """Once: the other changes are made, and what was read behind them is received."""
    HERE["comm"], really = comm, ends.poll
    monkeypatch.setenv("MPIDIST_TRANSPORT", transport)

    def wait(*given):
        monkeypatch.setattr(ends, "poll", really)
        let_go()
        really(*given)

    def work(strategy):
        with strategy.scope():
            read, first, second = (Variable(np.zeros(count), name=f"of {count}") for count in (size, 2, 3))
        if strategy.is_chief:
            name_rules(strategy, first)
            strategy.push(first, 0.0, WAITS)
            strategy.push(first, 1.0, REFUSES)
            first.assign_add(np.ones(2))
            strategy.push(second, 1.0, REFUSES)
            monkeypatch.setattr(ends, "poll", wait)
            with pytest.raises(RuntimeError, match=r"^change of 'of 2' failed .*by intent.*\n.* 1 more.*'of 3' failed"):
                read.numpy()
            read.assign_add(np.ones(size))
            assert [value.tolist() for value in strategy.read([first, second])] == [[1.0] * 2, [0.0] * 3]
            assert (read.numpy() == 1.0).all()
        strategy.barrier()

    on_workers(comm, work)


def rows(number, *indices, width=2):
    return IndexedSlices(np.full((len(indices), width), number), np.array(indices, np.int64))


@pytest.mark.ranks(3)
@pytest.mark.core
@pytest.mark.parametrize("num_ps", [1, 2])
@worker_test()
def test_push_changes_a_nest_of_rows_and_arrays(strategy, num_ps):
    """Also rows that come twice, none at all, and a variable that is there twice."""
    with strategy.scope():
        tables = [Variable(np.zeros((6, 2))) for _ in range(3)]
        flags, dense = Variable(np.zeros((3, 1), np.int8)), Variable(np.zeros(4))
    values = [rows(1.0, 0, 5), rows(2.0, 1, 1), rows(3.0)]
    few = IndexedSlices(np.ones((1, 1), np.int8), [2])
    strategy.push([*tables, flags, tables[0], dense], [*values, few, rows(0.5, 0), np.ones(4)])
    strategy.barrier()
    workers = strategy.topology.size
    found = strategy.read([*tables, flags, dense])
    assert found[0][:, 1].tolist() == [1.5 * workers, 0, 0, 0, 0, workers]
    assert found[1][:, 0].tolist() == [0, 4 * workers, 0, 0, 0, 0]
    assert not found[2].any()
    assert found[3].tolist() == [[0], [0], [workers]]
    assert (found[4] == workers).all()


@pytest.mark.core
@pytest.mark.ranks(3)
@pytest.mark.parametrize("num_ps", [1, 2])
def test_sparse_pushes_are_one_request_a_server(comm, monkeypatch, num_ps):
    """Of sharded variables, too."""
    calls = []
    really = Channel.start

    def start(channel, call, *args, **kwargs):
        calls.append(call)
        really(channel, call, *args, **kwargs)

    monkeypatch.setattr(Channel, "start", start)

    def work(strategy):
        with strategy.scope():
            tables = [Variable(np.zeros((8, 2))) for _ in range(10)]
        strategy.barrier()
        del calls[:]
        strategy.push(tables, [rows(1.0, 0, 7)] * 10)
        strategy.flush()
        assert len(calls) == num_ps
        assert all(call.startswith("change of rows of 'variable") and "others" in call for call in calls)
        strategy.barrier()
        for value in strategy.read(tables):
            assert value[:, 0].tolist() == [strategy.topology.size, *[0] * 6, strategy.topology.size]

    on_workers(comm, work, num_ps=num_ps, variable_partitioner=partitioners.FixedShardsPartitioner(2))


@pytest.mark.ranks(1, 3)
@worker_test()
def test_push_of_a_wrong_nest_is_refused_before_data_moves(strategy):
    with strategy.scope():
        tables = [Variable(np.zeros((4, 2))) for _ in range(2)]
    for wrong in (rows(1.0, 4), rows(1.0, 0, width=3)):
        with pytest.raises(ValueError, match=r"rows 0 to 3|shape"):
            strategy.push([*tables, tables[0]], [rows(1.0, 0), np.ones((4, 2)), wrong])
    strategy.barrier()
    assert not any(value.any() for value in strategy.read(tables))


@pytest.mark.ranks(3)
@worker_test(num_ps=2)
def test_push_reporting_an_earlier_error_changes_nothing(strategy):
    """On no server; and the next one does."""
    with strategy.scope():
        tables = [Variable(np.zeros((4, 2))) for _ in range(2)]
    if strategy.is_chief:
        made = [0]

        def push_until_told():
            while True:
                strategy.push(tables, [np.ones((4, 2)), rows(1.0, 0)])
                made[0] += 1

        strategy.push(tables[1], np.ones((4, 2)), REFUSES)
        with pytest.raises(RuntimeError, match="ZeroDivisionError: by intent"):
            push_until_told()
        strategy.push(tables, [np.ones((4, 2)), rows(1.0, 0)])
        assert [value[0, 0] for value in strategy.read(tables)] == [made[0] + 1] * 2
    strategy.barrier()
