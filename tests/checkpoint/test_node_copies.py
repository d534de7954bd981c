"""Copies of the newest checkpoint in the memory of nodes: who has which, and when they are restored."""

import logging
import shutil
from contextlib import suppress
from pathlib import Path
from threading import enumerate as enumerate_threads

import numpy as np
import pytest
from mpi4py import MPI
from support.ranks import Intracomm

from mpidist import MultiWorkerMirroredStrategy, Variable
from mpidist.checkpoint import Checkpoint, CheckpointManager, node_copies

pytestmark = pytest.mark.core

SIZE = 300_000  # of 8 bytes: each rank writes a share


@pytest.fixture(params=[1, 2])
def memory(request: pytest.FixtureRequest, folder: Path, comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The memory of nodes of one or two ranks, in which each has a folder, in a job that may be started again."""
    monkeypatch.setattr(node_copies, "SHARED_MEMORY", str(folder / "memory"))
    monkeypatch.setenv("MPIDIST_SAVED_FILE", str(folder / "saved-file"))
    labels = (str(rank // request.param) for rank in range(MPI.COMM_WORLD.size))
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", ",".join(labels))
    (folder / "memory").mkdir(exist_ok=True)
    comm.Barrier()
    return folder / "memory"


def made(strategy: MultiWorkerMirroredStrategy, value: float) -> Checkpoint:
    with strategy.scope():
        metric = Variable(value, synchronization="on_read", aggregation="sum", name="metric")
        return Checkpoint(kernel=Variable(np.full(SIZE, value)), step=int(value), metric=metric)


def save_and_fail(comm: Intracomm, folder: Path, background: bool = False) -> list[Path]:
    """Save twice, and end with an exception; return the folders of all nodes."""
    with suppress(ZeroDivisionError), MultiWorkerMirroredStrategy(comm=comm) as strategy:
        checkpoint = made(strategy, 1.0)
        manager = CheckpointManager(checkpoint, folder / "saved", background=background, neighbour=True)
        for _ in range(2):
            checkpoint.step += 1
            manager.save()
        manager.wait()
        raise ZeroDivisionError
    comm.Barrier()
    return sorted((folder / "memory").glob("*/*.new"))


def damage(comm: Intracomm, files: list[Path]) -> None:
    comm.Barrier()
    if comm.rank == 0:
        for file in files:
            file.write_bytes(b"x" * file.stat().st_size)
    comm.Barrier()


def restored(comm: Intracomm, folder: Path) -> tuple[int, float, float]:
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        checkpoint = made(strategy, 0.0)
        manager = CheckpointManager(checkpoint, folder / "saved", neighbour=True)
        assert manager.restore_or_initialize() == str(manager.latest_checkpoint)
        return checkpoint.step, checkpoint.kernel.numpy().sum() / SIZE, strategy.reduce("sum", checkpoint.metric)


@pytest.mark.parametrize("background", [False, True])
def test_copies_after_a_lost_node_are_restored_without_the_files(
    comm: Intracomm, folder: Path, memory: Path, background: bool
) -> None:
    copies = save_and_fail(comm, folder, background)
    assert [path.name.partition(".")[0] for path in copies] == ["ckpt-2"] * len(list(memory.iterdir()))
    damage(comm, list((folder / "saved").glob("*/*.safetensors")))
    nodes = sorted(path.parent for path in copies)
    if comm.rank == 0 and len(nodes) > 1:
        shutil.rmtree(nodes[0])  # of any of them
    assert restored(comm, folder) == (3, 1.0, comm.size)
    comm.Barrier()
    assert not any(path.parent.exists() for path in copies[1:])  # the job ended well


def test_copies_of_another_checkpoint_are_not_restored(comm: Intracomm, folder: Path, memory: Path) -> None:
    save_and_fail(comm, folder)
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        CheckpointManager(made(strategy, 7.0), folder / "saved").save(2)
    assert restored(comm, folder) == (7, 7.0, 7.0 * comm.size)


def test_copies_that_are_damaged_are_not_restored(
    comm: Intracomm, folder: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_and_fail(comm, folder)
    damage(comm, list(memory.glob("*/*/rank-0.safetensors")))
    assert restored(comm, folder) == (3, 1.0, comm.size)
    assert comm.rank or "in memory are not restored, but the files" in caplog.text


def test_copies_without_room_for_them_are_warned_of_once(
    comm: Intracomm, folder: Path, memory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(memory)._replace(free=0)
    monkeypatch.setattr(node_copies.shutil, "disk_usage", lambda folder: free)
    assert not save_and_fail(comm, folder)
    assert caplog.text.count("keeps no copies of the checkpoint in memory") <= 1
    assert comm.rank or "bytes are needed, and 0 are free" in caplog.text
    assert restored(comm, folder) == (3, 1.0, comm.size)


def test_copies_are_removed_by_the_last_that_uses_them(comm: Intracomm, folder: Path, memory: Path) -> None:
    with MultiWorkerMirroredStrategy(comm=comm) as one, MultiWorkerMirroredStrategy(comm=comm) as other:
        managers = [
            CheckpointManager(made(strategy, 1.0), folder / "saved", neighbour=True) for strategy in (one, other)
        ]
        managers[0].save()
        managers[1].save()
        other.close()
        comm.Barrier()
        assert any(memory.iterdir())
    comm.Barrier()
    assert not any(memory.iterdir())


def test_copies_of_a_save_that_is_not_waited_for_are_removed(comm: Intracomm, folder: Path, memory: Path) -> None:
    with MultiWorkerMirroredStrategy(comm=comm) as strategy:
        CheckpointManager(made(strategy, 1.0), folder / "saved", background=True, neighbour=True).save()
    for thread in enumerate_threads():
        if thread.name == "mpidist.checkpoint":
            thread.join()
    comm.Barrier()
    assert not any(memory.iterdir())


def test_copies_are_not_kept_in_a_job_that_is_not_started_again(
    comm: Intracomm, folder: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("MPIDIST_SAVED_FILE")
    with caplog.at_level(logging.INFO, "mpidist"):
        assert not save_and_fail(comm, folder)
    assert "no copies in memory, as `mpidist run --max-restarts` has not started this job" in caplog.text
    assert restored(comm, folder) == (3, 1.0, comm.size)
