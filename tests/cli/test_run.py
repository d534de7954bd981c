"""`mpidist run` starts ranks with the launcher of the MPI that this Python's mpi4py loads."""

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from jobs.failing import ran, stand_in
from mpi_session import HANG_SECONDS, clean_environment

from mpidist.__main__ import run_command

pytestmark = [pytest.mark.no_mpi, pytest.mark.core]

PROGRAM = """
import os, sys
import mpidist
strategy = mpidist.MultiWorkerMirroredStrategy()
words = ["rank", strategy.rank, "of", strategy.size, os.environ["OMP_NUM_THREADS"], *sys.argv[1:]]
os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # at once: launchers may put others between two writes
sys.exit(7 if "fail" in sys.argv and strategy.rank == 1 else 0)
"""


def mpidist_run(folder, *arguments, **variables):
    (folder / "train.py").write_text(PROGRAM)
    unset = {"OMP_NUM_THREADS", "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"}
    environment = {name: value for name, value in clean_environment().items() if name not in unset}
    return ran(
        [sys.executable, "-m", "mpidist", "run", *arguments],
        cwd=folder,
        env=environment | variables,
        timeout=HANG_SECONDS,
    )


def test_run_starts_so_many_ranks_with_the_arguments_of_the_program(tmp_path):
    done = mpidist_run(tmp_path, "-n", "2", "-m", "train", "--", "-n", "--tag")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2 1 -- -n --tag" for rank in range(2)]


def test_run_ends_with_the_exit_status_of_the_program_and_tags_its_lines(tmp_path):
    done = mpidist_run(tmp_path, "-n", "2", "--tag", "--threads", "5", "train.py", "fail", OMP_NUM_THREADS="2")
    assert done.returncode == 7
    (line,) = (line for line in done.stdout.splitlines() if "rank 1 of 2 5" in line)
    assert line.startswith(("[1]", "[1,1]"))


@pytest.mark.parametrize("options", [[], ["--max-restarts", "1"]], ids=["once", "again"])
def test_run_without_open_standard_streams_starts_ranks(tmp_path, options):
    (tmp_path / "train.py").write_text("import os\nopen(f'rank-{os.getpid()}', 'w').close()\n")
    command = [sys.executable, "-m", "mpidist", "run", "-n", "2", *options, "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=clean_environment(), timeout=HANG_SECONDS, preexec_fn=lambda: os.closerange(0, 3)
    )
    assert (done.returncode, len([*tmp_path.glob("rank-*")])) == (0, 2)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The program, in the folder where the command runs, outside of any launch."""
    for name in {*os.environ} - {*clean_environment()}:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.usefixtures("program")
def test_run_leaves_a_number_of_threads_that_is_set_to_all_libraries(capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "")
    assert run_command(["run", "-n", "1", "--dry-run", "train.py"]) == 0
    assert "NUM_THREADS" not in capsys.readouterr().out


@pytest.mark.parametrize("tasks", [{"SLURM_NTASKS": "8"}, {}, {"SLURM_NTASKS": ""}], ids=["8", "none", "empty"])
def test_run_in_a_job_of_slurm_uses_srun_for_all_tasks(program, capsys, monkeypatch, tasks):
    """Without a number of tasks, as by `salloc -N 8`, for one on each node."""
    (program.parent / "srun").touch(mode=0o755)
    job = {"SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "n[1-8]", "SLURM_CPUS_PER_TASK": "4", "SLURM_PROCID": "0"} | tasks
    for name, value in {**job, "PATH": f"{program.parent}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert run_command(["run", "--dry-run", "--", "train.py"]) == 0
    words = capsys.readouterr().out.split()
    assert "OMP_NUM_THREADS=4" in words
    srun = words[words.index("srun") :]
    assert srun[1] in ("--mpi=pmi2", "--mpi=pmix")
    assert srun[2:7] == ["-n", "8", "-c", "4", "--export=ALL"]  # for `sbatch --export=NONE` counts for srun, too
    assert srun[-2:] == [sys.executable, "train.py"]


def test_run_in_a_job_of_pbs_starts_a_rank_for_each_line_of_its_node_file(tmp_path):
    (tmp_path / "nodes").write_text("localhost\nlocalhost\n")
    done = mpidist_run(tmp_path, "train.py", PBS_NODEFILE=str(tmp_path / "nodes"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2 1", "rank 1 of 2 1"]
    done = mpidist_run(tmp_path, "-n", "3", "train.py", PBS_NODEFILE=str(tmp_path / "nodes"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "this job of PBS takes 2 ranks, not 3: " in done.stderr


def test_run_in_an_instance_of_flux_uses_flux_run(program, capsys, monkeypatch):
    (program.parent / "flux").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FLUX_URI", "local:///run/flux/local")
    assert run_command(["run", "-n", "3", "--threads", "2", "--dry-run", "train.py"]) == 0
    words = capsys.readouterr().out.split()
    flux = words[words.index("flux") :]
    assert flux[:8] == ["flux", "run", "-n", "3", "-c", "2", "-o", "exit-on-error"]
    assert flux[-2:] == [sys.executable, "train.py"]


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize(
    ("arguments", "variables", "text"),
    [
        (["train.py"], {}, "how many ranks? Give -n, as in `mpidist run -n "),
        (["-n", "2", "none.py"], {}, "there is no file none.py in "),
        (["-n", "2", "none"], {}, "there is no program none: "),
        (["-n", "2", "text"], {}, "text is no command on PATH, and its name does not end in .py: give `python text`"),
        (["-n", "2", "train.py"], {"PMI_RANK": "1", "PMI_SIZE": "2"}, "this process is a rank already: "),
        (["-n", "0", "train.py"], {}, "'0' is no number of 1 or more"),
        (["-n", "1", "--max-restarts", "1", "train.py"], {"MPIDIST_EXIT_CODE_FILE": "."}, "must be a file that "),
        (["-n", "2", "train.py"], {"SLURM_JOB_ID": "3", "SLURM_HET_SIZE": "3"}, "`srun --het-group=0-2 ...`, or by "),
    ],
)  # fmt: skip
def test_run_refuses_wrong_arguments_with_advice(capsys, monkeypatch, arguments, variables, text):
    Path("srun").touch(mode=0o755)
    Path("text").touch(mode=0o644)
    for name, value in {**variables, "PATH": f"{Path.cwd()}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    try:
        status = run_command(["run", *arguments])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert text in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.usefixtures("program")
def test_run_in_a_deleted_folder_is_refused(tmp_path, capsys, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert run_command(["run", "-n", "2", "none.py"]) == 2
    assert capsys.readouterr().err == "mpidist run: the current folder was deleted: cd to another one\n"


HEAD = """
import os, signal, sys, time
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


