"""Numbered checkpoints: which is restored, which are kept, files that are damaged, writing in the background."""

import json
import logging
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from jobs.failing import SIGNS
from support.everywhere import raises_everywhere

import mpidist
from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist import Variable
from mpidist.checkpoint import Checkpoint, CheckpointManager
from mpidist.checkpoint import background as background_module
from mpidist.checkpoint import folder as folder_module
from mpidist.checkpoint import parts as parts_module
from mpidist.checkpoint import saving as saving_module
from mpidist.checkpoint.parts import part_of_rank
from mpidist.errors import DataLossError, InvalidArgumentError

pytestmark = [pytest.mark.core, pytest.mark.ranks(1, 3)]


SAVES = """
import sys, time
import numpy as np
import mpidist
from mpidist.checkpoint import Checkpoint, CheckpointManager, saving
really = saving.write_part
def write_part(*arguments):
    {before}
    time.sleep(1)  # the program comes to its end meanwhile, or the job would
    really(*arguments)
saving.write_part = write_part
strategy = mpidist.MultiWorkerMirroredStrategy()
with strategy.scope():
    checkpoint = Checkpoint({what})
CheckpointManager(checkpoint, sys.argv[0] + ".saved", background=True, grace_seconds={grace}).save()
if strategy.rank == {failing}:
    leave_sign("raises")
    raise KeyError("labels")
strategy.barrier()
strategy.close()
"""
WEIGHTS = "weights=mpidist.Variable(np.zeros(3))"
# How a program ends: what it saves before, what the writer waits for, for how long, and which rank raises; then the
# exit status, what is said, and whether the checkpoint is there.
AT_THE_END = {
    "well": ("own=np.array([strategy.rank])", "pass", 300, None, 0, "", True),
    "with an error": (WEIGHTS, 'await_signs("raises")', 300, 0, 1, "KeyError: 'labels'", True),
    "with an error, and a save that hangs": (WEIGHTS, 'await_signs("never")', 2, 1, 1, "the job ends when", False),
}


@pytest.fixture
def go_on(monkeypatch):
    """Let threads that save in the background wait until the test sets this event, before they write a part."""
    event, really = threading.Event(), saving_module.write_part

    def write_part(place, name, part):
        assert threading.current_thread() is threading.main_thread() or event.wait()
        really(place, name, part)

    monkeypatch.setattr(saving_module, "write_part", write_part)
    return event


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def made(strategy, own):
    with strategy.scope():
        return Checkpoint(weights=Variable(np.zeros(1000)), own=np.array([own]), step=0)


@pytest.mark.parametrize("background", [False, True])
def test_program_goes_on_where_it_was(comm, folder, background):
    for run in range(3):
        with Strategy(comm=comm) as strategy:
            checkpoint = made(strategy, comm.rank)
            manager = CheckpointManager(checkpoint, folder / "runs", 2, background=background)
            restored = manager.restore_or_initialize()
            assert restored == (str(folder / "runs" / f"ckpt-{4 * run}") if run else None)
            assert checkpoint.step == 4 * run
            assert (checkpoint.weights.numpy() == 4 * run).all()
            for _ in range(4):
                checkpoint.step += 1
                checkpoint.weights.assign_add(np.ones(1000))
                manager.save(checkpoint.step)
                checkpoint.own += 1
            manager.wait()
            comm.Barrier()
            assert [Path(path).name for path in manager.checkpoints] == [f"ckpt-{4 * run + at}" for at in (3, 4)]
            assert manager.latest == manager.latest_checkpoint == manager.checkpoints[-1]
            assert checkpoint.own.tolist() == [comm.rank + 4 + 3 * run]
            comm.Barrier()
    assert sorted(one.name for one in (folder / "runs").iterdir()) == ["ckpt-11", "ckpt-12"]


