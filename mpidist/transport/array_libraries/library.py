"""Interface of an array library to mpidist."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist.transport.arrays import NativeArray

__all__ = ["ArrayLibrary", "kind_of"]


class ArrayLibrary(ABC):
    """Conversion of one library's values to native arrays, and back.

    Attributes:
        goes_by_type: Whether all values of a type that one value is of are of this library. Then `owns` is called once
            for each type.
        why_no_target: The text for users whose values take no results.
        knows_lists: Whether it caches lists of values: `known_natives`.
    """

    goes_by_type: bool = False
    why_no_target: str = ""
    knows_lists: bool = False

    @abstractmethod
    def owns(self, value: Any) -> bool:
        """Whether `value` is of this library. Must not import the library."""

    def to_native(self, value: Any) -> NativeArray:
        """View a value as a native array, without a copy where the library allows it; by default as NumPy does.

        Raises:
            TypeError: If the value cannot be viewed or copied. The text contains the remedy.
        """
        return np.asarray(value)

    def from_native(self, array: NativeArray, like: Any) -> Any:
        """Convert a native array to the kind of `like`. May return `array` itself, which the caller must not keep."""
        return array

    def from_natives(self, arrays: list[NativeArray], likes: Sequence[Any]) -> list[Any]:
        """Convert native arrays as `from_native` does, for values that are all of this library."""
        return [self.from_native(array, like) for array, like in zip(arrays, likes, strict=True)]

    def to_target(self, value: Any) -> NativeArray | None:
        """View a value as a native array through which results are written to the value; `None` if it has none."""
        return None

    def is_target(self, value: Any, array: NativeArray) -> bool:
        """Whether `to_native`, just now, has returned an array that `to_target` would return, too. False: perhaps."""
        return False

    def known_natives(self, values: list[Any]) -> list[NativeArray] | None:
        """Return the cached native arrays of a list that was noted; `None` for other lists. Quick."""
        return None

    def note_natives(self, values: list[Any], natives: Sequence[NativeArray]) -> bool:
        """Cache the native arrays that `to_native` has just returned for values of any libraries, where possible."""
        return False


def kind_of(value: Any) -> str:
    """Name the type of a value, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"
