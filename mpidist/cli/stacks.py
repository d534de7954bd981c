"""Print where the ranks of a running job are in their programs.

Run it on a machine where the job runs, while it runs. Ranks at the same line are put together:

    python -m mpidist stacks

Of several jobs, name one: by the number of its scheduler, or by the process of its launcher. The job goes on. The exit
status is 0 if all ranks on this machine have shown their stacks, 1 if some have not, and 2 if there is no such job.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from mpidist.cli.launching import RefusedError
from mpidist.transport.stacks import Stack, StackFile, read_stacks, stack_files, together
from mpidist.transport.text import name_ranks

__all__ = ["add_arguments", "run"]


_WIDTH: Final = 200
_SILENT: Final = Stack((), "its stack could not be read")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    which = "a number of Slurm, or the process of mpiexec or srun (default: the only job of yours on this machine)"
    parser.add_argument("job", nargs="?", metavar="JOB", help=which)
    parser.add_argument("--whole", action="store_true", help="print the whole stacks, innermost lines first")


def run(arguments: argparse.Namespace) -> int:
    """Report."""
    jobs = [files for files in _jobs() if arguments.job is None or arguments.job in _names(files[0])]
    if len(jobs) != 1:
        raise RefusedError(_choice(arguments.job, jobs))
    (files,) = jobs
    found, size = read_stacks([file.pid for file in files]), files[0].size
    stacks = {file.rank: found.get(file.pid, _SILENT) for file in files}
    rest = f", of {size}: run this command on the other machines, too" if len(stacks) < size else ""
    lines = [f"{_title(files)}, {name_ranks(stacks)} on {socket.gethostname()}{rest}"]
    for ranks, stack in together(stacks, arguments.whole):
        lines.append(f"{ranks}: {stack.place}")
        if arguments.whole:
            lines += [f"    {frame}" for frame in stack.frames]
    print("\n".join(lines), flush=True)
    return int(not all(stack.frames for stack in stacks.values()))


def _jobs() -> list[list[StackFile]]:
    """Find the ranks that run here, a list for each launcher; not those that run this command."""
    jobs: dict[int, list[StackFile]] = {}
    for file in stack_files():
        jobs.setdefault(file.launcher, []).append(file)
    return [files for files in jobs.values() if os.getpid() not in {file.pid for file in files}]


def _title(files: Sequence[StackFile]) -> str:
    command = _command(files[0].pid)
    return f"job {files[0].job}: {command if len(command) <= _WIDTH else command[: _WIDTH - 3] + '...'}"


def _choice(job: str | None, found: Sequence[Sequence[StackFile]]) -> str:
    """Explain why there is not one job."""
    if found:
        return "\n".join(["several jobs run here, so name one:", *(f"  {_title(files)}" for files in found)])
    which = "no job" if job is None else f"no job {job}"
    why = "or its ranks show no stacks (MPIDIST_STACK_SIGNAL=off, or they have not imported mpidist)"
    return f"{which} of yours runs on {socket.gethostname()}, {why}"


def _names(file: StackFile) -> set[str]:
    """Return how people may name a job: by its number, or its launcher, of which one process may be on each node."""
    try:
        above = Path(f"/proc/{file.launcher}/stat").read_text().rpartition(")")[2].split()[1]
    except OSError:  # it has ended
        above = file.job
    return {file.job, str(file.launcher), above}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:  # it has ended
        return "ended"
