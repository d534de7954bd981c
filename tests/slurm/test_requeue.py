"""Training that is disturbed in a real Slurm: it is requeued, goes on, and ends as if nothing had happened."""

import re

import pytest
from mpi_session import HANG_SECONDS
from slurm.batch_jobs import LIBRARIES, PROJECT, submit
from slurm.emulated_cluster import EmulatedCluster

pytestmark = [pytest.mark.no_mpi, pytest.mark.long, pytest.mark.timeout(5 * HANG_SECONDS)]

EXAMPLE = PROJECT / "docs" / "examples" / "preemptible.py"
# The example, slowly in the attempts that are to be disturbed. It tells when all ranks have made a step.
PROGRAM = f"""
import os, runpy, sys
from mpidist.experimental import PreemptionCheckpointHandler

attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
original = PreemptionCheckpointHandler.run

def run(self, *arguments):
    if self.total_run_calls == 1 and os.environ["SLURM_PROCID"] == "0":
        print(f"attempt {{attempt}} works", flush=True)
    return original(self, *arguments)

PreemptionCheckpointHandler.run = run
sys.argv = ["preemptible.py", "checkpoints", "0.8" if attempt < int(sys.argv[1]) else "0"]
end = runpy.run_path({str(EXAMPLE)!r})
if os.environ["SLURM_PROCID"] == "0":
    print("bits", end["weights"].numpy().tobytes().hex())
"""
# The same, with a checkpoint after every step but the last ones.
SAVING = PROGRAM.replace(
    "    return original(self, *arguments)",
    """    if self.total_run_calls == 0 and os.environ["SLURM_PROCID"] == "0":
        print(f"attempt {attempt} begins at step {self._manager.checkpoint.step}", flush=True)
    if 0 < self._manager.checkpoint.step < 20:
        self._manager.save(self._manager.checkpoint.step)
    return original(self, *arguments)""",
)
# Saves all the time; what each rank has is its own, and equal to the number of the checkpoint.
SAVE = """
import sys
import numpy as np
import mpidist
from mpidist.checkpoint import Checkpoint, CheckpointManager

with mpidist.MultiWorkerMirroredStrategy() as strategy:
    rank, values = strategy.topology.rank, np.zeros(1_000_000)
    with strategy.scope():
        checkpoint = Checkpoint(values=values, number=0)
    manager = CheckpointManager(checkpoint, "saved", 1, background="background" in sys.argv)
    if manager.restore_or_initialize():
        assert (values == checkpoint.number + rank / 2).all()
    if rank == 0:
        print("restored", checkpoint.number, flush=True)
    while True:
        checkpoint.number += 1
        values[:] = checkpoint.number + rank / 2
        manager.save(checkpoint.number)
        manager.wait()
        if rank == 0:
            print("saved", checkpoint.number, flush=True)
        if "work" not in sys.argv:
            break
"""
# Slowly in the attempts that are to be disturbed: on any number of ranks the weights are those of six replicas.
REPLICAS = """
import os, sys, time
import numpy as np
import mpidist
from mpidist.checkpoint import Checkpoint, CheckpointManager

attempt, rank = int(os.environ.get("SLURM_RESTART_COUNT", "0")), int(os.environ["SLURM_PROCID"])
pause = 3.0 if attempt < int(sys.argv[1]) else 0.0
rows = np.random.default_rng(3).normal(size=(96, 8))
with mpidist.MultiWorkerMirroredStrategy(replicas=6) as strategy:
    with strategy.scope():
        weights = mpidist.Variable(np.zeros(8))
    dataset = strategy.experimental_distribute_dataset(mpidist.Batches(rows, 10, seed=4))
    manager = CheckpointManager(Checkpoint(weights=weights, data=dataset), "saved", max_to_keep=2)
    handler = mpidist.experimental.PreemptionCheckpointHandler(manager)
    manager.restore_or_initialize()

    def train(batch):
        context = mpidist.get_replica_context()
        weights.assign_sub(0.01 * context.all_reduce("mean", weights.numpy() - batch.sum(axis=0)))

    while dataset.epoch < 3:
        for batch in dataset:
            strategy.run(train, args=(batch,))
            if rank == 0 and pause:
                print(f"attempt {attempt} works", flush=True)
            time.sleep(pause)
            handler.save_checkpoint_if_preempted()
    if rank == 0:
        print("bits", weights.numpy().tobytes().hex())
"""
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1", "--time=10", "--signal=USR1@30")


