"""Versions of mpidist, and of what is below it. Imports mpi4py, so that only ranks of MPI may import it."""

from __future__ import annotations

import platform
from pathlib import Path

import mpi4py
import numpy as np
from mpi4py import MPI
from record import commit_of

import mpidist

__all__ = ["mpi_versions"]


def mpi_versions() -> dict[str, str]:
    """Name versions, for people and for CSV files."""
    name, version = MPI.get_vendor()
    return {
        "mpi": f"{name} {'.'.join(map(str, version))}",
        "mpi4py": mpi4py.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "commit": commit_of(Path(mpidist.__file__).parent.parent),
    }
