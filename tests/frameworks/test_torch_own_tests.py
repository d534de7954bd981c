"""Torch's own tests of torch.distributed, as its wheel has them, over the backend `mpidist`."""

import json
import re
import sys
from pathlib import Path

import pytest
from jobs.faults import run_command
from mpi_session.launch import HANG_SECONDS, Launcher

pytestmark = [pytest.mark.no_mpi, pytest.mark.timeout(6 * HANG_SECONDS)]  # for some 240 tests

# Tests that fail, and why. No other may.
EXCEPTIONS = {
    "barrier_timeout": "the other ranks leave without the barrier: that is an error at once, and not at the timeout",
    "ddp_logging_data_cpu": "requires that the backend is named gloo",
    "profiler$": "requires the events that gloo records",
    "monitored_barrier_gloo": "torch has this call for gloo alone; every call of mpidist names the ranks that are late",
    # With gloo they fail, too.
    "SyncBatchNorm_process_group": "needs torchvision",
    "batch_isend_irecv_(mixed_backend|op)_err": "need NCCL",
    "new_subgroups_with_group_param": "needs a fourth rank",
}


def test_own_tests_of_torch_pass(tmp_path):
    program = Path(__file__).with_name("torch_own_tests.py")
    launcher = [*Launcher.find(None).command, "-n", "3"]
    command = [*launcher, sys.executable, str(program), "mpidist", str(tmp_path)]
    ended = run_command(tmp_path, command, 3, seconds=5 * HANG_SECONDS)
    results = json.loads((tmp_path / "results.json").read_text())
    failed = {name: texts for name, (verdict, texts) in results.items() if verdict == "failed"}
    assert not [name for name in failed if not any(re.search(pattern, name) for pattern in EXCEPTIONS)], failed
    assert ended.status == 0, ended.err
    assert sum(verdict == "passed" for verdict, _ in results.values()) >= 80
