"""Who may read the files of a checkpoint, and what is said if the system refuses one."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from support.everywhere import raises_everywhere
from support.ranks import Intracomm

from mpidist import MultiWorkerMirroredStrategy
from mpidist.checkpoint import Checkpoint, CheckpointManager, saving

pytestmark = [pytest.mark.core, pytest.mark.ranks(1, 3)]


def test_files_may_be_read_by_whom_the_umask_allows(comm: Intracomm, folder: Path) -> None:
    before = os.umask(0o027)
    try:
        with MultiWorkerMirroredStrategy(comm=comm) as strategy, strategy.scope():
            path = Path(Checkpoint(weights=np.zeros(3), own=np.full(3, comm.rank)).write(folder / "one"))
    finally:
        os.umask(before)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in path.iterdir()} == dict.fromkeys(
        os.listdir(path), oct(0o640)
    )
    comm.Barrier()


@pytest.mark.parametrize("name", ["rank-0.safetensors", "rank-0.json"])
def test_file_that_may_not_be_read_is_not_passed_over_as_damaged(comm: Intracomm, folder: Path, name: str) -> None:
    """A link to itself, which root may not read either."""
    with MultiWorkerMirroredStrategy(comm=comm) as strategy, strategy.scope():
        manager = CheckpointManager(Checkpoint(weights=np.zeros(3)), folder)
        for number in (1, 2):
            path = Path(manager.save(number))
        if comm.rank == 0:
            (path / name).unlink()
            (path / name).symlink_to(name)
        comm.Barrier()
        with raises_everywhere(comm, OSError, f"{os.strerror(errno.ELOOP)}.*{name}"):
            manager.restore_or_initialize(skip_broken=True)


def test_error_of_a_full_disk_names_the_file_and_leaves_the_old_one(comm: Intracomm, folder: Path) -> None:
    """A limit of the size of files stands for the disk: the system refuses the rest of the write."""
    with MultiWorkerMirroredStrategy(comm=comm) as strategy, strategy.scope():
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
def test_program_goes_on_when_the_disk_is_full_if_it_wants(
    comm: Intracomm, folder: Path, background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with MultiWorkerMirroredStrategy(comm=comm) as strategy, strategy.scope():
        checkpoint = Checkpoint(weights=np.zeros(100_000), own=np.full(9, comm.rank))
        manager = CheckpointManager(checkpoint, folder, background=background, on_error="warn")
        first = manager.save()
        manager.wait()
        caplog.clear()
        with limited_files(4096):
            assert bool(manager.save()) == background  # the thread has not failed yet
            manager.wait()
        assert len([one for one in caplog.messages if "the program goes on" in one]) == (comm.rank == 0)
        assert manager.latest_checkpoint == first == manager.restore_or_initialize()
        comm.Barrier()
        assert manager.save() == str(folder / "ckpt-2")


@pytest.mark.ranks(3)
def test_disk_that_does_not_answer_is_an_error_after_the_time_of_files(
    comm: Intracomm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = Event()
    monkeypatch.setenv("MPIDIST_IO_TIMEOUT", "1")
    with MultiWorkerMirroredStrategy(comm=comm) as strategy, strategy.scope():
        manager = CheckpointManager(Checkpoint(own=np.full(9, comm.rank)), folder, background=True)
        if comm.rank == 1:
            monkeypatch.setattr(saving, "write_part", lambda *arguments: goes_on.wait(60))
        manager.save()
        with raises_everywhere(comm, TimeoutError, r"1 s \(MPIDIST_IO_TIMEOUT\)"):  # of another rank on a slow machine
            manager.wait()
        goes_on.set()


@contextmanager
def limited_files(nbytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size in the body."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))  # Python ignores the signal
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
