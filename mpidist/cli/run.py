"""Run a program on several ranks, with the launcher of the MPI that mpi4py loads.

    mpidist run -n 4 train.py --epochs 10
    mpidist run -n 4 --tag -m package.train

In an allocation of Slurm (sbatch, salloc) srun starts the ranks; without -n, as many as the job has tasks. Elsewhere
mpiexec starts them on this machine, each on cores of its own if there are enough. --dry-run prints the command. The
exit status is that of the launcher. Variables that are set already stay as they are.

    mpidist run -n 4 --max-restarts 10 train.py
    mpidist run -n 4 --max-restarts 10 --min-ranks 2 train.py

starts the ranks again when one is killed, a node of the job is lost, or the program fails; the program goes on from its
newest checkpoint. If it fails twice without a new checkpoint in between, it is not started again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from mpidist.cli.allocation import find_lost_nodes, nodes_of_job
from mpidist.cli.launching import Launch, RefusedError, command_text, count
from mpidist.cli.restarts import Limits, Nodes, start_until_done
from mpidist.transport.mpi.launch import is_in_step
from mpidist.transport.mpi.launcher_variables import rank_from_environment
from mpidist.transport.mpi.library import library_version
from mpidist.transport.mpi.mpi_libraries import MpiLibrary, recognise

__all__ = ["add_arguments", "run"]

_THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_OPEN_MPI_AS_ROOT: Final = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# With more ranks than cores, a rank of MPICH that waits should give up its core soon.
_MPICH_YIELDS: Final = {"MPIR_CVAR_POLLS_BEFORE_YIELD": "10", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("-n", "--ranks", type=count, metavar="N", help="number of ranks; in a job of Slurm its tasks")
    parser.add_argument(
        "--threads", type=count, metavar="T", help="threads of a rank; by default its share of the cores"
    )
    parser.add_argument("--tag", action="store_true", help="put its rank before each line that a rank prints")
    parser.add_argument("--max-restarts", type=count, metavar="N", help="start again after a failure, at most N times")
    parser.add_argument(
        "--min-ranks", type=count, metavar="M", help="after a killed rank go on with one rank fewer, down to M"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command, and run nothing")
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module, as of python -m")
    parser.add_argument("program", metavar="PROGRAM", help="a Python file, or a command")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def run(arguments: argparse.Namespace) -> int:
    """Become the launcher, start it again and again, or print its command."""
    hangup = signal.getsignal(signal.SIGHUP)
    library = recognise(library_version())
    signal.signal(signal.SIGHUP, hangup)  # UCX takes it, also from nohup
    try:
        ranks, program = _num_ranks(arguments, os.environ), _program(arguments)
        nodes = _nodes(os.environ) if arguments.max_restarts else None
        launch = _launch(arguments, library, program, ranks)
    except RefusedError as error:
        print(f"mpidist run: {error}", file=sys.stderr)
        return 2
    sys.stdout.flush()
    if nodes is not None and not arguments.dry_run:
        limits = Limits(arguments.max_restarts, arguments.min_ranks)
        return start_until_done(
            lambda number, lost: _launch(arguments, library, program, number, lost), ranks, limits, nodes
        )
    if not arguments.dry_run:
        os.execvpe(launch.command[0], launch.command, {**os.environ, **launch.variables})
    print(command_text(launch.command, launch.variables))
    return 0


def _in_job(environ: Mapping[str, str]) -> bool:
    """Whether this process is in a job of Slurm, whose srun starts the ranks."""
    return "SLURM_JOB_ID" in environ and shutil.which("srun") is not None


def _nodes(environ: Mapping[str, str]) -> Nodes:
    """Return the nodes of the job; without one, this machine, which is not lost."""
    names = nodes_of_job(environ) if _in_job(environ) else []
    if not names:
        return Nodes(["this machine"], lambda names: [], None)
    if not os.access(".", os.W_OK):
        raise RefusedError(f"--max-restarts writes into {Path.cwd()}, and may not: use a folder that all nodes share")
    return Nodes(names, find_lost_nodes, Path.cwd())


def _num_ranks(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Return the number of ranks, and refuse arguments that do not fit."""
    if is_in_step(environ) or ("SLURM_JOB_ID" not in environ and rank_from_environment(environ) is not None):
        raise RefusedError("this process is a rank already: a launcher has started it; use `mpidist run` without one")
    ranks: int | None = arguments.ranks
    if ranks is None and _in_job(environ):
        ranks = int(environ.get("SLURM_NTASKS", "1"))
    if ranks is None:
        cores = _num_cores()
        raise RefusedError(
            f"how many ranks? Give -n, as in `mpidist run -n {cores} ...`: this machine has {cores} cores"
        )
    if arguments.min_ranks and not arguments.max_restarts:
        raise RefusedError("--min-ranks is for ranks that are started again: give --max-restarts, too")
    if ranks < (arguments.min_ranks or 1):
        raise RefusedError(f"--min-ranks {arguments.min_ranks} is more than the {ranks} ranks of the start")
    return ranks


