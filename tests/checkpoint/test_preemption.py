"""Jobs that are to be preempted: real ranks, real signals; all save the same step, and end with "try again"."""

import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from jobs.failing import PROJECT

from mpidist import Variable
from mpidist.checkpoint import Checkpoint, CheckpointManager
from mpidist.context_stack import parts_of
from mpidist.experimental import PreemptionCheckpointHandler

EXAMPLE = Path(PROJECT) / "docs/examples/preemptible.py"
HEAD = """
import os, signal, sys, time
import numpy as np
import mpidist
from mpidist.checkpoint import Checkpoint, CheckpointManager
heard = []
signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
strategy = mpidist.MultiWorkerMirroredStrategy()
rank = strategy.topology.rank
with strategy.scope():
    total = mpidist.Variable(np.zeros(3))
    checkpoint = Checkpoint(total=total, step=0)
manager = CheckpointManager(checkpoint, sys.argv[0] + ".saved", background=True)
def send(number=signal.SIGTERM):
    os.kill(os.getpid(), number)
def train(num_steps=6, before_call=lambda step: None, after_call=lambda step: None, **options):
    handler = mpidist.experimental.PreemptionCheckpointHandler(manager, **options)
    manager.restore_or_initialize()
    def one_step():
        before_call(checkpoint.step)
        total.assign_add(strategy.reduce("sum", np.ones(3)))
        after_call(checkpoint.step)
    while checkpoint.step < num_steps:
        handler.run(one_step)
        checkpoint.step += 1
    sys.stdout.write(f"rank {rank} ended at {checkpoint.step} with {total.numpy()[0]:.0f}\\n")
    strategy.close()
"""
WHILE_SAVING = """
real = manager.save
def save(number=None):
    send()
    path = real(number)
    send()
    return path
manager.save = save
train(before_call=lambda step: rank == 1 and step == 2 and send())
"""
WITHOUT_CALLS = """
handler = mpidist.experimental.PreemptionCheckpointHandler(manager)
for checkpoint.step in range(100):
    if rank == 1 and checkpoint.step == 2:
        send()
    handler.run(total.assign_add, np.full(3, 2.0))
"""
AT_ONE_RANK = "train(before_call=lambda step: rank == 1 and step == 2 and send())"
SIGNALS = {
    "over messages": (AT_ONE_RANK, 3),
    "not compared": (AT_ONE_RANK, 3),
    "after the call": ("train(after_call=lambda step: rank == 1 and step == 2 and send())", 4),
    "at all ranks, at other steps": ("train(before_call=lambda step: step == rank + 1 and send())", 2),
    "at all ranks, at once": ("train(before_call=lambda step: step == 1 and send())", 2),
    "twice, of two kinds": (
        "train(before_call=lambda step: step >= 1 and rank == 0 and (send(), send(signal.SIGUSR1)))",
        2,
    ),
    "before the first step": ("train(before_call=lambda step: step == 0 and rank == 0 and send())", 1),
    "while it saves": (WHILE_SAVING, 3),
    "at the end of its time": ("train(time_limit_seconds=0.0 if rank == 1 else None)", 1),
    "in steps without calls": (WITHOUT_CALLS, 16),
    "in another scope": ("with strategy:\n    train(before_call=lambda step: rank == 1 and step == 2 and send())", 3),
}


