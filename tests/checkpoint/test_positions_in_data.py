"""Checkpoints of positions in data: programs go on with other ranks and batches; every sample is seen once an epoch."""

from types import SimpleNamespace

import numpy as np
import pytest
from support.everywhere import raises_everywhere

import mpidist
from mpidist import Batches, InputOptions
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.checkpoint import Checkpoint
from mpidist.errors import InvalidArgumentError
from mpidist.experimental import ParameterServerStrategy

pytestmark = [pytest.mark.core, pytest.mark.ranks(1, 3)]

NUM_SAMPLES = 23
BUFFERS = [InputOptions(), InputOptions(experimental_per_replica_buffer_size=4)]


def shuffled(batch_size):
    return Batches(np.arange(NUM_SAMPLES), batch_size, seed=3)


def listed(batch_size):
    return [np.arange(start, min(start + batch_size, NUM_SAMPLES)) for start in range(0, NUM_SAMPLES, batch_size)]


def rows_of(strategy, parts):
    return [int(row) for part in parts for row in strategy.gather(part, axis=0)]


def first(steps, parts):
    return (part for _, part in zip(range(steps), parts, strict=False))


@pytest.mark.parametrize("options", BUFFERS, ids=["unbuffered", "read ahead"])
@pytest.mark.parametrize("made", [shuffled, listed])
@pytest.mark.parametrize("num_steps", [0, 3, 5])
def test_position_restored_yields_the_rest_of_the_epoch(comm, folder, made, num_steps, options):
    """5 steps of 5 samples are all: then the epoch has nothing left, and the next one begins."""
    with Strategy(comm=comm) as strategy:
        dataset = strategy.experimental_distribute_dataset(made(5), options)
        before = [rows_of(strategy, dataset)]
        assert dataset.epoch == 1
        rows = rows_of(strategy, first(num_steps, dataset))
        path = Checkpoint(data=dataset).write(folder / "position")
        after = rows_of(strategy, dataset)
        assert dataset.epoch == (3 if num_steps else 2)
    few = comm.Split(comm.rank < 2, comm.rank)
    with Strategy(comm=few) as strategy:
        for batch_size in (5, 8):  # whose batches end elsewhere
            dataset = strategy.experimental_distribute_dataset(made(batch_size), options)
            Checkpoint(data=dataset).restore(path)
            assert dataset.epoch == 1
            left = rows_of(strategy, dataset)
            assert sorted(rows + left) == list(range(NUM_SAMPLES))
            assert dataset.epoch == 2
            again = rows_of(strategy, dataset)
            assert sorted(again) == list(range(NUM_SAMPLES))
            if num_steps:
                assert again == after  # the same order for the same epoch
            assert (rows + left != before[0]) == (made is shuffled)
    comm.Barrier()


def test_iterator_goes_on_in_place(folder, strategy):
    dataset = strategy.experimental_distribute_dataset(shuffled(4))
    steps = iter(dataset)
    rows_of(strategy, first(2, steps))
    checkpoint = Checkpoint(steps=steps)
    path = checkpoint.write(folder / "position")
    left = rows_of(strategy, steps)
    for _ in range(2):  # a pass that is over, and one that has not begun
        checkpoint.restore(path)
        assert steps.state_dict() == {"epoch": 0, "samples": 8, "seed": 3, "num_samples": NUM_SAMPLES}
        assert rows_of(strategy, steps) == left
        assert steps.state_dict()["epoch"] == 1
        checkpoint = Checkpoint(steps=iter(dataset))
        steps = checkpoint.steps


@pytest.mark.parametrize("inner", ["a whole pass", "a pass left by break", "one batch"])
@pytest.mark.parametrize("saves", ["after the inner pass", "after the next step"])
def test_position_after_pass_inside_a_pass_is_that_of_the_outer_one(comm, inner, saves, caplog, strategy):
    dataset = strategy.experimental_distribute_dataset(shuffled(4))
    seen, state = [], {}
    for step, part in enumerate(dataset):
        seen += strategy.gather(part, axis=0).tolist()
        if step == 1:
            for _ in dataset if inner != "one batch" else [next(iter(dataset))]:
                if inner == "a pass left by break":
                    break
        if step == (1 if saves == "after the inner pass" else 2):
            state = dataset.state_dict()
            break
    assert (state["epoch"], state["samples"]) == (0, len(seen))
    assert ("the position in data set 0 is" in caplog.text) == (saves == "after the inner pass" and comm.rank == 0)
    resumed = strategy.experimental_distribute_dataset(shuffled(4))
    resumed.load_state_dict(state)
    assert sorted(seen + rows_of(strategy, resumed)) == list(range(NUM_SAMPLES))


