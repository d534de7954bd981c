"""`python -m mpidist doctor`: what it prints with one process and several, with GPUs and without."""

import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from host_cuda.gpus import emulated, gpus
from jobs.failing import ran
from mpi_session import clean_environment

import mpidist
from mpidist.__main__ import run_command
from mpidist.cli import doctor, leftovers, rank_facts
from mpidist.cli.cuda_aware_mpi import Answer
from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.errors import UnavailableError
from mpidist.transport import cuda
from mpidist.transport.mpi.library import load_mpi

__all__ = ["emulated", "gpus"]  # fixtures


@pytest.fixture(autouse=True)
def _no_leftovers(tmp_path, monkeypatch):
    """Let no ended job have left anything on this machine."""
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def said(capfd, comm, *arguments, status=0):
    """Run the command on all ranks, and return what the first printed, which alone prints."""
    assert run_command(["doctor", *arguments]) == status
    texts = comm.allgather(capfd.readouterr().out)
    assert texts[1:] == [""] * (comm.size - 1)
    return texts[0]


def row(text, title):
    """Return what the line of a title says; "" if there is none."""
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.startswith(f"  {title} ")]
    return lines[0][1] if lines else ""


@pytest.mark.no_mpi
def test_one_process_needs_no_launcher(tmp_path):
    command = [sys.executable, "-m", "mpidist", "doctor"]
    done = ran(command, env=clean_environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in ("1 rank on 1 node.", "  launcher  none: this process was started alone", "  tuned ", "GPUs "):
        assert text in done.stdout
    assert re.search("ok +one rank: there is nothing to reduce", done.stdout)
    assert not any(line.endswith(" ") for line in done.stdout.splitlines())


@pytest.mark.no_mpi
def test_doctor_without_mpi_prints_remedy(capfd, monkeypatch):
    def fails():
        raise UnavailableError("mpidist needs mpi4py; `pip install mpi4py mpich`")

    monkeypatch.setattr(doctor, "load_mpi", fails)
    assert run_command(["doctor"]) == 1
    text = capfd.readouterr().out
    assert "MPI:   mpidist needs mpi4py; `pip install mpi4py mpich`" in text
    assert "GPUs:  " in text


@pytest.mark.ranks(2)
def test_doctor_without_cupy_prints_remedy(comm, capfd, monkeypatch):
    its = cuda.Cuda()
    monkeypatch.setattr(cuda, "current", lambda: its)
    monkeypatch.setitem(sys.modules, "cupy", None)
    text = said(capfd, comm)
    assert text.count("none: CuPy is not installed; `pip install 'cupy-cuda13x[ctk]' nvidia-nccl-cu13` brings it") == 1
    assert "NCCL" not in text.replace("cupy-cuda13x[ctk]", "")


@pytest.mark.ranks(1, 3)
def test_doctor_shows_gpus_and_nccl(emulated, comm, capfd):
    text = said(capfd, comm)
    assert row(text, "CuPy") == cuda.current().support.cupy_version
    assert row(text, "GPUs") == f"{os.environ['TEST_GPUS']} (a GPU emulated on the host), driver for CUDA 13.0"
    assert row(text, "NCCL") == "2.30.3"
    assert comm.size == 1 or "  ok" in text
    assert comm.size == 1 or "NCCL can join the GPUs of each node" in text


@pytest.mark.ranks(3)
def test_doctor_separates_unlike_ranks_and_groups_like_nodes(emulated, comm, capfd, monkeypatch):
    emulated.wish("NCCL's version", 22809 if comm.rank else 23004)
    its = cuda.Cuda()
    monkeypatch.setattr(cuda, "current", lambda: its)
    one_node = said(capfd, comm, status=1)
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", ",".join(map(str, range(comm.size))))
    each_alone = said(capfd, comm)
    assert row(one_node, "NCCL") == "rank 0: 2.30.4"
    assert "ranks 1-2: 2.28.9\n" in one_node
    assert "NCCL is refused: ranks that use NCCL together must have one version" in row(one_node, "fail")
    assert each_alone.count("\nNode 0 (") == 1
    assert "\n2 nodes alike (" in each_alone
    assert "refused" not in each_alone


@pytest.mark.ranks(2)
@pytest.mark.parametrize("works", [True, False])
def test_doctor_proves_device_memory_support_claimed_by_mpi(emulated, comm, capfd, monkeypatch, works):
    tries = []

    def command(device):
        tries.append(device)
        return [sys.executable, "-c", "print('right')" if works else "import os; os.abort()"]

    monkeypatch.setattr(rank_facts, "hint", lambda: Answer(True, "MPIX_Query_cuda_support returns yes"))
    monkeypatch.setattr(rank_facts, "child_command", command)
    text = said(capfd, comm)
    assert len(tries) == (comm.rank == 0), "once on a node"
    if works:
        assert "MPI on GPU memory  yes: a child process sent device memory and got the right numbers; MPIDIST_D" in text
    else:
        assert (
            "MPI on GPU memory  no: a child process was ended by SIGABRT; device memory goes through the host" in text
        )


@pytest.mark.ranks(3)
def test_doctor_shows_tasks_of_a_cluster(comm, capfd, monkeypatch):
    is_ps = comm.rank == comm.size - 1
    cluster = {"worker": [f"a:{rank}" for rank in range(comm.size - 1)], "ps": ["b:1"]}
    task = {"type": "ps" if is_ps else "worker", "index": 0 if is_ps else comm.rank}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    text = said(capfd, comm)
    assert "rank 0: worker 0 of 2 worker tasks, 1 ps task, by TF_CONFIG" in text
    assert f"rank {comm.size - 1}: ps 0 of 2 worker tasks, 1 ps task, by TF_CONFIG" in text


@pytest.mark.ranks(3)
def test_doctor_warns_of_odd_variables(comm, capfd, monkeypatch):
    assert not row(said(capfd, comm), "cluster")
    monkeypatch.setenv("MPIDIST_TIMEOUT_SECOND", "5")
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    text = said(capfd, comm)
    assert "a heterogeneous job of Slurm with 2 components; SlurmClusterResolver(component_jobs=" in text
    monkeypatch.setenv("TF_CONFIG", "{")
    text = said(capfd, comm)
    assert row(text, "cluster").startswith("refused: TF_CONFIG is not JSON")
    meant = "the variable MPIDIST_TIMEOUT_SECOND means nothing; is MPIDIST_TIMEOUT_SECONDS meant?"
    assert row(text, "warn") == meant


@pytest.mark.ranks(1, 3)
def test_doctor_checks_a_sum_of_all_ranks(comm, capfd, monkeypatch):
    text = said(capfd, comm)
    if comm.size == 1:
        assert "one rank: there is nothing to reduce" in row(text, "ok")
        return
    assert re.search(rf"all-reduce of {comm.size} ranks: right everywhere; 8 B in .* [um]s, 16 MiB in .* m?s", text)

    def sums(self, op, value):
        total = all_reduce(self, op, value)
        return total + 1 if comm.rank == 1 and total.size > 1 else total

    all_reduce = BoundOps.all_reduce
    monkeypatch.setattr(BoundOps, "all_reduce", sums)
    assert "all-reduce: 5 of the sums that ranks got were wrong" in row(said(capfd, comm, status=1), "fail")


@pytest.mark.ranks(3)
def test_doctor_warns_of_more_ranks_and_threads_than_cores(comm, capfd, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert f"{comm.size} ranks share 1 core of a node" in said(capfd, comm)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(2 * comm.size)))
    for name in rank_facts.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    text = said(capfd, comm)
    assert "OMP_NUM_THREADS is not set" in text
    assert "Set it to 2" in text
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    text = said(capfd, comm)
    assert row(text, "threads") == "OMP_NUM_THREADS=2"
    assert "warn" not in text


