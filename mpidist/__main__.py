"""The commands of mpidist: `python -m mpidist tune`, for example."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Final

import mpidist
from mpidist.cli import batch_job, doctor, flight, trace, tune
from mpidist.errors import TopologyError, UnavailableError

__all__ = ["main"]

_COMMANDS = (doctor, tune, flight, trace, batch_job)
_RANK_VARIABLES: Final = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: The command's name and arguments; `None` for the arguments of this process.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="mpidist", description="Commands of mpidist. Also: python -m mpidist")
    parser.add_argument("--version", action="version", version=f"mpidist {mpidist.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        subparser = commands.add_parser(command.NAME, help=command.HELP, description=command.__doc__)
        subparser.formatter_class = argparse.RawDescriptionHelpFormatter
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    chosen = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "suspicious MPI execution environment")  # an error says more of it
    try:
        status: int = chosen.run(chosen)
    except (TopologyError, UnavailableError) as error:  # every process has it, and one of them tells
        if _is_first(os.environ):
            print(f"mpidist {chosen.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # the exit status of a shell for a program that SIGPIPE ended
    return status


def _is_first(environ: Mapping[str, str]) -> bool:
    """Whether the launcher calls this process the first one, as far as it says."""
    ranks = [environ[name] for name in _RANK_VARIABLES if name in environ]
    return not ranks or ranks[0] == "0"


if __name__ == "__main__":
    sys.exit(main())
