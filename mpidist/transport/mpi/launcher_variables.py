"""Environment variables in which launchers identify a process as a rank. No other module names them."""

from __future__ import annotations

from collections.abc import Mapping
from operator import methodcaller
from typing import Final, NamedTuple, final

__all__ = [
    "HYDRA_LOCAL_SIZE",
    "LAUNCHER_PREFIXES",
    "MPICH_SIZE",
    "OF_LAUNCHED_PROCESSES",
    "OPEN_MPI_SIZE",
    "PMIX_NAMESPACE",
    "PMIX_RANK",
    "PMI_FD",
    "RAY",
    "SIZE_VARIABLES",
    "STEP_SIZE",
    "UNSET_TO_BE_ALONE",
    "LauncherReport",
    "launcher_text",
    "numbers_of",
    "other_launch",
    "rank_from_environment",
    "speaks_pmi",
]

PMI_FD: Final = "PMI_FD"  # set by MPICH's mpiexec (Hydra) and srun's pmi2 plugin: the connection, a file descriptor
_PMI_PORT: Final = "PMI_PORT"  # set by Hydra: the connection as an address
PMIX_NAMESPACE: Final = "PMIX_NAMESPACE"  # set by srun's pmix plugin and Open MPI's mpiexec; PMIx has no size
PMIX_RANK: Final = "PMIX_RANK"
_PRTE: Final = "PRTE_LAUNCHED"  # set by Open MPI's mpiexec, and not by srun's pmix plugin
_STEP: Final = "SLURM_STEP_ID"

MPICH_SIZE: Final = "PMI_SIZE"
OPEN_MPI_SIZE: Final = "OMPI_COMM_WORLD_SIZE"
HYDRA_LOCAL_SIZE: Final = "MPI_LOCALNRANKS"  # srun's pmi2 plugin does not set it
STEP_SIZE: Final = "SLURM_STEP_NUM_TASKS"


@final
class _Variables(NamedTuple):
    """The variables of one launcher; "" for those that it does not have. `local_size`: ranks of this node."""

    rank: str
    size: str
    local_size: str


