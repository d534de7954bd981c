"""The jobs of schedulers that `mpidist run` recognises: number of ranks, nodes, and what starts the ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, final

from mpidist.cli.launching import Launch, RefusedError, prepare_child
from mpidist.cluster_resolver.host_list import expand_host_list
from mpidist.transport.mpi.mpi_libraries import MpiLibrary

__all__ = ["Allocation", "Start", "find_allocation", "num_cores"]

_ANSWER_SECONDS: Final = 60.0  # what srun may take to start a process on each node
_OPEN_MPI_AS_ROOT: Final = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# With more ranks than cores, a rank of MPICH that waits should give up its core soon.
_MPICH_YIELDS: Final = {"MPIR_CVAR_POLLS_BEFORE_YIELD": "10", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}


@final
class Start(NamedTuple):
    """Ranks to start, and their number of threads, if the user gives it; `is_tagged`, with it before each line."""

    library: MpiLibrary
    ranks: int
    threads: int | None
    is_tagged: bool


class Allocation(ABC):
    """A job of a scheduler, or this machine."""

    ranks: int | None = None  # how many it was submitted for, where it says so
    nodes: Sequence[str] = ()  # where a node of it may be lost, and the others go on: their names
    spans_nodes: bool = False  # whether ranks may be on other nodes than this process

    @abstractmethod
    def launcher(self, start: Start, lost: Sequence[str]) -> Launch:
        """Return the launcher with its options, for variables that are not set yet. `lost`: nodes that are left out."""

    def find_lost(self) -> list[str]:
        """Return the names of the nodes that start no process. Local."""
        return []


def find_allocation(environ: Mapping[str, str]) -> Allocation:
    """Return the job of this process, whose launcher is on PATH; without one, this machine."""
    if "SLURM_JOB_ID" in environ and shutil.which("srun"):
        return _Slurm(environ)
    if "FLUX_URI" in environ and shutil.which("flux"):
        return _Flux()
    if Path(environ.get("PBS_NODEFILE", "")).is_file():
        return _Pbs(Path(environ["PBS_NODEFILE"]).read_text().split())
    return _ThisMachine()


@final
class _Slurm(Allocation):
    """A job of Slurm, whose srun starts the ranks."""

    spans_nodes = True

    def __init__(self, environ: Mapping[str, str]) -> None:
        components = int(environ.get("SLURM_HET_SIZE") or 1)
        if components > 1:
            raise RefusedError(
                "this job of Slurm is heterogeneous, and ranks would start on its first component alone: start them "
                f"with `srun --het-group=0-{components - 1} ...`, or by the job script roles.sbatch"
            )
        self._cores_of_task = int(environ.get("SLURM_CPUS_PER_TASK") or 1)
        self.nodes = expand_host_list(environ["SLURM_JOB_NODELIST"]) if environ.get("SLURM_JOB_NODELIST") else []
        self.ranks = int(environ.get("SLURM_NTASKS") or len(self.nodes) or 1)  # without -n, one a node, as srun does

    def launcher(self, start: Start, lost: Sequence[str]) -> Launch:
        threads = start.threads or self._cores_of_task
        options = [f"--mpi={start.library.slurm_plugin}", "-n", str(start.ranks), "-c", str(threads)]
        options += ["--export=ALL", "--kill-on-bad-exit=1", *["--label"] * start.is_tagged]
        if lost:
            options += [f"--nodes={len(self.nodes) - len(lost)}", f"--exclude={','.join(lost)}"]
        return Launch(["srun", *options], {}, threads)

    def find_lost(self) -> list[str]:
        """Start a process on each node: ranks may detect the loss of a node before Slurm does."""
        until = time.monotonic() + _ANSWER_SECONDS
        started = {node: _start_on(node) for node in self.nodes}
        return [node for node, srun in started.items() if not _has_succeeded(srun, until)]


@final
class _Flux(Allocation):
    """An instance of Flux, as `flux batch` and `flux alloc` make one; `flux run` starts the ranks."""

    spans_nodes = True

    def launcher(self, start: Start, lost: Sequence[str]) -> Launch:
        threads = start.threads or 1
        options = ["-n", str(start.ranks), "-c", str(threads), "-o", "exit-on-error"]
        options += ["-o", "pmi=pmix"] * (start.library.name == "Open MPI") + ["--label-io"] * start.is_tagged
        return Launch(["flux", "run", *options], {}, threads)


@final
class _Pbs(Allocation):
    """A job of PBS: mpiexec starts a rank for each line of its node file."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.ranks = len(lines) or None
        self._slots = Counter(lines)  # in the order of the file
        self.spans_nodes = len(self._slots) > 1

    def launcher(self, start: Start, lost: Sequence[str]) -> Launch:
        slots = self._slots.total()
        if start.ranks > slots:
            raise RefusedError(f"this job of PBS takes {slots} ranks, not {start.ranks}: submit it with more mpiprocs=")
        options, variables = _mpiexec_options(start.library, 0, has_few_cores=False)
        hosts = [f"{node}:{number}" for node, number in self._slots.items()]
        if start.library.name == "Intel MPI":  # the number of ranks is the same on each node
            hosts, options = [*self._slots], [*options, "-ppn", str(max(self._slots.values()))]
        if start.library.name == "Open MPI":  # passes no other variables to other nodes
            options += ["-x", "OMP_NUM_THREADS", "-x", "MPIDIST_*"]
        options = ["--host" if start.library.name == "Open MPI" else "-hosts", ",".join(hosts), *options]
        return _mpiexec(start, options, variables, start.threads or 1)


