"""Jobs in which MPI itself says that a process has failed, and the other ranks go on: ULFM of Open MPI."""

import dataclasses

import pytest
from mpi4py import MPI
from mpi_session.launch import Launcher

from jobs.faults import job

__all__ = ["HAS_ULFM", "job", "survivor"]

HAS_ULFM = "Open MPI" in MPI.Get_library_version()  # MPICH ends the job with a rank


@pytest.fixture
def survivor(job, monkeypatch):
    """Start jobs that outlive their ranks."""
    plain = Launcher.find(None)
    launcher = dataclasses.replace(plain, command=(*plain.command, "--with-ft", "ulfm"))
    monkeypatch.setattr(Launcher, "find", lambda given: launcher)
    return job
