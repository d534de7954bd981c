"""How fast do the kernels copy lists of tensors into one buffer and back, and add, beside the device's own copy?

And beside other libraries: `torch._foreach_copy_` and a copy per tensor by CuPy. Torch gets its list of
flat views and its buffer prepared.
"""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import distributions
from math import prod
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from record import shapes_of_list

from gpu.bench import Bench, Call, compare, text_of, time_text, torch_of_gpus
from gpu.report import Report
from mpidist.transport.cuda import nccl_version_text
from mpidist.transport.gpu.kernels import DeviceKernels
from mpidist.transport.gpu.pack_layout import PackLayout
from mpidist.transport.half import bfloat16
from mpidist.transport.reduction import Reduction

__all__ = ["Kernels", "Lists", "machine", "measure", "shapes_of"]

SETS = 3  # of arrays, used in turn; one set of ResNet-50 is three times the cache
UNALIGNED = [(10,), (50_257,), (3,), (20_481,)] * 20  # what follows lies at no multiple of 16 bytes
LEAST = 0.85  # of the speed of the device's own copy
# What launching a pack and an unpack may take the host: of ResNet-50's gradients, and of 10,000 arrays. As long as each
# array is looked at, and a launch takes but 1,363 of them, it takes more, and the table says that the goal is missed.
MOST_HOST, MOST_HOST_OF_MANY = 25e-6, 50e-6
PACKAGES = ("torch", "cupy-cuda13x", "cupy-cuda12x", "numpy", "mpi4py", "ml-dtypes")
Shape = tuple[int, ...]


class Asked(NamedTuple):
    """A list of tensors, and what is wanted of packing it: a share of the roof, and seconds of the host."""

    shapes: Sequence[Shape]
    dtype: Any = np.float32  # of the buffer
    divisor: int = 1
    is_padded: bool = False
    sets: int = SETS
    least: float = LEAST
    most_host: float | None = None


class Lists:
    """Sets of tensors with random numbers, laid out once, as the library does it, and what they are copied to."""

    def __init__(self, bench: Bench, asked: Asked) -> None:
        self.sizes, self.dtype = list(map(prod, asked.shapes)), np.dtype(asked.dtype)
        self.layout = PackLayout(self.sizes, self.dtype, asked.is_padded)
        self.host = [[bench.numbers(shape) for shape in asked.shapes] for _ in range(asked.sets)]
        self.tensors = [list(map(bench.cupy.asarray, its)) for its in self.host]
        self.buffers = [bench.cupy.empty(self.layout.size, self.dtype) for _ in self.host]
        self.targets = [[bench.cupy.empty(size, np.float32) for size in self.sizes] for _ in self.host]

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


def shapes_of(bench: Bench, copies: int = 1) -> list[Shape]:
    """Return the shapes of ResNet-50's gradients, so many times."""
    shapes = shapes_of_list("resnet50")
    return [shape for shape in shapes if prod(shape) <= 512][:20] if bench.is_tiny else shapes * copies


def machine(bench: Bench, report: Report) -> None:
    """Note what the machine is, and time the first launch, which compiles a kernel: CuPy's cache is empty."""
    support, runtime = bench.cuda.support, bench.cupy.cuda.runtime
    its = runtime.getDeviceProperties(int(runtime.getDevice()))
    memory = f"{its['totalGlobalMem'] / 2**30:.0f} GiB, L2 cache {its['l2CacheSize'] / 2**20:.0f} MiB"
    report.add("GPU", f"{support.num_devices} x {its['name'].decode()}, {memory}; {os.cpu_count()} cores of the host")
    versions = [f"driver's CUDA {support.driver_version}", f"runtime {support.runtime_version}"]
    versions += [f"NCCL {nccl_version_text(support.nccl_version)}", f"Python {platform.python_version()}"]
    versions += [f"{found.name} {found.version}" for found in distributions() if found.name in PACKAGES]
    report.add("versions", ", ".join(versions))
    arrays, buffer = [bench.cupy.zeros(8, np.float32)], bench.cupy.empty(8, np.float32)
    start = perf_counter()
    DeviceKernels().pack(arrays, buffer)
    bench.synchronize()
    took = perf_counter() - start
    report.add("the first launch of a process, with the compiler", time_text(took), goal=("at most 1 s", took <= 1))


