"""`cupy.RawModule` without a GPU: the same kernels compiled for the host, on the stand-in's memory.

A kernel's threads run one after another, the last first. Before it runs, what it is going to read and write is told
from its table, must be memory that is there, and is noted for the search for races.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpidist.transport.gpu.copy_table import ARRAY, CASTS, COPIES, QUOTIENTS

__all__ = ["add_to", "call", "library"]

COMPILER = "g++"
# What is undefined ends the process: 16 bytes from an address that is no multiple of 16, say, which a GPU refuses.
OPTIONS = [
    "-O1", "-shared", "-fPIC", "-std=c++17", "-ffp-contract=off", "-Wall", "-Wno-unknown-pragmas",
    "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error",
]  # fmt: skip
PRELUDE = """
#define __device__
#define __global__
#define __forceinline__ inline
struct Place { unsigned x, y, z; };
static Place blockIdx, threadIdx, blockDim, gridDim;
static unsigned atomicAdd(unsigned* at, unsigned number) { unsigned was = *at; *at += number; return was; }
#line 1 "kernels.cu"
"""
DRIVER = """
template <class Call> static void each_thread(unsigned blocks, unsigned first, unsigned threads, Call call) {
    gridDim.x = blocks;
    blockDim.x = threads;
    for (unsigned block = blocks; block-- > first;)
        for (unsigned thread = threads; thread-- > 0;) {
            blockIdx.x = block;
            threadIdx.x = thread;
            call();
        }
}
extern "C" void run_copies(
    void* kernel, unsigned blocks, unsigned first, unsigned threads, const Table* table, const u8* a
) {
    typedef void (*Kernel)(const Table, i8, i8, i8, u4*);
    each_thread(blocks, first, threads, [&] { ((Kernel)kernel)(*table, a[0], a[1], a[2], (u4*)a[3]); });
}
extern "C" void run_combine(
    void* kernel, unsigned blocks, unsigned first, unsigned threads, const Addresses* table, const u8* a
) {
    typedef void (*Kernel)(const Addresses, u8, i8, i8, i8, u8, i8, i8, i8, u4*);
    each_thread(blocks, first, threads, [&] {
        ((Kernel)kernel)(*table, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], (u4*)a[8]);
    });
}
"""
MOST_PARAMETERS = 4096  # bytes, on every GPU
ROW = 8192  # bytes
WIDTHS = {"f2": 2, "bf": 2, "f4": 4, "c16": 16}
READ_AND_WRITTEN = {kind: (width, width) for width, kind in COPIES.items()} | {
    kind: tuple(WIDTHS.get(code, 8) for code in pair.split())
    for table in (CASTS, QUOTIENTS)
    for pair, kind in table.items()
}


@cache
def library(source: str) -> Any:
    """Compile kernels for the host, once for all processes, and load them."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"needs {COMPILER}, to compile the GPU's kernels for the host")
    text = PRELUDE + source + DRIVER
    name = hashlib.sha256((text + " ".join(OPTIONS)).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"mpidist-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.getuid(), f"{folder} is somebody else's"
    made = folder / f"{name}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            part = folder / f"{name}.part"
            command = [COMPILER, *OPTIONS, "-x", "c++", "-", "-o", str(part)]
            done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
            assert done.returncode == 0, done.stderr
            part.rename(made)
    return ctypes.PyDLL(str(made))  # which holds the interpreter: the place of a thread is one variable


def call(
    source: str, name: str, num_blocks: int, num_threads: int, arguments: tuple[Any, ...], first_block: int = 0
) -> None:
    """Run a kernel on the host's memory: its blocks from `first_block` on."""
    kernels = library(source)
    table, *numbers = arguments
    words = np.array([number % 2**64 for number in numbers], np.uint64)
    run = kernels.run_combine if "combine" in name else kernels.run_copies
    addresses = (its.ctypes.data_as(ctypes.c_void_p) for its in (table, words))
    run(getattr(kernels, name), num_blocks, first_block, num_threads, *addresses)


def add_to(world: Any, cupy: Any) -> None:
    """Let a stand-in have kernels."""
    cupy.RawModule = lambda code, options=(): Module(world, code, options)
    world.num_kernels = 0
    world.compiling = 0.0  # seconds
    world.compiled = set()  # names of kernels


class Module:
    """As `cupy.RawModule`."""

    def __init__(self, world: Any, code: str, options: tuple[str, ...]) -> None:
        assert isinstance(options, tuple)
        self.world = world
        self.code = code

    def get_function(self, name: str) -> Any:
        self.world.compiled |= set(re.findall(r"^(?:COPIER\(mpidist_|COMBINE\()(\w+)", self.code, re.MULTILINE))
        time.sleep(self.world.compiling)
        getattr(library(self.code), name)
        return lambda grid, block, args: self._launch(name, grid, block, args)

    def _launch(self, name: str, grid: Any, block: Any, args: Any) -> None:
        assert all(type(its) is tuple for its in (grid, block, args)), "CuPy wants tuples"
        table, *numbers = args
        assert isinstance(table, np.ndarray)
        assert table.size == 1, "CuPy passes an array of one by value"
        assert table.nbytes + 8 * len(numbers) <= MOST_PARAMETERS
        assert all(type(its) is int and -(2**63) <= its < 2**63 for its in numbers), "CuPy makes int64 of them"
        assert len(grid) == len(block) == 1
        assert 0 < grid[0] < 2**31
        assert block[0] <= 1024
        world, args = self.world, (table.copy(), *numbers)  # by value: the caller may change it at once
        ranges = _ranges_of_combine(name, args) if "combine" in name else _ranges_of_copies(args)

        def run() -> None:
            world.reach(world.current)
            world.run_kernel(lambda args: call(self.code, name, grid[0], block[0], args), args, _joined(ranges))
            world.num_kernels += 1

        captured = world.current.captured
        run() if captured is None else captured.append(run)


def _ranges_of_copies(args: tuple[Any, ...]) -> list[tuple[int, int, bool]]:
    table, num_arrays, num_rows, _, overflow = args
    arrays = np.frombuffer(table.tobytes(), ARRAY)[:num_arrays]
    ranges = [(overflow, overflow + 4, True)] * bool(overflow)
    for array, after in zip(arrays, [*arrays["first_row"][1:].tolist(), num_rows], strict=True):
        widths = READ_AND_WRITTEN[int(array["kind"])]
        count = (after - int(array["first_row"]) - 1) * (ROW // max(widths)) + int(array["last"])
        for side, width in zip(("source", "target"), widths, strict=True):
            pad = int(array["pad"]) if side == "target" else 0
            ranges.append((int(array[side]), int(array[side]) + (count + pad) * width, side == "target"))
    return ranges


def _ranges_of_combine(name: str, args: tuple[Any, ...]) -> list[tuple[int, int, bool]]:
    table, first, stride, number, count, out, _, _, _, overflow = args
    read, written = (WIDTHS.get(code, 8) for code in name.split("_")[2:])
    ranges = [(out, out + count * written, True)] + [(overflow, overflow + 4, True)] * bool(overflow)
    places = [first + at * stride for at in range(number)] if stride >= 0 else table.view(np.uint64)[:number].tolist()
    return ranges + [(place, place + count * read, False) for place in places]


def _joined(ranges: list[tuple[int, int, bool]]) -> list[tuple[int, int, bool]]:
    """Make one of ranges that touch, and are used in the same way."""
    joined: list[tuple[int, int, bool]] = []
    for low, high, is_write in sorted(ranges, key=lambda its: (its[2], its[0])):
        if joined and joined[-1][1] == low and joined[-1][2] == is_write:
            joined[-1] = joined[-1][0], high, is_write
        else:
            joined.append((low, high, is_write))
    return joined
