"""How fast is a list of tensors packed into one buffer, and back, beside the device's own copy and other libraries?

`torch.cat`, `torch._foreach_copy_` and a copy per tensor by CuPy. Torch gets its list of flat views and its buffer
prepared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from record import shapes_of_list

from gpu.measuring import Bench, Call, Sample, time_text
from gpu.part import run_part
from gpu.report import NOT_MEASURED, Report
from mpidist.transport.gpu.kernels import DeviceKernels
from mpidist.transport.half import bfloat16

__all__ = ["launches_of", "measure", "shapes_of", "share_of_roof"]

SETS = 3  # of arrays, used in turn; one set of ResNet-50 is three times the cache
Shape = tuple[int, ...]


class Lists:
    """Sets of tensors with random numbers, buffers for them, and tensors to unpack into.

    Args:
        bench: Where.
        shapes: Of the tensors.
        count: Number of sets.
        dtype: Of the buffers.
    """

    def __init__(self, bench: Bench, shapes: Sequence[Shape], count: int, dtype: Any = np.float32) -> None:
        self.sizes = [int(np.prod(shape)) for shape in shapes]
        self.total = sum(self.sizes)
        self.bounds = list(pairwise([0, *np.cumsum(self.sizes).tolist()]))
        self.host = [bench.numbers(self.total) for _ in range(count)]
        self.tensors = [
            [bench.up(flat[a:b].reshape(shape)) for (a, b), shape in zip(self.bounds, shapes, strict=True)]
            for flat in self.host
        ]
        self.buffers = [bench.empty(self.total, dtype) for _ in range(count)]
        self.targets = [[bench.empty(size, np.float32) for size in self.sizes] for _ in range(count)]


def shapes_of(bench: Bench, copies: int = 1) -> list[Shape]:
    """Return the shapes of ResNet-50's gradients, so many times."""
    shapes = shapes_of_list("resnet50")
    return [shape for shape in shapes if int(np.prod(shape)) <= 512][:20] if bench.is_tiny else shapes * copies


def share_of_roof(bench: Bench, report: Report, question: str, nbytes: int, its: Sample, launches: int) -> None:
    """Note a time beside that of the device's own copy of as many bytes."""
    roof = bench.roof(nbytes)
    share = roof.median / its.median
    got = f"{its}, {share:.0%} of the roof ({time_text(roof.median)}), {launches} launch" + "es" * (launches != 1)
    note = f"roof: {nbytes / roof.median / 1e12:.2f} TB/s" + ("" if its.is_pure else "; host's time in it")
    numbers = {"bytes": nbytes, "roof_us": roof.median * 1e6, "share": share, "launches": launches}
    report.add(question, got, note=note, **its.numbers, **numbers)


def launches_of(kernels: DeviceKernels, call: Call) -> int:
    """Count the launches of a call."""
    before = kernels.num_launches
    call()
    return kernels.num_launches - before


def measure_both(
    bench: Bench, report: Report, kernels: DeviceKernels, dtype: Any = np.float32, divisor: int = 1, copies: int = 1
) -> Lists:
    """Pack into a buffer of a dtype and unpack, divided: look at all numbers, then time it."""
    sets = SETS if copies == 1 else 1
    lists = Lists(bench, shapes_of(bench, copies), sets, dtype)
    for at in range(sets):
        rounded = lists.host[at].astype(dtype)
        bench.poison(lists.buffers[at])
        kernels.pack(lists.tensors[at], lists.buffers[at])
        bench.require_equal("pack", lists.buffers[at], rounded)
        for target in lists.targets[at]:
            bench.poison(target)
        kernels.unpack(lists.buffers[at], lists.targets[at], divisor)
        for target, (a, b) in zip(lists.targets[at], lists.bounds, strict=True):
            bench.require_equal("unpack", target, rounded[a:b].astype(np.float32) / np.float32(divisor))
    ways: dict[str, list[Call]] = {
        "pack": [lambda at=at: kernels.pack(lists.tensors[at], lists.buffers[at]) for at in range(sets)],
        "unpack": [lambda at=at: kernels.unpack(lists.buffers[at], lists.targets[at], divisor) for at in range(sets)],
    }
    nbytes = (4 + np.dtype(dtype).itemsize) * lists.total
    for name, times in bench.gpu_times(ways, bench.turns(60)).items():
        question = f"{name}, buffer of {np.dtype(dtype)}: {len(lists.sizes)} tensors, {nbytes / 1e6:.1f} MB moved"
        share_of_roof(bench, report, question, nbytes, times, launches_of(kernels, ways[name][0]))
    return lists


