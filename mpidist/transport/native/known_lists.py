"""Lists of arrays that a program passes again and again, known by the arrays themselves."""

from __future__ import annotations

import weakref
from typing import Any, Final, Generic, TypeVar, final

from mpidist.transport.native.loading import native

__all__ = ["KnownLists"]

_MOST: Final = 256

_T = TypeVar("_T")


@final
class KnownLists(Generic[_T]):
    """What is known of lists whose arrays all live. Keeps no array alive, and knows none without the compiled part."""

    def __init__(self) -> None:
        # By the first array, and their number: weak references to the arrays, and what is known of them.
        self._known: dict[tuple[int, int], tuple[list[Any], _T]] = {}

    def find(self, arrays: list[Any]) -> _T | None:
        """Return what was noted of a list; `None` for other lists."""
        refs, found = self._known.get((id(arrays[0]), len(arrays)), _NOTHING) if arrays else _NOTHING
        is_known = len(refs) == len(arrays) and native is not None and native.are_known(arrays, arrays, refs, refs)
        return found if is_known else None

    def has_first_of(self, arrays: list[Any]) -> bool:
        """Whether a list of as many arrays that begins with the same array has been noted."""
        refs, _ = self._known.get((id(arrays[0]), len(arrays)), _NOTHING) if arrays else _NOTHING
        return bool(refs) and refs[0]() is arrays[0]

    def note(self, arrays: list[Any], answer: _T) -> None:
        """Note what is so as long as the arrays live. It is found from the second time on that a list is noted."""
        if native is None or not arrays:
            return
        # Most lists never come again: the other arrays are noted when the first one does.
        noted = arrays if self.has_first_of(arrays) else arrays[:1]
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[id(arrays[0]), len(arrays)] = list(map(weakref.ref, noted)), answer


_NOTHING: Final[tuple[list[Any], Any]] = [], None
