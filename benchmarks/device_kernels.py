"""Time the kernels that pack, unpack and join arrays of one GPU, beside CuPy and PyTorch.

    python benchmarks/device_kernels.py --out results

GPU time is the median between two CUDA events, host time that of a call that does not wait. Sets of arrays take turns,
so that nothing is found in the GPU's cache. The roof is a copy of one array with as many bytes, read and written.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mpidist.transport.cuda import current
from mpidist.transport.device_kernels import DeviceKernels
from mpidist.transport.reduction import Reduction

SETS = 3
ROUNDS = 60
PIECES = 8
Case = tuple[str, int, Callable[[int], Any]]  # what, bytes read and written, a call with one of the sets


def resnet50() -> list[tuple[int, ...]]:
    """Return the shapes of its parameters."""
    described = json.loads((Path(__file__).parent / "shapes" / "resnet50.json").read_text())
    return [tuple(tensor["shape"]) for tensor in described["tensors"]]


def cases(cupy: Any, name: str, shapes: list[tuple[int, ...]]) -> Iterator[Case]:
    """Pack and unpack a list of float32 arrays, in all ways."""
    kernels, count = DeviceKernels(current()), sum(map(prod, shapes))
    sets = [[cupy.ones(shape, np.float32) for shape in shapes] for _ in range(SETS)]
    flat = [cupy.ones(count, np.float32) for _ in range(SETS)]
    whole = [cupy.ones(count, np.float32) for _ in range(SETS)]
    stream, copy, kind = (
        cupy.cuda.get_current_stream(),
        cupy.cuda.runtime.memcpyAsync,
        cupy.cuda.runtime.memcpyDeviceToDevice,
    )
    yield (
        f"{name}: roof",
        8 * count,
        lambda at: copy(flat[at].data.ptr, whole[at].data.ptr, 4 * count, kind, stream.ptr),
    )
    yield f"{name}: pack", 8 * count, lambda at: kernels.pack(sets[at], flat[at])
    yield f"{name}: unpack", 8 * count, lambda at: kernels.unpack(flat[at], sets[at])
    yield f"{name}: unpack, divided", 8 * count, lambda at: kernels.unpack(flat[at], sets[at], 8)
    half = importlib.import_module("ml_dtypes").bfloat16
    halves = [cupy.empty(count, half) for _ in range(SETS)]
    yield f"{name}: pack to bfloat16", 6 * count, lambda at: kernels.pack(sets[at], halves[at])
    yield f"{name}: unpack from bfloat16, divided", 6 * count, lambda at: kernels.unpack(halves[at], sets[at], 8)
    yield f"{name}: CuPy, array by array", 8 * count, lambda at: by_arrays(sets[at], flat[at])
    if importlib.util.find_spec("torch") is not None:
        torch = importlib.import_module("torch")
        tensors = [[torch.as_tensor(array, device="cuda").reshape(-1) for array in arrays] for arrays in sets]
        into = [torch.as_tensor(array, device="cuda") for array in flat]
        parts = [list(its.split([prod(shape) for shape in shapes])) for its in into]
        yield f"{name}: torch.cat", 8 * count, lambda at: torch.cat(tensors[at], out=into[at])
        yield f"{name}: torch._foreach_copy_", 8 * count, lambda at: torch._foreach_copy_(parts[at], tensors[at])


def by_arrays(arrays: list[Any], flat: Any) -> None:
    """Pack as one does without a kernel for it."""
    at = 0
    for array in arrays:
        flat[at : at + array.size] = array.reshape(-1)
        at += array.size


def joining(cupy: Any, count: int) -> Iterator[Case]:
    """Join pieces of bfloat16."""
    kernels, half = DeviceKernels(current()), importlib.import_module("ml_dtypes").bfloat16
    pieces = [cupy.zeros((PIECES, count), np.uint16).view(half) for _ in range(SETS)]
    out = cupy.empty(count, half)
    nbytes = 2 * count * (PIECES + 1)
    yield f"join {PIECES} pieces of bfloat16", nbytes, lambda at: kernels.combine(pieces[at], Reduction(), out)


def graph(cupy: Any, shapes: list[tuple[int, ...]]) -> Iterator[Case]:
    """Pack, all-reduce by NCCL with one rank, and unpack: call by call, and as a CUDA graph."""
    nccl, kernels, count = current().nccl, DeviceKernels(current()), sum(map(prod, shapes))
    arrays, flat = [cupy.ones(shape, np.float32) for shape in shapes], cupy.empty(count, np.float32)
    communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    stream = cupy.cuda.get_current_stream()

    def step(_: int = 0) -> None:
        kernels.pack(arrays, flat)
        at = flat.data.ptr
        communicator.allReduce(at, at, count, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)
        kernels.unpack(flat, arrays)

    yield "pack, NCCL of one rank, unpack", 16 * count, step
    stream.synchronize()
    stream.begin_capture()
    step()
    made = [stream.end_capture()]
    yield "the same as a CUDA graph", 16 * count, lambda at: made[0].launch(stream)
    stream.synchronize()
    made.clear()  # before the communicator that it uses
    communicator.destroy()


def measure(cupy: Any, case: Case) -> dict[str, Any]:
    """Time one case: microseconds on the GPU and on the host, and bytes per second."""
    what, nbytes, call = case
    turns = cycle(range(SETS))
    for _ in range(2 * SETS):
        call(next(turns))
    stream, times = cupy.cuda.get_current_stream(), []
    for _ in range(ROUNDS):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        call(next(turns))
        end.record(stream)
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end) * 1e3)
    hosts = []
    for _ in range(ROUNDS):
        stream.synchronize()
        began = time.perf_counter()
        call(next(turns))
        hosts.append((time.perf_counter() - began) * 1e6)
    on_gpu = statistics.median(times)
    return {"what": what, "gpu_us": on_gpu, "host_us": statistics.median(hosts), "tb_per_s": nbytes / on_gpu / 1e6}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results"))
    out: Path = parser.parse_args().out
    support = current().support
    if not support.num_devices:
        print(f"nothing can be timed here: {support.reason}")
        return 1
    cupy, found = current().cupy, []
    groups = [cases(cupy, "ResNet-50", resnet50()), cases(cupy, "10,000 x 256", [(256,)] * 10_000)]
    groups += [cases(cupy, "1 GB", [(1 << 20,)] * 256), joining(cupy, 25_557_032)]
    if support.has_nccl:
        groups.append(graph(cupy, resnet50()))
    print("| what | GPU us | host us | TB/s |\n| --- | --- | --- | --- |")
    with cupy.cuda.Stream(non_blocking=True):
        for group in groups:
            for case in group:
                found.append(measure(cupy, case))
                its = found[-1]
                print(
                    f"| {its['what']} | {its['gpu_us']:.1f} | {its['host_us']:.1f} | {its['tb_per_s']:.2f} |",
                    flush=True,
                )
    out.mkdir(parents=True, exist_ok=True)
    (out / "device_kernels.json").write_text(json.dumps({"gpu": str(support), "results": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
