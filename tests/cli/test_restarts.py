"""`mpidist run --max-restarts`: which ends of a job are followed by another start, and with how many ranks."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mpi_session import HANG_SECONDS, clean_environment

pytestmark = [pytest.mark.no_mpi, pytest.mark.core]

HEAD = """
import os, signal, sys
import numpy as np
import mpidist
from mpidist.checkpoint import Checkpoint, CheckpointManager

strategy = mpidist.MultiWorkerMirroredStrategy()
with strategy.scope():
    checkpoint = Checkpoint(step=0)
manager = CheckpointManager(checkpoint, "saved")
manager.restore_or_initialize()
rank, restarts = strategy.rank, strategy.restarts
os.write(1, f"rank {rank} of {strategy.size}: start {restarts} at step {checkpoint.step}\\n".encode())

def steps(number):
    for _ in range(number):
        strategy.reduce("sum", 1.0)
        checkpoint.step += 1
        manager.save()
"""


def start(folder: Path, body: str, *arguments: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(f"{HEAD}\n{body}\nstrategy.close()\n")
    return subprocess.Popen(
        [sys.executable, "-m", "mpidist", "run", *arguments, "train.py"],
        cwd=folder,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, body: str, *arguments: str) -> tuple[int, list[str], list[str]]:
    """Return the exit code, what ranks printed, and what `mpidist run` said."""
    process = start(folder, body, *arguments)
    out, err = process.communicate(timeout=HANG_SECONDS)
    said = [line.partition("mpidist run: ")[2] for line in err.splitlines() if line.startswith("mpidist run: ")]
    return process.returncode, sorted(line for line in out.splitlines() if line.startswith("rank ")), said


def end_after(process: subprocess.Popen[str], number: signal.Signals) -> tuple[str, str]:
    """Send a signal when the program is ready; return the rest of what was printed, and of the errors."""
    assert process.stdout is not None
    assert "ready\n" in process.stdout  # reads up to it
    os.kill(process.pid, number)
    return process.communicate(timeout=HANG_SECONDS)


def test_restart_after_a_killed_rank_goes_on_from_the_checkpoint_with_a_rank_fewer(tmp_path: Path) -> None:
    body = "steps(2)\nif rank == 0 and restarts < 2: os.kill(os.getpid(), signal.SIGKILL)\nstrategy.barrier()"
    code, out, said = run(tmp_path, body, "-n", "3", "--max-restarts", "3", "--min-ranks", "2")
    assert code == 0
    assert out == sorted(
        f"rank {rank} of {size}: start {attempt} at step {2 * attempt}"
        for attempt, size in enumerate([3, 2, 2])
        for rank in range(size)
    )
    first, second = said
    assert first.startswith("3 ranks ended with exit code ")
    assert first.endswith("s; a rank was killed; restart 1 of at most 3, with 2 ranks")
    assert second.endswith("s; a rank was killed; restart 2 of at most 3, with 2 ranks")


@pytest.mark.parametrize(("fault", "codes"), [("raise ValueError('bad batch')", {1}), ("os.abort()", {6, 15, 134})])
def test_restart_is_not_made_when_the_same_step_fails_twice(tmp_path: Path, fault: str, codes: set[int]) -> None:
    # Rank 1 fails when both have printed: its end is that of the other one.
    body = f"steps(1 - checkpoint.step)\nstrategy.barrier()\nif rank == 1: {fault}\nstrategy.barrier()"
    code, out, said = run(tmp_path, body, "-n", "2", "--max-restarts", "9")
    assert code in codes
    assert len(out) == 4
    assert said[-1].endswith("not started again: the program has failed twice without a new checkpoint in between")


def test_restart_is_made_while_a_failing_program_saves_up_to_the_limit(tmp_path: Path) -> None:
    code, out, said = run(tmp_path, "steps(1)\nsys.exit(7)", "-n", "1", "--max-restarts", "2")
    assert (code, out) == (7, [f"rank 0 of 1: start {attempt} at step {attempt}" for attempt in range(3)])
    assert said[-1].endswith("not started again: all restarts are used (--max-restarts 2)")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_restart_is_not_made_after_a_signal_at_which_ranks_save(tmp_path: Path, number: signal.Signals) -> None:
    body = """
handler = mpidist.checkpoint.PreemptionCheckpointHandler(manager)
handler.run(lambda: None)
os.write(1, b"ready\\n")
while True:
    handler.run(lambda: strategy.barrier())
"""
    process = start(tmp_path, body, "-n", "2", "--max-restarts", "2")
    out, err = end_after(process, number)
    assert "start 1" not in out
    assert process.returncode == 75 or number == signal.SIGTERM  # at which some launchers kill the ranks themselves
    assert process.returncode != 0
    assert "not started again: " in err


def test_restart_is_made_after_a_signal_at_which_a_rank_is_killed(tmp_path: Path) -> None:
    body = """
signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
os.write(1, b"ready\\n")
if restarts == 0:
    signal.pause()
"""
    process = start(tmp_path, body, "-n", "1", "--max-restarts", "2")
    out, _ = end_after(process, signal.SIGUSR1)
    assert process.returncode == 0
    assert "start 1" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-n", "2", "--min-ranks", "1"], "--min-ranks is for ranks that are started again: give --max-restarts, too"),
        (["-n", "2", "--max-restarts", "1", "--min-ranks", "3"], "--min-ranks 3 is more than the 2 ranks of the start"),
    ],
)
def test_restart_options_that_do_not_fit_are_refused(tmp_path: Path, arguments: list[str], text: str) -> None:
    assert run(tmp_path, "", *arguments) == (2, [], [text])
