"""Whether MPI may have device memory: what it says, what a probe proves, what all ranks agree on, and what follows."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from contributions import contribution, reduction_of
from gpus import down, standin, up
from nccl_standin import StandIn

from mpidist.cross_device_ops import HierarchicalCopyAllReduce
from mpidist.transport import cuda
from mpidist.transport.device_over_mpi import cuda_aware_probe
from mpidist.transport.device_over_mpi.cuda_aware import DeviceMpiCommunicator
from mpidist.transport.device_over_mpi.cuda_aware_child import RIGHT, is_right
from mpidist.transport.device_over_mpi.cuda_aware_probe import (
    Answer,
    Probe,
    ProbeKey,
    child_environment,
    hint,
    load,
    save,
)
from mpidist.transport.device_over_mpi.host_staged import HostStagedCommunicator
from mpidist.transport.group.sync_group import SyncGroup
from mpidist.transport.settings import Settings

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["standin"]  # a fixture

KEY = ProbeKey("MPICH 5", 13000, 12090, "14.2.0", "n1")
CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


def outcome_of(code: str, seconds: float = 20) -> Answer:
    probe = Probe([sys.executable, "-c", code], seconds)
    while (answer := probe.outcome()) is None:
        time.sleep(0.01)
    return answer


def test_the_mpis_of_the_wheels_say_no(comm: Intracomm) -> None:
    answer = hint()
    assert answer.works is False
    assert "this MPI library is not built for CUDA: MPIX_Query_cuda_support says no, and " in answer.reason


@pytest.mark.no_mpi
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (CRASH, "a probe was ended by SIGSEGV"),
        ("import time; time.sleep(60)", "a probe did not end within 0.5 s"),
        ("print('wrong')", "a probe got wrong numbers; it said wrong"),
        ("pass", "a probe got wrong numbers; it said nothing"),
        ("print('right'); raise SystemExit(3)", "a probe failed with exit status 3: right"),
        ("raise RuntimeError('no GPU')", "a probe failed with exit status 1: RuntimeError: no GPU"),
        ("print('x' * 1000000); print('right')", ""),
    ],
)
def test_whatever_becomes_of_a_probe_is_an_answer(code: str, reason: str) -> None:
    answer = outcome_of(code, 0.5 if "sleep" in code else 20)
    assert answer.works == (not reason)
    assert not reason or answer.reason == reason


def test_a_probe_starts_mpi_alone(comm: Intracomm) -> None:
    """Under mpiexec, too."""
    code = "from mpi4py import MPI; print('right' if MPI.COMM_WORLD.Get_size() == 1 else 'wrong')"
    assert outcome_of(code).works


@pytest.mark.no_mpi
def test_a_probe_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    code = f"import subprocess; subprocess.run(['sh', '-c', 'echo $$ > {tmp_path}/pid; sleep 60'])"
    assert not outcome_of(code, 1.0).works
    pid = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 5
    while time.monotonic() < until and Path(f"/proc/{pid}/stat").exists():
        if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.no_mpi
def test_launchers_are_left_out_of_its_environment_and_settings_are_kept() -> None:
    given = {
        "PMI_RANK": "0", "PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_JOB_ID": "1", "PRTE_LAUNCHED": "1",
        "OMPI_MCA_pml": "ucx", "MPIR_CVAR_ENABLE_GPU": "1", "MPICH_GPU_SUPPORT_ENABLED": "1", "PATH": "/bin",
        "UCX_TLS": "all", "MPI4PY_LIBMPI": "x",
    }  # fmt: skip
    assert set(child_environment(given)) == {
        "OMPI_MCA_pml", "MPIR_CVAR_ENABLE_GPU", "MPICH_GPU_SUPPORT_ENABLED", "PATH", "UCX_TLS", "MPI4PY_LIBMPI",
        "PYTHONPATH",
    }  # fmt: skip


@pytest.mark.no_mpi
def test_an_answer_is_kept_for_the_same_libraries_and_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    monkeypatch.setattr(cuda_aware_probe, "_known", {})
    assert load(KEY, environ) is None
    answer = Answer(False, "a probe was ended by SIGSEGV")
    save(KEY, answer, environ)
    monkeypatch.setattr(cuda_aware_probe, "_known", {})
    assert load(KEY, environ) == answer
    for other in (replace(KEY, mpi="MPICH 6"), replace(KEY, driver_version=1), replace(KEY, hostname="n2")):
        assert load(other, environ) is None
    for text in ("", "{}", "[1]", '{"key": 3, "works": true}'):
        KEY.path(environ).write_text(text)
        assert load(KEY, environ) is None
    assert [path.name for path in (tmp_path / "mpidist").iterdir()] == [KEY.path(environ).name]


@pytest.mark.no_mpi
def test_where_nothing_can_be_written_an_answer_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    environ = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    monkeypatch.setattr(cuda_aware_probe, "_known", {})
    save(KEY, Answer(True, "yes"), environ)
    assert load(KEY, environ) == Answer(True, "yes")


@pytest.mark.no_mpi
def test_the_setting_is_read() -> None:
    read = [Settings.from_environment({"MPIDIST_DEVICE_MPI": text}).device_mpi for text in ("", "auto", "1", "0")]
    assert read == [None, None, True, False]
    with pytest.raises(ValueError, match="MPIDIST_DEVICE_MPI='yes' is not understood; it is one of auto, 1, 0"):
        Settings.from_environment({"MPIDIST_DEVICE_MPI": "yes"})


# All ranks together, on the stand-in, whose device memory any MPI can read.


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, comm: Intracomm, tmp_path: Path) -> list[int]:
    """Two pretended nodes, answers that nobody has kept, and a count of the probes of this rank."""
    monkeypatch.setenv("MPIDIST_PRETEND_NODES", ",".join(str(2 * rank // comm.size) for rank in range(comm.size)))
    monkeypatch.setenv("XDG_CACHE_HOME", comm.bcast(str(tmp_path)))
    monkeypatch.setattr(cuda_aware_probe, "_known", {})
    monkeypatch.setattr(cuda_aware_probe, "hint", lambda: Answer(True, "of a test"))
    probes: list[int] = []

    def command(device: int) -> list[str]:
        probes.append(device)
        return [sys.executable, "-c", f"print('{RIGHT}')"]

    monkeypatch.setattr(cuda_aware_probe, "child_command", command)
    return probes


def reduced(group: SyncGroup, comm: Intracomm, count: int = 100_001) -> None:
    ops = HierarchicalCopyAllReduce().bound_to(group)
    for dtype in (np.dtype(np.int32), np.dtype(np.float16), np.dtype(np.float64)):
        result = ops.all_reduce("SUM", up(contribution("sum", comm.rank, count, dtype)))
        assert (down(result) == reduction_of("sum", comm.size, count, dtype)).all()


@pytest.mark.ranks(min=2)
def test_where_it_is_proven_mpi_reads_device_memory(
    standin: StandIn, comm: Intracomm, nodes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mpidist")
    leaders = {0, -(-comm.size // 2)}
    for _ in range(2):
        group = SyncGroup.from_mpi(comm)
        reduced(group, comm)
        assert isinstance(group.levels_of(True).world, DeviceMpiCommunicator)
        group.close()
    assert standin.staging.order == [], "no copy between device and host"
    assert standin.staging.num_pinned == 0, "no slots, and no counter: the program's own float16 may overflow"
    assert len(nodes) == (comm.rank in leaders), "found once for each node, and kept"
    assert comm.rank or caplog.text.count("by MPI, from where it is") == 2


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("what", ["hint", "probe", "setting"])
def test_one_rank_that_cannot_is_enough_for_all_to_go_through_the_host(
    standin: StandIn,
    comm: Intracomm,
    nodes: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    caplog.set_level(logging.INFO, "mpidist")
    if what == "setting":
        monkeypatch.setenv("MPIDIST_DEVICE_MPI", "0")
        reason = "MPIDIST_DEVICE_MPI=0 asks to do without"
    elif what == "hint":
        last = comm.rank == comm.size - 1
        monkeypatch.setattr(cuda_aware_probe, "hint", lambda: Answer(not last, "its MPI says no"))
        reason = f"rank {comm.size - 1} ("
    else:
        crashes = comm.rank == -(-comm.size // 2)
        code = CRASH if crashes else f"print('{RIGHT}')"
        monkeypatch.setattr(cuda_aware_probe, "child_command", lambda device: [sys.executable, "-c", code])
        reason = "a probe was ended by SIGSEGV"
    group = SyncGroup.from_mpi(comm)
    reduced(group, comm)
    assert isinstance(group.levels_of(True).world, HostStagedCommunicator)
    assert nodes == []
    assert comm.rank or caplog.text.count("device memory goes between nodes through the host: ") == 1
    assert comm.rank or reason in caplog.text
    group.close()


@pytest.mark.ranks(min=2)
def test_the_setting_asks_the_probe_whatever_mpi_says(
    standin: StandIn, comm: Intracomm, nodes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIDIST_DEVICE_MPI", "1")
    monkeypatch.setattr(cuda_aware_probe, "hint", lambda: Answer(False, "it says no"))
    group = SyncGroup.from_mpi(comm)
    reduced(group, comm)
    assert isinstance(group.levels_of(True).world, DeviceMpiCommunicator)
    assert sum(comm.allgather(len(nodes))) == 2
    group.close()


@pytest.mark.ranks(min=2)
def test_a_probe_that_cannot_start_is_an_answer(
    standin: StandIn, comm: Intracomm, nodes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_aware_probe, "child_command", lambda device: ["/nowhere/python"])
    group = SyncGroup.from_mpi(comm)
    reduced(group, comm)
    assert isinstance(group.levels_of(True).world, HostStagedCommunicator)
    group.close()


@pytest.mark.ranks(min=2)
def test_a_slow_probe_costs_no_deadline(
    standin: StandIn, comm: Intracomm, nodes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIDIST_TIMEOUT_SECONDS", "1")
    code = f"import time; time.sleep(2); print('{RIGHT}')"
    monkeypatch.setattr(cuda_aware_probe, "child_command", lambda device: [sys.executable, "-c", code])
    group = SyncGroup.from_mpi(comm)
    reduced(group, comm)
    assert isinstance(group.levels_of(True).world, DeviceMpiCommunicator)
    group.close()


def test_the_proof_holds_where_mpi_reads_the_memory(comm: Intracomm) -> None:
    """On host memory in the place of device memory; wrong numbers are seen."""

    class Array(np.ndarray[Any, Any]):
        @property
        def data(self) -> Any:  # type: ignore[override]
            return type("Pointer", (), {"ptr": self.__array_interface__["data"][0]})

    class Numbers:
        uint8 = np.uint8
        cuda = type("Cuda", (), {"get_current_stream": lambda: type("Stream", (), {"synchronize": lambda: None})})

        def __init__(self, zeros: int) -> None:
            self.start = zeros

        def arange(self, count: int, dtype: Any) -> Any:
            return np.arange(count).astype(dtype).view(Array)

        def zeros(self, count: int, dtype: Any) -> Any:
            return (np.zeros(count, dtype) if self.start == 0 else Elsewhere(count)).view(Array)

    class Elsewhere:
        """Memory that MPI writes to another place of."""

        def __init__(self, count: int) -> None:
            self.count = count

        def view(self, kind: Any) -> Any:
            self.hidden = np.zeros(self.count, np.uint8)
            other = np.zeros(self.count, np.uint8).view(Array)
            address = self.hidden.__array_interface__["data"][0]

            class Wrong(Array):
                data = type("Pointer", (), {"ptr": address})  # type: ignore[assignment]
                keeps = self.hidden

            return other.view(Wrong)

    assert is_right(Numbers(0))
    assert not is_right(Numbers(1))


@pytest.mark.gpu
def test_a_real_probe_says_what_the_library_is(comm: Intracomm) -> None:
    reasons = comm.allgather(cuda.current().support.reason)
    if any(reasons):
        pytest.skip(f"needs a GPU: {next(filter(None, reasons))}")
    probe = Probe(cuda_aware_probe.child_command(0))
    while (answer := probe.outcome()) is None:
        time.sleep(0.05)
    assert answer.works == hint().works, answer.reason
