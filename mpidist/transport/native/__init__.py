"""The part of the library that is in C, where a compiler was there at installation. NumPy does the same without it."""

from mpidist.transport.native.known_lists import KnownLists
from mpidist.transport.native.loading import native

__all__ = ["KnownLists", "native"]
