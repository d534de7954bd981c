"""`Strategy.barrier`, `broadcast`, `broadcast_object` and `gather_object`; and calls of the chief alone."""

import os
import re
import time
from collections import OrderedDict
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
from mpi4py import MPI
from support.calls import calls_of_strategy, every_call
from support.everywhere import raises_everywhere

import mpidist
from mpidist import MultiWorkerMirroredStrategy as MultiWorker
from mpidist import OneDeviceStrategy
from mpidist.checkpoint import Checkpoint, CheckpointManager
from mpidist.context_stack import parts_of
from mpidist.errors import InvalidArgumentError, PeerFailedError
from mpidist.experimental import ParameterServerStrategy

pytestmark = pytest.mark.core

# --- barrier ---


@pytest.mark.parametrize("check", ["1", "0"])
@pytest.mark.parametrize("placement", ["one node", "even"], indirect=True)
@pytest.mark.usefixtures("placement")
def test_barrier_returns_after_all_ranks_have_come(comm, tmp_path, monkeypatch, check):
    """Also where ranks do not compare their calls, which is what makes them meet in others."""
    monkeypatch.setenv("MPIDIST_CHECK", check)
    folder = Path(comm.bcast(str(tmp_path)))
    with MultiWorker(comm=comm) as strategy:
        for late in range(comm.size):
            time.sleep(0.02 * (comm.rank == late))
            (folder / f"{late}-{comm.rank}").touch()
            strategy.barrier()
            assert {name for name in os.listdir(folder) if name.startswith(f"{late}-")} == {
                f"{late}-{rank}" for rank in range(comm.size)
            }
            strategy.barrier()


# --- broadcast ---


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.usefixtures("placement")
def test_value_of_any_rank_comes_to_all(comm, place, strategy):
    root = place % comm.size
    value = {
        "a": np.arange(5.0) + comm.rank,
        "b": [comm.rank, np.float32(comm.rank)],
        "wide": np.full((300, 300), comm.rank, np.int16)[:, ::2],
        "text": np.array([f"rank {comm.rank}"]),
        "none": np.zeros((0, 3)),
    }
    found = strategy.broadcast(value, root)
    assert found["a"].tolist() == [root + at for at in range(5)]
    assert found["b"] == [root, root]
    assert isinstance(found["b"][0], int)
    assert (found["wide"] == root).all()
    assert found["text"].tolist() == [f"rank {root}"]
    assert found["none"].shape == (0, 3)
    assert value["a"][0] == comm.rank
    assert strategy.broadcast(value)["b"][0] == 0
    per_replica = strategy.run(lambda: np.float64(comm.rank))
    assert strategy.broadcast(per_replica, root=np.int64(root)) == root
    # into outs
    value = [np.full(7, float(comm.rank)), np.full((3, 4), comm.rank, ">i4")]
    outs = [np.zeros(7), np.zeros((4, 3), np.int32).T]
    assert strategy.broadcast(value, root, out=outs) is outs
    assert all((out == root).all() for out in outs)
    assert (value[0] == comm.rank).all()
    strategy.broadcast(value, root, out=value)
    assert all((one == root).all() for one in value)
    both = np.arange(10.0) + 100 * comm.rank
    strategy.broadcast(both[:8], root, out=both[2:])  # what is sent, and written, overlap
    assert both[2:].tolist() == [100 * root + at for at in range(8)]
    left, right = np.full(5, comm.rank), np.full(5, -1 - comm.rank)
    strategy.broadcast([left, right], root, out=[right, left])  # each is written where the other one is read
    assert (left == -1 - root).all()
    assert (right == root).all()
    for per_node in (False, True):
        out = strategy.symmetric_empty(1000, np.float32, per_node=per_node)
        assert strategy.broadcast(np.full(1000, comm.rank, np.float32), root, out=out) is out
        assert (out == root).all()
        strategy.barrier()  # one array of a node is read by all its ranks
        strategy.broadcast(out, root, out=out)
        assert (out == root).all()
        strategy.barrier()


@pytest.mark.ranks(1, 3)
def test_wrong_broadcasts_are_refused(comm, strategy):
    wrong = [
        ({"root": -1}, ValueError, "root must be a whole number >= 0, got -1"),
        ({"root": 999}, ValueError, "root 999 is not one of the ranks 0 to"),
        ({"root": 0.0}, TypeError, r"root must be a whole number >= 0, got 0\.0"),
        ({"root": True}, TypeError, "root must be a whole number"),
        ({"value": "text"}, TypeError, "cannot take a value of type"),
        ({"value": np.array([None])}, InvalidArgumentError, "cannot broadcast an array of Python objects"),
        ({"out": np.zeros(3)}, InvalidArgumentError, r"out 0 must be an array f64\[2\], got f64\[3\]"),
        ({"out": [np.zeros(2)]}, InvalidArgumentError, "out must be a nest of the same form"),
        ({"out": np.broadcast_to(0.0, 2)}, InvalidArgumentError, "read-only"),
    ]
    for arguments, kind, text in wrong:
        with raises_everywhere(comm, kind, text):
            strategy.broadcast(**({"value": np.ones(2)} | arguments))
        assert strategy.reduce("sum", 1) == comm.size
    with raises_everywhere(comm, ValueError, "root 999 is not one of the ranks"):
        strategy.broadcast_object(1, root=999)
    with raises_everywhere(comm, TypeError, "root must be a whole number >= 0, got None"):
        strategy.broadcast_object(1, root=None)


