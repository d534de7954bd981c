"""Runs the tests at several numbers of MPI ranks from one pytest command.

    python -m pytest tests --ranks 1,2,3,4

The *outer* session, which the user starts, imports no mpi4py and collects nothing. For each number of
ranks it starts ``mpiexec -n N`` with an *inner* session on every rank, and replays what these write.

    plugin.py     options and marks; chooses the outer or the inner session
    outer.py      the plan over the rank counts          replay.py   inner events -> pytest's own hooks
    follow.py     one launch: progress, limits, death    launch.py   mpiexec, its environment, its end
    inner.py      one rank's pytest session              rank.py     the program that mpiexec starts
    agree.py      one verdict of all ranks               reports.py  one report of several ranks
    gather.py     one collection of all ranks            selection.py marks, and skips in CI
    byhand.py     mpiexec or srun typed by the user
    stacks.py     the Python stacks of all ranks         wire.py     JSON lines from inner to outer

Environment variables: ``MPI_SESSION_DIR`` marks an inner session and names the folder of its launch;
``TEST_LAUNCH_TOKEN`` is inherited by every process below a launch, so that the outer session can end
all of them. A test that starts processes of its own gives them ``clean_environment()``.
"""

from mpi_session.launch import clean_environment

__all__ = ["clean_environment"]