@pytest.mark.parametrize("background", [False, True])
def test_last_save_has_bytes_and_seconds_of_the_save(comm, folder, caplog, background):
    with Strategy(comm=comm) as strategy, caplog.at_level(logging.INFO, "mpidist.checkpoint"):
        with strategy.scope():
            checkpoint = Checkpoint(own=np.full(1000, comm.rank))
        manager = CheckpointManager(checkpoint, folder, background=background)
        assert manager.last_save is None
        path = manager.save()
        manager.wait()
        record = manager.last_save
        assert record is not None
        size = 8000 if comm.size > 1 or comm.rank == 0 else 0
        assert (record.path, record.nbytes, record.extra_bytes) == (path, size, size * background)
        assert 0 < record.blocked_seconds <= record.total_seconds
        assert record.bytes_per_second == size / record.total_seconds
        assert sum(f"saved {path}: blocked" in text for text in caplog.messages) == (comm.rank == 0)


def test_numbers(comm, folder, strategy):
    checkpoint = made(strategy, 0)
    manager = CheckpointManager(checkpoint, str(folder / "a" / "b"), None, checkpoint_name="model.v1")
    assert manager.checkpoints == []
    assert manager.latest is None
    assert manager.restore_or_initialize() is None
    assert not (folder / "a").exists()
    comm.Barrier()
    names = [Path(manager.save(number)).name for number in (None, None, 10, None, 5, 10)]
    assert names == [f"model.v1-{number}" for number in (1, 2, 10, 11, 5, 10)]
    comm.Barrier()
    assert [Path(path).name for path in manager.checkpoints] == [f"model.v1-{at}" for at in (1, 2, 11, 5, 10)]
    other = CheckpointManager(checkpoint, folder / "a" / "b", 1)
    assert other.checkpoints == []
    other.save(np.int64(3))
    comm.Barrier()
    assert len(manager.checkpoints) == 5
    comm.Barrier()


WRONG = [
    ({"checkpoint": {"a": 1}}, TypeError, "takes a Checkpoint, got {"),
    ({"max_to_keep": 0}, ValueError, "max_to_keep must be a whole number >= 1, or None for all, got 0"),
    ({"max_to_keep": 2.0}, TypeError, "max_to_keep must be a whole number >= 1, or None for all, got 2.0"),
    ({"checkpoint_name": 3}, TypeError, "checkpoint_name must be a text, got 3"),
    ({"checkpoint_name": "a/b"}, ValueError, "checkpoint_name is for letters"),
    ({"grace_seconds": -1}, ValueError, "grace_seconds must be at least 0, got -1"),
    ({"background": "no"}, TypeError, "background must be True or False, got 'no'"),
    ({"on_difference": None}, ValueError, "on_difference must be 'raise' or 'rank 0', got None"),
    ({"writers": 0}, ValueError, "writers must be"),
    ({"max_to_keep": None, "keep_every_n_steps": 5}, ValueError, "max_to_keep=None keeps all checkpoints"),
    ({"keep_checkpoint_every_n_hours": 0.0}, ValueError, "keep_checkpoint_every_n_hours must be a number above 0"),
    ({"keep_checkpoint_every_n_hours": "2"}, ValueError, "keep_checkpoint_every_n_hours must be a number above 0"),
    ({"keep_every_n_steps": 0}, ValueError, "keep_every_n_steps"),
]
NO_NUMBERS = [
    (-1, ValueError), (1.5, TypeError), (True, TypeError), (np.array(5.0), TypeError), (np.array(True), TypeError),
]  # fmt: skip


def test_wrong_arguments_are_refused(folder, strategy):
    checkpoint = made(strategy, 0)
    for arguments, kind, text in WRONG:
        with pytest.raises(kind, match=text):
            CheckpointManager(**{"checkpoint": checkpoint, "directory": folder, **arguments})
    manager = CheckpointManager(checkpoint, folder)
    for number, kind in NO_NUMBERS:
        with pytest.raises(kind, match=">= 0, got "):
            manager.save(number)
    assert list(folder.iterdir()) == []
    with strategy.scope():
        step = Variable(7)
    for number in (np.array(5), np.int64(6), step):
        assert manager.save(number).endswith(f"-{int(number)}")