def test_pass_that_nothing_goes_on_with_keeps_no_later_pass_from_counting(strategy):
    """A batch was looked at, and the program still has the iterator: only the first pass after it counts as inside."""
    dataset = strategy.experimental_distribute_dataset(shuffled(4))
    looked_at = iter(dataset)
    next(looked_at)
    epochs = []
    for _ in range(3):
        for _ in dataset:
            epochs.append(dataset.epoch)
    assert epochs == [number for number in (1, 2, 3) for _ in range(len(dataset))]
    assert dataset.epoch == 4
    del looked_at
    assert dataset.epoch == 4


def test_position_restored_during_a_pass_warns_once(comm, caplog, strategy):
    """A batch was looked at before the restore, as to make a model: a new pass has the position, and this one not."""
    for goes_on in (False, True):
        dataset = strategy.experimental_distribute_dataset(shuffled(4))
        looked_at = iter(dataset)
        next(looked_at)
        dataset.load_state_dict({**dataset.state_dict(), "samples": 8})
        for iterator in (looked_at, looked_at) if goes_on else (iter(dataset),):
            next(iterator)
        assert dataset.state_dict()["samples"] == 12
        assert caplog.text.count("a position was restored, and") == (goes_on and comm.rank == 0)


def test_position_counts_only_samples_of_finished_steps(comm, strategy):
    """Neither what a thread has read ahead, nor a pass that did not begin, nor a step that failed."""

    class Failing:
        def __iter__(self):
            yield from listed(4)[:3]
            if comm.rank == comm.size - 1:
                raise OSError("disk")

    dataset = strategy.experimental_distribute_dataset(Failing(), BUFFERS[1])
    assert dataset.state_dict() == {"epoch": 0, "samples": 0}
    iter(dataset)
    steps = iter(dataset)
    assert dataset.epoch == 0
    next(steps)
    assert dataset.state_dict() == {"epoch": 0, "samples": 4}
    with raises_everywhere(comm, OSError, "disk"):
        list(steps)
    assert dataset.state_dict() == {"epoch": 0, "samples": 12}
    dataset.load_state_dict({"epoch": 0, "samples": 99})
    with raises_everywhere(comm, (InvalidArgumentError, OSError), "disk|99 samples"):
        next(iter(dataset))
    dataset = strategy.experimental_distribute_dataset(listed(4))
    dataset.load_state_dict({"epoch": 0, "samples": 99})
    with raises_everywhere(comm, InvalidArgumentError, f"99 samples into a pass, and .* has {NUM_SAMPLES}"):
        next(iter(dataset))


@pytest.mark.ranks(3)
def test_pass_that_only_one_rank_has_begun_is_none(comm, strategy):
    """Else the ranks would shuffle in other orders for ever."""
    dataset = strategy.experimental_distribute_dataset(shuffled(4))
    with raises_everywhere(comm, InvalidArgumentError):
        next(iter(dataset)) if comm.rank else strategy.reduce("sum", 1)
    assert dataset.epoch == 0
    assert len(rows_of(strategy, dataset)) == NUM_SAMPLES


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("mode", "has_batches"), [("PER_WORKER", True), ("PER_REPLICA", False)])
def test_batches_of_functions_need_their_pipelines(comm, folder, mode, has_batches):
    options = InputOptions(experimental_replication_mode=mode)

    def pipeline(context):
        rows = np.arange(NUM_SAMPLES)[context.input_pipeline_id :: context.num_input_pipelines]
        return Batches(rows, 3, seed=1) if has_batches else [rows[at : at + 3] for at in range(0, len(rows), 3)]

    with Strategy(comm=comm) as strategy:
        dataset = strategy.distribute_datasets_from_function(pipeline, options)
        rows = rows_of(strategy, first(2, dataset))
        checkpoint = Checkpoint(data=dataset)
        path = checkpoint.write(folder / "middle")
        assert sorted(rows + rows_of(strategy, dataset)) != list(range(NUM_SAMPLES))  # a new pass
        checkpoint.write(folder / "end")
        dataset = strategy.distribute_datasets_from_function(pipeline, options)
        Checkpoint(data=dataset).restore(path)
        assert sorted(rows + rows_of(strategy, dataset)) == list(range(NUM_SAMPLES))
    alone = comm.Split(comm.rank, 0)
    with Strategy(comm=alone) as strategy:
        dataset = strategy.distribute_datasets_from_function(pipeline, options)
        checkpoint = Checkpoint(data=dataset)
        with pytest.raises(ValueError, match=rf"2 steps into epoch 0 .* pipelines {comm.size}, and .* pipelines 1"):
            checkpoint.restore(path)
        assert dataset.state_dict()["steps"] == 0
        checkpoint.restore(folder / "end")  # between epochs any number of ranks goes on
        assert dataset.epoch == 2
        assert sorted(rows_of(strategy, dataset)) == list(range(NUM_SAMPLES))
    comm.Barrier()


