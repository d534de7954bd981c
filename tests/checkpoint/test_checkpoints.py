"""Checkpoints: what they hold, what is restored on how many ranks, replicas and servers, and what is refused."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensors
from parameter_server.clusters import on_workers
from safetensors.numpy import load_file
from support.everywhere import raises_everywhere, same_everywhere
from support.replicas import replica_id

import mpidist
from mpidist import MirroredStrategy, Variable
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.checkpoint import Checkpoint, CheckpointManager
from mpidist.context_stack import parts_of
from mpidist.errors import InvalidArgumentError
from mpidist.experimental import CentralStorageStrategy, partitioners

pytestmark = [pytest.mark.core, pytest.mark.ranks(1, 3)]

DTYPES = ["float16", "float32", "float64", "int8", "uint16", "int64", "bool", "complex64", "complex128"]


def numbers(dtype, *shape):
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 100 - 3).astype(dtype)


@pytest.mark.parametrize("make", [Strategy, MirroredStrategy, CentralStorageStrategy])
def test_variables_and_arrays_come_back_in_place(comm, folder, make):
    with make(comm=comm) as strategy, strategy.scope():
        arrays = {dtype: numbers(dtype, 3, 5) for dtype in DTYPES} | {
            "bfloat16": numbers(ml_dtypes.bfloat16, 7),
            "float8": numbers(ml_dtypes.float8_e4m3fn, 4),
            "empty": np.zeros((0, 3)),
            "none": np.array(2.5),
            "columns": np.asfortranarray(numbers("f", 4, 3)),
            "strided": numbers("f", 8)[::2],
        }
        kept = {name: array.copy() for name, array in arrays.items()}
        variables = [Variable(numbers("f", 2, 3)), {"step": Variable(7), "half": Variable(numbers("e", 5))}]
        checkpoint = Checkpoint(arrays=arrays, variables=variables)
        assert checkpoint.strategy is strategy
        path = checkpoint.write(folder / "one")
        variables[0].assign(np.zeros((2, 3), "f"))
        variables[1]["step"].assign(0)
        variables[1]["half"].assign(np.ones(5, "e"))
        for array in arrays.values():
            array[...] = 1
        checkpoint.restore(path)
        assert checkpoint.arrays is arrays
        assert checkpoint.variables is variables
        for name, array in arrays.items():
            assert array.dtype == kept[name].dtype, name
            assert (array == kept[name]).all(), name
        assert (variables[0].numpy() == numbers("f", 2, 3)).all()
        assert variables[1]["step"].numpy() == 7
        assert (variables[1]["half"].numpy() == numbers("e", 5)).all()
        assert same_everywhere(comm, variables[0].numpy().tolist())


def test_numbers_texts_and_generators(comm, folder):
    with Strategy(comm=comm) as strategy, strategy.scope():
        kinds = [np.random.PCG64, np.random.Philox, np.random.MT19937, np.random.SFC64]
        rngs = [np.random.Generator(kind(5)) for kind in kinds]
        rngs[0].integers(10, dtype=np.int32)  # keeps half of a number for the next call
        tensor = tensors.Tensor(np.arange(3.0))
        plain = {"epoch": 3, "rate": 0.1, "name": "a 'b'", "on": True, "none": None, "big": 1 << 80}
        frozen = np.arange(4)
        frozen.setflags(write=False)
        checkpoint = Checkpoint(
            epoch=1, plain=plain, rngs=rngs, scalar=np.float32(2.5), frozen=frozen, z=1 + 2j, tensor=tensor
        )
        path = checkpoint.write(folder / "plain")
        wanted = [rng.random(5) for rng in rngs]
        checkpoint.epoch += 1
        checkpoint.plain = dict.fromkeys(plain, 0)
        checkpoint.scalar, checkpoint.frozen, checkpoint.z = np.float32(0), np.zeros(4, int), 0j
        tensor.array[...] = 0
        checkpoint.restore(path)
        assert checkpoint.epoch == 1
        assert checkpoint.plain == plain
        assert [rng.random(5).tolist() for rng in rngs] == [own.tolist() for own in wanted]
        assert checkpoint.rngs[0] is rngs[0]
        assert (checkpoint.scalar, type(checkpoint.scalar)) == (2.5, np.float32)
        assert (checkpoint.z, checkpoint.frozen.tolist()) == (1 + 2j, [0, 1, 2, 3])
        assert checkpoint.tensor.array.tolist() == [0, 1, 2]


def test_checkpoint_equal_values_are_written_once(comm, folder):
    """Of what differs, each rank's; and the files are open to others."""
    with Strategy(comm=comm) as strategy, strategy.scope():
        kernel = Variable(numbers("f", 100, 10))
        same, own = np.arange(1000.0), np.full(10, comm.rank)
        checkpoint = Checkpoint(kernel=kernel, same=same)
        path = Path(checkpoint.write(folder / "equal"))
        assert sorted(one.name for one in path.iterdir()) == ["manifest.json", "rank-0.json", "rank-0.safetensors"]
        found = load_file(path / "rank-0.safetensors")
        assert (found["kernel"] == kernel.numpy()).all()
        assert (found["same"] == same).all()
        Checkpoint(kernel=kernel, same=same, own=own).write(path)
        parts = {f"rank-{rank}.{end}" for rank in range(comm.size) for end in ("json", "safetensors")}
        assert {one.name for one in path.iterdir()} == {"manifest.json", *parts}
        assert [one.name for one in folder.iterdir()] == ["equal"]
        own[...] = -1
        Checkpoint(kernel=kernel, same=same, own=own).restore(path)
        assert own.tolist() == [comm.rank] * 10