@pytest.mark.ranks(3)
def test_manager_background_of_some_ranks_is_refused_on_all(comm, folder, strategy):
    manager = CheckpointManager(made(strategy, 0), folder, background=comm.rank == 1)
    text = "save of a checkpoint .*background: rank.* False; rank 1: True"
    with raises_everywhere(comm, InvalidArgumentError, text):
        manager.save()
        strategy.barrier()  # else a rank would wait for the others' next call
    assert list(folder.iterdir()) == []


def cut(path):
    path.write_bytes(path.read_bytes()[:-40])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


def without_owners(path):
    manifest = json.loads(path.read_text())
    del manifest["owners"]
    path.write_text(json.dumps(manifest))


DAMAGES = {
    "arrays cut": ("rank-0.safetensors", cut, "rank-0.safetensors.* is missing or damaged"),
    "arrays flipped": ("rank-0.safetensors", flip, "is damaged: another checksum was written"),
    "arrays gone": ("rank-0.safetensors", Path.unlink, "rank-0.safetensors.* is missing or damaged"),
    "part cut": ("rank-0.json", cut, "rank-0.json.* is damaged: its checksum is not that of the manifest"),
    "part gone": ("rank-0.json", Path.unlink, "rank-0.json.* is missing"),
    "manifest cut": ("manifest.json", cut, "manifest.json.* is damaged"),
    "manifest flipped": ("manifest.json", flip, "manifest.json.* is damaged"),
    "manifest gone": ("manifest.json", Path.unlink, "is no checkpoint of mpidist: it has no manifest.json"),
    "manifest of others": ("manifest.json", lambda path: path.write_text('{"format": "x"}') and None, "another format"),
    "manifest without owners": ("manifest.json", without_owners, "json' is damaged: its checksum does not match"),
    "own arrays": ("rank-{last}.safetensors", flip, "damaged"),
}


def test_damaged_files_raise_on_all_ranks_or_are_skipped(comm, folder, caplog, strategy):
    for damage, (name, spoil, pattern) in DAMAGES.items():
        caplog.clear()
        checkpoint, place = made(strategy, comm.rank), folder / damage
        manager = CheckpointManager(checkpoint, place)
        for step in (1, 2):
            checkpoint.step = step
            checkpoint.weights.assign(np.full(1000, float(step)))
            path = Path(manager.save(step))
        if comm.rank == 0:
            spoil(path / name.format(last=comm.size - 1))
        comm.Barrier()
        checkpoint.weights.assign(np.full(1000, 7.0))
        text = rf"({pattern}).*; restore_or_initialize\(skip_broken=True\) takes"
        with raises_everywhere(comm, DataLossError, text):
            manager.restore_or_initialize()
        assert (checkpoint.step, checkpoint.weights.numpy()[0]) == (2, 7)
        assert manager.restore_or_initialize(skip_broken=True) == str(place / "ckpt-1")
        assert (checkpoint.step, checkpoint.weights.numpy()[0]) == (1, 1)
        assert sum("ckpt-2 is passed over" in text for text in caplog.messages) == (comm.rank == 0)
        comm.Barrier()
        if comm.rank == 0:
            shutil.rmtree(place / "ckpt-1")
        comm.Barrier()
        assert manager.restore_or_initialize(skip_broken=True) is None


def test_wait_on_a_closed_strategy_is_local(comm, folder, monkeypatch):
    def write_part(place, name, part):
        raise OSError(28, "No space left on device")

    with Strategy(comm=comm) as strategy:
        checkpoint = made(strategy, 0)
        manager = CheckpointManager(checkpoint, folder, background=True)
        manager.save(1)
        strategy.close()
        manager.wait()
        comm.Barrier()
        assert len(manager.checkpoints) == 1
        comm.Barrier()
    with Strategy(comm=comm) as strategy:
        checkpoint = made(strategy, 0)
        manager = CheckpointManager(checkpoint, folder, background=True)
        monkeypatch.setattr(saving_module, "write_part", write_part)
        manager.save(2)
        strategy.close()
        if comm.rank == 0:
            with pytest.raises(OSError, match="No space left"):
                manager.wait()
    comm.Barrier()


