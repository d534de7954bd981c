"""Arrays of any library, as native arrays (of NumPy or CuPy) and back: one file for each library."""

from mpidist.transport.array_libraries.libraries import LIBRARIES, library_of
from mpidist.transport.array_libraries.library import ArrayLibrary, NativeArray

__all__ = ["LIBRARIES", "ArrayLibrary", "NativeArray", "library_of"]
