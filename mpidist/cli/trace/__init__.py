"""`python -m mpidist trace`: one file of the traces of all ranks, and who waited for whom."""

from mpidist.cli.trace.command import HELP, NAME, add_arguments, run

__all__ = [
    "HELP",
    "NAME",
    "add_arguments",
    "run",
]
