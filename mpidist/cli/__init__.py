"""The commands of `python -m mpidist`, one in each module.

A command has a `NAME`, a line of `HELP`, `add_arguments(parser)`, and `run(arguments)`, which returns the exit status.
"""

from mpidist.cli import batch_job, checkpoint, doctor, flight, run, stacks, trace, tune

__all__ = [
    "batch_job",
    "checkpoint",
    "doctor",
    "flight",
    "run",
    "stacks",
    "trace",
    "tune",
]
