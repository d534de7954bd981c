"""Sparse pushes of a nest: what they change, and how many requests they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from parameter_server.clusters import on_workers

from mpidist import IndexedSlices, Variable
from mpidist.experimental import ParameterServerStrategy, partitioners, server_rules
from mpidist.parameter_server.messages.ends import Channel

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


def rows(number: float, *indices: int, width: int = 2) -> IndexedSlices:
    return IndexedSlices(np.full((len(indices), width), number), np.array(indices, np.int64))


@pytest.mark.ranks(3)
@pytest.mark.core
@pytest.mark.parametrize("num_ps", [1, 2])
def test_a_nest_of_rows_and_arrays_is_changed(comm: Intracomm, num_ps: int) -> None:
    """Also rows that come twice, none at all, and a variable that is there twice."""

    def work(strategy: ParameterServerStrategy) -> None:
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

    on_workers(comm, work, num_ps=num_ps)


@pytest.mark.core
@pytest.mark.ranks(3)
@pytest.mark.parametrize("num_ps", [1, 2])
def test_sparse_pushes_are_one_request_a_server(comm: Intracomm, monkeypatch: pytest.MonkeyPatch, num_ps: int) -> None:
    """Of sharded variables, too."""
    calls: list[str] = []
    really = Channel.start

    def start(channel: Channel, call: str, *args: Any, **kwargs: Any) -> None:
        calls.append(call)
        really(channel, call, *args, **kwargs)

    monkeypatch.setattr(Channel, "start", start)

    def work(strategy: ParameterServerStrategy) -> None:
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
def test_what_does_not_fit_is_refused_before_anything_is_sent(comm: Intracomm) -> None:
    def work(strategy: ParameterServerStrategy) -> None:
        with strategy.scope():
            tables = [Variable(np.zeros((4, 2))) for _ in range(2)]
        for wrong in (rows(1.0, 4), rows(1.0, 0, width=3)):
            with pytest.raises(ValueError, match=r"rows 0 to 3|shape"):
                strategy.push([*tables, tables[0]], [rows(1.0, 0), np.ones((4, 2)), wrong])
        strategy.barrier()
        assert not any(value.any() for value in strategy.read(tables))

    on_workers(comm, work)


@server_rules.register("refuses")
def refuse(value: Any, gradient: Any, memory: Any) -> None:
    raise ZeroDivisionError("by intent")


@pytest.mark.ranks(3)
def test_error_of_an_earlier_push_comes_before_rows_are_sent(comm: Intracomm) -> None:
    """And leaves the other server usable."""

    def work(strategy: ParameterServerStrategy) -> None:
        with strategy.scope():
            tables = [Variable(np.zeros((4, 2))) for _ in range(2)]
        strategy.push(tables[1], np.ones((4, 2)), server_rules.Registered("refuses"))
        with pytest.raises(RuntimeError, match="ZeroDivisionError: by intent"):
            strategy.push(tables, [rows(1.0, 0)] * 2)
        strategy.push(tables[1], np.ones((4, 2)), server_rules.Registered("refuses"))
        with pytest.raises(RuntimeError, match="ZeroDivisionError: by intent"):
            strategy.read(tables)
        assert not any(value.any() for value in strategy.read(tables))

    on_workers(comm, work, num_ps=2)
