"""A work, the ways to do it, and the check of its results. Imported by the ranks of every library."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import numpy as np

_PATTERN = 251  # prime, so that no chunk or shard starts where the pattern does
_BLOCK = _PATTERN << 12


@dataclass(frozen=True)
class Work:
    """One thing to reduce over all ranks."""

    kind: str  # `size` for one flat array, `list` for a list of gradients
    name: str  # as `64K`, `resnet50`
    shapes: tuple[tuple[int, ...], ...]
    calls: int = 1  # that are timed together, each with its own arrays
    benchmark: str = "all_reduce"  # the case
    ways: str = "sums:all_reduce"  # the function in `cases` that lists the ways over MPI
    other_bytes: int = 0  # that each rank writes before each step, as the rest of a training step does

    @property
    def nbytes(self) -> int:
        """Bytes that one call reduces, as float32."""
        return sum(4 * int(np.prod(shape)) for shape in self.shapes)

    def empty(self, dtype: Any = np.float32) -> list[Any]:
        """Allocate the arrays of one call."""
        return [np.empty(shape, dtype) for shape in self.shapes]


@dataclass(frozen=True)
class Way:
    """One way to do a work."""

    # The arrays that are written before each step: a list for each call, and replica of the rank. Without any, results
    # are not checked.
    written: Sequence[Sequence[Any]]
    call: Callable[[int], Any]  # takes the number of the call, and returns its result
    baseline: str = "raw in place"  # the way that it is compared with
    # Converts a result to NumPy arrays, one for each array of the work.
    results: Callable[[Any], Sequence[Any]] = field(default=lambda result: result)
    # Calls a function, which times the calls of a step, in the context that they need.
    within: Callable[[Callable[[], Any]], Any] = field(default=lambda timed: timed())
    # Maps the values that all ranks wrote at a place [ranks] to the expected result.
    expect: Callable[[Sequence[Any]], Any] = field(default=sum)
    part: slice | None = None  # of each flat array, that this rank gets; `None` for all, in its shape
    tolerance: float = 1e-6  # relative; sums of the written values are exact in float32


class Backend:
    """A library, on one of its ranks."""

    rank: int  # among those that are measured
    size: int
    versions: dict[str, str]  # of the library and of the packages below it
    serves = False  # whether this process is a server of the others, and is not measured
    barrier: Callable[[], object]  # before each step; set before the first work

    def ways(self, work: Work) -> dict[str, Way]:
        """Prepare a work, and name the ways to do it. Collective."""
        raise NotImplementedError

    def forget(self) -> None:
        """Release what `ways` allocated. Collective."""

    def serve(self) -> None:
        """Serve until the others have ended. On servers."""

    def close(self) -> None:
        """End. Collective, among those that are measured."""


def versions_of(*packages: str) -> dict[str, str]:
    """Return the versions of packages, of NumPy and of Python."""
    return {name: metadata.version(name) for name in (*packages, "numpy")} | {"python": platform.python_version()}


def write_number(arrays: Sequence[Any], number: int) -> None:
    """Write a number everywhere."""
    for array in arrays:
        array.fill(number)


def write_pattern(arrays: Sequence[Any], rank: int) -> None:
    """Write numbers that differ from place to place, so that a shard in the wrong place shows."""
    for array in arrays:
        array[...] = _pattern_at(0, array.size).reshape(array.shape)
        array += rank


def _pattern_at(start: int, count: int) -> Any:
    """Return what `write_pattern` writes on rank 0 into `count` elements from `start` on."""
    return np.resize(np.roll(np.arange(_PATTERN, dtype=np.float32), -(start % _PATTERN)), count)


def check(results: Sequence[Any], way: Way, shapes: Sequence[tuple[int, ...]], size: int, number: int | None) -> None:
    """Raise `ArithmeticError` unless the results of a way are right.

    Args:
        results: An array for each array of the work.
        way: Defines the expected values.
        shapes: Of the work's arrays.
        size: Number of ranks.
        number: Every rank has written `number + rank`, and both ends of each array are compared; `None`: every rank
            has called `write_pattern`, and all elements are compared.
    """
    if len(results) != len(shapes):
        raise ArithmeticError(f"{len(results)} arrays came back for {len(shapes)}")
    for got, shape in zip(results, shapes, strict=True):
        flat, (start, stop, _) = got.reshape(-1), (way.part or slice(None)).indices(int(np.prod(shape)))
        if flat.size != stop - start or (way.part is None and got.shape != tuple(shape)):
            raise ArithmeticError(f"an array {got.shape} came back for {tuple(shape)}")
        if number is not None:
            _compare(flat[[0, -1]] if flat.size else flat, way, [np.float32(number + rank) for rank in range(size)])
            continue
        for at in range(0, flat.size, _BLOCK):  # small temporary arrays
            block = flat[at : at + _BLOCK]
            pattern = _pattern_at(start + at, block.size)
            _compare(block, way, [pattern + np.float32(rank) for rank in range(size)])


def _compare(got: Any, way: Way, written: Sequence[Any]) -> None:
    wanted = way.expect(written)
    wrong = np.abs(got.astype(np.float32) - wanted) > way.tolerance * np.abs(wanted)
    if wrong.any():
        raise ArithmeticError(f"{wrong.sum()} of {got.size} numbers are wrong, such as {got[wrong][:3]}")
