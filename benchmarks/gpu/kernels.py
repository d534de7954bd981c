"""How fast do the kernels copy lists of tensors into one buffer and back, and add? Beside a device copy, and torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from time import perf_counter
from typing import Any

import numpy as np
from harness import record

from gpu.bench import Bench, Call, compare, torch_of_gpus
from gpu.report import Report, text_of
from mpidist.cli.rank_facts import gpus_text
from mpidist.transport.cuda import nccl_version_text
from mpidist.transport.gpu.copy_table import ArrayList, PackLayout
from mpidist.transport.gpu.kernels import DeviceKernels
from mpidist.transport.half import bfloat16
from mpidist.transport.reduction import Reduction

UNALIGNED = [(10,), (50_257,), (3,), (20_481,)] * 20  # what follows lies at no multiple of 16 bytes
LEAST = 0.85  # of the speed of the device's own copy
# What launching a pack and an unpack may take the host: of ResNet-50's gradients, and of 10,000 arrays.
MOST_HOST, MOST_HOST_OF_MANY = 25e-6, 50e-6
Shapes = list[tuple[int, ...]]


class Lists:
    """Sets of tensors with random numbers, laid out once, as the library does it, and the calls that copy them."""

    def __init__(self, bench: Bench, shapes: Shapes, dtype: Any, pads: bool, sets: int) -> None:
        self.sizes, self.dtype = list(map(prod, shapes)), np.dtype(dtype)
        self.layout = PackLayout(self.sizes, self.dtype, pads)
        self.host = [[bench.numbers(shape) for shape in shapes] for _ in range(sets)]
        self.tensors = [list(map(bench.cupy.asarray, its)) for its in self.host]
        self.buffers = [bench.cupy.empty(self.layout.size, self.dtype) for _ in self.host]
        self.targets = [[bench.cupy.empty(size, np.float32) for size in self.sizes] for _ in self.host]
        kernels = DeviceKernels()
        pack, unpack = (partial(its, layout=self.layout) for its in (kernels.pack, kernels.unpack))
        given, taken = (list(map(ArrayList.of, its)) for its in (self.tensors, self.targets))  # as in a repeated call
        self.packs: list[Call] = [partial(pack, *its) for its in zip(given, self.buffers, strict=True)]
        self.unpacks: list[Call] = [partial(unpack, *its) for its in zip(self.buffers, taken, strict=True)]
        self._require_right(bench)

    def cut(self, buffer: Any) -> list[Any]:
        """Return the part of each tensor."""
        starts = (self.layout.offsets // self.dtype.itemsize).tolist()
        return [buffer[start : start + size] for start, size in zip(starts, self.sizes, strict=True)]

    def packed(self, at: int) -> np.ndarray:
        """Return what packing set `at` must give, [layout.size]: rounded, and 0 in what is padding."""
        whole = np.zeros(self.layout.size, self.dtype)
        for part, numbers in zip(self.cut(whole), self.host[at], strict=True):
            part[...] = numbers.reshape(-1)
        return whole

    def _require_right(self, bench: Bench) -> None:
        """Pack and unpack over what is no result, and look at all numbers."""
        for at, (buffer, targets) in enumerate(zip(self.buffers, self.targets, strict=True)):
            for array in (buffer, *targets):
                bench.poison(array)
            packed = self.packed(at)
            self.packs[at]()
            bench.require_equal(f"pack to {self.dtype}", buffer, packed)
            self.unpacks[at]()
            for target, part in zip(targets, self.cut(packed), strict=True):
                bench.require_equal(f"unpack from {self.dtype}", target, part.astype(np.float32))


def shapes_of(bench: Bench, copies: int = 1) -> Shapes:
    """Return the shapes of ResNet-50's gradients, so many times."""
    shapes = record.shapes_of_list("resnet50")
    return [shape for shape in shapes if prod(shape) <= 512][:20] if bench.is_tiny else shapes * copies


def machine(bench: Bench, report: Report) -> None:
    """Note what the GPU is, and time the first launch, which compiles a kernel: CuPy's cache is empty."""
    support, runtime = bench.cuda.support, bench.cupy.cuda.runtime
    its = runtime.getDeviceProperties(int(runtime.getDevice()))
    facts = f"runtime {support.runtime_version}, NCCL {nccl_version_text(support.nccl_version)}, "
    facts += f"{its['totalGlobalMem'] / 2**30:.0f} GiB, L2 cache {its['l2CacheSize'] / 2**20:.0f} MiB"
    report.add("GPU", f"{gpus_text(bench.cuda)}, {facts}")
    arrays, buffer = [bench.cupy.zeros(8, np.float32)], bench.cupy.empty(8, np.float32)
    start = perf_counter()
    DeviceKernels().pack(arrays, buffer)
    bench.synchronize()
    report.at_most("the first launch of a process, with the compiler", bench.since(start), 1)