@final
class _ThisMachine(Allocation):
    """No job: mpiexec starts the ranks here, each on cores of its own if there are enough."""

    def launcher(self, start: Start, lost: Sequence[str]) -> Launch:
        cores = num_cores()
        share = cores // start.ranks
        threads = start.threads or max(1, share)
        options, variables = _mpiexec_options(start.library, share if share >= threads else 0, start.ranks > cores)
        return _mpiexec(start, options, variables, threads)


def num_cores() -> int:
    """Return the number of cores that this process may use: threads of one core count once."""
    usable = os.sched_getaffinity(0)
    files = [Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in usable]
    return len({file.read_text() if file.exists() else str(file) for file in files})


def _mpiexec(start: Start, options: list[str], variables: dict[str, str], threads: int) -> Launch:
    library = start.library
    mpiexec = library.own_mpiexec(sys.executable) or shutil.which("mpiexec")
    if mpiexec is None:
        raise RefusedError(
            f"mpi4py has loaded {library.name}, and there is no mpiexec of it on PATH: load the module that has it, or "
            "install an MPI with its mpiexec into this environment: `pip install mpich`"
        )
    tag = ["--tag-output" if library.name == "Open MPI" else "-prepend-rank"] * start.is_tagged
    return Launch([mpiexec, "-n", str(start.ranks), *options, *tag], variables, threads)


def _mpiexec_options(library: MpiLibrary, share: int, has_few_cores: bool) -> tuple[list[str], dict[str, str]]:
    """Return options and variables of a library's mpiexec. `share`: how many cores a rank is bound to, or 0."""
    if len(os.sched_getaffinity(0)) != os.cpu_count():  # a launcher may choose cores that we may not use
        share = 0
    if library.name == "Open MPI":
        unbound = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
        bound = ["--map-by", f"slot:PE={share}", "--bind-to", "core"]
        return bound if share else unbound, {} if os.geteuid() else _OPEN_MPI_AS_ROOT
    if library.name == "Intel MPI":
        return [], {"I_MPI_PIN_DOMAIN": str(share)} if share else {"I_MPI_PIN": "0"}
    if library.name == "MPICH":
        return ["-bind-to", f"core:{share}"] if share else [], _MPICH_YIELDS if has_few_cores else {}
    return [], {}


def _start_on(node: str) -> subprocess.Popen[bytes]:
    command = ["srun", "--mpi=none", "--overlap", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "/bin/true"]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, preexec_fn=prepare_child)


def _has_succeeded(srun: subprocess.Popen[bytes], until: float) -> bool:
    try:
        return srun.wait(max(0.0, until - time.monotonic())) == 0
    except subprocess.TimeoutExpired:
        srun.kill()
        srun.wait()
        return False
