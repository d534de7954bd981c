"""The caller's values as native arrays, and results as the caller's kinds of value."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final, final

import numpy as np

from mpidist.collectives.plan import Spec
from mpidist.transport import DeviceLevels, arrays
from mpidist.values import contribution

__all__ = ["Operands", "result_arrays"]

_shape_of: Final = attrgetter("shape")
_dtype_of: Final = attrgetter("dtype")


@final
class Operands:
    """Values of one call, opened.

    Args:
        values: Arrays, numbers and distributed values, of which this rank's component counts, or its own copy.

    Attributes:
        arrays: Their native arrays. They may be the caller's memory and are only read.
        key: Equal for values of the same shapes and dtypes; for this rank's own use.

    Raises:
        TypeError: If one is not an array or a number.
        ValueError: If a Python int does not fit in int64.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._is_plain = set(map(type, values)) == {np.ndarray}
        self._values: Sequence[Any] = values if self._is_plain else [contribution(value) for value in values]
        self._specs: tuple[Spec, ...] | None = None
        self.arrays: list[Any]
        self.key: Any
        if self._is_plain:
            self.arrays = list(values)
            self.key = (*map(_shape_of, values), *map(_dtype_of, values))
        else:
            self.arrays = [_native(value) for value in self._values]
            self.key = self.specs

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Shape, native dtype and memory of each."""
        if self._specs is None:
            self._specs = tuple(
                Spec(
                    array.shape,
                    array.dtype if array.dtype.isnative else array.dtype.newbyteorder("="),
                    arrays.is_device(array),
                )
                for array in self.arrays
            )
        return self._specs

    @classmethod
    def of(cls, values: Sequence[Any], devices: DeviceLevels, call: str) -> Operands:
        """Open values, and see that a call can be made with them here and now: `DeviceLevels.require_usable`."""
        opened = cls(values)
        if not opened._is_plain and any(map(arrays.is_device, opened.arrays)):
            devices.require_usable(call)
        return opened

    def restore(self, results: Sequence[Any]) -> list[Any]:
        """Give native results the kinds that the values came in; `None` stays `None`."""
        if self._is_plain:
            return list(results)
        return [
            result
            if result is None or type(value) is np.ndarray
            else arrays.library_of(value).from_native(result, value)
            for result, value in zip(results, self._values, strict=True)
        ]


def _native(value: Any) -> Any:
    return value if type(value) is np.ndarray else arrays.library_of(value).to_native(value)


def result_arrays(specs: Sequence[Spec], dtypes: Sequence[np.dtype[Any]]) -> list[Any]:
    """Allocate results: C-contiguous arrays of the given dtypes."""
    return [arrays.empty(spec.shape, dtype, spec.device) for spec, dtype in zip(specs, dtypes, strict=True)]