def test_checksum_error_is_that_of_the_save(comm, folder, monkeypatch):
    def fail(array):
        raise MemoryError("no room for a checksum")

    monkeypatch.setattr(saving_module if comm.size > 1 else parts_module, "checksum", fail)
    with Strategy(comm=comm) as strategy, pytest.raises(MemoryError, match="no room for a checksum"):
        CheckpointManager(made(strategy, comm.rank), folder).save(1)


@pytest.mark.parametrize("background", [False, True])
def test_save_failed_write_of_one_rank_raises_on_all(comm, folder, monkeypatch, caplog, background, strategy):
    """The checkpoint before stays, and the next one is written."""
    checkpoint = made(strategy, comm.rank)
    manager = CheckpointManager(checkpoint, folder, background=background)
    manager.save(1)
    manager.wait()
    with monkeypatch.context() as patch:
        if comm.rank == comm.size - 1:
            really = saving_module.write_part

            def write_part(place, name, part):
                if name == part_of_rank(comm.rank):
                    raise OSError(28, "No space left on device")
                really(place, name, part)

            patch.setattr(saving_module, "write_part", write_part)
        checkpoint.step, saves = 2, []
        with raises_everywhere(comm, OSError, "No space left on device"):
            manager.save(2)
            for thread in threading.enumerate():
                if thread.name == "mpidist.checkpoint":
                    thread.join()
            saves = [manager.last_save]
            manager.wait()
    assert {save.path for save in [*saves, manager.last_save]} == {str(folder / "ckpt-1")}
    told = [record for record in caplog.records if "ckpt-2 is not written: " in record.getMessage()]
    assert bool(told) == (background and comm.rank in (0, comm.size - 1)), "who never waits must learn of it, too"
    assert manager.checkpoints == [str(folder / "ckpt-1")]
    comm.Barrier()
    assert names_in(folder) == {"ckpt-1", ".ckpt.lock"}, "what was written takes no room of the next one"
    comm.Barrier()
    manager.save(3)
    manager.wait()
    comm.Barrier()
    assert len(manager.checkpoints) == 2
    comm.Barrier()


def test_background_is_a_snapshot(comm, folder, go_on, strategy):
    """`save` returns before the files are there, and what changes afterwards is not in them."""
    checkpoint = made(strategy, comm.rank)
    manager = CheckpointManager(checkpoint, folder, background=True)
    manager.save(1)
    assert manager.checkpoints == []
    comm.Barrier()
    checkpoint.weights.assign(np.ones(1000))
    checkpoint.own[0] = -1
    checkpoint.step = 9
    go_on.set()
    assert manager.restore_or_initialize() == str(folder / "ckpt-1")
    assert (checkpoint.weights.numpy() == 0).all()
    assert (checkpoint.own.tolist(), checkpoint.step) == ([comm.rank], 0)


def test_background_copies_into_the_memory_of_the_last_copy(comm, folder, monkeypatch):
    """While shapes stay; and each checkpoint holds what was at its time."""
    places = []
    really = saving_module.write_part

    def write_part(place, name, part):
        places.append({key: array.ctypes.data for key, array in part.arrays.items()})
        really(place, name, part)

    monkeypatch.setattr(saving_module, "write_part", write_part)
    with Strategy(comm=comm) as strategy:
        checkpoint = made(strategy, comm.rank)
        manager = CheckpointManager(checkpoint, folder, background=True)
        for step in range(3):
            checkpoint.weights.assign(np.full(1000, step))
            checkpoint.own = np.full(3 + step // 2, comm.rank + step)
            manager.save(step)
        manager.wait()
        weights, own = ([place[name] for place in places if name in place] for name in ("weights", "own"))
        assert len(set(weights)) == (comm.rank == 0), "one copy, in one place"
        assert len(own) == 3 * (comm.size > 1 or not comm.rank)
        assert own[0] == own[1]
        for step in range(3):
            checkpoint.own = np.zeros(3 + step // 2, np.int64)
            checkpoint.restore(folder / f"ckpt-{step}")
            assert (checkpoint.weights.numpy() == step).all()
            assert (checkpoint.own == comm.rank + step).all()


@pytest.mark.parametrize("background", [False, True])
def test_save_takes_memory_for_its_own_part(comm, folder, background, strategy):
    def kibibytes(name):
        return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0])

    with strategy.scope():
        checkpoint = Checkpoint(weights=Variable(np.ones(48 << 20, np.float32)))
    manager = CheckpointManager(checkpoint, folder, 1, background=background)
    for _ in range(2):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before = kibibytes("VmRSS")
        manager.save()
        manager.wait()
        record = manager.last_save
        assert record is not None
        assert kibibytes("VmHWM") - before <= (record.extra_bytes >> 10) + (64 << 10)
    comm.Barrier()


