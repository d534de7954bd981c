"""Which ranks write what is equal on all of them, and which keep copies of it in the memory of nodes."""

import logging
import shutil
from contextlib import suppress
from pathlib import Path
from random import Random
from threading import enumerate as enumerate_threads

import numpy as np
import pytest
from mpi4py import MPI
from safetensors.numpy import load_file
from support.everywhere import raises_everywhere

from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist import Variable
from mpidist.checkpoint import Checkpoint, CheckpointManager, node_copies
from mpidist.checkpoint.parts import deal
from mpidist.context_stack import parts_of

pytestmark = pytest.mark.core

LARGE = 400_003  # of 8 bytes


def made(strategy, value):
    with strategy.scope():
        leaves = [np.arange(size, dtype=np.int64) * value for size in (3, 0, LARGE, 70_000, 1)]
        return Checkpoint(leaves=leaves, kernel=Variable(np.full((301, 503), float(value))), step=value)


def sizes_in(path):
    """The bytes of the arrays that each rank has written."""
    files = {int(file.stem.partition("-")[2]): load_file(file) for file in path.glob("*.safetensors")}
    return {rank: sum(array.nbytes for array in arrays.values()) for rank, arrays in sorted(files.items())}


def restore_once_a_node(comm, checkpoint, nbytes, path, partial):
    """Each rank reads a share, and JSON files, of each of which the first bytes come twice."""
    before = bytes_read()
    checkpoint.restore(path, partial=partial)
    read = comm.allgather(bytes_read() - before)
    topology = parts_of(checkpoint.strategy).topology
    for of_node in topology.nodes if topology.size > 1 else [[comm.rank]]:
        assert 0 <= sum(read[rank] for rank in of_node) - nbytes < 100_000 * len(of_node), (read, nbytes)
        assert nbytes < 1 << 21 or max(read[rank] for rank in of_node) < nbytes * (0.7 if len(of_node) > 1 else 1.1)


def bytes_read():
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("background", [False, True])
def test_writers_all_ranks_write_as_much_and_any_number_restores(comm, placement, folder, background, strategy):
    manager = CheckpointManager(made(strategy, 5), folder, background=background)
    path = Path(manager.save())
    manager.wait()
    comm.Barrier()
    sizes = sizes_in(path)
    total = 8 * (3 + LARGE + 70_000 + 1 + 301 * 503)
    assert (list(sizes), sum(sizes.values())) == (list(range(comm.size)), total)
    assert max(sizes.values()) - min(sizes.values()) < 200_000
    record = manager.last_save
    assert record is not None
    assert (record.nbytes, record.extra_bytes) == (sizes[comm.rank], sizes[comm.rank] * background)
    for ranks in (comm, MPI.COMM_SELF):
        with Strategy(comm=ranks) as other:
            restored, saved = made(other, 0), made(other, 5)
            restore_once_a_node(comm, restored, total, path, partial=False)
            restore_once_a_node(comm, Checkpoint(kernel=restored.kernel), 8 * 301 * 503, path, partial=True)
            assert all((one == two).all() for one, two in zip(restored.leaves, saved.leaves, strict=True))
            assert (restored.kernel.numpy() == 5).all()
            assert restored.step == 5


def test_restore_of_files_only_on_rank_0_broadcasts_equal_values(comm, placement, folder, monkeypatch, strategy):
    made(strategy, 5).write(folder / "0" / "one", writers=1)
    (folder / f"{comm.rank}").mkdir(exist_ok=True)
    monkeypatch.chdir(folder / f"{comm.rank}")
    restored = made(strategy, 0)
    restored.restore("one")
    assert (restored.kernel.numpy() == 5).all()
    assert (restored.leaves[2] == np.arange(LARGE) * 5).all()


def test_writers_as_many_as_given_write(comm, placement, folder, strategy):
    topology = parts_of(strategy).topology
    checkpoint = made(strategy, 5)
    for writers in ("per node", 2, 100):
        ranks = list(sizes_in(Path(checkpoint.write(folder / f"{writers}", writers=writers))))
        leaders = [of_node[0] for of_node in topology.nodes]
        assert ranks == leaders if writers == "per node" else len(ranks) == min(writers, comm.size)
        assert len({topology.node_of_rank[rank] for rank in ranks}) == min(len(ranks), topology.num_nodes)
    comm.Barrier()
    with raises_everywhere(comm, ValueError, "writers must be 'all', 'per node' or a number of ranks, got 'each'"):
        checkpoint.write(folder / "one", writers="each")


@pytest.mark.no_mpi
def test_deal_covers_every_array_and_no_rank_has_much_more_than_its_share():
    for seed in range(200):
        random = Random(seed)
        sizes = {str(at): (random.randint(0, 1) * int(2 ** random.uniform(0, 24)), 8) for at in range(9)}
        ranks = list(range(random.randint(1, 9)))
        loads = dict.fromkeys(ranks, 0)
        for name, pieces in deal(sizes, ranks).items():
            bounds = [bound for _, begin, end in pieces for bound in (begin, end)]
            assert (bounds[0], bounds[-1], bounds[1:-1:2]) == (0, sizes[name][0], bounds[2:-1:2])
            for rank, begin, end in pieces:
                loads[rank] += 8 * (end - begin)
        total = sum(loads.values())
        assert max(loads.values()) <= total / max(1, min(len(ranks), total >> 20)) + (1 << 18), seed


SIZE = 300_000  # of 8 bytes: each rank writes a share


