"""The files in which MPI shares memory: they lose their names after the start, so that no job leaves one behind."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Final

__all__ = ["SHARED_MEMORY", "mapped_mpi_files", "unlink_files_of_all"]

SHARED_MEMORY: Final = "/dev/shm"
# How the names of MPICH 5 and of Open MPI 5 begin. Open MPI 4 warns when it ends and misses a name of its own.
_PREFIXES: Final = ("mpich_shm_", "mpich_vci_", "sm_segment.")

File = tuple[str, int]  # its name, and the number of its inode


def mapped_mpi_files() -> frozenset[File]:
    """List the files in which MPI shares memory with this process, and which have names. Local."""
    found = set()
    with suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            if SHARED_MEMORY in line:
                *_, inode, path = line.rstrip("\n").split(maxsplit=5)
                folder, _, name = path.rpartition("/")
                if folder == SHARED_MEMORY and name.startswith(_PREFIXES) and " " not in name:  # name (deleted)
                    found.add((name, int(inode)))
    return frozenset(found)


def unlink_files_of_all(mapped: Iterable[Collection[File]]) -> None:
    """Remove the names of files that all ranks of a node have mapped. Local; one rank of the node calls it.

    MPI opens a file by its name while it starts, and never later: a rank that has mapped the file needs no name, and
    MPI_Finalize finds none to remove. The memory lives as long as a rank has it mapped, however the rank ends. Without
    that, MPICH leaves a file of some MiB for every job that is aborted or killed, and Open MPI for every job whose
    launcher is killed.
    """
    first, *others = map(frozenset, mapped)
    for name, inode in first.intersection(*others):
        path = f"{SHARED_MEMORY}/{name}"
        with suppress(OSError):  # another job's, or gone already
            if os.stat(path).st_ino == inode:
                os.unlink(path)
