"""Check mpidist on real GPUs, in at most eight minutes: what there is, and the tests that need one.

    python benchmarks/gpu_check.py            # results in $OUT, or ./gpu-results

Several ranks share one GPU here in two ways: staged through the host, and over real NCCL that is told that every rank
is on a host of its own (`NCCL_HOSTID`). The second is slow by its nature, and says nothing of speed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mpidist.transport.cuda import current, nccl_version_text

LIMIT_SECONDS = 8 * 60.0
ROOT = Path(__file__).parent.parent
TESTS = "tests/test_nccl.py"
STEP = {"MPIDIST_FLIGHT_DIR": "off", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

# Of reference notes: NCCL's transports that cannot work between ranks of one GPU are off, and it takes little of it.
ONE_GPU = {
    "MPIDIST_TEST_HOSTIDS": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_DEBUG": "WARN",
}


@dataclass
class Step:
    """One run of tests: at how many ranks, in which environment, for how long."""

    name: str
    ranks: str
    limit: float
    environment: dict[str, str] = field(default_factory=dict)
    tests: str = TESTS


STEPS = [
    Step("kernels that pack and join", "1", 120, tests="tests/test_device_kernels.py"),
    Step("real NCCL, 1 rank", "1", 90),
    Step("through the host, 2-4 ranks on the GPUs", "2,3,4", 150, {"MPIDIST_NCCL": "0"}),
    Step("real NCCL, 2 ranks by NCCL_HOSTID", "2", 150, ONE_GPU),
    Step("real NCCL, 4 ranks by NCCL_HOSTID", "4", 150, ONE_GPU),
]


def what_there_is() -> dict[str, Any]:
    """Return versions of everything, and the GPUs."""
    support = current().support
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,compute_mode", "--format=csv,noheader"]
    return {
        **asdict(support),
        "nccl": nccl_version_text(support.nccl_version),
        "python": sys.version.split()[0],
        "gpus": output_of(query).splitlines(),
        "mpi": output_of([sys.executable, "-c", "from mpi4py import MPI; print(MPI.Get_library_version())"])[:100],
        "mps": output_of(["sh", "-c", "command -v nvidia-cuda-mps-control"]),
    }


def output_of(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"({error})"
    return done.stdout.strip()


def run(step: Step, until: float, out: Path) -> dict[str, Any]:
    """Run one step, and keep what it prints."""
    seconds = min(step.limit, until - time.monotonic())
    if seconds < 10:
        return {"step": step.name, "outcome": "no time left", "seconds": 0.0}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-rsf", "--ranks", step.ranks, step.tests]
    start = time.monotonic()
    name = re.sub(r"\W+", "-", step.name)
    log = out / f"{name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **STEP, **step.environment}, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            code: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
            code = f"not done within {seconds:.0f} s"
    last = (log.read_text().strip().splitlines() or [""])[-1]
    summary = re.findall(r"(\d+) (passed|failed|skipped|errors?)", last)
    counts = {what: int(number) for number, what in summary}
    outcome = "passed" if code == 0 and counts.get("passed") else "skipped" if code == 0 else f"failed ({code})"
    return {"step": step.name, "outcome": outcome, "seconds": time.monotonic() - start, **counts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")))
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + LIMIT_SECONDS
    machine = what_there_is()
    for key, value in machine.items():
        print(f"{key:16} {value}")
    results: list[dict[str, Any]] = []
    if machine["reason"]:
        print(f"nothing can be checked here: {machine['reason']}")
    for step in [] if machine["reason"] else STEPS:
        results.append(run(step, until, out))
        print(table(results[-1:]), flush=True)
    (out / "gpu_check.json").write_text(json.dumps({"machine": machine, "results": results}, indent=1, default=str))
    head = "| what | outcome | passed | skipped | time |\n| --- | --- | --- | --- | --- |\n"
    (out / "gpu_check.md").write_text(head + table(results) + "\n")
    return int(not results or any(its["outcome"] != "passed" for its in results))


def table(results: list[dict[str, Any]]) -> str:
    """Write results as rows of a table."""
    rows = (
        f"| {its['step']} | {its['outcome']} | {its.get('passed', 0)} | {its.get('skipped', 0)} | "
        f"{its['seconds']:.0f} s |"
        for its in results
    )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
