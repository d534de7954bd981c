"""What `doctor` lists as left by ended jobs, and removes: never what a process uses, nor what only looks alike."""

import mmap
import os
import subprocess
import sys
import tempfile

import pytest

from mpidist.__main__ import run_command
from mpidist.cli import leftovers
from mpidist.cli.leftovers import find_leftovers, leftovers_text, remove

pytestmark = pytest.mark.no_mpi

OLD = (0, 0)  # when something was changed, in seconds
NAMES = (
    "mpich_shm_ab12_0", "Intel_MPI_3DouPV", "sm_segment.a-host.1000.77ab0001.3", "vader_segment.h.0.1.2",
    "mpidist-0123456789abcdef",
)  # fmt: skip
OTHERS = ("mpich_shm_ab12_0.txt", "mpidist-weights", "sm_segment", "data.npy")
MAPS = """
import ctypes, os, sys
file = os.open(sys.argv[1], os.O_RDWR)
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
assert libc.mmap(None, 4096, 3, 1, file, 0) not in (None, ctypes.c_void_p(-1).value)
os.close(file)
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Let this folder be the one of shared memory, and that of temporary files."""
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def make(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(mmap.PAGESIZE))
    return path


def session_of(place, process, parent=""):
    """Make a folder as Open MPI's launcher does."""
    session = place / parent / (f"pid.{process}" if parent else f"ompi.{process}")
    (session / "0" / "0").mkdir(parents=True)
    make(session / "1" / "pmix-gds-shmem2.jobdata")
    os.utime(session, OLD)
    return session


@pytest.fixture
def ended():
    """Return the number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def found():
    return {one.path for one in find_leftovers()}


def test_leftovers_are_the_files_that_nobody_uses(place):
    left = {make(place / name) for name in NAMES}
    others = {make(place / name) for name in OTHERS}
    (place / "mpich_shm_1_0").symlink_to(place / "data.npy")
    assert found() == left
    assert leftovers_text(find_leftovers()).startswith("5 files, 20 KiB (")
    remove(find_leftovers())
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in others)


def test_leftovers_are_no_files_that_a_process_has_open_or_mapped(place):
    open_file, mapped = (make(place / name) for name in NAMES[:2])
    with (
        open_file.open("rb+"),
        subprocess.Popen(
            [sys.executable, "-c", MAPS, str(mapped)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        listed = find_leftovers()
        assert process.stdout is not None
        assert process.stdout.readline() == "mapped\n"
        assert found() == set()
        remove(listed)  # what was unused then
        assert mapped.exists()
        process.kill()
        process.wait()
        assert found() == {mapped}
    assert found() == {open_file, mapped}


@pytest.mark.parametrize("parent", ["", "ompi.a-host.1000"])
def test_leftovers_are_folders_of_launchers_that_have_ended(place, ended, parent):
    left, live = session_of(place, ended, parent), session_of(place, os.getpid(), parent)
    assert found() == {left}
    listed = find_leftovers()
    with next(left.glob("1/*")).open("rb+"):  # as a rank does that has lost its launcher
        assert found() == set()
        remove(listed)  # what was unused then
        assert left.exists()
    os.utime(left)
    assert found() == set()  # a launcher of another container may start there just now
    os.utime(left, OLD)
    remove(find_leftovers())
    assert not left.exists()
    assert live.exists()


def test_leftovers_are_no_folders_of_something_else(place, ended):
    (place / f"ompi.{ended}").mkdir()
    make(place / f"ompi.{ended}" / "notes.txt")
    os.utime(place / f"ompi.{ended}", OLD)
    make(place / f"ompi.{ended}.txt")
    assert found() == set()


def test_doctor_warns_of_leftovers_and_clean_removes_them(place, capfd):
    left = make(place / NAMES[0])
    assert run_command(["doctor"]) == 0
    told = f"ended jobs have left 1 file, 4 KiB ({left}); `mpidist doctor --clean` removes them"
    assert f"  warn  {told}" in capfd.readouterr().out
    assert left.exists()
    assert run_command(["doctor", "--clean"]) == 0
    assert f"removed leftovers of ended jobs: 1 file, 4 KiB ({left})" in capfd.readouterr().out
    assert not left.exists()
    assert run_command(["doctor", "--clean"]) == 0
    assert "ended jobs" not in capfd.readouterr().out


def test_leftovers_of_copies_are_removed_unless_a_rank_uses_them(place):
    copies = place / "mpidist-copies-0123456789abcdef"
    make(copies / "ckpt-1" / "rank-0.json")
    with make(copies / "in-use").open("rb"):
        assert not find_leftovers()
    remove(find_leftovers())
    assert not copies.exists()