# First present wins: the launcher of an MPI library may itself run in a step of Slurm.
_LAUNCHERS: Final = (
    _OPEN_MPI := _Variables("OMPI_COMM_WORLD_RANK", OPEN_MPI_SIZE, "OMPI_COMM_WORLD_LOCAL_SIZE"),
    _MVAPICH := _Variables("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
    _PMI := _Variables("PMI_RANK", MPICH_SIZE, HYDRA_LOCAL_SIZE),
    _Variables(PMIX_RANK, "", ""),
    _Variables("SLURM_PROCID", STEP_SIZE, ""),
)

# Launchers of other libraries than MPI, by what the names of their variables begin with. First present wins: Accelerate
# starts the launcher of PyTorch, and Ray sets a variable of Accelerate. All set a rank and the number of processes.
_OTHER_RANK: Final = "RANK"
_OTHER_SIZE: Final = "WORLD_SIZE"
RAY: Final = "Ray"
_OTHER_LAUNCHERS: Final = {
    RAY: "RAY_",
    "accelerate launch": "ACCELERATE_",
    "torchrun": "TORCHELASTIC_",
    "deepspeed": "CROSS_SIZE",
}

# To find ranks that do not know of each other: what launchers of MPI libraries, and srun's pmi2 plugin, say.
SIZE_VARIABLES: Final = (_OPEN_MPI.size, _MVAPICH.size, _PMI.size, _PMI.local_size)
# To find children of ranks: what a launched process has, and so its children.
OF_LAUNCHED_PROCESSES: Final = (PMI_FD, _PMI_PORT, _PMI.rank, PMIX_NAMESPACE, PMIX_RANK)
# What a program that starts alone must not see; MPICH 5 looks for a launcher if any of the last five is there.
UNSET_TO_BE_ALONE: Final = (STEP_SIZE, *SIZE_VARIABLES, PMI_FD, PMIX_RANK, PMIX_NAMESPACE, "PMIX_VERSION", _PRTE)
# What is removed from the environment of a child process that starts MPI by itself: settings of MPI libraries stay.
LAUNCHER_PREFIXES: Final = (
    "PMI", "PALS_", "PRTE_", "HYDI_", "HYDRA_", "SLURM_", "FLUX_", "MPI_LOCAL", "MPIEXEC_", "MV2_COMM_WORLD",
    "OMPI_COMM_WORLD", "OMPI_APP", "OMPI_FILE_LOCATION", "OMPI_FIRST_RANKS", "OMPI_NUM_APP", "OMPI_UNIVERSE",
    "OMPI_MCA_ess", "OMPI_MCA_orte", "OMPI_MCA_pmix", "OMPI_MCA_prte", "OMPI_MCA_initial",
)  # fmt: skip


def numbers_of(environ: Mapping[str, str]) -> tuple[int, int, int] | None:
    """Read the rank, how many there are, and how many of them on this node, 0 if the launcher does not give that.

    Of the first launcher that gives both rank and size; `None` where none does.
    """
    for variables in _LAUNCHERS:
        rank, size, local_size = (environ.get(name, "") for name in variables)
        if rank.isdecimal() and size.isdecimal():
            return int(rank), int(size), int(local_size) if local_size.isdecimal() else 0
    return None


@final
class LauncherReport(NamedTuple):
    """Report of a launcher on the processes that it started.

    Attributes:
        launcher: The launcher's name; "another launcher" for one of another library than MPI that is not listed here.
        num_processes: How many processes there are, at least.
        variable: The variable that gives this number, with its value.
    """

    launcher: str
    num_processes: int
    variable: str


def other_launch(environ: Mapping[str, str], world_size: int) -> LauncherReport | None:
    """Find a launcher of another library that started more processes than MPI has ranks; `None` where none did."""
    rank, size = environ.get(_OTHER_RANK, ""), environ.get(_OTHER_SIZE, "")
    signs = _OTHER_LAUNCHERS.items()
    launcher = next((name for name, sign in signs if any(map(methodcaller("startswith", sign), environ))), "")
    launcher = launcher or "another launcher"
    if size.isdecimal() and int(size) > world_size:
        return LauncherReport(launcher, int(size), f"{_OTHER_SIZE}={size}")
    if rank.isdecimal() and int(rank) >= world_size:
        return LauncherReport(launcher, int(rank) + 1, f"at least, as {_OTHER_RANK}={rank}")
    return None


def rank_from_environment(environ: Mapping[str, str]) -> int | None:
    """Read the rank, even if no launcher gives the number of ranks; `None` if none gives a rank."""
    ranks = (environ.get(variables.rank, "") for variables in _LAUNCHERS)
    return next((int(rank) for rank in ranks if rank.isdecimal()), None)


def speaks_pmi(environ: Mapping[str, str]) -> bool:
    """Whether a launcher offers PMI, rather than PMIx alone."""
    return any(name in environ for name in (PMI_FD, _PMI_PORT, MPICH_SIZE))


def launcher_text(environ: Mapping[str, str]) -> str:
    """Name the launcher of this process, for people."""
    step, job = environ.get(_STEP), environ.get("SLURM_JOB_ID")
    if _OPEN_MPI.rank in environ and _PRTE in environ:
        found = "mpiexec of Open MPI"
    elif HYDRA_LOCAL_SIZE in environ:
        found = "mpiexec of MPICH, or of one of its kin"
    elif _MVAPICH.rank in environ:
        found = "mpiexec of MVAPICH"
    elif step is not None:
        protocol = "pmix" if PMIX_RANK in environ else "pmi2" if _PMI.rank in environ else "none"
        found = f"srun --mpi={protocol}"
    elif _OPEN_MPI.rank in environ or PMIX_RANK in environ:
        found = "a launcher with PMIx"
    elif _PMI.rank in environ:
        found = "a launcher with PMI"
    else:
        found = "none: this process was started alone"
    where = f", step {step}" if step is not None else ""
    return f"{found}, in Slurm's job {job}{where}" if job else found
