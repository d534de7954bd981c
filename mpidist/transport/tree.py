"""The fixed tree in which replicas are added, so that a sum has the same bits on any number of ranks.

`T(a, b)`, the sum of replicas a to b - 1, is the replica itself if there is one, and else `T(a, m) + T(m, b)`, where
m - a is the largest power of two below b - a. The *rows* of a set of replicas are the largest whole subtrees whose
replicas are all in the set. A rank adds its own replicas to its rows; a rank that adds the rows of several ranks
continues in the same tree. All additions are elementwise, so chunks, packs and algorithms cannot change a bit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.transport import arrays
from mpidist.transport.float_errors import without_float_errors
from mpidist.transport.topology import Topology

__all__ = ["Fold", "ReplicaTree", "multiply_complex", "rows_of"]

Row = tuple[int, int]  # the subtree of replicas a to b - 1: (a, b)

_BLOCK_BYTES: Final = 128 << 10  # of each part: partial sums of a block stay in the cache, and need little memory
_OUT: Final = -1  # the last register
_NOT_LATE: Final = (False,)


@final
class _Step(NamedTuple):
    """`target = left + right`, by numbers of registers: first the parts, then scratch arrays, at last the out."""

    left: int
    right: int
    target: int


@final
class _Output(NamedTuple):
    """One output row: a part (`source`), or the sum of `steps`, the last of which writes the out.

    `read_later`: the parts that later outputs read.
    """

    steps: tuple[_Step, ...]
    source: int | None
    read_later: tuple[int, ...] = ()


@final
class Fold:
    """Adds the rows of several groups of replicas to the rows of their union, in the order of the tree.

    Attributes:
        num_parts: Number of input rows: those of the first group, then those of the next.
        num_rows: Number of output rows.
        is_in_order: Whether the parts are added to one row in their order, as code without a tree does.
    """

    def __init__(self, total: int, groups: Sequence[Sequence[int]]) -> None:
        replicas = sorted(chain.from_iterable(groups))
        if len(set(replicas)) < len(replicas):
            raise ValueError(f"a replica of {replicas} is in two groups; each one needs to be in one")
        inputs, rows = [row for group in groups for row in rows_of(total, group)], rows_of(total, replicas)
        self.num_parts, self.num_rows = len(inputs), len(rows)
        compiler = _Compiler(inputs)
        self._outputs: list[_Output] = [compiler.compile(row) for row in rows]
        self._num_scratch = compiler.num_scratch
        steps = self._outputs[0].steps
        totals = [0, *(step.target for step in steps)]
        in_order = [(totals[at], at + 1) for at in range(len(steps))]
        self.is_in_order = self.num_rows == 1 and [step[:2] for step in steps] == in_order
        self._pair = steps[0][:2] if self.num_rows == len(steps) == 1 else None  # the parts of the only addition
        read_later: set[int] = set()
        for at in reversed(range(self.num_rows)):
            output = self._outputs[at]
            self._outputs[at] = output._replace(read_later=tuple(sorted(read_later)))
            operands = {operand for step in output.steps for operand in (step.left, step.right)}
            read_later |= {part for part in operands if part < self.num_parts}
            if output.source is not None:
                read_later.add(output.source)

    def combine(self, ufunc: np.ufunc, parts: Sequence[Any], outs: Sequence[Any]) -> None:
        """Add flat arrays of equal length and dtype, of NumPy or CuPy. No floating-point error is reported.

        Each of the outs [num_rows] may be one of the parts [num_parts].
        """
        first, is_device = outs[0], arrays.is_device(outs[0])
        call: Callable[..., Any] = ufunc if is_device else partial(without_float_errors, ufunc)
        if ufunc is np.multiply and first.dtype.kind == "c":
            call = partial(multiply_complex, call is ufunc)
        if self._pair is not None:  # one addition: there is no partial sum to keep in the cache
            left, right = self._pair
            call(parts[left], parts[right], out=first)
            return
        are_late = _NOT_LATE if self.num_rows == 1 else self._are_late(parts, outs)
        if is_device or first.nbytes <= _BLOCK_BYTES:
            self._add(call, parts, outs, are_late)
            return
        step = max(1, _BLOCK_BYTES // first.itemsize)
        for start in range(0, first.size, step):
            block = slice(start, start + step)
            self._add(call, [part[block] for part in parts], [out[block] for out in outs], are_late)

    def _are_late(self, parts: Sequence[Any], outs: Sequence[Any]) -> list[bool]:
        """Whether each out can be written only at the end, because later outputs read parts that it overwrites."""
        return [
            any(_overlap(out, parts[at]) for at in output.read_later)
            for out, output in zip(outs, self._outputs, strict=True)
        ]

    def _add(
        self, call: Callable[..., Any], parts: Sequence[Any], outs: Sequence[Any], are_late: Sequence[bool]
    ) -> None:
        """Carry out the steps. Outs that overwrite parts of later outputs are written at the end."""
        registers: list[Any] = [*parts, *[None] * self._num_scratch, None]
        late = []
        for output, out, is_late in zip(self._outputs, outs, are_late, strict=True):
            registers[_OUT] = None if is_late else out
            for left, right, target in output.steps:
                registers[target] = call(registers[left], registers[right], out=registers[target])
            if output.source is not None:
                registers[_OUT] = _copied(parts[output.source], registers[_OUT])
            if is_late:
                late.append((out, registers[_OUT]))
        for out, row in late:
            out[...] = row


@final
class _Compiler:
    """Compiles rows to steps that use few scratch arrays: the logarithm of the number of additions."""

    def __init__(self, inputs: Sequence[Row]) -> None:
        self.num_scratch = 0
        self._num_parts = len(inputs)
        self._place_of = {row: place for place, row in enumerate(inputs)}
        self._free: list[int] = []
        self._steps: list[_Step] = []

    def compile(self, row: Row) -> _Output:
        """Return the output for a row."""
        self._steps = []
        at = self._add(row)
        if not self._steps:
            return _Output((), at)
        self._free.append(at)
        self._steps[-1] = self._steps[-1]._replace(target=_OUT)
        return _Output(tuple(self._steps), None)

    def _add(self, row: Row) -> int:
        """Append the steps that add a subtree. Returns the register that then holds it."""
        if row in self._place_of:
            return self._place_of[row]
        start, stop = row
        middle = _middle(start, stop)
        left, right = self._add((start, middle)), self._add((middle, stop))
        scratch = [at for at in (left, right) if at >= self._num_parts]
        if not scratch:
            scratch.append(self._free.pop() if self._free else self._new())
        target, *unused = scratch
        self._free += unused
        self._steps.append(_Step(left, right, target))
        return target

    def _new(self) -> int:
        self.num_scratch += 1
        return self._num_parts + self.num_scratch - 1


@final
@dataclass(frozen=True)
class ReplicaTree:
    """The tree over the replicas of all ranks, and the folds that add it up. Its `repr` is the same on all ranks.

    Rank r carries replicas `bounds[r]` to `bounds[r + 1] - 1`, at least one.
    """

    bounds: tuple[int, ...]
    topology: Topology = field(repr=False)

    def __post_init__(self) -> None:
        ranks = self.topology.size
        if len(self.bounds) != ranks + 1 or self.bounds[0] != 0 or any(a >= b for a, b in pairwise(self.bounds)):
            raise ValueError(
                f"got bounds {self.bounds} of replicas on {ranks} ranks; needed {ranks + 1} rising numbers from 0 on, "
                "so that each rank has a replica"
            )

    @property
    def total(self) -> int:
        """Number of replicas."""
        return self.bounds[-1]

    @cached_property
    def num_rows(self) -> tuple[int, ...]:
        """Number of rows of each rank."""
        return tuple(len(rows_of(self.total, replicas)) for replicas in self._replicas)

    @cached_property
    def num_node_rows(self) -> tuple[int, ...]:
        """Number of rows of each node."""
        return tuple(len(rows_of(self.total, replicas)) for replicas in self._replicas_of_nodes)

    @cached_property
    def is_flat(self) -> bool:
        """Whether every rank and every node has exactly one row: then a rank contributes one array, as a replica."""
        return {*self.num_rows, *self.num_node_rows} == {1}

    @cached_property
    def local(self) -> Fold:
        """From this rank's replicas to this rank's rows."""
        return Fold(self.total, [[replica] for replica in self._replicas[self.topology.rank]])

    @cached_property
    def world(self) -> Fold:
        """From the rows of all ranks, in rank order, to the sum."""
        return Fold(self.total, self._replicas)

    @cached_property
    def within_node(self) -> Fold:
        """From the rows of the ranks of this rank's node, in rank order, to the rows of the node."""
        return Fold(self.total, [self._replicas[rank] for rank in self.topology.nodes[self.topology.node]])

    @cached_property
    def across_nodes(self) -> Fold:
        """From the rows of all nodes, in order of nodes, to the sum."""
        return Fold(self.total, self._replicas_of_nodes)

    @cached_property
    def _replicas(self) -> list[range]:
        return [range(start, stop) for start, stop in pairwise(self.bounds)]

    @cached_property
    def _replicas_of_nodes(self) -> list[list[int]]:
        return [[replica for rank in ranks for replica in self._replicas[rank]] for ranks in self.topology.nodes]


