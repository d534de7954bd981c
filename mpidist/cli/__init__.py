"""The commands of `python -m mpidist`, one in each module.

A command has a `NAME`, a line of `HELP`, `add_arguments(parser)`, and `run(arguments)`, which returns the exit status.
"""

from mpidist.cli import doctor, flight, trace, tune

__all__ = [
    "doctor",
    "flight",
    "trace",
    "tune",
]
