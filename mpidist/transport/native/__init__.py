"""The part of the library that is in C, where a compiler was there at installation. NumPy does the same without it."""
