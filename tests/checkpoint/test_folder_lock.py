"""Who may write to a folder of checkpoints, one job at a time, and who may read its files."""

import errno
import json
import os
import resource
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from jobs.failing import PROJECT, clean_environment
from support.everywhere import raises_everywhere

from mpidist import MultiWorkerMirroredStrategy as Strategy
from mpidist.checkpoint import Checkpoint, CheckpointManager, saving
from mpidist.checkpoint import saving as saving_module

pytestmark = [pytest.mark.core, pytest.mark.ranks(1, 3)]

# A program that does what it reads, and answers: the test and its other jobs run between two steps of it.
OBEYS = """
import os, sys
import numpy as np
from mpidist.checkpoint import Checkpoint, CheckpointManager, saving
really, is_in_save = saving.write_part, False
def write_part(folder, name, part):
    if is_in_save:
        print(folder.name, flush=True)
        sys.stdin.readline()
    really(folder, name, part)
saving.write_part = write_part
manager = CheckpointManager(Checkpoint(weights=np.zeros(3)), sys.argv[1])
for line in sys.stdin:
    if line == "fork and save\\n" and os.fork() == 0:
        sys.exit()  # the child ends as a program does, and the lock stays
    is_in_save = line == "stop in save\\n"
    print(os.path.basename(manager.save()), flush=True)
"""
SAVES = """
import numpy as np
import mpidist
from mpidist.checkpoint import Checkpoint, CheckpointManager
with mpidist.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
    manager = CheckpointManager(Checkpoint(own=np.array(strategy.topology.rank)), {folder!r})
    try:
        print("saved " + manager.save() + "\\n", end="", flush=True)
    except OSError as error:
        print(f"refused {{error}}\\n", end="", flush=True)
"""
LIVES = """
import pathlib, sys
from mpidist.checkpoint import folder_lock
folder_lock._BEAT_SECONDS = 0.01
lock = folder_lock.FolderLock.hold(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""
HANGS_SECONDS = 60  # 6,000 signs of life
REFUSED = r"another job \(.*host .*, process \d+, since [-0-9]+ [:0-9]+\) writes to this folder, '.*', so nothing was "


@contextmanager
def other_job(folder):
    """Run `OBEYS`, and give what lets it make one step."""
    environment = {**clean_environment(), "PYTHONPATH": PROJECT}
    command = [sys.executable, "-c", OBEYS, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def step(line):
            print(line, file=process.stdin, flush=True)
            return str(process.stdout.readline()).strip()

        yield step, process
        process.stdin.close()


def made(strategy):
    with strategy.scope():
        return Checkpoint(weights=np.zeros(3))


def leave_lock(folder, comm, **changes):
    """Leave the lock of a process that is not on this machine, or differs in something else."""
    path = folder / ".ckpt.lock"
    with Strategy(comm=comm) as strategy:
        CheckpointManager(made(strategy), folder).save(1)
        text = json.loads(path.read_text())
        comm.Barrier()
    if comm.rank == 0:
        path.write_text(json.dumps({**text, "boot": "another", "host": "elsewhere", "token": "another", **changes}))
    comm.Barrier()
    return path


@pytest.mark.no_mpi
def test_save_of_a_second_job_raises_until_the_first_one_is_killed(job, tmp_path):
    folder = tmp_path / "saved"
    with other_job(folder) as (step, process):
        assert step("save") == "ckpt-1"
        assert step("fork and save") == "ckpt-2"
        unfinished = step("stop in save")
        ended = job("", ranks=2, head=SAVES.format(folder=f"{folder}"))
        assert ended.out.count(f"process {process.pid}, since") == ended.out.count("refused another job (") == 2
        assert (folder / unfinished).is_dir(), "the folder of a job that lives is no leftover"
        assert step("go on") == "ckpt-3"
        unfinished = step("stop in save")
        process.kill()
        process.wait()
    assert (folder / unfinished).is_dir()
    ended = job("", ranks=2, head=SAVES.format(folder=f"{folder}"))
    assert ended.out == f"saved {folder}/ckpt-4\n" * 2
    assert f"takes over the lock {folder}/.ckpt.lock of another job (" in ended.err
    assert f"process {process.pid}" in ended.err
    assert {path.name for path in folder.iterdir()} == {f"ckpt-{number}" for number in (1, 2, 3, 4)}


@pytest.mark.no_mpi
def test_lock_gets_signs_of_life_while_its_job_lives(tmp_path):
    lock, command = tmp_path / "lock", [sys.executable, "-c", LIVES, str(tmp_path / "lock")]
    environment = {**clean_environment(), "PYTHONPATH": PROJECT}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        for _ in range(2):
            os.utime(lock, (1, 1))
            until = time.monotonic() + HANGS_SECONDS
            while lock.stat().st_mtime == 1:
                assert time.monotonic() < until, "no sign of life"
                time.sleep(0.01)
    assert not lock.exists()


def test_lock_of_another_machine_that_lives_is_respected(comm, folder, strategy):
    path = leave_lock(folder, comm)
    is_over = threading.Event()

    def live():
        while not is_over.wait(0.02):
            os.utime(path)

    beating = threading.Thread(target=live)
    beating.start()
    try:
        with raises_everywhere(comm, OSError, REFUSED):
            CheckpointManager(made(strategy), folder).save()
        CheckpointManager(made(strategy), folder, checkpoint_name="other").save()
        CheckpointManager(made(strategy), folder).restore_or_initialize()  # which needs no lock
    finally:
        is_over.set()
        beating.join()
    comm.Barrier()
    assert "elsewhere" in path.read_text()


@pytest.mark.parametrize("what", ["old", "without signs of life", "empty"])
def test_lock_of_another_machine_that_is_gone_is_taken_over(comm, folder, what, caplog, monkeypatch):
    path = leave_lock(folder, comm)
    if what == "empty" and comm.rank == 0:
        path.write_text("")
    if what == "without signs of life":
        monkeypatch.setattr("mpidist.checkpoint.folder_lock._GONE_SECONDS", 0.5)
    elif comm.rank == 0:
        os.utime(path, (1, 1))
    comm.Barrier()
    with Strategy(comm=comm) as strategy:
        assert CheckpointManager(made(strategy), folder).save() == str(folder / "ckpt-2")
    text = "of another job that was killed while" if what == "empty" else r"of another job (host elsewhere, process"
    told = [record.getMessage() for record in caplog.records if "takes over the lock" in record.getMessage()]
    assert [text.replace("\\", "") in line for line in told] == [True] * (comm.rank == 0)
    assert not path.exists()


def test_lock_that_was_taken_over_keeps_the_first_job_from_publishing(comm, folder, monkeypatch):
    """As where a process was stopped for minutes on another machine."""
    really = saving_module.write_part
    text = leave_lock(folder, comm).read_text()
    comm.Barrier()
    if comm.rank == 0:
        (folder / ".ckpt.lock").unlink()

    def write_part(place, name, part):
        really(place, name, part)
        (folder / ".ckpt.lock").write_text(text)

    monkeypatch.setattr(saving_module, "write_part", write_part)
    monkeypatch.setattr("mpidist.checkpoint.folder_lock._is_gone", refuse)
    comm.Barrier()
    with Strategy(comm=comm) as strategy:
        with raises_everywhere(comm, OSError, "it lives"):
            CheckpointManager(made(strategy), folder).save(2)
        assert {path.name for path in folder.iterdir()} == {".ckpt.lock", "ckpt-1"}
        comm.Barrier()


def test_place_that_another_program_fills_during_a_save_is_left_alone(comm, folder, monkeypatch):
    really = saving_module.write_part

    def write_part(place, name, part):
        really(place, name, part)
        (folder / "ckpt-1" / "notes").mkdir(parents=True)

    monkeypatch.setattr(saving_module, "write_part", write_part)
    with Strategy(comm=comm) as strategy:
        with raises_everywhere(comm, FileExistsError, "was made by another save meanwhile"):
            CheckpointManager(made(strategy), folder).save(1)
        assert (folder / "ckpt-1" / "notes").is_dir()
        comm.Barrier()


def refuse(*_):
    raise OSError("it lives")


def test_strategies_of_other_ranks_save_one_after_another_but_not_at_once(comm, folder):
    backwards, alone = comm.Split(0, -comm.rank), comm.Split(comm.rank, 0)
    for ranks in (comm, backwards):  # another rank is rank 0
        with Strategy(comm=ranks) as strategy:
            CheckpointManager(made(strategy), folder).save()
    with Strategy(comm=alone) as strategy:
        manager = CheckpointManager(made(strategy), folder)
        if comm.rank == 0:
            manager.save()
        comm.Barrier()
        if comm.rank > 0:
            with pytest.raises(OSError, match=REFUSED):
                manager.save()
        comm.Barrier()
    assert len(manager.checkpoints) == 3


def test_folder_that_was_removed_between_saves_is_made_again(comm, folder, strategy):
    manager = CheckpointManager(made(strategy), folder / "saved")
    manager.save()
    if comm.rank == 0:
        subprocess.run(["rm", "-r", folder / "saved"], check=True)
    comm.Barrier()
    assert manager.save() == str(folder / "saved" / "ckpt-1")
    assert (folder / "saved" / ".ckpt.lock").exists()
    comm.Barrier()


def test_files_have_the_mode_of_the_umask(comm, folder):
    before = os.umask(0o027)
    try:
        with Strategy(comm=comm) as strategy, strategy.scope():
            path = Path(Checkpoint(weights=np.zeros(3), own=np.full(3, comm.rank)).write(folder / "one"))
    finally:
        os.umask(before)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in path.iterdir()} == dict.fromkeys(
        os.listdir(path), oct(0o640)
    )
    comm.Barrier()


@pytest.mark.parametrize("name", ["rank-0.safetensors", "rank-0.json"])
def test_file_that_may_not_be_read_is_not_passed_over_as_damaged(comm, folder, name):
    """A link to itself, which root may not read either."""
    with Strategy(comm=comm) as strategy, strategy.scope():
        manager = CheckpointManager(Checkpoint(weights=np.zeros(3)), folder)
        for number in (1, 2):
            path = Path(manager.save(number))
        if comm.rank == 0:
            (path / name).unlink()
            (path / name).symlink_to(name)
        comm.Barrier()
        with raises_everywhere(comm, OSError, f"{os.strerror(errno.ELOOP)}.*{name}"):
            manager.restore_or_initialize(skip_broken=True)


def test_error_of_a_full_disk_names_the_file_and_leaves_the_old_one(comm, folder):
    """A limit of the size of files stands for the disk: the system refuses the rest of the write."""
    with Strategy(comm=comm) as strategy, strategy.scope():
        weights = np.zeros(100_000)
        checkpoint = Checkpoint(weights=weights)
        checkpoint.write(folder / "one")
        weights += 1
        pattern = r"one\.\w+\.new/[\w-]+\.safetensors' cannot be written"
        with limited_files(4096), raises_everywhere(comm, OSError, f"{pattern}.*{os.strerror(errno.EFBIG)}"):
            checkpoint.write(folder / "one")
        checkpoint.restore(folder / "one")
        assert not weights.any()
        comm.Barrier()
        assert [path.name for path in folder.iterdir()] == ["one"]


@pytest.mark.parametrize("background", [False, True])
def test_program_goes_on_when_the_disk_is_full_if_it_wants(comm, folder, background, caplog):
    with Strategy(comm=comm) as strategy, strategy.scope():
        checkpoint = Checkpoint(weights=np.zeros(100_000), own=np.full(9, comm.rank))
        manager = CheckpointManager(checkpoint, folder, background=background, on_error="warn")
        first = manager.save()
        manager.wait()
        caplog.clear()
        with limited_files(4096):
            assert bool(manager.save()) == background  # the thread has not failed yet
            manager.wait()
        assert len([one for one in caplog.messages if "the program continues" in one]) == (comm.rank == 0)
        assert manager.latest_checkpoint == first == manager.restore_or_initialize()
        comm.Barrier()
        assert manager.save() == str(folder / "ckpt-2")


@pytest.mark.ranks(3)
def test_disk_that_does_not_answer_is_an_error_after_the_time_of_files(comm, folder, monkeypatch):
    goes_on = Event()
    monkeypatch.setenv("MPIDIST_IO_TIMEOUT", "1")
    with Strategy(comm=comm) as strategy, strategy.scope():
        manager = CheckpointManager(Checkpoint(own=np.full(9, comm.rank)), folder, background=True)
        if comm.rank == 1:
            monkeypatch.setattr(saving, "write_part", lambda *arguments: goes_on.wait(60))
        manager.save()
        with raises_everywhere(comm, TimeoutError, r"1 s \(MPIDIST_IO_TIMEOUT\)"):  # of another rank on a slow machine
            manager.wait()
        goes_on.set()


@contextmanager
def limited_files(nbytes):
    """Let no file of this process grow beyond a size in the body."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))  # Python ignores the signal
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
