"""What kernels ask of the arrays of a list. A list that comes again is not asked again."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Final, NamedTuple, final

import numpy as np

from mpidist.transport.gpu.copy_table import Dtypes
from mpidist.transport.native.known_lists import KnownLists

__all__ = ["ArrayList", "ArrayLists", "address_of", "is_plain"]

address_of: Final = attrgetter("data.ptr")
_is_contiguous: Final = attrgetter("_c_contiguous")  # CuPy makes an object of `flags`, which takes eight times as long
_dtype_of: Final = attrgetter("dtype")
_size_of: Final = attrgetter("size")

Array = Any


@final
class ArrayList(NamedTuple):
    """What is asked."""

    dtypes: Dtypes  # of each array; one if all have the same, as hashing each takes longer
    sizes: tuple[int, ...]  # elements of each array
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
        are_plain = all(map(_is_contiguous, arrays)) and not (places % widths).any()
        return cls(dtypes, tuple(map(_size_of, arrays)), places, are_plain)


@final
class ArrayLists:
    """Asks lists of arrays, and knows those lists again whose arrays all live. Keeps no array alive."""

    def __init__(self) -> None:
        self._known: KnownLists[ArrayList] = KnownLists()

    def of(self, arrays: list[Array]) -> ArrayList:
        """Ask arrays of CuPy, or return what they answered before, which is the same object then."""
        found = self._known.find(arrays)
        if found is not None:
            return found
        asked = ArrayList.of(arrays)
        if asked.are_plain:  # and stay so
            self._known.note(arrays, asked)
        return asked


def is_plain(array: Array) -> bool:
    """Whether kernels can use an array: see `ArrayList`."""
    return bool(_is_contiguous(array)) and address_of(array) % array.itemsize == 0
