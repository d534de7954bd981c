"""Whether MPI may have device memory: what MPI says, what a child process proves, and what the user's word does."""

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_cuda import are_emulated
from host_cuda.gpus import emulated, gpus, is_total, mine, opened

from mpidist.cli.cuda_aware_mpi import child_command, child_environment, hint, prove, takes_device_memory
from mpidist.cross_device_ops.bound_ops import BoundOps
from mpidist.cross_device_ops.hierarchical_copy_all_reduce import HierarchicalCopyAllReduce

__all__ = ["emulated", "gpus"]  # a fixture

CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


def outcome_of(code, seconds=20):
    return prove([sys.executable, "-c", code], seconds)


def test_hint_of_mpi_from_wheels_is_no(comm):
    answer = hint()
    assert answer.works is False
    assert "this MPI library is not built for CUDA: MPIX_Query_cuda_support returns no, and " in answer.reason


@pytest.mark.no_mpi
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (CRASH, "a child process was ended by SIGSEGV"),
        ("import time; time.sleep(600)", "a child process did not end within 0.5 s"),
        ("print('wrong')", "a child process got wrong numbers; its output: wrong"),
        ("pass", "a child process got wrong numbers; its output: nothing"),
        ("print('right'); raise SystemExit(3)", "a child process failed with exit status 3: right"),
        ("raise RuntimeError('no GPU')", "a child process failed with exit status 1: RuntimeError: no GPU"),
        ("print('x' * 1000000); print('right')", ""),
        (None, "a child process could not be started: No such file or directory"),
    ],
)
def test_proof_by_a_child_gives_a_reason_for_failures(code, reason):
    answer = outcome_of(code, 0.5 if "sleep" in code else 600) if code else prove(["/nowhere/python"])
    assert answer.works == (not reason)
    assert not reason or answer.reason == reason


def test_proof_by_a_child_starts_mpi_alone(comm):
    """Under mpiexec, too."""
    code = "from mpi4py import MPI; print('right' if MPI.COMM_WORLD.Get_size() == 1 else 'wrong')"
    assert outcome_of(code).works


@pytest.mark.no_mpi
def test_proof_by_a_hanging_child_ends_its_process_tree(tmp_path):
    code = f"import subprocess; subprocess.run(['sh', '-c', 'echo $$ > {tmp_path}/pid; sleep 600'])"
    assert not outcome_of(code, 10.0).works
    pid = int((tmp_path / "pid").read_text())
    with suppress(FileNotFoundError):
        while Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
            time.sleep(0.01)


@pytest.mark.no_mpi
def test_launchers_are_left_out_of_its_environment_and_settings_are_kept():
    given = {
        "PMI_RANK": "0", "PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_JOB_ID": "1", "PRTE_LAUNCHED": "1",
        "OMPI_MCA_pml": "ucx", "MPIR_CVAR_ENABLE_GPU": "1", "MPICH_GPU_SUPPORT_ENABLED": "1", "PATH": "/bin",
        "UCX_TLS": "all", "MPI4PY_LIBMPI": "x",
    }  # fmt: skip
    assert set(child_environment(given)) == {
        "OMPI_MCA_pml", "MPIR_CVAR_ENABLE_GPU", "MPICH_GPU_SUPPORT_ENABLED", "PATH", "UCX_TLS", "MPI4PY_LIBMPI",
        "PYTHONPATH",
    }  # fmt: skip


# All ranks together. The memory of emulated GPUs can be read by any MPI.


@pytest.mark.ranks(3)
@pytest.mark.parametrize("word", ["", "1"])
def test_device_mpi_variable_lets_mpi_read_device_memory(emulated, comm, monkeypatch, word):
    """And else it goes through the host, between nodes."""
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", ",".join(str(2 * rank // comm.size) for rank in range(comm.size)))
    monkeypatch.setenv("MPIDIST_DEVICE_MPI", word)
    values = [mine(comm.rank, 100_001, np.dtype(code)) for code in ("i4", "f2", "f8")]
    for group in opened(comm):
        ops = BoundOps(HierarchicalCopyAllReduce(), group)
        ops.all_reduce("SUM", values)
        emulated.forget()
        results = ops.all_reduce("SUM", values)
        copies = comm.allgather(emulated.calls("copy down", "copy up", "cudaHostAlloc"))  # perhaps of leaders alone
        assert (copies == [[]] * comm.size) == bool(word), "no slots, nor a counter: the program's float16 may overflow"
        assert all(is_total(result, comm.size, 100_001, result.dtype) for result in results)
        assert group.levels_of(True).world.name == f"world {'from device memory' if word else 'through the host'}"


def test_proof_holds_only_where_mpi_reads_the_memory(comm):
    """On host memory in the place of device memory; wrong numbers are seen."""

    class Array(np.ndarray[Any, Any]):
        @property
        def data(self):
            return type("Pointer", (), {"ptr": self.__array_interface__["data"][0]})

    class Elsewhere(Array):
        """Memory that MPI writes to another place of."""

        hidden = np.zeros(4 << 20, np.uint8)

        @property
        def data(self):
            return type("Pointer", (), {"ptr": self.hidden.__array_interface__["data"][0]})

    class Numbers:
        cuda = type("Cuda", (), {"get_current_stream": lambda: type("Stream", (), {"synchronize": lambda: None})})
        asnumpy = staticmethod(np.asarray)

        def __init__(self, kind):
            self.kind = kind

        def asarray(self, numbers):
            return numbers.copy().view(Array if numbers.any() else self.kind)

    assert takes_device_memory(Numbers(Array))
    assert not takes_device_memory(Numbers(Elsewhere))


@pytest.mark.ranks(1, 3)
def test_proof_by_a_child_agrees_with_the_hint(gpus, comm):
    if are_emulated():
        pytest.skip("needs a real GPU: the memory of emulated ones is the host's, which every MPI takes")
    answer = prove(child_command(0))
    assert answer.works == hint().works, answer.reason
