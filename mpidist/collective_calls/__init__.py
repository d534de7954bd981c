"""The collective calls of a strategy."""
