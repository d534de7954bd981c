"""What is this machine, and what do its copies take?"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import Any

import numpy as np

from gpu.measuring import Bench
from gpu.part import run_part
from gpu.report import Report
from mpidist.transport.cuda import nccl_version_text

__all__ = ["measure", "versions"]

PACKAGES = ("torch", "cupy-cuda13x", "cupy-cuda12x", "numpy", "mpi4py", "ml-dtypes")


def versions() -> dict[str, str]:
    """Return versions of what is installed, and whether MPS and the sanitizer are there. Starts no GPU."""
    found = {"python": platform.python_version(), "cpus": str(len(os.sched_getaffinity(0)))}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    found["MPS"] = "present" if shutil.which("nvidia-cuda-mps-control") else "not present"
    found["compute-sanitizer"] = "present" if shutil.which("compute-sanitizer") else "not present"
    return found


def note_machine(bench: Bench, report: Report) -> None:
    """Note the GPU, in neutral words."""
    support, runtime = bench.cuda.support, bench.cupy.cuda.runtime
    its = runtime.getDeviceProperties(int(runtime.getDevice()))
    name = its.get("name", b"unknown")
    report.fact("GPU", name.decode() if isinstance(name, bytes) else str(name))
    report.fact("GPUs", support.num_devices)
    report.fact("GPU memory", f"{its.get('totalGlobalMem', 0) / 2**30:.0f} GiB")
    report.fact("multiprocessors", its.get("multiProcessorCount"))
    report.fact("L2 cache", f"{its.get('l2CacheSize', 0) / 2**20:.0f} MiB")
    report.fact("driver's CUDA", support.driver_version)
    report.fact("CUDA runtime", support.runtime_version)
    report.fact("NCCL", nccl_version_text(support.nccl_version))
    report.fact("CuPy", support.cupy_version)
    command = ["nvidia-smi", "--query-gpu=driver_version,compute_mode", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        report.fact("driver, compute mode", done.stdout.strip().splitlines()[0])
    except (OSError, subprocess.TimeoutExpired, IndexError):
        report.fact("driver, compute mode", "nvidia-smi does not say")
    for key, value in versions().items():
        report.fact(key, value)


def measure_roof(bench: Bench, report: Report) -> None:
    """Time the device's own copies."""
    for nbytes in (200 << 20, 2 << 30, 20 << 20):
        nbytes = bench.nbytes(nbytes)
        roof = bench.roof(nbytes)
        question = f"device to device, {nbytes / 2 / 1e6:.0f} MB read and as many written"
        report.add(f"roof: {question}", f"{nbytes / roof.median / 1e12:.2f} TB/s, {roof}", **roof.numbers, bytes=nbytes)


def measure_pcie(bench: Bench, report: Report) -> None:
    """Time copies between host and device, of pinned and of pageable memory."""
    cuda, nbytes = bench.cupy.cuda, bench.nbytes(100 << 20)
    runtime, stream = cuda.runtime, cuda.get_current_stream()
    device = bench.up(bench.random.integers(0, 256, nbytes, np.uint8))
    memory = cuda.alloc_pinned_memory(nbytes)
    pinned = np.frombuffer(memory, np.uint8, nbytes)
    pageable = bench.random.integers(0, 256, nbytes, np.uint8)
    to_host, to_device = int(runtime.memcpyDeviceToHost), int(runtime.memcpyHostToDevice)

    def copy(to: int, source: int, kind: int) -> Any:
        return lambda: (runtime.memcpyAsync(to, source, nbytes, kind, stream.ptr), stream.synchronize())

    at = int(device.data.ptr)
    pageable[:] = 0
    ways = {
        "to the host, pinned": [copy(pinned.ctypes.data, at, to_host)],
        "to the host, pageable": [copy(pageable.ctypes.data, at, to_host)],
        "to the device, pinned": [copy(at, pinned.ctypes.data, to_device)],
        "to the device, pageable": [copy(at, pageable.ctypes.data, to_device)],
    }
    for name, times in bench.wall_times(ways, bench.turns(10)).items():
        got = f"{nbytes / times.median / 1e9:.1f} GB/s, {times}"
        report.add(f"{nbytes / 1e6:.0f} MB {name}", got, **times.numbers, bytes=nbytes)


def measure_start(bench: Bench, report: Report) -> None:
    """Time the first use of the library's kernels, which compiles them, with an empty cache of CuPy's."""
    from mpidist.transport.gpu.kernels import DeviceKernels

    arrays, buffer = [bench.up(bench.numbers(8))], bench.empty(8, np.float32)
    start = perf_counter()
    DeviceKernels(bench.cuda).pack(arrays, buffer)
    bench.synchronize()
    report.add("the first launch of a process, with the compiler", f"{perf_counter() - start:.2f} s")


def measure(bench: Bench, report: Report) -> None:
    """Answer all."""
    for question, ask in (
        ("versions", note_machine),
        ("the first launch", measure_start),
        ("device to device", measure_roof),
        ("host and device", measure_pcie),
    ):
        with report.question(question):
            ask(bench, report)


if __name__ == "__main__":
    sys.exit(run_part(__doc__ or "", measure))