def _launch(
    arguments: argparse.Namespace, library: MpiLibrary, program: Sequence[str], ranks: int, lost: Sequence[str] = ()
) -> Launch:
    """Choose the launcher and its options. `lost`: nodes of the job that are left out."""
    environ = os.environ
    if _in_job(environ):
        threads = arguments.threads or int(environ.get("SLURM_CPUS_PER_TASK", "1"))
        options = [f"--mpi={library.slurm_plugin}", "-n", str(ranks), "-c", str(threads), "--kill-on-bad-exit=1"]
        options += ["--label"] * arguments.tag
        if lost:
            options += [f"--nodes={len(nodes_of_job(environ)) - len(lost)}", f"--exclude={','.join(lost)}"]
        return Launch(["srun", *options, *program], _threads(arguments, threads, environ))
    cores = _num_cores()
    share = cores // ranks
    threads = arguments.threads or max(1, share)
    options, variables = _options_of(library, share if share >= threads else 0, ranks > cores)
    if arguments.tag:
        options.append("--tag-output" if library.name == "Open MPI" else "-prepend-rank")
    command = [_mpiexec(library), "-n", str(ranks), *options, *program]
    variables = {name: value for name, value in variables.items() if name not in environ}
    return Launch(command, _threads(arguments, threads, environ) | variables)


def _program(arguments: argparse.Namespace) -> list[str]:
    """Return the command of one rank."""
    if arguments.module:
        return [sys.executable, "-m", arguments.program, *arguments.arguments]
    path = Path(arguments.program)
    if path.suffix != ".py":
        if shutil.which(arguments.program) is None:
            raise RefusedError(f"there is no program {arguments.program}: give a Python file, or a command on PATH")
        return [arguments.program, *arguments.arguments]
    if not path.is_file():
        raise RefusedError(f"there is no file {arguments.program} in {Path.cwd()}")
    return [sys.executable, arguments.program, *arguments.arguments]


def _options_of(library: MpiLibrary, share: int, has_few_cores: bool) -> tuple[list[str], dict[str, str]]:
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


def _mpiexec(library: MpiLibrary) -> str:
    own = library.own_mpiexec(sys.executable) or shutil.which("mpiexec")
    if own is None:
        raise RefusedError(
            f"mpi4py has loaded {library.name}, and there is no mpiexec of it on PATH: load the module that has it, or "
            "install an MPI with its mpiexec into this environment: `pip install mpich`"
        )
    return own


def _threads(arguments: argparse.Namespace, threads: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for threads; a number that the user has set holds, unless --threads was given."""
    if _THREADS[0] in environ and not arguments.threads:  # the other libraries read it, too
        return {}
    return {name: str(threads) for name in _THREADS if arguments.threads or name not in environ}


def _num_cores() -> int:
    """Return the number of cores that this process may use: threads of one core count once."""
    usable = os.sched_getaffinity(0)
    files = [Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in usable]
    return len({file.read_text() if file.exists() else str(file) for file in files})
