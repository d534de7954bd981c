"""The commands of mpidist: `python -m mpidist tune`, for example."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from typing import Final, NoReturn

import mpidist
from mpidist.cli.launching import RefusedError
from mpidist.errors import TopologyError, UnavailableError
from mpidist.transport.mpi.launched_rank import let_first_rank_end
from mpidist.transport.mpi.launcher_variables import rank_from_environment
from mpidist.transport.shared_errors import is_shared, mark_shared

__all__ = ["main", "run_command"]

# By the name of a command its module, of which a job of many ranks reads only the chosen one, and a line of help.
_COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "run": ("run", "run a program on several ranks, with the launcher of the MPI that mpi4py loads"),
    "doctor": ("doctor", "check MPI, launcher, memory and GPUs, and report problems"),
    "tune": ("tune", "measure this machine, so that reductions take the fastest way"),
    "stacks": ("stacks", "print where the ranks of a running job are in their programs"),
    "flight": ("flight.command", "merge the flight recorders of a job, and find where its ranks diverged"),
    "trace": ("trace.command", "merge the traces of all ranks for Perfetto, and find which ranks waited for which"),
    "checkpoint": ("checkpoint", "list checkpoints, or name the leaves in which two differ"),
    "sbatch": ("batch_job", "submit a training to Slurm, with the job script that fits"),
}


def main() -> NoReturn:
    """Run the command that this process's arguments name, and end with its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # its encoding may lack characters of users' texts
    try:
        end = SystemExit(run_command(sys.argv[1:]))
    except SystemExit as problem:  # wrong arguments, or --help
        end = problem
    if end.code:
        let_first_rank_end(os.environ)
    mark_shared(end, ())  # every rank ends so: none waits for this one, and a traceback would tell nothing
    raise end


def run_command(arguments: Sequence[str]) -> int:
    """Run the command of these arguments, and return the exit status."""
    is_first = not rank_from_environment(os.environ)
    out, err = (sys.stdout, sys.stderr) if is_first else (io.StringIO(), io.StringIO())  # the first prints the same
    with redirect_stdout(out), redirect_stderr(err):
        chosen = _parse(arguments)
    warnings.filterwarnings("ignore", "suspicious MPI execution environment")  # an error says more of it
    try:
        status: int = chosen.run(chosen)
        if sys.stdout is not None:  # closed, as by `>&-`
            sys.stdout.flush()
    except RefusedError as error:
        print(f"mpidist {chosen.command}: {error}", file=sys.stderr)
        return 2
    except (TopologyError, UnavailableError, ValueError) as error:
        if isinstance(error, ValueError) and not is_shared(error):
            raise
        if is_first:  # every process has it, and one of them tells
            print(f"mpidist {chosen.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # the exit status of a shell for a program that SIGPIPE ended
    except OSError as error:
        if error.errno == errno.ENOENT and error.filename is None:  # as of `Path.cwd`
            print(f"mpidist {chosen.command}: the current folder was deleted: cd to another one", file=sys.stderr)
            return 2
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would fail again
        what = error.filename or "standard output"
        print(f"mpidist {chosen.command}: {what} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    return status


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mpidist", description="Commands of mpidist. Also: python -m mpidist")
    parser.add_argument("--version", action="version", version=f"mpidist {mpidist.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    first = next((word for word in arguments if not word.startswith("-")), None)
    for name, (module, help_line) in _COMMANDS.items():
        takes_others = name == "sbatch"  # whose --ntasks is no short form of --ntasks-per-node
        subparser = commands.add_parser(name, help=help_line, allow_abbrev=not takes_others)
        if name == first:
            command, chosen_parser = import_module(f"mpidist.cli.{module}"), subparser
            subparser.description = command.__doc__
            subparser.formatter_class = argparse.RawDescriptionHelpFormatter
            command.add_arguments(subparser)
            subparser.set_defaults(run=command.run)
    chosen, unknown = parser.parse_known_args(arguments)
    if unknown and not getattr(command, "TAKES_UNKNOWN", False):
        chosen_parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    chosen.unknown = unknown
    return chosen


if __name__ == "__main__":
    main()