def rows_of(total: int, replicas: Sequence[int]) -> list[Row]:
    """List the rows of a set of replicas, which rise: the largest whole subtrees whose replicas are all in the set."""
    rows: list[Row] = []
    waiting = [(0, total)]
    while waiting:
        start, stop = waiting.pop()
        count = bisect_left(replicas, stop) - bisect_left(replicas, start)
        if count == stop - start:
            rows.append((start, stop))
        elif count:
            middle = _middle(start, stop)
            waiting += [(middle, stop), (start, middle)]
    return rows


def _middle(start: int, stop: int) -> int:
    """Return where a subtree is cut: after the largest power of two that is smaller than its number of replicas."""
    return start + (1 << (stop - start - 1).bit_length() - 1)


def _overlap(one: Any, other: Any) -> bool:
    (start, stop), (other_start, other_stop) = arrays.memory_bounds(one), arrays.memory_bounds(other)
    return start < other_stop and other_start < stop


def _copied(part: Any, out: Any) -> Any:
    """Copy a part into `out`; to a new array if that is `None`."""
    if out is None:
        return part.copy()
    if part is not out:
        out[...] = part
    return out


def multiply_complex(is_device: bool, one: Any, other: Any, out: Any = None) -> Any:
    """Multiply complex numbers by real products, as NumPy's own rounding depends on length and place of the result."""
    multiply, subtract, add = (
        (np.multiply, np.subtract, np.add)
        if is_device
        else (partial(without_float_errors, ufunc) for ufunc in (np.multiply, np.subtract, np.add))
    )
    real = subtract(multiply(one.real, other.real), multiply(one.imag, other.imag))
    imaginary = add(multiply(one.real, other.imag), multiply(one.imag, other.real))
    product = arrays.empty(one.shape, one.dtype, is_device) if out is None else out
    product.real[...], product.imag[...] = real, imaginary
    return product