def test_positions_in_batches_of_replicas_fit_any_ranks(comm, folder):
    options = InputOptions(experimental_replication_mode="PER_REPLICA")

    def rows_after(strategy, state, steps):
        dataset = strategy.distribute_datasets_from_function(
            lambda context: Batches(np.arange(10) + 10 * context.input_pipeline_id, 2, seed=1), options
        )
        dataset.load_state_dict(state)
        found = [strategy.gather(part, axis=0).tolist() for part in first(steps, dataset)]
        return found, dataset.state_dict()

    with Strategy(comm=comm, replicas=4) as strategy:
        begun, state = rows_after(strategy, {"epoch": 3, "steps": 0}, 2)
        assert state == {"epoch": 3, "steps": 2, "pipelines": 4, "replicas": 4}
    alone = comm.Split(comm.rank, 0)
    with Strategy(comm=alone, replicas=4) as strategy:
        left, _ = rows_after(strategy, state, 9)
        assert sorted(row for step in begun + left for row in step) == list(range(40))
    comm.Barrier()


def test_position_of_other_data_is_refused_and_nothing_is_changed(comm, folder):
    with Strategy(comm=comm) as strategy, strategy.scope():
        dataset = strategy.experimental_distribute_dataset(shuffled(4))
        next(iter(dataset))
        path = Checkpoint(data=dataset, step=7).write(folder / "position")
        for source, text in [
            (Batches(np.arange(NUM_SAMPLES), 4, seed=4), "4 samples into epoch 0 .* seed 3, .* seed 4"),
            (Batches(np.arange(NUM_SAMPLES), 4), "4 samples .* seed 3, .* seed None"),
            (Batches(np.arange(9), 4, seed=3), f"4 samples .* num_samples {NUM_SAMPLES}, .* num_samples 9"),
        ]:
            other = strategy.experimental_distribute_dataset(source)
            checkpoint = Checkpoint(data=other, step=0)
            with raises_everywhere(comm, ValueError, f"data: the position is {text}"):
                checkpoint.restore(path)
            assert checkpoint.step == 0
            assert other.state_dict()["samples"] == 0
        by_data = InputOptions(auto_shard_policy="data")
        whole, larger = (
            strategy.distribute_datasets_from_function(lambda _, its=its: its, by_data)
            for its in (Batches(np.arange(NUM_SAMPLES), 4), Batches(np.arange(NUM_SAMPLES), 5))
        )
        next(iter(whole))
        of_whole = Checkpoint(data=whole).write(folder / "of whole batches")
        with raises_everywhere(comm, ValueError, "data: the position is .* batch_size 4, .* batch_size 5"):
            Checkpoint(data=larger).restore(of_whole)
        own = strategy.distribute_datasets_from_function(lambda _: listed(4))
        with raises_everywhere(comm, ValueError, "data: a position in this data set has the fields epoch and steps"):
            Checkpoint(data=own, step=0).restore(path)
        with raises_everywhere(comm, ValueError, r"data is number or text, and data in .* is position in data"):
            Checkpoint(data=5, step=0).restore(path)
        with raises_everywhere(comm, ValueError, r"step is position in data, and step in .* is number or text"):
            Checkpoint(step=dataset).restore(path, partial=True)
        for state in ({"epoch": -1, "samples": 0}, {"epoch": 0, "samples": 1.5}, {"epoch": True, "samples": 0}, {}):
            with pytest.raises(ValueError, match="the fields epoch and samples, as whole numbers"):
                dataset.load_state_dict(state)
        with pytest.raises(TypeError, match="the fields epoch and samples, as whole numbers, and this is 5"):
            dataset.load_state_dict(5)