@pytest.mark.no_mpi
@pytest.mark.core
@pytest.mark.parametrize("when", SIGNALS)
def test_all_ranks_save_one_step_and_leave(job, tmp_path, when):
    """The exit code is written for a script whose launcher ends the others as soon as the first one has left."""
    body, step = SIGNALS[when]
    variables = {"over messages": {"MPIDIST_TRANSPORT": "mpi"}, "not compared": {"MPIDIST_CHECK": "0"}}.get(when, {})
    ended = job(body, ranks=2, head=HEAD, MPIDIST_EXIT_CODE_FILE=f"{tmp_path}/code", **variables)
    assert ended.status == 75, ended.err
    assert (tmp_path / "code").read_text() == "75\n"
    assert "Traceback" not in ended.err
    assert len(re.findall("leaving with exit code 75", ended.err)) == 1
    assert "over" not in when or "SIGTERM on rank 1: saved" in ended.err
    checkpoint = Checkpoint(total=Variable(np.zeros(3)), step=0)
    assert CheckpointManager(checkpoint, tmp_path / "program.py.saved").restore_or_initialize()
    assert (checkpoint.step, checkpoint.total.numpy().tolist()) == (step, [2.0 * step] * 3)


@pytest.mark.no_mpi
@pytest.mark.core
@pytest.mark.parametrize("background", [False, True])
def test_preemption_without_a_checkpoint_is_a_failure(job, background):
    """Though the training goes on after other saves that fail: after code 75 it would go on from an old checkpoint."""
    body = f"""
manager = CheckpointManager(checkpoint, sys.argv[0] + ".saved", background={background}, on_error="warn")
def fill(step):
    if rank == 1 and step == 2:
        open(manager.directory, "w").close()
        send()
train(before_call=fill)
"""
    ended = job(body, ranks=2, head=HEAD)
    assert ended.status == 1, ended.err
    assert re.search("(FileExists|NotADirectory)Error: .*program.py.saved", ended.err), ended.err
    assert "leaving with" not in ended.err


@pytest.mark.no_mpi
@pytest.mark.core
def test_preemption_check_counts_started_calls_that_are_not_joined(job):
    """The second is joined after the first is done: on one rank before the next 16 steps, on the other in them."""
    body = """
handler = mpidist.experimental.PreemptionCheckpointHandler(manager)
started = []
def start():
    context = mpidist.get_replica_context()
    started.extend(context.start_all_reduce("sum", np.ones(4)) for _ in range(2))
def one_step(number):
    if number == 16:
        time.sleep(0.5 * rank)
        strategy.run(start)
    if number == 20:
        print([call.wait()[0] for call in started])
for number in range(1, 40):
    handler.run(one_step, number)
"""
    ended = job(body, ranks=2, head=HEAD)
    assert ended.status == 0, ended.err


@pytest.mark.no_mpi
@pytest.mark.core
def test_in_the_last_step_the_program_ends(job):
    ended = job("train(before_call=lambda step: step == 5 and send())", ranks=2, head=HEAD)
    assert (ended.status, "ended at 6" in ended.out) == (0, True), ended.err


@pytest.mark.no_mpi
def test_users_handler_is_called_and_another_code_is_taken(job):
    body = """
import atexit
atexit.register(lambda: sys.stdout.write(f"rank {rank} heard {heard}\\n"))
train(before_call=lambda step: rank == 0 and step == 1 and send(signal.SIGUSR1), exit_code=42)
"""
    ended = job(body, ranks=2, head=HEAD)
    assert ended.status == 42, ended.err
    assert f"rank 0 heard [{int(signal.SIGUSR1)}]" in ended.out


@pytest.mark.no_mpi
def test_signal_of_the_flight_recorder_is_a_setting(job):
    body = """
handlers = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)]
sys.stdout.write(f"{[handler is signal.SIG_DFL for handler in handlers]}\\n")
"""
    for value, shown in {"": [False, True], "usr2": [True, False], "off": [True, True]}.items():
        ended = job(body, ranks=2, MPIDIST_FLIGHT_SIGNAL=value)
        assert ended.out.splitlines() == [str(shown)] * 2, ended.err