@pytest.mark.ranks(3)
def test_doctor_json_is_compared_by_later_runs(comm, capfd, monkeypatch, tmp_path):
    path = comm.bcast(str(tmp_path / "node.json"))
    text = said(capfd, comm, "--json")
    if comm.rank == 0:
        page = json.loads(text)
        assert page["nodes"][0]["ranks"] == list(range(comm.size))
        assert page["nodes"][0]["facts"]["MPI"] in load_mpi().Get_library_version().replace("      ", " ")
        assert page["findings"][0]["mark"] == "ok"
        Path(path).write_text(text)
    comm.barrier()
    assert "all ranks see the expected values" in said(capfd, comm, "--expect", path)
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=12345 << 20))
    text = row(said(capfd, comm, "--expect", path, status=1), "fail")
    assert comm.rank or text.startswith(f"/dev/shm on rank {comm.size - 1} (")
    assert comm.rank or "is 12.06 GiB; expected is" in text


@pytest.mark.ranks(2)
@pytest.mark.parametrize("content", [None, "[]", '{"nodes": [{"facts": 3}]}'])
def test_doctor_expect_refuses_other_files(comm, capfd, tmp_path, content):
    path = tmp_path / "node.json"
    if content is not None:
        path.write_text(content)
    assert (
        "--expect takes a file that `doctor --json` has printed" in said(capfd, comm, "--expect", str(path), status=2)
        or comm.rank
    )


@pytest.mark.no_mpi
def test_command_prints_its_version(capfd):
    with pytest.raises(SystemExit) as end:
        run_command(["--version"])
    assert end.value.code == 0
    assert capfd.readouterr().out == f"mpidist {mpidist.__version__}\n"
