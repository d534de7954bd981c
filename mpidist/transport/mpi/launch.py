"""Whether a launcher started one world of N ranks, or N worlds of one rank each.

A launcher and an MPI library that do not speak the same protocol (PMI-1, PMI-2 or PMIx) start N programs that
each have a world of one rank: all of them train the whole model and exit with 0. So does a launcher of another library,
such as torchrun. The launcher's variables are still in the environment; this module compares them with the size of the
world.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Final

from mpidist.errors import TopologyError
from mpidist.transport.mpi.launcher_variables import (
    HYDRA_LOCAL_SIZE,
    MPICH_SIZE,
    PMI_FD,
    PMIX_NAMESPACE,
    PMIX_RANK,
    RAY,
    SIZE_VARIABLES,
    STEP_SIZE,
    UNSET_TO_BE_ALONE,
    LauncherReport,
    other_launch,
    speaks_pmi,
)
from mpidist.transport.mpi.mpi_libraries import OTHER_LIBRARY, MpiLibrary, recognise

__all__ = ["check_before_init", "check_launch", "choose_network", "is_in_step"]

logger = logging.getLogger("mpidist.transport")

_ALONE: Final = "MPIDIST_ALONE"
_SRUN: Final = "srun"
_MPIEXEC: Final = "mpiexec"
_NETMOD: Final = "MPIR_CVAR_CH4_NETMOD"  # the network library that MPICH uses between nodes: "ucx" or "ofi"
_NOT_SOCKETS: Final = "^sockets"  # any provider of libfabric but this one

# Slurm numbers the steps that it makes for itself, such as the shell of a batch script, from here on.
_FIRST_SPECIAL_STEP: Final = 0xFFFFFFF0


def check_launch(
    environ: Mapping[str, str],
    world_size: int,
    library_version: str,
    command: Sequence[str],
    inherits_from_rank: bool = False,
) -> None:
    """Refuse a world of one rank where the launcher started several, or that another library's launcher has split.

    A world of more than one rank is accepted, whatever launchers of MPI set: a step may hold several programs. One rank
    is accepted if the launcher sets one, or `MPIDIST_ALONE=1` is set. Plain `python` in a batch job of several tasks is
    legal, and logs a warning. A program that a rank starts with another MPI library (`inherits_from_rank`) looks just
    like the wrong launcher; the error lists the variables to unset for it, or the command to use instead of `command`:
    the command line, interpreter first.
    """
    if environ.get(_ALONE, "").strip() == "1":
        return
    library = recognise(library_version)
    launch = None if world_size > 1 else _find_launch(environ, library)
    if launch is not None:
        raise TopologyError(_wrong_launch(launch, library, environ, command))
    other = None if inherits_from_rank else other_launch(environ, world_size)
    if other is not None:
        raise TopologyError(_launch_of_other_library(other, world_size, library, command))
    if world_size > 1:
        return
    if "SLURM_JOB_ID" in environ and not is_in_step(environ) and library.size_variable not in environ:
        num_tasks = _number(environ, "SLURM_NTASKS")
        if num_tasks > 1:
            line = _srun_line(library, num_tasks, environ.get("SLURM_JOB_NUM_NODES"), command)
            logger.warning("r0 | one rank in a Slurm job of %d tasks; all of them: %s", num_tasks, line)


def check_before_init(environ: Mapping[str, str], library_version: str, command: Sequence[str]) -> None:
    """Refuse a launcher that MPI_Init would end the process over: PMIx, with an MPICH that lacks it.

    MPI_Get_library_version may be called before MPI_Init: with `mpi4py.rc.initialize = False`.
    """
    library = recognise(library_version)
    # An MPICH with PMIx has --with-pmix=... in the line "MPICH configure:".
    if library.name != "MPICH" or "pmix" in library_version.lower():
        return
    launch = _find_launch(environ, library)
    if launch is not None and PMIX_NAMESPACE in environ and not speaks_pmi(environ):
        raise TopologyError(_wrong_launch(launch, library, environ, command))


def choose_network(environ: MutableMapping[str, str], library_version: str) -> None:
    """Set, before MPI_Init, how MPICH talks between nodes, where that is not set.

    MPICH prefers UCX. But UCX's addresses are too long for the lines of Slurm's PMI-2, which garbles them: MPI_Init
    fails, or waits for ever. So it uses libfabric there; but not libfabric's old provider `sockets`, which MPICH may
    prefer to `tcp`: it sends a short message only in the sender's next call of MPI, which may never come.
    """
    library = recognise(library_version)
    device = next((line for line in library_version.splitlines() if line.startswith("MPICH Device:")), "")
    if library.name != "MPICH" or "ofi" not in device:
        return
    environ.setdefault("FI_PROVIDER", _NOT_SOCKETS)
    if "ucx" not in device or _NETMOD in environ:
        return
    launch = _find_launch(environ, library)
    has_several_nodes = _number(environ, "SLURM_STEP_NUM_NODES") > 1 or _number(environ, "SLURM_HET_SIZE") > 1
    if launch is not None and launch.launcher == _SRUN and PMI_FD in environ and has_several_nodes:
        environ[_NETMOD] = "ofi"
        logger.info("%s=ofi: srun's PMI-2 does not carry the addresses of UCX", _NETMOD)


def _find_launch(environ: Mapping[str, str], library: MpiLibrary) -> LauncherReport | None:
    """Find a launcher that reports more than one rank; None where there is none."""
    sizes = {name: _number(environ, name) for name in SIZE_VARIABLES if name in environ}
    # The library's own launcher is the innermost one, and has the last word.
    if sizes.get(library.size_variable) == 1:
        return None
    in_step = is_in_step(environ)
    for name, size in sizes.items():
        if size > 1:
            # srun's pmi2 plugin sets MPICH_SIZE; mpiexec sets HYDRA_LOCAL_SIZE beside it.
            by_srun = name == MPICH_SIZE and in_step and HYDRA_LOCAL_SIZE not in sizes
            return LauncherReport(_SRUN if by_srun else _MPIEXEC, size, f"{name}={size}")
    # With mpiexec inside an allocation, the step is that of its daemons, one a node.
    num_tasks = _number(environ, STEP_SIZE)
    if not sizes and in_step and num_tasks > 1:
        return LauncherReport(_SRUN, num_tasks, f"{STEP_SIZE}={num_tasks}")
    # PMIx has no variable for the size. A rank above 0 shows that there are several; rank 0 cannot tell.
    last_rank = _number(environ, PMIX_RANK)
    if not sizes and last_rank > 0:
        return LauncherReport(_MPIEXEC, last_rank + 1, f"at least, as {PMIX_RANK}={last_rank}")
    return None


def is_in_step(environ: Mapping[str, str]) -> bool:
    """Whether srun has started this process, and not a shell of a batch job."""
    # 0, 1, ... of srun; absent, "batch", "interactive" or 4294967290 in a shell
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def _number(environ: Mapping[str, str], name: str) -> int:
    # Other programs may use these variables: what is no number is ignored.
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def _wrong_launch(
    launch: LauncherReport, library: MpiLibrary, environ: Mapping[str, str], command: Sequence[str]
) -> str:
    count = launch.num_processes
    plugin = environ.get("SLURM_MPI_TYPE", "none")
    srun_line = _srun_line(library, count, environ.get("SLURM_STEP_NUM_NODES"), command)
    mpiexec_line = _mpiexec_line(library, count, command)
    if launch.launcher == _MPIEXEC:
        found = f"mpiexec started {count} ranks ({launch.variable})"
        advice = f"that mpiexec belongs to another MPI; start with {mpiexec_line}"
    elif plugin.startswith(library.slurm_plugin):
        found = f"srun --mpi={plugin} started {count} ranks ({launch.variable})"
        advice = f"this build of the library does not speak that; inside the allocation use {mpiexec_line}"
    else:
        found = f"srun --mpi={plugin} started {count} ranks ({launch.variable})"
        advice = f"start with `{srun_line}`, or inside the allocation with {mpiexec_line}"
        if library is OTHER_LIBRARY:
            advice += "; `srun --mpi=list` shows each TYPE"
    unset = " ".join(f"-u {name}" for name in UNSET_TO_BE_ALONE if name in environ)
    return (
        f"{found}, but {library.name} does not see them: each would be alone in a world of 1. Needed is one "
        f"world of {count}: {advice}. (If separate programs are meant: `env {unset} python ...`.)"
    )


def _launch_of_other_library(
    launch: LauncherReport, world_size: int, library: MpiLibrary, command: Sequence[str]
) -> str:
    count = launch.num_processes
    if launch.launcher == RAY:  # which runs a program of its own, that calls the user's functions
        command = [command[0], "train.py"]
    world = f"a world of {world_size}"
    return (
        f"{launch.launcher} started {count} processes ({launch.variable}), but {library.name} does not see them: "
        f"each would be in {world}. Needed is one world of {count}, which only a launcher of MPI makes: start with "
        f"{_mpiexec_line(library, count, command)}. (If {world} is meant, set {_ALONE}=1.)"
    )


def _srun_line(library: MpiLibrary, num_tasks: int, num_nodes: str | None, command: Sequence[str]) -> str:
    nodes = f" -N {num_nodes}" if num_nodes else ""
    return f"srun --mpi={library.slurm_plugin}{nodes} -n {num_tasks} {_python_line(command)}"


def _mpiexec_line(library: MpiLibrary, num_ranks: int, command: Sequence[str]) -> str:
    """Give the command with the path of mpiexec, where it is known."""
    own = library.own_mpiexec(command[0] if command else "")
    if own:
        return f"`{own} -n {num_ranks} {_python_line(command)}`"
    return f"`mpiexec -n {num_ranks} {_python_line(command)}`, where mpiexec is that of {library.name}"


def _python_line(command: Sequence[str]) -> str:
    # sys.argv has no interpreter.
    has_interpreter = bool(command) and not command[0].endswith(".py")
    return shlex.join(command if has_interpreter else ["python", *command])
