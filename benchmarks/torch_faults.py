"""Do DDP jobs over `init_process_group("mpidist")` end, and is the faulty rank named on all others? Fifty jobs a fault.

python benchmarks torch_faults                                   # an hour or two: three processes a job import PyTorch
python benchmarks torch_faults --faults killed,stopped --runs 9  # each rank and each moment once

A job has three ranks, MPICH, and a timeout of 5 s. Rank and moment of the fault take turns: the first step, the fourth,
and the fourth while the others reduce a bucket. Seconds are from the fault to the last error of the others, and to the
job's end; a job hangs 60 s after its fault. Jobs that do not end as they should are printed.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Final

from harness.environments import Peer, environment_of, python_of
from harness.jobs import EndedJob, read, run_job
from harness.record import parser_of

_PROGRAM: Final = """\
import os, signal, sys, time, warnings
from datetime import timedelta
warnings.simplefilter("ignore")
import torch, torch.distributed as dist, mpidist.torch

FAULT, FAULTY, MOMENT, VARIANT = sys.argv[1], *map(int, sys.argv[2:])
PLACE = FAULT if FAULT == "forward" else "bucket" if MOMENT == 2 else FAULT if FAULT == "backward" else "step"
CALLS = dist.barrier, lambda: dist.broadcast(torch.ones(3), 0), lambda: dist.all_reduce(torch.ones(7))
def come_to(place):
    if (rank, step, place) != (FAULTY, 3 if MOMENT else 0, PLACE): return False
    time.sleep(0.3 if MOMENT == 2 and (VARIANT % 2 or place == "forward") else 0)  # the others come to wait
    open("fault", "w").write(str(time.monotonic()))
    if FAULT in ("forward", "backward"): raise ValueError("bad batch")
    if FAULT == "killed": os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "stopped": os.kill(os.getpid(), signal.SIGSTOP)
    if FAULT == "other call": CALLS[VARIANT % 3]()
    if FAULT == "leaves" and VARIANT % 3 == 2: dist.destroy_process_group()
    if FAULT == "leaves" and (VARIANT % 3 == 0 or place == "bucket"): sys.exit(0)
    return FAULT == "leaves"

class Through(torch.autograd.Function):
    forward = staticmethod(lambda ctx, place, x: setattr(ctx, "place", place) or x.clone())
    backward = staticmethod(lambda ctx, gradient: (None, come_to(ctx.place) and None or gradient))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(40, 40), torch.nn.Linear(40, 40)
    def forward(self, x):
        come_to("forward")
        return Through.apply("backward", self.last(Through.apply("bucket", self.first(x))))

def train():
    global rank, step
    dist.init_process_group("mpidist", timeout=timedelta(seconds=5))
    rank = dist.get_rank()
    open(f"{rank}.pid", "w").write(str(os.getpid()))
    model = torch.nn.parallel.DistributedDataParallel(Model(), bucket_cap_mb=1e-3)
    for step in range(6):
        if come_to("step"): return
        model(torch.ones(2, 40)).sum().backward()
    dist.destroy_process_group()

try:
    train()
except BaseException as error:
    open(f"{rank}.error", "w").write(f"{time.monotonic()} {type(error).__name__}: {error}")
    raise
"""
# MPICH's launcher ends all ranks when it sees one die. Behind this it sees no rank's end before all have ended.
_BLIND: Final = '"$@"; code=$?; : >ended.$$; until set -- ended.*; [ $# = 3 ]; do sleep 0.1; done; exit $code'
_FAULTS: Final = "forward,backward,killed,stopped,other call,leaves"
_TOOL: Final = Peer("mpidist.torch", "", ("torch", "mpi4py"), "tensors")


def _run(python: Path, folder: Path, fault: str, faulty: int, moment: int, variant: int) -> EndedJob:
    def go_on(seconds: float) -> None:  # after the timeout
        if fault == "stopped" and variant % 2 and seconds > 8:
            with suppress(OSError):
                os.kill(int(read(folder / f"{faulty}.pid")), signal.SIGCONT)

    blind = ["sh", "-c", _BLIND, "sh"] if fault == "killed" else []
    (folder / "train.py").write_text(_PROGRAM)
    command = [python.with_name("mpiexec"), "-n", 3, *blind, python, "train.py", fault, faulty, moment, variant]
    return run_job(command, environment_of(_TOOL, 3), folder, go_on)


def _row(python: Path, fault: str, runs: int) -> tuple[str, bool]:
    """Run the jobs of a fault; return a line of the table, and whether all ended as they should."""
    codes, named, crashes, seconds = Counter[int | None](), 0, 0, [[0.0], [0.0]]
    for number in range(runs):
        faulty, moment, variant = number % 3, number // 3 % 3, number // 9
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            job = _run(python, Path(folder), fault, faulty, moment, variant)
            errors = [read(Path(folder, f"{rank}.error")) for rank in range(3) if rank != faulty]
        code, out = job.code, "\n".join(line for _, line in job.lines)
        seconds[1].append(job.seconds)
        seconds[0] += [max(float(text.split()[0]) for text in errors if text) - job.fault] if any(errors) else []
        pattern = rf"\branks? (\d+(-\d+)?, )*(\d+-)?{faulty}\b"
        named += (is_named := all(re.search(pattern, text) for text in errors))
        crashes += (is_crash := bool(re.search(r"segmentation|signal (11|6)\b|EXIT CODE: (11|6|139|134)\s", out, re.I)))
        codes[code] += 1
        if is_crash or not code or not is_named:
            print(f"{fault} {faulty} {moment} {variant}: exit code {code}", *errors, out, sep="\n", flush=True)
    cells = [f"{count} x {'hangs' if code is None else code}" for code, count in codes.items()]
    times = [f"{median(some[1:] or some):.1f} | {max(some):.1f}" for some in seconds]
    is_right = named == runs and not crashes and not codes[0] and not codes[None]
    return " | ".join([fault, str(runs), str(named), ", ".join(cells), str(crashes), *times]), is_right


def main() -> int:
    """Run the jobs, and print a table; fail if a job did not end as it should."""
    parser = parser_of("torch_faults", __doc__)
    parser.add_argument("--faults", default=_FAULTS, help="%(default)s")
    parser.add_argument("--runs", type=int, default=50, help="of each fault: %(default)s")
    parser.add_argument("--env", action="append", default=[], metavar="tensors=PYTHON", help="the Python")
    given = parser.parse_args()
    rows = [_row(python_of(_TOOL, given.env), fault, given.runs) for fault in given.faults.split(",")]
    print("fault | runs | named on all | exit codes | crashes | error s: median | most | end s: median | most")
    print(*(line for line, _ in rows), sep="\n")
    return int(not all(is_right for _, is_right in rows))
