"""Is a list of tensors packed into one buffer, and back, in one launch and as fast as memory allows? (G1 to G5)

Held against the device's own copy of as many bytes, `torch.cat`, `torch._foreach_copy_` and a copy per tensor. Torch
gets its list of flat views and its buffer prepared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
from record import shapes_of_list

from gpu.measuring import Bench, Sample, time_text
from gpu.part import run_part
from gpu.report import Report
from mpidist.transport.gpu.kernels import DeviceKernels
from mpidist.transport.half import bfloat16

__all__ = ["measure"]

ARRAYS_OF_A_LAUNCH = 168
SETS = 3  # of arrays, used in turn; one set of ResNet-50 is three times the cache
Shape = tuple[int, ...]


class Lists:
    """Sets of tensors with random numbers, and buffers for them.

    Args:
        bench: Where.
        shapes: Of the tensors.
        count: Number of sets.
        dtype: Of the buffers.
    """

    def __init__(self, bench: Bench, shapes: Sequence[Shape], count: int, dtype: Any = np.float32) -> None:
        self.sizes = [int(np.prod(shape)) for shape in shapes]
        self.total = sum(self.sizes)
        self.bounds = [0, *np.cumsum(self.sizes).tolist()]
        self.host = [bench.numbers(self.total) for _ in range(count)]
        self.tensors = [
            [bench.up(flat[a:b].reshape(shape)) for (a, b), shape in zip(pairwise(self.bounds), shapes, strict=True)]
            for flat in self.host
        ]
        self.buffers = [bench.empty(self.total, dtype) for _ in range(count)]

    def buffer_views(self, at: int) -> list[Any]:
        return [self.buffers[at][a:b] for a, b in pairwise(self.bounds)]


def shapes_of(bench: Bench, copies: int = 1) -> list[Shape]:
    shapes = shapes_of_list("resnet50")
    return [shape for shape in shapes if int(np.prod(shape)) <= 512][:20] if bench.is_tiny else shapes * copies


def share_of_roof(bench: Bench, report: Report, number: str, question: str, nbytes: int, its: Sample, least: int,
                  launches: int, most_launches: int = 1) -> None:  # fmt: skip
    """Note a time beside that of the device's own copy of as many bytes."""
    roof = bench.roof(nbytes)
    share = roof.median / its.median
    got = f"{its}, {share:.0%} of the roof ({time_text(roof.median)}), {launches} launch" + "es" * (launches != 1)
    report.add(
        number,
        question,
        got + ("" if its.is_pure else ", host's time in it"),
        target=f">= {least} % of the roof, {most_launches} launch" + "es" * (most_launches != 1),
        met=share >= least / 100 and launches <= most_launches,
        note=f"roof: {nbytes / roof.median / 1e12:.2f} TB/s",
        **its.numbers,
        bytes=nbytes,
        roof_us=roof.median * 1e6,
        share=share,
        launches=launches,
    )


def launches_of(kernels: DeviceKernels, call: Callable[[], object]) -> int:
    before = kernels.num_launches
    call()
    return kernels.num_launches - before


def measure_pack(bench: Bench, report: Report, kernels: DeviceKernels) -> None:
    """G1 and G4."""
    lists = Lists(bench, shapes_of(bench), SETS)
    targets = [[bench.empty(size, np.float32) for size in lists.sizes] for _ in range(SETS)]
    for at in range(SETS):
        bench.poison(lists.buffers[at])
        kernels.pack(lists.tensors[at], lists.buffers[at])
        bench.require_equal("pack", lists.buffers[at], lists.host[at])
        for target in targets[at]:
            bench.poison(target)
        kernels.unpack(lists.buffers[at], targets[at])
        for target, (a, b) in zip(targets[at], pairwise(lists.bounds), strict=True):
            bench.require_equal("unpack", target, lists.host[at][a:b])
    packs = [lambda at=at: kernels.pack(lists.tensors[at], lists.buffers[at]) for at in range(SETS)]
    unpacks = [lambda at=at: kernels.unpack(lists.buffers[at], targets[at]) for at in range(SETS)]
    times = bench.gpu_times({"pack": packs, "unpack": unpacks}, bench.turns(60))
    for name, call in (("pack", packs[0]), ("unpack", unpacks[0])):
        question = f"{name} {len(lists.sizes)} float32 tensors, {8 * lists.total / 1e6:.1f} MB read and written"
        launches = launches_of(kernels, call)
        share_of_roof(bench, report, "G1", question, 8 * lists.total, times[name], 85, launches)
    with report.question("G4", "beside other libraries"):
        measure_peers(bench, report, lists, packs)


