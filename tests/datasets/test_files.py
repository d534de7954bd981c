"""Batches of files: dealt out to ranks and replicas as the `AutoShardPolicy` says, each of them once an epoch."""

from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from support.everywhere import raises_everywhere

from mpidist import Batches, Files, InputOptions
from mpidist import MultiWorkerMirroredStrategy as MultiWorker
from mpidist.checkpoint import Checkpoint
from mpidist.errors import InvalidArgumentError
from mpidist.experimental import AutoShardPolicy, ParameterServerStrategy

pytestmark = [pytest.mark.core, pytest.mark.ranks(1, 3)]

NAMES = [f"part{number}" for number in range(9)]
ALL = [10 * number + at for number in range(9) for at in range(number)]


def read(name):
    """File 0 is empty, file 1 has one batch, and so on: a batch is one number, the file's number and its own."""
    number = NAMES.index(name)
    return (np.array([10 * number + at]) for at in range(number))


def options(policy, buffer_size=1):
    return InputOptions(auto_shard_policy=policy, experimental_per_replica_buffer_size=buffer_size)


def numbers(parts):
    return [int(row) for part in parts for row in part]


def of_all(comm, parts):
    """List the numbers that each rank gets. Collective; ranks must make as many steps."""
    steps = list(parts)
    assert len(set(comm.allgather(len(steps)))) == 1
    return comm.allgather(numbers(steps))


@pytest.mark.parametrize(("seed", "buffer_size"), [(None, 1), (7, 3)])
@pytest.mark.parametrize("policy", ["AUTO", "FILE", "DATA", "OFF"])
def test_files_are_read_once_an_epoch(comm, policy, seed, buffer_size, strategy):
    """With OFF on every rank. Numbers of batches differ, so some ranks get empty ones at the end."""
    files = Files(NAMES, read, seed=seed)
    dataset = strategy.experimental_distribute_dataset(files, options(policy, buffer_size))
    epochs = []
    for epoch in range(2):
        assert dataset.epoch == epoch
        epochs.append(of_all(comm, dataset))
        if policy == "OFF":
            assert [sorted(of_rank) for of_rank in epochs[-1]] == [ALL] * comm.size
            continue
        assert sorted(row for of_rank in epochs[-1] for row in of_rank) == ALL
        order = files.order(epoch)
        in_order = [number for name in order for number in numbers(read(str(name)))]
        for rank, of_rank in enumerate(epochs[-1]):
            of_files = [number for name in order[rank :: comm.size] for number in numbers(read(str(name)))]
            assert of_rank == (in_order[rank :: comm.size] if policy == "DATA" else of_files)
    assert (epochs[0] == epochs[1]) == (seed is None)


@pytest.mark.no_mpi
def test_files_follow_from_seed_and_epoch():
    files = Files(NAMES, read, seed=3)
    for epoch in (0, 5):
        order = [NAMES[at] for at in np.random.default_rng([3, epoch]).permutation(9)]
        assert list(files.order(epoch)) == order
        whole = numbers(files.iter_from(epoch, 0))
        assert whole == [number for name in order for number in numbers(read(name))]
        assert numbers(files.iter_from(epoch, 4)) == whole[4:]
        assert list(files.shard(4, 1).order(epoch)) == order[1::4]
        assert list(files.shard(2, 1).shard(2, 1).order(epoch)) == order[3::4]
    assert numbers(files) == numbers(files.iter_from(0, 0))
    assert list(Files(NAMES, read).order(9)) == NAMES
    path = Path("part1")
    assert Files([path], lambda name: [name]).order(0) == (path,)


@pytest.mark.no_mpi
def test_files_refuse_wrong_arguments():
    wrong = [
        (lambda: Files(None, read), TypeError, "names is a list of files, got None"),
        (lambda: Files("part0", read), TypeError, r"names is a list of files, .* write \['part0'\]"),
        (lambda: Files([1], read), TypeError, "a name is a text or a path, got 1"),
        (lambda: Files(NAMES, "read"), TypeError, "read is a function that takes a name, got 'read'"),
        (lambda: Files(NAMES, read, seed=-1), ValueError, "seed must be a whole number >= 0, got -1"),
        (lambda: Files(NAMES, read, seed=0.5), TypeError, "seed must be a whole number"),
        (lambda: Files(NAMES, read).shard(0, 0), ValueError, "num_shards must be a whole number >= 1, got 0"),
        (lambda: Files(NAMES, read).shard(2, 2), ValueError, "index must be less than num_shards, 2, got 2"),
        (lambda: InputOptions(auto_shard_policy="HINT"), ValueError, "HINT is for a graph of tf.data"),
        (lambda: InputOptions(auto_shard_policy=AutoShardPolicy.HINT), ValueError, "take FILE or DATA"),
        (lambda: InputOptions(auto_shard_policy="files"), ValueError, "'files' is not a valid AutoShardPolicy"),
    ]
    for make, kind, text in wrong:
        with pytest.raises(kind, match=text):
            make()
    assert InputOptions().auto_shard_policy is AutoShardPolicy.AUTO
    assert InputOptions(auto_shard_policy="data").auto_shard_policy is AutoShardPolicy.DATA


