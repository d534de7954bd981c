"""Copies of a variable on the other GPUs of a process: the variable itself lies on the rank's first GPU."""

from __future__ import annotations

from typing import Any, final

from mpidist.transport import arrays

__all__ = ["GpuCopies"]


@final
class GpuCopies:
    """Copies of an array on other GPUs of this rank, each made when it is first read there after a write.

    Args:
        array: The array, on the rank's first GPU.
    """

    def __init__(self, array: Any) -> None:
        self._array = array
        self._copies: dict[int, Any] = {}  # by the index of the GPU

    def here(self) -> Any:
        """Return the array, or its copy, on the current GPU. Local."""
        index = arrays.current_gpu()
        copy = self._copies.get(index)
        if copy is None:
            copy = self._copies[index] = arrays.on_current_device(self._array)
        return copy

    def forget(self) -> None:
        """Drop the copies, because the array is written. Local."""
        self._copies.clear()