@pytest.fixture(params=[1, 2])
def memory(request, folder, comm, monkeypatch):
    """The memory of nodes of one or two ranks, in which each has a folder, in a job that may be started again."""
    monkeypatch.setattr(node_copies, "SHARED_MEMORY", str(folder / "memory"))
    monkeypatch.setenv("MPIDIST_SAVED_FILE", str(folder / "saved-file"))
    labels = (str(rank // request.param) for rank in range(MPI.COMM_WORLD.size))
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", ",".join(labels))
    (folder / "memory").mkdir(exist_ok=True)
    comm.Barrier()
    return folder / "memory"


def made_with_a_metric(strategy, value):
    with strategy.scope():
        metric = Variable(value, synchronization="on_read", aggregation="sum", name="metric")
        return Checkpoint(kernel=Variable(np.full(SIZE, value)), step=int(value), metric=metric)


def save_and_fail(comm, folder, background=False):
    """Save twice, and end with an exception; return the folders of all nodes."""
    with suppress(ZeroDivisionError), Strategy(comm=comm) as strategy:
        checkpoint = made_with_a_metric(strategy, 1.0)
        manager = CheckpointManager(checkpoint, folder / "saved", background=background, neighbour=True)
        for _ in range(2):
            checkpoint.step += 1
            manager.save()
        manager.wait()
        raise ZeroDivisionError
    comm.Barrier()
    return sorted((folder / "memory").glob("*/*.new"))


def damage(comm, files):
    comm.Barrier()
    if comm.rank == 0:
        for file in files:
            file.write_bytes(b"x" * file.stat().st_size)
    comm.Barrier()


def restored(comm, folder):
    with Strategy(comm=comm) as strategy:
        checkpoint = made_with_a_metric(strategy, 0.0)
        manager = CheckpointManager(checkpoint, folder / "saved", neighbour=True)
        assert manager.restore_or_initialize() == str(manager.latest_checkpoint)
        return checkpoint.step, checkpoint.kernel.numpy().sum() / SIZE, strategy.reduce("sum", checkpoint.metric)


@pytest.mark.parametrize("background", [False, True])
def test_copies_after_a_lost_node_are_restored_without_the_files(comm, folder, memory, background):
    copies = save_and_fail(comm, folder, background)
    assert [path.name.partition(".")[0] for path in copies] == ["ckpt-2"] * len(list(memory.iterdir()))
    damage(comm, list((folder / "saved").glob("*/*.safetensors")))
    nodes = sorted(path.parent for path in copies)
    if comm.rank == 0 and len(nodes) > 1:
        shutil.rmtree(nodes[0])  # of any of them
    assert restored(comm, folder) == (3, 1.0, comm.size)
    comm.Barrier()
    assert not any(path.parent.exists() for path in copies[1:])  # the job ended well


def test_copies_of_another_checkpoint_are_not_restored(comm, folder, memory):
    save_and_fail(comm, folder)
    with Strategy(comm=comm) as strategy:
        CheckpointManager(made_with_a_metric(strategy, 7.0), folder / "saved").save(2)
    assert restored(comm, folder) == (7, 7.0, 7.0 * comm.size)


def test_copies_that_are_damaged_are_not_restored(comm, folder, memory, caplog):
    save_and_fail(comm, folder)
    damage(comm, list(memory.glob("*/*/rank-0.safetensors")))
    assert restored(comm, folder) == (3, 1.0, comm.size)
    assert comm.rank or "in memory are not restored, but the files" in caplog.text


def test_copies_without_room_for_them_are_warned_of_once(comm, folder, memory, caplog, monkeypatch):
    free = shutil.disk_usage(memory)._replace(free=0)
    monkeypatch.setattr(node_copies.shutil, "disk_usage", lambda folder: free)
    assert not save_and_fail(comm, folder)
    assert caplog.text.count("keeps no copies of the checkpoint in memory") <= 1
    assert comm.rank or "bytes are needed, and 0 are free" in caplog.text
    assert restored(comm, folder) == (3, 1.0, comm.size)


def test_copies_are_removed_by_the_last_that_uses_them(comm, folder, memory):
    with Strategy(comm=comm) as one, Strategy(comm=comm) as other:
        managers = [
            CheckpointManager(made_with_a_metric(strategy, 1.0), folder / "saved", neighbour=True)
            for strategy in (one, other)
        ]
        managers[0].save()
        managers[1].save()
        other.close()
        comm.Barrier()
        assert any(memory.iterdir())
    comm.Barrier()
    assert not any(memory.iterdir())


def test_copies_of_a_save_that_is_not_waited_for_are_removed(comm, folder, memory):
    with Strategy(comm=comm) as strategy:
        CheckpointManager(made_with_a_metric(strategy, 1.0), folder / "saved", background=True, neighbour=True).save()
    for thread in enumerate_threads():
        if thread.name == "mpidist.checkpoint":
            thread.join()
    comm.Barrier()
    assert not any(memory.iterdir())


def test_copies_are_not_kept_in_a_job_that_is_not_started_again(comm, folder, memory, monkeypatch, caplog):
    monkeypatch.delenv("MPIDIST_SAVED_FILE")
    with caplog.at_level(logging.INFO, "mpidist"):
        assert not save_and_fail(comm, folder)
    assert "no copies in memory, as `mpidist run --max-restarts` has not started this job" in caplog.text
    assert restored(comm, folder) == (3, 1.0, comm.size)
