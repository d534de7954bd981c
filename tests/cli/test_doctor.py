"""`python -m mpidist doctor`: what it prints with one process and several, with GPUs and without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from mpi_session import clean_environment
from standin.nccl import StandIn

from mpidist.__main__ import main
from mpidist.cli import doctor
from mpidist.cli.cuda_aware_mpi import Answer
from mpidist.errors import UnavailableError
from mpidist.transport import cuda

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


def said(capfd: pytest.CaptureFixture[str], comm: Intracomm) -> str:
    """Run the command on all ranks, and return what the first printed, which alone prints."""
    assert main(["doctor"]) == 0
    texts: list[str] = comm.allgather(capfd.readouterr().out)
    assert texts[1:] == [""] * (comm.size - 1)
    return texts[0]


@pytest.mark.no_mpi
def test_one_process_needs_no_launcher(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mpidist", "doctor"]
    done = subprocess.run(
        command, env=clean_environment(), cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    for text in ("1 rank on 1 node.", "launcher:           none: this process was started alone", "GPUs:  ", "NCCL:  "):
        assert text in done.stdout
    assert "one rank, which sends to nobody" in done.stdout


@pytest.mark.no_mpi
def test_without_mpi_it_says_what_brings_it(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Any:
        raise UnavailableError("mpidist needs mpi4py; `pip install mpi4py mpich`")

    monkeypatch.setattr(doctor, "load_mpi", fails)
    assert main(["doctor"]) == 1
    text = capfd.readouterr().out
    assert "MPI:   mpidist needs mpi4py; `pip install mpi4py mpich`" in text
    assert "GPUs:  " in text


def test_it_says_what_is_missing_and_what_to_do(
    comm: Intracomm, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> Any:
        raise ImportError(f"no {name}")

    with cuda.provided_by(cuda.Cuda(load, lambda name: False)):
        text = said(capfd, comm)
    assert "CuPy:               none" in text
    assert text.count("GPUs:               none; CuPy is not installed; `pip install mpidist[cuda12]`") == 1
    assert "MPI on GPU memory:  no: this MPI library is not built for CUDA" in text
    assert comm.size == 1 or "Within nodes, device memory:   through the host: ranks 0-" in text


def test_it_shows_gpus_and_nccl(comm: Intracomm, capfd: pytest.CaptureFixture[str]) -> None:
    world = StandIn(comm)
    with cuda.provided_by(world.cuda):
        text = said(capfd, comm)
    world.close()
    assert "CuPy:               14.2.0" in text
    assert "GPUs:               8 (unknown), driver for CUDA 13.0" in text
    assert "NCCL:               2.28.9" in text
    assert comm.size == 1 or text.endswith("Within nodes, device memory:   NCCL\n")


@pytest.mark.ranks(min=2)
def test_it_tells_ranks_apart_and_nodes(
    comm: Intracomm, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = StandIn(comm, nccl_version=22809 if comm.rank else 23004)
    with cuda.provided_by(world.cuda):
        one_node = said(capfd, comm)
        monkeypatch.setenv("MPIDIST_PRETEND_NODES", ",".join(map(str, range(comm.size))))
        each_alone = said(capfd, comm)
    world.close()
    assert "NCCL:               rank 0: 2.30.4\n" in one_node
    assert "NCCL:               rank 1: 2.28.9\n" in one_node or comm.size > 2
    assert "device memory:   refused: ranks that use NCCL together must have one version" in one_node
    assert each_alone.count("\nNode ") == comm.size
    assert "one rank on each node, which sends to nobody there" in each_alone


@pytest.mark.parametrize("works", [True, False])
def test_it_proves_whether_mpi_takes_device_memory_where_mpi_says_so(
    comm: Intracomm, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    tries: list[int] = []

    def command(device: int) -> list[str]:
        tries.append(device)
        return [sys.executable, "-c", "print('right')" if works else "import os; os.abort()"]

    monkeypatch.setattr(doctor, "hint", lambda: Answer(True, "MPIX_Query_cuda_support says yes"))
    monkeypatch.setattr(doctor, "child_command", command)
    world = StandIn(comm)
    with cuda.provided_by(world.cuda):
        text = said(capfd, comm)
        assert len(tries) == (comm.rank == 0), "once on a node"
    world.close()
    if works:
        assert (
            "MPI on GPU memory:  yes: a child process sent device memory and got the right numbers; MPIDIST_D" in text
        )
    else:
        assert (
            "MPI on GPU memory:  no: a child process was ended by SIGABRT; device memory goes through the host" in text
        )


@pytest.mark.no_mpi
def test_a_reader_that_has_enough_is_no_error() -> None:
    command = f"{sys.executable} -m mpidist doctor | true"  # which is over before there is something to read
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}; exit ${{PIPESTATUS[0]}}"],
        env={**clean_environment(), "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode in (0, 141)


@pytest.mark.ranks(min=2)
def test_it_shows_tasks_of_a_cluster(
    comm: Intracomm, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_ps = comm.rank == comm.size - 1
    cluster = {"worker": [f"a:{rank}" for rank in range(comm.size - 1)], "ps": ["b:1"]}
    task = {"type": "ps" if is_ps else "worker", "index": 0 if is_ps else comm.rank}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    workers = "1 worker task" if comm.size == 2 else f"{comm.size - 1} worker tasks"
    text = said(capfd, comm)
    assert f"rank 0: worker 0 of {workers}, 1 ps task, says TF_CONFIG" in text
    assert f"rank {comm.size - 1}: ps 0 of {workers}, 1 ps task, says TF_CONFIG" in text


def test_it_shows_what_is_odd_about_a_cluster(
    comm: Intracomm, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "cluster:" not in said(capfd, comm)
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    text = said(capfd, comm)
    assert "a heterogeneous job of Slurm with 2 components; SlurmClusterResolver(component_jobs=" in text
    monkeypatch.setenv("TF_CONFIG", "{")
    assert "cluster:            refused: TF_CONFIG is not JSON" in said(capfd, comm)