@pytest.mark.ranks(2, 3)
def test_calls_that_differ_between_ranks_are_refused(comm, strategy):
    per_node = strategy.symmetric_empty(2, np.float64, per_node=True)
    with raises_everywhere(comm, InvalidArgumentError, "outs that are per-node arrays"):
        strategy.broadcast(np.ones(2), out=np.zeros(2) if comm.rank == 1 else per_node)
    assert strategy.broadcast(comm.rank, root=1) == 1
    with raises_everywhere(comm, InvalidArgumentError, "has an item of type Point"):
        strategy.gather_object(Point(1) if comm.rank == 1 else 1)
    with raises_everywhere(comm, InvalidArgumentError, "masked array, whose mask would be lost"):
        strategy.gather_object({"loss": np.ma.masked_array([1.0, 2.0], [False, True])} if comm.rank == 1 else 1)
    assert strategy.gather_object(comm.rank) == list(range(comm.size))


@pytest.mark.ranks(1, 3)
def test_out_is_for_all_ranks(comm, strategy):
    ops = parts_of(strategy).cross_device_ops
    if comm.size > 1:
        with raises_everywhere(comm, ValueError, "out .*destinations"):
            ops.broadcast(np.ones(2), 0, out=np.ones(2))
    found = ops.broadcast(comm.rank, 0, root=comm.size - 1)
    assert found == (comm.size - 1 if comm.rank == 0 else None)


# --- objects ---

OBJECT = {"lr": 0.1, 3: ("a", None, True), "rows": [np.arange(3), np.float32(2)], "nested": {"deep": [{}]}}


def same(one, other):
    return repr(one) == repr(other)


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("placement", ["one node", "even", "cyclic"], indirect=True)
@pytest.mark.usefixtures("placement")
def test_object_of_any_rank_comes_to_all(comm, place, strategy):
    root = place % comm.size
    own = OBJECT | {"rank": comm.rank} if comm.rank == root else object()  # of others it is ignored
    found = strategy.broadcast_object(own, root)
    assert same(found, OBJECT | {"rank": root})
    assert found is not own
    found["rows"][0] += 1  # writable, and each rank's own
    assert OBJECT["rows"][0].tolist() == [0, 1, 2]
    assert strategy.broadcast_object(comm.rank) == 0
    assert strategy.broadcast_object("" if comm.rank == root else None, root) == ""
    assert len(strategy.broadcast_object("x" * (1 << 20) if comm.rank == root else None, root)) == 1 << 20
    own = [None, "text", OBJECT, {"big": np.arange(100_000)}][comm.rank % 4]
    rows = strategy.gather_object(own)
    wanted = [[None, "text", OBJECT, {"big": np.arange(100_000)}][rank % 4] for rank in range(comm.size)]
    assert same(rows, wanted)
    assert strategy.gather_object(list(range(comm.rank))) == [list(range(rank)) for rank in range(comm.size)]


class Point:
    """Of a program: nothing that can be sent as it is."""

    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return isinstance(other, Point) and other.x == self.x

    __hash__ = None


class Unreadable:
    """Comes out of a pickle on all ranks but one."""

    def __init__(self, where):
        self.where = where

    def __reduce__(self):
        return _fail, (self.where,)


def _fail(where):
    if MPI.COMM_WORLD.rank == where:
        raise ImportError("no module of that name here")


@pytest.mark.ranks(1, 3)
def test_gather_and_broadcast_object_pickle_only_with_the_option(comm, strategy):
    assert strategy.gather_object(Point(comm.rank), pickle=True) == [Point(rank) for rank in range(comm.size)]
    assert strategy.broadcast_object(Point(comm.rank), comm.size - 1, pickle=True) == Point(comm.size - 1)
    for send in (strategy.broadcast_object, strategy.gather_object):
        with raises_everywhere(comm, InvalidArgumentError, "item of type Point.* pass pickle=True on all ranks"):
            send(Point(1))
        with raises_everywhere(comm, InvalidArgumentError, r"(with pickle|InvalidArgumentError): .*[Pp]ickle"):
            send(Lock(), pickle=True)
        with raises_everywhere(comm, ImportError, "no module of that name here"):
            send(Unreadable(comm.size - 1), pickle=True)
    with raises_everywhere(comm, InvalidArgumentError, "OrderedDict"):
        strategy.gather_object(OrderedDict(a=1))  # would come back as a dict
    assert strategy.reduce("sum", 1) == comm.size


