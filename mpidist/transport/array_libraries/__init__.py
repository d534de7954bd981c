"""Arrays of any library, as native arrays (of NumPy or CuPy) and back: one file for each library."""

from mpidist.transport.array_libraries.libraries import (
    LIBRARIES,
    copied,
    known_library_of,
    library_of,
    writable_like,
)
from mpidist.transport.array_libraries.library import ArrayLibrary

__all__ = ["LIBRARIES", "ArrayLibrary", "copied", "known_library_of", "library_of", "writable_like"]