def measure_float32(bench: Bench, report: Report, kernels: DeviceKernels) -> None:
    """Pack and unpack, then beside others."""
    lists = measure_both(bench, report, kernels)
    with report.question("pack beside other libraries"):
        packs = [lambda at=at: kernels.pack(lists.tensors[at], lists.buffers[at]) for at in range(SETS)]
        measure_peers(bench, report, lists, packs)


def measure_peers(bench: Bench, report: Report, lists: Lists, packs: Sequence[Call]) -> None:
    """Time the same copies by others, in the same turns."""

    def per_tensor(at: int) -> Call:
        views, flats = (
            [lists.buffers[at][a:b] for a, b in lists.bounds],
            [tensor.reshape(-1) for tensor in lists.tensors[at]],
        )

        def copy() -> None:
            for view, flat in zip(views, flats, strict=True):
                view[...] = flat

        return copy

    ways: dict[str, Sequence[Call]] = {"ours": packs, "a CuPy copy per tensor": [per_tensor(at) for at in range(SETS)]}
    try:
        ways |= torch_ways(bench, lists)
    except ModuleNotFoundError:
        report.add("pack beside torch", "torch is not installed")
    except Exception as error:
        report.add("pack beside torch", NOT_MEASURED, note=f"torch: {type(error).__name__}: {error}"[:200])
    for name, calls in ways.items():
        for at, call in enumerate(calls):
            bench.poison(lists.buffers[at])
            call()
            bench.synchronize()
            bench.require_equal(name, lists.buffers[at], lists.host[at])
    clocks = {"GPU": bench.gpu_times, "host": bench.host_times, "launch to end": bench.wall_times}
    for clock, measure_times in clocks.items():
        times = measure_times(ways, bench.turns(30))
        for name in list(ways)[1:]:
            ratio = times[name].median / times["ours"].median
            got = f"{times[name]} / {times['ours']} = {ratio:.2f}"
            report.add(f"pack beside {name}, {clock}: theirs / ours", got, ratio=ratio)


def torch_ways(bench: Bench, lists: Lists) -> dict[str, Sequence[Call]]:
    """Let torch copy the same tensors to the same buffers."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU")
    cats, foreach = [], []
    for at in range(SETS):
        flats = [torch.from_dlpack(tensor.reshape(-1)) for tensor in lists.tensors[at]]
        buffer = torch.from_dlpack(lists.buffers[at])
        views = list(torch.split(buffer, lists.sizes))
        cats.append(lambda flats=flats, buffer=buffer: torch.cat(flats, out=buffer))
        foreach.append(lambda flats=flats, views=views: torch._foreach_copy_(views, flats))
    return {"torch.cat": cats, "torch._foreach_copy_": foreach}


def measure_tiny_tensors(bench: Bench, report: Report, kernels: DeviceKernels) -> None:
    """Pack many small tensors, in an order of their own."""
    count, sets, size = (50, 2, 256) if bench.is_tiny else (10_000, 8, 256)
    packs: list[Call] = []
    for _ in range(sets):
        host, order = bench.numbers(count * size), bench.random.permutation(count)
        device, buffer = bench.up(host), bench.empty(count * size, np.float32)
        tensors = [device[at * size : (at + 1) * size] for at in order.tolist()]
        bench.poison(buffer)
        kernels.pack(tensors, buffer)
        bench.require_equal("pack of many", buffer, host.reshape(count, size)[order])
        packs.append(lambda tensors=tensors, buffer=buffer: kernels.pack(tensors, buffer))
    (times,) = bench.gpu_times({"many": packs}, bench.turns(60)).values()
    launches = launches_of(kernels, packs[0])
    share_of_roof(bench, report, f"pack {count} tensors of {size}", 8 * count * size, times, launches)
    (host,) = bench.host_times({"many": packs[:1]}, bench.turns(60)).values()
    report.add(f"host's time of packing {count} tensors, the same as before", str(host), **host.numbers)


def measure(bench: Bench, report: Report) -> None:
    """Answer all."""
    kernels = DeviceKernels(bench.cuda)
    questions: dict[str, Callable[[Bench, Report, DeviceKernels], object]] = {
        "pack and unpack 161 float32 tensors": measure_float32,
        "pack and unpack with a cast to bfloat16": partial(measure_both, dtype=bfloat16(), divisor=8),
        "pack 10,000 tensors of 256": measure_tiny_tensors,
        "pack and unpack 1 GB": partial(measure_both, copies=10),
    }
    for question, ask in questions.items():
        with report.question(question):
            ask(bench, report, kernels)


if __name__ == "__main__":
    sys.exit(run_part(__doc__ or "", measure))