def last_lines(job):
    ended = job.end()
    assert (ended.state, ended.code) == ("COMPLETED", 0), str(ended)
    lines = [line for line in ended.output.splitlines() if line.startswith(("step ", "bits "))]
    assert len(lines) == 2, str(ended)
    return lines


def test_disturbed_training_ends_with_the_same_bits(cluster, tmp_path):
    """By a signal, by a requeue, and by a time limit. With both libraries at once, as jobs mostly wait."""
    jobs, undisturbed = [], []
    for library in LIBRARIES:
        for name, disturbances in (("disturbed", "3"), ("undisturbed", "0")):
            folder = tmp_path / f"{library}-{name}".replace(" ", "-")
            folder.mkdir()
            job = submit(cluster, folder, library, "requeue.sbatch", PROGRAM, *TWO_NODES, arguments=(disturbances,))
            (undisturbed if disturbances == "0" else jobs).append(job)
    for job in jobs:
        job.wait_for_output("attempt 0 works")
        cluster.call("scancel", "--signal=USR1", job.number)
    for job in jobs:
        job.wait_for_output(f"job {job.number}: goes on from its newest checkpoint in attempt 1")
        job.start_again(1, "10")
    for job in jobs:
        job.wait_for_output("attempt 1 works")
        cluster.call("scontrol", "requeue", job.number)
    for job in jobs:
        job.start_again(2, "2")  # Slurm warns of its end 60 s to 90 s after the start; 200 steps take 160 s
    for job in jobs:
        job.wait_for_output(f"job {job.number}: goes on from its newest checkpoint in attempt 3")
        job.start_again(3, "10")
    assert [last_lines(job) for job in jobs] == [last_lines(job) for job in undisturbed]


def test_job_from_another_job_is_requeued_after_a_signal_before_its_handler(cluster, tmp_path):
    """The variables are those of an array's task, a heterogeneous job, and `sbatch --export=NONE`."""
    program = "import os, time; print(len(os.environ['MPIDIST_EXIT_CODE_FILE']), 'starts', flush=True); time.sleep(60)"
    others = {"SLURM_ARRAY_JOB_ID": "999", "SLURM_ARRAY_TASK_ID": "1", "SLURM_HET_SIZE": "2"}
    others |= {"SLURM_RESTART_COUNT": "30", "SLURM_EXPORT_ENV": "NONE", "MPI_TYPE": "pmi2"}
    options = ("--nodes=1", "--ntasks-per-node=1", *TWO_NODES[2:])
    job = submit(cluster, tmp_path, LIBRARIES[0], "requeue.sbatch", program, *options, **others)
    job.wait_for_output(" starts")
    cluster.call("scancel", "--signal=USR1", job.number)
    job.start_again(1, "10")
    job.wait_for_output(f"job {job.number}, attempt 1; ranks: 1, nodes: 1")
    assert "ended by USR1, before its handler was there" in job.cancel().output


def test_cancelled_job_is_not_requeued(cluster, tmp_path):
    job = submit(cluster, tmp_path, LIBRARIES[0], "requeue.sbatch", PROGRAM, *TWO_NODES, arguments=("1",))
    job.wait_for_output("attempt 0 works")
    assert job.cancel().state == "CANCELLED"
    assert job.restarts() == 0
    assert job.processes() == []