def metrics(strategy):
    kinds = {"sum": 0, "mean": 0.0, "only_first_replica": 0, "none": 0}
    with strategy.scope():
        return {
            kind: Variable(value, name=kind, synchronization="ON_READ", aggregation=kind)
            for kind, value in kinds.items()
        }


def own_ids(strategy, variables):
    """Give the copies of each replica the replica's id and 3."""

    def step():
        context = mpidist.get_replica_context()
        assert context is not None
        for variable in variables.values():
            variable.assign(context.replica_id_in_sync_group + 3)

    strategy.run(step)


def copies(comm, variable):
    return [float(value) for own in comm.allgather(variable.values) for value in own]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("aggregation", ["sum", "mean"])
def test_small_floats_of_replicas_are_added_as_all_reduce_adds_them(comm, folder, aggregation):
    """On another number of replicas: float16 holds neither three times 40,000, nor 2,049."""
    own, read = np.array([[40_000, 2048], [40_000, 1], [40_000, 1]], np.float16), []
    for replicas in (3, 2):
        with Strategy(comm=comm, replicas=replicas) as strategy, strategy.scope():
            metric = Variable(own[0], synchronization="ON_READ", aggregation=aggregation)
            if replicas == 3:
                strategy.run(lambda metric=metric: metric.assign(own[replica_id()]))
                Checkpoint(metric=metric).write(folder / "metric")
            else:
                Checkpoint(metric=metric).restore(folder / "metric")
            read.append(metric.numpy().tolist())
    assert read[0] == read[1]


@pytest.mark.parametrize("replicas", [None, 8])
def test_copies_that_differ_come_back_on_as_many_replicas(comm, folder, replicas):
    """Also on other ranks, if the number of replicas was chosen."""
    half = comm.Split(comm.rank * 2 >= comm.size, comm.rank) if replicas else comm
    with Strategy(replicas=replicas, comm=comm) as strategy:
        variables = metrics(strategy)
        own_ids(strategy, variables)
        path = Checkpoint(**variables).write(folder / "replicas")
        total = strategy.num_replicas_in_sync
    with Strategy(replicas=replicas, comm=half) as strategy:
        variables = metrics(strategy)
        checkpoint = Checkpoint(**variables)
        checkpoint.restore(path)
        for variable in variables.values():
            assert copies(half, variable) == [replica + 3.0 for replica in range(total)]
    comm.Barrier()


