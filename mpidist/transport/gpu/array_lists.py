"""What kernels ask of the arrays of a list. A list that comes again is not asked again."""

from __future__ import annotations

import weakref
from operator import attrgetter
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.transport.gpu.copy_table import Dtypes
from mpidist.transport.native import native

__all__ = ["ArrayList", "ArrayLists", "address_of", "is_plain"]

_MAX_KNOWN: Final = 256

address_of: Final = attrgetter("data.ptr")
_is_contiguous: Final = attrgetter("_c_contiguous")  # CuPy makes an object of `flags`, which takes eight times as long
_dtype_of: Final = attrgetter("dtype")

Array = Any


@final
class ArrayList(NamedTuple):
    """What is asked."""

    dtypes: Dtypes  # of each array; one if all have the same, as hashing each takes longer
    places: np.ndarray[Any, Any]  # addresses, [n]
    are_plain: bool  # contiguous, and aligned to their numbers' size: no context of a GPU survives what is not

    @classmethod
    def of(cls, arrays: list[Array]) -> ArrayList:
        """Ask arrays of CuPy."""
        dtypes = tuple(map(_dtype_of, arrays))
        if dtypes and dtypes.count(dtypes[0]) == len(dtypes):
            dtypes = dtypes[:1]
        places = np.fromiter(map(address_of, arrays), np.uint64, len(arrays))
        widths = np.array([dtype.itemsize for dtype in dtypes], np.uint64)
        return cls(dtypes, places, all(map(_is_contiguous, arrays)) and not (places % widths).any())


@final
class ArrayLists:
    """Asks lists of arrays, and knows those lists again whose arrays all live. Keeps no array alive."""

    def __init__(self) -> None:
        # By the first array, and their number: weak references to the arrays, and what they answered.
        self._known: dict[tuple[int, int], tuple[list[Any], ArrayList]] = {}

    def of(self, arrays: list[Array]) -> ArrayList:
        """Ask arrays of CuPy, or return what they answered before, which is the same object then."""
        if native is None or not arrays:
            return ArrayList.of(arrays)
        first, key = arrays[0], (id(arrays[0]), len(arrays))
        refs, found = self._known.get(key, _NOTHING)
        if len(refs) == len(arrays) and native.are_known(arrays, arrays, refs, refs):
            return found
        asked = ArrayList.of(arrays)
        if asked.are_plain:  # and stay so
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            # Most lists never come again: the other arrays are noted when the first one does.
            noted = arrays if refs and refs[0]() is first else arrays[:1]
            self._known[key] = list(map(weakref.ref, noted)), asked
        return asked


_NOTHING: Final[tuple[list[Any], ArrayList]] = [], ArrayList.of([])


def is_plain(array: Array) -> bool:
    """Whether kernels can use an array: see `ArrayList`."""
    return bool(_is_contiguous(array)) and address_of(array) % array.itemsize == 0
