"""The caller's values as native arrays, and results as the caller's kinds of value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from mpidist.cross_device_ops.plan import Spec
from mpidist.transport import arrays
from mpidist.values import local

__all__ = ["Operands", "result_arrays"]


@final
class Operands:
    """Values of one call, opened.

    Args:
        values: Arrays, numbers and distributed values (of which this rank's component counts).

    Attributes:
        arrays: Their native arrays. They may be the caller's memory and are only read.
        specs: Shape, native dtype and memory of each.

    Raises:
        TypeError: If one is not an array or a number.
        ValueError: If a Python int does not fit in int64.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = [local(value) for value in values]
        self.arrays = []
        specs = []
        for value in self._values:
            array = value if type(value) is np.ndarray else arrays.library_of(value).to_native(value)
            dtype = array.dtype
            self.arrays.append(array)
            specs.append(
                Spec(array.shape, dtype if dtype.isnative else dtype.newbyteorder("="), arrays.is_device(array))
            )
        self.specs = tuple(specs)

    def restore(self, results: Sequence[Any]) -> list[Any]:
        """Give native results the kinds that the values came in; `None` stays `None`."""
        return [
            result
            if result is None or type(value) is np.ndarray
            else arrays.library_of(value).from_native(result, value)
            for result, value in zip(results, self._values, strict=True)
        ]


def result_arrays(specs: Sequence[Spec], dtypes: Sequence[np.dtype[Any]]) -> list[Any]:
    """Allocate results: C-contiguous arrays of the given dtypes."""
    return [arrays.empty(spec.shape, dtype, spec.device) for spec, dtype in zip(specs, dtypes, strict=True)]