def measure_peers(bench: Bench, report: Report, lists: Lists, packs: Sequence[Callable[[], object]]) -> None:
    """G4: the same copies by others, in the same turns."""

    def per_tensor(at: int) -> Callable[[], object]:
        views, flats = lists.buffer_views(at), [tensor.reshape(-1) for tensor in lists.tensors[at]]

        def copy() -> None:
            for view, flat in zip(views, flats, strict=True):
                view[...] = flat

        return copy

    ways = {"ours": packs, "a CuPy copy per tensor": [per_tensor(at) for at in range(SETS)]}
    reason = ""
    try:
        ways |= torch_ways(bench, lists)
    except Exception as error:
        reason = f"torch: {type(error).__name__}: {error}"[:200]
    for name, calls in ways.items():
        for at, call in enumerate(calls):
            bench.poison(lists.buffers[at])
            call()
            bench.synchronize()
            bench.require_equal(name, lists.buffers[at], lists.host[at])
    gpu = bench.gpu_times(ways, bench.turns(30))
    host = bench.host_times(ways, bench.turns(30))
    for name in [name for name in ways if name.startswith("torch")] or ["torch"]:
        if name not in ways:
            report.add("G4", "pack beside torch", "not measured", target="<= torch's", note=reason)
            continue
        for what, times in (("time on the GPU", gpu), ("host's time", host)):
            ratio = times["ours"].median / times[name].median
            got = f"{times['ours']} / {times[name]} = {ratio:.2f}"
            question = f"pack beside {name}: {what}, ours / theirs"
            report.add("G4", question, got, target="<= 1.0", met=ratio <= 1.0, ratio=ratio)
    both = bench.wall_times({name: ways[name] for name in ("ours", "a CuPy copy per tensor")}, bench.turns(30))
    ratio = both["a CuPy copy per tensor"].median / both["ours"].median
    got = f"{both['a CuPy copy per tensor']} / {both['ours']} = {ratio:.1f}"
    question = "pack beside a CuPy copy per tensor: launch to end, theirs / ours"
    report.add("G4", question, got, target=">= 15", met=ratio >= 15, ratio=ratio)


def torch_ways(bench: Bench, lists: Lists) -> dict[str, list[Callable[[], object]]]:
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


