"""Copies of the newest checkpoint in the memory of nodes: who has which, and when they are restored."""

from __future__ import annotations

import logging
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from mpi4py import MPI

from mpidist import MultiWorkerMirroredStrategy, Variable
from mpidist.checkpoint import Checkpoint, CheckpointManager, node_copies

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

pytestmark = pytest.mark.core

SIZE = 300_000  # of 8 bytes: each rank writes a share


@pytest.fixture
def memory(folder: Path, comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The memory of nodes, one for each two ranks, in which each has a folder."""
    monkeypatch.setattr(node_copies, "SHARED_MEMORY", str(folder / "memory"))
    labels = (comm.allgather(comm.rank) * MPI.COMM_WORLD.size)[: MPI.COMM_WORLD.size]
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", ",".join(str(rank // 2) for rank in labels))
    (folder / "memory").mkdir(exist_ok=True)
    comm.Barrier()
    return folder / "memory"


def made(strategy: MultiWorkerMirroredStrategy, value: float) -> Checkpoint:
    with strategy.scope():
        metric = Variable(value, synchronization="on_read", aggregation="sum", name="metric")
        return Checkpoint(kernel=Variable(np.full(SIZE, value)), step=int(value), metric=metric)


def save_and_fail(comm: Intracomm, folder: Path, background: bool = False) -> set[Path]:
    """Save twice, and end with an exception; return the folders of this rank's node before and after."""
    with suppress(ZeroDivisionError), MultiWorkerMirroredStrategy(comm=comm) as strategy:
        checkpoint = made(strategy, 1.0)
        manager = CheckpointManager(checkpoint, folder / "saved", background=background, neighbour=True)
        for _ in range(2):
            checkpoint.step += 1
            manager.save()
        manager.wait()
        raise ZeroDivisionError
    comm.Barrier()
    return set(Path(node_copies.SHARED_MEMORY).glob("*/*/"))


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
    assert {path.name.partition(".")[0] for path in copies} == {"ckpt-2"}
    damage(comm, list((folder / "saved").glob("*/*.safetensors")))
    nodes = sorted(path.parent for path in copies)
    if comm.rank == 0 and len(nodes) > 1:
        shutil.rmtree(nodes[0])  # of any of them
    assert restored(comm, folder) == (3, 1.0, comm.size)
    assert not list(memory.glob("*/*/"))  # the job ended well


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
    assert comm.rank or "in memory are damaged, so files are read" in caplog.text


def test_copies_without_room_for_them_are_warned_of_once(
    comm: Intracomm, folder: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    comm.Barrier()
    shutil.rmtree(memory, ignore_errors=True)
    comm.Barrier()
    with caplog.at_level(logging.WARNING):
        save_and_fail(comm, folder)
    assert caplog.text.count("no copies of the checkpoint are kept in the memory of this node") == 1
    assert restored(comm, folder) == (3, 1.0, comm.size)
