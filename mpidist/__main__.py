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
        arguments: Its name and arguments; `None` for those of the process.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m mpidist", description="Commands of mpidist.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        its = commands.add_parser(command.NAME, help=command.HELP, description=command.__doc__)
        its.formatter_class = argparse.RawDescriptionHelpFormatter
        command.add_arguments(its)
        its.set_defaults(run=command.run)
    chosen = parser.parse_args(arguments)
    try:
        status: int = chosen.run(chosen)
    except BrokenPipeError:  # as with `| head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as a program that SIGPIPE ends
    return status


if __name__ == "__main__":
    sys.exit(main())