def test_dataset_gives_its_strategy_to_the_checkpoint(comm, folder):
    with Strategy(comm=comm) as strategy, Strategy(comm=comm) as other:
        dataset = strategy.experimental_distribute_dataset(listed(4))
        assert Checkpoint(data=dataset).strategy is strategy
        assert Checkpoint(data=iter(dataset)).strategy is strategy
        with other.scope(), raises_everywhere(comm, ValueError, "data is a data set of <Multi.*, and the checkpoint"):
            checkpoint = Checkpoint(weights=mpidist.Variable(1.0), data=dataset)
            checkpoint.write(folder / "none")


@pytest.mark.no_mpi
def test_data_of_workers_that_do_not_step_together_is_refused(tmp_path):
    with ParameterServerStrategy() as strategy:
        dataset = strategy.experimental_distribute_dataset(listed(4))
        with pytest.raises(ValueError, match="workers have no common position"):
            Checkpoint(data=dataset).write(tmp_path / "none")


@pytest.mark.no_mpi
def test_batches_of_wrong_arguments_are_refused():
    for data, arguments, kind, text in (
        ((np.zeros(3), np.zeros(4)), {}, InvalidArgumentError, r"equally long on axis 0, got lengths \[3, 4\]"),
        ((np.zeros(3), 4), {}, InvalidArgumentError, "must be an array with rows, got int"),
        (SimpleNamespace(shape=[3], iloc=0), {}, InvalidArgumentError, "a SimpleNamespace takes row .*to_numpy"),
        ([], {}, InvalidArgumentError, r"needed an array or a nest of arrays, got \[\]"),
        (np.zeros(3), {"drop_remainder": "no"}, TypeError, "drop_remainder must be True or False, got 'no'"),
        (np.zeros(3), {"batch_size": 2.5}, TypeError, r"batch_size must be a whole number >= 1, got 2\.5"),
        (np.zeros(3), {"batch_size": 0}, ValueError, "batch_size must be a whole number >= 1"),
        (np.zeros(3), {"seed": -1}, ValueError, "seed must be a whole number >= 0"),
    ):
        with pytest.raises(kind, match=text):
            Batches(data, **({"batch_size": 2} | arguments))


@pytest.mark.no_mpi
def test_batches_of_an_epoch_follow_from_its_number():
    class Increasing:
        """Rows of a file, as h5py gives them: it takes increasing row numbers alone."""

        shape = (NUM_SAMPLES, 2)

        def __getitem__(self, rows):
            rows = np.arange(NUM_SAMPLES)[rows]
            assert (np.diff(rows) > 0).all()
            return np.stack([rows, rows], axis=1)

    for drop_remainder in (False, True):
        for seed in (None, 5):
            data = {"x": np.arange(NUM_SAMPLES), "file": Increasing()}
            batches = Batches(data, 4, seed=seed, drop_remainder=drop_remainder)
            whole = list(batches.iter_from(2, 0))
            rows = np.concatenate([batch["x"] for batch in whole])
            assert (np.concatenate([batch["file"] for batch in whole])[:, 0] == rows).all()
            assert (len(batches), len(rows)) == ((5, 20) if drop_remainder else (6, 23))
            wanted = np.arange(NUM_SAMPLES)
            if seed is not None:
                wanted = np.random.default_rng([5, 2]).permutation(NUM_SAMPLES)
            assert (rows == wanted[: len(rows)]).all()
            assert [batch["x"].tolist() for batch in batches.iter_from(2, 8)] == [b["x"].tolist() for b in whole[2:]]
            assert next(iter(batches))["x"].tolist() == next(batches.iter_from(0, 0))["x"].tolist()


@pytest.mark.no_mpi
def test_batches_of_a_file_of_arrays(tmp_path):
    """Which cannot be copied, as its batches could else be."""
    np.savez(tmp_path / "rows.npz", x=np.arange(6), y=np.ones((6, 2)))
    with np.load(tmp_path / "rows.npz") as rows:
        assert [(batch["x"].tolist(), batch["y"].shape) for batch in Batches(rows, 4)] == [
            ([0, 1, 2, 3], (4, 2)),
            ([4, 5], (2, 2)),
        ]