@pytest.mark.ranks(3)
def test_too_few_files_are_everybodys_error_or_dealt_out_by_batches(comm, caplog, strategy):
    few = Files(NAMES[4 : 3 + comm.size], read)  # one file less than ranks
    with raises_everywhere(comm, ValueError, "no files: look for a wrong folder or pattern"):
        strategy.experimental_distribute_dataset(Files([], read))
    with raises_everywhere(comm, ValueError, f"{comm.size} replicas whole files, and there are {comm.size - 1}; "):
        strategy.experimental_distribute_dataset(few, options("FILE"))
    with caplog.at_level("INFO", "mpidist.datasets"):
        dataset = strategy.experimental_distribute_dataset(few, options("AUTO"))
    assert ("takes DATA" in caplog.text) == (comm.rank == 0)
    assert sorted(row for of_rank in of_all(comm, dataset) for row in of_rank) == sorted(numbers(few))


def test_policies_of_files_are_not_for_global_batches(strategy):
    for policy in ("FILE", "OFF"):
        with pytest.raises(ValueError, match=rf"auto_shard_policy={policy} of global batches: .* mpidist\.Files"):
            strategy.experimental_distribute_dataset([np.arange(8)], options(policy))
    (part,) = strategy.experimental_distribute_dataset([np.arange(8)], options("DATA"))
    assert strategy.gather(part, axis=0).tolist() == list(range(8))


@pytest.mark.ranks(3)
def test_files_unlike_on_ranks_raise_everywhere(comm, strategy):
    """As where one has not sorted what `glob` has found; else batches would be lost, and others read twice."""
    names = NAMES[::-1] if comm.rank == 1 else NAMES
    with raises_everywhere(comm, InvalidArgumentError, "part0 to part8; rank 1: 9: part8 to part0.*sort the names"):
        strategy.experimental_distribute_dataset(Files(names, read))
    names = [NAMES[0], *NAMES[1:8][:: -1 if comm.rank == 1 else 1], NAMES[8]]
    with raises_everywhere(comm, InvalidArgumentError, "checksum of their names"):
        strategy.experimental_distribute_dataset(Files(names, read))
    with raises_everywhere(comm, InvalidArgumentError, "seed"):
        strategy.experimental_distribute_dataset(Files(NAMES, read, seed=comm.rank))
    with raises_everywhere(comm, InvalidArgumentError, "policy"):
        strategy.experimental_distribute_dataset(Files(NAMES, read), options("DATA" if comm.rank else "OFF"))
    with raises_everywhere(comm, InvalidArgumentError):
        strategy.experimental_distribute_dataset(Files(NAMES if comm.rank else [], read))
    for option, value in (("seed", comm.rank), ("batch_size", 1 + comm.rank), ("data", np.arange(6 + comm.rank))):
        make = partial(Batches, **{"data": np.arange(6), "batch_size": 1, option: value})
        name = "num_samples" if option == "data" else option
        with raises_everywhere(comm, InvalidArgumentError, f"{name}: rank 0: .; rank 1: .; rank 2: "):
            strategy.distribute_datasets_from_function(lambda context, make=make: make(), options("DATA"))
    assert strategy.reduce("sum", 1) == comm.size


@pytest.mark.parametrize(("policy", "buffer_size"), [("FILE", 3), ("DATA", 1)])
def test_file_that_cannot_be_read_is_everybodys_error(comm, policy, buffer_size, strategy):
    def failing(name):
        if comm.rank == comm.size - 1 and name != NAMES[0]:
            raise FileNotFoundError(name)
        yield np.array([0])

    dataset = strategy.experimental_distribute_dataset(Files(NAMES, failing), options(policy, buffer_size))
    with raises_everywhere(comm, FileNotFoundError, "part"):
        list(dataset)
    assert strategy.reduce("sum", 1) == comm.size


def test_function_that_returns_no_batches_is_named(comm, strategy):
    for wrong in (np.ones(3), {"x": np.ones(3)}, None, "text"):
        dataset = strategy.experimental_distribute_dataset(Files(NAMES, lambda name, wrong=wrong: wrong))
        with raises_everywhere(comm, TypeError, r"what read\('part\d'\) returned: .* is an iterable of batches"):
            next(iter(dataset))


def first(num_steps, parts):
    return [part for _, part in zip(range(num_steps), parts, strict=False)]


@pytest.mark.parametrize("num_steps", [0, 2, 99])
def test_position_in_batches_fits_any_number_of_ranks(comm, tmp_path, num_steps):
    folder = Path(comm.bcast(str(tmp_path)))
    with MultiWorker(comm=comm) as strategy:
        dataset = strategy.experimental_distribute_dataset(Files(NAMES, read, seed=5), options("DATA", 2))
        list(dataset)
        rows = [row for of_rank in comm.allgather(numbers(first(num_steps, dataset))) for row in of_rank]
        path = Checkpoint(data=dataset).write(folder / "position")
        state = dataset.state_dict()
    is_over = num_steps == 99
    assert state["batches"] == (0 if is_over else num_steps * comm.size)
    assert (state["epoch"], state["seed"], state["num_files"]) == (1 + is_over, 5, len(NAMES))
    few = comm.Split(comm.rank < 2, comm.rank)
    with MultiWorker(comm=few) as strategy:
        dataset = strategy.experimental_distribute_dataset(Files(NAMES, read, seed=5), options("DATA"))
        Checkpoint(data=dataset).restore(path)
        left = [row for of_rank in of_all(few, dataset) for row in of_rank]
        assert sorted(left if is_over else rows + left) == ALL
        assert dataset.epoch == 2 + is_over
    few.Free()
    comm.Barrier()  # the folder is rank 0's


