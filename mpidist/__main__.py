"""The commands of mpidist: `python -m mpidist tune`, for example."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from mpidist.cli import doctor, flight, tune

__all__ = ["main"]

_COMMANDS = (tune, flight, doctor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: The command's name and arguments; `None` for the arguments of this process.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m mpidist", description="Commands of mpidist.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        subparser = commands.add_parser(command.NAME, help=command.HELP, description=command.__doc__)
        subparser.formatter_class = argparse.RawDescriptionHelpFormatter
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    chosen = parser.parse_args(arguments)
    try:
        status: int = chosen.run(chosen)
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # the exit status of a shell for a program that SIGPIPE ended
    return status


if __name__ == "__main__":
    sys.exit(main())