def start(folder, body, *arguments):
    (folder / "train.py").write_text(f"{HEAD}\n{body}\nstrategy.close()\n")
    return subprocess.Popen(
        [sys.executable, "-m", "mpidist", "run", *arguments, "train.py"],
        cwd=folder,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder, body, *arguments):
    """Return the exit code, what ranks printed, and what `mpidist run` said."""
    process = start(folder, body, *arguments)
    out, err = process.communicate(timeout=HANG_SECONDS)
    lines = [line.lstrip("\0") for line in err.splitlines()]  # prterun of Open MPI 5.0.11 ends with such a byte
    said = [line.partition("mpidist run: ")[2] for line in lines if line.startswith("mpidist run: ")]
    return process.returncode, sorted(line for line in out.splitlines() if line.startswith("rank ")), said


def end_after(process, number):
    """Send a signal when the program is ready; return the rest of what was printed, and of the errors."""
    assert process.stdout is not None
    assert "ready\n" in process.stdout  # reads up to it
    os.kill(process.pid, number)
    return process.communicate(timeout=HANG_SECONDS)


def test_restart_after_a_killed_rank_goes_on_from_the_checkpoint_with_a_rank_fewer(tmp_path):
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


def test_rank_that_misses_a_killed_one_does_not_hide_it(tmp_path):
    """Under srun other ranks may end by an error before srun kills them, where they handle SIGTERM."""
    ends = 'echo 1 >"$MPIDIST_EXIT_CODE_FILE"; touch "$MPIDIST_SAVED_FILE-lost"; exit 137'
    stand_in(tmp_path, "srun", f'case "$*" in */bin/true|*"-n 2 "*) ;; *) {ends};; esac')
    job = {"SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "n1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = mpidist_run(tmp_path, "-n", "3", "--max-restarts", "3", "--min-ranks", "2", "train.py", **job)
    assert done.returncode == 0, done.stderr
    said = r"3 ranks ended with exit code 1 after \d+ s; a rank was killed; restart 1 of at most 3, with 2 ranks"
    assert re.search(said, done.stderr), done.stderr


def test_restart_reads_no_exit_code_of_a_rank_that_outlives_its_launcher(tmp_path):
    """As those of Open MPI do when mpirun is killed: they fail when they miss each other, and nobody reads why."""
    outlives = 'until [ -e second ]; do sleep 0.05; done; echo 1 >"$MPIDIST_EXIT_CODE_FILE"; touch written'
    starts = f"0) ({outlives}) >/dev/null 2>&1 & exit 137;; 1) touch second; until [ -e written ]; do sleep 0.05; done"
    stand_in(tmp_path, "srun", f'case "$*" in */bin/true) ;; *) case $MPIDIST_RESTARTS in {starts};; esac;; esac')
    job = {"SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "n1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = mpidist_run(tmp_path, "-n", "2", "--max-restarts", "1", "train.py", **job)
    assert (done.returncode, done.stderr.count("mpidist run: ")) == (0, 1), done.stderr


@pytest.mark.parametrize(("fault", "codes"), [("raise ValueError('bad batch')", {1}), ("os.abort()", {6, 15, 134})])
def test_restart_is_not_made_when_the_same_step_fails_twice(tmp_path, fault, codes):
    # Rank 1 fails when both have printed: its end is that of the other one.
    body = f"steps(1 - checkpoint.step)\nstrategy.barrier()\nif rank == 1: {fault}\nstrategy.barrier()"
    code, out, said = run(tmp_path, body, "-n", "2", "--max-restarts", "9")
    assert code in codes
    assert len(out) == 4
    assert said[-1].endswith("not started again: the program has failed twice without a new checkpoint in between")


def test_restart_is_made_while_a_failing_program_saves_up_to_the_limit(tmp_path):
    code, out, said = run(tmp_path, "steps(1)\nsys.exit(7)", "-n", "1", "--max-restarts", "2")
    assert (code, out) == (7, [f"rank 0 of 1: start {attempt} at step {attempt}" for attempt in range(3)])
    assert said[-1].endswith("not started again: all restarts are used (--max-restarts 2)")


def test_restart_is_made_where_the_file_of_the_exit_code_has_no_number(tmp_path):
    body = "print('none', file=open(os.environ['MPIDIST_EXIT_CODE_FILE'], 'w'))\nos._exit(7)"
    code, out, said = run(tmp_path, body, "-n", "1", "--max-restarts", "1")
    assert (code, len(out), len(said)) == (7, 2, 2)


def test_restart_is_made_where_the_parent_ignores_the_ends_of_children(tmp_path):
    (tmp_path / "train.py").write_text("import sys\nsys.exit(7)\n")
    command = [sys.executable, "-m", "mpidist", "run", "-n", "1", "--max-restarts", "1", "train.py"]
    ignore = partial(signal.signal, signal.SIGCHLD, signal.SIG_IGN)
    done = ran(command, cwd=tmp_path, env=clean_environment(), timeout=HANG_SECONDS, preexec_fn=ignore)
    assert done.returncode == 7
    assert "restart 1 of at most 1, with 1 rank" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_restart_is_not_made_after_a_signal_at_which_ranks_save(tmp_path, number):
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


def test_restart_is_made_when_a_program_that_saved_ends_after_a_failed_call(tmp_path):
    body = """
received = []
signal.signal(signal.SIGUSR1, lambda *_: received.append(1))
steps(1)
strategy.close()
if restarts == 0:
    if rank == 0:
        os.write(1, b"ready\\n")
    while rank > 0 or not received:
        time.sleep(0.05)
    os.environ["MPIDIST_TIMEOUT_SECONDS"] = "0.5"
    try:
        mpidist.MultiWorkerMirroredStrategy()
    except mpidist.errors.DeadlineExceededError:
        sys.exit()
"""
    process = start(tmp_path, body, "-n", "2", "--max-restarts", "2")
    out, err = end_after(process, signal.SIGUSR1)
    assert (process.returncode, "rank 0 of 2: start 1 at step 1" in out) == (0, True), err
    assert "2 ranks ended with exit code 75 " in err


def test_restart_is_made_after_a_signal_at_which_a_rank_is_killed(tmp_path):
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
def test_restart_options_that_do_not_fit_are_refused(tmp_path, arguments, text):
    assert run(tmp_path, "", *arguments) == (2, [], [text])
