"""Arrays of any library, as native arrays (of NumPy or CuPy) and back: one file for each library."""