@pytest.mark.no_mpi
def test_one_process_calls_them_too():
    with OneDeviceStrategy() as strategy:
        strategy.barrier()
        assert strategy.broadcast(np.arange(2)).tolist() == [0, 1]
        assert strategy.broadcast_object({"a": 1}) == {"a": 1}
        assert strategy.gather_object("x") == ["x"]
    mpidist.get_strategy().barrier()


def test_replicas_of_a_rank_make_one_call(comm):
    with MultiWorker(comm=comm, replicas=2 * comm.size) as strategy:
        strategy.barrier()
        assert strategy.broadcast(comm.rank, comm.size - 1) == comm.size - 1
        assert strategy.gather_object(comm.rank) == list(range(comm.size))


@pytest.mark.ranks(1)
def test_workers_of_parameter_servers_are_not_in_step():
    with ParameterServerStrategy(comm=MPI.COMM_SELF) as strategy:
        for name in ("broadcast", "broadcast_object", "gather_object"):
            with pytest.raises(RuntimeError, match=f"{name} of a .*Strategy: its workers are asynchronous"):
                getattr(strategy, name)(1)
        strategy.barrier()


# --- calls of the chief alone ---

ALL_OR_NONE = "all ranks make the call of rank 0, or none: is it below `if strategy.is_chief:`?"
ADVICE = {
    "save": "all ranks call save, and each writes a share",
    "restore": "all ranks call restore, and each reads a share",
    "next": "Let all ranks stop at the same step.*",
}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("placement", ["one node", "even"], indirect=True)
@pytest.mark.usefixtures("placement")
def test_call_of_the_chief_alone_raises_with_advice(comm, tmp_path):
    others = "rank 1" if comm.size == 2 else f"ranks 1-{comm.size - 1}"
    folder = Path(comm.bcast(str(tmp_path)))
    with MultiWorker(comm=comm) as strategy:
        calls = every_call(strategy, folder)
        for name, call in calls.items():
            other, other_name = (
                (strategy.barrier, r"barrier\(\)") if name != r"barrier\(\)" else (calls["gather"], "gather")
            )
            last = ADVICE.get(re.split(r"\W", name.strip("("))[0], re.escape(ALL_OR_NONE))
            pattern = rf"nothing was sent\n  call: rank 0: {name}; {others}: {other_name}\n(  line: .*\n)?  {last}$"
            with raises_everywhere(comm, InvalidArgumentError, pattern):
                call() if strategy.is_chief else other()
        assert not any(folder.iterdir())


@pytest.mark.ranks(2)
def test_call_with_other_arguments_on_the_chief_raises_without_advice(strategy, comm):
    with raises_everywhere(comm, InvalidArgumentError, r"reduce along axis 0; rank 1: reduce along axis 1$"):
        strategy.reduce("SUM", np.ones((2, 2)), axis=comm.rank)
    with raises_everywhere(comm, InvalidArgumentError, "gather_object; rank 1: gather_object with pickle$"):
        strategy.gather_object(1, pickle=comm.rank == 1)


@pytest.mark.ranks(2)
def test_save_of_the_chief_alone_at_the_end_raises_with_advice(comm, tmp_path):
    strategy = MultiWorker(comm=comm)
    with strategy.scope():
        manager = CheckpointManager(Checkpoint(w=np.zeros(3)), tmp_path)
    if strategy.is_chief:
        with pytest.raises(PeerFailedError, match=r"while rank 0 called save of a checkpoint .*each writes a share$"):
            manager.save()
    strategy.close()


@pytest.mark.ranks(2)
def test_call_of_the_strategy_in_run_names_the_call_of_replicas(comm):
    hints = {
        "reduce": r"call mpidist.get_replica_context\(\).all_reduce there",
        "gather": r"call mpidist.get_replica_context\(\).all_gather there",
        "broadcast": r"call it outside, or in .*merge_call",
        r"barrier\(\)": r"leave it out, as each all_reduce\(\) there waits for all ranks",
    }
    with MultiWorker(comm=comm) as strategy:
        for name, hint in hints.items():
            with raises_everywhere(comm, RuntimeError, f"^{name} .*; {hint}$"):
                strategy.run(calls_of_strategy(strategy)[name])
        with raises_everywhere(comm, TypeError, r"^Strategy\.reduce\(\) got an unexp"):
            strategy.reduce("sum", 1, into=2)
