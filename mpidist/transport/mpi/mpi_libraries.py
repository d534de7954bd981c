"""The MPI libraries: how to recognise each, and which launcher starts its ranks."""

from __future__ import annotations

import os.path
import shutil
from dataclasses import dataclass
from typing import Final, final

from mpidist.transport.mpi.launcher_variables import MPICH_SIZE, OPEN_MPI_SIZE

__all__ = ["OTHER_LIBRARY", "MpiLibrary", "recognise"]


@final
@dataclass(frozen=True)
class MpiLibrary:
    """Start of ranks with one kind of MPI library.

    Attributes:
        sign: The text in `MPI_Get_library_version` that identifies the library, in lower case.
        slurm_plugin: The library's plugin for `srun --mpi=`.
        size_variable: The variable in which the library's own mpiexec passes the number of ranks.
        companion: A program that only this library's wheel puts beside mpiexec; "" for none.
    """

    name: str
    sign: str
    slurm_plugin: str
    size_variable: str
    companion: str

    def own_mpiexec(self, interpreter: str) -> str:
        """Return the mpiexec that is surely this library's, "" if there is none: that of the wheel, or Debian's."""
        folder = os.path.dirname(interpreter)
        beside, companion = os.path.join(folder, "mpiexec"), os.path.join(folder, self.companion)
        if folder and self.companion and os.path.exists(beside) and os.path.exists(companion):
            return beside
        of_debian = f"mpiexec.{self.name.replace(' ', '').lower()}"  # mpiexec.openmpi, mpiexec.mpich
        return of_debian if shutil.which(of_debian) else ""


# First present wins: "CRAY MPICH version 8.1.29" is no plain MPICH.
_LIBRARIES: Final = (
    MpiLibrary("Cray MPICH", "cray mpich", "cray_shasta", MPICH_SIZE, ""),
    MpiLibrary("MVAPICH", "mvapich", "pmi2", MPICH_SIZE, ""),
    MpiLibrary("Intel MPI", "intel(r) mpi", "pmi2", MPICH_SIZE, "impi_info"),
    MpiLibrary("MPICH", "mpich", "pmi2", MPICH_SIZE, "hydra_pmi_proxy"),
    MpiLibrary("Open MPI", "open mpi", "pmix", OPEN_MPI_SIZE, "ompi_info"),
)
# `srun --mpi=list` is what a user of any other library has to look at.
OTHER_LIBRARY: Final = MpiLibrary("this MPI library", "", "TYPE", MPICH_SIZE, "")


def recognise(library_version: str) -> MpiLibrary:
    """Return the library with this text of `MPI_Get_library_version`."""
    # "MPICH Version:      5.0.2", "Open MPI v5.0.11, package: ...", "Intel(R) MPI Library 2021.13 for ..."
    first_line = library_version.strip().partition("\n")[0].lower()
    return next((library for library in _LIBRARIES if library.sign in first_line), OTHER_LIBRARY)
