"""Data sets of batches: every replica gets its part of each batch, and all ranks make the same number of steps."""