@pytest.mark.no_mpi
@pytest.mark.core
def test_example_ends_with_the_same_bits_as_without_preemption(job, tmp_path):
    def run(folder, *arguments, signalled=""):
        body = f"import runpy\nsys.argv[1:] = {[str(tmp_path / folder), *arguments]}\n{signalled}\n"
        body += f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
        return job(body, ranks=2, head="import os, signal, sys\n")

    soon = """
import threading, time, mpi4py.MPI
def send():
    while signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN:  # until the example handles it
        time.sleep(0.01)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGUSR1)
if mpi4py.MPI.COMM_WORLD.rank == 1:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    threading.Thread(target=send, daemon=True).start()
"""
    undisturbed = run("one")
    preempted = run("two", "0.5", signalled=soon)
    assert (undisturbed.status, preempted.status) == (0, 75), preempted.err
    assert run("two").out == undisturbed.out != ""


@pytest.mark.no_mpi
def test_handler_alone_exits_at_the_next_step_and_refuses_bad_arguments(tmp_path, monkeypatch, caplog):
    of_real_time = signal.SIGRTMIN + 1
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, of_real_time)}
    try:
        checkpoint = Checkpoint(step=0, array=np.zeros(2))
        manager = CheckpointManager(checkpoint, tmp_path / "runs")
        with pytest.raises(TypeError, match="takes a CheckpointManager"):
            PreemptionCheckpointHandler(checkpoint)
        for code in (75.0, True, "75"):  # with a code that is no int, Python prints it and ends with 1
            with pytest.raises(TypeError, match="exit_code must be a whole number"):
                PreemptionCheckpointHandler(manager, exit_code=code)
        for wrong in ({"exit_code": 256}, {"exit_code": -1}, {"time_limit_seconds": -1.0}, {"grace_seconds": -1.0}):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                PreemptionCheckpointHandler(manager, **wrong)
        for some in (signal.SIGUSR1, "TERM", [signal.SIGTERM, signal.SIGKILL], [1000]):
            with pytest.raises(ValueError, match="signals must be signals that a program can handle"):
                PreemptionCheckpointHandler(manager, signals=some)
        assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
        with pytest.raises(SystemExit) as leaving:
            PreemptionCheckpointHandler(
                manager, signals=(), exit_code=np.int64(42), time_limit_seconds=0
            ).save_checkpoint_if_preempted()
        assert type(leaving.value.code) is int
        handler = PreemptionCheckpointHandler(manager, checkpoint_number=lambda: 7)
        assert handler.run(lambda one, *, other: one + other, 1, other=2) == 3
        assert handler.total_run_calls == 1
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit) as leaving:
            handler.save_checkpoint_if_preempted()
        assert leaving.value.code == 75
        assert Path(manager.latest or "").name == "ckpt-7"
        assert "the end of the time on rank 0" in caplog.text
        for passed in (int(time.time()) - 1, 0):
            monkeypatch.setenv("SLURM_JOB_END_TIME", str(passed))
            PreemptionCheckpointHandler(manager, signals=()).run(lambda: None)
            assert f"SLURM_JOB_END_TIME={passed} has passed, so it is no time limit" in caplog.text
        monkeypatch.delenv("SLURM_JOB_END_TIME")
        PreemptionCheckpointHandler(manager, signals=[of_real_time]).run(signal.raise_signal, of_real_time)
        of_next_loop = PreemptionCheckpointHandler(manager, signals=())
        with pytest.raises(SystemExit):
            of_next_loop.run(lambda: None)
        assert f"signal {int(of_real_time)} on rank 0" in caplog.text
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


@pytest.mark.ranks(3)
def test_handler_step_adds_no_collective_call(comm, tmp_path, strategy):
    """A notice goes with the calls of the step."""
    with strategy.scope():
        checkpoint = Checkpoint(step=0)
    handler = PreemptionCheckpointHandler(CheckpointManager(checkpoint, tmp_path), signals=())
    agreement, num_steps = parts_of(strategy).group.agreement, 40
    before = agreement.sequence
    for _ in range(num_steps):
        assert handler.run(strategy.reduce, "sum", 1) == comm.size
    assert agreement.sequence - before == num_steps
