"""What happens when a rank does not come to a call on device memory? (G12)

    python -m gpu.missing --out file.json

Starts two ranks. One stays away; the other must be told soon after its deadline, all must be able to begin anew, and
the processes must end by themselves.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from gpu.measuring import Bench
from gpu.part import run_part
from gpu.report import Report

__all__ = ["measure", "rank_main"]

DEADLINE, AWAY = (0.5, 1.0) if os.environ.get("GPU_CHECK_TINY") == "1" else (2.0, 4.0)  # seconds, of the missing rank
ONE_RANK = ["-n", "2", sys.executable, "-m", "gpu.missing", "--rank"]


def rank_main(cuda: Any) -> dict[str, float]:
    """Be one of the ranks: miss a call, or notice it. Collective. Returns seconds."""
    from mpi4py import MPI

    import mpidist
    from mpidist.errors import DeadlineExceededError

    comm, cupy = MPI.COMM_WORLD, cuda.cupy
    cupy.cuda.Device(comm.Get_rank() % cuda.support.num_devices).use()
    strategy = mpidist.MultiWorkerMirroredStrategy()
    options = mpidist.CommunicationOptions(timeout_seconds=DEADLINE)
    array = cupy.asarray(np.full(1 << 20, comm.Get_rank() + 1, np.float32))

    def reduce() -> None:
        its = mpidist.get_replica_context()
        its.all_reduce("sum", array, options=options, out=array)

    strategy.run(reduce)
    noticed = 0.0
    comm.Barrier()
    if comm.Get_rank() == 0:
        start = time.monotonic()
        try:
            strategy.run(reduce)
        except DeadlineExceededError as error:
            noticed = time.monotonic() - start
            print(f"as it should: {error}", flush=True)
    else:
        time.sleep(AWAY)
    strategy.reset()
    array[...] = cupy.asarray(np.full(1 << 20, comm.Get_rank() + 1, np.float32))
    strategy.run(reduce)
    if not (cupy.asnumpy(array) == 3).all():
        raise ArithmeticError("after the reset the sum is wrong")
    strategy.close()
    return {"noticed": noticed, "at": time.time()}


def measure(bench: Bench, report: Report) -> None:
    """Answer: staged through the host, and over NCCL that is told that the ranks are on hosts of their own."""
    launcher = shlex.split(os.environ.get("GPU_CHECK_MPIEXEC", "mpiexec"))
    from gpu.parts import ONE_GPU

    for name, settings in (("through the host", {"MPIDIST_NCCL": "0"}), ("over NCCL", ONE_GPU)):
        with report.question("G12", f"a rank is missing, {name}"):
            _measure_one(report, name, launcher, dict(settings))


def _measure_one(report: Report, name: str, launcher: list[str], settings: dict[str, str]) -> None:
    environment = {**os.environ, **settings, "MPIDIST_FLIGHT_DIR": "off"}
    done = subprocess.run(
        [*launcher, *ONE_RANK], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    ended = time.time()
    print(done.stdout[-4000:], done.stderr[-4000:], flush=True)
    said = [line.split() for line in done.stdout.splitlines() if line.startswith("noticed ")]
    if not said:
        raise RuntimeError(f"it was not noticed; exit code {done.returncode}")
    late, took = float(said[0][1]) - DEADLINE, ended - float(said[0][3])
    is_met = 0 <= late <= 0.5
    got = f"{late:+.3f} s" if float(said[0][1]) else "it was not"
    question = f"a rank is missing, {name}: the error comes after the deadline of {DEADLINE:g} s"
    report.add("G12", question, got, target="within 0.5 s", met=is_met, late_seconds=late)
    got = f"code {done.returncode}, {took:.1f} s after the last call, which had the right sum"
    question = f"a rank was missing, {name}: the processes end by themselves"
    report.add("G12", question, got, target="code 0 within 15 s", met=done.returncode == 0 and took <= 15, seconds=took)


def _rank() -> int:
    from mpi4py import MPI

    from mpidist.transport import cuda

    rank = MPI.COMM_WORLD.Get_rank()
    if os.environ.get("MPIDIST_TEST_HOSTIDS") == "1":
        os.environ["NCCL_HOSTID"] = f"rank{rank}"
    seen = rank_main(cuda.current())
    if rank == 0:
        print(f"noticed {seen['noticed']:.6f} at {seen['at']:.6f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    sys.exit(_rank() if "--rank" in sys.argv else run_part(__doc__ or "", measure))
