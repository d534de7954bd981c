"""Which checkpoint is the newest: the one that was saved last, whatever its number."""

import os
from pathlib import Path

import numpy as np
import pytest

from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist import OneDeviceStrategy
from mpidist.checkpoint import Checkpoint, CheckpointManager

pytestmark = [pytest.mark.core, pytest.mark.ranks(1, 3)]


def made(strategy):
    with strategy.scope():
        return Checkpoint(step=0, own=np.array([strategy.topology.rank]))


def save(manager, *steps):
    for step in steps:
        manager.checkpoint.step = step
        manager.save(step)


def numbers(manager):
    return [int(path.rpartition("-")[2]) for path in manager.checkpoints]


@pytest.mark.parametrize("background", [False, True])
def test_rollback_checkpoints_saved_last_are_kept_and_restored(comm, folder, background, caplog):
    with Strategy(comm=comm) as strategy:
        save(CheckpointManager(made(strategy), folder, 5), 10, 20, 30, 40, 50)
    assert not caplog.records
    with Strategy(comm=comm) as strategy:  # the next job, which goes back
        manager = CheckpointManager(made(strategy), folder, 5, background=background)
        manager.checkpoint.restore(folder / "ckpt-20")
        save(manager, 21, 22, 23)
        manager.wait()
        comm.Barrier()
        assert numbers(manager) == [40, 50, 21, 22, 23]
        assert manager.latest == str(folder / "ckpt-23")
        told = [record.getMessage() for record in caplog.records]
        assert [f"{folder}/ckpt-21 has a lower number than ckpt-50 of another run" in text for text in told] == (
            [True] if comm.rank == 0 else []
        )
    with Strategy(comm=comm) as strategy:  # the one after it
        manager = CheckpointManager(made(strategy), folder, 5)
        assert manager.restore_or_initialize() == str(folder / "ckpt-23")
        assert manager.checkpoint.step == 23
        assert manager.save() == str(folder / "ckpt-51"), "no number that is there"
        save(manager, 40)
        comm.Barrier()
        assert numbers(manager) == [21, 22, 23, 51, 40]
        comm.Barrier()


def test_checkpoints_that_no_manager_saved_are_restored_and_oldest(comm, folder, strategy):
    manager = CheckpointManager(made(strategy), folder, None)
    for number in (100, 9, 10):
        manager.checkpoint.step = number
        manager.checkpoint.write(folder / f"ckpt-{number}")
    comm.Barrier()
    assert numbers(manager) == [9, 10, 100]
    assert manager.restore_or_initialize() == str(folder / "ckpt-100")
    assert (manager.checkpoint.step, manager.checkpoint.own.tolist()) == (100, [comm.rank])
    comm.Barrier()
    save(manager, 11)
    comm.Barrier()
    assert numbers(manager) == [9, 10, 100, 11]
    assert manager.restore_or_initialize() == str(folder / "ckpt-11")


def test_manifest_that_is_damaged_stands_behind_the_number_before_it(comm, folder, caplog, strategy):
    manager = CheckpointManager(made(strategy), folder, None)
    save(manager, 30, 40, 21, 22, 23)
    assert not caplog.records, "larger numbers of this run need no warning"
    if comm.rank == 0:
        (folder / "ckpt-22" / "manifest.json").write_text("{")
    comm.Barrier()
    assert numbers(manager) == [30, 40, 21, 22, 23]
    if comm.rank == 0:
        (folder / "ckpt-23" / "manifest.json").unlink()
    comm.Barrier()
    assert numbers(manager) == [30, 40, 21, 22, 23]
    assert manager.restore_or_initialize(skip_broken=True) == str(folder / "ckpt-21")


@pytest.mark.no_mpi
def test_restore_any_flipped_bit_is_data_loss_or_skipped(tmp_path):
    with OneDeviceStrategy() as strategy, strategy.scope():
        arrays = {"a": np.arange(3.0), "half": np.ones(2, "f2"), "empty": np.zeros((0, 3)), "on": np.ones(1, "?")}
        manager = CheckpointManager(Checkpoint(**arrays, text="x", z=np.array([1j])), tmp_path)
        for number in (1, 2):
            arrays["a"][...] = number
            place = Path(manager.save())
        for file in sorted(place.iterdir()):
            whole = file.read_bytes()
            for at in range(0, len(whole), 3):
                damaged = bytearray(whole)
                damaged[at] ^= 1 << at % 8
                file.write_bytes(damaged)
                assert manager.restore_or_initialize(skip_broken=True) == str(tmp_path / "ckpt-1"), (file.name, at)
            file.write_bytes(whole)
        assert manager.restore_or_initialize() == str(place)
        assert arrays["a"].tolist() == [2, 2, 2]


def test_keep_every_n_steps_keeps_them_besides_the_newest(comm, folder, strategy):
    manager = CheckpointManager(made(strategy), folder, 2, keep_every_n_steps=3)
    save(manager, 1, 2, 3, 4, 5, 6, 7)
    comm.Barrier()
    assert numbers(manager) == [3, 5, 6, 7]
    comm.Barrier()


def test_one_of_each_two_hours_is_kept_also_by_a_second_job(comm, folder, strategy):
    for hour in range(6):  # a job an hour
        manager = CheckpointManager(made(strategy), folder, 1, 2.0)
        save(manager, hour)
        if comm.rank == 0:
            os.utime(folder / f"ckpt-{hour}" / "manifest.json", (hour * 3600, hour * 3600))
        comm.Barrier()
    assert numbers(manager) == [0, 2, 4, 5]
    comm.Barrier()
