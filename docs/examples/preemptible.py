"""A training that may be ended at any step, and continues from there: least squares, with data from a generator.

mpiexec -n 2 python preemptible.py checkpoints

`kill -USR1` to one of the ranks, or to Open MPI's or MPICH's mpiexec, makes all ranks save and end with exit code 75.
Started again, the training ends with the same bits as one without interruptions.
"""

import sys
import time

import numpy as np

import mpidist
from mpidist.checkpoint import Checkpoint, CheckpointManager

NUM_STEPS, SIZE, RATE = 200, 20, 0.05
PAUSE = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0  # seconds a step, to have time to disturb it

strategy = mpidist.MultiWorkerMirroredStrategy()
rank = strategy.rank
truth = np.arange(SIZE, dtype=float)
rng = np.random.default_rng([7, rank])  # data of this rank
with strategy.scope():
    weights = mpidist.Variable(np.zeros(SIZE))
    checkpoint = Checkpoint(weights=weights, rng=rng, step=0)
manager = CheckpointManager(checkpoint, sys.argv[1], max_to_keep=2)
handler = mpidist.checkpoint.PreemptionCheckpointHandler(manager)
manager.restore_or_initialize()


def train_step():
    inputs = rng.normal(size=(32, SIZE))
    gradient = inputs.T @ (inputs @ (weights.numpy() - truth)) / 32
    time.sleep(PAUSE)
    weights.assign_sub(RATE * strategy.reduce("mean", gradient))


while checkpoint.step < NUM_STEPS:
    handler.run(train_step)
    checkpoint.step += 1

if rank == 0:
    print(f"step {checkpoint.step}: weights {weights.numpy().tobytes().hex()[:32]}")
strategy.close()
