"""Kernels and events of one GPU."""
