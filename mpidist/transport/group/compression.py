"""A communicator that sends float32 numbers in half precision, around another communicator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import numpy as np

from mpidist.transport import arrays
from mpidist.transport.communicator import Array, Communicator, shard_bounds
from mpidist.transport.gpu.kernels import DeviceKernels
from mpidist.transport.reduction import Reduction, narrow, widen

__all__ = ["CompressingCommunicator"]


@final
class CompressingCommunicator(Communicator):
    """Ranks that send each other float32 numbers in half precision. All buffers are float32.

    What a rank contributes is rounded, the rounded numbers are reduced in float32, and the result is rounded once more:
    the same bits on all ranks, and half the bytes that the methods of `Communicator` state.
    """

    def __init__(self, inner: Communicator, half: np.dtype[np.generic], kernels: DeviceKernels | None = None) -> None:
        super().__init__(inner.name, inner.rank, inner.size)
        self.traffic = inner.traffic
        self._inner, self._half, self._kernels = inner, half, kernels

    def pack_buffer(self, count: int, dtype: np.dtype[np.generic]) -> Array:
        return self._inner.pack_buffer(count, dtype)

    def all_reduce(self, buffer: Array, reduction: Reduction) -> None:
        half = self._narrowed(buffer)
        self._inner.all_reduce(half, _counting(reduction))
        self._widen(half, buffer)

    def reduce(self, buffer: Array, reduction: Reduction, root: int) -> None:
        half = self._narrowed(buffer)
        self._inner.reduce(half, _counting(reduction), root)
        if self.rank == root:
            self._widen(half, buffer)

    def _scatter(self, buffer: Array, reduction: Reduction, bounds: Sequence[int], own: Array, shard: Array) -> None:
        half = self._inner.reduce_scatter(self._narrowed(buffer), _counting(reduction), bounds)
        self._widen(half, shard)

    def all_gather(self, buffer: Array, bounds: Sequence[int] | None = None) -> None:
        bounds = shard_bounds(buffer.size, self.size) if bounds is None else bounds
        own = slice(bounds[self.rank], bounds[self.rank + 1])
        half = self._half_of(buffer)
        self._narrow(buffer[own], half[own])
        self._inner.all_gather(half, bounds)
        self._widen(half, buffer)

    def broadcast(self, buffer: Array, root: int, into: Array | None = None) -> None:
        half = self._narrowed(buffer) if self.rank == root else self._half_of(buffer)
        self._inner.broadcast(half, root)
        self._widen(half, buffer if into is None else into)

    def send_receive(self, outgoing: Array, to: int, incoming: Array, source: int) -> None:
        half = arrays.empty(incoming.shape, self._half, arrays.is_device(incoming))
        self._inner.send_receive(self._narrowed(outgoing), to, half, source)
        self._widen(half, incoming)

    def _half_of(self, buffer: Array) -> Array:
        if arrays.is_device(buffer):  # communicators of NCCL share a pack buffer, which may hold `buffer`
            return arrays.empty(buffer.shape, self._half, device=True)
        return self._inner.pack_buffer(buffer.size, self._half)

    def _narrowed(self, buffer: Array) -> Array:
        half = self._half_of(buffer)
        self._narrow(buffer, half)
        return half

    def _narrow(self, numbers: Array, out: Array) -> None:
        if self._kernels is None:
            self.traffic.overflowed += narrow(numbers, out)
        else:  # they count by themselves
            self._kernels.pack([numbers], out, counts_overflow=True)

    def _widen(self, numbers: Array, out: Array) -> None:
        if self._kernels is None:
            widen(numbers, out)
        else:
            self._kernels.unpack(numbers, [out])


def _counting(reduction: Reduction) -> Reduction:
    return replace(reduction, counts_overflow=True)