def test_background_of_changing_pieces_is_a_snapshot(comm, folder):
    """A rank copies the pieces of the last save while it takes checksums."""
    numbers = np.arange(1 << 20, dtype=np.float32)
    with Strategy(comm=comm) as strategy, strategy.scope():
        checkpoint = Checkpoint(weights=numbers.copy(), more=np.zeros(1))
        manager = CheckpointManager(checkpoint, folder, None, background=True)
        for step in range(4):
            np.add(numbers, step, out=checkpoint.weights)  # no new memory, which a copy could get afterwards
            checkpoint.more = np.full(1 + (step // 2 << 20), step)
            manager.save(step)
            checkpoint.weights[:] = -1
        manager.wait()
        for step, path in enumerate(manager.checkpoints):
            checkpoint.more = np.zeros(1 + (step // 2 << 20), np.int64)
            checkpoint.restore(path)
            assert (checkpoint.weights == numbers + step).all()
            assert (checkpoint.more == step).all()


def test_wait_that_is_interrupted_leaves_the_copy_that_is_being_written(comm, folder, monkeypatch):
    """By Ctrl-C on all ranks: the next save takes other memory, and both checkpoints are right."""
    go_on = threading.Event()
    really_write, really_join = saving_module.write_part, background_module.BackgroundWriting.join_in_time

    def write_part(place, name, part):
        assert "ckpt-2" in place.name or go_on.wait()
        really_write(place, name, part)

    def join(self):
        monkeypatch.setattr(background_module.BackgroundWriting, "join_in_time", really_join)
        raise KeyboardInterrupt

    monkeypatch.setattr(saving_module, "write_part", write_part)
    with Strategy(comm=comm) as strategy:
        checkpoint = made(strategy, comm.rank)
        manager = CheckpointManager(checkpoint, folder, background=True)
        checkpoint.weights.assign(np.full(1000, 1.0))
        manager.save(1)
        monkeypatch.setattr(background_module.BackgroundWriting, "join_in_time", join)
        with pytest.raises(KeyboardInterrupt):
            manager.wait()
        comm.Barrier()
        checkpoint.weights.assign(np.full(1000, 2.0))
        manager.save(2)
        go_on.set()
        manager.wait()
        while len(manager.checkpoints) < 2:
            time.sleep(0.01)
        comm.Barrier()
        for number in (1, 2):
            checkpoint.restore(folder / f"ckpt-{number}")
            assert (checkpoint.weights.numpy() == number).all()


def test_background_save_of_another_manager_stays(comm, folder, go_on, strategy):
    checkpoint = made(strategy, comm.rank)
    one = CheckpointManager(checkpoint, folder, background=True)
    one.save(100)
    CheckpointManager(checkpoint, folder).save(101)
    go_on.set()
    one.wait()
    comm.Barrier()
    assert [Path(path).name for path in one.checkpoints] == ["ckpt-100", "ckpt-101"]
    comm.Barrier()


def test_write_to_the_place_of_a_background_save_leaves_its_files(comm, folder, go_on, strategy):
    checkpoint = made(strategy, comm.rank)
    checkpoint.write(folder / "ckpt-1")
    manager = CheckpointManager(checkpoint, folder, background=True)
    manager.save(1)
    checkpoint.write(folder / "ckpt-1")
    go_on.set()
    manager.wait()
    checkpoint.restore(folder / "ckpt-1")


@pytest.mark.no_mpi
@pytest.mark.parametrize("end", AT_THE_END)
def test_background_save_at_the_end_of_a_job_is_finished_within_the_grace(job, tmp_path, end):
    what, before, grace, failing, status, said, is_saved = AT_THE_END[end]
    ended = job("", ranks=2, head=SIGNS + SAVES.format(what=what, before=before, grace=grace, failing=failing))
    assert ended.status == status, ended.err
    assert said in ended.err if said else not ended.err
    names = names_in(tmp_path / "program.py.saved") - {".ckpt.lock"}
    assert names == {"ckpt-1"} if is_saved else "ckpt-1" not in names


def test_background_removes_in_the_folder_in_which_the_program_was(comm, folder, go_on, monkeypatch, strategy):
    left = f".ckpt-4.{16 * 'a'}.new"
    if comm.rank == 0:
        for name in ("a", "b/saved/ckpt-0", f"b/saved/{left}"):
            (folder / name).mkdir(parents=True)
    comm.Barrier()
    checkpoint = made(strategy, comm.rank)
    monkeypatch.chdir(folder / "a")
    manager = CheckpointManager(checkpoint, "saved", 1, background=True)
    manager.save(1)
    monkeypatch.chdir(folder / "b")
    go_on.set()
    manager.wait()
    comm.Barrier()
    assert (folder / "a/saved/ckpt-1").is_dir()
    assert names_in(folder / "b/saved") == {"ckpt-0", left}
    comm.Barrier()


def test_folder_stays_where_the_program_was_when_it_made_the_manager(comm, folder, monkeypatch, strategy):
    if comm.rank == 0:
        (folder / "sub").mkdir()
    comm.Barrier()
    monkeypatch.chdir(folder)
    manager = CheckpointManager(made(strategy, comm.rank), "saved")
    manager.save()
    if comm.rank == 0:
        monkeypatch.chdir(folder / "sub")
    place = f"{folder}/saved/ckpt-2" if comm.rank == 0 else "saved/ckpt-2"
    assert manager.save() == manager.latest_checkpoint == manager.restore_or_initialize() == place
    comm.Barrier()
    assert names_in(folder / "sub") == set()
    comm.Barrier()


def test_old_checkpoints_of_other_names_and_links_are_fine(comm, folder, strategy):
    checkpoint = made(strategy, comm.rank)
    manager = CheckpointManager(checkpoint, folder / "saved", 1)
    manager.save(1)
    if comm.rank == 0:
        (folder / "saved" / "ckpt-0001").mkdir()
        (folder / "saved" / "ckpt-1").rename(folder / "elsewhere")
        (folder / "saved" / "ckpt-1").symlink_to(folder / "elsewhere")
    comm.Barrier()
    manager.save(2)
    manager.save(3)
    if comm.rank == 0:
        assert names_in(folder / "saved") == {"ckpt-0001", "ckpt-3", ".ckpt.lock"}
        assert (folder / "elsewhere" / "manifest.json").exists()
    comm.Barrier()


def test_save_succeeds_beside_foreign_and_undeletable_folders(comm, folder, monkeypatch, caplog):
    """The next job saves, too."""
    really = folder_module.remove

    def remove(place):
        if "ckpt-3" in place.name:
            raise PermissionError(f"{place.name} is kept")
        really(place)

    if comm.rank == 0:
        (folder / "ckpt-1").mkdir()
        (folder / "ckpt-1" / "results.csv").touch()
        (folder / "ckpt-2").touch()
    comm.Barrier()
    for job in range(2):
        with Strategy(comm=comm) as strategy:
            manager = CheckpointManager(made(strategy, comm.rank), folder, 1)
            monkeypatch.setattr(folder_module, "remove", remove if job == 0 else really)
            for number in range(3, 6):
                manager.save(number + 3 * job)
    assert ("ckpt-3" in caplog.text) == (comm.rank == 0)
    assert names_in(folder) - {".ckpt.lock"} == {"ckpt-1", "ckpt-2", "ckpt-8"}
    assert names_in(folder / "ckpt-1") == {"results.csv"}
    comm.Barrier()


@pytest.mark.no_mpi
def test_folder_that_may_not_be_read_is_an_error_and_not_empty(tmp_path, monkeypatch):
    """As one of another user; root may read all."""

    def listdir(place):
        raise PermissionError(13, "Permission denied", str(place))

    manager = CheckpointManager(made(mpidist.get_strategy(), 0), tmp_path)
    monkeypatch.setattr(os, "listdir", listdir)
    with pytest.raises(OSError, match="Permission denied"):
        manager.restore_or_initialize()


@pytest.mark.no_mpi
def test_save_takes_no_number_that_another_manager_is_writing(tmp_path, go_on):
    managers = [CheckpointManager(made(mpidist.get_strategy(), 0), tmp_path, background=at == 0) for at in range(2)]
    assert [Path(manager.save()).name for manager in managers] == ["ckpt-1", "ckpt-2"]
    go_on.set()
    managers[0].wait()
    assert names_in(tmp_path) == {"ckpt-1", "ckpt-2", ".ckpt.lock"}


def test_save_removes_leftovers_of_killed_jobs(comm, folder):
    """And moves back what was about to be replaced, which is read where it is; what has another name is left alone."""
    aside = f".ckpt-5.{16 * '0'}.old"
    with Strategy(comm=comm) as strategy:
        checkpoint = made(strategy, comm.rank)
        CheckpointManager(checkpoint, folder).save(5)
    with Strategy(comm=comm) as strategy:
        checkpoint = made(strategy, comm.rank)
        if comm.rank == 0:
            (folder / "ckpt-5").rename(folder / aside)
            for name in (f".ckpt-4.{16 * 'a'}.new", f".ckpt-6.{16 * 'b'}.old", ".other-3.new", ".ckpt-x.old"):
                (folder / name).mkdir()
                (folder / name / "rank-0.json").touch()
            (folder / ".notes.old").touch()
        comm.Barrier()
        manager = CheckpointManager(checkpoint, folder)  # of the next job
        checkpoint.restore(folder / "ckpt-5")
        assert manager.restore_or_initialize(skip_broken=True) == str(folder / "ckpt-5")
        assert (folder / aside).is_dir()
        comm.Barrier()
        assert manager.save(6) == str(folder / "ckpt-6")
        assert names_in(folder) == {"ckpt-5", "ckpt-6", ".ckpt.lock", ".other-3.new", ".ckpt-x.old", ".notes.old"}
        assert manager.restore_or_initialize() == str(folder / "ckpt-6")
        assert (folder / ".notes.old").exists()
        checkpoint.restore(folder / "ckpt-5")


def test_numbers_too_large_for_a_message_are_passed_over(comm, folder, strategy):
    """On all ranks alike: what rank 0 finds is sent as 64 bits."""
    if comm.rank == 0:
        (folder / f"ckpt-{10**18}").mkdir()
    comm.Barrier()
    manager = CheckpointManager(made(strategy, comm.rank), folder)
    assert manager.restore_or_initialize() is None
    assert manager.save() == str(folder / "ckpt-1")
    assert manager.save(10**18 - 1) == str(folder / f"ckpt-{10**18 - 1}")
    assert manager.restore_or_initialize() == str(folder / f"ckpt-{10**18 - 1}")


def test_save_wrong_number_on_one_rank_raises_on_all(comm, folder):
    with Strategy(comm=comm) as strategy:
        manager = CheckpointManager(made(strategy, comm.rank), folder / "runs")
        for number in ("x", -1, 10**18):
            text = f"checkpoint_number must be .*got {number!r}"
            with pytest.raises((TypeError, ValueError), match=text):  # `InvalidArgumentError` is a `ValueError`
                manager.save(number if comm.rank == comm.size - 1 else 3)
        assert manager.save(4) == str(folder / "runs" / "ckpt-4")
    assert not (folder / "runs" / "ckpt-0").exists()