@pytest.mark.ranks(3)
def test_copies_that_differ_are_aggregated_for_fewer_ranks(comm, folder):
    with Strategy(comm=comm) as strategy:
        variables = metrics(strategy)
        own_ids(strategy, variables)
        path = Checkpoint(**variables).write(folder / "sums")
    two = comm.Split(comm.rank < 2, comm.rank)
    total = sum(rank + 3 for rank in range(comm.size))
    if comm.rank < 2:
        with Strategy(comm=two) as strategy:
            variables = metrics(strategy)
            with raises_everywhere(two, ValueError, "aggregation NONE has no value for another number of replicas"):
                Checkpoint(**variables).restore(path)
            assert copies(two, variables["sum"]) == [0, 0]
            del variables["none"]
            Checkpoint(**variables).restore(path, partial=True)
            assert variables["sum"].numpy() == total
            assert variables["mean"].numpy() == pytest.approx(total / comm.size)
            assert copies(two, variables["only_first_replica"]) == [3, 3]
            with raises_everywhere(two, ValueError, "sum has one copy for each replica .* synchronization .* servers"):
                Checkpoint(sum=Variable(0)).restore(path, partial=True)
    comm.Barrier()


@pytest.mark.ranks(3)
def test_restore_of_a_folder_that_one_rank_does_not_see_names_rank_and_path(comm, folder, monkeypatch, strategy):
    (folder / f"{comm.rank}").mkdir()
    comm.Barrier()
    monkeypatch.chdir(folder / "0")
    with strategy.scope():
        manager = CheckpointManager(Checkpoint(own=np.array([comm.rank])), "saved")
    manager.save()
    monkeypatch.chdir(folder / f"{comm.rank}")
    with raises_everywhere(comm, FileNotFoundError, f"rank 1 does not find .*'{folder}/1/saved/ckpt-1', which rank 0"):
        manager.checkpoint.restore("saved/ckpt-1")
    monkeypatch.chdir(folder / "1")
    with raises_everywhere(comm, FileNotFoundError, f"there is no checkpoint '{folder}/1/absent'"):
        manager.checkpoint.restore("absent")


@pytest.mark.ranks(3)
def test_restore_that_fails_on_one_rank_after_reading_raises_on_all(comm, folder, monkeypatch, strategy):
    def fail(self, state):
        raise MemoryError("no room for the rest of the pass")

    dataset = strategy.experimental_distribute_dataset(mpidist.Batches(np.arange(12), 4))
    checkpoint = Checkpoint(data=dataset)
    path = checkpoint.write(folder / "one")
    with monkeypatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(type(dataset), "load_state_dict", fail)
        with raises_everywhere(comm, MemoryError, "no room for the rest"):
            checkpoint.restore(path)
    checkpoint.restore(path)


@pytest.mark.ranks(3)
def test_checkpoint_values_unlike_by_rank_need_as_many_ranks(comm, folder):
    with Strategy(comm=comm) as strategy, strategy.scope():
        rng = np.random.default_rng(comm.rank)
        checkpoint = Checkpoint(rng=rng, epoch=2, own=comm.rank)
        path = checkpoint.write(folder / "own")
        wanted, checkpoint.own = rng.random(3).tolist(), -1
        checkpoint.restore(path)
        assert rng.random(3).tolist() == wanted
        assert (checkpoint.epoch, checkpoint.own) == (2, comm.rank)
    alone = comm.Split(comm.rank, 0)
    with Strategy(comm=alone) as strategy, strategy.scope():
        checkpoint = Checkpoint(rng=rng, epoch=0, own=5)
        with pytest.raises(ValueError, match=rf"rng differed between the {comm.size} ranks that saved .* there are 1"):
            checkpoint.restore(path)
        assert (checkpoint.epoch, checkpoint.own) == (0, 5)
        checkpoint = Checkpoint(epoch=0)
        checkpoint.restore(path, partial=True)
        assert checkpoint.epoch == 2
        with pytest.raises(ValueError, match=r"holds nothing of this checkpoint: weights is not in .* step$"):
            Checkpoint(weights=np.ones(2)).restore(path, partial=True)
        with pytest.raises(TypeError, match="partial must be True or False, got 'no'"):
            checkpoint.restore(path, partial="no")
    comm.Barrier()