def lists(
    bench: Bench, report: Report, shapes: Shapes, dtype: Any = np.float32, pads: bool = False,
    sets: int = 3, least: float = LEAST, most_host: float | None = None,
) -> Lists:  # fmt: skip
    """Time packing sets of lists into buffers, and unpacking; on the host, too, where that has a goal."""
    lists = Lists(bench, shapes, dtype, pads, sets)
    tensors, nbytes = f"{len(lists.sizes)} tensors", (4 + lists.dtype.itemsize) * sum(lists.sizes)
    what = f"buffer of {lists.dtype}: {tensors}"
    beside_roof(bench, report, {f"pack, {what}": lists.packs, f"unpack, {what}": lists.unpacks}, nbytes, least)
    if most_host is not None:
        both = [lambda its=its: [call() for call in its] for its in zip(lists.packs, lists.unpacks, strict=True)]
        question = f"pack and unpack of {tensors}: what launching takes the host"
        report.at_most(question, bench.times({"": both}, 60, "host")[""], most_host)
    return lists


def sum_of_ranks(bench: Bench, report: Report, dtype: Any) -> None:
    """Time adding the parts of 4 ranks."""
    count = bench.nbytes(25 << 20) // 4
    host, out = [bench.numbers(count).astype(dtype) for _ in range(4)], bench.cupy.empty(count, dtype)
    add = partial(DeviceKernels().combine, [bench.cupy.asarray(part) for part in host], Reduction("sum"), out)
    bench.poison(out)
    add()
    total = sum((part.astype(np.float32) for part in host[1:]), host[0].astype(np.float32))  # rounded once
    bench.require_equal(f"sum of {np.dtype(dtype)}", out, total.astype(dtype))
    beside_roof(bench, report, {f"sum of 4 parts of {np.dtype(dtype)}": [add]}, 5 * int(out.nbytes), LEAST)


def beside_roof(bench: Bench, report: Report, ways: Mapping[str, list[Call]], nbytes: int, least: float) -> None:
    """Time ways that move so many bytes, and say which share of the device's own speed that is."""
    roof = bench.roof(nbytes)
    for question, times in bench.times(ways, 60, "GPU").items():
        share, its = roof / float(np.median(times)), record.text_of(1e6 * roof)
        got = f"{text_of(times)}, {share:.0%} of the roof: {its}, {nbytes / roof / 1e12:.2f} TB/s"
        report.add(f"{question}, {nbytes / 1e6:.1f} MB moved", got, (f"at least {least:.0%}", share >= least))


def beside_others(bench: Bench, report: Report) -> None:
    """Time packing ResNet-50's gradients, then beside other libraries."""
    its = lists(bench, report, shapes_of(bench), most_host=MOST_HOST)
    ways: dict[str, list[Call]] = defaultdict(list, ours=its.packs)
    torch = torch_of_gpus(report, "pack")
    for tensors, buffer in zip(its.tensors, its.buffers, strict=True):
        pairs = list(zip(its.cut(buffer), (one.reshape(-1) for one in tensors), strict=True))
        ways["a CuPy copy per tensor"].append(lambda pairs=pairs: [to.__setitem__(..., one) for to, one in pairs])
        if torch is not None:
            flats = [torch.from_dlpack(one) for _, one in pairs]
            views = list(torch.split(torch.from_dlpack(buffer), its.sizes))
            ways["torch._foreach_copy_"].append(partial(torch._foreach_copy_, views, flats))
    for name, calls in ways.items():
        for at, (call, buffer) in enumerate(zip(calls, its.buffers, strict=True)):
            bench.poison(buffer)
            call()
            bench.synchronize()
            bench.require_equal(name, buffer, its.packed(at))
    for clock in ("GPU", "host", "end"):
        compare(report, f"pack, {clock}", bench.times(ways, 30, clock), 1)


def measure(bench: Bench, report: Report) -> None:
    """Look at the numbers of every list, and time it."""
    shapes, half, many = shapes_of(bench), bfloat16(), [(256,)] * (50 if bench.is_tiny else 10_000)
    pack, add = partial(lists, bench, report), partial(sum_of_ranks, bench, report)
    questions: dict[str, Callable[[], object]] = {
        "pack and unpack 161 float32 tensors": partial(beside_others, bench, report),
        "with a cast to bfloat16": partial(pack, shapes, half),
        "sizes that are no multiples of 16 bytes": partial(pack, UNALIGNED, pads=True),
        "pack 10,000 tensors of 256": partial(pack, many, least=0.5, most_host=MOST_HOST_OF_MANY),
        "add the parts of ranks": partial(add, np.float32),
        "add the parts of ranks, bfloat16": partial(add, half),
        "pack and unpack 1 GB": partial(pack, shapes_of(bench, 10), sets=1),
    }
    for question, ask in questions.items():
        with report.question(question):
            ask()
