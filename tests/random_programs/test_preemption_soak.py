"""A soak: a training is preempted, or loses ranks, twenty times, and goes on with other numbers of ranks."""

import re
import sys
from collections import Counter

import numpy as np
import pytest
from jobs.failing import ran
from mpi_session import HANG_SECONDS, clean_environment

NUM_DISTURBANCES = 20
NUM_SAMPLES, NUM_EPOCHS = 96, 20
STEPS_PER_EPOCH = 10  # the last batch of an epoch is a smaller one
MOST_STEPS = 6  # that a job makes before it is preempted
HEAD = """
import hashlib, os, signal, sys, threading, time
import numpy as np
import mpidist
from mpidist import Batches
from mpidist.checkpoint import Checkpoint, CheckpointManager
"""
TRAINING = """
strategy = mpidist.MirroredStrategy(replicas=6)
rows = np.random.default_rng(3).normal(size=({samples}, 8))
with strategy.scope():
    weights = mpidist.Variable(np.zeros(8))
dataset = strategy.experimental_distribute_dataset(Batches((rows, np.arange({samples})), 10, seed=4))
checkpoint = Checkpoint(weights=weights, data=dataset)
manager = CheckpointManager(checkpoint, {folder!r}, max_to_keep=2, background={background})
handler = mpidist.experimental.PreemptionCheckpointHandler(manager)
manager.restore_or_initialize()
num_steps = 0

def disturb(at_step, seconds):
    while num_steps < at_step:
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGUSR1)

def train(batch):
    own, numbers = batch
    context = mpidist.get_replica_context()
    weights.assign_sub(0.01 * context.all_reduce("mean", weights.numpy() - own.sum(axis=0)))

if strategy.topology.rank == {disturbed}:
    threading.Thread(target=disturb, args=({at_step}, {seconds}), daemon=True).start()
while dataset.epoch < {epochs}:
    for batch in dataset:
        seen = strategy.gather(batch[1], axis=0)
        strategy.run(train, args=(batch,))
        if strategy.is_chief:
            with open({log!r}, "a") as log:
                log.write(f"{{dataset.epoch}}: {{' '.join(map(str, seen))}}\\n")
        time.sleep(0.005)
        num_steps += 1
        handler.save_checkpoint_if_preempted()
if strategy.is_chief:
    final = weights.numpy()
    print("weights", hashlib.sha256(final.tobytes()).hexdigest()[:16], bool(np.all(final != 0)))
strategy.close()
"""


def training(folder, *, disturbed=-1, at_step=0, seconds=0.0, background=False):
    return TRAINING.format(
        samples=NUM_SAMPLES,
        epochs=NUM_EPOCHS,
        folder=str(folder),
        log=f"{folder}.log",
        disturbed=disturbed,
        at_step=at_step,
        seconds=seconds,
        background=background,
    )


@pytest.mark.no_mpi
@pytest.mark.timeout(5 * HANG_SECONDS)
def test_preempted_training_has_the_weights_and_the_samples_of_one_that_was_not(job, tmp_path):
    undisturbed = job(training(tmp_path / "undisturbed"), head=HEAD, ranks=2)
    assert undisturbed.status == 0, undisturbed.err
    assert re.fullmatch(r"weights [0-9a-f]{16} True\n", undisturbed.out)
    draw = np.random.default_rng(5)
    folder, ranks = tmp_path / "preempted", 0
    for attempt in range(NUM_DISTURBANCES):
        ranks = int(draw.choice([number for number in range(1, 5) if number != ranks]))
        body = training(
            folder,
            disturbed=int(draw.integers(ranks)),
            at_step=int(draw.integers(MOST_STEPS + 1)),
            seconds=float(draw.uniform(0.0, 0.01)),
            background=bool(attempt % 2),
        )
        ended = job(body, head=HEAD, ranks=ranks)
        assert ended.status == 75, (attempt, ended)
    ended = job(training(folder), head=HEAD, ranks=3)
    assert (ended.status, ended.out) == (0, undisturbed.out), ended.err
    lines = [line.partition(": ")[::2] for line in (tmp_path / "preempted.log").read_text().splitlines()]
    seen = Counter((int(epoch), int(number)) for epoch, numbers in lines for number in numbers.split())
    assert seen == Counter((epoch, number) for epoch in range(NUM_EPOCHS) for number in range(NUM_SAMPLES))
    assert len(lines) == NUM_EPOCHS * STEPS_PER_EPOCH


# A rank is killed, or all ranks at once, while they start, make a step or save: at once or after some steps.
LOSSES = """
restarts = int(os.environ["MPIDIST_RESTARTS"])
draw = np.random.default_rng([5, restarts])
numbers = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
rank = int(next(os.environ[name] for name in numbers if name in os.environ))
of_all, early, killed, most = draw.integers([4, 4, 3, 9])
seconds = draw.random()
num_steps = 0

def kill():
    begun = time.monotonic()
    while num_steps < most and (early or time.monotonic() < begun + seconds):  # few steps, however fast they are
        time.sleep(0.001)
    time.sleep(seconds * 0.01)
    os.kill(os.getpid(), signal.SIGKILL)

if restarts < {losses} and (not of_all or rank == killed or (rank == 0 and not early)):
    threading.Thread(target=kill, daemon=True).start()
"""


@pytest.mark.no_mpi
@pytest.mark.timeout(5 * HANG_SECONDS)
def test_training_that_loses_ranks_has_the_weights_and_the_samples_of_one_that_did_not(job, tmp_path):
    undisturbed = job(training(tmp_path / "undisturbed"), head=HEAD, ranks=2)
    assert undisturbed.status == 0, undisturbed.err
    body = training(tmp_path / "lost")
    body = body.replace("        handler.save_checkpoint_if_preempted()", "        num_steps % 2 or manager.save()")
    (tmp_path / "train.py").write_text(HEAD + LOSSES.format(losses=NUM_DISTURBANCES) + body)
    ended = ran(
        [sys.executable, "-m", "mpidist", "run", "-n", "4", "--max-restarts", "40", "--min-ranks", "3", "train.py"],
        cwd=tmp_path,
        env=clean_environment(),
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith(undisturbed.out), ended.stderr  # launchers print to it, too
    assert f"restart {NUM_DISTURBANCES} of" in ended.stderr
    lines = (tmp_path / "lost.log").read_text().splitlines()
    assert len(lines) > NUM_EPOCHS * STEPS_PER_EPOCH, "some steps were made twice"
    assert list(dict.fromkeys(lines)) == (tmp_path / "undisturbed.log").read_text().splitlines()