def test_training_goes_on_after_the_loss_of_a_node(tmp_path):
    """Slurm requeues the job, which goes on from its newest checkpoint: each step but the first one is saved."""
    with EmulatedCluster() as cluster:

        def submitted(library, disturbances):
            folder = tmp_path / f"{library}-{disturbances}".replace(" ", "-")
            folder.mkdir()
            return submit(cluster, folder, library, "requeue.sbatch", SAVING, *TWO_NODES, arguments=(disturbances,))

        jobs = [submitted(library, "1") for library in LIBRARIES]
        for job in jobs:
            job.wait_for_output("attempt 0 works")
            job.wait_for_file("checkpoints/ckpt-*")  # of which two are kept
        cluster.lose("n2")
        cluster.call("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=lost")
        for job in jobs:
            job.start_again(1, "10")
        undisturbed = [submitted(library, "0") for library in LIBRARIES]
        assert [last_lines(job) for job in jobs] == [last_lines(job) for job in undisturbed]
        for job in jobs:
            (begun,) = re.findall(r"attempt 1 begins at step (\d+)", job.end().output)
            assert int(begun) > 0


def test_job_that_is_cancelled_while_it_saves_leaves_a_whole_checkpoint(cluster, tmp_path):
    """Saving all the time, in the foreground and in the background; a job after it goes on from there."""
    folders = {}
    for library in LIBRARIES:
        for background in ("", "background"):
            folder = tmp_path / f"{library}-{background}".replace(" ", "-")
            folder.mkdir()
            job = submit(cluster, folder, library, "train.sbatch", SAVE, *TWO_NODES, arguments=("work", background))
            folders[folder] = library, background, job
    last = {}
    for folder, (_, _, job) in folders.items():
        job.wait_for_output("saved 2")
        ended = job.cancel()
        assert ended.state == "CANCELLED", str(ended)
        last[folder] = max(map(int, re.findall(r"saved (\d+)", ended.output)))
    after = {
        folder: submit(cluster, folder, library, "train.sbatch", SAVE, *TWO_NODES, arguments=("go on", background))
        for folder, (library, background, _) in folders.items()
    }
    for folder, job in after.items():
        ended = job.end()
        assert (ended.state, ended.code) == ("COMPLETED", 0), str(ended)
        (restored,) = re.findall(r"restored (\d+)", ended.output)
        assert int(restored) >= last[folder], str(ended)  # its last lines may be lost, as srun may end before it
        assert [path.name for path in (folder / "saved").iterdir()] == [f"ckpt-{int(restored) + 1}"]


def test_training_goes_on_with_as_many_ranks_as_it_gets(cluster, tmp_path):
    """Ended on three ranks, and continued by a job of two: the weights of six replicas are those on one rank."""

    def submitted(library, name, disturbances, nodes, **variables):
        folder = tmp_path / f"{library}-{name}".replace(" ", "-")
        folder.mkdir(exist_ok=True)
        options, arguments = (f"--nodes={nodes}", *TWO_NODES[1:]), (disturbances,)
        return submit(cluster, folder, library, "requeue.sbatch", REPLICAS, *options, arguments=arguments, **variables)

    jobs = [submitted(library, "disturbed", "1", 3, MAX_RESTARTS="0") for library in LIBRARIES]
    for job in jobs:
        job.wait_for_output("attempt 0 works")
        cluster.call("scancel", "--signal=USR1", job.number)
    for job in jobs:
        ended = job.end()
        assert (ended.state, ended.code) == ("FAILED", 75), str(ended)
        assert "attempt 0; ranks: 3, nodes: 3" in ended.output, str(ended)
    others = [submitted(library, "disturbed", "0", 2) for library in LIBRARIES]
    alone = [submitted(library, "undisturbed", "0", 1) for library in LIBRARIES]
    for job, one in zip(others, alone, strict=True):
        ended, wanted = job.end(), one.end()
        assert (ended.state, ended.code) == ("COMPLETED", 0), str(ended)
        assert "attempt 0; ranks: 2, nodes: 2" in ended.output, str(ended)
        (bits,) = re.findall("bits .*", ended.output)
        assert bits in wanted.output, str(wanted)


