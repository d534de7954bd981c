"""Runs the tests at several numbers of MPI ranks from one pytest command.

    python -m pytest tests --ranks 1,2,3,4

The *outer* session, which the user starts, imports no mpi4py and collects nothing. For each number of
ranks it starts ``mpiexec -n N`` with an *inner* session on every rank, and replays what these write. Tests that need no
ranks run beside these, in *lanes*: launches of one process.

    plugin.py           options and marks; chooses the outer or the inner session
    outer/session.py    the plan over the launches
    outer/follow.py     one launch: progress, limits, death
    outer/replay.py     inner events -> pytest's own hooks
    outer/times.py      seconds of each module
    inner/session.py    one rank's pytest session
    inner/agree.py      one verdict of all ranks
    inner/gather.py     one collection of all ranks
    inner/byhand.py     mpiexec or srun typed by the user
    launch.py           mpiexec, its environment, its end
    rank.py             the program that mpiexec starts
    selection.py        marks, samples, lanes, and skips in CI
    reports.py          one report of several ranks
    stacks.py           the Python stacks of all ranks
    wire.py             JSON lines from inner to outer

Environment variables: ``MPI_SESSION_DIR`` marks an inner session and names the folder of its launch;
``TEST_LAUNCH_TOKEN`` is inherited by every process below a launch, so that the outer session can end
all of them. A test that starts processes of its own gives them ``clean_environment()``.
"""

from mpi_session.launch import HANG_SECONDS, OF_RANKS, clean_environment

__all__ = ["HANG_SECONDS", "OF_RANKS", "clean_environment"]
