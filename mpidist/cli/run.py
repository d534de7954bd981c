"""Run a program on several ranks, with the launcher of the MPI that mpi4py loads.

    mpidist run -n 4 train.py --epochs 10
    mpidist run -n 4 --tag -m package.train

In a job of Slurm srun starts the ranks, in one of Flux `flux run`, in one of PBS mpiexec on its nodes; without -n, as
many as the job of Slurm or PBS has tasks. Elsewhere mpiexec starts them on this machine, each on cores of its own if
there are enough. --dry-run prints the command. The exit status is that of the launcher. Variables that are set already
stay as they are.

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

from mpidist.cli.allocation import Allocation, Start, find_allocation, num_cores
from mpidist.cli.launching import THREAD_VARIABLES, Launch, RefusedError, command_text, count
from mpidist.cli.restarts import start_until_done
from mpidist.transport.mpi.launch import is_in_step
from mpidist.transport.mpi.launcher_abort import flush_standard_streams
from mpidist.transport.mpi.launcher_variables import rank_from_environment
from mpidist.transport.mpi.library import library_version
from mpidist.transport.mpi.mpi_libraries import recognise

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "-n", "--ranks", type=count, metavar="N", help="number of ranks; in a job of Slurm or PBS its tasks"
    )
    parser.add_argument(
        "--threads", type=count, metavar="T", help="threads of a rank; by default its share of the cores"
    )
    parser.add_argument("--tag", action="store_true", help="put its rank before each line that a rank prints")
    parser.add_argument("--max-restarts", type=count, metavar="N", help="start again after a failure, at most N times")
    parser.add_argument(
        "--min-ranks", type=count, metavar="M", help="after a killed rank continue with one rank fewer, down to M"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command, and run nothing")
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module, as of python -m")
    parser.add_argument(
        "words", nargs=argparse.PARSER, metavar="PROGRAM", help="a Python file, or a command, and its arguments"
    )


def run(arguments: argparse.Namespace) -> int:
    """Become the launcher, start it again and again, or print its command."""
    _open_closed_streams()
    hangup = signal.getsignal(signal.SIGHUP)
    library = recognise(library_version())
    signal.signal(signal.SIGHUP, hangup)  # UCX takes it, also from nohup
    allocation = find_allocation(os.environ)

    def launch(ranks: int, lost: Sequence[str]) -> Launch:
        start = Start(library, ranks, arguments.threads, arguments.tag)
        return _launch(allocation.launcher(start, lost), arguments, program)

    ranks, program = _num_ranks(arguments, allocation, os.environ), _program(arguments)
    if arguments.max_restarts and allocation.spans_nodes and not os.access(".", os.W_OK):
        here = Path.cwd()
        raise RefusedError(f"--max-restarts writes into {here}, and may not: use a folder that all nodes share")
    first = launch(ranks, ())
    flush_standard_streams()
    if arguments.max_restarts and not arguments.dry_run:
        return start_until_done(launch, ranks, allocation, arguments.max_restarts, arguments.min_ranks)
    if not arguments.dry_run:
        os.execvpe(first.command[0], first.command, {**os.environ, **first.variables})
    print(command_text(first.command, first.variables))
    return 0


def _open_closed_streams() -> None:
    """Open the null device in place of standard streams that are closed, without which MPICH's mpiexec fails."""
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(file, True)
    os.close(file)


def _num_ranks(arguments: argparse.Namespace, allocation: Allocation, environ: Mapping[str, str]) -> int:
    """Return the number of ranks, and refuse arguments that do not fit."""
    if is_in_step(environ) or ("SLURM_JOB_ID" not in environ and rank_from_environment(environ) is not None):
        raise RefusedError("this process is a rank already: a launcher has started it; use `mpidist run` without one")
    ranks: int | None = arguments.ranks or allocation.ranks
    if ranks is None:
        cores = num_cores()
        raise RefusedError(
            f"how many ranks? Give -n, as in `mpidist run -n {cores} ...`: this machine has {cores} cores"
        )
    if arguments.min_ranks and not arguments.max_restarts:
        raise RefusedError("--min-ranks is for ranks that are started again: give --max-restarts, too")
    if ranks < (arguments.min_ranks or 1):
        raise RefusedError(f"--min-ranks {arguments.min_ranks} is more than the {ranks} ranks of the start")
    return ranks


def _launch(launcher: Launch, arguments: argparse.Namespace, program: Sequence[str]) -> Launch:
    """Add the program, and variables that are not set; a number of threads that is set holds, unless one was given."""
    environ, threads = os.environ, str(launcher.threads)
    variables = {name: value for name, value in launcher.variables.items() if name not in environ}
    if arguments.threads or THREAD_VARIABLES[0] not in environ:  # the other libraries read it, too
        variables |= {name: threads for name in THREAD_VARIABLES if arguments.threads or name not in environ}
    return launcher._replace(command=[*launcher.command, *program], variables=variables)


def _program(arguments: argparse.Namespace) -> list[str]:
    """Return the command of one rank."""
    words: list[str] = arguments.words
    words = words[words[0] == "--" :]  # which some versions of Python leave before the program
    name = words[0]
    if arguments.module:
        return [sys.executable, "-m", *words]
    if Path(name).suffix == ".py":
        if not Path(name).is_file():
            raise RefusedError(f"there is no file {name} in {Path.cwd()}")
        return [sys.executable, *words]
    if shutil.which(name) is None:
        if Path(name).is_file():
            why = "is no command on PATH, and its name does not end in .py"
            raise RefusedError(f"{name} {why}: give `python {name}`, or make it executable and give its path")
        raise RefusedError(f"there is no program {name}: give a Python file, or a command on PATH")
    return words
