"""`mpidist run --max-restarts` in a job of a real Slurm that loses a node: the job goes on without it."""

from pathlib import Path

import pytest
from mpi_session import HANG_SECONDS
from slurm.batch_jobs import LIBRARIES, submit
from slurm.emulated_cluster import EmulatedCluster

pytestmark = [pytest.mark.no_mpi, pytest.mark.long, pytest.mark.timeout(5 * HANG_SECONDS)]

SCRIPT = """#!/bin/bash
#SBATCH --nodes=3 --ntasks-per-node=2 --time=10 --no-kill --output=%x-%j.out
exec "$VIRTUAL_ENV/bin/python" -m mpidist run --max-restarts 3 --min-ranks 2 "$@"
"""
PROGRAM = """
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
            time.sleep(0.3)
    if strategy.is_chief:
        print("bits", weights.numpy().tobytes().hex())
"""


@pytest.mark.parametrize("library", LIBRARIES)
def test_job_that_loses_a_node_goes_on_without_it_to_the_same_bits(tmp_path: Path, library: str) -> None:
    (tmp_path / "again.sbatch").write_text(SCRIPT)
    with EmulatedCluster() as cluster:
        job = submit(cluster, tmp_path, library, tmp_path / "again.sbatch", PROGRAM, arguments=("slowly",))
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
        whole = submit(cluster, folder, library, tmp_path / "again.sbatch", PROGRAM, "--nodes=2").end()
    assert whole.output.split("bits ")[1] == ended.output.split("bits ")[1]
