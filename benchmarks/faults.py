"""Which rank is at fault, and in which line? What mpidist, torchrun and plain mpi4py print of eleven faults.

python benchmarks faults                                         # an hour; writes results/<machine>/faults.csv
python benchmarks faults --faults killed --tools mpidist,mpich   # these alone; other rows of the file stay

A cell is a job of four ranks in which rank 2, in two faults with another one, goes wrong in its sixth step. A deadline
is 5 s where a tool has one. `torchrun debug` has TORCH_DISTRIBUTED_DEBUG=DETAIL; mpi4py runs with `-m mpi4py`.
"""

from __future__ import annotations

import re
import socket
import tempfile
from pathlib import Path
from typing import Final

import page
from harness.environments import Peer, environment_of, missing, python_of
from harness.jobs import EndedJob, run_job
from harness.record import facts_now, machine_type, parser_of, read_rows, write_rows

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
    Peer("mpidist", "mpidist", ("mpidist",), "mpich", by_mpiexec=False, arguments=_RUN),
    Peer("mpidist openmpi", "mpidist", ("mpidist",), "openmpi", by_mpiexec=False, arguments=_RUN),
    Peer("mpidist.torch", "mpidist.torch", ("torch", "mpi4py"), "tensors", by_mpiexec=False, arguments=_RUN),
    Peer("torchrun", "gloo", ("torch",), "tensors", by_mpiexec=False, arguments=_TORCHRUN),
    Peer("torchrun debug", "gloo", ("torch",), "tensors", False, arguments=_TORCHRUN, variables=_DETAIL),
    Peer("mpich", "mpi4py", ("mpi4py",), "mpich", arguments=("-m", "mpi4py")),
    Peer("openmpi", "mpi4py", ("mpi4py",), "openmpi", arguments=("-m", "mpi4py"), options=_AS_ROOT),
)


def _run(tool: Peer, python: Path, fault: str, folder: Path) -> EndedJob:
    own = {"MPIDIST_TIMEOUT_SECONDS": "5", "PYTHONUNBUFFERED": "1"}
    own |= {"MPIDIST_PRETEND_NODES": "0,0,1,1"} if fault == "node lost" else {}
    launcher = [python.with_name("mpiexec"), "-n", "4", *tool.options] if tool.by_mpiexec else []
    (folder / "train.py").write_text(_PROGRAM)
    command = [*launcher, python, *tool.arguments, "train.py", tool.backend, fault]
    return run_job(command, environment_of(tool, 4) | own, folder)


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
    parser.add_argument("--env", action="append", default=[], metavar="ENVIRONMENT=PYTHON", help="as mpich=PYTHON")
    parser.add_argument("--out", type=Path, default=page.RESULTS / machine_type(), help="folder: %(default)s")
    given = parser.parse_args()
    path = given.out / "faults.csv"
    rows = {(row["fault"], row["tool"]): row for row in read_rows(path)}
    print(f"{'fault':<15}{'tool':<16}", *(f"{name.replace('_seconds', ' after s'):<14}" for name in _NONE))
    for tool in (tool for tool in _TOOLS if tool.name in given.tools.split(",")):
        python = python_of(tool, given.env)
        lack = missing(tool, python, 4)
        found = sorted(path.stem for path in python.parents[1].glob("lib/*/site-packages/*.dist-info"))
        of = ", ".join(name for name in found if name.startswith(("mpi", "openmpi-", "torch-")))
        for fault in given.faults.split(","):
            row = facts_now(ranks="4", versions=of, fault=fault, tool=tool.name, **_NONE, text=f"not installed: {lack}")
            if not lack:
                with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                    job = _run(tool, python, fault, Path(folder))
                row |= _judge(job.lines, fault)
                row |= {"exit_code": str(job.code).replace("None", "hangs"), "end_seconds": f"{job.seconds:.1f}"}
                row["text"] = re.sub(r"/\S+/", "", row["text"]).replace(socket.gethostname(), "node1").strip()[:250]
            rows[fault, tool.name] = row
            print(f"{fault:<15}{tool.name:<16}", *(f"{row[name]:<14}" for name in _NONE), row["text"], flush=True)
            write_rows(path, list(rows.values()))
    return 0