def measure_large(bench: Bench, report: Report, kernels: DeviceKernels) -> None:
    """G1 at 1 GB."""
    lists = Lists(bench, shapes_of(bench, 10), 1)
    bench.poison(lists.buffers[0])
    kernels.pack(lists.tensors[0], lists.buffers[0])
    bench.require_equal("pack of 1 GB", lists.buffers[0], lists.host[0])
    ways = {"large": [lambda: kernels.pack(lists.tensors[0], lists.buffers[0])]}
    (times,) = bench.gpu_times(ways, bench.turns(30)).values()
    question = f"pack {len(lists.sizes)} tensors, {4 * lists.total / 1e9:.2f} GB"
    launches = launches_of(kernels, ways["large"][0])
    most = -(-len(lists.sizes) // ARRAYS_OF_A_LAUNCH)
    share_of_roof(bench, report, "G1", question, 8 * lists.total, times, 90, launches, most)


def measure_cast(bench: Bench, report: Report, kernels: DeviceKernels) -> None:
    """G2."""
    half = bfloat16()
    lists = Lists(bench, shapes_of(bench), SETS, half)
    targets = [[bench.empty(size, np.float32) for size in lists.sizes] for _ in range(SETS)]
    for at in range(SETS):
        rounded = lists.host[at].astype(half)
        bench.poison(lists.buffers[at])
        kernels.pack(lists.tensors[at], lists.buffers[at])
        bench.require_equal("pack to bfloat16", lists.buffers[at], rounded)
        for target in targets[at]:
            bench.poison(target)
        kernels.unpack(lists.buffers[at], targets[at], 8)
        for target, (a, b) in zip(targets[at], pairwise(lists.bounds), strict=True):
            bench.require_equal("unpack", target, rounded[a:b].astype(np.float32) / np.float32(8))
    ways = {
        "pack to bfloat16": [lambda at=at: kernels.pack(lists.tensors[at], lists.buffers[at]) for at in range(SETS)],
        "unpack from bfloat16 and divide": [
            lambda at=at: kernels.unpack(lists.buffers[at], targets[at], 8) for at in range(SETS)
        ],
    }
    for name, times in bench.gpu_times(ways, bench.turns(60)).items():
        question = f"{name}, {6 * lists.total / 1e6:.1f} MB read and written"
        launches = launches_of(kernels, ways[name][0])
        share_of_roof(bench, report, "G2", question, 6 * lists.total, times, 85, launches)


def measure_host(bench: Bench, report: Report, kernels: DeviceKernels) -> None:
    """G3."""
    lists = Lists(bench, shapes_of(bench), 1)
    targets = [bench.empty(size, np.float32) for size in lists.sizes]
    tensors, buffer = lists.tensors[0], lists.buffers[0]
    room = bench.empty(lists.total + 512 * (bench.turns(200) + 2), np.float32)
    places = [[room[4 * at :][a:b] for a, b in pairwise(lists.bounds)] for at in range(bench.turns(200) + 1)]
    views = lists.buffer_views(0)

    def step(arrays: Sequence[Any]) -> Callable[[], object]:
        return lambda: (kernels.pack(arrays, buffer), kernels.unpack(buffer, arrays))

    def one_by_one() -> None:
        for view, tensor in zip(views, tensors, strict=True):
            view[...] = tensor.reshape(-1)
        for view, target in zip(views, targets, strict=True):
            target[...] = view

    turns = bench.turns(200)
    same = bench.host_times({"same": [step(tensors)]}, turns)["same"]
    question = "host's time of pack + unpack: the same arrays as before"
    report.add("G3", question, str(same), target="<= 25 us", met=same.median <= 25e-6, **same.numbers)
    renamed = [[tensor.reshape(tensor.shape) for tensor in tensors] for _ in range(turns)]
    objects = _first_calls(bench, [step(arrays) for arrays in renamed])
    report.add("G3", "host's time: new array objects in the same places", str(objects), **objects.numbers)
    moved = _first_calls(bench, [step(arrays) for arrays in places])
    report.add("G3", "host's time: arrays in new places at every step", str(moved), **moved.numbers)
    loop = bench.host_times({"loop": [one_by_one]}, bench.turns(20))["loop"]
    report.add("G3", "host's time: a CuPy copy per tensor, both ways", str(loop), **loop.numbers)


def _first_calls(bench: Bench, calls: Sequence[Callable[[], object]]) -> Sample:
    """Time each call once, and no second time."""
    values = []
    for call in calls:
        bench.synchronize()
        start = perf_counter()
        call()
        values.append(perf_counter() - start)
    bench.synchronize()
    return Sample(tuple(values[1:]))


def measure_tiny_tensors(bench: Bench, report: Report, kernels: DeviceKernels) -> None:
    """G5."""
    count, sets, size = (50, 2, 256) if bench.is_tiny else (10_000, 8, 256)
    lists, buffers = [], []
    for _ in range(sets):
        host, order = bench.numbers(count * size), bench.random.permutation(count)
        device, buffer = bench.up(host), bench.empty(count * size, np.float32)
        tensors = [device[at * size : (at + 1) * size] for at in order.tolist()]
        bench.poison(buffer)
        kernels.pack(tensors, buffer)
        bench.require_equal("pack of many", buffer, host.reshape(count, size)[order])
        lists.append(tensors)
        buffers.append(buffer)
    packs = [lambda at=at: kernels.pack(lists[at], buffers[at]) for at in range(sets)]
    (times,) = bench.gpu_times({"many": packs}, bench.turns(60)).values()
    launches = launches_of(kernels, packs[0])
    question, most = f"pack {count} tensors of {size}", -(-count // ARRAYS_OF_A_LAUNCH)
    share_of_roof(bench, report, "G5", question, 8 * count * size, times, 50, launches, most)
    (host,) = bench.host_times({"many": packs[:1]}, bench.turns(60)).values()
    question = f"host's time of packing {count} tensors, the same as before"
    report.add("G5", question, str(host), target="<= 50 us", met=host.median <= 50e-6, **host.numbers)


def measure(bench: Bench, report: Report) -> None:
    """Answer all."""
    kernels = DeviceKernels(bench.cuda)
    for number, question, ask in (
        ("G1", "pack and unpack 161 float32 tensors", measure_pack),
        ("G3", "host's time of pack and unpack", measure_host),
        ("G2", "pack and unpack with a cast to bfloat16", measure_cast),
        ("G5", "pack 10,000 tensors of 256", measure_tiny_tensors),
        ("G1", "pack 1 GB", measure_large),
    ):
        with report.question(number, question):
            ask(bench, report, kernels)


if __name__ == "__main__":
    sys.exit(run_part(__doc__ or "", measure))
