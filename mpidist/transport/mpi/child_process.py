"""Whether this process is a child of a rank: a child has the rank's environment, and must not start MPI with it.

A launcher has a connection to the process that it started, and to no child of that process. A child that starts MPI
with the same environment ends in the middle of MPI's start, or disturbs the rank.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Final

from mpidist.errors import TopologyError
from mpidist.transport.mpi.launcher_variables import LAUNCHER_PREFIXES, OF_LAUNCHED_PROCESSES, PMI_FD

__all__ = [
    "INHERITS_FROM_RANK",
    "disconnect_from_launcher",
    "is_forked_from_rank",
    "launcher_here",
    "launcher_or_parent",
    "mark_rank",
    "read_stat",
    "require_no_child",
    "require_variables",
]

_STAT_BYTES: Final = 4096  # more than the line has
# A variable, which children inherit, with the id of the process that started MPI.
_MARK: Final = "_MPIDIST_RANK_PID"
_IMPORTED_BY: Final = os.getpid()  # processes that are forked later have other ids
# Whether this program's environment is that of a rank which started it, in several steps perhaps.
INHERITS_FROM_RANK: Final = os.environ.get(_MARK, "") not in ("", str(os.getpid()))
# Programs that start ranks: a process that they start is a rank of its own, also below another rank.
_LAUNCHERS: Final = (
    "hydra_pmi_proxy", "mpiexec", "mpiexec.hydra", "mpirun", "orted", "orterun", "prted", "prterun", "slurmstepd",
    "srun",
)  # fmt: skip


def mark_rank(environ: MutableMapping[str, str]) -> None:
    """Mark this process as a rank, in the environment that its child processes inherit."""
    environ[_MARK] = str(os.getpid())


def is_forked_from_rank(environ: Mapping[str, str]) -> bool:
    """Whether this process has just been forked from one that had started MPI."""
    return environ.get(_MARK) == str(os.getppid())


def disconnect_from_launcher(environ: Mapping[str, str]) -> None:
    """Give up, in a process that was forked from a rank, the rank's connection to the launcher.

    As long as a process has it, Hydra waits for the end of a rank that is killed, and does not end the job.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if environ.get(PMI_FD, "").isdecimal() and mpi is not None and not mpi.Is_finalized():  # then the number is free
        number = int(environ[PMI_FD])
        os.closerange(number, number + 1)  # first: the program may have left no other number
        null = os.open(os.devnull, os.O_RDWR)
        if null != number:
            os.dup2(null, number)
            os.close(null)


def require_no_child(environ: Mapping[str, str]) -> None:
    """Refuse to start MPI in a child of a rank or anew after `exec`, or to use it in a fork; errors have the remedy."""
    pid, own = environ.get(_MARK, ""), os.getpid()
    is_of_launch = any(name in environ for name in OF_LAUNCHED_PROCESSES)
    if pid == str(own):
        mpi = sys.modules.get("mpi4py.MPI")
        if is_of_launch and (mpi is None or not mpi.Is_initialized()):
            raise TopologyError(
                f"process {own} is a rank whose program was replaced by os.exec after it had started MPI, which starts "
                "once in a process: call os.exec before the first strategy. `mpidist run --max-restarts` starts failed "
                "ranks again"
            )
        return
    if is_of_launch and _is_worker():
        what = f"process {own} is a multiprocessing worker of a rank"
    elif pid and os.getpid() != _IMPORTED_BY:
        what = f"process {own} was forked from a rank, process {pid}"
    elif pid and is_of_launch and _is_below(int(pid)):
        what = f"process {own} is a child of a rank, process {pid}"
    elif PMI_FD in environ and not _is_open(environ[PMI_FD]):
        what = f"process {own} has the environment of a rank ({PMI_FD}), but not the rank's connection to the launcher"
    else:
        return
    text = (
        f"{what}, and cannot take the rank's place in MPI. Guard the script: build strategies below "
        '`if __name__ == "__main__":`, so that workers, which import the script, do not run it. A process that is '
        "to work by itself can do without MPI: mpidist.OneDeviceStrategy(). Another program of several ranks needs a "
        "launcher of its own"
    )
    _end_endless_pool(text, int(pid) if pid else os.getppid())
    raise TopologyError(text)


def require_variables(environ: Mapping[str, str]) -> None:
    """Refuse a world of one rank if a launcher of MPI started this process, and something removed its variables."""
    name = next((name for _, name in _ancestors()), "")
    is_known = any(its.startswith(LAUNCHER_PREFIXES) for its in environ)
    if name in _LAUNCHERS and not is_known and environ.get("MPIDIST_ALONE", "").strip() != "1":
        raise TopologyError(
            f"{name} started this process, and its variables, such as {' or '.join(OF_LAUNCHED_PROCESSES[2::2])}, are "
            "missing: each rank would be alone. Something between removed them, as env -i or a container's clean "
            "environment does: pass them on. For a process that is meant to be alone set MPIDIST_ALONE=1"
        )


def _is_worker() -> bool:
    process = sys.modules.get("multiprocessing.process")  # workers have imported it
    return process is not None and (process.parent_process() is not None or _imports_script(process.current_process()))


def _imports_script(worker: Any) -> bool:
    """Whether a worker has just been started, and imports the script of its parent."""
    return getattr(worker, "_inheriting", False)  # multiprocessing itself finds a missing guard by this attribute


def _end_endless_pool(text: str, rank_pid: int) -> None:
    """If this process is a worker of a `multiprocessing.Pool`, end the rank that has the pool, and report why.

    A pool replaces workers that die while they import the script, for ever. The rank need not be the parent of the
    workers, which may be a fork server.
    """
    process = sys.modules.get("multiprocessing.process")
    worker = None if process is None else process.current_process()
    if worker is not None and _imports_script(worker) and "PoolWorker" in worker.name:
        os.write(2, f"{text}. The rank is ended, as its pool would start such workers for ever\n".encode())
        os.kill(rank_pid, signal.SIGTERM)


def launcher_here() -> int | None:
    """Return the id of the launcher's process that started this process, or a parent of it."""
    return next((pid for pid, name in _ancestors() if name in _LAUNCHERS), None)


def launcher_or_parent() -> int:
    """Return `launcher_here()`; without a launcher that has a known name, the parent of this process."""
    return launcher_here() or os.getppid()


def _is_below(pid: int) -> bool:
    """Whether a process is an ancestor of this process, without a launcher between them."""
    return next((above == pid for above, name in _ancestors() if above == pid or name in _LAUNCHERS), False)


def _ancestors() -> Iterator[tuple[int, str]]:
    """List the ids and names of the processes above this one; the last name is "" if this user may not see it."""
    above = os.getppid()
    while above > 1:
        try:
            name, _, parent, _ = read_stat(above)
        except OSError:
            name, parent = "", 0
        yield above, name
        above = parent


def read_stat(pid: int) -> tuple[str, str, int, int]:
    """Read the name of a process, the letter of its state, its parent, and when it began; `OSError` if it is gone."""
    file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)  # a third of what `pathlib` takes; an error reads it for each rank
    try:
        text = os.read(file, _STAT_BYTES)
    finally:
        os.close(file)
    head, _, tail = text.decode(errors="replace").rpartition(")")  # 1234 (python) S 1230 ...; a name may hold anything
    state, parent, *fields = tail.split()
    return head.partition("(")[2], state, int(parent), int(fields[17])


def _is_open(number: str) -> bool:
    try:
        os.fstat(int(number))
    except (OSError, ValueError):
        return False
    return True