class Kernels:
    """What is asked of the kernels."""

    def __init__(self, bench: Bench, report: Report) -> None:
        self._bench, self._report, self.kernels = bench, report, DeviceKernels()

    def checked_lists(self, asked: Asked) -> Lists:
        """Pack into buffers and unpack, divided, over what is no result; look at all numbers."""
        lists = Lists(self._bench, asked)
        for at, (tensors, buffer, targets) in enumerate(zip(lists.tensors, lists.buffers, lists.targets, strict=True)):
            for array in (buffer, *targets):
                self._bench.poison(array)
            packed = lists.packed(at)
            self.kernels.pack(tensors, buffer, layout=lists.layout)
            self._bench.require_equal(f"pack to {lists.dtype}", buffer, packed)
            self.kernels.unpack(buffer, targets, asked.divisor, lists.layout)
            for target, part in zip(targets, lists.cut(packed), strict=True):
                quotients = part.astype(np.float32) / np.float32(asked.divisor)
                self._bench.require_equal(f"unpack from {lists.dtype}", target, quotients)
        return lists

    def checked_sum(self, count: int, dtype: Any) -> tuple[Call, int]:
        """Return a sum of 4 ranks' parts, whose numbers were looked at, and the bytes that it moves."""
        host, out = [self._bench.numbers(count).astype(dtype) for _ in range(4)], self._bench.cupy.empty(count, dtype)
        add = partial(self.kernels.combine, [self._bench.cupy.asarray(part) for part in host], Reduction("sum"), out)
        self._bench.poison(out)
        add()
        total = sum((part.astype(np.float32) for part in host[1:]), host[0].astype(np.float32))  # rounded once
        self._bench.require_equal(f"sum of {np.dtype(dtype)}", out, total.astype(dtype))
        return add, 5 * int(out.nbytes)

    def lists(self, asked: Asked) -> Lists:
        """Time packing into a buffer, and unpacking; on the host, too, where that has a goal."""
        lists = self.checked_lists(asked)
        pack = partial(self.kernels.pack, layout=lists.layout)
        unpack = partial(self.kernels.unpack, divide_by=asked.divisor, layout=lists.layout)
        ways: dict[str, list[Call]] = {
            "pack": [partial(pack, *its) for its in zip(lists.tensors, lists.buffers, strict=True)],
            "unpack": [partial(unpack, *its) for its in zip(lists.buffers, lists.targets, strict=True)],
        }
        tensors, nbytes = f"{len(lists.sizes)} tensors", (4 + lists.dtype.itemsize) * sum(lists.sizes)
        questions = {f"{name}, buffer of {lists.dtype}: {tensors}": calls for name, calls in ways.items()}
        self._beside_roof(questions, nbytes, asked.least)
        if asked.most_host is not None:
            both = [lambda its=its: [call() for call in its] for its in zip(*ways.values(), strict=True)]
            question = f"pack and unpack of {tensors}: what launching takes the host"
            self._report.at_most(question, self._bench.times({"": both}, 60, "host")[""], asked.most_host)
        return lists

    def sum(self, dtype: Any) -> None:
        """Time adding the parts of 4 ranks."""
        add, nbytes = self.checked_sum(self._bench.nbytes(25 << 20) // 4, dtype)
        self._beside_roof({f"sum of 4 parts of {np.dtype(dtype)}": [add]}, nbytes, LEAST)

    def _beside_roof(self, ways: Mapping[str, list[Call]], nbytes: int, least: float) -> None:
        for question, times in self._bench.times(ways, 60, "GPU").items():
            roof = self._bench.roof(nbytes)
            share = roof / float(np.median(times))
            got = f"{text_of(times)}, {share:.0%} of the roof: {time_text(roof)}, {nbytes / roof / 1e12:.2f} TB/s"
            goal = f"at least {least:.0%}", share >= least
            self._report.add(f"{question}, {nbytes / 1e6:.1f} MB moved", got, goal=goal)

    def beside_others(self) -> None:
        """Time packing ResNet-50's gradients, then beside other libraries."""
        lists = self.lists(Asked(shapes_of(self._bench), most_host=MOST_HOST))
        ways: dict[str, list[Call]] = defaultdict(list)
        torch = torch_of_gpus(self._report, "pack")
        for tensors, buffer in zip(lists.tensors, lists.buffers, strict=True):
            ways["ours"].append(partial(self.kernels.pack, tensors, buffer, layout=lists.layout))
            pairs = list(zip(lists.cut(buffer), (one.reshape(-1) for one in tensors), strict=True))
            ways["a CuPy copy per tensor"].append(lambda pairs=pairs: [its.__setitem__(..., one) for its, one in pairs])
            if torch is not None:
                flats = [torch.from_dlpack(one) for _, one in pairs]
                views = list(torch.split(torch.from_dlpack(buffer), lists.sizes))
                ways["torch._foreach_copy_"].append(partial(torch._foreach_copy_, views, flats))
        for name, calls in ways.items():
            for at, (call, buffer) in enumerate(zip(calls, lists.buffers, strict=True)):
                self._bench.poison(buffer)
                call()
                self._bench.synchronize()
                self._bench.require_equal(name, buffer, lists.packed(at))
        for clock in ("GPU", "host", "end"):
            compare(self._report, f"pack, {clock}", self._bench.times(ways, 30, clock), 1)


def measure(bench: Bench, report: Report) -> None:
    """Look at the numbers of every list, and time it."""
    its, shapes, half = Kernels(bench, report), shapes_of(bench), bfloat16()
    many = [(256,)] * (50 if bench.is_tiny else 10_000)
    questions: dict[str, Callable[[], object]] = {
        "pack and unpack 161 float32 tensors": its.beside_others,
        "with a cast to bfloat16": partial(its.lists, Asked(shapes, half, 8)),
        "sizes that are no multiples of 16 bytes": partial(its.lists, Asked(UNALIGNED, is_padded=True)),
        "pack 10,000 tensors of 256": partial(its.lists, Asked(many, least=0.5, most_host=MOST_HOST_OF_MANY)),
        "add the parts of ranks": partial(its.sum, np.float32),
        "add the parts of ranks, bfloat16": partial(its.sum, half),
        "pack and unpack 1 GB": lambda: its.lists(Asked(shapes_of(bench, 10), sets=1)),
    }
    for question, ask in questions.items():
        with report.question(question):
            ask()