def test_variables_on_servers_are_one_each(comm, folder):
    """They are restored to another number of shards and servers, and by other strategies."""

    def save(strategy):
        with strategy.scope():
            table = Variable(numbers("f", 10, 2), name="table")
            step = Variable(5, name="step")
        if strategy.is_chief:
            Checkpoint(table=table, step=step, epoch=4).write(folder / "servers")
        else:
            with pytest.raises(RuntimeError, match=r"is for the chief: write `if strategy\.is_chief:`"):
                Checkpoint(table=table, step=step, epoch=4).write(folder / "servers")
        strategy.barrier()

    def restore(strategy):
        with strategy.scope():
            table = Variable(np.zeros((10, 2), "f"), name="table")
            step = Variable(0, name="step")
        checkpoint = Checkpoint(table=table, step=step, epoch=0)
        checkpoint.restore(folder / "servers")
        assert (table.numpy() == numbers("f", 10, 2)).all()
        assert (step.numpy(), checkpoint.epoch) == (5, 4)
        with pytest.raises((FileNotFoundError, InvalidArgumentError), match="there is no checkpoint"):
            checkpoint.restore(folder / "absent")
        with pytest.raises((ValueError, InvalidArgumentError), match="more is not in it"):
            Checkpoint(table=table, step=step, epoch=0, more=1).restore(folder / "servers")

    on_workers(comm, save, variable_partitioner=partitioners.FixedShardsPartitioner(4))
    on_workers(
        comm, restore, variable_partitioner=partitioners.FixedShardsPartitioner(3), num_ps=max(1, comm.size // 2)
    )
    with Strategy(comm=comm) as strategy, strategy.scope():
        table = Variable(np.zeros((10, 2), "f"))
        Checkpoint(table=table).restore(folder / "servers", partial=True)
        assert (table.numpy() == numbers("f", 10, 2)).all()


def test_other_forms_are_refused_and_nothing_is_changed(comm, folder):
    with Strategy(comm=comm) as strategy, strategy.scope():
        path = Checkpoint(a=np.arange(4.0), b=[np.arange(3), 1], rng=np.random.default_rng(1)).write(folder / "one")
        for other, pattern in (
            ({"a": np.zeros(4, "f"), "b": [np.zeros(3, int), 0]}, r"a is float32\[4\], and a in .* is float64\[4\]"),
            ({"a": np.zeros(4), "b": [np.zeros(2, int), 0]}, r"b\[0\] is int64\[2\], and .* is int64\[3\]"),
            ({"a": np.zeros(4), "b": [np.zeros(3, int), np.zeros(1)]}, r"b\[1\] is float64\[1\], .* is number or text"),
            ({"a": 1.0, "b": [np.zeros(3, int), 0]}, r"a is number or text, and a in .* is float64\[4\]"),
        ):
            checkpoint = Checkpoint(**other, rng=np.random.Generator(np.random.PCG64(2)))
            with raises_everywhere(comm, ValueError, pattern):
                checkpoint.restore(path)
            assert not np.any(checkpoint.b[0])
        with raises_everywhere(comm, ValueError, "rng is generator Philox, and rng in .* is generator PCG64"):
            Checkpoint(rng=np.random.Generator(np.random.Philox(1))).restore(path, partial=True)
        with raises_everywhere(comm, ValueError, r"c is not in it, and a, b\[0\], b\[1\] and rng|c is not in it"):
            Checkpoint(c=1).restore(path)
        with raises_everywhere(comm, ValueError, r"rng of it would be left. Make the same nests first,.*optimizer"):
            Checkpoint(a=np.zeros(4), b=[np.zeros(3, int), 0]).restore(path)
        partly = Checkpoint(c=1, b=[np.zeros(3, int), 0])
        partly.restore(path, partial=True)
        assert (partly.c, partly.b[0].tolist(), partly.b[1]) == (1, [0, 1, 2], 1)


def test_wrong_use(comm, folder):
    with Strategy(comm=comm) as strategy, Strategy(comm=comm) as other:
        with pytest.raises(ValueError, match="needs the strategy whose ranks save together: create it in"):
            Checkpoint(a=np.zeros(3))
        with pytest.raises(ValueError, match="got the name 'write', which is one of its own"):
            Checkpoint(write=1)
        with strategy.scope():
            checkpoint = Checkpoint(a=np.zeros(3), v=Variable(1.0))
            text = Variable(np.array(["a"]), name="text")
        with other.scope():
            foreign = Variable(1.0)
        with pytest.raises(AttributeError, match=r"a Checkpoint has no save\(\): write\(path\) writes one .*Manager"):
            checkpoint.save("one")
        with pytest.raises(AttributeError, match=r"a Checkpoint has no read\(\): restore\(path\) reads one"):
            checkpoint.read("one")
        with pytest.raises(AttributeError, match=r"has no 'b'; it has a, v"):
            _ = checkpoint.b
        with pytest.raises(AttributeError, match=r"pass it to Checkpoint\(b=\.\.\.\)"):
            checkpoint.b = 1
        assert repr(checkpoint) == "<Checkpoint: a, v>"
        for bad, error, pattern in (
            (object(), TypeError, "a holds variables|a: a checkpoint holds variables, arrays"),
            (np.array(["a"]), TypeError, "array of dtype <U1"),
            (np.array([None]), TypeError, "array of dtype object"),
            (np.array([b"ab"], "V2"), TypeError, r"array of dtype \|?V2"),
            (text, TypeError, r"^a \(variable 'text'\) is an array of dtype <U1: .*; save texts in a list"),
        ):
            checkpoint.a = bad
            with raises_everywhere(comm, error, pattern):
                checkpoint.write(folder / "bad")
        checkpoint.a = [foreign]
        if comm.size > 1:
            with raises_everywhere(comm, ValueError, r"a\[0\] is a variable of <MultiWorker"):
                checkpoint.write(folder / "bad")
        checkpoint.a = 1
        with pytest.raises(RuntimeError, match="requires being in cross-replica context"):
            strategy.run(lambda: checkpoint.write(folder / "bad"))
        assert list(folder.iterdir()) == []


def test_checkpoint_strategy_is_that_of_the_scope(comm):
    """Also beside a variable of this rank alone."""
    alone = comm.Split(comm.rank, 0)
    with Strategy(comm=comm) as strategy, Strategy(comm=alone) as own:
        with own.scope():
            variable = Variable(1.0)
        assert Checkpoint(v=variable).strategy is own
        with strategy.scope():
            assert Checkpoint(v=variable).strategy is strategy
            assert Checkpoint(a=1).strategy is strategy


@pytest.mark.ranks(3)
def test_save_of_unlike_names_raises_everywhere(comm, folder):
    with Strategy(comm=comm) as strategy, strategy.scope():
        extra = {"more": 1} if comm.rank == comm.size - 1 else {}
        with raises_everywhere(comm, InvalidArgumentError, "save of a checkpoint .*names, more: ") as raised:
            Checkpoint(a=[1] * 1000, **extra).write(folder / "one")
        assert len(str(raised[0])) < 300, "only what differs is told"
        with raises_everywhere(comm, InvalidArgumentError, "save of a checkpoint .*path"):
            Checkpoint(a=1).write(folder / f"rank{comm.rank == 0}")
        path = Checkpoint(a=1).write(folder / "one")
        with raises_everywhere(comm, InvalidArgumentError, "restore of a checkpoint .*names"):
            Checkpoint(a=1, **extra).restore(path)
        with raises_everywhere(comm, InvalidArgumentError, "restore of a checkpoint .*partial"):
            Checkpoint(a=1).restore(path, partial=comm.rank == 0)


def test_write_replaces_only_checkpoints(comm, folder, monkeypatch):
    with Strategy(comm=comm) as strategy, strategy.scope():
        checkpoint = Checkpoint(a=1)
        if comm.rank == 0:
            (folder / "mine").mkdir()
            (folder / "mine" / "notes.txt").write_text("kept")
            (folder / "real").mkdir()
            (folder / "link").symlink_to("real")
        comm.Barrier()
        for place, pattern in (
            ("mine", "contains other files that would be replaced, such as 'notes.txt'"),
            ("mine/notes.txt", "is a file: a checkpoint is a folder"),
            ("mine/..", "contains other files that would be replaced, such as 'link'"),
            ("mine/notes.txt/x", "Not a directory|File exists"),
        ):
            with raises_everywhere(comm, OSError, pattern):
                checkpoint.write(folder / place)
        assert (folder / "mine" / "notes.txt").read_text() == "kept"
        for _ in range(2):
            checkpoint.write(folder / "link")
        assert sorted(one.name for one in folder.iterdir()) == ["link", "mine", "real"]
        monkeypatch.chdir(folder)
        comm.Barrier()
        assert checkpoint.write("relative") == "relative"
        checkpoint.restore("relative")
        assert (folder / "relative" / "manifest.json").is_file()
        comm.Barrier()


def test_numbers_change_their_kind_and_arrays_their_byte_order(comm, folder):
    with Strategy(comm=comm) as strategy, strategy.scope():
        swapped = np.arange(3, dtype=">f8")
        path = Checkpoint(best=np.float32(2.5), loss=np.float64(0.1), on=np.bool_(1), a=swapped).write(folder / "one")
        for best, loss, on in ((np.inf, 0.0, False), (np.float32(0), np.float64(0), np.bool_(0)), (0, None, 0)):
            swapped[...] = 0
            checkpoint = Checkpoint(best=best, loss=loss, on=on, a=swapped)
            checkpoint.restore(path)
            assert (checkpoint.best, checkpoint.loss, checkpoint.on) == (2.5, 0.1, True)
            assert swapped.tolist() == [0, 1, 2]
            if isinstance(best, np.generic):
                assert (type(checkpoint.best), type(checkpoint.on)) == (np.float32, np.bool_)


def test_names_are_one_each(comm, folder):
    with Strategy(comm=comm) as strategy, strategy.scope():
        for name in ("_items", "__metadata__"):
            with pytest.raises(ValueError, match="is one of its own, as are all that begin with '_'"):
                Checkpoint(**{name: np.zeros(3)})
        with raises_everywhere(comm, ValueError, r"two leaves of the checkpoint have the name a\['b'\]"):
            Checkpoint(**{"a['b']": 1, "a": {"b": 2}}).write(folder / "two")
        seen = Variable(0.0, synchronization="on_read", aggregation="sum")
        with raises_everywhere(comm, ValueError, "'a of replica 0' is a name for the copies of 'a': rename"):
            Checkpoint(**{"a of replica 0": 1.0, "a": seen}).write(folder / "two")
        checkpoint = Checkpoint(**{"self": 3, "a/b\n": "ü"})
        checkpoint.restore(checkpoint.write(folder / "odd"))
        assert checkpoint.items() == {"self": 3, "a/b\n": "ü"}


@pytest.mark.ranks(3)
def test_restore_to_unlike_values_raises_everywhere(comm, folder):
    last = comm.rank == comm.size - 1
    with Strategy(comm=comm) as strategy, strategy.scope():
        path = Checkpoint(n=5, a=np.zeros(4), own=np.full(3, float(comm.rank))).write(folder / "one")
        number, array = Checkpoint(n=np.ones(3) if last else 1), Checkpoint(a=np.ones(3 if last else 4))
        with raises_everywhere(comm, InvalidArgumentError, r"n: ranks? [-0-9]+: number or text; .*float64\[3\]"):
            number.restore(path, partial=True)
        with raises_everywhere(comm, InvalidArgumentError, r"a: ranks? [-0-9]+: float64\[4\]; .*float64\[3\]"):
            array.restore(path, partial=True)
        assert np.all(np.asarray(number.n) == 1)
        variable = Variable(np.zeros(3))
        with raises_everywhere(comm, ValueError, r"own differed between .* has equal copies here"):
            Checkpoint(own=variable).restore(path, partial=True)
        assert not variable.numpy().any()


TEXT = r"save of a checkpoint \(call \d+\): copies that should be equal differ .* so nothing was saved\n"
DRIFTED = (
    TEXT
    + r"  model\['w'\] \(variable 'kernel'\): ranks? [-0-9]+: checksum \w{8}; rank \d: checksum \w{8}\n  was an all"
)


def drifted(strategy, comm):
    """A checkpoint with a variable that the last rank alone has changed."""
    with strategy.scope():
        kernel, bias = Variable(np.zeros((2, 3)), name="kernel"), Variable(np.ones(3), name="bias")
    if comm.rank == comm.size - 1:
        strategy.run(lambda: kernel.assign_add(np.full((2, 3), 1e-9)))
    with strategy.scope():
        return Checkpoint(model={"w": kernel, "b": bias}, own=np.array([comm.rank]), step=3)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("background", [False, True])
def test_save_of_copy_that_differs_raises(comm, folder, background, strategy):
    checkpoint = drifted(strategy, comm)
    manager = CheckpointManager(checkpoint, folder / "runs", background=background)
    with raises_everywhere(comm, InvalidArgumentError, DRIFTED):
        manager.save()
    with raises_everywhere(comm, InvalidArgumentError, DRIFTED):
        checkpoint.write(folder / "one")
    assert list(folder.iterdir()) == []
    checkpoint.model["w"].assign(np.ones((2, 3)))
    manager.save()
    manager.wait()


@pytest.mark.ranks(3)
def test_save_on_difference_rank_0_saves_its_copies(comm, folder, caplog, strategy):
    checkpoint = drifted(strategy, comm)
    paths = [
        checkpoint.write(folder / "one", on_difference="rank 0"),
        CheckpointManager(checkpoint, folder, on_difference="rank 0").save(),
    ]
    told = [record.getMessage() for record in caplog.records if "those of rank 0 are saved" in record.getMessage()]
    assert len(told) == (2 if comm.rank == 0 else 0)
    assert all("model['w'] (variable 'kernel')" in text for text in told)
    for path in paths:
        checkpoint.model["w"].assign(np.ones((2, 3)))
        checkpoint.restore(path)
        assert not checkpoint.model["w"].numpy().any()
        assert checkpoint.own.tolist() == [comm.rank]


@pytest.mark.ranks(3)
def test_save_of_a_position_that_differs_raises(comm, folder, strategy):
    dataset = strategy.experimental_distribute_dataset(mpidist.Batches(np.arange(12), 4, seed=1))
    if comm.rank == 0:
        dataset.load_state_dict({"epoch": 2, "samples": 0})
    with raises_everywhere(comm, InvalidArgumentError, TEXT + "  data: rank 0: checksum"):
        Checkpoint(data=dataset).write(folder / "one")


@pytest.mark.ranks(3)
def test_save_compares_bits(comm, folder):
    """A NaN equals one of the same bits; what ranks may have for themselves is no difference."""
    with Strategy(comm=comm) as strategy, strategy.scope():
        weights = Variable(np.array([np.nan, 1.0]))
        metric = Variable(0, synchronization="ON_READ", aggregation="sum")
        strategy.run(lambda: metric.assign(comm.rank))
        rng = np.random.default_rng(comm.rank)
        Checkpoint(weights=weights, metric=metric, rng=rng, empty=Variable(np.zeros((0, 3)))).write(folder / "one")
        weights.assign(np.array([np.nan, -0.0 if comm.rank else 0.0]))
        with raises_everywhere(comm, InvalidArgumentError, TEXT + r"  weights \(variable 'variable'\): rank 0: "):
            Checkpoint(weights=weights).write(folder / "one")


@pytest.mark.ranks(3)
def test_save_with_another_on_difference_is_refused(comm, folder):
    with Strategy(comm=comm) as strategy, strategy.scope():
        checkpoint = Checkpoint(a=1)
        with raises_everywhere(comm, ValueError, "on_difference must be 'raise' or 'rank 0', got 'warn'"):
            checkpoint.write(folder / "one", on_difference="warn")
        with raises_everywhere(comm, InvalidArgumentError, "on_difference: rank 0: raise; "):
            checkpoint.write(folder / "one", on_difference="rank 0" if comm.rank else "raise")


@pytest.mark.ranks(3)
def test_save_of_equal_copies_sends_no_message_for_them(comm, folder):
    """The checksums are in the round that compares the call."""
    numbers = []
    with Strategy(comm=comm) as strategy, strategy.scope():
        for num_leaves in (1, 100):
            checkpoint = Checkpoint(a=[np.zeros(3) for _ in range(num_leaves)], v=Variable(1.0))
            before = parts_of(strategy).group.agreement.sequence
            checkpoint.write(folder / "one")
            numbers.append(parts_of(strategy).group.agreement.sequence - before)
    assert numbers == [4, 4]
