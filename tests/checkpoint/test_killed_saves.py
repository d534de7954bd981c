"""Saves that are killed at any change of the file system which they make: a whole checkpoint stays, and no litter."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jobs.failing import clean_environment, ran
from mpi_session import HANG_SECONDS

pytestmark = pytest.mark.no_mpi

COMPILER = "gcc"
NUM_RANKS = 2
STRIDE = 4  # of the changes of a save by several ranks that are tried
MOST_CHANGES = 200

# An attempt restores, requires that all that is there is whole, saves, and requires that nothing else is left; then it
# saves another number, and that number again, and is killed while it does. Marks count up, and tell what was saved.
ATTEMPT = """
import ctypes, os, sys
import numpy as np
import mpidist
from mpidist.checkpoint import Checkpoint, CheckpointManager

killer = ctypes.CDLL(None)
NEVER = 0
FOLDER, LOG, BACKGROUND = {folder!r}, {log!r}, {background}
PARTS = [f"rank-{{rank}}" for rank in range({ranks})]
SIZE = 300_000 if {ranks} > 1 else 1000  # so that each rank writes a piece
FILES = sorted(["manifest.json", *(f"{{part}}.{{end}}" for part in PARTS for end in ("json", "safetensors"))])

def log(rank, *words):
    if rank == 0:
        with open(LOG, "a") as lines:
            print(*words, file=lines)

def attempt(number, change, rank, killed_rank, loses, barrier):
    killer.kill_at_change(NEVER, FOLDER.encode(), loses)
    weights, own = np.zeros(SIZE), np.zeros(3)
    checkpoint = Checkpoint(weights=weights, own=own, mark=0)
    manager = CheckpointManager(checkpoint, FOLDER, 2, background=BACKGROUND)

    def save(checkpoint_number):
        checkpoint.mark += 1
        weights[:], own[:] = checkpoint.mark, checkpoint.mark + rank
        log(rank, "begins", checkpoint.mark)
        manager.save(checkpoint_number)
        weights[:] = own[:] = -1
        manager.wait()
        log(rank, "saved", checkpoint.mark)

    path = manager.restore_or_initialize()
    assert bool(path) == (number > 1)
    for path in manager.checkpoints:
        checkpoint.restore(path)
        assert (weights == checkpoint.mark).all() and (own == checkpoint.mark + rank).all(), (path, checkpoint.mark)
    log(rank, "restored", checkpoint.mark)
    save(3 * number)
    save(3 * number + 1)
    barrier()
    if rank == 0:
        names = set(os.listdir(FOLDER)) - {{".ckpt.lock"}}
        found = {{name: sorted(os.listdir(os.path.join(FOLDER, name))) for name in names}}
        assert found == {{f"ckpt-{{3 * number}}": FILES, f"ckpt-{{3 * number + 1}}": FILES}}, found
    barrier()
    if rank == killed_rank:
        killer.kill_at_change(change, FOLDER.encode(), loses)
    save(3 * number + 2)
    save(3 * number + 2)
    barrier()
    killer.count_no_more()
    log(rank, "done")
"""
ONE_RANK = """
for number in range(1, {most}):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            attempt(number, number, 0, 0, {loses}, lambda: None)
            status = 0
        finally:
            if status:
                sys.excepthook(*sys.exc_info())
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        sys.exit(os.waitstatus_to_exitcode(status))
"""
SEVERAL_RANKS = """
with mpidist.MultiWorkerMirroredStrategy() as strategy:
    with strategy.scope():
        attempt({attempt}, {number}, strategy.topology.rank, {killed_rank}, 0, strategy.barrier)
"""


@pytest.fixture(scope="module")
def killer(tmp_path_factory):
    """What is preloaded."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"there is no {COMPILER}")
    library = tmp_path_factory.mktemp("killer") / "kill_at_change.so"
    source = Path(__file__).with_name("kill_at_change.c")
    subprocess.run([COMPILER, "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return str(library)


def require_newest_was_restored(log):
    """Require that each attempt restored what was saved last, or what was begun after it."""
    saved = begun = 0
    for line in log.read_text().splitlines():
        word, _, mark = line.partition(" ")
        if word == "restored":
            assert int(mark) in (saved, begun), log.read_text()
            saved = begun = int(mark)
        elif word == "begins":
            begun = int(mark)
        elif word == "saved":
            saved = int(mark)


@pytest.mark.core
@pytest.mark.parametrize(("background", "loses"), [(False, False), (True, True)])
def test_one_process_that_is_killed_at_any_change(tmp_path, killer, background, loses):
    """With a loss of what was not synced, too, as when the power fails."""
    folder, log = tmp_path / "saved", tmp_path / "log"
    folder.mkdir()
    program = ATTEMPT.format(folder=f"{folder}", log=f"{log}", background=background, ranks=1)
    done = ran(
        [sys.executable, "-c", program + ONE_RANK.format(most=MOST_CHANGES, loses=int(loses))],
        env={**clean_environment(), "LD_PRELOAD": killer, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert log.read_text().endswith("done\n")
    require_newest_was_restored(log)
    said = done.stderr.splitlines()
    deaths = [line for line in said if line.startswith("killed at ")]
    assert all(line in deaths or "takes over the lock" in line for line in said), done.stderr
    assert len(deaths) > 40
    for what in ("write of", "half of a write of", "fsync", "rename", "mkdir", "unlink"):
        assert any(line.startswith(f"killed at {what} ") for line in deaths), what


@pytest.mark.long
@pytest.mark.timeout(5 * HANG_SECONDS)
@pytest.mark.parametrize(
    ("background", "killed_rank", "first"), [(False, 0, 1), (False, 1, 2), (True, 0, 3), (True, 1, 4)]
)
def test_rank_that_is_killed_at_any_change(job, tmp_path, killer, background, killed_rank, first):
    """Ranks that have something of their own to write; the others go on until MPI ends them."""
    folder, log = tmp_path / "saved", tmp_path / "log"
    folder.mkdir()
    program = ATTEMPT.format(folder=f"{folder}", log=f"{log}", background=background, ranks=NUM_RANKS)
    for attempt, number in enumerate(range(first, MOST_CHANGES, STRIDE), 1):
        body = SEVERAL_RANKS.format(attempt=attempt, number=number, killed_rank=killed_rank)
        ended = job(body, head=program, ranks=NUM_RANKS, LD_PRELOAD=killer)
        assert "AssertionError" not in ended.err, ended.err
        if ended.status == 0:
            break
        assert "killed at " in ended.err, ended.err
    assert log.read_text().endswith("done\n"), ended
    assert attempt > 1
    require_newest_was_restored(log)
