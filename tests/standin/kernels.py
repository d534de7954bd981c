"""`cupy.RawModule` without a GPU: the same kernels compiled for the host, on the stand-in's memory.

A kernel's threads run one after another, the last first. Before it runs, what it is going to read and write is told
from its table, must be memory that is there, and is noted for the search for races. Copies from pinned memory are done
late, when the stream comes to them.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpidist.transport.gpu.copy_table import CASTS, COPIES, QUOTIENTS

__all__ = ["Pinned", "add_to", "call", "library", "words_at"]

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
extern "C" void run_kernel(void* kernel, unsigned blocks, unsigned threads, const u8* a) {
    typedef void (*Kernel)(u8, u8, u8, u8, u8, u8, u8, u8, u8, u8);
    gridDim.x = blocks;
    blockDim.x = threads;
    for (unsigned block = blocks; block-- > 0;)
        for (unsigned thread = threads; thread-- > 0;) {
            blockIdx.x = block;
            threadIdx.x = thread;
            ((Kernel)kernel)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]);
        }
}
"""
WIDTHS = {"i1": 1, "u1": 1, "i2": 2, "u2": 2, "f2": 2, "bf": 2, "i4": 4, "u4": 4, "f4": 4, "c16": 16}
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


def call(source: str, name: str, num_blocks: int, num_threads: int, arguments: tuple[int, ...]) -> None:
    """Run a kernel on the host's memory."""
    its = library(source)
    words = np.zeros(10, np.uint64)
    words[: len(arguments)] = [argument % 2**64 for argument in arguments]
    its.run_kernel(getattr(its, name), num_blocks, num_threads, words.ctypes.data_as(ctypes.c_void_p))


class Pinned(np.ndarray):
    """What mpidist uses of CuPy's pinned memory: its address, and the buffer protocol."""

    ptr = property(lambda self: self.ctypes.data)


def add_to(world: Any, cupy: Any) -> None:
    """Let a stand-in have kernels, pinned memory, and copies from it."""
    pinned: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def alloc_pinned_memory(nbytes: int) -> Pinned:
        memory = np.zeros(nbytes, np.uint8).view(Pinned)
        pinned[memory.ptr] = memory
        return memory

    def memcpy_async(to: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert all(type(its) is int for its in (to, source, nbytes, kind, stream)), "plain ints"
        assert kind == 1
        queue = world.streams[stream]
        if queue.captured is not None:
            world.problems.append("a table was copied in a capture")
        if source not in pinned:
            world.problems.append("memory was copied that is not pinned")
        queue.issue()
        allocation, memory = world.find(to, nbytes), pinned[source]
        world.note(queue, allocation, to, to + nbytes, True)

        def copy() -> Iterator[None]:
            start = to - allocation.address
            allocation.memory[start : start + nbytes] = memory[:nbytes]
            return
            yield

        world.enqueue(copy(), queue, [allocation])

    cupy.RawModule = lambda code, options=(): Module(world, code, options)
    cupy.cuda.alloc_pinned_memory = alloc_pinned_memory
    cupy.cuda.runtime.memcpyAsync = memcpy_async
    cupy.cuda.runtime.memcpyHostToDevice = 1
    world.pinned = pinned
    world.num_kernels = 0
    world.compiling = 0.0  # seconds


class Module:
    """As `cupy.RawModule`."""

    def __init__(self, world: Any, code: str, options: tuple[str, ...]) -> None:
        assert isinstance(options, tuple)
        self.world = world
        self.code = code

    def compile(self) -> None:
        time.sleep(self.world.compiling)
        if shutil.which(COMPILER) is not None:
            library(self.code)

    def get_function(self, name: str) -> Any:
        getattr(library(self.code), name)
        return lambda grid, block, args: self._launch(name, grid, block, args)

    def _launch(self, name: str, grid: Any, block: Any, args: Any) -> None:
        assert all(type(its) is tuple for its in (grid, block, args)), "CuPy wants tuples"
        assert all(type(its) is int and -(2**63) <= its < 2**63 for its in args), "CuPy makes int64 of them"
        assert len(grid) == len(block) == 1
        assert 0 < grid[0] < 2**31
        assert block[0] <= 1024
        world = self.world
        stream = world.current

        def run() -> None:
            ranges = _ranges_of_combine(name, args) if "combine" in name else _ranges_of_move(args)
            world.run_kernel(lambda args: call(self.code, name, grid[0], block[0], args), name, args, _joined(ranges))
            world.num_kernels += 1

        if stream.captured is None:
            world.reach(stream)
            run()
        else:
            stream.captured.append(lambda: (world.reach(stream), run()))


def with_own_tables(name: str, args: tuple[int, ...]) -> tuple[tuple[int, ...], list[Any]]:
    """Let a kernel that runs later read its tables as they are now. Returns its arguments, and the tables."""
    mine, tables = list(args), []
    sizes = {0: args[3]} if "combine" in name else {0: 3 * args[1], 2: 0, 4: 0}
    if "combine" not in name:
        rows = words_at(args[0], sizes[0]).reshape(-1, 3)
        sizes[2] = sizes[4] = int((rows[:, 2] & 0xFFFFFFFF).max()) + 1
    for at, size in sizes.items():
        if args[at]:
            tables.append(words_at(args[at], size))
            mine[at] = tables[-1].ctypes.data
    return tuple(mine), tables


def words_at(address: int, count: int) -> Any:
    """Read device memory, whatever is under way: 64-bit words, [count]."""
    return np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(address)).astype(np.int64)


def _ranges_of_move(args: tuple[int, ...]) -> list[tuple[int, int, bool]]:
    rows_at, num_rows, from_arrays, from_flat, to_arrays, to_flat, _, overflow = args
    rows = words_at(rows_at, 3 * num_rows).reshape(num_rows, 3)
    index, count, kind = rows[:, 2] & 0xFFFFFFFF, rows[:, 2] >> 32 & 0xFFFF, rows[:, 2] >> 48
    ranges = [(rows_at, rows_at + 24 * num_rows, False)] + [(overflow, overflow + 4, True)] * bool(overflow)
    for arrays, flat, side in ((from_arrays, from_flat, 0), (to_arrays, to_flat, 1)):
        widths = np.array([READ_AND_WRITTEN[int(its)][side] for its in kind])
        if arrays:
            places = words_at(arrays, int(index.max()) + 1)
            ranges.append((arrays, arrays + 8 * places.size, False))
            lows = places[index] + rows[:, 0] * widths
        else:
            lows = flat + rows[:, 1] * widths
        ranges += [(int(low), int(high), bool(side)) for low, high in zip(lows, lows + count * widths, strict=True)]
    return ranges


def _ranges_of_combine(name: str, args: tuple[int, ...]) -> list[tuple[int, int, bool]]:
    table, first, stride, number, count, out, _, _, _, overflow = args
    read, written = (WIDTHS.get(code, 8) for code in name.split("_")[2:])
    ranges = [(out, out + count * written, True)] + [(overflow, overflow + 4, True)] * bool(overflow)
    places = [first + at * stride for at in range(number)]
    if table:
        places = [int(place) for place in words_at(table, number)]
        ranges.append((table, table + 8 * number, False))
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