def test_position_is_the_same_on_ranks_that_have_no_batch_left(comm, strategy):
    dataset = strategy.experimental_distribute_dataset(Files(NAMES[:5], read), options("DATA"))
    num_steps = -(-10 // comm.size)
    assert len(first(num_steps, dataset)) == num_steps
    assert comm.allgather(dataset.state_dict()["batches"]) == [num_steps * comm.size] * comm.size
    assert len(list(dataset)) == num_steps  # a pass that was left early; the next one is whole
    dataset.load_state_dict({"epoch": 0, "batches": num_steps * comm.size, "num_files": 5})
    assert list(dataset) == []


def test_position_in_whole_files_needs_as_many_ranks(comm, strategy):
    make = lambda **given: strategy.experimental_distribute_dataset(Files(NAMES, read, **given), options("FILE"))  # noqa: E731
    dataset = make(seed=5)
    rows = numbers(first(2, dataset))
    state = dataset.state_dict()
    assert state == {
        "epoch": 0,
        "steps": 2,
        "pipelines": comm.size,
        "replicas": comm.size,
        "seed": 5,
        "num_files": len(NAMES),
    }
    dataset = make(seed=5)
    dataset.load_state_dict(state)
    rows += numbers(dataset)
    assert sorted(row for of_rank in comm.allgather(rows) for row in of_rank) == ALL
    with pytest.raises(ValueError, match=r"2 steps into epoch 0 .* seed 5, and .* seed 6"):
        make(seed=6).load_state_dict(state)
    with pytest.raises(ValueError, match=f"pipelines {comm.size + 1}, .* has pipelines {comm.size}"):
        dataset.load_state_dict(state | {"pipelines": comm.size + 1})
    in_turn = strategy.experimental_distribute_dataset(Files(NAMES, read, seed=5), options("DATA"))
    with pytest.raises(ValueError, match="a position in this data set has the fields epoch and batches"):
        in_turn.load_state_dict(state)
    in_turn.load_state_dict(state | {"epoch": 4, "steps": 0})  # between epochs AUTO may choose otherwise
    assert in_turn.state_dict() == {"epoch": 4, "batches": 0, "seed": 5, "num_files": len(NAMES)}


@pytest.mark.parametrize("policy", ["FILE", "DATA"])
def test_functions_make_the_same_batches_on_all_ranks(comm, policy, strategy):
    contexts = []

    def make(context):
        contexts.append((context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync))
        return Files(NAMES, read) if policy == "FILE" else [np.array([number]) for number in ALL]

    dataset = strategy.distribute_datasets_from_function(make, options(policy))
    assert contexts == [(1, 0, comm.size)]
    if policy == "DATA":
        assert len(dataset) == len(range(comm.rank, len(ALL), comm.size))
    found = of_all(comm, dataset)
    assert sorted(row for of_rank in found for row in of_rank) == ALL
    with raises_everywhere(comm, ValueError, "FILE deals out files, and this data set, a list, does not list its"):
        strategy.distribute_datasets_from_function(lambda _: [np.ones(1)], options("FILE"))
    own = strategy.distribute_datasets_from_function(
        lambda context: Files(NAMES, read).shard(context.num_input_pipelines, context.input_pipeline_id)
    )
    whole = strategy.experimental_distribute_dataset(Files(NAMES, read), options("FILE"))
    assert of_all(comm, own) == of_all(comm, whole)


@pytest.mark.parametrize("policy", ["FILE", "DATA", "AUTO", "OFF"])
def test_files_of_a_replica_are_the_same_on_any_number_of_ranks(comm, policy):
    def steps_over(comm):
        with MultiWorker(comm=comm, replicas=5) as strategy:
            dataset = strategy.experimental_distribute_dataset(Files(NAMES, read, seed=2), options(policy, 2))
            own = [[value.tolist() for value in part.values] for part in dataset]
        return [list(chain(*parts)) for parts in zip(*comm.allgather(own), strict=True)]

    alone = comm.Split(comm.rank, 0)
    found = steps_over(alone)
    assert steps_over(comm) == found
    alone.Free()
    assert {len(step) for step in found} == {5}
    copies = 5 if policy == "OFF" else 1
    assert sorted(row for step in found for part in step for row in part) == sorted(ALL * copies)


@pytest.mark.no_mpi
def test_workers_of_parameter_servers_have_their_own_files():
    """One rank alone is one worker: it gets all files."""
    with ParameterServerStrategy() as strategy:
        assert numbers(strategy.experimental_distribute_dataset(Files(NAMES, read))) == ALL