SCRIPT = """#!/bin/bash
#SBATCH --nodes=3 --ntasks-per-node=2 --time=10 --no-kill --output=%x-%j.out
exec "$VIRTUAL_ENV/bin/python" -m mpidist run --max-restarts 3 --min-ranks 2 "$@"
"""
ADDS = """
import sys, time
import numpy as np
import mpidist
from mpidist.checkpoint import Checkpoint, CheckpointManager

with mpidist.MultiWorkerMirroredStrategy(replicas=6) as strategy:
    with strategy.scope():
        weights = mpidist.Variable(np.zeros(8))
        checkpoint = Checkpoint(weights=weights, step=0)
    manager = CheckpointManager(checkpoint, "saved", max_to_keep=2)
    manager.restore_or_initialize()
    if strategy.is_chief:
        print(f"start {strategy.restarts} on {strategy.topology.num_nodes} nodes at {checkpoint.step}", flush=True)

    def train():
        context = mpidist.get_replica_context()
        number = context.replica_id_in_sync_group + checkpoint.step
        weights.assign_add(context.all_reduce("mean", np.cos(np.arange(8.0) * number)))

    while checkpoint.step < 30:
        strategy.run(train)
        checkpoint.step += 1
        manager.save()
        if len(sys.argv) > 1 and not strategy.restarts:
            time.sleep(1)
    if strategy.is_chief:
        print("bits", weights.numpy().tobytes().hex())
"""


KILLED = (
    ADDS.replace(
        "    manager.restore_or_initialize()",
        """    handler = mpidist.checkpoint.PreemptionCheckpointHandler(manager)
    manager.restore_or_initialize()""",
    )
    .replace(
        "        strategy.run(train)",
        """        if checkpoint.step == 3 and not strategy.restarts and strategy.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        strategy.run(train)""",
    )
    .replace("import sys, time", "import os, signal, sys, time")
)


def test_killed_rank_is_left_out_where_the_others_handle_sigterm(cluster, tmp_path):
    """They live on when srun ends them, and fail as a process is gone."""
    (tmp_path / "again.sbatch").write_text(SCRIPT)
    job = submit(cluster, tmp_path, LIBRARIES[0], tmp_path / "again.sbatch", KILLED, "--nodes=1", "--ntasks-per-node=3")
    ended = job.end()
    assert (ended.state, ended.code) == ("COMPLETED", 0), str(ended)
    assert re.findall("a rank was killed; restart . of at most 3, with . ranks", ended.output) == [
        "a rank was killed; restart 1 of at most 3, with 2 ranks"
    ], str(ended)


@pytest.mark.parametrize("library", LIBRARIES)
def test_job_that_loses_a_node_goes_on_without_it_to_the_same_bits(tmp_path, library):
    (tmp_path / "again.sbatch").write_text(SCRIPT)
    with EmulatedCluster() as cluster:
        job = submit(cluster, tmp_path, library, tmp_path / "again.sbatch", ADDS, arguments=("slowly",))
        job.wait_for_file("saved/ckpt-*")  # of which two are kept
        cluster.lose("n3")
        cluster.call("scontrol", "update", "NodeName=n3", "State=DOWN", "Reason=lost")
        ended = job.end()
        assert (ended.state, ended.code) == ("COMPLETED", 0), str(ended)
        assert "start 0 on 3 nodes at 0" in ended.output
        assert "start 1 on 2 nodes at " in ended.output
        assert "no answer from n3" in ended.output
        assert "with 4 ranks" in ended.output
        folder = tmp_path / "undisturbed"
        folder.mkdir()
        whole = submit(cluster, folder, library, tmp_path / "again.sbatch", ADDS, "--nodes=2").end()
    assert whole.output.split("bits ")[1] == ended.output.split("bits ")[1]
